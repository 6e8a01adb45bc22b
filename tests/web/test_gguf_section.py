"""The section of the Models tab that sets up GGUF support: when it is there, and what it shows."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.gguf_support import GgufSupport
from app.service.session import Session
from app.web.tabs.models import GgufSection, ModelsTab
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage.database import Database
from tests.service.test_gguf_support import COMPILED, NO_C, WAITS, Pip
from tests.support.blocks import made
from tests.support.inside import soon

EVIL = "<img src=x onerror=alert(1)>{{constructor.constructor('alert(2)')()}}"
Shown = dict[Any, Any]


@pytest.fixture
def pip(tmp_path: Path) -> Pip:
    return Pip(tmp_path)


def handlers(support: GgufSupport) -> GgufSection:
    def build() -> GgufSection:
        with gr.Blocks():
            session: Any = SimpleNamespace(gguf=support)
            return GgufSection(session, gr.BrowserState({}))

    return made(build)


def after(updates: Iterator[Any]) -> Shown:
    """What is shown in the end."""
    shown: Shown = {}
    for update in updates:
        for part, change in update.items():
            both = isinstance(change, dict) and isinstance(shown.get(part), dict)
            shown[part] = {**shown[part], **change} if both else change
    return shown


def visible(shown: Shown, on: GgufSection) -> list[bool]:
    """Whether the section, its button and its Stop are shown."""
    return [shown[part]["visible"] for part in (on.section, *on.place.buttons, on.place.stop)]


def test_the_section_is_there_while_the_library_is_not(pip: Pip) -> None:
    on = handlers(pip.saying(COMPILED, 0))
    assert on.section.visible and after(on.show()) == {on.section: gr.update(visible=True)}
    pip.mark.touch()
    assert after(on.show()) == {on.section: gr.update(visible=False)}
    assert not handlers(on.support).section.visible


def test_what_fails_is_told_with_the_end_of_the_output(pip: Pip) -> None:
    on = handlers(pip.saying(NO_C + EVIL, 1))
    shown = after(on.set_up())
    assert visible(shown, on) == [True, True, False], "it can be tried again"
    said = shown[on.place.status]
    assert "no C++ compiler" in said and "CMAKE_CXX_COMPILER not set" in said
    assert "<img" not in said and "&lt;img" in said


@pytest.mark.soak
def test_a_page_that_opens_meanwhile_follows(pip: Pip) -> None:
    support = pip.support(WAITS.format(ignore=""))
    first, second = handlers(support), handlers(support)
    next(started := first.set_up())
    updates = second.show()
    assert visible(next(updates), second) == [True, False, True]
    again = after(second.set_up())
    assert "already" in again[second.place.status]
    assert soon(lambda: bool(support.lines))
    support.stop()
    assert "stopped" in after(updates)[second.place.status]
    assert "stopped" in after(started)[first.place.status]


def test_guests_have_no_such_section(
    owners_page: gr.Blocks, guests_page: gr.Blocks, db: Database, toy: ToyBackend
) -> None:
    for guests, blocks in ((False, owners_page), (True, guests_page)):
        assert Session(Local(backend=toy), db, guests=guests).gguf.guests is guests
        ids = {getattr(block, "elem_id", None) for block in blocks.blocks.values()}
        assert ({"gguf", "gguf-load", "gguf-stop"} <= ids) is not guests
        names = [getattr(one.fn, "__qualname__", "") for one in blocks.fns.values()]
        assert names.count(GgufSupport.stop.__qualname__) == (not guests)


def test_the_models_follow_when_it_is_there(owners_page: gr.Blocks) -> None:
    """What a GGUF file needs is told then."""
    events = {getattr(one.fn, "__qualname__", ""): one for one in owners_page.fns.values()}
    pressed = events[GgufSection.set_up.__qualname__]
    then = [one for one in owners_page.fns.values() if one.trigger_after == pressed._id]
    assert [getattr(one.fn, "__qualname__", "") for one in then] == [ModelsTab.settle.__qualname__]
