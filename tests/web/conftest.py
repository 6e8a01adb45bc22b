"""What the tests of the interface share: a session on the toy model, the notices of a page, and the
whole pages of the owner and of a guest."""

from collections.abc import Iterator

import gradio as gr
import pytest

from app.service.session import Session
from app.web import layout
from engine.local import Local
from storage.database import Database
from tests.support.blocks import made
from tests.support.inside import Held
from tests.support.toy import ToyBackend


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    notices: list[str] = []
    monkeypatch.setattr(gr, "Warning", notices.append)
    return notices


def whole_page(guests: bool) -> Iterator[gr.Blocks]:
    with Database() as db:
        yield made(lambda: layout.build(Session(Local(backend=ToyBackend()), db, guests)))


@pytest.fixture(scope="session")
def owners_page() -> Iterator[gr.Blocks]:
    """The owner's page, built once: no test changes it."""
    yield from whole_page(guests=False)


@pytest.fixture(scope="session")
def guests_page() -> Iterator[gr.Blocks]:
    """A guest's page, built once: no test changes it."""
    yield from whole_page(guests=True)
