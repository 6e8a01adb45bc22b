"""Answers go on without a page, and whoever watches one is woken without holding a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.service.generation import KEPT, Answer, Bell, Generations
from app.service.recorder import Update
from app.service.session import Session
from engine.engine import Request
from engine.errors import Busy, Cancelled
from engine.local import Local
from engine.queue import Waiting
from storage.database import Database
from tests.service.test_session import preferences, texts
from tests.support.inside import OWNER, Held, soon

Items = Iterator[Update | Waiting]


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


def ended(answer: Answer) -> Answer:
    assert soon(lambda: answer.over)
    return answer


def test_an_answer_is_complete_though_nobody_watches(session: Session) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = ended(session.generations.start(OWNER, conversation, preferences()))
    assert answer.update is not None and answer.update.finish == "length" and not answer.error
    assert texts(session, conversation) == ["hello there", answer.update.text]
    assert answer.tokens == 60 and answer.update.metrics.forwards > 20
    (_, stored) = session.chat.conversations(OWNER).messages(conversation)
    assert stored.id == answer.message_id and stored.run_id


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


def test_stop_ends_it_and_what_there_is_of_it_stays(session: Session, toy: Held) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    toy.allow(3)
    answer = session.generations.start(OWNER, conversation, preferences("plain", 500))
    assert soon(lambda: toy.allowed[0] == 0)
    session.tasks.stop(OWNER, conversation)
    toy.allow()
    update = ended(answer).update
    assert update is not None and update.finish == "cancelled"
    assert texts(session, conversation)[1:] == ([update.text] if update.text else [])


def raising(error: Exception) -> Callable[..., Items]:
    def answer(*asked: Any) -> Items:
        yield Waiting(1)
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Busy("Too much waits."), "Too much waits."),
        (Cancelled("Stopped before it began."), ""),
        (RuntimeError("a fault"), "a fault"),
    ],
)
def test_it_ends_whatever_goes_wrong(error: Exception, told: str) -> None:
    answer = ended(Generations(raising(error)).start(OWNER, "c", preferences()))
    assert (told in answer.error) and bool(told) == bool(answer.error)
    assert answer.update is None and answer.message_id == "" and answer.tokens == 0


def test_those_that_are_over_are_forgotten_and_those_under_way_never() -> None:
    stay = threading.Event()

    def answer(owner: str, conversation: str, preferences: Any) -> Items:
        yield Waiting(1)
        if conversation == "long":
            stay.wait(20)

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
            assert ready.acquire(timeout=20)
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
