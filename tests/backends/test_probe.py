"""The probe: what a GGUF file needs, told by a process that may end over it in ours' place."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from engine.models import probe as probes
from engine.models.probe import Probe, probe
from engine.settings import Runtime
from tests.conftest import ROOT
from tests.support.gguf_files import header_size, opened_gguf, rewritten, tiny_gguf

pytestmark = pytest.mark.gguf
RUNTIME = Runtime(threads=1)
GAVE_UP = "its header is damaged; llama.cpp gave up over it"
ENDING = {
    "a way to scale positions that is none": {"llama__rope__scaling__type": "xyz"},
    "no layers": {"llama__block_count": 0},
    "a token twice": {"tokenizer__ggml__tokens": ["<s>", *(f"t{at}" for at in range(258)), "<s>"]},
    "no tokens of single bytes": {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__scores": [0.0] * 260,
    },
}
"""Headers over which the library ends the process, the last one only once it tokenizes a text."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_the_need_is_what_a_loaded_model_takes(tiny: Path, gguf_files: dict[str, Path]) -> None:
    for path in (tiny, gguf_files["small-F32"], gguf_files["mid-Q8_0"]):
        found, info = probe(path, RUNTIME), opened_gguf(path).info
        assert found.problem == ""
        assert (found.parameters, found.weights) == (info.parameters, info.memory_bytes)
        assert found.weights < path.stat().st_size
        assert found.cache > 0


def cache_of(path: Path, **settings: Any) -> int:
    return probes.found(path, Runtime(threads=1, **settings)).cache


def test_the_cache_follows_the_settings(gguf_files: dict[str, Path]) -> None:
    """Two layers, keys and values of 64 numbers each."""
    path = gguf_files["small-F32"]
    short, long = (cache_of(path, context_length=length) for length in (256, 2048))
    assert long - short >= (2048 - 256) * 2 * 2 * 64 * 4
    half = cache_of(path, context_length=2048, cache_type="f16")
    assert long - half == pytest.approx((2048 + 256) * 2 * 2 * 64 * 2, rel=0.05)
    few = cache_of(path, context_length=2048, cache_type="q8_0")
    assert few < half
    assert cache_of(path, batch_size=2048) > cache_of(path, batch_size=512)
    assert cache_of(path, context_length=1 << 20) == cache_of(path, context_length=2048)


@pytest.mark.parametrize("changes", ENDING.values(), ids=ENDING)
def test_what_ends_the_library_ends_another_process(
    tmp_path: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", **changes)
    assert probe(path, RUNTIME) == Probe(GAVE_UP)
    assert capfd.readouterr() == ("", ""), "nor does it print where ours would"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokenizer__ggml__model": "none", "llama__vocab_size": 260}, "it has no vocabulary"),
        ({"tokenizer__ggml__model": "no_vocab", "llama__vocab_size": 260}, "has no vocabulary"),
        ({"tokenizer__ggml__pre": "xyz"}, "unknown pre-tokenizer type: 'xyz'"),
        ({"llama__attention__causal": False}, "no model that writes text from left to right"),
        ({"llama__attention__layer_norm_rms_epsilon": -1.0}, "epsilon is -1.000000, not a number"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, not a num"),
        ({"llama__attention__group_norm_epsilon": -0.5}, "norm_epsilon is -0.500000, not a num"),
        ({"llama__block_count": 2}, "tensor 'blk.1.attn_norm.weight' not found"),
        ({"llama__embedding_length": 64}, "invalid n_rot: 16, expected 32"),
        ({"llama__feed_forward_length": 65}, "has wrong shape"),
        ({"llama__expert_count": 4, "llama__expert_used_count": 2}, "not found"),
    ],
    ids=str,
)
def test_headers_that_do_not_fit_are_told(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    """What the library would end the process over later is found here as well."""
    path = tiny_gguf(tmp_path / "tiny.gguf", **changes)
    found = probes.found(path, RUNTIME)
    assert problem in found.problem and "\n" not in found.problem
    assert not found.problem.endswith(".") and found.weights == 0


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("gemma", "key not found in model: gemma."),
        ("xyzzy", "unknown model architecture: 'xyzzy'"),
        ("bert", "key not found in model: bert."),
        ("clip", "CLIP cannot be used as main model"),
        ("llada", "it keeps no cache, so it cannot chat"),
    ],
)
def test_other_architectures_are_told(
    tiny: Path, tmp_path: Path, architecture: str, problem: str
) -> None:
    """The first two by changing the name alone, as damage would."""
    path = tmp_path / "other.gguf"
    if len(architecture) == len("llama") and architecture != "llada":
        key = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"
        data = tiny.read_bytes()
        assert key + b"llama" in data
        path.write_bytes(data.replace(key + b"llama", key + architecture.encode()))
    else:
        rewritten(tiny, path, architecture=architecture)
    assert problem in probes.found(path, RUNTIME).problem


def test_a_model_with_an_encoder_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_model_has_encoder", lambda model: True)
    assert "no model that writes text" in probes.found(tiny, RUNTIME).problem
    monkeypatch.undo()
    monkeypatch.setattr(llama_cpp, "llama_model_has_decoder", lambda model: False)
    assert "no model that writes text" in probes.found(tiny, RUNTIME).problem


def test_a_file_that_ends_early_is_told_wherever_it_ends(tiny: Path, tmp_path: Path) -> None:
    """In the magic, in a value, in the tokens, in the tensors' names, in the numbers."""
    data, header, path = tiny.read_bytes(), header_size(tiny), tmp_path / "cut.gguf"
    ends = [1, 4, 5, 8, 16, 23, 24, 25, 60, *range(100, header, 331), header - 40, header]
    for end in [*ends, header + 1, header + 5000, len(data) - 40]:
        path.write_bytes(data[:end])
        assert probes.found(path, RUNTIME).problem, f"cut at {end}"
    path.write_bytes(data)
    assert probes.found(path, RUNTIME).problem == ""


@pytest.mark.soak
def test_a_thousand_damaged_headers(tiny: Path, tmp_path: Path) -> None:
    """Whatever the library makes of one, it never ends a process that the probe let go on."""
    source = tmp_path / "tiny.gguf"
    source.write_bytes(tiny.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gguf_damage", str(source), "20261121", "1000"],
        cwd=ROOT, env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tries = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(tries) == 1000
    kinds = Counter[str]()
    for what, said, used in tries:
        assert not str(said).startswith("raised"), (what, said)
        assert isinstance(used, str) and not used.startswith("raised"), (what, used)
        kinds["ended" if isinstance(said, int) else "sound" if said == "fine" else "refused"] += 1
    assert kinds["refused"] > 500 and kinds["sound"] > 100 and kinds["ended"] > 5, kinds


def test_a_header_that_takes_forever_is_given_up(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SECONDS", 0.01)
    found = probe(tiny, RUNTIME)
    assert found.problem == "llama.cpp was not done with its header after 0 s"


def test_a_library_that_does_not_start_is_no_damaged_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise OSError('libllama.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probe(tiny, RUNTIME)
    assert found.problem == "llama.cpp cannot be run here (OSError: libllama.so: cannot open)"


def test_files_of_the_folder_it_is_run_in_do_not_matter(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "llama_cpp.py", "engine.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')\n")
    (tmp_path / "here.gguf").write_bytes(tiny.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert probe(Path("here.gguf"), RUNTIME) == probes.found(tiny, RUNTIME)


@pytest.mark.parametrize("name", ["-x sp ace.gguf", "日本\né.gguf"])
def test_any_name_of_a_file_is_one(tiny: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(tiny.read_bytes())
    assert probe(path, RUNTIME).parameters > 0


def test_a_name_that_is_no_text_is_one_as_well(tiny: Path, tmp_path: Path) -> None:
    """A file system holds bytes."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.gguf"))
    path.write_bytes(tiny.read_bytes())
    assert probe(path, RUNTIME).parameters > 0
    assert opened_gguf(path).info.parameters > 0
