"""The library of GGUF files: whether it is here, and what is said where it is not."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models import llama_cpp_python, loaders


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
        f"{shlex.quote(sys.executable)} -m pip install 'llama-cpp-python>=0.3.36,<0.4'"
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

    def download(model_format: object, source: str, *_: object) -> str:
        asked.append(source)
        return source

    def fetched(source: str) -> str:
        return loaders.download(source, lambda done, total: None, lambda: False)

    monkeypatch.setattr("engine.models.sources.download", download)
    monkeypatch.setattr(llama_cpp_python, "installed", lambda: False)
    with pytest.raises(ModelError, match="GGUF support is not set up"):
        fetched("owner/name:a.gguf")
    assert fetched("owner/name") == "owner/name"
    monkeypatch.setattr(llama_cpp_python, "installed", lambda: True)
    assert fetched("owner/name:a.gguf") == "owner/name:a.gguf"
    assert asked == ["owner/name", "owner/name:a.gguf"]
