"""Temporarily swaps the loaded model for another one, so that two models can be compared.

The usual model is loaded again however the comparison ends, unless the user loads one meanwhile.
The other model never answers a chat: requests wait at the gate. It is loaded only when no other
task runs, and after each of its runs the waiting tasks get the usual model first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, sleep

from app.service.comparison import Side
from app.service.draft_models import ModelSetup
from app.service.jobs import WAIT_SECONDS, Job, Slot, Task, Tasks
from app.service.models import Models, title_of
from engine.errors import EngineDied, ModelError, SettingError, StrataError
from engine.models.loaders import DEFAULT_RUNTIME, resolve_source
from engine.queue import Waiting
from engine.settings import Runtime

PATIENCE = 20.0
"""Seconds within which a process that ended is replaced by another one that can load a model."""


class ModelSwap:
    """`notify` shows a notice to everyone."""

    def __init__(self, models: Models, tasks: Tasks, notify: Callable[[str], None]) -> None:
        self.models, self.tasks, self.notify = models, tasks, notify
        self.slot = Slot[str, None]()
        """Taken during a swap. Its job loads the usual model again."""
        self.closed = False
        """Whether the gate is closed."""
        self.waiting: set[Task] = set()

    def gate(self, task: Task) -> Iterator[Waiting]:
        """Wait until the usual model is loaded. Raises Cancelled if the task is stopped."""
        if self.closed:
            self.waiting.add(task)
            try:
                yield from task.wait(lambda: not self.closed, loading=True)
            finally:
                self.waiting.discard(task)

    def check(self, sides: tuple[Side, Side]) -> None:
        """Raise ModelError for sides that need another model while another comparison swaps."""
        if self.slot.running is not None and any(side.source for side in sides):
            raise swapped()

    def named(self, side: Side) -> Side:
        """The side with its model's full name, where the loaded model is called "".

        Raises SettingError if guests share the app, and ModelError for a model that is not on this
        machine or does not fit.
        """
        source = resolve_source(side.source) if side.source else ""
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
        # A model that cannot fit is refused before anything is unloaded.
        self.models.check_memory(source, self.runtime(source))
        return replace(side, source=source)

    def runtime(self, source: str) -> Runtime:
        ran = (each.runtime for each in self.models.candidates() if each.source == source)
        return next(ran, DEFAULT_RUNTIME)

    @contextmanager
    def start(self, task: Task) -> Iterator["Swap"]:
        """A swap for a task. When the block ends, the usual model is loaded again. Raises
        ModelError during another swap."""
        state = self.models.engine.state
        if not state.source:
            raise ModelError(
                "There is no model that could be loaded again afterwards. Load one in the Models "
                "tab first."
            )
        swap = Swap(self, task, self.models.stacks.setup(state))
        job = self.slot.take(lambda: Job(swap.end, ""), swapped())
        try:
            yield swap
        finally:
            # On another thread, as this one may be that of a closed page, which cannot wait.
            job.start("model-swap")

    def awaited(self) -> Iterator[Waiting]:
        if (job := self.slot.running) is not None:
            for _ in job.watch():
                yield Waiting(1, loading=True)


def swapped() -> ModelError:
    return ModelError(
        "Other models are being compared already. Wait until that is done, or stop it."
    )


@dataclass(slots=True)
class Swap:
    """The models of one comparison. `other` is the model that it loaded last, with its runtime;
    None while the usual model is loaded."""

    swaps: ModelSwap
    task: Task
    home: ModelSetup
    other: tuple[str, Runtime] | None = None

    def use(self, source: str, runtime: Runtime | None = None) -> Iterator[Waiting]:
        """Load a model, or the usual one for "". It runs as it ran last, unless `runtime` is given.
        Raises Cancelled and ModelError."""
        swaps = self.swaps
        if self.other and swaps.waiting:
            # The waiting tasks use the usual model first, until all of them are done.
            yield from self.go_home()
            yield from self.task.wait(lambda: not swaps.tasks.others(self.task))
        if not source and self.other:
            yield from self.go_home()
        required = source, runtime or swaps.runtime(source)
        if not source or self.other == required:
            return
        swaps.closed = True
        yield from self.task.wait(lambda: set(swaps.tasks.others(self.task)) <= swaps.waiting)
        # Set before the load, as the model may be loaded even if the load ends with an error.
        self.other = required
        for _ in swaps.models.start(*required):
            yield Waiting(1, loading=True)

    def go_home(self) -> Iterator[Waiting]:
        for _ in self.swaps.models.load_again(self.home):
            yield Waiting(1, loading=True)
        self.other, self.swaps.closed = None, False

    def end(self, job: Job[str, None]) -> None:
        """Load the usual model again, unless the user loaded another one meanwhile."""
        swaps = self.swaps
        try:
            if self.other is not None:
                self.restore()
        except StrataError as error:
            swaps.notify(f"{self.home.name} was not loaded again. {error}")
        finally:
            swaps.closed = False

    def restore(self) -> None:
        """`go_home`, after any load in progress, and again if the engine's process is replaced."""
        swaps, latest = self.swaps, monotonic() + PATIENCE
        while True:
            swaps.models.slot.wait()
            state = swaps.models.engine.state
            usual = self.home.source, self.home.runtime
            loaded = (state.source, state.runtime) if state.is_loaded else None
            if loaded not in (None, self.other, usual):
                return
            try:
                for _ in self.go_home():
                    pass
                return
            except EngineDied:
                if monotonic() > latest:
                    raise
                sleep(WAIT_SECONDS)
            except ModelError:
                # Another load may have begun first; then wait for it.
                if swaps.models.loading is None:
                    raise
