"""Whose turn it is to use the model: one run at a time, owners in turn, a bounded queue.

A run is an answer, a proof, a comparison, a profile. Each has a stop of its own, which is set once
and never cleared, so that nobody can take back the stop of a run that is not theirs. A run that
waits can be stopped as well: it leaves the queue.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from engine.errors import Cancelled, StrataError

ME = "local"
"""The owner of what the app does by itself, and of everything where no one else can come in."""
MOST_WAITING = 32
"""Runs of all owners that wait at once. Each takes a thread of the server now and then."""
MOST_SERVED = 1024
"""Owners whose last turn is remembered."""
ASK_SECONDS = 0.05
"""How often a waiting run looks whether it was stopped."""


class Busy(StrataError):
    """Too much is waiting for the model already."""


@dataclass(eq=False, slots=True)
class Run:
    """One use of the model: whose it is, what it is about ("" or a conversation), and its stop."""

    owner: str = ME
    about: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """So many runs come before this one."""

    ahead: int


class Turns:
    """The queue. `each` is how many runs of one owner may wait."""

    def __init__(self, each: int = MOST_WAITING) -> None:
        self.each = each
        self.running: Run | None = None
        self.served: OrderedDict[str, int] = OrderedDict()
        """When the owners had their last turns, as the number of that turn."""
        self.waiting: list[Run] = []
        """In the order they came."""
        self.numbers = count(1)
        self.changed = threading.Condition()

    def check(self, owner: str) -> None:
        """Raise Busy unless another run of this owner may wait."""
        with self.changed:
            own = sum(run.owner == owner for run in self.waiting)
            if own >= self.each:
                raise Busy(
                    f"{own} of your requests {'waits' if own == 1 else 'wait'} for the model "
                    "already. Wait until one begins, or stop it."
                )
            if len(self.waiting) >= MOST_WAITING:
                raise Busy(
                    f"{len(self.waiting)} requests wait for the model already. Try again in a "
                    "moment."
                )

    def join(self, run: Run) -> None:
        """Queue up. Raises Busy."""
        with self.changed:
            if not run.urgent:
                self.check(run.owner)
            self.waiting.append(run)

    def order(self) -> list[Run]:
        """The waiting runs as they will have their turns.

        Every owner's first run comes before anyone's second one, and the owner whose last turn is
        the longest ago before the others. Among equals, who came first.
        """
        before: Counter[str] = Counter()
        rounds = []
        for run in self.waiting:
            rounds.append((not run.urgent, before[run.owner], self.served.get(run.owner, 0)))
            before[run.owner] += 1
        places = sorted(range(len(rounds)), key=lambda at: (rounds[at], at))
        return [self.waiting[at] for at in places]

    def begun(self, run: Run, seconds: float) -> int:
        """Wait at most so long for the run's turn; how many come before it, 0 once it has begun.

        Raises Cancelled when it was stopped: it is not in the queue any more.
        """
        with self.changed:
            self.changed.wait_for(lambda: run.stop.is_set() or self.ready(run), seconds)
            if run.stop.is_set():
                self.leave(run)
                raise Cancelled("It was stopped before it began. Everything is as it was.")
            if self.ready(run):
                self.waiting.remove(run)
                self.running = run
                self.note(run.owner)
                return 0
            return self.order().index(run) + (self.running is not None)

    def note(self, owner: str) -> None:
        """The owner has a turn."""
        self.served[owner] = next(self.numbers)
        self.served.move_to_end(owner)
        if len(self.served) > MOST_SERVED:
            self.served.popitem(last=False)

    def ready(self, run: Run) -> bool:
        """Whether it is the run's turn."""
        return self.running is None and self.order()[0] is run

    def leave(self, run: Run) -> None:
        """Give the model to the next one, or leave the queue; twice does no harm."""
        with self.changed:
            if self.running is run:
                self.running = None
            elif run in self.waiting:
                self.waiting.remove(run)
            self.changed.notify_all()

    def pause(self, run: Run) -> None:
        """Let those who wait have their turns first: the run is the last to come."""
        with self.changed:
            if self.running is run and self.waiting:
                self.running = None
                self.waiting.append(run)
                self.changed.notify_all()

    def wait(self, run: Run, ask: Callable[[], None] = lambda: None) -> None:
        """Wait until it is the run's turn, calling `ask` now and then. Raises Cancelled."""
        while self.begun(run, ASK_SECONDS):
            ask()


class Runs:
    """The runs of every owner that can be stopped: asked for, waiting, or under way."""

    MOST_ASKED = 1024
    """Runs that were asked for and never begun, as their page was closed in between."""

    def __init__(self) -> None:
        self.asked: OrderedDict[tuple[str, str], Run] = OrderedDict()
        self.known: dict[tuple[str, str], list[Run]] = {}
        self.lock = threading.Lock()

    def ask(self, owner: str, about: str) -> None:
        """A run will follow: what stops it from now on stops that one."""
        with self.lock:
            self.asked[owner, about] = Run(owner, about)
            self.asked.move_to_end((owner, about))
            while len(self.asked) > self.MOST_ASKED:
                self.asked.popitem(last=False)

    @contextmanager
    def begin(self, owner: str, about: str, asked: bool = False) -> Iterator[Run]:
        """A run, known until the block ends; with `asked` the one that was asked for."""
        key = owner, about
        with self.lock:
            run = (self.asked.pop(key, None) if asked else None) or Run(owner, about)
            self.known.setdefault(key, []).append(run)
        try:
            yield run
        finally:
            with self.lock:
                self.known[key].remove(run)
                if not self.known[key]:
                    del self.known[key]

    def stop(self, owner: str, about: str) -> None:
        """Stop what was asked for or is known by now; what is asked for later is not touched."""
        with self.lock:
            runs = [*self.known.get((owner, about), ()), self.asked.get((owner, about))]
        for run in filter(None, runs):
            run.stop.set()

    def busy(self, owner: str, about: str) -> bool:
        """Whether there is a run that waits or is under way."""
        with self.lock:
            return (owner, about) in self.known
