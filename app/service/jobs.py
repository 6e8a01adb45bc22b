"""Long work: how it runs, reports progress, is stopped, and ends.

A task is an answer, a proof, a comparison or a load: work for an owner that can be stopped from the
moment it is requested until it is over. A job runs on a thread of its own, so it goes on when the
page that began it closes. Any number of pages may watch it, including pages that open later. Each
has its own stop, which is set once and never cleared, so nobody can undo the stop of another one.
"""

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

from app.service.pages import LimitedDict
from engine.errors import Cancelled, StrataError, first_line
from engine.queue import Waiting, before_it_began
from engine.streams import Stream

T = TypeVar("T")


HUNG_SECONDS = 30.0
"""A stopped forward ends early, and all other work takes less time. Work that is still running
after this time will never end."""
WAIT_SECONDS = 0.1
"""How often a waiting task checks whether its turn has come or it was stopped."""
ENDING_SECONDS = 2.0
"""How long to wait for a stopped task to end."""


def later(seconds: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer


class Stop:
    """Ends one task: it stops the task's engine streams, and other work polls `is_set`."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.endings: list[Callable[[], None]] = []
        self.lock = threading.Lock()

    def set(self) -> None:
        with self.lock:
            self.event.set()
            endings = list(self.endings)
        for end in endings:
            end()

    def is_set(self) -> bool:
        return self.event.is_set()

    def check(self) -> None:
        """Raise Cancelled if the task was stopped before it began."""
        if self.is_set():
            raise before_it_began()

    def start(self, begin: Callable[[], Stream[T]]) -> Stream[T]:
        """Start an engine stream with `begin`; stopping the task stops the stream.

        Raises Cancelled, without calling `begin`, if the task was stopped already.
        """
        self.check()
        stream = begin()
        with self.lock:
            self.endings.append(stream.stop)
        if self.is_set():
            stream.stop()
        return stream

    def release(self, end: Callable[[], None]) -> None:
        """No longer call `end`: the work that it would stop is over."""
        with self.lock:
            if end in self.endings:
                self.endings.remove(end)

    @contextmanager
    def calling(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` when the task is stopped within the block, or at once if it was stopped
        before."""
        with self.lock:
            self.endings.append(end)
        try:
            if self.is_set():
                end()
            yield
        finally:
            self.release(end)


@dataclass(frozen=True, slots=True)
class AnswerTarget:
    """Which answer of a conversation is requested: a new answer to the message `after` (None: the
    answer is the first message), or a continuation of that message's answer `continues`."""

    after: str | None
    continues: str = ""


@dataclass(eq=False, slots=True)
class Task:
    """One task of an owner, with its stop.

    `about` is the id of a conversation, or "". `target` says which answer the task makes, None for
    an answer to the last message.
    """

    owner: str
    about: str = ""
    stop: Stop = field(default_factory=Stop)
    target: AnswerTarget | None = None
    timers: list[threading.Timer] = field(default_factory=list)
    """Each is a thread that waits to see whether the task hangs, until the task is over."""

    def wait(self, until: Callable[[], bool], loading: bool = False) -> Iterator[Waiting]:
        """Wait until `until()` is true; `loading` says that a model is being loaded. Raises
        Cancelled if the task is stopped meanwhile."""
        while not until():
            self.stop.check()
            yield Waiting(1, loading=loading)
            self.stop.event.wait(WAIT_SECONDS)


class Tasks:
    """The tasks of all owners: those requested but not begun, and those waiting or running."""

    MOST_REQUESTED = 1024
    """The most requested tasks to remember. Some never begin, because their page was closed."""

    def __init__(self, hung: Callable[[], None] = lambda: None) -> None:
        self.hung = hung
        """Called when a task still runs HUNG_SECONDS after it was stopped."""
        self.requested = LimitedDict[tuple[str, str], Task](self.MOST_REQUESTED)
        self.known: dict[tuple[str, str], list[Task]] = {}
        self.lock = threading.Lock()
        self.over = threading.Condition(self.lock)

    def ask(self, owner: str, about: str, target: AnswerTarget | None = None) -> Task:
        """Request a task that begins later. A stop in between already applies to it."""
        with self.lock:
            task = self.requested[owner, about] = Task(owner, about, target=target)
            return task

    @contextmanager
    def begin(self, owner: str, about: str, requested: bool = False) -> Iterator[Task]:
        """Run the block as a task; with `requested`, as the task that `ask` made, if there is
        one."""
        key = owner, about
        with self.lock:
            task = (self.requested.pop(key, None) if requested else None) or Task(owner, about)
            self.known.setdefault(key, []).append(task)
        try:
            yield task
        finally:
            with self.lock:
                self.known[key].remove(task)
                if not self.known[key]:
                    del self.known[key]
                self.over.notify_all()
            for timer in task.timers:
                timer.cancel()

    def stop(self, owner: str, about: str) -> None:
        """Stop the tasks that are requested, waiting or running now, but none requested later."""
        with self.lock:
            tasks = [*self.known.get((owner, about), ()), self.requested.get((owner, about))]
        for task in filter(None, tasks):
            task.stop.set()
            task.timers.append(later(HUNG_SECONDS, partial(self.end_if_hung, task)))

    def stop_all(self) -> None:
        with self.lock:
            known = [*self.known]
        for owner, about in known:
            self.stop(owner, about)

    def end_all(self) -> None:
        """Stop all tasks, and wait up to ENDING_SECONDS until they are over."""
        self.stop_all()
        with self.over:
            self.over.wait_for(lambda: not self.known, ENDING_SECONDS)

    def end(self, owner: str, about: str) -> None:
        """Stop a task, and wait up to ENDING_SECONDS until it is over and its work is stored."""
        self.stop(owner, about)
        with self.over:
            self.over.wait_for(lambda: (owner, about) not in self.known, ENDING_SECONDS)

    def end_if_hung(self, task: Task) -> None:
        if task in self.others(None):
            self.hung()

    def target(self, owner: str, about: str) -> AnswerTarget | None:
        """Which answer was requested last, or is being made."""
        with self.lock:
            tasks = [self.requested.get((owner, about)), *self.known.get((owner, about), ())]
        return next((task.target for task in tasks if task and task.target), None)

    @property
    def idle(self) -> bool:
        with self.lock:
            return not self.known

    def others(self, task: Task | None) -> list[Task]:
        with self.lock:
            return [one for known in self.known.values() for one in known if one is not task]

    def busy(self, owner: str, about: str) -> bool:
        with self.lock:
            return (owner, about) in self.known


P = TypeVar("P")
R = TypeVar("R")
LOOK_SECONDS = 0.3
"""How often watchers of a job read its progress."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a stage of long work: the share that is done, from 0 to 1 or None where it
    is not known, and a description of the stage."""

    share: float | None
    text: str


def broke_off(error: Exception) -> StrataError:
    return StrataError(f"The work broke off: {first_line(error)}.")


class Job(Generic[P, R]):
    """One piece of long work. Its progress is of type P, its result of type R.

    `work` is called with the job on its thread. It calls `report`, checks `stop`, and returns the
    result or raises StrataError, which is Cancelled if it was stopped. `unexpected` turns any other
    exception into the job's error. `progress` is the progress before the work begins. A job that is
    part of a task shares the task's stop.
    """

    def __init__(
        self,
        work: Callable[["Job[P, R]"], R],
        progress: P,
        unexpected: Callable[[Exception], StrataError] = broke_off,
        stop: Stop | None = None,
    ) -> None:
        self.work, self.progress, self.unexpected = work, progress, unexpected
        self.stop = stop or Stop()
        self.ended: Callable[[], None] = lambda: None
        """Called when the work is done, before anyone who waits for the job continues."""
        self.over = threading.Event()
        self.error: StrataError | None = None
        self.began = monotonic()
        self._result: R | None = None

    def start(self, name: str) -> "Job[P, R]":
        threading.Thread(target=self._run, name=name, daemon=True).start()
        return self

    def report(self, progress: P) -> None:
        self.progress = progress

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` within the block when the job is stopped (at once if it was stopped before) or
        when the program ends. It is for ending a process that the work starts."""
        with self.stop.calling(end):
            atexit.register(end)
            try:
                yield
            finally:
                atexit.unregister(end)

    def watch(self) -> Iterator[P]:
        """Yield the progress now and every LOOK_SECONDS until the job is over; then raise its error
        if there is one. Closing the iterator does not end the job."""
        while not self.over.is_set():
            yield self.progress
            self.over.wait(LOOK_SECONDS)
        yield self.progress
        self.result()

    def result(self) -> R:
        """Wait until the job is over; return what `work` returned. Raises the job's error."""
        self.over.wait()
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    @property
    def problem(self) -> str:
        """Why the job failed; "" while it runs, and if it succeeded or was stopped."""
        return "" if isinstance(self.error, Cancelled) else str(self.error or "")

    @property
    def seconds(self) -> float:
        return monotonic() - self.began

    def cancel(self, hung: Callable[[], None] | None = None) -> None:
        """Stop the job. `hung` is called if it still runs HUNG_SECONDS later."""
        self.stop.set()
        if hung is not None:
            later(HUNG_SECONDS, lambda: None if self.over.is_set() else hung())

    def _run(self) -> None:
        try:
            self._result = self.work(self)
        except StrataError as error:
            self.error = error
        except Exception as error:
            self.error = self.unexpected(error)
        finally:
            self.ended()
            self.over.set()


class Slot(Generic[P, R]):
    """Room for one job at a time: `running` is that job, None where there is none."""

    def __init__(self) -> None:
        self.running: Job[P, R] | None = None
        self.lock = threading.Lock()

    def take(self, make: Callable[[], Job[P, R]], busy: StrataError) -> Job[P, R]:
        """Reserve the slot for the job that `make` returns; the caller starts it. Raises `busy`,
        without calling `make`, while another job runs."""

        def free() -> None:
            self.running = None

        with self.lock:
            if self.running is not None:
                raise busy
            self.running = job = make()
            job.ended = free
        return job

    def wait(self) -> None:
        """Wait until the current job is over."""
        if (job := self.running) is not None:
            job.over.wait()

    def cancel(self, hung: Callable[[], None] | None = None) -> None:
        if (job := self.running) is not None:
            job.cancel(hung)
