"""Reads a prompt with a tiny model of certain types of weights, by llama.cpp's fast path.

    python -m engine.backends.fast_path_trial FOLDER TYPE [TYPE ...]

Run by engine/backends/fast_path.py. It ends with status 0 unless the library ends it first.

The model has one layer per type. Its sizes are multiples of all that the kernels ask for: 32 rows,
256 columns of K-quants, 2,048 columns where the tiles of older versions want that many. The prompt
is longer than the few tokens that are still multiplied row by row. All weights are zero, which is a
valid value of every type, so the file needs no disk space.
"""

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library

from engine.backends.fast_path import FAULT

WIDTH, INNER, HEADS, TOKENS = 256, 2048, 4, 32
PROMPT, CONTEXT = 128, 256
EXACT = {"f32", "f16", "bf16"}
ALIGNMENT = 32
VALUES: dict[str, str | int | float] = {
    "general.architecture": "llama",
    "llama.context_length": CONTEXT,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.vocab_size": TOKENS,
    "tokenizer.ggml.model": "no_vocab",
}
MATRICES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (WIDTH, INNER),
    "ffn_up": (WIDTH, INNER),
    "ffn_down": (INNER, WIDTH),
}
"""Of a layer: columns and rows."""
GGML = load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")
GGML.ggml_type_name.restype = ctypes.c_char_p
GGML.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
GGML.ggml_row_size.restype = ctypes.c_size_t


def text(value: str) -> bytes:
    """A text in a GGUF file."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value: str | int | float) -> bytes:
    """A key of a GGUF file's header, the type of its value (uint32, float32 or text), and it."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    kind, form = (4, "I") if isinstance(value, int) else (6, "f")
    return text(key) + struct.pack(f"<I{form}", kind, value)


def tensors(types: Sequence[int]) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and type of every tensor of the model."""
    plain = llama_cpp.GGML_TYPE_F32
    found: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (WIDTH, TOKENS), plain),
        ("output_norm.weight", (WIDTH,), plain),
    ]
    for layer, kind in enumerate(types):
        for name in ("attn_norm", "ffn_norm"):
            found.append((f"blk.{layer}.{name}.weight", (WIDTH,), plain))
        for name, shape in MATRICES.items():
            found.append((f"blk.{layer}.{name}.weight", shape, kind))
    return found


def aligned(size: int) -> int:
    """The next place where a tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write(path: Path, types: Sequence[int]) -> None:
    """Write the model: a header, and zeros that take no space."""
    values, listed, place = {**VALUES, "llama.block_count": len(types)}, tensors(types), 0
    header = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(values))
    header += b"".join(pair(key, value) for key, value in values.items())
    for name, shape, kind in listed:
        columns, *rows = shape
        header += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", kind, place)
        place += aligned(GGML.ggml_row_size(kind, columns) * (rows[0] if rows else 1))
    with path.open("wb") as file:
        file.write(header)
        file.truncate(aligned(len(header)) + place)


def numbers(names: Collection[str]) -> list[int]:
    """The library's numbers of types by their names."""
    known = {GGML.ggml_type_name(kind): kind for kind in range(llama_cpp.GGML_TYPE_COUNT)}
    return [known[name.encode()] for name in names]


def read(path: Path, made_up: bool) -> None:
    """Load the model with rearranged weights, read a prompt, then one more token."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, PROMPT, PROMPT
    # Rights to use tiles belong to threads: what the first one may, another may not.
    settings.n_threads = settings.n_threads_batch = max(2, (os.cpu_count() or 2) // 2)
    context = model and llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp does not open the model of the trial")
    tokens = (llama_cpp.llama_token * PROMPT)(*(place % TOKENS for place in range(PROMPT)))
    if made_up:
        signal.raise_signal(signal.SIGSEGV)
    for count in (PROMPT, 1):
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)):
            raise RuntimeError("llama.cpp does not read the prompt of the trial")


def main(folder: Path, types: Sequence[str]) -> None:
    """The whole trial, in a folder that is there already."""
    llama_cpp.llama_backend_init()
    path = folder / "trial.gguf"
    write(path, numbers(types))
    read(path, os.environ.get(FAULT) == "extra_bufts" and not EXACT.issuperset(types))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
