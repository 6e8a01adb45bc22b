"""What can be stopped: every task of every owner, from when it is asked for to when it is over.

A task is an answer, a proof, a comparison, a load. Each has a stop of its own, which is set once
and never cleared, so that nobody can take back the stop of a task that is not theirs.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from engine.queue import before_it_began
from engine.streams import Stream

T = TypeVar("T")


HUNG_SECONDS = 30.0
"""A forward ends early once it is stopped, and all else takes less. What does not end by then never
will."""
ENDING_SECONDS = 2.0
"""So long one waits for a task to end that was stopped."""


class Stoppable(Protocol):
    """A piece of the engine's work."""

    def stop(self) -> None:
        """Have it end."""


class Stop:
    """Ends one task: whatever the engine does for it, and what only asks whether it is set."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.streams: list[Stoppable] = []
        self.lock = threading.Lock()

    def set(self) -> None:
        """End the task."""
        with self.lock:
            self.event.set()
            streams = list(self.streams)
        for stream in streams:
            stream.stop()

    def is_set(self) -> bool:
        """Whether the task is to end."""
        return self.event.is_set()

    def start(self, begin: Callable[[], Stream[T]]) -> Stream[T]:
        """What `begin` has the engine do, which ends with the task.

        Raises Cancelled, with nothing begun, when that has ended already.
        """
        if self.is_set():
            raise before_it_began()
        stream = begin()
        with self.lock:
            self.streams.append(stream)
        if self.is_set():
            stream.stop()
        return stream

    def over(self, stream: Stoppable) -> None:
        """A piece of work has ended: there is nothing left of it to stop."""
        with self.lock:
            if stream in self.streams:
                self.streams.remove(stream)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which answer of a conversation is wanted: one that follows the message `after` (None: it is
    the first message), or more of the answer `going_on` that does."""

    after: str | None
    going_on: str = ""


@dataclass(eq=False, slots=True)
class Task:
    """One task: whose it is, what it is about ("" or a conversation), and its stop; of an answer,
    which one is `wanted`, None for one to the last message."""

    owner: str
    about: str = ""
    stop: Stop = field(default_factory=Stop)
    wanted: Wanted | None = None


class Tasks:
    """The tasks of every owner that can be stopped: asked for, waiting, or under way."""

    MOST_ASKED = 1024
    """Tasks that were asked for and never begun, as their page was closed in between."""

    def __init__(self, hung: Callable[[], None] = lambda: None) -> None:
        self.hung = hung
        """Called when a task goes on for HUNG_SECONDS after it was stopped."""
        self.asked: OrderedDict[tuple[str, str], Task] = OrderedDict()
        self.known: dict[tuple[str, str], list[Task]] = {}
        self.lock = threading.Lock()
        self.over = threading.Condition(self.lock)

    def ask(self, owner: str, about: str, wanted: Wanted | None = None) -> Task:
        """The task that will follow: what stops it from now on stops that one."""
        with self.lock:
            task = self.asked[owner, about] = Task(owner, about, wanted=wanted)
            self.asked.move_to_end((owner, about))
            while len(self.asked) > self.MOST_ASKED:
                self.asked.popitem(last=False)
            return task

    @contextmanager
    def begin(self, owner: str, about: str, asked: bool = False) -> Iterator[Task]:
        """A task, known until the block ends; with `asked` the one that was asked for."""
        key = owner, about
        with self.lock:
            task = (self.asked.pop(key, None) if asked else None) or Task(owner, about)
            self.known.setdefault(key, []).append(task)
        try:
            yield task
        finally:
            with self.lock:
                self.known[key].remove(task)
                if not self.known[key]:
                    del self.known[key]
                self.over.notify_all()

    def stop(self, owner: str, about: str) -> None:
        """Stop what was asked for or is known by now; what is asked for later is not touched."""
        with self.lock:
            tasks = [*self.known.get((owner, about), ()), self.asked.get((owner, about))]
        for task in filter(None, tasks):
            task.stop.set()
            late = threading.Timer(HUNG_SECONDS, self.look, (task,))
            late.daemon = True
            late.start()

    def end(self, owner: str, about: str) -> None:
        """Stop it, and wait until it is over, so that what it did is stored; not for long."""
        self.stop(owner, about)
        with self.over:
            self.over.wait_for(lambda: (owner, about) not in self.known, ENDING_SECONDS)

    def look(self, task: Task) -> None:
        """See whether a task that was stopped is over by now."""
        with self.lock:
            hangs = task in self.known.get((task.owner, task.about), ())
        if hangs:
            self.hung()

    def wanted(self, owner: str, about: str) -> Wanted | None:
        """Which answer was asked for last, or is under way."""
        with self.lock:
            tasks = [self.asked.get((owner, about)), *self.known.get((owner, about), ())]
        return next((task.wanted for task in tasks if task and task.wanted), None)

    @property
    def idle(self) -> bool:
        """Whether nobody's task waits or is under way."""
        with self.lock:
            return not self.known

    def others(self, task: Task | None) -> list[Task]:
        """The tasks of everyone that wait or are under way, but for this one."""
        with self.lock:
            return [one for known in self.known.values() for one in known if one is not task]

    def busy(self, owner: str, about: str) -> bool:
        """Whether there is a task that waits or is under way."""
        with self.lock:
            return (owner, about) in self.known
