"""The context gauge: what it counts, and when it asks nobody."""

import pytest

from app.service.attachments import Attachment, join
from app.service.gauge import NEXT
from app.service.session import Session
from engine.backends.toy import ToyBackend
from engine.local import Local
from engine.prompt import Chat, Size
from engine.types import Message
from storage.database import Database


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend()


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


def test_the_gauge_counts_what_was_said_and_what_is_written(
    session: Session, toy: ToyBackend
) -> None:
    store = session.chat.conversations("me")
    conversation = store.create().id
    store.set_system_prompt(conversation, "Be kind.")
    store.append(conversation, "user", "hello")
    store.append(conversation, "assistant", "hi")
    said = [Message("system", "Be kind."), Message("user", "hello"), Message("assistant", "hi")]

    def counted(*more: Message) -> Size:
        return Chat(toy).measure([*said, *more])

    gauge = session.gauge
    assert gauge.size("me", conversation, "", "and you?", None) == counted(
        Message("user", "and you?")
    )
    assert gauge.size("me", conversation, "", " ", None) == counted(Message("user", NEXT))
    first = store.messages(conversation)[0].id
    edited = gauge.size("me", conversation, "", "hey", first)
    assert edited == Chat(toy).measure([said[0], Message("user", "hey")])
    assert gauge.size("you", conversation, "", "x", None) is None, "another's conversation"


def test_a_conversation_to_come_counts_its_system_prompt(session: Session, toy: ToyBackend) -> None:
    found = session.gauge.size("me", None, "Be kind.", "hello", None)
    assert found == Chat(toy).measure([Message("system", "Be kind."), Message("user", "hello")])
    empty = session.gauge.size("me", None, "", "", None)
    assert empty is not None and empty.tokens == 0


def test_nothing_is_asked_of_the_engine_while_an_answer_is_under_way(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("measure", "counts"):
        monkeypatch.setattr(session.engine, name, lambda given, name=name: asked.append(name))
    with session.tasks.begin("someone else", "c"):
        assert session.gauge.size("me", None, "", "hello", None) is None
        assert session.gauge.counts(["12345", ""]) == [(2, False), (0, False)]
    assert asked == []
    session.gauge.size("me", None, "", "hello", None)
    assert asked == ["measure"]


def test_without_a_model_tokens_are_estimated(db: Database) -> None:
    session = Session(Local(), db)
    assert session.gauge.size("me", None, "", "hello", None) is None
    assert session.gauge.counts(["12345678"]) == [(2, False)]


def test_files_are_counted_by_the_model_that_reads_them(session: Session) -> None:
    assert session.gauge.counts(["hello"]) == [(5, True)]


def test_a_conversation_is_named_after_its_words_and_not_after_its_files(session: Session) -> None:
    file = Attachment("report.md", "long text")
    first = session.chat.say("me", None, join([file], "What does it say?"))
    second = session.chat.say("me", None, join([file], ""))
    store = session.chat.conversations("me")
    assert store.get(first).title == "What does it say?"
    assert store.get(second).title == "report.md"
    last = store.last(first)
    assert last and "long text" in session.chat.prompt("me", first, last)[-1].content
