"""Restarts the engine's process after a crash, and loads its model again.

What crashed the process may crash the next one as well. So the model is given up if the process
crashes while loading it again, or for the third time within five minutes. The app then goes on
without a model, and says so.

The demonstration model comes in two formats. Where one is given up, the other takes its place.

llama.cpp's fast path may be the cause, even if its trial once passed. So its trials are forgotten,
and the next GGUF file is loaded with a new trial (engine/backends/fast_path.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, runtime_checkable

from app.service.draft_models import Stacks
from app.service.models import Models, replaced, title_of
from app.service.tasks import Task
from engine.backends import fast_path
from engine.engine import Engine, State
from engine.errors import EngineDied, StrataError
from engine.models.loaders import DEFAULT_RUNTIME
from engine.queue import Waiting, before_it_began
from engine.settings import Runtime

DEATHS = 3
PATIENCE = 10.0
"""Seconds within which it is known that a process ended whose work raised EngineDied."""
LOOK_SECONDS = 0.1
LOAD_LOOK_SECONDS = 0.25
"""How often those who wait for a model look whether they were stopped: until it is back, and until
it is loaded."""
WINDOW = 300.0
"""So many ends of the process within so many seconds, and its model is given up."""


@runtime_checkable
class Mortal(Protocol):
    """An engine whose process may end; `restart` starts another one, without a model.

    `on_death` is told why, once for each process, when all that was under way has raised
    EngineDied and `state` says that no model is there. It may take long.
    """

    on_death: Callable[[str], None]

    def restart(self) -> None:
        """Start a fresh process."""

    def kill(self, reason: str) -> None:
        """End a process that does not react."""


@dataclass(frozen=True, slots=True)
class Last:
    """What it takes to have a model again: its draft models and the chosen plan included."""

    name: str
    source: str
    runtime: Runtime
    drafts: tuple[str, ...]
    spec: str


class Revival:
    """See the module's docstring. `last` is the model that went last, `loading` whether it is
    being loaded again; `tell` has a notice for everyone, `gate` lets a task wait while another
    model stands in for the loaded one."""

    def __init__(
        self,
        engine: Engine,
        stacks: Stacks,
        models: Models,
        tell: Callable[[str], None],
        gate: Callable[[Task], Iterator[Waiting]],
    ) -> None:
        self.engine, self.stacks, self.models, self.tell = engine, stacks, models, tell
        self.gate = gate
        self.last: Last | None = None
        self.loading = False
        self.deaths: deque[float] = deque(maxlen=DEATHS)
        self.lock = threading.Lock()
        """Held while the model is brought back."""
        if isinstance(engine, Mortal):
            engine.on_death = self.revive

    def follow(self, state: State) -> None:
        """Another model is there, or none any more; to be called before anyone forgets the plan
        that was chosen for the one before."""
        before = self.stacks.state
        if not before.there or not before.source or state.there:
            return
        drafts = tuple(draft.source for draft in before.drafts)
        last = Last(before.info.name, before.source, before.runtime, drafts, self.stacks.spec)
        known = self.last
        if known is None or (known.source, known.runtime) != (last.source, last.runtime):
            self.deaths.clear()
        self.last = last

    def revive(self, reason: str) -> None:
        """The engine's process ended: start another one, and load the model again.

        Blocks until that is done; nothing is raised.
        """
        engine = self.engine
        assert isinstance(engine, Mortal)
        with self.lock:
            self.deaths.append(monotonic())
            again, self.loading = self.loading, False
            fast_path.forget()
            try:
                engine.restart()
            except StrataError as error:
                self.tell(f"{reason} {error}")
                return
            last = self.last
            if last is None:
                if not self.replaced(self.models.wanted, reason):
                    self.tell(f"{reason} No model is loaded now. Load one in the Models tab.")
            elif again or self.often():
                self.give_up(last, reason, again)
            else:
                self.tell(f"{reason} {last.name} is being loaded again.")
                self.load(last)

    @property
    def busy(self) -> bool:
        """Whether the model is being brought back."""
        return self.lock.locked()

    def awaited(self, task: Task) -> Iterator[Waiting]:
        """Wait until the model of a process that ended is back, or given up. Raises Cancelled."""
        latest, begun = monotonic() + PATIENCE, False
        while not self.engine.state.there:
            begun = begun or self.busy
            if not self.busy and (begun or monotonic() > latest):
                return
            if task.stop.is_set():
                raise before_it_began()
            yield Waiting(1, loading=True)
            task.stop.event.wait(LOOK_SECONDS)

    @property
    def coming(self) -> bool:
        """Whether a model is being loaded, or brought back."""
        return self.models.loading is not None or self.busy

    def loaded(self, task: Task) -> Iterator[Waiting]:
        """Wait for the model that is being loaded, if none is there, or if it is not the usual one.
        Raises Cancelled."""
        yield from self.gate(task)
        while not self.engine.state.there and self.coming:
            if task.stop.is_set():
                raise before_it_began()
            yield Waiting(1, loading=True)
            self.models.over.wait(LOAD_LOOK_SECONDS)

    def often(self) -> bool:
        """Whether the process ended too often of late."""
        return len(self.deaths) == DEATHS and self.deaths[-1] - self.deaths[0] < WINDOW

    def give_up(self, last: Last, reason: str, again: bool) -> None:
        """Go on without a model."""
        self.last = None
        when = "within five minutes, for the third time"
        if again:
            when = f"while {last.name} was being loaded"
        first = reason.partition(". ")[0].rstrip(".")
        if self.replaced(last.source, f"The engine ended again {when} ({first})."):
            return
        self.tell(
            f"The engine ended again {when} ({first}). {last.name} is not loaded again. Choose "
            "another model or other settings in the Models tab."
        )

    def replaced(self, source: str, reason: str) -> bool:
        """Whether another format of a model that crashes is loaded in its place."""
        other = self.models.formats.instead(source)
        if other:
            self.tell(f"{reason} {replaced(source, other)}")
            self.load(Last(title_of(other), other, DEFAULT_RUNTIME, (), ""))
        return bool(other)

    def load(self, last: Last) -> None:
        """Have a model again, through the same path as any other one."""
        with self.models.busy:
            pass  # A load under way brings a model, or ends as well.
        if self.engine.state.there:
            return
        self.loading = True
        try:
            for _ in self.models.start(last.source, last.runtime, last.drafts):
                pass
        except EngineDied:
            # That is told to `revive` as well, which waits for this one to be over.
            return
        except StrataError as error:
            self.tell(f"{last.name} was not loaded again. {error}")
        else:
            if self.engine.state.drafts:
                self.stacks.spec = last.spec
            for notice in self.models.notices:
                self.tell(notice)
        self.loading = False


def end_hung(engine: Engine) -> None:
    """End a process that did not end an answer when it was told to."""
    if isinstance(engine, Mortal):
        engine.kill("The engine did not stop when asked, so it was ended.")
