"""GGUF files made for a test: small models from nothing, and copies with other values.

A value is a number, a text or a list of them; it has the type that the key has in the source, else
the one that fits: bool, uint32, float32, string.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from engine.settings import Runtime

ARCHITECTURE = "general.architecture"
LAYERS, WIDTH, HEAD = 1, 128, 64
"""Of the embedded family's smallest model, which models of other architectures are made of."""
Values = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray | None]
FITTING = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    bytes: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}


def write_gguf(
    path: Path,
    architecture: str,
    values: Values,
    arrays: Mapping[str, np.ndarray],
    types: Mapping[str, list[GGUFValueType]] | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A file of these values and arrays; `types` are those of values that have one already, and
    `kinds` those of quantized arrays."""
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        inner = FITTING[type(value[0])] if isinstance(value, list) else None
        kind, *rest = (types or {}).get(key) or [FITTING[type(value)]]
        writer.add_key_value(key, value, kind, rest[-1] if rest else inner)
    for name, array in arrays.items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rewritten(
    source: Path,
    path: Path,
    values: Values | None = None,
    arrays: Arrays | None = None,
    architecture: str = "",
) -> Path:
    """A copy in which these values and arrays are others, or are gone where None is given.

    Another architecture takes over the values that were the former one's own.
    """
    reader = GGUFReader(source)
    fields = {name: item for name, item in reader.fields.items() if not name.startswith("GGUF.")}
    own = fields.pop(ARCHITECTURE).contents()
    architecture = architecture or own
    found: dict[str, Any] = {}
    types = {}
    for name, item in fields.items():
        name = architecture + name.removeprefix(own) if name.startswith(f"{own}.") else name
        found[name], types[name] = item.contents(), item.types
    found |= values or {}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors} | dict(arrays or {})
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    return write_gguf(
        path,
        architecture,
        {name: value for name, value in found.items() if value is not None},
        {name: array for name, array in tensors.items() if array is not None},
        types,
        kinds,
    )


def header_size(path: Path) -> int:
    return int(GGUFReader(path).data_offset)


def value_of(path: Path, key: str) -> Any:
    return GGUFReader(path).fields[key].contents()


def weights(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Random weights, large enough that what attention sees matters."""
    return (draw.standard_normal(shape) * 2 / np.sqrt(shape[-1])).astype(np.float32)


def byte_tokens() -> list[str]:
    """The 256 bytes as byte-level vocabularies write them."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


WORDS = ["<s>", "</s>", *byte_tokens(), "Ġt", "he"]
BYTES: dict[str, Any] = {
    "general.file_type": 0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(WORDS) - 2),
    "tokenizer.ggml.merges": ["Ġ t", "h e"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": (
        "{% for m in messages %}{{ m.role }}={{ m.content }}</s>{% endfor %}"
    ),
}
BYTES_TYPES = {"tokenizer.ggml.token_type": [GGUFValueType.ARRAY, GGUFValueType.INT32]}
"""What a header says of a vocabulary of single bytes and of how a conversation is written."""


def tiny_gguf(path: Path, **values: Any) -> Path:
    """A model of one layer over single bytes, of 80 KB, with random weights.

    Values are named as in the header, with "__" for dots.
    """
    draw, width = np.random.default_rng(0), 32
    arrays = {
        "token_embd.weight": weights(draw, len(WORDS), width),
        "output_norm.weight": np.ones(width, np.float32),
        "blk.0.attn_norm.weight": np.ones(width, np.float32),
        "blk.0.ffn_norm.weight": np.ones(width, np.float32),
        "blk.0.ffn_gate.weight": weights(draw, 64, width),
        "blk.0.ffn_up.weight": weights(draw, 64, width),
        "blk.0.ffn_down.weight": weights(draw, width, 64),
    }
    for name in ("q", "k", "v", "output"):
        arrays[f"blk.0.attn_{name}.weight"] = weights(draw, width, width)
    known = BYTES | {
        "llama.context_length": 256,
        "llama.embedding_length": width,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
    }
    known |= {name.replace("__", "."): value for name, value in values.items()}
    kept = {key: value for key, value in known.items() if value is not None}
    return write_gguf(path, "llama", kept, arrays, BYTES_TYPES)


def window_gguf(source: Path, path: Path, window: int) -> Path:
    """A model whose layers see a window of the text only, from the embedded smallest one."""
    norms = {
        "post_attention_norm": WIDTH,
        "post_ffw_norm": WIDTH,
        "attn_q_norm": HEAD,
        "attn_k_norm": HEAD,
    }
    arrays = {
        f"blk.{layer}.{name}.weight": np.ones(size, np.float32)
        for layer in range(LAYERS)
        for name, size in norms.items()
    }
    values = {f"gemma3.attention.{name}_length": HEAD for name in ("key", "value")}
    values["gemma3.attention.sliding_window"] = window
    return rewritten(source, path, values, arrays, "gemma3")


def longrope_gguf(path: Path, short: float, long: float, original: int = 64) -> Path:
    """A tiny model whose rotary factors are others for texts of more than `original` tokens."""
    source = tiny_gguf(path.with_suffix(".source.gguf"))
    values = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": original,
    }
    arrays = {
        f"rope_factors_{name}.weight": np.linspace(1, factor, 8, dtype=np.float32)
        for name, factor in (("short", short), ("long", long))
    }
    return rewritten(source, path, values, arrays)


def opened_gguf(path: Path, **settings: Any) -> Any:
    """The backend of a file, on one thread; what it is, is found out in this process."""
    from engine.models.loaders import load
    from engine.models.probe import found

    with patch("engine.models.probe.probe", found):
        return load(str(path), Runtime(**{"threads": 1, **settings}))


def alone(backend: Any, tokens: Sequence[int]) -> np.ndarray:
    """The logits after a text that is read in one go into an empty cache, without a tree."""
    from engine.backends import llamacpp

    return llamacpp.alone(backend, tokens)


def check_cells(backend: Any, where: str = "") -> None:
    """Every sequence holds what the backend believes that it does."""
    import llama_cpp

    order, first = list(backend.order), backend.place.first
    assert sorted(order) == [*range(first, first + len(order))], where
    assert not backend.pending, where
    for number in order:
        held = len(backend.cached) if number == order[0] else backend.held[number]
        assert held <= len(backend.cached), (where, number)
        found = llama_cpp.llama_memory_seq_pos_max(backend.memory, number)
        assert found == held - 1, (where, number, found, held)


class Saved:
    """Counts the states that the library is asked to write and to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import llama_cpp

        self.written = self.read = 0
        write, read = llama_cpp.llama_state_seq_get_data, llama_cpp.llama_state_seq_set_data

        def writing(*given: Any) -> int:
            self.written += 1
            return int(write(*given))

        def reading(*given: Any) -> int:
            self.read += 1
            return int(read(*given))

        monkeypatch.setattr(llama_cpp, "llama_state_seq_get_data", writing)
        monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data", reading)
