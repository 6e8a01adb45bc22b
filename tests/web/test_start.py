"""The start: the page is served at once, and the first model comes while it is there."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.cli import without_collection
from app.service.answering import Update
from app.service.jobs import Progress
from app.service.session import Session
from app.web import layout
from app.web.run_html import waiting_line
from engine.backends.base import Backend
from engine.errors import Cancelled, ModelError, PromptError
from engine.loaded import NO_MODEL_INFO
from engine.local import Local
from engine.models import loaders
from engine.queue import Waiting
from engine.settings import Runtime, Sampling
from storage.database import Database
from tests.conftest import EMBEDDED, ROOT
from tests.support.blocks import made
from tests.support.inside import OWNER, preferences, texts, updates_of
from tests.support.quick import quick
from tests.support.shop import Shop, ask, shop

__all__ = ["quick", "shop"]


class Start:
    """An app whose first model, "one", is read when `go` is set, or cannot be read."""

    def __init__(self, shop: Shop, db: Database) -> None:
        self.shop, self.go = shop, threading.Event()

        def load(source: str, runtime: Runtime) -> Backend:
            assert self.go.wait(20)
            return shop.load(source, runtime)

        coming = replace(NO_MODEL_INFO, name="one", sampling=Sampling(0.9))
        found = replace(shop.loaders(), load=load)
        self.session = Session(Local(loaders=found), db, loaders=found, coming=coming)
        self.loading = self.session.models.start(shop.source("one"))
        self.told: list[Progress] = []
        self.error = ""
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()

    def follow(self) -> None:
        try:
            self.told += self.loading
        except ModelError as error:
            self.error = str(error)

    def end(self) -> None:
        self.go.set()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def start(shop: Shop, db: Database) -> Iterator[Start]:
    started = Start(shop, db)
    yield started
    started.end()


def test_what_is_said_meanwhile_is_stored_and_answered(start: Start) -> None:
    session = start.session
    conversation = session.chat.say(OWNER, None, "hello there")
    items = updates_of(session, OWNER, conversation, preferences())
    first = next(items)
    assert first == Waiting(1, loading=True)
    assert "Waiting for the model to load" in waiting_line(first)
    assert texts(session, conversation) == ["hello there"]
    start.go.set()
    *_, last = items
    assert isinstance(last, Update) and last.text
    assert ask(session).text == last.text, "as at any other time"


def test_who_waits_for_the_first_model_can_be_stopped_and_changes_the_message(
    start: Start,
) -> None:
    session = start.session
    conversation = session.chat.say(OWNER, None, "hello there")
    items = updates_of(session, OWNER, conversation, preferences())
    next(items)
    session.tasks.stop(OWNER, conversation)
    with pytest.raises(Cancelled):
        list(items)
    with pytest.raises(PromptError):
        session.chat.say(OWNER, conversation, "  ")
    (message,) = session.chat.conversations(OWNER).messages(conversation)
    session.chat.edit(OWNER, conversation, message.id, "something else")
    start.end()
    *_, last = updates_of(session, OWNER, conversation, preferences())
    assert isinstance(last, Update) and last.text


def test_a_page_says_what_is_loaded_and_how_far_that_is_until_it_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = made(lambda: layout.Page(start.session, ["a notice"]))
    head, box, waited = page.head, page.chat.composer.box, page.waited
    monkeypatch.setattr("app.web.kit.LOOK_SECONDS", 0.001)

    async def watched() -> list[dict[Any, Any]]:
        seen = []
        async for changes in page.wait(False):
            seen.append(changes)
            if len(seen) == 1:
                job = start.session.models.slot.running
                assert job is not None
                job.report(Progress(0.4, "Measuring <one> …"))
            if len(seen) == 2:
                start.go.set()
        return seen

    first, second, *_, last = asyncio.run(watched())
    assert "Loading one …" in first[head] and "No model" not in first[head]
    assert "a notice" in first[head] and "one is loading" in first[box]["placeholder"]
    assert "Measuring &lt;one&gt; … 40 %" in second[head] and waited not in second
    assert "context" in last[head] and "…" not in last[head] and last[waited] == 1
    assert last[box]["placeholder"] == "Message one"

    async def later(coming: bool) -> list[dict[Any, Any]]:
        return [changes async for changes in page.wait(coming)]

    only = asyncio.run(later(False))
    assert [list(changes) for changes in only] == [[waited]] and only[0][waited] != 1
    (only,) = asyncio.run(later(True))
    assert "context" in only[head] and only[waited] == 1, "the load ended while the page opened"


def test_pages_begin_with_what_stays_true(start: Start) -> None:
    """Every page begins with what was built before the model was there."""
    blocks = made(lambda: layout.build(start.session))
    found = {block.elem_id: block for block in blocks.blocks.values() if block.elem_id}
    assert ">one</span>" in found["header"].value and "…" not in found["header"].value
    assert found["box"].placeholder == "Message one"
    values = [getattr(block, "value", None) for block in blocks.blocks.values()]
    assert 0.9 in values, "the sampler of the model that comes"


def test_the_sampler_is_known_before_the_model(tmp_path: Path) -> None:
    assert loaders.sampler(str(EMBEDDED)) == Sampling(0.8, min_p=0.05)
    file = tmp_path / "generation_config.json"
    assert loaders.sampler(str(tmp_path)) == Sampling() == loaders.sampler("owner/name")
    for content in ("[]", "{", json.dumps({"temperature": "hot"}), json.dumps({"top_p": 7})):
        file.write_text(content)
        assert loaders.sampler(str(tmp_path)) == Sampling(), content


def test_a_path_where_nothing_is_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; data, *sources = sys.argv[1:]\n"
        "for source in sources:\n"
        "    sys.argv = ['app.py', '--model', source, '--data-dir', data, '--no-browser']\n"
        "    try:\n        runpy.run_path('app.py', run_name='__main__')\n"
        "    except SystemExit as end:\n        print(end.code, 'gradio' in sys.modules)"
    )
    sources = ["./no/such/model", "/no/such/model.gguf", "nothing.gguf"]
    done = run_python(code, str(tmp_path / "data"), *sources)
    assert done.stdout.split() == ["2", "False"] * 3
    assert all(source in done.stderr for source in sources)
    assert done.stderr.count("does not exist") == 3 and not (tmp_path / "data").exists()


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def test_gradio_is_imported_without_writing_stub_files() -> None:
    """And is itself otherwise."""
    code = (
        "import sys\n"
        "from app.web.gradio_import import skip_stubs\n"
        "skip_stubs()\n"
        "import ast\n"
        "parsed = []\n"
        "whole = ast.get_source_segment\n"
        "ast.get_source_segment = lambda *a, **k: parsed.append(a) or whole(*a, **k)\n"
        "import gradio\n"
        "ours = 'app.web.gradio_import'\n"
        "left = [finder for finder in sys.meta_path if type(finder).__module__ == ours]\n"
        "print(len(parsed), hasattr(gradio.Textbox(), 'submit'), len(left))\n"
    )
    assert run_python(code).stdout.split() == ["0", "True", "0"]


@pytest.mark.parametrize("source", [str(EMBEDDED), "owner/name", "owner/name:file.gguf"])
def test_what_may_be_there_is_not_refused(source: str) -> None:
    loaders.check_there(source)


def test_the_app_is_made_when_it_is_served(owners_page: gr.Blocks) -> None:
    """Gradio's own habit is one when blocks begin, and one when they are complete."""
    assert getattr(owners_page, "app", None) is None and len(owners_page.fns) > 100
    assert made(gr.Blocks, apps=True).app is not None, "others are as they were"


def test_no_garbage_is_looked_for_until_the_page_is_there() -> None:
    with pytest.raises(ModelError), without_collection():
        assert not gc.isenabled()
        raise ModelError("no page after all")
    assert gc.isenabled()
