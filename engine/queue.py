"""Whose turn it is to use the model: one run at a time, owners in turn, a bounded queue.

Every run has a stop of its own, which is set once and never cleared, so that nobody can take back
the stop of a run that is not theirs. A run that waits can be stopped as well: it leaves the queue.
Runs that wait are told their place whenever it changes; nobody has to ask.

A patient run is for times when nobody wants anything: it has its turn when no other run waits, and
is stopped as soon as another one comes. Nobody notices it, and it counts for nobody.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from engine.errors import Busy, Cancelled

OWNER = "local"
"""The owner of what the app does by itself, and of everything where no one else can come in."""
MOST_WAITING = 32
"""Runs of all owners that wait at once."""
MOST_SERVED = 1024
"""Owners whose last turn is remembered."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """So many runs come before this one. `loading`: one of them loads a model."""

    ahead: int
    loading: bool = False


@dataclass(eq=False, slots=True)
class Run:
    """One use of the model. `work` is done when its turn has come, `tell` is told how many runs
    come before it, `stop` ends it early. An urgent one comes next, a patient one after all."""

    owner: str
    work: Callable[[], None]
    tell: Callable[[int], None]
    stop: Callable[[], None]
    urgent: bool = False
    ahead: int = 0
    patient: bool = False


class RunQueue:
    """The queue, and the one thread on which runs have their turns.

    The libraries below keep a team of helper threads per calling thread. Called from whichever
    thread happens to ask, the teams compete: on two cores a step then takes twice as long. `each`
    is how many runs of one owner may wait.
    """

    def __init__(self, each: int = MOST_WAITING) -> None:
        self.each = each
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.closed = False
        self.running: Run | None = None
        self.waiting: list[Run] = []
        """In the order they came."""
        self.served: OrderedDict[str, int] = OrderedDict()
        """When the owners had their last turns, as the number of that turn."""
        self.numbers = count(1)
        self.lock = threading.RLock()

    def check(self, owner: str) -> None:
        """Raise Busy unless another run of this owner may wait."""
        with self.lock:
            wanted = [run for run in self.waiting if not run.patient]
            own = sum(run.owner == owner for run in wanted)
            if own >= self.each:
                raise Busy(
                    f"{own} of your requests {'waits' if own == 1 else 'wait'} for the model "
                    "already. Wait until one begins, or stop it."
                )
            if len(wanted) >= MOST_WAITING:
                raise Busy(
                    f"{len(wanted)} requests wait for the model already. Try again in a moment."
                )

    def join(self, run: Run) -> None:
        """Queue up: its work is done when its turn comes. Raises Busy, and Cancelled after `close`.

        An urgent run waits for nobody but the run under way, which it stops. A patient one that is
        under way is stopped by all others.
        """
        with self.lock:
            if self.closed:
                raise before_it_began()
            if not run.urgent and not run.patient:
                self.check(run.owner)
            self.waiting.append(run)
            if self.running is not None and (
                run.urgent or (self.running.patient and not run.patient)
            ):
                self.running.stop()
            self.tell()
            self.thread.submit(self.turn)

    def close(self) -> None:
        """End all runs, and take no more. Waits for the one under way."""
        with self.lock:
            self.closed = True
            for run in [*self.waiting, *([self.running] if self.running else [])]:
                run.stop()
        self.thread.shutdown(wait=True)

    def leave(self, run: Run) -> bool:
        """Take a run out of the queue; False when it is not there (any more)."""
        with self.lock:
            if run not in self.waiting:
                return False
            self.waiting.remove(run)
            self.tell()
            return True

    def turn(self) -> None:
        """Give the next run its turn, if there still is one."""
        with self.lock:
            if not self.waiting:
                return
            run = self.order()[0]
            self.waiting.remove(run)
            self.running = run
            if not run.patient:
                self.note(run.owner)
            self.tell()
        try:
            run.work()
        finally:
            with self.lock:
                self.running = None
                self.tell()

    def order(self) -> list[Run]:
        """The waiting runs as they will have their turns.

        Every owner's first run comes before anyone's second one, and the owner whose last turn is
        the longest ago before the others. Among equals, who came first. Patient runs are last.
        """
        before: Counter[str] = Counter()
        ranks = []
        for run in self.waiting:
            rank = run.patient - run.urgent, before[run.owner], self.served.get(run.owner, 0)
            ranks.append(rank)
            before[run.owner] += not run.patient
        places = sorted(range(len(ranks)), key=lambda at: (ranks[at], at))
        return [self.waiting[at] for at in places]

    def tell(self) -> None:
        """Tell every run its place, if that has changed."""
        under_way = self.running is not None and not self.running.patient
        for place, run in enumerate(self.order()):
            ahead = place + under_way
            if ahead != run.ahead:
                run.ahead = ahead
                run.tell(ahead)

    def note(self, owner: str) -> None:
        """The owner has a turn."""
        self.served[owner] = next(self.numbers)
        self.served.move_to_end(owner)
        if len(self.served) > MOST_SERVED:
            self.served.popitem(last=False)


def before_it_began() -> Cancelled:
    """What a run ends with that was stopped before its turn had come."""
    return Cancelled("Stopped before it began. Nothing was changed.")
