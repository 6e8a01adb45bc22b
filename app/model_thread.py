"""One thread for the model, used by one run at a time (app/turns.py says by which).

The libraries below keep a team of helper threads per calling thread. Called from whichever thread
happens to serve an event, the teams compete: on two cores a step then takes twice as long.
"""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

from app.turns import ASK_SECONDS, MOST_WAITING, Run, Turns, Waiting

T = TypeVar("T")
END = object()
TOLD = 10
"""A waiting stream says so every so many times that it asks for its turn."""


class Pause:
    """An item of a stream that lets others use the model before the stream goes on."""


PAUSE = Pause()


class ModelThread:
    """Runs calls and iterators; the caller waits, so that order and errors are as usual.

    `each` is how many runs of one owner may wait for their turn.
    """

    def __init__(self, each: int = MOST_WAITING) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.turns = Turns(each)

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, when its turn has come. Raises Busy."""
        return self.once(work, Run())

    def take(self, work: Callable[[], T], run: Run) -> T:
        """The same for work that does not wait for others: who uses the model is stopped.

        Raises Cancelled, with nothing done, when the run is stopped before its turn has come.
        """
        run.urgent = True

        def end() -> None:
            if user := self.turns.running:
                user.stop.set()

        return self.once(work, run, end)

    def once(self, work: Callable[[], T], run: Run, ask: Callable[[], None] = lambda: None) -> T:
        """One call as one run."""
        self.turns.join(run)
        try:
            self.turns.wait(run, ask)
            return self.pool.submit(work).result()
        finally:
            self.turns.leave(run)

    def stream(
        self, items: Generator[T | Pause, None, None], run: Run | None = None
    ) -> Iterator[T | Waiting]:
        """The items of a generator, each made on the model's thread, one `Waiting` now and then
        before its turn has come.

        The model stays taken until the end, or up to a PAUSE among the items. Closing this iterator
        has the generator closed before the model does anything else; nobody waits for that, as it
        may happen in any thread. Raises Busy, and Cancelled when it is stopped before it began.
        """
        run = run or Run()
        self.turns.join(run)
        try:
            yield from self.queued(run)
            while (item := self.pool.submit(next, items, END).result()) is not END:
                if isinstance(item, Pause):
                    self.turns.pause(run)
                    yield from self.queued(run)
                else:
                    yield item  # type: ignore[misc]
        finally:
            self.pool.submit(items.close)
            self.turns.leave(run)

    def queued(self, run: Run) -> Iterator[Waiting]:
        """Wait for the run's turn, if it has not come yet."""
        if self.turns.running is not run:
            for asked in count():
                ahead = self.turns.begun(run, ASK_SECONDS)
                if not ahead:
                    return
                if asked % TOLD == 0:
                    yield Waiting(ahead)
