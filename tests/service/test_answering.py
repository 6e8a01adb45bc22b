"""An answer as it is stored and watched: what that costs does not depend on how long it is already,
it goes on without a page, and whoever watches is woken without holding a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.service import answering as module
from app.service.answering import KEPT, Answer, Bell, Generations, Recorder, Update
from app.service.session import Session
from engine.engine import Event, Request
from engine.errors import Busy, Cancelled
from engine.queue import Waiting
from engine.streams import Stream
from engine.types import TARGET, Finish, Learned, Prefill, Step, Token
from storage.conversations import Conversations, Piece
from storage.database import Database
from tests.support.inside import OWNER, Held, messages, preferences, soon, texts


def step(index: int, count: int = 2, finish: Finish | None = None) -> Step:
    tokens = tuple(
        Token(n, index * count + n, "context" if n else TARGET, n, f"{index}.{n} ")
        for n in range(count)
    )
    return Step(index, tokens, verify_seconds=0.01, finish=finish)


@pytest.fixture
def store(db: Database) -> Conversations:
    return Conversations(db, "local")


@pytest.fixture
def recorder(
    db: Database, store: Conversations, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recorder]:
    monkeypatch.setattr(module, "FLUSH_SECONDS", 1000.0)
    conversation = store.create().id
    message = store.append(conversation, "user", "hello")
    made = Recorder(db, "local", conversation, message.id, 7, lambda write: write())
    yield made
    made.close()


def test_an_update_stays_what_it_was(recorder: Recorder) -> None:
    recorder.add(Prefill(3, 0, 0.5))
    updates = []
    for index in range(20):
        recorder.add(step(index))
        updates.append(recorder.update(1))
    for index, update in enumerate(updates):
        assert (update.tokens, len(update.pieces), len(update.steps)) == (
            2 * index + 2,
            2 * index + 2,
            index + 1,
        )
        assert update.metrics.forwards == index + 1 and update.metrics.tokens == 2 * index + 2
        assert update.text == "".join(f"{i}.0 {i}.1 " for i in range(index + 1))
    assert (updates[0].seed, updates[0].dropped, updates[0].finish) == (7, 1, None)
    for before, after in pairwise(updates):
        assert [piece.step for piece in after.since(before.tokens)] == [after.forwards - 1] * 2
    recorder.add(Learned(0.25))
    assert recorder.update(0).metrics.learning_seconds == 0.25


def test_an_update_looks_at_no_token_until_it_is_asked(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: what is made of tokens while 2,000 steps are added and told."""
    made = list[Any]()
    of = Piece.of
    monkeypatch.setattr(Piece, "of", lambda *a: made.append(a) or of(*a))

    class Watched(list[Any]):
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            Watched.looks += 1
            return super().__iter__()

        def __getitem__(self, at: Any) -> Any:
            Watched.looks += 1
            return super().__getitem__(at)

    recorder.pieces, recorder.collector.steps = Watched(), Watched()
    for index in range(2000):
        recorder.add(step(index))
        recorder.update(0)
    assert len(made) == 4000 and Watched.looks == 0


def test_what_is_stored_of_an_answer_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: the bytes that SQLite logs while an answer of 4,000 tokens is stored again and
    again. All that is rewritten is the text: the second half costs less than twice the first."""
    monkeypatch.setattr(module, "FLUSH_SECONDS", 1000.0)
    path = tmp_path / "strata.db"
    with Database(path) as db:
        store = Conversations(db, "local")
        conversation = store.create().id
        message = store.append(conversation, "user", "hello")
        recorder = Recorder(db, "local", conversation, message.id, 7, lambda write: write())
        recorder.add(Prefill(3, 0, 0.5))
        with db.read() as handle:
            handle.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        written = []
        for half in range(2):
            with db.write() as handle:
                handle.execute("PRAGMA wal_autocheckpoint = 0")
            before = path.with_name("strata.db-wal").stat().st_size
            for index in range(1000 * half, 1000 * (half + 1)):
                recorder.add(step(index))
                if index % 10 == 9:
                    recorder.flush()
            written.append(path.with_name("strata.db-wal").stat().st_size - before)
        recorder.close()
        (_, answer) = store.messages(conversation)
        assert answer.pieces == tuple(recorder.pieces) and len(recorder.pieces) == 4000
        assert answer.content == "".join(piece.text for piece in recorder.pieces)
    assert written[1] < 2 * written[0] and sum(written) < 16e6, written


def test_the_end_is_stored_before_it_is_sent(recorder: Recorder, store: Conversations) -> None:
    recorder.add(step(0))
    assert recorder.message_id == "" and len(store.messages(recorder.conversation_id)) == 1
    recorder.add(step(1, finish="eos"))
    message, answered = store.messages(recorder.conversation_id)
    assert answered.id == recorder.message_id and answered.content == "0.0 0.1 1.0 1.1 "
    assert answered.pieces == tuple(recorder.pieces) and isinstance(recorder.pieces[0], Piece)
    assert message.content == "hello" and recorder.update(0).finish == "eos"


def test_a_message_comes_into_being_with_its_first_text(
    recorder: Recorder, store: Conversations
) -> None:
    """The first tokens of an answer may be parts of a character, and say nothing yet."""
    silent = Step(0, (Token(9, 0, TARGET, 0, ""),), verify_seconds=0.01)
    recorder.add(silent)
    recorder.flush()
    assert [m.content for m in store.messages(recorder.conversation_id)] == ["hello"]
    recorder.add(step(1))
    recorder.flush()
    _, answered = store.messages(recorder.conversation_id)
    assert answered.content == "1.0 1.1 " and answered.pieces == tuple(recorder.pieces)
    recorder.add(replace(silent, index=2))
    recorder.flush()
    assert store.messages(recorder.conversation_id)[1].pieces == tuple(recorder.pieces)


Items = Iterator[Update | Waiting]


def ended(answer: Answer) -> Answer:
    assert soon(lambda: answer.over)
    return answer


def test_an_answer_is_complete_though_nobody_watches(session: Session) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = ended(session.generations.start(OWNER, conversation, preferences()))
    assert answer.update is not None and answer.update.finish == "length" and not answer.error
    assert texts(session, conversation) == ["hello there", answer.update.text]
    assert answer.tokens == 60 and answer.update.metrics.forwards > 20
    (_, stored) = messages(session, conversation)
    assert stored.id == answer.message_id and stored.run_id


def test_the_model_is_asked_before_the_page_is_drawn(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that draws the page next. A thread of the answer would compete with it."""
    asked: list[int] = []
    generate = session.engine.generate

    def noting(request: Request) -> Stream[Event]:
        asked.append(threading.get_ident())
        return generate(request)

    monkeypatch.setattr(session.engine, "generate", noting)
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = session.generations.start(OWNER, conversation, preferences())
    assert asked == [threading.get_ident()]
    assert ended(answer).update is not None and len(asked) == 1


def test_what_goes_wrong_before_the_model_is_asked_needs_no_thread(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = session.chat.conversations(OWNER).create().id
    started: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    answer = session.generations.start(OWNER, conversation, preferences())
    assert answer.over and "Write something first" in answer.error and not started
    assert session.generations.find(OWNER, conversation) is None


def test_a_message_is_checked_in_one_call(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call goes to another process and back before the model can be asked."""
    calls: list[str] = []

    class Noting:
        state = session.engine.state

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(session.engine, name)

    monkeypatch.setattr(session.chat, "engine", Noting())
    session.chat.say(OWNER, None, "hello there")
    assert calls == ["check"]


def test_the_first_token_waits_for_no_thread_to_start(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.begin(recorder.run)
    started: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    recorder.add(Prefill(3, 0, 0.5))
    recorder.add(step(0))
    assert recorder.thread.is_alive() and not started


def test_it_is_found_while_it_is_under_way_and_known_by_its_token_after(
    session: Session, toy: Held
) -> None:
    toy.allow(1)
    other = session.engine.generate(Request(prompt=(1, 2)))
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = session.generations.start(OWNER, conversation, preferences())
    assert session.generations.find(OWNER, conversation) is answer
    assert session.generations.find("other", conversation) is None
    assert session.generations.find(OWNER, "elsewhere") is None
    assert soon(lambda: answer.ahead == 1), "it waits, and says so"
    other.close()
    toy.allow()
    assert ended(answer).ahead == 0
    assert session.generations.find(OWNER, conversation) is None
    assert session.generations.get(answer.token) is answer
    assert session.generations.get("made up") is None


def raising(error: Exception) -> Callable[..., Items]:
    def answer(*asked: Any) -> Items:
        yield Waiting(1)
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Busy("Too much waits."), "Too much waits."),
        (Cancelled("Stopped before it began."), ""),
        (RuntimeError("a fault"), "a fault"),
    ],
)
def test_it_ends_whatever_goes_wrong(error: Exception, expected: str) -> None:
    answer = ended(Generations(raising(error)).start(OWNER, "c", preferences()))
    assert (expected in answer.error) and bool(expected) == bool(answer.error)
    assert answer.update is None and answer.message_id == "" and answer.tokens == 0


def test_those_that_are_over_are_forgotten_and_those_under_way_never() -> None:
    stay = threading.Event()

    def answer(owner: str, conversation: str, preferences: Any) -> Items:
        yield Waiting(1)
        if conversation == "long":
            stay.wait(600)

    known = Generations(answer)
    long = known.start(OWNER, "long", preferences())
    begun = [ended(known.start(OWNER, str(n), preferences())) for n in range(3 * KEPT)]
    assert [known.get(a.token) for a in begun] == [None] * (2 * KEPT) + begun[2 * KEPT :]
    assert known.find(OWNER, "long") is long
    stay.set()
    ended(long)


def test_no_two_tokens_are_alike_and_none_is_short() -> None:
    tokens = {Answer(OWNER, "c").token for _ in range(1000)}
    assert len(tokens) == 1000 and min(map(len, tokens)) >= 24


def test_a_bell_wakes_all_who_listen_in_any_loop() -> None:
    bell, woken = Bell(), list[str]()

    async def listen(name: str) -> None:
        with bell.heard() as event:
            for _ in range(2):
                event.clear()
                ready.release()
                await asyncio.wait_for(event.wait(), 20)
                woken.append(name)

    ready = threading.Semaphore(0)
    threads = [threading.Thread(target=asyncio.run, args=(listen(n),)) for n in "ab"]
    for thread in threads:
        thread.start()
    for _ in range(2):
        for _ in threads:
            assert ready.acquire(timeout=60)
        bell.ring()
    for thread in threads:
        thread.join(20)
    assert sorted(woken) == ["a", "a", "b", "b"] and bell.listening == {}
    bell.ring()


def test_a_loop_that_has_ended_is_no_trouble() -> None:
    bell, loop = Bell(), asyncio.new_event_loop()
    bell.listening[asyncio.Event()] = loop
    loop.close()
    bell.ring()
