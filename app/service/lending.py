"""Another model for a while, in the place of the loaded one, so that two models can be compared.

The model that was loaded before is loaded again however that ends: done, stopped, failed, or its
page closed. No answer comes from the other model. Whoever wants one waits at the gate, the other
model is loaded only when nobody else is at work, and after each of its runs it makes way for those
who wait. Where the user loads a model meanwhile, that one stays.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, sleep

from app.service.comparison import Side
from app.service.draft_models import Stacks
from app.service.models import Models, title_of
from app.service.tasks import Task, Tasks
from engine.engine import Engine
from engine.errors import EngineDied, ModelError, SettingError, StrataError
from engine.models.loaders import DEFAULT_RUNTIME, settled
from engine.queue import Waiting, before_it_began
from engine.settings import Runtime

LOOK_SECONDS = 0.1
"""How often those who wait look whether it is their turn, or they were stopped."""
PATIENCE = 20.0
"""Seconds in which a process that ended is replaced by another one, which can load a model."""


@dataclass(frozen=True, slots=True)
class Home:
    """The model that makes way, with what it takes to have it again."""

    name: str
    source: str
    runtime: Runtime
    drafts: tuple[str, ...]
    spec: str


class Lending:
    """See the module's docstring. `tell` has a notice for everyone."""

    def __init__(
        self,
        engine: Engine,
        models: Models,
        stacks: Stacks,
        tasks: Tasks,
        tell: Callable[[str], None],
    ) -> None:
        self.engine, self.models, self.stacks = engine, models, stacks
        self.tasks, self.tell = tasks, tell
        self.lock = threading.Lock()
        """Held while models are compared, until the one that was loaded before is back."""
        self.closed = False
        """Whether the gate is."""
        self.waiting: set[Task] = set()

    # for everyone else

    def gate(self, task: Task) -> Iterator[Waiting]:
        """Wait until the usual model is there. Raises Cancelled when the task is stopped."""
        try:
            while self.closed:
                self.waiting.add(task)
                if task.stop.is_set():
                    raise before_it_began()
                yield Waiting(1, loading=True)
                task.stop.event.wait(LOOK_SECONDS)
        finally:
            self.waiting.discard(task)

    # for who compares

    def check(self, sides: tuple[Side, Side]) -> None:
        """Raise ModelError for sides that want other models while another comparison has them."""
        if self.lock.locked() and any(side.source for side in sides):
            raise lent()

    def named(self, side: Side) -> Side:
        """A side as it is known from now on: the loaded model is called "".

        Raises SettingError where others may come in, ModelError for what is not on this machine.
        """
        source = settled(side.source) if side.source else ""
        if source in ("", self.models.source):
            return replace(side, source="")
        if self.models.guests:
            raise SettingError(
                f"{title_of(source)} was not loaded: others share this app, and they would lose "
                "their answers. Compare methods or settings of the loaded model."
            )
        if not self.models.loaders.present(source):
            raise ModelError(
                f"{title_of(source)} is not on this machine. Load it once in the Models tab, which "
                "downloads it, then compare."
            )
        # What cannot fit is told before anything is unloaded.
        self.models.check_memory(source, self.runtime(source))
        return replace(side, source=source)

    def runtime(self, source: str) -> Runtime:
        """How a model ran last, if it ever did."""
        ran = (each.runtime for each in self.models.candidates() if each.source == source)
        return next(ran, DEFAULT_RUNTIME)

    @contextmanager
    def lend(self, task: Task) -> Iterator["Loan"]:
        """Models for a task. Raises ModelError where another comparison has them."""
        state = self.engine.state
        if not state.source:
            raise ModelError(
                "There is no model that could be loaded again afterwards. Load one in the Models "
                "tab first."
            )
        if not self.lock.acquire(blocking=False):
            raise lent()
        drafts = tuple(draft.source for draft in state.drafts)
        home = Home(state.info.name, state.source, state.runtime, drafts, self.stacks.spec)
        loan = Loan(self, task, home)
        try:
            yield loan
        finally:
            # Not here: who closes the page need not wait for it, and cannot.
            threading.Thread(target=loan.end, name="lending", daemon=True).start()

    def awaited(self) -> Iterator[Waiting]:
        """Wait until the model that was loaded before is back."""
        while not self.lock.acquire(timeout=LOOK_SECONDS):
            yield Waiting(1, loading=True)
        self.lock.release()


def lent() -> ModelError:
    """What a second comparison of models ends with."""
    return ModelError(
        "Other models are being compared already. Wait until that is done, or stop it."
    )


class Loan:
    """The models that one comparison uses. `brought` is the one that it loaded last, with how it
    runs; None while the usual one is there."""

    def __init__(self, lending: Lending, task: Task, home: Home) -> None:
        self.lending, self.task, self.home = lending, task, home
        self.brought: tuple[str, Runtime] | None = None

    def use(self, source: str) -> Iterator[Waiting]:
        """Have a model loaded, "" for the usual one. Raises Cancelled and ModelError."""
        lending = self.lending
        if self.brought and lending.waiting:
            yield from self.make_way()
        if not source:
            if self.brought:
                yield from self.go_home()
            return
        wanted = source, lending.runtime(source)
        if self.brought == wanted:
            return
        lending.closed = True
        yield from self.until(lambda: set(lending.tasks.others(self.task)) <= lending.waiting)
        # From here on it may be there, whatever becomes of the load.
        self.brought = wanted
        for _ in lending.models.start(*wanted):
            yield Waiting(1, loading=True)

    def make_way(self) -> Iterator[Waiting]:
        """Let those who wait have the usual model, until all of them are done."""
        yield from self.go_home()
        yield from self.until(lambda: not self.lending.tasks.others(self.task))

    def until(self, wanted: Callable[[], bool]) -> Iterator[Waiting]:
        """Wait for what others do. Raises Cancelled when the task is stopped meanwhile."""
        while not wanted():
            if self.task.stop.is_set():
                raise before_it_began()
            yield Waiting(1)
            self.task.stop.event.wait(LOOK_SECONDS)

    def go_home(self) -> Iterator[Waiting]:
        """Load the usual model again, and open the gate."""
        home, lending = self.home, self.lending
        for _ in lending.models.start(home.source, home.runtime, home.drafts):
            yield Waiting(1, loading=True)
        self.at_home()

    def at_home(self) -> None:
        """The usual model is there: so is the plan of its draft models."""
        if self.lending.engine.state.drafts:
            self.lending.stacks.spec = self.home.spec
        self.brought, self.lending.closed = None, False

    def end(self) -> None:
        """Have the usual model again, unless the user loaded another one meanwhile."""
        lending = self.lending
        try:
            if self.brought is not None:
                self.bring_back()
        except StrataError as error:
            lending.tell(f"{self.home.name} was not loaded again. {error}")
        finally:
            lending.closed = False
            lending.lock.release()

    def bring_back(self) -> None:
        """`go_home`, after whatever is being loaded, and with a process that ended replaced."""
        lending, latest = self.lending, monotonic() + PATIENCE
        while True:
            with lending.models.busy:
                state = lending.engine.state
            usual = self.home.source, self.home.runtime
            there = (state.source, state.runtime) if state.there else None
            if there not in (None, self.brought, usual):
                return
            try:
                for _ in self.go_home():
                    pass
                return
            except EngineDied:
                if monotonic() > latest:
                    raise
                sleep(LOOK_SECONDS)
            except ModelError:
                # Another load may have come first: then that is waited for.
                if not lending.models.busy.locked():
                    raise
