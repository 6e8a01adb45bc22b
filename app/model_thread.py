"""One thread for the model, and one user of it at a time.

The libraries below keep a team of helper threads per calling thread. Called from whichever thread
happens to serve an event, the teams compete: on two cores a step then takes twice as long.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
END = object()


class ModelThread:
    """Runs calls and iterators; the caller waits, so that order and errors are as usual."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.turn = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, once no one else uses the model."""
        with self.turn:
            return self.pool.submit(work).result()

    def stream(self, items: Generator[T, None, None]) -> Iterator[T]:
        """The items of a generator, each made on the model's thread.

        The model stays taken until the end. Closing this iterator has the generator closed before
        the model does anything else; nobody waits for that, as it may happen in any thread.
        """
        with self.turn:
            try:
                while (item := self.pool.submit(next, items, END).result()) is not END:
                    yield item  # type: ignore[misc]
            finally:
                self.pool.submit(items.close)
