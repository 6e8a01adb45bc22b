"""The composer's events without a browser: what a page may ask for, and what it is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio.utils import get_upload_folder

from app.service.attachments import MAX_BYTES, MAX_CHARACTERS, Attachment, join
from app.service.session import Session
from app.web.kit import Visit
from app.web.tabs import composer
from app.web.tabs.chat import Chat
from engine.errors import PromptError
from tests.support.blocks import tab_of
from tests.support.inside import OWNER, soon

VISIT = Visit(OWNER, "page", {})


@pytest.fixture
def talking(session: Session, warned: list[str]) -> Chat:
    return tab_of(Chat, session)


@pytest.fixture
def on(talking: Chat) -> composer.Composer:
    return talking.composer


def data(**said: object) -> gr.EventData:
    return gr.EventData(None, said)


def sent(name: str, content: bytes) -> str:
    """A file as Gradio keeps what a page has sent."""
    folder = Path(get_upload_folder()) / "composer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return str(folder / name)


def say(on: Chat, shown: str | None, **said: object) -> dict[Any, Any]:
    values = (part.value for part in on.controls.inputs)
    return on.say(VISIT, data(number=7, **said), shown, *values)


def test_a_file_is_read_counted_and_deleted(on: composer.Composer) -> None:
    path = sent("notes.md", b"# Notes\n")
    found = on.attach(OWNER, data(number=3, name="notes.md", path=path))
    assert found["number"] == 3
    block = Attachment("notes.md", "# Notes").block
    shown: Any = found["file"]
    assert shown == {
        "key": shown["key"],
        "name": "notes.md",
        "size": 7,
        "tokens": len(block),
        "exact": True,
        "note": "",
    }
    path = sent("a.txt", "Отчёт о встрече".encode("cp1251"))
    found = on.attach(OWNER, data(number=4, name="a.txt", path=path))
    assert found["file"]["note"] == "read as Windows-1251, a guess"
    assert not Path(path).exists()
    # What cannot be read is deleted as well.
    for name, content in (("image.png", b"\0\1\2"), ("large.txt", b"a" * (MAX_BYTES + 1))):
        path = sent(name, content)
        found = on.attach(OWNER, data(number=3, name=name, path=path))
        assert name in str(found["error"]) and not Path(path).exists()


def test_only_what_was_sent_to_the_page_is_read(on: composer.Composer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("do not read me")
    folder = Path(get_upload_folder())
    for path in (str(secret), f"{folder}/../{secret}", "", "/etc/passwd"):
        found = on.attach(OWNER, data(number=1, name="x.txt", path=path))
        assert "file" not in found and "error" in found
    assert secret.exists(), "nothing else is deleted"
    link = folder / "link.txt"
    folder.mkdir(parents=True, exist_ok=True)
    link.symlink_to(secret)
    found = on.attach(OWNER, data(number=1, name="x.txt", path=str(link)))
    link.unlink()
    assert "file" not in found and secret.exists()


def test_nobody_sends_the_files_of_another(on: composer.Composer, talking: Chat) -> None:
    path = sent("mine.txt", b"mine")
    file: Any = on.attach("guest:b", data(number=1, name="mine.txt", path=path))
    found = say(talking, None, text="hello", files=[file["file"]["key"]])
    assert found[talking.composer.channels["sent"]] == {"number": 7, "ok": False}


def test_an_edit_makes_another_version_with_the_files_that_stay(
    session: Session, on: composer.Composer, talking: Chat, warned: list[str]
) -> None:
    file: Any = on.attach(OWNER, data(number=1, name="a.txt", path=sent("a.txt", b"words")))
    found = say(talking, None, text="Why?", files=[file["file"]["key"]])
    conversation = found[talking.current]
    store = session.chat.conversations("local")
    first = store.messages(conversation)[0]
    taken = talking.composer.channels["revised"]
    values = [part.value for part in talking.controls.inputs]

    def revise(message: str, text: str, *kept: int, files: Sequence[str] = ()) -> dict[Any, Any]:
        assert soon(lambda: session.generations.find("local", conversation) is None)
        event = data(number=4, message=message, text=text, kept=list(kept), files=list(files))
        return talking.revise(VISIT, event, conversation, *values)

    assert revise(first.id, "How?", 0)[taken] == {"number": 4, "ok": True}
    second = store.messages(conversation)[0]
    assert second.content == join([Attachment("a.txt", "words")], "How?")
    assert second.versions == (first.id, second.id)
    assert revise(second.id, "When?")[taken]["ok"]
    third = store.messages(conversation)[0]
    assert third.content == "When?", "the file was removed"
    more: Any = on.attach(OWNER, data(number=2, name="b.txt", path=sent("b.txt", b"more")))
    added = revise(third.id, "Who?", files=[more["file"]["key"]])
    assert added[taken]["ok"]
    third = store.messages(conversation)[0]
    assert third.content == join([Attachment("b.txt", "more")], "Who?")
    refused = revise("no such message", "Hm?")
    assert "There is no such message" in warned[-1]
    assert refused.pop(taken) == {"number": 4, "ok": False}, "it stays where it is written"
    assert soon(lambda: session.generations.find("local", conversation) is None)
    measured = on.measure(
        OWNER,
        data(number=5, conversation=conversation, message=third.id, text="x" * 90, kept=[]),
        conversation,
        "",
    )
    assert measured["number"] == 5 and measured["tokens"] >= 90


def test_an_answer_or_a_file_is_attached_to_be_rewritten(talking: Chat) -> None:
    store = talking.session.chat.conversations(OWNER)
    conversation = store.create().id
    files = [Attachment("a.md", "one"), Attachment("b.md", "two")]
    asked = store.append(conversation, "user", join(files, "What is it?"))
    said = store.append(conversation, "assistant", "<think>\nhm\n</think>\n\nIt is two.\n")
    empty = store.append(conversation, "assistant", "<think>\nhm")

    def attached(message: str, file: object = 0) -> str:
        found: Any = talking.rewrite(OWNER, data(message=message, file=file), conversation)
        assert "number" not in found and found["file"]["note"] == "to be rewritten"
        key = found["file"]["key"]
        return talking.session.attachments.message(OWNER, [key], "Shorter.")

    for message, file, name, text in (
        (asked, 1, "b.md", "two"),
        (said, 0, "answer.md", "It is two."),
    ):
        made = join([Attachment(name, text, rewrite=True)], "Shorter.")
        assert attached(message.id, file) == made
    with pytest.raises(PromptError, match="no text to rewrite"):
        attached(empty.id)
    for odd in (2, -1, "1", None):
        with pytest.raises(PromptError, match="no text to rewrite"):
            attached(asked.id, odd)
    with pytest.raises(PromptError, match="no such message"):
        attached("another")


def test_a_rewritten_answer_is_accepted_as_a_version(talking: Chat) -> None:
    store = talking.session.chat.conversations(OWNER)
    conversation = store.create().id
    messages = [
        store.append(conversation, role, text)
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    event = data(act="accept", message=messages[3].id, of=messages[1].id)
    values = (part.value for part in talking.controls.inputs)
    found = talking.act(VISIT, event, conversation, *values)
    assert [turn["text"] for turn in found[talking.tokens]["turns"]] == ["a", "d"]
    assert len(store.messages(conversation)[1].versions) == 2


def test_a_page_that_shows_another_conversation_by_now_sends_nothing(
    session: Session, talking: Chat
) -> None:
    found = say(talking, "another", text="hello", conversation="the one before")
    assert found == {talking.composer.channels["sent"]: {"number": 7, "ok": False}}
    assert session.chat.conversations("local").list() == []


def test_the_gauge_is_sent_in_numbers_or_not_at_all(
    session: Session, on: composer.Composer
) -> None:
    found = on.measure(OWNER, data(number=4, text="hello"), None, "")
    assert found["number"] == 4 and found["fits"] and found["dropped"] == 0
    assert int(str(found["tokens"])) > len("hello")
    assert found["context"] == session.current.info.context_length
    with session.tasks.begin("local", "busy"):
        assert on.measure(OWNER, data(number=5, text="hello"), None, "") == {"number": 5}
    other = on.measure(OWNER, data(number=6, conversation="x"), None, "")
    assert other == {"number": 6}, "another conversation is open by now"


def test_a_page_is_answered_whatever_happens(
    on: composer.Composer, talking: Chat, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of the program must not leave a page waiting for its answer."""

    def broken(*_: object) -> None:
        raise TypeError("expected <another> type")

    monkeypatch.setattr(talking.session.attachments, "message", broken)
    monkeypatch.setattr(talking.session.attachments, "add", broken)
    assert on.measure(OWNER, data(number=5, text="hello"), None, "") == {"number": 5}
    refused = say(talking, None, text="hello")
    assert refused == {talking.composer.channels["sent"]: {"number": 7, "ok": False}}
    assert len(warned) == 2 and "TypeError: expected &lt;another&gt; type" in warned[0]
    path = sent("notes.md", b"# Notes\n")
    found = on.attach(OWNER, data(number=3, name="notes.md", path=path))
    assert found["number"] == 3 and "an error in Strata" in str(found["error"])


def test_a_message_has_a_most_length(
    on: composer.Composer, talking: Chat, warned: list[str]
) -> None:
    text = "a" * (MAX_CHARACTERS + 1)
    assert on.measure(OWNER, data(number=5, text=text), None, "") == {"number": 5}
    refused = say(talking, None, text=text)
    assert refused == {talking.composer.channels["sent"]: {"number": 7, "ok": False}}
    assert warned == [
        "The message has 1,000,001 characters, and at most 1,000,000 can be sent. Shorten it."
    ]


def test_half_a_character_is_replaced_before_it_is_counted(on: composer.Composer) -> None:
    request = composer.ComposerRequest(data(text="a\ud83d\ude00\ud83d"))
    assert request.text("text") == "a😀\ufffd"


def test_what_a_page_makes_up_is_nothing(on: composer.Composer) -> None:
    for shown in (None, [], {"number": "1", "text": 5, "files": "abc"}):
        request = composer.ComposerRequest(gr.EventData(None, shown))
        assert (request.number, request.text("text"), request.files) == (0, "", [])
        on.drop(OWNER, gr.EventData(None, shown))
