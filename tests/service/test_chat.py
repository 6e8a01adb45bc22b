"""Conversations: their titles, how full the context is, and deletions that can come back."""

import threading
from collections.abc import Callable

import pytest

from app.service.attachments import Attachment, join
from app.service.chat import NEXT
from app.service.session import Session
from engine.local import Local
from engine.prompt import Chat, Size
from engine.types import Message
from storage import deletions
from storage.database import Database
from storage.titles import LONGEST, title_of
from tests.support.inside import OWNER
from tests.support.toy import ToyBackend


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hi", "Hi"),
        ("  Two\n lines", "Two lines"),
        ("# Head\nand text", "Head"),
        ("Tell me a story. It should be long, and it should rhyme.", "Tell me a story"),
        ("What is 3.5 times 2? Explain.", "What is 3.5 times 2?"),
        ("# A heading\n\ntext", "A heading"),
        ("- **bold** `code` item", "bold code item"),
        ("> quoted\nmore", "quoted more"),
        ("1. First things first", "First things first"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("---\n***\nUnder the line", "Under the line"),
        ("e.g. this one", "e.g. this one"),
        ("", ""),
        (" \n ", ""),
        ("!!!", ""),
        ("数字の話をして。", "数字の話をして。"),
    ],
)
def test_a_title_is_how_the_first_message_begins(text: str, title: str) -> None:
    assert title_of(text) == title


def test_a_long_title_is_cut_after_a_word() -> None:
    text = "a rather long first message that goes on and on without any end of a sentence"
    title = title_of(text)
    assert len(title) <= LONGEST and title.endswith("…")
    assert text.startswith(title[:-1]) and text[len(title) - 1] == " "
    for many in ("\n", " ", "*"):  # no time that grows with the square of their number
        assert title_of("a" + many * 200_000 + "x").startswith("a")
    assert title_of("x" * 500) == "x" * (LONGEST - 1) + "…"


def test_the_gauge_counts_what_was_said_and_what_is_written(
    session: Session, toy: ToyBackend
) -> None:
    store = session.chat.conversations("me")
    conversation = store.create().id
    store.set_system_prompt(conversation, "Be kind.")
    store.append(conversation, "user", "hello")
    store.append(conversation, "assistant", "hi")
    messages = [Message("system", "Be kind."), Message("user", "hello"), Message("assistant", "hi")]

    def counted(*more: Message) -> Size:
        return Chat(toy).measure([*messages, *more])

    gauge = session.chat
    assert gauge.size("me", conversation, "", "and you?", None) == counted(
        Message("user", "and you?")
    )
    assert gauge.size("me", conversation, "", " ", None) == counted(Message("user", NEXT))
    first = store.messages(conversation)[0].id
    edited = gauge.size("me", conversation, "", "hey", first)
    assert edited == Chat(toy).measure([messages[0], Message("user", "hey")])
    assert gauge.size("you", conversation, "", "x", None) is None, "another's conversation"


def test_a_conversation_to_come_counts_its_system_prompt(session: Session, toy: ToyBackend) -> None:
    found = session.chat.size("me", None, "Be kind.", "hello", None)
    assert found == Chat(toy).measure([Message("system", "Be kind."), Message("user", "hello")])
    empty = session.chat.size("me", None, "", "", None)
    assert empty is not None and empty.tokens == 0


def test_nothing_is_asked_of_the_engine_while_an_answer_is_under_way(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("measure", "counts"):
        monkeypatch.setattr(session.engine, name, lambda *given, name=name: calls.append(name))
    with session.tasks.begin("someone else", "c"):
        assert session.chat.size("me", None, "", "hello", None) is None
        assert session.chat.counts(["12345", ""]) == [(2, False), (0, False)]
    assert calls == []
    session.chat.size("me", None, "", "hello", None)
    assert calls == ["measure"]


def test_tokens_are_counted_by_the_model_and_estimated_without_one(
    session: Session, db: Database
) -> None:
    assert session.chat.counts(["hello"]) == [(5, True)]
    bare = Session(Local(), db)
    assert bare.chat.size("me", None, "", "hello", None) is None
    assert bare.chat.counts(["12345678"]) == [(2, False)]


def test_a_conversation_is_named_after_its_words_and_not_after_its_files(session: Session) -> None:
    file = Attachment("report.md", "long text")
    first = session.chat.say("me", None, join([file], "What does it say?"))
    second = session.chat.say("me", None, join([file], ""))
    store = session.chat.conversations("me")
    assert store.get(first).title == "What does it say?"
    assert store.get(second).title == "report.md"
    last = store.last(first)
    assert last and "long text" in session.chat.prompt("me", first, last)[-1].content


class Timers(list[tuple[float, Callable[[], None]]]):
    """Timers that never run by themselves: their seconds, and what they would do."""

    def make(self, seconds: float, work: Callable[[], None]) -> threading.Thread:
        self.append((seconds, work))
        return threading.Thread(target=lambda: None)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found = Timers()
    monkeypatch.setattr("app.service.chat.threading.Timer", found.make)
    return found


def test_one_timer_waits_for_the_oldest_deletion_and_then_for_the_next(
    db: Database, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    session = Session(Local(backend=ToyBackend()), db)
    chat = session.chat
    first, second, third = (chat.conversations(OWNER).create().id for _ in range(3))
    chat.delete(OWNER, first)
    now[0] += 600
    token = chat.delete(OWNER, second)
    assert [seconds for seconds, _ in timers] == [deletions.SECONDS + 1]
    now[0] = 1000 + deletions.SECONDS + 1
    timers.pop()[1]()
    assert [place for (place,) in db.execute_read("SELECT place FROM deletions")] == [second]
    assert [seconds for seconds, _ in timers] == [600.0]
    assert chat.undo(OWNER, token) == second
    timers.pop()[1]()
    assert timers == [] and len(chat.conversations(OWNER).list()) == 2
    chat.delete(OWNER, third)
    assert len(timers) == 1
    db.close()
    timers.pop()[1]()  # The program is closing: the next start looks.
