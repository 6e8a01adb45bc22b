"""The trial of llama.cpp's fast path: a process that may crash in ours' place, and what follows."""

import ast
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engine import process
from engine.backends import fast_path
from engine.backends.llamacpp import alone
from engine.models.loaders import load
from engine.models.probe import found, probe
from engine.settings import Runtime
from tests.conftest import ROOT

pytestmark = pytest.mark.gguf
RUNTIME = Runtime(threads=1)
CRASHES = "crashes (SIGSEGV)"
TRIAL = "engine.backends.fast_path"
WEIGHTS = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K",
    "q6_K", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs",
    "tq1_0", "tq2_0", "mxfp4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test's findings are kept."""
    path = tmp_path / "cache" / "fast_path.json"
    monkeypatch.setattr(fast_path, "results", lambda: path)
    return path


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose fast path crashes."""
    monkeypatch.setenv(fast_path.FAULT, "extra_bufts")


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without faults that are made up."""
    monkeypatch.delenv(fast_path.FAULT, raising=False)


class Trials:
    """Counts the processes that are started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.types: list[tuple[str, ...]] = []
        monkeypatch.setattr(fast_path, "run", self.run)

    def run(self, module: str, folder: str, *types: str, seconds: float) -> Any:
        self.types.append(types)
        return process.run(module, folder, *types, seconds=seconds)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch)


# The trial.


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_trial_reads_a_prompt_with_weights_of_the_type(
    sound: None, tmp_path: Path, kind: str
) -> None:
    """On a machine whose fast path crashes this is how it shows, and only for quantized weights: by
    an access to memory, or with AMX by instructions for which the library has not asked."""
    done = process.run(TRIAL, str(tmp_path), "f32", kind, seconds=60)
    said = done.stderr.decode("utf-8", "replace")
    if kind != "f32":
        assert f"- type {kind:>4}:    7 tensors" in said
    assert "buffer size" in said.rpartition("llama_context:")[2], "a context was made"
    allowed = {0} if kind in ("f32", "f16", "bf16") else {0, -signal.SIGSEGV, -signal.SIGILL}
    assert done.returncode in allowed, said
    assert (tmp_path / "trial.gguf").stat().st_blocks * 512 < 1 << 16, "zeros take no space"


def test_a_real_crash_is_found() -> None:
    """The library has no kernel for rows of this type, and calls it nevertheless."""
    assert fast_path.problem(["f32", "q8_K"]) == CRASHES


def test_a_made_up_crash_is_found_where_weights_are_quantized(broken: None) -> None:
    assert fast_path.problem(["f32", "q8_0"]) == CRASHES
    assert fast_path.problem(["bf16", "f16", "f32"]) == ""


def test_what_cannot_be_tried_is_not_trusted_and_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fast_path.problem(["f32", "unheard_of"]) == "cannot be tried"
    monkeypatch.setattr(fast_path, "SECONDS", 0.001)
    assert fast_path.problem(["f32"]) == "cannot be tried"
    assert not file.exists()


def test_a_trial_that_ends_with_the_program_is_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess[bytes]([], -signal.SIGTERM)
    monkeypatch.setattr(fast_path, "run", lambda *arguments, seconds: ended)
    assert fast_path.problem(["f32"]) == "cannot be tried"
    assert not file.exists()


# The memory.


def test_types_are_tried_once(trials: Trials, broken: None) -> None:
    for _ in range(2):
        assert fast_path.problem(["q8_0", "f32"]) == CRASHES
        assert fast_path.problem(["f32"]) == ""
    assert trials.types == [("f32", "q8_0"), ("f32",)]


def test_another_library_processor_or_system_is_tried_anew(
    trials: Trials, sound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [fast_path.machine()]
    fast_path.problem(["f32"])
    other = tmp_path / "cpuinfo"
    other.write_text("processor\t: 0\ncpu MHz\t: 1\nflags\t: fpu amx_tile\n\nprocessor\t: 1\n")
    changes = (
        ("engine.backends.fast_path.CPUINFO", other),
        ("platform.release", lambda: "99.0"),
        ("engine.backends.fast_path.find_spec", lambda name: None),
    )
    for name, value in changes:
        monkeypatch.setattr(name, value)
        names.append(fast_path.machine())
        fast_path.problem(["f32"])
    assert len(set(names)) == len(trials.types) == 4
    other.write_text("processor\t: 0\ncpu MHz\t: 9\nflags\t: fpu amx_tile\n\nprocessor\t: 2\n")
    assert fast_path.machine() == names[-1], "its speed at the moment does not matter"


def test_a_library_that_is_built_again_is_tried_anew(
    sound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault depends on the compiler: the version alone does not name a build."""
    (library := tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "llama_cpp", raising=False)
    names = set()
    for text in ("one", "two two"):
        (library / "libggml-cpu.so").write_text(text)
        names.add(fast_path.machine())
    assert len(names) == 2


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"machine": 1}',
        '{"machine": "HERE"}',
        '{"machine": "HERE", "found": []}',
        '{"machine": "HERE", "found": null}',
        "\xff",
    ],
)
def test_a_damaged_file_is_as_good_as_none(file: Path, trials: Trials, text: str) -> None:
    file.parent.mkdir()
    file.write_bytes(text.replace("HERE", fast_path.machine()).encode("latin-1"))
    assert fast_path.problem(["f32"]) == ""
    assert len(trials.types) == 1
    assert json.loads(file.read_text("utf-8"))["found"] == {"f32": ""}
    assert [path.name for path in file.parent.iterdir()] == [file.name], "nothing is left over"


def test_without_a_place_to_write_it_is_tried_each_time(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(fast_path, "results", lambda: tmp_path / "taken" / "fast_path.json")
    assert fast_path.problem(["f32"]) == fast_path.problem(["f32"]) == ""
    assert len(trials.types) == 2


# What follows.


def test_the_types_of_a_file_are_known_before_it_is_loaded(gguf_files: dict[str, Path]) -> None:
    expected = {"F32": ("f32",), "F16": ("f16", "f32"), "Q8_0": ("f16", "f32", "q8_0")}
    for name, types in expected.items():
        path = gguf_files[f"small-{name}"]
        assert probe(path, RUNTIME).types == found(path, RUNTIME).types == types


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each file that is opened with its weights: whether they may be rearranged."""
    given: list[bool] = []
    before = llama_cpp.llama_model_load_from_file

    def opened(path: bytes, parameters: Any) -> Any:
        if not parameters.no_alloc:
            given.append(parameters.use_extra_bufts)
        return before(path, parameters)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", opened)
    return given


def test_where_it_crashes_the_safe_path_is_taken_and_told(
    broken: None, gguf_files: dict[str, Path], asked: list[bool]
) -> None:
    info = load(str(gguf_files["small-Q8_0"]), RUNTIME).info
    assert asked == [False]
    assert info.note == (
        "llama.cpp's fast path crashes (SIGSEGV) on this machine: small-Q8_0 runs without it and "
        "reads prompts more slowly."
    )
    assert info.can_tree and info.leaves == 128, "it is as good as before otherwise"
    assert load(str(gguf_files["small-F32"]), RUNTIME).info.note == "" and asked == [False, True]


def test_where_it_works_it_is_taken(
    gguf_files: dict[str, Path], asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "problem", lambda types: "")
    assert load(str(gguf_files["small-F16"]), RUNTIME).info.note == "" and asked == [True]


def test_both_paths_say_the_same(
    gguf_files: dict[str, Path], broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100 tokens, longer than what is read row by row."""
    path, prompt = str(gguf_files["small-Q8_0"]), [7 * at % 6000 for at in range(100)]
    safe = alone(load(path, RUNTIME), prompt)  # type: ignore[arg-type]
    monkeypatch.delenv(fast_path.FAULT)
    other = alone(load(path, RUNTIME), prompt)  # type: ignore[arg-type]
    assert np.isfinite(safe).all() and abs(safe - other).max() < 0.5


def calls(path: Path) -> list[str]:
    """The calls in a source that open a GGUF file, as they are written there."""
    opening = {"llama_model_load_from_file", "llama_load_model_from_file", "Llama", "LlamaModel"}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in opening
    ]


@pytest.mark.soak
def test_every_place_that_opens_weights_asks_which_path_to_take() -> None:
    folders = ("app", "bench", "docs", "engine", "storage", "training")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    places = {str(path.relative_to(ROOT)): found for path in paths if (found := calls(path))}
    assert sorted(places) == [
        "bench/llama_peers.py",
        "engine/backends/fast_path.py",
        "engine/models/gguf.py",
        "engine/models/gguf_heads.py",
    ]
    (peer,) = places["bench/llama_peers.py"]
    assert peer.startswith("Llama(fast,")
