"""One thread for the model, and one user of it at a time.

The libraries below keep a team of helper threads per calling thread. Called from whichever thread
happens to serve an event, the teams compete: on two cores a step then takes twice as long.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.errors import Cancelled

T = TypeVar("T")
END = object()
ASK_SECONDS = 0.05


def wait() -> None:
    """How work that cannot be cut short is asked to end."""


def stopped() -> Cancelled:
    """What is raised for work that did not begin."""
    return Cancelled("It was stopped before it began. Everything is as it was.")


class ModelThread:
    """Runs calls and iterators; the caller waits, so that order and errors are as usual."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.turn = threading.Lock()
        self.end = wait

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, once no one else uses the model."""
        with self.turn:
            return self.pool.submit(work).result()

    def take(self, work: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """The same for work that does not wait its turn: who uses the model is asked to end.

        Raises Cancelled, with nothing done, once `cancelled` says so before its turn has come.
        """
        while not self.turn.acquire(timeout=ASK_SECONDS):
            if cancelled():
                raise stopped()
            self.end()
        try:
            if cancelled():
                raise stopped()
            return self.pool.submit(work).result()
        finally:
            self.turn.release()

    def stream(
        self, items: Generator[T, None, None], end: Callable[[], None] = wait
    ) -> Iterator[T]:
        """The items of a generator, each made on the model's thread; `end` makes them few.

        The model stays taken until the end. Closing this iterator has the generator closed before
        the model does anything else; nobody waits for that, as it may happen in any thread.
        """
        with self.turn:
            self.end = end
            try:
                while (item := self.pool.submit(next, items, END).result()) is not END:
                    yield item  # type: ignore[misc]
            finally:
                self.end = wait
                self.pool.submit(items.close)
