"""Whose turn it is: owners in turn, a bounded queue that can be left, places told unasked."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from engine.decode import PAUSE, Turns
from engine.errors import Busy, Cancelled
from engine.local import Local
from engine.queue import MOST_SERVED, MOST_WAITING, Run, RunQueue, Waiting
from engine.streams import Stream


class ByHand:
    """In the place of the model's thread: nothing happens before the test says so."""

    def submit(self, work: Callable[[], None]) -> None:
        """The test calls `RunQueue.turn` itself."""


@dataclass
class Queue:
    """Turns by hand. `done` are the owners in the order of their turns, `stopped` those who were
    asked to end, `places` what each run was told."""

    each: int = MOST_WAITING
    done: str = ""
    stopped: str = ""
    places: list[list[int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = RunQueue(self.each)
        self.turns.thread = ByHand()  # type: ignore[assignment]

    def join(self, owner: str, during: Callable[[], None] = lambda: None, **named: Any) -> Run:
        """A run that queues up; `during` happens while it has its turn."""
        told: list[int] = []

        def turns() -> Turns:
            self.done += owner
            during()
            yield from ()

        def stop() -> None:
            self.stopped += owner

        run = Run(owner, turns, told.append, stop, **named)
        self.turns.join(run)
        self.places.append(told)
        self.runs.append(run)
        return run

    def serve(self) -> str:
        """All turns there are."""
        while self.turns.waiting:
            self.turns.turn()
        return self.done


@pytest.mark.parametrize(
    ("owners", "turns"),
    [("aaaa", "aaa"), ("aaabc", "bcaa"), ("abab", "bab"), ("aaabb", "baba"), ("abcabc", "bcabc")],
)
def test_every_owner_has_a_turn_before_anyone_has_two(owners: str, turns: str) -> None:
    """The others come while the first one has its turn."""
    queue = Queue()
    queue.join(owners[0], lambda: [queue.join(owner) for owner in owners[1:]] and None)
    assert queue.serve() == owners[0] + turns


def test_what_is_urgent_comes_next_and_stops_who_has_the_turn() -> None:
    queue = Queue(each=1)

    def load() -> None:
        for owner in "bc":
            queue.join(owner)
        queue.join("c", priority=True)
        assert queue.places == [[], [1, 2], [2, 3], [1]]
        assert queue.stopped == "a"

    queue.join("a", load)
    assert queue.serve() == "acbc" and queue.stopped == "a"


def test_what_is_patient_has_its_turn_when_nobody_else_wants_one() -> None:
    """Whoever comes stops it, does not wait for it, and is not told of it."""
    queue = Queue()

    def others() -> None:
        queue.join("q", background=True)
        assert queue.stopped == "", "a background run waits for another"
        queue.join("a")
        assert queue.stopped == "p"
        queue.join("b")
        assert queue.places == [[], [1, 2], [], [1]]

    queue.join("p", others, background=True)
    assert queue.serve() == "pabq"


def test_what_is_patient_counts_for_nobody() -> None:
    queue = Queue(each=1)

    def more() -> None:
        for _ in range(MOST_WAITING + 1):
            queue.join("a", background=True)
        queue.join("b")
        queue.join("a")
        with pytest.raises(Busy, match="1 of your requests"):
            queue.join("a")

    queue.join("c", more)
    assert queue.serve() == "cba" + "a" * (MOST_WAITING + 1)
    queue.join("b")
    queue.join("a")
    assert queue.serve().endswith("ba"), "its turns were no turns of its owner"


def test_an_owner_may_have_so_many_waiting_runs_and_is_told() -> None:
    def more() -> None:
        for owner in "ab":
            queue.join(owner)
        queue.turns.check("c")
        for owner in "ab":
            with pytest.raises(Busy, match="1 of your requests waits for the model already"):
                queue.join(owner)
        queue.join("a", priority=True)

    queue = Queue(each=1)
    queue.join("a", more)
    assert queue.serve() == "aaba"

    def crowd() -> None:
        for number in range(MOST_WAITING):
            queue.join(str(number))
        with pytest.raises(Busy, match=f"{MOST_WAITING} requests wait for the model already"):
            queue.join("one more")

    queue = Queue()
    queue.join("first", crowd)
    queue.serve()
    assert len(queue.runs) == MOST_WAITING + 1, "who was refused is in no queue"


def test_places_are_told_when_they_change_and_at_no_other_time() -> None:
    """Nobody has to ask for them."""
    queue = Queue()

    def others() -> None:
        for owner in "bcd":
            queue.join(owner)
        assert queue.places == [[], [1], [2], [3]]
        assert queue.turns.leave(queue.runs[1])
        assert queue.places == [[], [1], [2, 1], [3, 2]]
        assert not queue.turns.leave(queue.runs[1])

    queue.join("a", others)
    assert queue.serve() == "acd"
    assert queue.places == [[], [1], [2, 1, 0], [3, 2, 1, 0]]


def test_of_many_owners_the_latest_turns_are_remembered() -> None:
    queue = Queue()
    for number in range(MOST_SERVED + 10):
        queue.join(str(number))
        queue.turns.turn()
    assert len(queue.turns.served) == MOST_SERVED and "9" not in queue.turns.served


@pytest.mark.parametrize(
    ("shares", "order"),
    [((True, True), "abAB"), ((False, True), "aAbB"), ((True, False), "aAbB")],
)
def test_only_runs_that_share_the_model_are_under_way_together(
    shares: tuple[bool, bool], order: str
) -> None:
    queue, said = Queue().turns, list[str]()
    queue.parallel = 2

    def turns(owner: str) -> Turns:
        said.append(owner)
        yield PAUSE
        said.append(owner.upper())

    for owner, each in zip("ab", shares, strict=True):
        queue.join(Run(owner, partial(turns, owner), lambda n: None, lambda: None, shares=each))
    while queue.waiting:
        queue.turn()
    assert "".join(said) == order


# as streams


@dataclass
class Held:
    """Work that begins with one item, waits to be let go, and says another."""

    goes: threading.Event = field(default_factory=threading.Event)

    def __call__(self, stream: Stream[Any]) -> None:
        stream.put("begun")
        assert self.goes.wait(20)
        stream.put("over")


def says(word: str) -> Callable[[Stream[Any]], None]:
    return lambda stream: stream.put(word)


def test_a_stream_tells_that_it_waits_and_has_its_turn() -> None:
    engine, held = Local(), Held()
    first = engine.start("a", held)
    assert next(first) == "begun"
    second, third = engine.start("a", says("second")), engine.start("b", says("third"))
    assert (next(second), next(third)) == (Waiting(1), Waiting(1))
    held.goes.set()
    assert list(first) == ["over"]
    assert list(third) == ["third"]
    assert list(second) == [Waiting(2), Waiting(1), "second"], "b has not had a turn yet"


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_stream_that_ends_while_it_waits_gives_its_place_away(end: str) -> None:
    engine, held, done = Local(), Held(), list[str]()
    first = engine.start("a", held)
    second = engine.start("a", lambda stream: done.append("second"))
    third = engine.start("a", says("third"))
    assert (next(first), next(second), next(third)) == ("begun", Waiting(1), Waiting(2))
    getattr(second, end)()
    assert next(third) == Waiting(1)
    if end == "stop":
        with pytest.raises(Cancelled, match="before it began"):
            next(second)
    assert list(second) == []
    held.goes.set()
    assert list(first) == ["over"] and list(third) == ["third"]
    assert not done and not engine.queue.waiting and not engine.queue.running


def test_a_stream_that_fails_says_so_and_gives_the_model_back() -> None:
    engine = Local()

    def failing(stream: Stream[Any]) -> None:
        stream.put(1)
        raise OSError("no more")

    stream = engine.start("a", failing)
    assert next(stream) == 1
    with pytest.raises(OSError, match="no more"):
        next(stream)
    assert list(engine.start("a", says("free"))) == ["free"]


def test_what_is_closed_ends_everything_that_waits() -> None:
    engine, stopped = Local(), threading.Event()

    def long(stream: Stream[Any]) -> None:
        stream.put("begun")
        assert stream.stopped.wait(20)
        stopped.set()

    first, second = engine.start("a", long), engine.start("b", says("never"))
    assert next(first) == "begun"
    engine.close()
    assert stopped.is_set() and list(first) == []
    with pytest.raises(Cancelled):
        list(second)
