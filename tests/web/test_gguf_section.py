"""The section of the Models tab that sets up GGUF support: when it is there, and what it shows."""

from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest

from app.service.gguf_support import GgufSupport
from app.service.session import Session
from app.web.tabs.models import GgufSection
from engine.local import Local
from storage.database import Database
from tests.service.test_gguf_support import NO_C, Pip
from tests.support.blocks import EVIL, after, tab_of
from tests.support.toy import ToyBackend


@pytest.fixture
def pip(tmp_path: Path) -> Pip:
    return Pip(tmp_path)


def test_what_fails_is_reported_with_the_end_of_the_output(pip: Pip) -> None:
    on = tab_of(GgufSection, SimpleNamespace(gguf=pip.saying(NO_C + EVIL, 1)))  # type: ignore[arg-type]
    shown = after(on.set_up())
    visible = [shown[part]["visible"] for part in (on.section, *on.place.buttons, on.place.stop)]
    assert visible == [True, True, False], "it can be tried again"
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
