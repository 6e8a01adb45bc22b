"""Another program holds the database locked: answers end as ever, and are stored when it lets go.

Waiting is not measured: whoever waits for a lock fails the test.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.service.session import Session
from engine.errors import StorageError
from storage.database import DROPPED, STORED, Database
from storage.drafting import CalibrationStore, DraftingStore
from storage.ngrams import ModelNgrams
from storage.traces import Traces
from tests.support.inside import (
    OWNER,
    SECONDS,
    answer,
    local,
    messages,
    on_toy,
    preferences,
    updates_of,
)
from tests.support.served import ask, served


class Other:
    """Another program, with the same file."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def lock(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def let_go(self) -> None:
        self.connection.execute("ROLLBACK")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "strata.db") as made:
        yield made


@pytest.fixture
def other(db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    def sleep(seconds: float) -> None:
        raise AssertionError("waits for another program")

    assert db.path is not None
    found = Other(db.path)
    monkeypatch.setattr("storage.database.sleep", sleep)
    monkeypatch.setattr("storage.database.PAUSE", 0.01)
    yield found
    found.connection.close()


@pytest.fixture
def session(db: Database) -> Iterator[Session]:
    made = on_toy(db)
    yield made
    made.engine.close()


def stored(session: Session) -> bool:
    """Whether everything that waits comes to be stored, by the engine as well."""
    store = local(session).store
    assert isinstance(store, DraftingStore)
    return session.notices.writes.idle.wait(SECONDS) and store.writes.idle.wait(SECONDS)


def test_an_answer_ends_at_once_and_is_stored_later(session: Session, other: Other) -> None:
    printed = list[str]()
    session.notices.say = printed.append
    conversation = session.chat.say(OWNER, None, "hello there")
    store, fingerprint = session.chat.conversations(OWNER), session.current.info.fingerprint
    other.lock()
    last = answer(session, conversation)
    assert last.finish and len(store.messages(conversation)) == 1
    writing = session.notices.writes
    assert "is locked by another program" in writing.locked and printed == [writing.locked]
    assert session.notices.take(OWNER) == [writing.locked]
    other.let_go()
    assert stored(session) and not session.notices.locked
    _, message = store.messages(conversation)
    assert message.content == last.text != ""
    assert "".join(piece.text for piece in message.pieces or ()) == last.text
    assert Traces(session.database, OWNER).load(message.run_id or "").finish == last.finish
    assert ModelNgrams(session.database, OWNER, fingerprint).rows() > 0
    assert CalibrationStore(session.database, OWNER, fingerprint).load()
    assert session.notices.take(OWNER) == [STORED] and printed[1:] == [STORED]


def test_a_notice_that_cannot_be_given_keeps_nothing_from_being_stored(
    session: Session, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, first = session.notices.writes, session.chat.say(OWNER, None, "hello")
    second, store = session.chat.say(OWNER, None, "hello"), session.chat.conversations(OWNER)
    report = writes.report

    def fail(owner: str, notice: str) -> None:
        report(owner, notice)
        if notice == STORED:
            raise OSError("the terminal is closed")

    monkeypatch.setattr(writes, "report", fail)
    for conversation in (first, second):
        other.lock()
        assert answer(session, conversation).finish
        other.let_go()
        assert stored(session) and len(store.messages(conversation)) == 2


def test_a_lock_that_begins_and_ends_within_an_answer(session: Session, other: Other) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    items = updates_of(session, OWNER, conversation, preferences())
    next(items)
    other.lock()
    next(items)
    other.let_go()
    *_, last = items
    assert stored(session)
    assert messages(session, conversation)[1].content == last.text  # type: ignore[union-attr]


def test_answers_that_wait_are_stored_in_their_order(session: Session, other: Other) -> None:
    conversations = [session.chat.say(OWNER, None, f"message {number}") for number in range(3)]
    other.lock()
    texts = [answer(session, conversation).text for conversation in conversations]
    waiting = [owner for owner, _ in session.notices.writes.waiting]
    assert len(waiting) == 3 and set(waiting) == {OWNER}
    other.let_go()
    assert stored(session)
    store = session.chat.conversations(OWNER)
    assert [store.messages(conversation)[1].content for conversation in conversations] == texts
    order = [trace.conversation_id for trace in Traces(session.database, OWNER).history()]
    assert order == conversations[::-1]


def test_a_program_is_reported_in_the_header_and_in_health(db: Database, other: Other) -> None:
    with served(db=db) as server:
        key, secret = server.session.programs.keys.make("mine")
        for one in ("", secret):  # an owner who is known, and one who never asked before
            with server.client(one) as client:
                other.lock()
                found = ask(client, text="tell me of the sea", max_tokens=25)
                assert found.status_code == 200 and found.headers["strata-storage"] == "locked"
                assert found.json()["choices"][0]["message"]["content"]
                health = client.get("/health")
                assert health.status_code == 200 and health.json()["status"] == "ok"
                assert health.json()["storage"]["status"] == "locked"
                assert (
                    "Close that program before you close Strata"
                    in health.json()["storage"]["message"]
                )
                assert str(db.path) not in health.text and "strata.db" in health.text
                other.let_go()
                assert stored(server.session)
                assert client.get("/health").json() == {"status": "ok"}
                found = ask(client, text="hello", max_tokens=2)
                assert "strata-storage" not in found.headers
        fingerprint = server.session.current.info.fingerprint
        assert ModelNgrams(db, "api", fingerprint).rows() > 0
        assert ModelNgrams(db, key.owner, fingerprint).rows() > 0


def test_what_cannot_be_stored_either_way_becomes_a_notice(session: Session, other: Other) -> None:
    def fail() -> None:
        with session.database.write():
            raise StorageError("The disk is full.")

    other.lock()
    session.notices.keep(OWNER, fail)
    other.let_go()
    assert stored(session)
    assert "The disk is full." in session.notices.take(OWNER)
    session.notices.keep(OWNER, fail)
    assert session.notices.take(OWNER) == ["The disk is full."]


def test_not_everything_waits_for_ever(
    session: Session, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.MOST_WAITING", 2)
    done = list[int]()

    def write(number: int) -> None:
        with session.database.write():
            done.append(number)

    other.lock()
    for number in range(4):
        session.notices.keep(OWNER, lambda number=number: write(number))
    assert DROPPED in session.notices.take(OWNER)
    other.let_go()
    assert stored(session) and done == [0, 1]
