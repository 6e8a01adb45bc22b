"""What can be stopped: the tasks that are there, and what the engine does for them."""

import threading
from typing import Any

import pytest

from app.service.tasks import Stop, Tasks
from engine.errors import Cancelled
from engine.streams import Stream


def test_a_stop_is_of_the_tasks_that_are_there_and_of_no_later_one() -> None:
    tasks = Tasks()
    tasks.ask("a", "x")
    tasks.stop("a", "x")
    with tasks.begin("a", "x", asked=True) as first:
        assert first.stop.is_set(), "it was stopped between being asked for and beginning"
        with tasks.begin("a", "x", asked=True) as second:
            assert not second.stop.is_set()
            tasks.ask("a", "x")
            tasks.stop("a", "x")
            assert second.stop.is_set()
            tasks.ask("a", "x")
            with tasks.begin("a", "x", asked=True) as third:
                assert not third.stop.is_set()
    assert not tasks.busy("a", "x") and not tasks.known


@pytest.mark.parametrize("other", [("a", "y"), ("b", "x"), ("b", "")])
def test_a_stop_touches_no_other_conversation_and_no_other_owner(other: tuple[str, str]) -> None:
    tasks = Tasks()
    with tasks.begin("a", "x") as task:
        tasks.stop(*other)
        assert not task.stop.is_set() and tasks.busy("a", "x") and not tasks.busy(*other)


def test_what_was_asked_for_and_never_begun_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tasks, "MOST_ASKED", 10)
    tasks = Tasks()
    for number in range(1000):
        tasks.ask("a", str(number))
    assert len(tasks.asked) == 10


def test_a_stop_ends_everything_that_the_engine_does_for_the_task_and_nothing_else() -> None:
    stop, others = Stop(), Stream[Any]()
    streams = [stop.start(Stream[Any]) for _ in range(3)]
    Stop().start(lambda: others)
    stop.set()
    assert all(stream.stopped.is_set() for stream in streams) and stop.is_set()
    assert not others.stopped.is_set()


def test_after_a_stop_nothing_is_begun() -> None:
    stop, begun = Stop(), list[str]()
    stop.set()
    with pytest.raises(Cancelled, match="before it began"):
        stop.start(lambda: begun.append("begun"))  # type: ignore[func-returns-value,arg-type]
    assert not begun


def test_a_stop_that_comes_while_the_engine_is_asked_ends_that_too() -> None:
    stop, stream = Stop(), Stream[Any]()

    def begin() -> Stream[Any]:
        stopping = threading.Thread(target=stop.set)
        stopping.start()
        stopping.join(20)
        assert not stopping.is_alive(), "a stop waits for nothing"
        return stream

    assert stop.start(begin).stopped.is_set()


def test_a_run_that_goes_on_after_its_stop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.tasks.HUNG_SECONDS", 0.01)
    told = threading.Event()
    tasks = Tasks(told.set)
    with tasks.begin("ann", "a"):
        tasks.stop("ann", "a")
        assert told.wait(20)
    told.clear()
    with tasks.begin("ann", "b"):
        pass
    tasks.stop("ann", "b")
    assert not told.wait(0.1), "it is over"
