"""Models that several files of tests use: each is made and loaded once."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Any

import pytest

from engine.native import core
from tests.support.backends import Subject, subject_of

# Triton's kernels are interpreted where there is no GPU; it looks for this when it is imported.
if which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
collect_ignore = [] if find_spec("triton") else ["test_cards.py", "test_kernels.py"]


@pytest.fixture(params=core.levels() if core else [])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """A set of instructions that the compiled core may use here. A test chooses it; afterwards the
    widest is in use again."""
    yield request.param
    core.use_level(core.levels()[-1])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models get the weights of a GPU, but on the processor."""
    from engine.backends import quantised

    packer = quantised.Packer.__init__

    def prepare(self: Any, *of: Any, **others: Any) -> None:
        packer(self, *of, **others)
        self.on_cpu = False

    monkeypatch.setattr(quantised.Packer, "__init__", prepare)
    monkeypatch.setattr("engine.models.load_transformers.with_native", lambda backend: None)


@pytest.fixture(scope="session")
def subjects(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Subject]:
    """The models of the contract by name; what a test needs of them it opens for itself."""

    @cache
    def made(name: str) -> Subject:
        folder = tmp_path_factory.mktemp("subject")
        return subject_of(name, folder, lambda: request.getfixturevalue("gguf_files")["small-F32"])

    return made
