"""The section of the Models tab that sets up GGUF support: when it is there, and what it shows."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.gguf_support import GgufSupport
from app.service.session import Session
from app.web.tabs.models import GgufSection
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage.database import Database
from tests.service.test_gguf_support import NO_C, Pip
from tests.support.blocks import made

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


def test_what_fails_is_reported_with_the_end_of_the_output(pip: Pip) -> None:
    on = handlers(pip.saying(NO_C + EVIL, 1))
    shown = after(on.set_up())
    assert visible(shown, on) == [True, True, False], "it can be tried again"
    text = shown[on.place.status]
    assert "no C++ compiler" in text and "CMAKE_CXX_COMPILER not set" in text
    assert "<img" not in text and "&lt;img" in text


def test_guests_have_no_such_section(
    owners_page: gr.Blocks, guests_page: gr.Blocks, db: Database, toy: ToyBackend
) -> None:
    for guests, blocks in ((False, owners_page), (True, guests_page)):
        assert Session(Local(backend=toy), db, guests=guests).gguf.guests is guests
        ids = {getattr(block, "elem_id", None) for block in blocks.blocks.values()}
        assert ({"gguf", "gguf-load", "gguf-stop"} <= ids) is not guests
        names = [getattr(one.fn, "__qualname__", "") for one in blocks.fns.values()]
        assert names.count(GgufSupport.stop.__qualname__) == (not guests)
