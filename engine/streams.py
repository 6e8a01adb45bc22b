"""The results of long work: items from a working thread, for a thread that shows them.

The producer never waits for the consumer: items go through a queue that has no limit.

    producer (one thread)          consumer (one thread)
    stream.put(item)               for item in stream: ...
    stream.put_all(items)          for items in stream.batches(): ...
    stream.end(error)              the iterator ends, or raises the error

Any thread may call `stop` and `close`, also before the work began. `stop` is a request: the
producer checks `stream.stopped` and finishes when it can, and the consumer still gets all items.
`close` also drops the items. `stopped` belongs to this one piece of work: it is set once and never
cleared, so that nobody can undo the stop of other work.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
PACE = 0.03
"""Seconds between two batches: short enough to look like a steady flow."""
AT_ONCE = 4
"""The number of first batches without a pause. The first step of an answer is one of them, as only
its start and its prompt come before it."""


@dataclass(frozen=True, slots=True)
class End:
    """The last entry of the queue, with the error of the work, if any."""

    error: BaseException | None = None


class Stream(Generic[T]):
    """Items of type T, in the order in which they were put, and then the end or an error."""

    def __init__(self, pace: float = PACE, on_stop: Callable[[], object] = lambda: None) -> None:
        """`on_stop` is called once if the stream is stopped before the producer has ended."""
        self.stopped = Event()
        self._pace, self._on_stop = pace, on_stop
        self._queue: SimpleQueue[Sequence[T] | End] = SimpleQueue()
        self._taken: deque[T] = deque()
        """Items that were taken out of the queue and not yet returned to the consumer."""
        self._ended = Event()
        """Set when the producer has ended."""
        self._over = False
        """Whether the consumer has reached the end."""
        self._closed = False
        self._error: BaseException | None = None

    # called by the producer

    def put(self, item: T) -> None:
        """Add an item. Never waits; after `close` the item is dropped."""
        self.put_all((item,))

    def put_all(self, items: Sequence[T]) -> None:
        """Add items that `batches` returns together."""
        if not self._closed:
            self._queue.put(items)

    def end(self, error: BaseException | None = None) -> None:
        """End the stream. The consumer gets the items before this, and then raises `error`."""
        self._queue.put(End(error))
        self._ended.set()
        # What it refers to may hold this stream, and would stay until the next garbage collection.
        self._on_stop = lambda: None

    # called by the consumer

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._closed:
            if self._taken:
                return self._taken.popleft()
            if self._over:
                break
            self._take(self._queue.get())
        error, self._error = self._error, None
        if error is not None and not self._closed:
            raise error
        raise StopIteration

    def batches(self) -> Iterator[list[T]]:
        """All items in lists: the first AT_ONCE lists as soon as there is an item, then all new
        items every `pace` seconds, and the end as soon as it comes.

        If there are none, this waits for one item. A generator that is abandoned closes the stream.
        """
        try:
            for number, first in enumerate(self, 1):
                due = time.monotonic() + self._pace
                yield [first, *self._rest()]
                if number >= AT_ONCE and not self._over:
                    self._ended.wait(max(0.0, due - time.monotonic()))
        finally:
            self.close()

    def _rest(self) -> list[T]:
        with suppress(Empty):
            while not self._over:
                self._take(self._queue.get_nowait())
        rest = list(self._taken)
        self._taken.clear()
        return rest

    def _take(self, arrived: Sequence[T] | End) -> None:
        if isinstance(arrived, End):
            self._over, self._error = True, arrived.error
        else:
            self._taken.extend(arrived)

    # called by any thread

    def stop(self) -> None:
        """Ask the producer to finish."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._on_stop()

    def close(self) -> None:
        """Stop, drop the items in the queue, and end the consumer's iteration."""
        if self._closed:
            return
        self._closed = True
        if not self._over:
            self.stop()
            self._queue.put(End())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
