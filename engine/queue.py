"""Decides whose turn it is to use the model: one run at a time, owners in turn, a bounded queue.

Every run has its own stop, which is set once and never cleared, so nobody can undo the stop of
another run. A waiting run can be stopped as well, and then leaves the queue. Waiting runs are
notified whenever their place changes.

A background run is for idle times: it gets its turn when no other run waits, and is stopped as soon
as another run arrives. It does not delay other runs, so they do not count it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from engine.errors import Busy, Cancelled

OWNER = "local"
"""The owner of the app's own work, and of everything if nobody else can connect."""
MOST_WAITING = 32
"""The most waiting runs of all owners together."""
MOST_SERVED = 1024
"""The number of owners whose last turn is remembered."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The number of runs before this one. With `loading`, one of them loads a model."""

    ahead: int
    loading: bool = False


@dataclass(eq=False, slots=True)
class Run:
    """One use of the model. `work` is called when its turn has come, `notify` with the number of
    runs before it, and `stop` ends it early. A run with priority comes next, a background run after
    all others."""

    owner: str
    work: Callable[[], None]
    notify: Callable[[int], None]
    stop: Callable[[], None]
    priority: bool = False
    ahead: int = 0
    background: bool = False


class RunQueue:
    """The queue, and the one thread on which all runs are executed.

    The libraries below keep a team of helper threads per calling thread. If several threads called
    them, the teams would compete, and on two cores a step would take twice as long. `each` is the
    number of runs of one owner that may wait.
    """

    def __init__(self, each: int = MOST_WAITING) -> None:
        self.each = each
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.closed = False
        self.running: Run | None = None
        self.waiting: list[Run] = []
        """In the order of arrival."""
        self.served: OrderedDict[str, int] = OrderedDict()
        """The number of the last turn of each owner."""
        self.numbers = count(1)
        self.lock = threading.RLock()

    def check(self, owner: str) -> None:
        """Raise Busy unless another run of this owner may wait."""
        with self.lock:
            counted = [run for run in self.waiting if not run.background]
            own = sum(run.owner == owner for run in counted)
            if own >= self.each:
                raise Busy(
                    f"{own} of your requests {'waits' if own == 1 else 'wait'} for the model "
                    "already. Wait until one begins, or stop it."
                )
            if len(counted) >= MOST_WAITING:
                raise Busy(
                    f"{len(counted)} requests wait for the model already. Try again in a moment."
                )

    def join(self, run: Run) -> None:
        """Add a run, whose work begins when its turn comes. Raises Busy, and Cancelled after
        `close`.

        A run with priority waits only for the current run, which it stops. A background run in
        progress is stopped by any other run.
        """
        with self.lock:
            if self.closed:
                raise before_it_began()
            if not run.priority and not run.background:
                self.check(run.owner)
            self.waiting.append(run)
            if self.running is not None and (
                run.priority or (self.running.background and not run.background)
            ):
                self.running.stop()
            self.notify()
            self.thread.submit(self.turn)

    def close(self) -> None:
        """End all runs, and accept no more. Waits for the current one."""
        with self.lock:
            self.closed = True
            for run in [*self.waiting, *([self.running] if self.running else [])]:
                run.stop()
        self.thread.shutdown(wait=True)

    def leave(self, run: Run) -> bool:
        with self.lock:
            if run not in self.waiting:
                return False
            self.waiting.remove(run)
            self.notify()
            return True

    def turn(self) -> None:
        with self.lock:
            if not self.waiting:
                return
            run = self.order()[0]
            self.waiting.remove(run)
            self.running = run
            if not run.background:
                self.served[run.owner] = next(self.numbers)
                self.served.move_to_end(run.owner)
                if len(self.served) > MOST_SERVED:
                    self.served.popitem(last=False)
            self.notify()
        try:
            run.work()
        finally:
            with self.lock:
                self.running = None
                self.notify()

    def order(self) -> list[Run]:
        """The waiting runs in the order of their turns.

        Every owner's first run comes before anyone's second one, and owners whose last turn is
        longest ago come first. Ties are broken by arrival. Background runs are last.
        """
        before: Counter[str] = Counter()
        ranked = []
        for at, run in enumerate(self.waiting):
            last = self.served.get(run.owner, 0)
            ranked.append((run.background - run.priority, before[run.owner], last, at))
            before[run.owner] += not run.background
        return [self.waiting[at] for *_, at in sorted(ranked)]

    def notify(self) -> None:
        under_way = self.running is not None and not self.running.background
        for place, run in enumerate(self.order()):
            ahead = place + under_way
            if ahead != run.ahead:
                run.ahead = ahead
                run.notify(ahead)


def before_it_began() -> Cancelled:
    return Cancelled("Stopped before it began. Nothing was changed.")
