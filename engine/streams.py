"""What long work gives back: items from a thread that works, for a thread that shows them.

The producer never waits for the consumer: items go through a queue that has no limit. Only
`ask` waits, as it wants an answer.

    producer (one thread)          consumer (one thread)
    stream.put(item)               for item in stream: ...
    stream.put_all(items)          for items in stream.batches(): ...
    stream.ask(item) -> value      stream.reply(value)
    stream.end(error)              the iterator ends, or raises the error

Any thread may call `stop` and `close`, also before the work began. `stop` is a request: the
producer looks at `stream.stopped`, finishes as it sees fit, and the consumer still gets what comes.
`close` also gives up the items. `stopped` belongs to this one piece of work: it is set once and
never cleared, so that nobody can undo the Stop of somebody else.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from engine.errors import Cancelled

T = TypeVar("T")
PACE = 0.03
"""Seconds between two batches: what the eye still takes for a steady flow."""


@dataclass(frozen=True, slots=True)
class End:
    """The last thing in the queue, with what the work failed with."""

    error: BaseException | None = None


class Stream(Generic[T]):
    """Items of type T, in the order in which they were put, and then the end or an error."""

    def __init__(self, pace: float = PACE) -> None:
        self.stopped = Event()
        self._pace = pace
        self._queue: SimpleQueue[Sequence[T] | End] = SimpleQueue()
        self._taken: deque[T] = deque()
        """Out of the queue and not given to the consumer yet."""
        self._ended = Event()
        """The producer has ended: nobody need wait for more."""
        self._over = False
        """The consumer has met the end."""
        self._closed = False
        self._error: BaseException | None = None
        self._question: Future[Any] | None = None
        self._asking = Lock()

    # What the producer calls.

    def put(self, item: T) -> None:
        """Add an item. Never waits; after `close` the item is dropped."""
        self.put_all((item,))

    def put_all(self, items: Sequence[T]) -> None:
        """Add items that `batches` keeps together."""
        if not self._closed:
            self._queue.put(items)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes. The consumer gets the items before this and then raises `error`."""
        self._queue.put(End(error))
        self._ended.set()

    def ask(self, item: T) -> Any:
        """Add an item that wants an answer, and wait for the answer. One question at a time.

        Raises Cancelled when the stream was stopped or closed, or is before the answer comes.
        """
        question: Future[Any] = Future()
        with self._asking:
            if self._question is not None:
                raise RuntimeError("a question is open already")
            if self.stopped.is_set():
                raise stopped()
            self._question = question
        self.put(item)
        return question.result()

    # What the consumer calls.

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
        """All items in lists: the first at once, then everything that came, every `pace` seconds,
        and the end as soon as it comes.

        Where nothing comes it waits for one item. A generator that is given up closes the stream.
        """
        try:
            for first in self:
                due = time.monotonic() + self._pace
                yield [first, *self._rest()]
                if not self._over:
                    self._ended.wait(max(0.0, due - time.monotonic()))
        finally:
            self.close()

    def reply(self, value: Any) -> None:
        """Answer the item that asked. Without an open question nothing happens."""
        question = self._answered()
        if question is not None:
            question.set_result(value)

    def _rest(self) -> list[T]:
        """Everything else that is there already."""
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

    # What any thread calls.

    def stop(self) -> None:
        """Ask the producer to finish. An open question is answered with Cancelled."""
        with self._asking:
            self.stopped.set()
        question = self._answered()
        if question is not None:
            question.set_exception(stopped())

    def close(self) -> None:
        """Nobody wants the items: stop, drop what is there, and end the consumer's iteration."""
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

    def _answered(self) -> Future[Any] | None:
        """The open question, which is then no longer open."""
        with self._asking:
            question, self._question = self._question, None
        return question


def stopped() -> Cancelled:
    """What a question gets instead of an answer."""
    return Cancelled("It was stopped before this was answered.")
