"""Plain and accelerated decoding of one prompt, one after the other, and what the pair proves.

Both runs start from nothing (engine/compare.py), neither may learn from the other, and the order is
swapped from repeat to repeat, so that a machine that warms up or slows down favours neither.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from engine.backends.base import Backend
from engine.compare import UNKNOWN, Speedup, cold, speedup
from engine.costs import CostCurve
from engine.decode import decode, never
from engine.drafters.base import Drafter
from engine.methods import METHODS, Method
from engine.metrics import Metrics, summarise
from engine.settings import Generation, Sampling
from engine.types import Learned, Prefill, Step, Token

UPDATE_SECONDS = 0.1
PLAIN = METHODS["plain"]


@dataclass(frozen=True, slots=True)
class Timed:
    """One run, finished or under way."""

    method: str
    prefill: Prefill | None
    steps: tuple[Step, ...]
    learned: Learned | None = None

    @property
    def tokens(self) -> list[Token]:
        """What the run emitted."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def metrics(self) -> Metrics:
        """Its figures."""
        return summarise(self.prefill, self.steps, self.learned)

    @property
    def broken_off(self) -> bool:
        """Whether the user ended it, or left, before it came to an end of its own."""
        return not self.steps or self.steps[-1].finish in (None, "cancelled")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two runs emitted the same tokens; else where they part and what each said there.

    `ended_early`: there the accelerated one was over, and the plain one went on.
    """

    identical: bool
    tokens: int
    position: int = 0
    plain: str = ""
    accelerated: str = ""
    ended_early: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """The last answer decoded again, plainly and with drafts: under way while `verdict` is None.

    `running` is the method at work, `shown` the answer itself, which the verdict is about; the
    speedup is that of the two reruns. `same_text` is False where another text is no fault: see
    `keeps_text`.
    """

    tokens: int
    running: str = PLAIN.name
    verdict: Verdict | None = None
    speedup: Speedup = UNKNOWN
    plain: Timed | None = None
    accelerated: Timed | None = None
    shown: Timed | None = None
    same_text: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """Pairs finished so far, (plain, accelerated), and the run under way."""

    pairs: tuple[tuple[Timed, Timed], ...]
    repeat: int
    running: Timed | None
    cancelled: bool = False
    same_text: bool = True

    @property
    def speedups(self) -> list[Speedup]:
        """What each pair says."""
        return [worth([pair]) for pair in self.pairs]

    @property
    def speedup(self) -> Speedup:
        """The median over the repeats."""
        return worth(self.pairs)


@dataclass(frozen=True, slots=True)
class PlainSpeed:
    """Plain decoding speed, and when it was measured: other programs and the browser slow it too,
    so a recent figure says more than an old one."""

    tokens_per_second: float
    when: str


UNMEASURED = PlainSpeed(0.0, "")


class Pace:
    """Says when the next update of the interface is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next = perf_counter()

    def due(self) -> bool:
        """True at most once per interval."""
        now = perf_counter()
        if now < self.next:
            return False
        self.next = now + self.seconds
        return True


def keeps_text(method: Method, sampling: Sampling) -> bool:
    """Whether a seed's text must be that of plain decoding, and not its distribution alone."""
    return method.drafting.rule == "match" or sampling.temperature == 0


def worth(pairs: Sequence[tuple[Timed, Timed]], accepted: int | None = None) -> Speedup:
    """The speedup of (plain, accelerated) runs, see engine/compare.py."""
    return speedup([(plain.metrics, fast.metrics) for plain, fast in pairs], accepted)


def verdict(
    detokenize: Callable[[Sequence[int]], str], plain: Timed, accelerated: Timed
) -> Verdict:
    """Compare two runs token by token. `position` counts from 1 within the answer."""
    left, right = plain.tokens, accelerated.tokens
    for at in range(max(len(left), len(right))):
        one = left[at].id if at < len(left) else None
        other = right[at].id if at < len(right) else None
        if one != other:
            slow, fast = ("the end" if i is None else detokenize([i]) for i in (one, other))
            by_token = at == len(right) - 1 and accelerated.steps[-1].finish == "eos"
            return Verdict(False, at, at + 1, slow, fast, other is None or by_token)
    return Verdict(True, len(left))


def run(
    backend: Backend,
    prompt: Sequence[int],
    method: Method,
    drafters: Sequence[Drafter],
    generation: Generation,
    cancelled: Callable[[], bool] = never,
    costs: CostCurve | None = None,
    drafts: Sequence[Backend] = (),
) -> Generator[Timed, None, None]:
    """Decode from nothing; yields the run as it grows, the finished run last. `drafts` are the
    models that may draft in it."""
    cold((backend, *drafts))
    prefill: Prefill | None = None
    learned: Learned | None = None
    steps: list[Step] = []
    pace = Pace(UPDATE_SECONDS)
    drafting = method.drafting
    for event in decode(backend, prompt, drafters, generation, drafting, cancelled, costs):
        if isinstance(event, Prefill):
            prefill = event
        elif isinstance(event, Learned):
            learned = event
        else:
            steps.append(event)
            if event.finish is None and pace.due():
                yield Timed(method.name, prefill, tuple(steps))
    yield Timed(method.name, prefill, tuple(steps), learned)


def compare(
    backend: Backend,
    prompt: Sequence[int],
    method: Method,
    drafters: Callable[[], Sequence[Drafter]],
    generation: Generation,
    repeats: int,
    cancelled: Callable[[], bool] = never,
    costs: Callable[[], CostCurve | None] = lambda: None,
    drafts: Sequence[Backend] = (),
) -> Generator[Progress, None, None]:
    """Run `repeats` pairs; `drafters` and `costs` give fresh ones without a trace of earlier runs,
    `drafts` are the models that may draft.

    A few unmeasured steps come first, so that no run pays for waking the machine up.
    """
    warm_up(backend, prompt, generation)
    same_text = keeps_text(method, generation.sampling)
    pairs: list[tuple[Timed, Timed]] = []
    for repeat in range(repeats):
        done: dict[str, Timed] = {}
        order = ("plain", "fast") if repeat % 2 == 0 else ("fast", "plain")
        for name in order:
            running = (
                run(backend, prompt, PLAIN, (), generation, cancelled)
                if name == "plain"
                else run(
                    backend, prompt, method, drafters(), generation, cancelled, costs(), drafts
                )
            )
            for timed in running:
                done[name] = timed
                yield Progress(tuple(pairs), repeat, timed, same_text=same_text)
            if cancelled():
                yield Progress(tuple(pairs), repeat, None, True, same_text)
                return
        pairs.append((done["plain"], done["fast"]))
        yield Progress(tuple(pairs), repeat, None, same_text=same_text)


def warm_up(
    backend: Backend, prompt: Sequence[int], generation: Generation, steps: int = 4
) -> None:
    """A few plain steps whose time nobody counts."""
    events = decode(backend, prompt, (), generation, PLAIN.drafting)
    for _, _ in zip(range(steps + 1), events, strict=False):
        pass
    events.close()  # type: ignore[attr-defined]


def plain_speed(backend: Backend, prompt: Sequence[int], steps: int = 24) -> float:
    """Tokens per second of plain decoding, from the median step of a short run."""
    generation = Generation(max_tokens=steps + 4)
    warm_up(backend, prompt, generation)
    seconds: list[float] = []
    for _ in range(3):
        for timed in run(backend, prompt, PLAIN, (), generation):
            last = timed
        seconds += [step.seconds for step in last.steps if step.tokens]
        if len(seconds) >= steps:
            break
    typical = median(seconds) if seconds else 0.0
    return 1 / typical if typical else 0.0
