"""Whose turn it is: owners in turn, a bounded queue that can be left, a stop for each run."""

import threading
from collections.abc import Callable, Iterator

import pytest

from app.model_thread import PAUSE, ModelThread
from app.turns import MOST_WAITING, Busy, Run, Runs, Turns, Waiting
from engine.errors import Cancelled


def started(turns: Turns, *owners: str) -> list[Run]:
    """Runs of these owners: the first one has its turn, the others wait."""
    runs = [Run(owner) for owner in owners]
    for run in runs:
        turns.join(run)
    assert turns.begun(runs[0], 0) == 0
    return runs


def served(turns: Turns) -> str:
    """The owners in the order of their turns; each run is over at once."""
    found = ""
    while turns.waiting:
        if turns.running:
            turns.leave(turns.running)
        run = turns.order()[0]
        assert turns.begun(run, 0) == 0
        found += run.owner
    return found


@pytest.mark.parametrize(
    ("owners", "turns"),
    [("aaaa", "aaa"), ("aaabc", "bcaa"), ("abab", "bab"), ("aaabb", "baba"), ("abcabc", "bcabc")],
)
def test_every_owner_has_a_turn_before_anyone_has_two(owners: str, turns: str) -> None:
    queue = Turns()
    started(queue, *owners)
    assert served(queue) == turns


def test_a_guest_who_comes_again_and_again_keeps_nobody_waiting() -> None:
    """The other one waits for the run under way, and for no more."""
    turns = Turns()
    greedy = started(turns, "greedy", "greedy")
    (other,) = [Run("other")]
    turns.join(other)
    assert turns.begun(greedy[1], 0) == 2 and turns.begun(other, 0) == 1
    turns.leave(greedy[0])
    turns.join(Run("greedy"))
    assert turns.begun(other, 0) == 0


def test_what_is_urgent_comes_first() -> None:
    turns = Turns()
    first, *_ = started(turns, "a", "b", "c")
    swap = Run(urgent=True)
    turns.join(swap)
    assert turns.begun(swap, 0) == 1
    turns.leave(first)
    assert turns.begun(swap, 0) == 0


def test_an_owner_may_have_so_many_waiting_runs_and_is_told() -> None:
    turns = Turns(each=1)
    started(turns, "a")
    for owner in "ab":
        turns.join(Run(owner))
    turns.check("c")
    for owner in "ab":
        with pytest.raises(Busy, match="1 of your requests waits for the model already"):
            turns.join(Run(owner))
    turns.join(Run("a", urgent=True))
    turns = Turns()
    started(turns, "first")
    for number in range(MOST_WAITING):
        turns.join(Run(str(number)))
    with pytest.raises(Busy, match=f"{MOST_WAITING} requests wait for the model already"):
        turns.join(Run("one more"))


def test_a_stopped_run_leaves_the_queue() -> None:
    turns = Turns()
    _, second, third = started(turns, "a", "b", "c")
    assert turns.begun(third, 0) == 2
    second.stop.set()
    with pytest.raises(Cancelled, match="before it began"):
        turns.begun(second, 0)
    assert turns.begun(third, 0) == 1 and turns.waiting == [third]


def numbers(*found: int) -> Iterator[int]:
    yield from found


def test_a_stream_tells_that_it_waits_and_has_its_turn() -> None:
    model = ModelThread()
    first, second = model.stream(numbers(1, 2)), model.stream(numbers(3))  # type: ignore[arg-type]
    assert next(first) == 1
    assert next(second) == Waiting(1)
    assert list(first) == [2]
    assert [item for item in second if not isinstance(item, Waiting)] == [3]


def test_a_closed_stream_gives_its_place_away() -> None:
    model = ModelThread()
    first, second, third = (model.stream(numbers(n)) for n in (1, 2, 3))  # type: ignore[arg-type]
    next(first)
    assert (next(second), next(third)) == (Waiting(1), Waiting(2))
    second.close()  # type: ignore[attr-defined]
    first.close()  # type: ignore[attr-defined]
    assert [item for item in third if not isinstance(item, Waiting)] == [3]
    assert not model.turns.waiting and model.turns.running is None


def test_a_failing_stream_gives_the_model_back() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    model = ModelThread()
    with pytest.raises(OSError, match="no more"):
        list(model.stream(failing()))  # type: ignore[arg-type]
    assert model.run(lambda: "free") == "free"


def test_a_pause_lets_those_who_wait_have_the_model() -> None:
    order: list[str] = []

    def work(name: str, *, pauses: bool) -> Iterator[object]:
        for part in range(2):
            order.append(f"{name}{part}")
            yield part
            if pauses and not part:
                yield PAUSE

    model = ModelThread()
    long = model.stream(work("long", pauses=True), Run("a"))  # type: ignore[arg-type]
    assert next(long) == 0
    other = model.stream(work("other", pauses=False), Run("b"))  # type: ignore[arg-type]
    assert next(other) == Waiting(1)
    thread = threading.Thread(target=lambda: list(other))
    thread.start()
    rest = [item for item in long if not isinstance(item, Waiting)]
    thread.join(10)
    assert rest == [1] and order == ["long0", "other0", "other1", "long1"]


def test_a_pause_without_anybody_waiting_costs_no_turn() -> None:
    def work() -> Iterator[object]:
        yield 1
        yield PAUSE
        yield 2

    assert list(ModelThread().stream(work())) == [1, 2]  # type: ignore[arg-type]


def test_only_one_run_uses_the_model_whoever_comes_when() -> None:
    """A hundred runs of ten owners, each in a thread: never two at a time, and all are served."""
    model, inside, done, faults = ModelThread(), [0], list[int](), list[str]()

    def work(number: int) -> Iterator[int]:
        for _ in range(3):
            inside[0] += 1
            if inside[0] > 1:
                faults.append("two at a time")
            yield number
            inside[0] -= 1

    def one(number: int) -> Callable[[], None]:
        def run() -> None:
            while True:
                try:
                    items = list(model.stream(work(number), Run(str(number % 10))))  # type: ignore[arg-type]
                except Busy:
                    continue
                done.append(items[-1])  # type: ignore[arg-type]
                return

        return run

    # The generator is left between two items with `inside` at 1 for its own run alone.
    threads = [threading.Thread(target=one(number)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == list(range(100)) and not faults


# the stop of each run


def test_a_stop_is_of_the_runs_that_are_there_and_of_no_later_one() -> None:
    runs = Runs()
    runs.ask("a", "x")
    runs.stop("a", "x")
    with runs.begin("a", "x", asked=True) as first:
        assert first.stop.is_set(), "it was stopped between being asked for and beginning"
        with runs.begin("a", "x", asked=True) as second:
            assert not second.stop.is_set()
            runs.ask("a", "x")
            runs.stop("a", "x")
            assert second.stop.is_set()
            runs.ask("a", "x")
            with runs.begin("a", "x", asked=True) as third:
                assert not third.stop.is_set()
    assert not runs.busy("a", "x") and not runs.known


@pytest.mark.parametrize("other", [("a", "y"), ("b", "x"), ("b", "")])
def test_a_stop_touches_no_other_conversation_and_no_other_owner(other: tuple[str, str]) -> None:
    runs = Runs()
    with runs.begin("a", "x") as run:
        runs.stop(*other)
        assert not run.stop.is_set() and runs.busy("a", "x") and not runs.busy(*other)


def test_what_was_asked_for_and_never_begun_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "MOST_ASKED", 10)
    runs = Runs()
    for number in range(1000):
        runs.ask("a", str(number))
    assert len(runs.asked) == 10
