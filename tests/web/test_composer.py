"""The composer's events without a browser: what a page may ask for, and what it is told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import gradio as gr
import pytest
from gradio.utils import get_upload_folder

from app.service.attachments import MAX_BYTES, Attachment, join
from app.service.session import Session
from app.web.render import transcript
from app.web.tabs import chat, composer, settings
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage.database import Database
from tests.support.inside import soon

T = TypeVar("T")
REQUEST: Any = SimpleNamespace(username=None, session_hash="page")
GUEST: Any = SimpleNamespace(username="guest", session_hash="other")


def made(build: Callable[[], T]) -> T:
    """What `build` makes of Gradio's blocks, which leave an event loop open unless one runs."""

    async def run() -> T:
        return build()

    return asyncio.run(run())


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def on(session: Session) -> composer.Handlers:
    return composer.Handlers(session)


@pytest.fixture
def talking(session: Session, monkeypatch: pytest.MonkeyPatch) -> chat.Handlers:
    monkeypatch.setattr("app.web.tabs.chat.warn", lambda words: None)

    def build() -> chat.Handlers:
        with gr.Blocks():
            talk, controls = chat.build(session), settings.build(session)
            return chat.Handlers(session, talk, controls, gr.State(None), gr.BrowserState({}))

    return made(build)


def data(**said: object) -> gr.EventData:
    return gr.EventData(None, said)


def sent(name: str, content: bytes) -> str:
    """A file as Gradio keeps what a page has sent."""
    folder = Path(get_upload_folder()) / "composer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return str(folder / name)


def say(on: chat.Handlers, shown: str | None, **said: object) -> dict[Any, Any]:
    values = (part.value for part in on.controls.inputs)
    return on.say(data(number=7, **said), REQUEST, shown, None, {}, *values)


def test_a_file_is_read_counted_and_deleted(on: composer.Handlers) -> None:
    path = sent("notes.md", b"# Notes\n")
    found = on.attach(data(number=3, name="notes.md", path=path), REQUEST, {})
    assert found["number"] == 3
    block = Attachment("notes.md", "# Notes").block
    shown: Any = found["file"]
    assert shown == {
        "key": shown["key"],
        "name": "notes.md",
        "size": 7,
        "tokens": len(block),
        "exact": True,
    }
    assert not Path(path).exists()


@pytest.mark.parametrize("name", ["image.png", "large.txt"])
def test_what_cannot_be_read_is_deleted_as_well(on: composer.Handlers, name: str) -> None:
    content = b"\0\1\2" if name == "image.png" else b"a" * (MAX_BYTES + 1)
    path = sent(name, content)
    found = on.attach(data(number=3, name=name, path=path), REQUEST, {})
    assert name in str(found["error"]) and not Path(path).exists()


def test_only_what_was_sent_to_the_page_is_read(on: composer.Handlers, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not read me")
    folder = Path(get_upload_folder())
    for path in (str(secret), f"{folder}/../{secret}", "", "/etc/passwd"):
        found = on.attach(data(number=1, name="x.txt", path=path), REQUEST, {})
        assert "file" not in found and "error" in found
    assert secret.exists(), "nothing else is deleted"
    link = folder / "link.txt"
    folder.mkdir(parents=True, exist_ok=True)
    link.symlink_to(secret)
    found = on.attach(data(number=1, name="x.txt", path=str(link)), REQUEST, {})
    link.unlink()
    assert "file" not in found and secret.exists()


def test_nobody_sends_the_files_of_another(on: composer.Handlers, talking: chat.Handlers) -> None:
    path = sent("mine.txt", b"mine")
    file: Any = on.attach(data(number=1, name="mine.txt", path=path), GUEST, {"browser": "b"})
    found = say(talking, None, text="hello", files=[file["file"]["key"]])
    assert found[talking.parts.written.channels["sent"]] == {"number": 7, "ok": False}


def test_a_message_with_files_is_stored_in_one_piece(
    session: Session, on: composer.Handlers, talking: chat.Handlers
) -> None:
    path = sent("a.txt", b"words")
    file: Any = on.attach(data(number=1, name="a.txt", path=path), REQUEST, {})
    found = say(talking, None, text="Why?", files=[file["file"]["key"]])
    assert found[talking.parts.written.channels["sent"]] == {"number": 7, "ok": True}
    conversation = found[talking.current]
    message = session.chat.conversations("local").messages(conversation)[0]
    assert message.content == join([Attachment("a.txt", "words")], "Why?")
    turns: Any = transcript([message])["turns"]
    assert turns[0]["text"] == "Why?"
    assert turns[0]["files"] == [{"name": "a.txt", "size": 5, "text": "words"}]
    assert soon(lambda: session.generations.find("local", conversation) is None)
    edited = on.place(REQUEST, conversation, message.id, {})
    assert (edited["editing"], edited["text"]) == (message.id, "Why?")
    files: Any = edited["files"]
    assert session.attachments.message("local", [files[0]["key"]], "Why?") == message.content


def test_a_page_that_shows_another_conversation_by_now_sends_nothing(
    session: Session, talking: chat.Handlers
) -> None:
    found = say(talking, "another", text="hello", conversation="the one before")
    assert found == {talking.parts.written.channels["sent"]: {"number": 7, "ok": False}}
    assert session.chat.conversations("local").list() == []


def test_the_gauge_is_told_in_numbers_or_not_at_all(
    session: Session, on: composer.Handlers
) -> None:
    found = on.measure(data(number=4, text="hello"), REQUEST, None, {}, "")
    assert found["number"] == 4 and found["fits"] and found["dropped"] == 0
    assert int(str(found["tokens"])) > len("hello")
    assert found["context"] == session.current.info.context_length
    with session.tasks.begin("local", "busy"):
        assert on.measure(data(number=5, text="hello"), REQUEST, None, {}, "") == {"number": 5}
    other = on.measure(data(number=6, conversation="x"), REQUEST, None, {}, "")
    assert other == {"number": 6}, "another conversation is open by now"


@pytest.mark.parametrize("said", [None, [], {"number": "1", "text": 5, "files": "abc"}])
def test_what_a_page_makes_up_is_nothing(on: composer.Handlers, said: Any) -> None:
    asked = composer.Asked(gr.EventData(None, said))
    assert (asked.number, asked.text("text"), asked.files) == (0, "", [])
    on.drop(gr.EventData(None, said), REQUEST, {})
