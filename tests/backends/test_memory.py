"""What a model will take: read from headers alone, as much as it takes once it is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from engine.decode import never
from engine.errors import ModelError
from engine.models import hub, memory
from engine.models.load_transformers import load_transformers
from engine.models.loaders import MODEL_LOADERS
from engine.models.memory import RECORDINGS, Need, free_memory, memory_need
from engine.settings import Runtime
from tests.conftest import ROOT
from tests.support.processors import processor

SMALL = ROOT / "assets" / "models" / "tiny-chat" / "small"
CONFIG = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 100,
    "dtype": "bfloat16",
}
CACHE = 3 * 2 * 2 * 8 * (100 + 129)
"""The numbers in the cache of that config."""


def weights(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of which only the header is there."""
    head: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    text = json.dumps(head | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights(tmp_path / "model.safetensors", {"a": ("BF16", [10, 20]), "b": ("I64", [5])})
    return tmp_path


def test_each_answer_at_once_needs_a_cache(folder: Path) -> None:
    def need(parallel: int) -> Need:
        return MODEL_LOADERS.need(str(folder), Runtime(dtype="float32", parallel=parallel))

    assert need(0) == need(1) == Need(205, 840, 4 * CACHE)
    assert need(3) == Need(205, 840, 3 * 4 * CACHE)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype", "number"),
    [
        ("cpu", "auto", None),
        ("cuda:0", "auto", 2),
        ("cpu", "bfloat16", 2),
        ("cpu", "float32", 4),
        ("cuda", "float32", 4),
        ("mps:0", "float16", 2),
    ],
)
def test_numbers_count_as_they_will_be_loaded(
    folder: Path,
    device: str,
    dtype: str,
    number: int | None,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.machine.CPUINFO", processor(folder, native))
    number = number or (2 if native else 4)
    need = memory_need(str(folder), device, dtype, 8192)
    recordings = RECORDINGS if device.startswith("cuda") else 0
    cache = CACHE * number
    assert need == Need(205, 200 * number + 5 * 8, cache + recordings, shared=recordings)
    assert need.of(3).cache == 3 * cache + recordings
    assert need.total == need.weights + need.cache


def test_the_cache_is_of_the_context_that_will_be_used(folder: Path) -> None:
    assert memory_need(str(folder), "cpu", "float32", 50).cache == 3 * 2 * 2 * 8 * (50 + 129) * 4
    config = {"text_config": {"n_layer": 2, "n_head": 4, "n_embd": 32}, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert memory_need(str(folder), "mps", "auto", 50).cache == 2 * 2 * 4 * 8 * (50 + 129) * 2


def test_no_cache_is_longer_than_what_the_model_can_read() -> None:
    """Neither its own nor that of its head."""
    target = SMALL.parent / "target"
    head = target / "head"
    limit = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    full = memory_need(str(target), "cpu", "float32", limit, head)
    assert full.cache > memory_need(str(target), "cpu", "float32", limit).cache
    for longer in (limit + 1, 16 * limit):
        assert memory_need(str(target), "cpu", "float32", longer, head) == full
    assert memory_need(str(target), "cpu", "float32", limit - 1, head).cache < full.cache


def test_the_files_of_an_index_count_once_and_others_do_not(folder: Path) -> None:
    for name in ("one.safetensors", "two.safetensors", "consolidated.safetensors"):
        weights(folder / name, {name: ("F32", [7])})
    (folder / "model.safetensors").unlink()
    assert memory_need(str(folder), "cpu", "auto", 8).parameters == 21
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert memory_need(str(folder), "cpu", "auto", 8).parameters == 14


DAMAGES = {
    "no config": ("config.json", None),
    "a config of another kind": ("config.json", b"[1]"),
    "a config that is no JSON": ("config.json", b"{"),
    "no sizes": ("config.json", b"{}"),
    "no heads": ("config.json", json.dumps(CONFIG | {"num_attention_heads": 0}).encode()),
    "sizes of another kind": ("config.json", json.dumps(CONFIG | {"hidden_size": []}).encode()),
    "no weights": ("model.safetensors", None),
    "empty weights": ("model.safetensors", b""),
    "a header that is too long": ("model.safetensors", (1 << 40).to_bytes(8, "little")),
    "a header that is no JSON": ("model.safetensors", (4).to_bytes(8, "little") + b"{{{{"),
    "a header that is a list": ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    "a tensor without a shape": (
        "model.safetensors",
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"I8"}}',
    ),
    "an index of nothing": ("model.safetensors.index.json", b"{}"),
    "an index that is a list": ("model.safetensors.index.json", b"[]"),
    "an index of files that are gone": (
        "model.safetensors.index.json",
        b'{"weight_map": {"a": "../../gone.safetensors"}}',
    ),
}


@pytest.mark.parametrize(("name", "content"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_no_model_is_told(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match="cannot be used") as told:
        memory_need(str(folder), "cpu", "auto", 8192)
    assert str(folder) in str(told.value) and "safetensors" in str(told.value)


def test_a_model_on_the_hub_is_known_by_its_headers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    config = str(folder / "config.json")
    tensor = SimpleNamespace(dtype="BF16", shape=[3, 4], parameter_count=12)
    file = SimpleNamespace(tensors={"a": tensor, "b": tensor})
    found = SimpleNamespace(files_metadata={"model.safetensors": file})
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: config)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: found)
    assert memory_need("some/model", "cuda", "auto", 8).weights == 48

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network\nand much more")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", refuse)
    with pytest.raises(ModelError, match=r"no weights \(no network\)"):
        memory_need("some/model", "cuda", "auto", 8)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    with pytest.raises(ModelError, match="cannot be found"):
        memory_need("some/model", "cuda", "auto", 8)


def test_what_is_free_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=123))
    assert free_memory("cpu") == free_memory("mps:0") == 123


@pytest.mark.model
def test_the_need_is_what_a_loaded_model_takes() -> None:
    backend = load_transformers(str(SMALL), Runtime(device="cpu", context_length=600))
    need = memory_need(str(SMALL), "cpu", "auto", 600)
    assert (need.parameters, need.weights) == (backend.info.parameters, backend.info.memory_bytes)
    backend.prefill([5] * 300, never)
    assert 0 < backend.bytes < need.cache, "it grows with its text"
    backend.prefill([5] * 600, never)
    assert backend.bytes == need.cache, "a full context, and the largest tree behind it"


def test_bits_that_are_off_leave_the_weights_as_they_are() -> None:
    given = str(SMALL), "cpu", "float32", 64
    assert memory_need(*given, bits="off") == memory_need(*given)
