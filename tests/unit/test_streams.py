"""Streams: order, batches, the end, Stop and Close at every time, and questions."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from engine.errors import ModelError
from engine.streams import AT_ONCE, PACE, Stream

LONG = 30.0
"""Seconds that nothing here comes near: a time-out that is met is a failure."""


@contextmanager
def thread(work: Callable[[], Any]) -> Iterator[threading.Thread]:
    """Work beside the test; it must have ended when the block does."""
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    yield worker
    worker.join(LONG)
    assert not worker.is_alive()


def filled(*items: int, error: BaseException | None = None) -> Stream[int]:
    stream: Stream[int] = Stream()
    for item in items:
        stream.put(item)
    stream.end(error)
    return stream


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between batches, none of which is waited for."""
    seconds: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            seconds.append(timeout or 0.0)
            return True

    made = Stream.__init__

    def make(stream: Stream[int], *arguments: float, **named: float) -> None:
        made(stream, *arguments, **named)
        stream._ended = Counted()

    monkeypatch.setattr(Stream, "__init__", make)
    return seconds


def test_items_come_in_order_and_then_the_end_for_ever() -> None:
    stream = filled(1, 2, 3)
    assert list(stream) == [1, 2, 3]
    assert list(stream) == [] and list(stream.batches()) == []


def test_an_error_comes_after_the_items_and_once() -> None:
    error = ModelError("broken")
    stream = filled(1, 2, error=error)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ModelError) as raised:
        next(stream)
    assert raised.value is error
    assert list(stream) == []


def test_the_first_items_come_at_once_and_so_does_the_end() -> None:
    """The pause is a day long, and the producer puts nothing more before the item was seen."""
    stream: Stream[int] = Stream(pace=86_400.0)
    batches = stream.batches()
    for number in range(AT_ONCE):
        with thread(partial(stream.put, number)):
            assert next(batches) == [number]
    with thread(lambda: stream.end()):
        assert list(batches) == []


def test_between_batches_is_a_pause_and_all_that_came_meanwhile_is_one(slept: list[float]) -> None:
    stream: Stream[int] = Stream()
    batches = stream.batches()
    for number in range(AT_ONCE):
        stream.put(number)
        assert next(batches) == [number] and slept == []
    for number in (7, 8, 9):
        stream.put(number)
    assert next(batches) == [7, 8, 9]
    assert len(slept) == 1 and 0 <= slept[0] <= PACE


def test_items_that_were_put_together_arrive_together() -> None:
    stream: Stream[int] = Stream(pace=0.0)
    got: list[list[int]] = []
    with thread(lambda: got.extend(stream.batches())):
        for start in range(0, 3_000, 3):
            stream.put_all([start, start + 1, start + 2])
        stream.end()
    assert [item for batch in got for item in batch] == list(range(3_000))
    assert all(len(batch) % 3 == 0 for batch in got)


def test_stop_is_a_request_and_what_comes_after_it_arrives() -> None:
    stream: Stream[str] = Stream()
    stream.put("before")
    stream.stop()
    stream.stop()
    assert stream.stopped.is_set()
    stream.put("last words")
    stream.end()
    assert list(stream) == ["before", "last words"]
    assert stream.stopped.is_set(), "never cleared"


def test_close_frees_a_consumer_that_waits() -> None:
    stream: Stream[int] = Stream()
    got: list[int] = []
    with thread(lambda: got.extend(stream)):
        stream.close()
    with thread(lambda: got.extend(stream)):
        pass
    assert got == [] and stream.stopped.is_set()


def test_after_close_nothing_is_kept_and_nothing_raised() -> None:
    stream: Stream[int] = Stream()
    stream.put(1)
    stream.close()
    for number in range(1_000):
        stream.put(number)
    assert stream._queue.qsize() <= 2
    stream.end(ModelError("nobody cares"))
    assert list(stream) == [] and list(stream.batches()) == []


def test_close_drops_what_was_taken_together_too() -> None:
    stream: Stream[int] = Stream()
    stream.put_all([1, 2, 3])
    stream.end()
    assert next(stream) == 1
    stream.close()
    assert list(stream) == []


def test_batches_that_are_given_up_close_the_stream() -> None:
    stream: Stream[int] = Stream()
    stream.put(1)
    batches = stream.batches()
    next(batches)
    assert not stream.stopped.is_set()
    batches.close()  # type: ignore[attr-defined]
    assert stream.stopped.is_set()


def test_work_that_ended_by_itself_was_not_stopped() -> None:
    stream = filled(1)
    with stream:
        assert list(stream.batches()) == [[1]]
    assert not stream.stopped.is_set()
