"""What models are called, and how the app reaches the engine's loaders."""

import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ModelError
from engine.models import llama_cpp_python, loaders
from engine.models.format import FileFormat
from engine.models.formats import FORMATS, Gguf, Transformers, format_of
from engine.models.loaders import (
    MODEL_LOADERS,
    answers_at_once,
    free_name,
    name_of,
    resolve_source,
)
from engine.models.memory import Need
from engine.models.probe import Probe
from engine.settings import Runtime
from tests.support.toy import ToyBackend

RUNTIME = Runtime(threads=3, bits="off")
HUB_FILE = "owner/name-GGUF:part/of/it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("source", "name", "kind"),
    [
        ("/models/mid", "mid", "transformers"),
        ("/models/mid.gguf", "mid", "llama.cpp"),
        ("/models/It.Q8_0.GGUF", "It.Q8_0", "llama.cpp"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B", "transformers"),
        (HUB_FILE, "it-Q4_K_M", "llama.cpp"),
        ("owner/name:file.gguf", "file", "llama.cpp"),
        ("/odd:place/mid.gguf", "mid", "llama.cpp"),
        ("/", "model", "transformers"),
        ("/a\udc80.gguf", "a?", "llama.cpp"),
        (".gguf", "model", "llama.cpp"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_source(
    source: str, name: str, kind: str
) -> None:
    assert name_of(source) == name and format_of(source).kind == kind


def test_no_two_draft_models_have_one_name() -> None:
    assert free_name("/b/mid.gguf", {"mid", "mid-2"}) == "mid-3"
    assert free_name("/b/mid", {"small"}) == "mid"


def test_one_model_has_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "blob").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "linked.gguf").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = str(tmp_path.resolve() / "folder")
    for source in ("folder", " ./folder/ ", "~/folder", "link", str(tmp_path / "link" / ".")):
        assert resolve_source(source) == folder
    for source in ("folder/linked.gguf", "link/linked.gguf", "~/link/../folder/linked.gguf"):
        assert resolve_source(source) == f"{folder}/linked.gguf", "what it points to is no .gguf"
    for source in ("", "owner/name", HUB_FILE, "folder/none.gguf"):
        assert resolve_source(f" {source} ") == source


def test_a_file_from_the_hub_is_read_where_the_cache_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, model = str(tmp_path / "kept.gguf"), ToyBackend()
    asked: list[tuple[str, Runtime]] = []

    def load(source: str, runtime: Runtime, found: Probe) -> ToyBackend:
        assert found.weights == 2
        return model

    def probed(source: str, runtime: Runtime) -> Probe:
        asked.append((source, runtime))
        return Probe(parameters=1, weights=2, cache=3)

    stub = SimpleNamespace(load_gguf=load)
    monkeypatch.setitem(sys.modules, "engine.models.load_llamacpp", stub)
    monkeypatch.setattr("engine.models.formats.probed", probed)
    kept = {("owner/name-GGUF", "part/of/it-Q4_K_M.gguf"): path}
    monkeypatch.setattr("engine.models.hub.cached", lambda *asked: kept.get(asked))
    assert MODEL_LOADERS.load(HUB_FILE, RUNTIME) is model
    assert MODEL_LOADERS.need(HUB_FILE, RUNTIME) == Need(1, 2, 3)
    assert asked == [(path, RUNTIME)] * 2, "once for each"
    with pytest.raises(ModelError, match="is known once it is here"):
        MODEL_LOADERS.need("owner/name:gone.gguf", RUNTIME)


def test_every_format_answers_for_its_models() -> None:
    """What a newcomer must tell, and that no two formats claim one thing."""
    assert FORMATS[-1].recognises("anything at all"), "the last one takes the rest"
    assert len({each.kind for each in FORMATS}) == len(FORMATS)
    settings = [name for each in FORMATS for name in each.settings]
    shared = {"context_length", "threads", "bits", "parallel", "head"}
    own = {item.name for item in fields(Runtime)} - shared
    assert sorted(settings) == sorted(own)
    for each in FORMATS:
        if not isinstance(each, FileFormat):
            assert each.located("http://it/v1") == "http://it/v1", "nothing is to be downloaded"
            assert each.name("http://h/v1#it") == "it" and each.name("http://") == "http://"
            continue
        source = f"/models/it{each.ending}"
        assert format_of(source) is each and each.name(source) == "it"
        assert each.located(source) == source
        assert list(each.find("/models", ["it.txt"])) == [] == list(each.weight_files(Path(source)))


# how many answers at once


@pytest.mark.parametrize(
    ("free", "answers"), [(0, 1), (110, 1), (119, 1), (120, 2), (139, 3), (140, 4), (9999, 4)]
)
def test_as_many_answers_at_once_as_their_caches_fit_and_at_most_four(
    free: int, answers: int
) -> None:
    assert answers_at_once(Need(1, 100, 10), free) == answers


# the library of GGUF files


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that is imported from; nothing is in it yet."""
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_it_is_found_as_soon_as_it_is_there(packages: Path) -> None:
    """Imports remember what is in a folder until its time changes, which it may do too coarsely."""
    assert not llama_cpp_python.installed()
    state = packages.stat()
    (packages / "llama_cpp").mkdir()
    (packages / "llama_cpp" / "__init__.py").touch()
    os.utime(packages, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert llama_cpp_python.installed()
    llama_cpp_python.check("a.gguf")


def test_where_it_is_not_there_both_ways_to_it_are_told(packages: Path) -> None:
    (packages / "pip.py").touch()
    with pytest.raises(ModelError) as caught:
        llama_cpp_python.check("/models/a.gguf")
    assert str(caught.value) == (
        "The model '/models/a.gguf' is a GGUF file, and GGUF support is not set up. Press Set up "
        "GGUF support in the Models tab, or choose a folder with *.safetensors weights. By hand: "
        f"{shlex.quote(sys.executable)} -m pip install 'llama-cpp-python>=0.3.36,<0.3.37'"
    )


def test_without_pip_it_is_uv_that_installs(packages: Path) -> None:
    requirement = llama_cpp_python.REQUIREMENT
    assert llama_cpp_python.command() == [
        *("uv", "pip", "install", "--python", sys.executable, requirement)
    ]
    (packages / "pip.py").touch()
    assert llama_cpp_python.installed() is False
    assert llama_cpp_python.command() == [sys.executable, "-m", "pip", "install", requirement]


def test_what_could_not_be_read_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of gigabytes, and only then the news that it is of no use."""
    asked: list[str] = []

    def located(model_format: object, source: str) -> str:
        asked.append(source)
        return source

    def fetched(source: str) -> str:
        return loaders.download(source, lambda done, total: None, lambda: False)

    for each in (Gguf, Transformers):
        monkeypatch.setattr(each, "located", located)
    monkeypatch.setattr(llama_cpp_python, "installed", lambda: False)
    with pytest.raises(ModelError, match="GGUF support is not set up"):
        fetched("owner/name:a.gguf")
    assert fetched("owner/name") == "owner/name"
    monkeypatch.setattr(llama_cpp_python, "installed", lambda: True)
    assert fetched("owner/name:a.gguf") == "owner/name:a.gguf"
    assert asked == ["owner/name", "owner/name:a.gguf"]
