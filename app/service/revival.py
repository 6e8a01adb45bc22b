"""The model comes back when the engine's process ended: it is started anew and loads it again.

What ended that process may end the next one as well. So a model is not tried once more when the
process ended while it was being loaded again, or for the third time within a few minutes: then the
app goes on without a model, and says so.

llama.cpp's fast path may be what ended it, though a trial once found that it works. So trials are
forgotten, and the next file to be loaded begins with one (engine/backends/fast_path.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from app.service.runs import Run
from engine.backends import fast_path
from engine.engine import State
from engine.errors import EngineDied, StrataError
from engine.queue import OWNER, Waiting, before_it_began
from engine.settings import Runtime

if TYPE_CHECKING:
    from app.service.session import Session

DEATHS = 3
PATIENCE = 10.0
"""Seconds within which it is known that a process ended whose work raised EngineDied."""
LOOK_SECONDS = 0.1
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
    being loaded again."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.last: Last | None = None
        self.loading = False
        self.deaths: deque[float] = deque(maxlen=DEATHS)
        self.lock = threading.Lock()
        """Held while the model is brought back."""
        if isinstance(session.engine, Mortal):
            session.engine.on_death = self.revive

    def follow(self, state: State) -> None:
        """Another model is there, or none any more; to be called before anyone forgets the plan
        that was chosen for the one before."""
        stacks = self.session.stacks
        before = stacks.state
        if not before.there or not before.source or state.there:
            return
        drafts = tuple(draft.source for draft in before.drafts)
        last = Last(before.info.name, before.source, before.runtime, drafts, stacks.spec)
        known = self.last
        if known is None or (known.source, known.runtime) != (last.source, last.runtime):
            self.deaths.clear()
        self.last = last

    def revive(self, reason: str) -> None:
        """The engine's process ended: start another one, and load the model again.

        Blocks until that is done; nothing is raised.
        """
        engine = self.session.engine
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
                self.tell(f"{reason} No model is loaded: load one in the Models tab.")
            elif again or self.often():
                self.give_up(last, reason, again)
            else:
                self.tell(f"{reason} {last.name} is being loaded again.")
                self.load(last)

    @property
    def busy(self) -> bool:
        """Whether the model is being brought back."""
        return self.lock.locked()

    def awaited(self, run: Run) -> Iterator[Waiting]:
        """Wait until the model of a process that ended is back, or given up. Raises Cancelled."""
        latest, begun = monotonic() + PATIENCE, False
        while not self.session.engine.state.there:
            begun = begun or self.busy
            if not self.busy and (begun or monotonic() > latest):
                return
            if run.stop.is_set():
                raise before_it_began()
            yield Waiting(1, loading=True)
            run.stop.event.wait(LOOK_SECONDS)

    def end(self) -> None:
        """End a process that did not end an answer when it was told to."""
        if isinstance(self.session.engine, Mortal):
            self.session.engine.kill("The engine did not stop when it was told to, and was ended.")

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
        self.tell(
            f"The engine ended again {when}, so {last.name} is not loaded any more ({first}). "
            "Choose another model, or other settings in the Models tab."
        )

    def load(self, last: Last) -> None:
        """Have a model again, through the same path as any other one."""
        session, models = self.session, self.session.models
        with models.busy:
            pass  # A load under way brings a model, or ends as well.
        if session.engine.state.there:
            return
        self.loading = True
        try:
            for _ in models.start(last.source, last.runtime, last.drafts):
                pass
        except EngineDied:
            # That is told to `revive` as well, which waits for this one to be over.
            return
        except StrataError as error:
            self.tell(f"{last.name} was not loaded again. {error}")
        else:
            if session.engine.state.drafts:
                session.stacks.spec = last.spec
            for notice in models.notices:
                self.tell(notice)
        self.loading = False

    def tell(self, notice: str) -> None:
        """A notice for whoever has used the app by now."""
        session = self.session
        users = [*list(session.answered), *list(session.runs.known)]
        for owner in {OWNER, *(owner for owner, _ in users)}:
            session.report(owner, notice)
