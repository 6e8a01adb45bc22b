"""Restarts the engine's process after a crash, and loads its model again.

The cause of a crash may crash the next process as well. So the model is given up for a while if the
process crashes while loading it again, or for the third time within five minutes, and each wait is
twice as long as the one before. llama.cpp's fast path may be the cause, even if its trial once
passed, so the results of trials are forgotten (engine/backends/fast_path.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol, runtime_checkable

from app.service.draft_models import ModelSetup
from app.service.jobs import Task, later
from app.service.models import Models
from engine.backends import fast_path
from engine.engine import Engine, State
from engine.errors import Cancelled, EngineDied, StrataError
from engine.loaded import NO_MODEL
from engine.queue import Waiting

DEATHS = 3
PATIENCE = 10.0
"""Seconds after an EngineDied within which the end of the process is noticed here."""
WINDOW = 300.0
"""After DEATHS ends of the process within WINDOW seconds its model is given up for a while."""
FIRST_WAIT, LONGEST_WAIT = 30.0, 900.0
"""Seconds until a model that was given up is tried again. After a model ran for WINDOW seconds, the
next wait is the first one again."""


@runtime_checkable
class Mortal(Protocol):
    """An engine whose process may end; `restart` starts another one, without a model.

    `on_death` is called with the reason once per process, after all running work has raised
    EngineDied and `state` says that no model is loaded. The call may take long.
    """

    on_death: Callable[[str], None]

    def restart(self) -> None:
        """Start a fresh process."""

    def kill(self, reason: str) -> None:
        """End a process that does not respond."""


class Revival:
    """Restarts the engine and loads the lost model again.

    `last` is the model that was lost last, and `loading` says whether it is being loaded again.
    `given_up` is the model that is tried again at the time `due`. `tell` shows a notice to
    everyone, `say` prints one where the program was started. `gate` makes a task wait while another
    model is swapped in. Without a `page` nobody can load another model.
    """

    def __init__(
        self,
        engine: Engine,
        models: Models,
        tell: Callable[[str], None],
        gate: Callable[[Task], Iterator[Waiting]],
        say: Callable[[str], None],
        page: bool,
    ) -> None:
        self.engine, self.models, self.tell = engine, models, tell
        self.gate, self.say, self.page = gate, say, page
        self.later = later
        self.last: ModelSetup | None = None
        self.loading = False
        self.has_process = True
        """Whether there is a process; False if the system could not start one."""
        self.given_up: ModelSetup | None = None
        self.due = 0.0
        self.waits = 0
        """How often in a row a model was given up."""
        self.since = monotonic()
        """When the current span of time with a loaded model began."""
        self.deaths: deque[float] = deque(maxlen=DEATHS)
        self.lock = threading.Lock()
        """Held while the model is loaded again."""
        if isinstance(engine, Mortal):
            engine.on_death = self.revive

    def follow(self, state: State) -> None:
        """Take over a new state of the engine. Call this before `Stacks.follow`, which forgets the
        plan that was chosen for the earlier model."""
        before = self.models.stacks.state
        if state.is_loaded:
            # The model is in use from now on, even if draft models are still being loaded.
            self.loading, self.given_up = False, None
            self.since = self.since if before.is_loaded else monotonic()
        elif before.is_loaded and monotonic() - self.since >= WINDOW:
            self.waits = 0
        if not before.is_loaded or not before.source or state.is_loaded:
            return
        last = self.models.stacks.setup(before)
        known = self.last
        if known is None or (known.source, known.runtime) != (last.source, last.runtime):
            self.deaths.clear()
        self.last = last

    def revive(self, reason: str) -> None:
        """Start another process after the engine's process ended, and load the model again.

        Blocks until that is done. Raises nothing.
        """
        with self.lock:
            self.deaths.append(monotonic())
            again, self.loading = self.loading, False
            fast_path.forget()
            # With no other known model, use the one that was requested but never loaded.
            requested = self.models.requested if self.models.requested.source else None
            last = self.last or self.given_up or requested
            if not self.restarted(last, reason):
                return
            if last is None:
                load_one = " Load one in the Models tab." if self.page else ""
                self.tell(f"{reason} No model is loaded now.{load_one}")
            elif last is self.given_up:
                self.tell(f"{reason} {last.name} is tried again {self.when}.")
            elif self.last is None or again or self.died_too_often:
                self.give_up(last, reason, again)
            else:
                self.tell(f"{reason} {last.name} is being loaded again.")
                self.load(last)

    def restarted(self, last: ModelSetup | None, reason: str) -> bool:
        """Start a fresh process. If that fails, report it and try again later; returns whether it
        succeeded."""
        assert isinstance(self.engine, Mortal)
        try:
            self.engine.restart()
        except StrataError as error:
            self.last, self.has_process = None, False
            if last is not None:
                self.put_off(last)
            self.tell(f"{reason} {error}{f' That is tried again {self.when}.' if last else ''}")
            return False
        self.has_process = True
        return True

    def awaited(self, task: Task) -> Iterator[Waiting]:
        """After a crash, wait until the model is loaded again or given up. Raises Cancelled."""
        latest, started = monotonic() + PATIENCE, False

        def over() -> bool:
            nonlocal started
            busy = self.lock.locked()
            started = started or busy
            given_up = not busy and (started or monotonic() > latest)
            return self.engine.state.is_loaded or given_up

        yield from task.wait(over, loading=True)

    @property
    def coming(self) -> bool:
        return self.models.loading is not None or self.lock.locked()

    def loaded(self, task: Task) -> Iterator[Waiting]:
        """Wait while another model is swapped in, and for a load in progress if no model is loaded.
        Raises Cancelled."""
        yield from self.gate(task)
        yield from task.wait(lambda: self.engine.state.is_loaded or not self.coming, loading=True)

    @property
    def died_too_often(self) -> bool:
        return len(self.deaths) == DEATHS and self.deaths[-1] - self.deaths[0] < WINDOW

    def give_up(self, last: ModelSetup, reason: str, again: bool) -> None:
        if self.last is not None:
            when = "within five minutes, for the third time"
            if again:
                when = f"while {last.name} was being loaded"
            first = reason.partition(". ")[0].rstrip(".")
            reason = f"The engine ended again {when} ({first})."
        self.last = None
        self.put_off(last)
        advice = " Or choose another model or other settings in the Models tab."
        self.tell(f"{reason} {last.name} is tried again {self.when}.{advice if self.page else ''}")

    def put_off(self, last: ModelSetup) -> None:
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**self.waits)
        self.waits += 1
        self.given_up, self.due = last, monotonic() + wait
        self.later(wait, lambda: self.try_again(last))

    def try_again(self, last: ModelSetup) -> None:
        with self.lock:
            if self.given_up is not last:
                return
            self.given_up = None
            if not self.has_process and not self.restarted(last, "There is no engine."):
                return
            self.last = last
            self.say(f"{last.name} is being loaded again.")
            self.load(last)

    @property
    def when(self) -> str:
        seconds = max(1, round(self.due - monotonic()))
        if seconds < 120:
            return f"in {seconds} second{'s' * (seconds != 1)}"
        return f"in {round(seconds / 60)} minutes"

    @property
    def not_loaded_reason(self) -> str:
        """Why no model is loaded and what to do about it, for other programs."""
        given_up = self.given_up
        if self.coming:
            return f"{self.models.requested.name} is being loaded. Ask again in a moment."
        if given_up is not None:
            return (
                f"{given_up.name} is not loaded, as the engine ended too often. It is tried again "
                f"{self.when}: ask again then."
            )
        if self.page:
            return NO_MODEL
        return (
            "No model is loaded, and the terminal says why. Start the program again with --model."
        )

    def load(self, last: ModelSetup) -> None:
        self.models.slot.wait()  # A load in progress may bring a model, or fail too.
        if self.engine.state.is_loaded:
            return
        self.loading = True
        try:
            for _ in self.models.load_again(last):
                pass
        except EngineDied:
            # `revive` is called for this crash too, and waits until this call is over. If the
            # process ended before the draft models were loaded, they are loaded next time.
            self.last = last
            return
        except Cancelled as error:
            self.tell(f"{last.name} was not loaded again. {error}")
        except StrataError as error:
            self.last = None
            self.put_off(last)
            self.tell(f"{last.name} was not loaded again. {error} It is tried again {self.when}.")
        else:
            self.say(f"{last.name} is loaded again.")
            for notice in self.models.notices:
                self.tell(notice)
        self.loading = False


def end_hung(engine: Engine) -> None:
    if isinstance(engine, Mortal):
        engine.kill("The engine did not stop when asked, so it was ended.")
