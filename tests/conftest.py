"""Shared fixtures: a database in memory, the toy backend, the embedded model (mark `model`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.toy import ToyBackend
from storage.database import Database

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "assets" / "models" / "tiny-chat" / "target"


@pytest.fixture
def db() -> Iterator[Database]:
    with Database() as database:
        yield database


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend()


@pytest.fixture(scope="session")
def embedded():
    """The embedded target in float32, loaded once. Tests that use it carry the mark `model`.

    One thread: two of them wait for each other whenever something else runs beside the tests.
    """
    import torch

    torch.set_num_threads(1)
    from engine.backends.load_transformers import load_transformers

    return load_transformers(str(EMBEDDED), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def embedded_drafts(embedded):
    """The draft models that are embedded beside the target, by name, the smallest first."""
    from engine.backends.load_transformers import load_transformers

    return {
        name: load_transformers(str(EMBEDDED.parent / name), dtype="float32", device="cpu")
        for name in ("small", "mid")
    }
