"""A database that breaks while the program runs is reported by every handler, and ends none.

All events of all tabs are tried, so that a new one is tried as well.
"""

import inspect
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gradio as gr
import pytest
from gradio.blocks import BlockFunction

from app.service.session import Session
from app.web import layout
from engine.drafting import costs as engine_costs
from engine.errors import ModelError, StorageError
from engine.local import Local
from engine.models.loaders import ModelLoaders
from storage.database import Database
from storage.drafting import DraftingStore
from tests.service.test_session import ask, preferences
from tests.support.blocks import made
from tests.support.inside import OWNER, forgotten, soon, updates_of
from tests.support.toy import ToyBackend

FEW = 1
"""Repeats and tokens: what is tried is the telling, not the answers."""
REQUEST: Any = SimpleNamespace(username=None, session_hash="page", headers={})


def overwrite(path: Path) -> None:
    for file in (path, Path(f"{path}-wal")):
        file.write_bytes(b"not a database any more " * 4_000)


def cut(path: Path) -> None:
    Path(f"{path}-wal").write_bytes(b"")
    path.write_bytes(path.read_bytes()[:5_000])


def take_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def replace(path: Path) -> None:
    """By a new file without a table, as a copy that went wrong would."""
    for file in path.parent.glob("strata.db*"):
        file.unlink()
    path.touch()


BREAKS = [overwrite, cut, take_away, replace]


def refuse(*_: object) -> NoReturn:
    raise ModelError("There is no other model in this test.")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    measure = partial(engine_costs.measure_costs, sizes=(0, 1, 4), seconds=0.01)
    monkeypatch.setattr("engine.loaded.measure_costs", measure)
    monkeypatch.setattr(Database, "BUSY_SECONDS", 0.05)
    with Database(tmp_path / "strata.db") as db:
        loaders = ModelLoaders(load=refuse, download=refuse)
        engine = Local(backend=ToyBackend(), loaders=loaders, store=DraftingStore(db))
        yield Session(engine, db, loaders=loaders)


def given(component: Any, conversation: str) -> Any:
    """What a page sends of a component: ids of what was open, a text in every box."""
    value = getattr(component, "value", None)
    if isinstance(component, gr.State) and value is None:
        return conversation
    if isinstance(component, gr.Textbox) and not value:
        return "hello"
    if component.elem_id == "conversations":
        return conversation
    return FEW if isinstance(component, gr.Slider) else value


def raised_by(event: BlockFunction, conversation: str) -> str:
    """What a handler raises when it is run to its end, on a thread of its own as servers do."""
    values = [given(component, conversation) for component in event.inputs]
    handler: Callable[..., Any] = event.fn  # type: ignore[assignment]
    special: dict[Any, Any] = {
        gr.Request: REQUEST,
        gr.SelectData: SimpleNamespace(index=[0, 0], value="x"),
        gr.EditData: SimpleNamespace(index=0, value="other words"),
        gr.EventData: SimpleNamespace(_data={"token": "", "drawn": 0}),
    }
    kinds = [p.annotation for p in inspect.signature(handler, eval_str=True).parameters.values()]
    for at, kind in enumerate(kinds):
        if kind in special:
            values.insert(at, special[kind])
    raised: list[BaseException] = []

    def work() -> None:
        try:
            result = handler(*values)
            if inspect.isgenerator(result):
                for _ in result:
                    pass
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    name = getattr(handler, "__qualname__", handler)
    return f"{name} raised {raised[0]!r}" if raised else ""


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("act", BREAKS)
def test_every_handler_tells_that_the_database_broke(
    session: Session, warned: list[str], tmp_path: Path, act: Callable[[Path], None]
) -> None:
    conversation, _ = ask(session)
    session.viewing["page"] = conversation
    blocks = made(lambda: layout.build(session))
    events = [event for event in blocks.fns.values() if event.fn is not None]
    assert len(events) > 40
    act(tmp_path / "strata.db")
    forgotten(session)
    problems = {raised_by(event, conversation) for event in events}
    assert problems == {""}
    assert any("strata.db" in notice for notice in warned)


def test_the_header_says_that_the_database_is_locked(session: Session) -> None:
    assert session.database.path is not None
    with closing(sqlite3.connect(session.database.path, isolation_level=None)) as other:
        conversation = session.chat.say(OWNER, None, "hello")
        other.execute("BEGIN IMMEDIATE")
        list(updates_of(session, OWNER, conversation, preferences()))
        assert "strata.db is locked by another program" in layout.header(session, ())
        other.execute("ROLLBACK")
        assert soon(lambda: not session.notices.locked)
    assert "is locked" not in layout.header(session, ())


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("sound", [0, 1, 2, 3, 5, 8, 13])
def test_a_database_that_breaks_within_a_handler_is_reported(
    session: Session, warned: list[str], monkeypatch: pytest.MonkeyPatch, sound: int
) -> None:
    """After so many queries of a handler that still work."""
    conversation, _ = ask(session)
    session.viewing["page"] = conversation
    blocks = made(lambda: layout.build(session))
    left, handle = [sound], Database._handle

    def breaking(database: Database) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("the database is broken")
        return handle(database)

    monkeypatch.setattr(Database, "_handle", breaking)
    problems = set()
    for event in (event for event in blocks.fns.values() if event.fn is not None):
        left[0] = 1_000_000
        if conversation not in {item.id for item in session.chat.conversations(OWNER).list()}:
            conversation, _ = ask(session)  # an event before this one deleted it
        left[0] = sound
        problems.add(raised_by(event, conversation))
    assert problems == {""}
    assert "the database is broken" in warned
