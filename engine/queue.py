"""Decides whose turn it is to use the model: owners in turn, a bounded queue.

A run has the model to itself, or shares it with other runs that can (engine/rounds.py), up to the
`parallel` ones that the model answers at once. A run that does not share waits until these have
ended, and no further one joins them meanwhile.

Every run has its own stop, which is set once and never cleared, so nobody can undo the stop of
another run. A waiting run can be stopped as well, and then leaves the queue. Waiting runs are
notified whenever their place changes.

A background run is for idle times: it gets its turn when no other run waits, and is stopped as soon
as another run arrives. It does not delay other runs, so they do not count it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from engine.decode import Turns
from engine.drafting.controller import Company
from engine.errors import Busy, Cancelled
from engine.rounds import Member, Rounds

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
    """One use of the model. `turns` is called when its turn has come, `notify` with the number of
    runs before it, and `stop` ends it early. A run with priority comes next, a background run after
    all others.

    A run that `shares` the model is an answer that hears of its `company`. Two runs of one
    `conversation` do not share it.
    """

    owner: str
    turns: Callable[[], Turns]
    notify: Callable[[int], None]
    stop: Callable[[], None]
    priority: bool = False
    ahead: int = 0
    background: bool = False
    shares: bool = False
    company: Company = field(default_factory=Company)
    conversation: str = ""

    def may_join(self, running: "Sequence[Run]") -> bool:
        """Whether it may run beside others that share the model."""
        key = self.owner, self.conversation
        return not self.conversation or all(key != (r.owner, r.conversation) for r in running)


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
        self.parallel = 1
        """How many runs may share the model."""
        self.running: list[Run] = []
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
        """Add a run, which begins when its turn comes. Raises Busy, and Cancelled after `close`.

        A run with priority waits only for the current runs, which it stops. A background run in
        progress is stopped by any other run.
        """
        with self.lock:
            if self.closed:
                raise before_it_began()
            if not run.priority and not run.background:
                self.check(run.owner)
            self.waiting.append(run)
            for current in self.running:
                if run.priority or (current.background and not run.background):
                    current.stop()
            self.notify()
            self.thread.submit(self.turn)

    def close(self) -> None:
        """End all runs, and accept no more. Waits for the current ones."""
        with self.lock:
            self.closed = True
            for run in [*self.waiting, *self.running]:
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
        """Execute the next run, and those that share the model with it."""
        run, rounds = self.take(), Rounds()
        while run is not None or rounds.members:
            while run is not None:
                rounds.add(Member(run.turns(), run.company, partial(self.ended, run)))
                run = self.take()
            rounds.round()
            # Once all have ended, the next run gets a turn of its own.
            run = self.take() if rounds.members else None

    def take(self) -> Run | None:
        """The run whose turn has come, None if there is none or it has to wait."""
        with self.lock:
            if any(not run.shares for run in self.running):
                return None
            for run in self.order():
                if self.running:
                    if not run.shares or len(self.running) >= self.parallel:
                        return None
                    if not run.may_join(self.running):
                        continue
                self.waiting.remove(run)
                self.running.append(run)
                run.company.open = self.parallel > 1
                if not run.background:
                    self.served[run.owner] = next(self.numbers)
                    self.served.move_to_end(run.owner)
                    if len(self.served) > MOST_SERVED:
                        self.served.popitem(last=False)
                self.notify()
                return run
            return None

    def ended(self, run: Run) -> None:
        with self.lock:
            self.running.remove(run)
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
        under_way = [run for run in self.running if not run.background]
        shared = all(run.shares for run in under_way)
        room = self.parallel - len(under_way) if shared else 0
        for place, run in enumerate(self.order()):
            ahead = max(0, place + 1 - room) if run.shares else place + bool(under_way)
            if ahead != run.ahead:
                run.ahead = ahead
                run.notify(ahead)


def before_it_began() -> Cancelled:
    return Cancelled("Stopped before it began. Nothing was changed.")
