"""Tests once, in a separate process, whether llama.cpp's fast path works on this machine.

    python -m engine.backends.fast_path FOLDER TYPE [TYPE ...]

llama.cpp rearranges weights for the processor that it runs on (tiles of Intel's AMX, AVX-512, ...)
and has kernels that read them in that form. On some machines such a kernel crashes the process at
the first prompt, and nothing inside that process can prevent it. Before the first file with certain
types of weights is loaded, a separate process therefore reads a prompt with a tiny model of the
same types. It ends with status 0 unless the library crashes. If it crashes, files of these types
run without rearranged weights: slower, but safely.

The model has one layer per type. Its sizes are multiples of everything that the kernels require: 32
rows, 256 columns of K-quants, 2,048 columns for the tiles of older versions. The prompt is longer
than the few tokens that are still multiplied row by row. All weights are zero, which is a valid
value of every type, so the file needs no disk space.

The result is remembered as long as the library, the processor and the system stay the same. A trial
takes 0.2 s, so it is made on every machine and for every type.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path

from platformdirs import user_cache_path

from engine.backends.base import digest
from engine.machine import usual_threads
from engine.process import RAISED, ending, run

SECONDS = 60.0
FAULT = "STRATA_FAULT"
"""The environment variable that simulates faults in tests: "extra_bufts" makes every trial with
quantized weights crash, as the fast path does on some processors with AMX."""
PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
"""The constant properties of a processor in CPUINFO."""
CPUINFO = Path("/proc/cpuinfo")

WIDTH, INNER, HEADS, TOKENS = 256, 2048, 4, 32
PROMPT, CONTEXT = 128, 256
EXACT = {"f32", "f16", "bf16"}
VALUES: dict[str, str | int | float] = {
    "llama.context_length": CONTEXT,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": WIDTH // HEADS,
    "llama.vocab_size": TOKENS,
    "tokenizer.ggml.model": "no_vocab",
}
SQUARES = ("attn_q", "attn_k", "attn_v", "attn_output")
MATRICES = dict.fromkeys(SQUARES, (WIDTH, WIDTH)) | {
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
"""The matrices of a layer: rows and columns."""


def problem(types: Collection[str]) -> str:
    """How the fast path fails with weights of these types; "" if it works."""
    name, here = " ".join(sorted(types)), machine()
    known = remembered(here)
    if name in known:
        return known[name]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ended = run("engine.backends.fast_path", folder, *sorted(types), seconds=SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        return "cannot be tried"
    if ended.returncode in (RAISED, -signal.SIGTERM):  # The latter when the program is ended.
        return "cannot be tried"
    known[name] = f"crashes ({ending(ended.returncode)})" if ended.returncode else ""
    remember(here, known)
    return known[name]


def machine() -> str:
    """Identifies everything that a trial depends on: the library's build, the processor, the
    system."""
    found = find_spec("llama_cpp")
    places = [Path(place) / "lib" for place in (found and found.submodule_search_locations) or ()]
    parts = [platform.machine(), platform.release(), platform.version(), processor()]
    for file in sorted(file for place in places for file in place.glob("*")):
        state = file.stat()
        parts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    return digest([*parts, os.environ.get(FAULT, "")])


def processor() -> str:
    try:
        lines = CPUINFO.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in PROCESSOR)


def results() -> Path:
    """Where the results of trials are kept. Raises RuntimeError if the user has no folder."""
    return user_cache_path("strata", appauthor=False) / "fast_path.json"


def remembered(here: str) -> dict[str, str]:
    """The results of trials on this machine by types; none if the file is damaged."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        stored = json.loads(results().read_text("utf-8"))
        if stored["machine"] == here:
            return {str(types): str(found) for types, found in stored["found"].items()}
    return {}


def forget() -> None:
    """Forget all trials, because a process that used these libraries has crashed."""
    with suppress(OSError, RuntimeError):
        results().unlink(missing_ok=True)


def remember(here: str, known: dict[str, str]) -> None:
    """Write the file atomically. If it cannot be written, each load repeats the trial."""
    with suppress(OSError, RuntimeError):
        path = results()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".partial", delete=False
        ) as file:
            json.dump({"machine": here, "found": known}, file)
        os.replace(file.name, path)


# the process of a trial


def write(path: Path, names: Sequence[str]) -> None:
    """Write a model of these types of weights: a header, and zeros that take no space."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quant_shape_to_byte_shape

    float32 = GGMLQuantizationType.F32
    tensors: dict[str, tuple[GGMLQuantizationType, tuple[int, ...]]]
    tensors = {"token_embd": (float32, (TOKENS, WIDTH)), "output_norm": (float32, (WIDTH,))}
    for layer, name in enumerate(names):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}"] = float32, (WIDTH,)
        for matrix, sizes in MATRICES.items():
            tensors[f"blk.{layer}.{matrix}"] = GGMLQuantizationType[name.upper()], sizes
    types = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    writer, size = GGUFWriter(path, "llama"), 0
    for key, value in {**VALUES, "llama.block_count": len(names)}.items():
        writer.add_key_value(key, value, types[type(value)])
    for tensor, (kind, shape) in tensors.items():
        taken = prod(map(int, quant_shape_to_byte_shape(shape, kind)))
        writer.add_tensor_info(f"{tensor}.weight", shape, np.dtype(np.float32), taken, kind)
        size += writer.ggml_pad(taken, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, writer.ggml_pad(path.stat().st_size, writer.data_alignment) + size)


def read(path: Path, simulate_fault: bool) -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, PROMPT, PROMPT
    # The right to use tiles belongs to a thread, so several threads have to be tested.
    settings.n_threads = settings.n_threads_batch = max(2, usual_threads())
    context = model and llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("llama.cpp does not open the model of the trial")
    tokens = (llama_cpp.llama_token * PROMPT)(*(place % TOKENS for place in range(PROMPT)))
    if simulate_fault:
        signal.raise_signal(signal.SIGSEGV)
    for count in (PROMPT, 1):
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)):
            raise RuntimeError("llama.cpp does not read the prompt of the trial")


def main(folder: Path, types: Sequence[str]) -> None:
    path = folder / "trial.gguf"
    write(path, types)
    read(path, os.environ.get(FAULT) == "extra_bufts" and not EXACT.issuperset(types))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
