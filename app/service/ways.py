"""The ways to run the loaded model on this machine, measured one after the other.

A way is the number of bits of a weight and, for a GGUF file, the program that computes it:
llama.cpp or the compiled core. Each way that fits into memory is loaded (app/service/model_swap.py)
and answers the same prompts, plainly and with drafts. Figures are tokens per second of whole
answers. The usual way is measured first and last: by as much as its two figures differ, the pace of
the machine changed meanwhile. The usual model is loaded again however measuring ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.service.comparison import Progress as Runs
from app.service.draft_models import amount
from app.service.jobs import Job, Progress, Slot, Task
from app.service.proofs import Proofs
from engine.backends.base import BackendInfo
from engine.errors import Cancelled, ModelError
from engine.metrics import summarise
from engine.models.gguf_files import ENDING
from engine.native import multiplies_few_bits, verifies_cheaply
from engine.queue import Waiting
from engine.servers.client import is_address
from engine.settings import Runtime
from engine.types import Run

ABOUT = "ways"
"""The `about` of its task; no conversation has this id."""
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Tell a short story about a fox and a bird.",
    "List ten things to do on a rainy day, one per line.",
)
TOKENS = 64
"""The most tokens of an answer."""
MARGIN = 1.05
"""How much faster another way has to be to be suggested, on a machine that keeps its pace."""
CORE, LLAMA_CPP = "the compiled core", "llama.cpp"
ROUNDABLE, LARGE = ("float32", "bfloat16", "float16"), 100_000_000
"""The types of weights that *Bits* can round, and the parameters from which on it is suggested."""


TITLES = ("weights", "computed by", "memory", "plain tokens/s", "with guessing")


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.{0 if tokens_per_second >= 100 else 1}f}"


def title(runtime: Runtime) -> str:
    return f"Bits {runtime.bits}"


def fewer_bits(info: BackendInfo) -> str:
    """The kind of a model that computes on a processor and would gain by weights of few bits in the
    compiled core; "" for any other."""
    if info.device != "cpu" or not multiplies_few_bits() or info.parameters < LARGE:
        return ""
    gains = info.kind == LLAMA_CPP and verifies_cheaply()
    gains = gains or info.kind == "transformers" and info.dtype in ROUNDABLE
    return info.kind if gains else ""


def computed_by(info: BackendInfo, source: str) -> str:
    """The program that computes a loaded model."""
    return CORE if info.kind != LLAMA_CPP and source.endswith(ENDING) else info.kind


@dataclass(frozen=True, slots=True)
class Way:
    """A measured way: the program `by` which the model was computed with these settings, the type
    of its weights and their bytes, and the tokens per second without and with drafts."""

    runtime: Runtime
    by: str
    dtype: str
    bytes: int
    plain: float
    drafted: float

    @property
    def fastest(self) -> float:
        return max(self.plain, self.drafted)


@dataclass(frozen=True, slots=True)
class Found:
    """The measured ways of a model, the `usual` one first, and why others were left out, by their
    bits. `spread` is the larger pace of the usual way, measured twice, as a multiple of the
    smaller one."""

    ways: tuple[Way, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    spread: float = 1.0

    @property
    def usual(self) -> Way:
        return self.ways[0]

    @property
    def fastest(self) -> Way:
        """The fastest way, by more than the pace of the machine changed; else the usual one."""
        best = max(self.ways, key=lambda way: way.fastest)
        return best if best.fastest >= self.least * self.usual.fastest else self.usual

    @property
    def least(self) -> float:
        """How much faster another way has to be."""
        return max(MARGIN, self.spread)

    def rows(self) -> list[tuple[str, ...]]:
        """A table under TITLES, the fastest way first."""
        return [
            (way.dtype, way.by, amount(way.bytes), speed(way.plain), speed(way.drafted))
            for way in sorted(self.ways, key=lambda way: way.fastest, reverse=True)
        ]

    @property
    def verdict(self) -> str:
        best, usual = self.fastest, self.usual
        if best is usual:
            text = "No other way is faster by more than the machine's pace changed meanwhile"
            return f"{text}, {100 * (self.least - 1):.0f} %."
        times = f"{best.fastest / usual.fastest:.2f} times as fast"
        return f"With {title(best.runtime)} it answers {times} as with {title(usual.runtime)}."


class Ways:
    """`known` holds what was last found, by the source of the model."""

    def __init__(self, proofs: Proofs) -> None:
        self.proofs, self.core = proofs, proofs.core
        self.slot = Slot[Progress, Found]()
        self.known: dict[str, Found] = {}

    @property
    def offered(self) -> bool:
        return len(self.runtimes()) > 1

    def runtimes(self) -> list[Runtime]:
        """The settings of all ways, those in use first. There are no others if guests share the
        app, on a server, and where the machine cannot compute with few bits."""
        models, info = self.core.models, self.core.current.info
        fixed = models.guests or not models.is_loaded or is_address(models.source)
        if fixed or info.device == "cpu" and not multiplies_few_bits():
            return [models.runtime]
        file = models.source.endswith(ENDING)
        bits = ["auto", "off", "8", "4"] if file else ["auto", "8", "4"]
        if file and info.device != "cpu":
            bits = []  # llama.cpp alone uses a GPU for them
        each = [models.runtime, *(replace(models.runtime, bits=number) for number in bits)]
        return list(dict.fromkeys(each))

    def start(self, owner: str) -> Job[Progress, Found]:
        """Raises ModelError if they are being measured already."""
        busy = ModelError("The ways are being measured already. Wait until that is done.")

        def work(job: Job[Progress, Found]) -> Found:
            source = self.core.models.source
            with (
                self.core.tasks.begin(owner, ABOUT) as task,
                job.stop.calling(task.stop.set),
            ):
                found = self.measured(owner, source, task, job)
            self.known[source] = found
            return found

        return self.slot.take(lambda: Job(work, Progress(0.0, "Starting")), busy).start("ways")

    def stop(self) -> None:
        self.slot.cancel()

    def measured(self, owner: str, source: str, task: Task, job: Job[Progress, Found]) -> Found:
        core, left_out = self.core, list[tuple[str, str]]()
        for _ in core.revival.loaded(task):
            job.report(Progress(None, "Waiting for the model"))
        usual, runtimes = core.models.runtime, self.runtimes()
        ways = dict[tuple[str, str], Way]()

        def measure(runtime: Runtime, share: float) -> Way:
            job.report(Progress(share, f"Loading the model with {title(runtime)}"))
            for _ in swap.use("" if runtime == usual else source, runtime):
                pass
            info = core.current.info
            by = computed_by(info, source)
            known = ways.get((by, info.dtype))
            if known is not None and runtime != usual:
                return known
            job.report(Progress(share, f"Measuring {info.dtype}, computed by {by}"))
            return Way(runtime, by, info.dtype, info.memory_bytes, *self.paces(owner, task))

        with core.model_swap.start(task) as swap:
            for number, runtime in enumerate(runtimes):
                try:
                    core.models.check_memory(source, runtime)
                    way = measure(runtime, number / (1 + len(runtimes)))
                except ModelError as error:
                    if runtime == usual:
                        raise
                    left_out.append((title(runtime), str(error)))
                else:
                    ways.setdefault((way.by, way.dtype), way)
            first, *others = ways.values()
            last = measure(usual, len(runtimes) / (1 + len(runtimes)))
        both = sorted((first.fastest, last.fastest))
        mean = replace(
            first, plain=(first.plain + last.plain) / 2, drafted=(first.drafted + last.drafted) / 2
        )
        return Found((mean, *others), tuple(left_out), both[1] / both[0])

    def paces(self, owner: str, task: Task) -> tuple[float, float]:
        """The tokens per second of all prompts, plainly and with drafts."""
        seconds, tokens = [0.0, 0.0], [0, 0]
        for prompt in PROMPTS:
            pairs = self.proofs.first_answers(owner, prompt, TOKENS, task)
            for side, run in enumerate(finished(pairs.compare(1))):
                seconds[side] += summarise(run).seconds
                tokens[side] += len(run.tokens)
        plain, drafted = (n / spent for n, spent in zip(tokens, seconds, strict=True))
        return plain, drafted


def finished(items: Iterator[Runs | Waiting]) -> tuple[Run, Run]:
    """The pair of runs of a comparison. Raises Cancelled if it was stopped before its end."""
    last: Runs | None = None
    for item in items:
        last = item if isinstance(item, Runs) else last
    if last is None or not last.over:
        raise Cancelled("Measuring was stopped.")
    (pair,) = last.pairs
    return pair
