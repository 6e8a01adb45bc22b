"""A race of plain decoding against drafting: one short prompt, decoded in both ways and timed, one
after the other, so each has the machine to itself (app/service/comparison.py).

A race is meant to show a gain. If measurements on this machine say that the loaded model has none,
the page says so before anything is recorded. The race can also be run with the padded demonstration
model, which is loaded for it (app/service/model_swap.py): the same weights at the cost of 0.5 B
parameters (engine/models/inflate.py), because a model of 10 M parameters fits into the processor's
cache. On a processor it races in 4 bits, elsewhere in float32: in bfloat16 near-ties are so
frequent that the texts part within a few words. It is made on demand, and stays in the data
directory until it is removed in the Models tab.
"""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from app.arguments import EMBEDDED
from app.service.comparison import Progress
from app.service.core import Core
from app.service.draft_models import amount
from app.service.jobs import Job, Stop, Task
from app.service.jobs import Progress as Making
from app.service.models import PADDED, Loading, Models, not_loaded, title_of
from app.service.proofs import Proofs
from engine.compare import Speedup
from engine.drafting.ceiling import LIKELY, ceiling
from engine.errors import Cancelled, ModelError, first_line
from engine.machine import physical_cores
from engine.metrics import summarise
from engine.models.memory import free_memory
from engine.models.shape import SHAPES
from engine.native import multiplies_few_bits
from engine.process import command, death, environment
from engine.queue import Waiting
from engine.runs import Verdict, verdict, worth
from engine.settings import Runtime
from engine.types import Run

SIZE = "0.5b"
"""A key of engine.models.shape.SHAPES."""
PARAMETERS = SHAPES[SIZE].parameters(vocabulary=6144, head_size=64)
BYTES = 2 * (PARAMETERS + SHAPES[SIZE].head_parameters(head_size=64))
"""Its size on the disk with its head, with two bytes for each weight."""
WEIGHTS = {"4": BYTES // 2, "auto": 2 * BYTES}
"""No less than the bytes of its weights in memory, by the bits with which it races."""
OTHERS = 500_000_000
"""Bytes of memory for the cache and the libraries. Making the model takes less than a race."""
SPARE = 500_000_000
"""Bytes of the disk that must stay free."""
LOOK_SECONDS = 0.2
"""How often progress and cancellation are checked."""


class Padded:
    def __init__(self, models: Models) -> None:
        self.models = models
        self.path = models.kept[0] / PADDED if models.kept else None
        self.source = str(self.path.absolute().resolve()) if self.path else ""
        self.busy = threading.Lock()

    @property
    def offered(self) -> bool:
        return self.path is not None and not self.models.guests

    @property
    def exists(self) -> bool:
        return self.path is not None and (self.path / "config.json").is_file()

    def check(self, runtime: Runtime) -> None:
        """Raise ModelError if it cannot be made or run here; the message says what is missing."""
        if self.path is None or not self.offered:
            raise ModelError(
                f"{title_of(PADDED)} cannot be made here: others share this app, or it has no data "
                "directory. Start the app for yourself to use it."
            )
        place = next(each for each in (self.path, *self.path.parents) if each.is_dir())
        disk, memory = shutil.disk_usage(place).free, free_memory("cpu")
        needed = WEIGHTS[runtime.bits] + OTHERS
        if not self.exists and disk < BYTES + SPARE:
            raise ModelError(
                f"{title_of(PADDED)} takes {amount(BYTES)} on the disk, and {amount(disk)} are "
                f"free in {str(place)!r}. Free some, or choose another data directory."
            )
        if memory < needed:
            raise ModelError(
                f"{title_of(PADDED)} takes {amount(needed)} of memory, and {amount(memory)} are "
                "free. Close other programs, then try again."
            )

    def make(self, runtime: Runtime, stop: Stop) -> Iterator[Making]:
        """Make the model unless it exists, if it can run so; yields the progress.

        Closing the iterator does not end the work. Raises ModelError, and Cancelled once `stop` is
        set, in which case no files are left.
        """
        self.check(runtime)
        if not self.exists:
            title = title_of(PADDED)
            begin = Making(None, f"Making {title} …")
            job = Job(self.work, begin, partial(not_loaded, title), stop)
            yield from job.start("padded").watch()

    def work(self, job: Loading) -> None:
        while not self.busy.acquire(timeout=LOOK_SECONDS):  # Another page is making it.
            if job.stop.is_set():
                raise Cancelled("The race was stopped.")
        try:
            if not self.exists:
                self.written(job)
        finally:
            self.busy.release()

    def written(self, job: Loading) -> None:
        """Write the files in a separate process, because torch would stay in this one's memory."""
        assert self.path is not None
        title, last = title_of(PADDED), ""
        try:
            with subprocess.Popen(
                command("engine.models.inflate", str(EMBEDDED), SIZE, str(self.path)),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as process:
                assert process.stdout is not None
                with job.ending(process.kill):
                    for last in process.stdout:
                        with suppress(ValueError):
                            job.report(Making(float(last), f"Making {title}"))
            if job.stop.is_set():
                raise Cancelled("The race was stopped.")
            if process.returncode:
                why = last.strip() or death(process.returncode, "The process")
                raise ModelError(f"{title} could not be made: {why}")
        except OSError as error:
            raise ModelError(f"{title} could not be made: {first_line(error)}.") from error
        finally:
            for each in self.path.parent.glob(f".{PADDED}-*"):
                shutil.rmtree(each, ignore_errors=True)
        self.models.read_folder(str(self.path.parent))


ABOUT = "a race"
"""The `about` of its task; no conversation has this id."""
PROMPT = "Tell a short story about a fox and a bird. Then tell the same story once more."
TOKENS = 128
"""The most tokens of an answer."""
GAIN = 1.05
"""The smallest speedup that a race can show."""
LAST = 5
"""How many races of a model are remembered."""
FEWEST = 3
"""The fewest races that can tell that a model gains nothing, as the time of a single one is
noisy."""


@dataclass(frozen=True, slots=True)
class Race:
    plain: Run
    fast: Run
    verdict: Verdict
    speedup: Speedup
    model: str = ""

    @property
    def seconds(self) -> tuple[float, float]:
        return summarise(self.plain).seconds, summarise(self.fast).seconds

    @property
    def ratio(self) -> float:
        """Its speedup; 1 if no guess was kept."""
        return 1.0 if self.speedup.whole is None else self.speedup.whole

    @property
    def gains(self) -> bool:
        return self.ratio >= GAIN


@dataclass(frozen=True, slots=True)
class NoGain:
    """No race was run, because drafts gain nothing with the loaded model on this machine."""

    why: str


@dataclass(frozen=True, slots=True)
class Races:
    """`known` are the speedups of the last races of each model since the program was started."""

    proofs: Proofs
    padded: Padded
    known: dict[tuple[str, Runtime], tuple[float, ...]] = field(default_factory=dict)

    @property
    def core(self) -> Core:
        return self.proofs.core

    @property
    def runtime(self) -> Runtime:
        """The settings with which the padded model races: on the device of the loaded one."""
        if self.core.current.info.device != "cpu" or not multiplies_few_bits():
            return Runtime(dtype="float32")
        # The page is idle meanwhile, and leaves all cores to the model.
        return Runtime(bits="4", threads=physical_cores())

    def no_gain(self) -> str:
        """Why the loaded model is not expected to gain anything on this machine; "" if a gain is
        expected, or nothing is known.

        A gain in the median of its last races counts first. If there is none, `FEWEST` of them are
        enough to say so. With fewer, the costs of its forwards decide.
        """
        models = self.core.models
        ratios = self.known.get((models.source, models.runtime), ())
        if ratios and median(ratios) >= GAIN:
            return ""
        if len(ratios) >= FEWEST:
            return (
                f"in its last {len(ratios)} races, the median speed with guessing was "
                f"{median(ratios):.2f}× that of plain decoding"
            )
        curve = self.core.costs.curve
        if curve is None or 0 not in curve.points or len(curve.points) < 2:
            return ""
        if ceiling(curve.points, LIKELY).speedup >= GAIN:
            return ""
        nodes = min(size for size in curve.points if size)
        times = curve.points[nodes] / curve.points[0]
        guesses = "one guess" if nodes == 1 else f"{nodes} guesses"
        return (
            f"checking {guesses} takes {times:.1f} times as long as computing a token, which good "
            "guesses cannot make up for"
        )

    def run(
        self, owner: str, padded: bool = False, anyway: bool = False
    ) -> Iterator[Making | Progress | Waiting | NoGain | Race]:
        """Record a race, which is yielded last unless it is stopped.

        With `padded` the padded model runs it, and is made first if necessary. Without, the race is
        run only if a gain is expected, or `anyway`. Raises ModelError.
        """
        self.stop(owner)
        with self.core.tasks.begin(owner, ABOUT) as task, suppress(Cancelled):
            if padded and self.core.models.source != self.padded.source:
                runtime = self.runtime
                yield from self.padded.make(runtime, task.stop)
                yield from self.core.revival.loaded(task)
                with self.core.model_swap.start(task) as swap:
                    yield from swap.use(self.padded.source, runtime)
                    yield from self.recorded(owner, task)
                return
            yield from self.core.revival.loaded(task)
            if not (padded or anyway) and (why := self.no_gain()):
                yield NoGain(why)
            else:
                yield from self.recorded(owner, task)

    def recorded(self, owner: str, task: Task) -> Iterator[Progress | Waiting | Race]:
        current, models = self.core.current, self.core.models
        pairs = self.proofs.first_answers(owner, PROMPT, TOKENS, task)
        model = models.source, models.runtime
        for item in pairs.compare(1):
            yield item
            if isinstance(item, Progress) and item.over:
                (pair,) = item.pairs
                gained = worth([pair])
                self.core.history.save_runs(owner, *pair, gained=gained)
                race = Race(*pair, verdict(current.text, *pair), gained, current.info.name)
                self.known[model] = (*self.known.get(model, ()), race.ratio)[-LAST:]
                yield race

    def stop(self, owner: str) -> None:
        self.core.tasks.stop(owner, ABOUT)
