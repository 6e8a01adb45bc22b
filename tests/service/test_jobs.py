"""Tasks that can be stopped, and jobs: their progress, their end, and one at a time."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.service import jobs
from app.service.jobs import Job, Slot, Stop, Tasks
from engine.errors import Cancelled, ModelError, StrataError
from engine.streams import Stream
from tests.support.inside import soon


def test_a_stop_is_of_the_tasks_that_are_there_and_of_no_later_one() -> None:
    tasks = Tasks()
    tasks.ask("a", "x")
    tasks.stop("a", "x")
    with tasks.begin("a", "x", requested=True) as first:
        assert first.stop.is_set(), "it was stopped between being asked for and beginning"
        with tasks.begin("a", "x", requested=True) as second:
            assert not second.stop.is_set()
            tasks.ask("a", "x")
            tasks.stop("a", "x")
            assert second.stop.is_set()
            tasks.ask("a", "x")
            with tasks.begin("a", "x", requested=True) as third:
                assert not third.stop.is_set()
    assert not tasks.busy("a", "x") and not tasks.known


@pytest.mark.parametrize("other", [("a", "y"), ("b", "x"), ("b", "")])
def test_a_stop_touches_no_other_conversation_and_no_other_owner(other: tuple[str, str]) -> None:
    tasks = Tasks()
    with tasks.begin("a", "x") as task:
        tasks.stop(*other)
        assert not task.stop.is_set() and tasks.busy("a", "x") and not tasks.busy(*other)


def test_what_was_asked_for_and_never_started_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tasks, "MOST_REQUESTED", 10)
    tasks = Tasks()
    for number in range(1000):
        tasks.ask("a", str(number))
    assert len(tasks.requested) == 10


def test_a_stop_ends_everything_that_the_engine_does_for_the_task_and_nothing_else() -> None:
    stop, others = Stop(), Stream[Any]()
    streams = [stop.start(Stream[Any]) for _ in range(3)]
    Stop().start(lambda: others)
    stop.set()
    assert all(stream.stopped.is_set() for stream in streams) and stop.is_set()
    assert not others.stopped.is_set()


def test_after_a_stop_nothing_is_started() -> None:
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


def test_a_run_that_continues_after_its_stop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.jobs.HUNG_SECONDS", 0.01)
    notified = threading.Event()
    tasks = Tasks(notified.set)
    with tasks.begin("ann", "a"):
        tasks.stop("ann", "a")
        assert notified.wait(20)
    notified.clear()
    with tasks.begin("ann", "b"):
        pass
    tasks.stop("ann", "b")
    assert not notified.wait(0.1), "it is over"


def test_a_stop_leaves_no_thread_once_the_task_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.jobs.HUNG_SECONDS", 3600.0)
    tasks = Tasks()
    with tasks.begin("ann", "a"):
        before = {*threading.enumerate()}
        tasks.stop("ann", "a")
        started = {*threading.enumerate()} - before
    watching = [thread for thread in started if isinstance(thread, threading.Timer)]
    assert watching
    for thread in watching:
        thread.join(60)
        assert not thread.is_alive()


def test_the_end_of_all_tasks_is_awaited() -> None:
    tasks, begun, ended = Tasks(), threading.Semaphore(0), list[str]()

    def work(owner: str) -> None:
        with tasks.begin(owner, "a") as task:
            begun.release()
            assert task.stop.event.wait(60)
            ended.append(owner)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in ("ann", "bob")]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=60)
    tasks.end_all()
    assert sorted(ended) == ["ann", "bob"] and not tasks.known


Work = Callable[[Job[int, str]], str]
BUSY = ModelError("One runs already.")


def counted(job: Job[int, str]) -> str:
    """Work of three steps."""
    for step in (1, 2, 3):
        job.report(step)
    return "done"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


def held(gate: threading.Event, then: Work = counted) -> Job[int, str]:
    """A job that begins its work when the gate opens."""

    def work(job: Job[int, str]) -> str:
        assert gate.wait(20)
        return then(job)

    return Job(work, 0).start("held")


def test_every_watcher_sees_how_far_it_is_and_the_end(gate: threading.Event) -> None:
    job = held(gate)
    first, second = job.watch(), job.watch()
    assert [next(first), next(second), next(first)] == [0, 0, 0], "at once, and again"
    gate.set()
    assert list(first)[-1] == 3 == list(second)[-1] and job.result() == "done"
    assert list(job.watch()) == [3], "who comes late sees the last of it"


def test_who_stops_watching_stops_nothing(gate: threading.Event) -> None:
    job = held(gate)
    reports = job.watch()
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    gate.set()
    assert job.result() == "done"


def test_an_error_reaches_everyone_who_waits(gate: threading.Event) -> None:
    def fall(job: Job[int, str]) -> str:
        raise ModelError("Too large.")

    job = held(gate, fall)
    watching = job.watch()
    gate.set()
    for wait in (lambda: list(watching), job.result, lambda: list(job.watch())):
        with pytest.raises(ModelError, match=r"Too large\."):
            wait()


def test_what_nobody_foresaw_is_an_error_with_words_too(gate: threading.Event) -> None:
    def fall(job: Job[int, str]) -> str:
        raise OSError("cable cut\nmore of it")

    gate.set()
    with pytest.raises(StrataError, match=r"^The work broke off: cable cut\.$"):
        held(gate, fall).result()
    job = Job(fall, 0, lambda error: ModelError(f"Not loaded: {error}")).start("own words")
    with pytest.raises(ModelError, match="Not loaded: cable cut"):
        job.result()


def until_stopped(job: Job[int, str]) -> str:
    assert job.stop.event.wait(20)
    raise Cancelled("It was stopped.")


def test_however_a_job_ends_the_next_one_can_begin() -> None:
    def fail() -> Job[int, str]:
        raise ModelError("No room on the disk.")

    slot = Slot[int, str]()
    slot.cancel()
    job = slot.take(lambda: Job(until_stopped, 0), BUSY).start("stopped")
    slot.cancel()
    with pytest.raises(Cancelled):
        job.result()
    with pytest.raises(ModelError, match="No room"):
        slot.take(fail, BUSY)
    for _ in range(50):
        assert slot.take(lambda: Job(counted, 0), BUSY).start("one").result() == "done"


def test_a_job_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HUNG_SECONDS", 0.01)
    gate, hung = threading.Event(), threading.Event()
    job = held(gate)
    job.cancel(hung.set)
    assert hung.wait(10)
    gate.set()
    job.result()
    hung.clear()
    job.cancel(hung.set)
    assert not hung.wait(0.1), "it is over"


def test_a_job_can_share_the_stop_of_a_task() -> None:
    stop = Stop()
    job = Job(until_stopped, 0, stop=stop).start("part")
    stop.set()
    with pytest.raises(Cancelled):
        job.result()


def test_what_a_job_starts_ends_with_it() -> None:
    ended, inside = list[str](), threading.Event()

    def work(job: Job[int, str]) -> str:
        with job.ending(lambda: ended.append("process")):
            inside.set()
            assert job.stop.event.wait(20)
        return "over"

    job = Job(work, 0).start("with a process")
    assert inside.wait(20)
    job.cancel()
    assert job.result() == "over" and ended == ["process"]
    job.cancel()
    assert ended == ["process"], "it is gone"
    late = Job(work, 0)
    late.cancel()
    assert late.start("stopped before").result() == "over" and ended == ["process"] * 2


def test_one_at_a_time(gate: threading.Event) -> None:
    slot, made = Slot[int, str](), list[str]()

    def make() -> Job[int, str]:
        made.append("job")
        return Job(lambda job: (gate.wait(20), counted(job))[1], 0)

    job = slot.take(make, BUSY).start("one")
    assert slot.running is job
    with pytest.raises(ModelError, match="One runs already"):
        slot.take(make, BUSY)
    assert made == ["job"], "the other one was not even made"
    gate.set()
    slot.wait()
    assert soon(lambda: slot.running is None) and job.result() == "done"
