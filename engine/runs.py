"""Runs as values: what one was, what two say of each other, and running one from nothing.

Runs that are compared start from nothing (engine/compare.py), and neither may learn from the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.backends.base import Backend
from engine.compare import Speedup, cold, speedup
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve
from engine.methods import PLAIN, Method
from engine.metrics import Metrics, summarise
from engine.settings import Generation, Sampling
from engine.types import Learned, Prefill, Step, Token


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
class PlainSpeed:
    """Plain decoding speed, and when it was measured: other programs and the browser slow it too,
    so a recent figure says more than an old one."""

    tokens_per_second: float
    when: str


UNMEASURED = PlainSpeed(0.0, "")


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
) -> Timed:
    """Decode from nothing. `drafts` are the models that may draft in it."""
    cold((backend, *drafts))
    prefill: Prefill | None = None
    learned: Learned | None = None
    steps: list[Step] = []
    drafting = method.drafting
    for event in decode(backend, prompt, drafters, generation, drafting, cancelled, costs):
        if isinstance(event, Prefill):
            prefill = event
        elif isinstance(event, Learned):
            learned = event
        else:
            steps.append(event)
    return Timed(method.name, prefill, tuple(steps), learned)


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
        timed = run(backend, prompt, PLAIN, (), generation)
        seconds += [step.seconds for step in timed.steps if step.tokens]
        if len(seconds) >= steps:
            break
    typical = median(seconds) if seconds else 0.0
    return 1 / typical if typical else 0.0
