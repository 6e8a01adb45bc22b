"""The section of the Models tab that sets up GGUF support: when it is there, and what it shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.service import gguf_support
from app.service.gguf_support import GgufSupport
from app.service.session import Session
from app.web import layout
from app.web.tabs import gguf_support as section
from app.web.tabs import models
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage.database import Database
from tests.service.test_gguf_support import COMPILED, NO_C, WAITS, Pip
from tests.support.inside import soon
from tests.web.test_tabs import made

EVIL = "<img src=x onerror=alert(1)>{{constructor.constructor('alert(2)')()}}"
Shown = dict[Any, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_support, "LOOK_SECONDS", 0.01)


@pytest.fixture
def pip(tmp_path: Path) -> Pip:
    return Pip(tmp_path)


def handlers(support: GgufSupport) -> section.Handlers:
    def build() -> section.Handlers:
        with gr.Blocks():
            return section.Handlers(support, section.build(support))

    return made(build)


def after(updates: Iterator[Any]) -> Shown:
    """What is shown in the end."""
    shown: Shown = {}
    for update in updates:
        for part, change in update.items():
            both = isinstance(change, dict) and isinstance(shown.get(part), dict)
            shown[part] = {**shown[part], **change} if both else change
    return shown


def visible(shown: Shown, on: section.Handlers) -> list[bool]:
    """Whether the section, its button and its Stop are shown."""
    parts = on.parts
    return [
        shown[part]["visible"] for part in (parts.section, *parts.place.buttons, parts.place.stop)
    ]


def test_the_section_is_there_while_the_library_is_not(pip: Pip) -> None:
    on = handlers(pip.saying(COMPILED, 0))
    assert on.parts.section.visible and after(on.show()) == {
        on.parts.section: gr.update(visible=True)
    }
    pip.mark.touch()
    assert after(on.show()) == {on.parts.section: gr.update(visible=False)}
    assert not handlers(on.support).parts.section.visible


def test_it_says_what_it_takes() -> None:
    for words in ("llama.cpp", "compiled on your machine", "6 minutes on 2 cores", "C++ compiler"):
        assert words in section.WORDS


def test_a_press_sets_it_up(pip: Pip) -> None:
    on = handlers(pip.support("import time; time.sleep(0.3); open(MARK, 'w').close()"))
    updates = list(on.set_up())
    assert visible(updates[0], on) == [True, False, True]
    status = on.parts.place.status
    assert any("0:00" in update.get(status, "") for update in updates), "how long it takes already"
    assert visible(after(iter(updates)), on) == [True, False, False]
    assert updates[-1][status] == section.fine(section.DONE)


def test_what_fails_is_told_with_the_end_of_the_output(pip: Pip) -> None:
    on = handlers(pip.saying(NO_C + EVIL, 1))
    shown = after(on.set_up())
    assert visible(shown, on) == [True, True, False], "it can be tried again"
    said = shown[on.parts.place.status]
    assert "no C++ compiler" in said and "CMAKE_CXX_COMPILER not set" in said
    assert "<img" not in said and "&lt;img" in said


def test_a_stop_is_told(pip: Pip) -> None:
    on = handlers(pip.support(WAITS.format(ignore="")))
    updates = on.set_up()
    next(updates)
    assert soon(lambda: bool(on.support.lines))
    on.support.stop()
    shown = after(updates)
    assert shown[on.parts.place.stop] == gr.update(visible=False)
    assert (
        "stopped" in shown[on.parts.place.status] and "verdict" not in shown[on.parts.place.status]
    )


def test_a_page_that_opens_meanwhile_follows(pip: Pip) -> None:
    support = pip.support(WAITS.format(ignore=""))
    first, second = handlers(support), handlers(support)
    next(started := first.set_up())
    updates = second.show()
    assert visible(next(updates), second) == [True, False, True]
    again = after(second.set_up())
    assert "already" in again[second.parts.place.status]
    assert soon(lambda: bool(support.lines))
    support.stop()
    assert "stopped" in after(updates)[second.parts.place.status]
    assert "stopped" in after(started)[first.parts.place.status]


@pytest.mark.parametrize("guests", [False, True])
def test_guests_have_no_such_section(guests: bool, db: Database, toy: ToyBackend) -> None:
    session = Session(Local(backend=toy), db, guests=guests)
    assert session.gguf.guests is guests
    blocks = made(lambda: layout.build(session))
    ids = {getattr(block, "elem_id", None) for block in blocks.blocks.values()}
    assert ({"gguf", "gguf-load", "gguf-stop"} <= ids) is not guests
    stops = [one for one in blocks.fns.values() if one.fn == session.gguf.stop]
    assert len(stops) == (not guests)


def test_the_models_follow_when_it_is_there(db: Database, toy: ToyBackend) -> None:
    """What a GGUF file needs is told then."""
    session = Session(Local(backend=toy), db)
    blocks = made(lambda: layout.build(session))
    events = {getattr(one.fn, "__qualname__", ""): one for one in blocks.fns.values()}
    pressed = events[section.Handlers.set_up.__qualname__]
    then = [one for one in blocks.fns.values() if one.trigger_after == pressed._id]
    assert [getattr(one.fn, "__qualname__", "") for one in then] == [
        models.Handlers.settle.__qualname__
    ]
