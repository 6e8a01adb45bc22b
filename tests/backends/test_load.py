"""Loading: what cannot be used is refused in a sentence, and a hub id is fetched and remembered."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.errors import ModelError
from engine.models.format import recommended
from engine.models.load_transformers import (
    choose_attention,
    load_tokenizer,
    load_transformers,
    read_as,
)
from engine.settings import Runtime, Sampling
from engine.thinking import MARKS
from tests.conftest import EMBEDDED, ROOT
from tests.support.backends import load, save_model
from tests.support.hub import Hub, serving
from tests.support.processors import processor

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama-gqa", tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound model, to be broken."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def refused(folder: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_transformers(str(folder), Runtime(**{"device": "cpu", **options}))
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text
    return text


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_what_is_known_of_a_loaded_model(embedded: Any) -> None:
    info = embedded.info
    assert (info.name, info.kind, info.device) == ("target", "transformers", "cpu")
    assert (info.vocabulary_size, info.context_length) == (6144, 2048)
    assert info.can_tree and info.note == "" and info.dtype == "float32" and info.threads == 1
    assert info.eos_ids == {1} and info.memory_bytes == 4 * info.parameters > 1_000_000
    assert len(info.fingerprint) == len(info.tokenizer_fingerprint) == 16


def test_the_marks_of_thinking_are_those_of_the_tokenizer(folder: Path) -> None:
    def begins() -> list[str]:
        return [marks.begin for marks in load(folder).info.marks]

    assert begins() == [marks.begin for marks in MARKS], "nothing is known of them"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|channel>", "<channel|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    assert begins() == ["<|channel>thought"]
    tokenizer.chat_template += "{{ '[THINK]' }}"
    tokenizer.save_pretrained(folder)
    assert begins() == ["[THINK]", "<|channel>thought"]


def test_the_token_that_ends_a_call_ends_an_answer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    before, call = load(folder).info.eos_ids, tokenizer.convert_tokens_to_ids("<|call|>")
    assert call not in before, "the template writes no calls"
    tokenizer.chat_template = "{{ '<|channel|>commentary to=functions.f' }}"
    tokenizer.save_pretrained(folder)
    assert load(folder).info.eos_ids == load_tokenizer(str(folder)).info.eos_ids == before | {call}


def test_attention_that_plans_every_length_is_switched_off_on_a_gpu_alone() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for device, enabled in (("cpu", True), ("cuda:0", False)):
            choose_attention(torch.device(device))
            assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_of_another_program_begins_as_the_tokenizer_wants(folder: Path, adds: bool) -> None:
    """A token that begins a text may be known and not wanted, as GPT-2's."""
    path = folder / "tokenizer.json"
    begins = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    change(
        path,
        post_processor={
            "type": "TemplateProcessing",
            "single": begins if adds else begins[1:],
            "pair": begins,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    )
    info = load(folder).info
    assert info.begin == ("<s>" if adds else "")


def test_the_context_is_the_smaller_of_the_models_and_the_wanted_one(sound: Path) -> None:
    assert load(sound).info.context_length == 1024
    assert load(sound, context_length=100).info.context_length == 100


def test_shared_forwards_are_tried_where_answers_are_parallel_and_nowhere_else(
    sound: Path,
) -> None:
    """It takes time at the start."""
    assert load(sound).joins and not load(sound, parallel=1).joins


@pytest.mark.parametrize(
    ("stored", "native", "wanted", "loaded"),
    [
        ("bfloat16", True, "auto", "bfloat16"),
        ("bfloat16", False, "auto", "float32"),
        ("bfloat16", True, "float32", "float32"),
        ("float16", True, "auto", "float32"),
        ("float32", True, "auto", "float32"),
        ("float32", False, "bfloat16", "bfloat16"),
    ],
)
def test_the_precision_of_weights_on_a_processor(
    sound: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    native: bool,
    wanted: str,
    loaded: str,
) -> None:
    """The checkpoint's own only where it is bfloat16 and the processor computes with that."""
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored))
    model.save_pretrained(folder)
    monkeypatch.setattr("engine.machine.CPUINFO", processor(tmp_path, native))
    info = load(folder, dtype=wanted).info
    assert info.dtype == loaded and info.can_tree
    assert info.memory_bytes == info.parameters * (4 if loaded == "float32" else 2)


@pytest.mark.parametrize(
    ("family", "capability", "wanted", "kind"),
    [
        ("llama", (8, 0), "auto", "BF16"),
        ("llama", (7, 5), "auto", "F16"),
        ("llama", (7, 5), "bfloat16", "BF16"),
        ("llama", (7, 5), "float32", "F32"),
        ("gemma3_text", (7, 5), "auto", "BF16"),
    ],
)
def test_the_precision_of_weights_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    capability: tuple[int, int],
    wanted: str,
    kind: str,
) -> None:
    """An older one has no matrix units for bfloat16, and not every model fits into float16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = AutoConfig.for_model(family, dtype="bfloat16")
    assert read_as(config, torch.device("cuda:0"), wanted, 0) == kind


def test_the_demonstration_model_computes_in_float32_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are stored in float16, and its texts are promised to be the same."""
    monkeypatch.setattr("engine.machine.CPUINFO", processor(tmp_path, True))
    assert load(EMBEDDED).info.dtype == "float32"


def test_names_and_fingerprints(sound: Path, tmp_path: Path) -> None:
    """The same weights elsewhere are the same model; other weights or words are not."""
    first = load(sound).info
    moved = load(Path(shutil.copytree(sound, tmp_path / "elsewhere"))).info
    assert moved.name == "elsewhere"
    assert moved.fingerprint == first.fingerprint
    assert moved.tokenizer_fingerprint == first.tokenizer_fingerprint
    other = shutil.copytree(sound, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert load(other).info.fingerprint != first.fingerprint
    assert load(other).info.tokenizer_fingerprint == first.tokenizer_fingerprint
    assert load(EMBEDDED).info.tokenizer_fingerprint != first.tokenizer_fingerprint


def test_missing_folders_and_folders_without_a_config(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no config.json" in refused(tmp_path)
    assert "does not exist" in refused("./nowhere/at/all")
    assert "does not exist" in refused("~/no-such-model-folder")
    (tmp_path / "file").write_text("x")
    assert f"{str(tmp_path / 'file')!r} is a file" in refused(tmp_path / "file")


def test_a_home_folder_is_found(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sound, tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_transformers("~/model", Runtime(device="cpu")).info.name == "model"


def test_damaged_files(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (b"", b"\x00" * 100, whole[: len(whole) // 2], whole[:-3], b"\xff" * 8 + whole):
        weights.write_bytes(broken)
        assert "could not be loaded" in refused(folder)
    weights.write_bytes(whole)
    for name in ("config.json", "tokenizer.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])
        assert "could not be loaded" in refused(folder)
        (folder / name).write_text(text)
    assert load(folder).info.can_tree
    for path in folder.glob("token*"):
        path.unlink()
    assert "could not be loaded" in refused(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"model_type": "no-such-type"},
        {"model_type": "vit"},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    folder: Path, values: dict[str, Any]
) -> None:
    """A layer that is not in the file would be filled with random numbers."""
    change(folder / "config.json", **values)
    assert "could not be loaded" in refused(folder)


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "it ran"))


def test_pickled_weights_are_refused_unread(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    proof = tmp_path / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(proof)))
    assert "safetensors" in refused(folder)
    assert not proof.exists()


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    (folder / "configuration_evil.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    change(
        folder / "config.json",
        model_type="evil",
        auto_map={
            "AutoConfig": "configuration_evil.EvilConfig",
            "AutoModelForCausalLM": "modeling_evil.EvilModel",
        },
    )
    assert "could not be loaded" in refused(folder)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        *(("device", value, "auto, cpu") for value in ("abacus", "cuda:7", "", "meta")),
        *(("dtype", value, "bfloat16") for value in ("float3", "int8", "", "torch.float32")),
    ],
)
def test_unknown_devices_and_dtypes_are_refused_with_the_known_ones(
    sound: Path, name: str, value: str, known: str
) -> None:
    text = refused(sound, **{name: value})
    assert repr(value) in text and known in text


# A hub id, against a server on this machine that speaks the hub's protocol.


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(sound: Path) -> Iterator[Hub]:
    with serving(Hub({"someone/tiny": files_of(sound)})) as hub:
        yield hub


LOADER = """
import sys
from engine.models.load_transformers import load_transformers
from engine.errors import ModelError
from engine.settings import Runtime
try:
    info = load_transformers(sys.argv[1], Runtime(device="cpu")).info
    print(info.name, info.can_tree, info.fingerprint, info.tokenizer_fingerprint)
except ModelError as error:
    print(error)
    sys.exit(2)
"""


def in_process(source: str, endpoint: str, home: Path, **environment: str) -> tuple[int, str]:
    """Load in a process of its own: the hub's address is read when its client is imported."""
    settings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", LOADER, source],
        cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip()


@pytest.mark.soak
def test_a_hub_id_is_fetched_once_and_works_offline_afterwards(
    hub: Hub, sound: Path, tmp_path: Path
) -> None:
    status, first = in_process("someone/tiny", hub.url, tmp_path)
    assert status == 0 and first.startswith("someone/tiny True ")
    assert first.split()[-1] == load(sound).info.tokenizer_fingerprint
    assert len(hub.fetched("model.safetensors")) == 1
    hub.asked.clear()
    status, again = in_process("someone/tiny", hub.url, tmp_path, HF_HUB_OFFLINE="1")
    assert (status, again) == (0, first) and hub.asked == []


@pytest.mark.soak
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_id_without_a_network_is_a_clear_error(tmp_path: Path, offline: str) -> None:
    """Port 9 refuses connections at once: what takes long here is what the client waits."""
    status, text = in_process(
        "someone/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE=offline
    )
    assert status == 2 and "'someone/tiny' could not be loaded" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, Sampling(0.6, 20, 0.95)),
        ({"temperature": None}, Sampling()),
        ({"temperature": -3.0}, Sampling()),
    ],
)
def test_the_makers_sampler_settings_are_taken_where_they_are_usable(
    given: dict[str, float | None], expected: Sampling
) -> None:
    assert recommended(given) == expected
