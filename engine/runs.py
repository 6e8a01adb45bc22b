"""Runs: making one from its events, what two of them say of each other, running one from nothing.

Runs that are compared start from nothing (engine/compare.py), and neither may learn from the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from statistics import median
from typing import Any

from engine.backends.base import Backend, BackendInfo, ServerInfo
from engine.compare import Speedup, cold, speedup
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve
from engine.methods import PLAIN, Method, served
from engine.metrics import summarise
from engine.sampling import COLDEST, gumbel
from engine.settings import Generation, Sampling
from engine.types import Event, Learned, Prefill, Run, Token


class Collector:
    """Collects the events of a planned run, or of one that is gone on with."""

    def __init__(self, plan: Run) -> None:
        self.plan = plan
        self.prefill = plan.prefill
        self.steps = list(plan.steps)
        self.learned = plan.learned

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Prefill):
            self.prefill = event
        elif isinstance(event, Learned):
            self.learned = event
        else:
            self.steps.append(event)

    @property
    def run(self) -> Run:
        """The run so far."""
        steps = tuple(self.steps)
        return replace(self.plan, prefill=self.prefill, steps=steps, learned=self.learned)


def planned(info: BackendInfo, method: Method, generation: Generation, thinks: bool = False) -> Run:
    """A run as it is to be made, of which nothing is decoded yet. `thinks` says that it begins
    within thinking, as its chat template has begun that. What a server drafts is its own affair."""
    settings: dict[str, Any] = {"generation": asdict(generation)}
    if info.server is not None:
        method = served(method, info.server)
        settings["server"] = {"host": info.server.host, "sources": tells(method, info.server)}
    else:
        settings["drafting"] = asdict(method.drafting)
    if thinks:
        settings["thinks"] = True
    return Run(method.name, info.name, info.fingerprint, settings)


def collected(plan: Run, events: Iterable[Event]) -> Run:
    """A planned run with its events."""
    collector = Collector(plan)
    for event in events:
        collector.add(event)
    return collector.run


def tells(method: Method, server: ServerInfo) -> bool:
    """Whether it is known which tokens of a server's answer were guessed."""
    return server.sources or method == PLAIN


def from_server(run: Run) -> Mapping[str, Any] | None:
    """What is known of the server that a run came from; None for one of this machine."""
    found = run.settings.get("server")
    return found if isinstance(found, Mapping) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two runs emitted the same tokens; else where they part and what each said there.

    `ended_early`: there the accelerated one was over, and the plain one went on. `gap` is how far
    apart the two tokens were, in logits (see `gap_of`); None where one run says nothing there.
    """

    identical: bool
    tokens: int
    position: int = 0
    plain: str = ""
    accelerated: str = ""
    ended_early: bool = False
    gap: float | None = None


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


def worth(pairs: Sequence[tuple[Run, Run]], accepted: int | None = None) -> Speedup:
    """The speedup of (plain, accelerated) runs, see engine/compare.py."""
    return speedup([(summarise(plain), summarise(fast)) for plain, fast in pairs], accepted)


def verdict(detokenize: Callable[[Sequence[int]], str], plain: Run, accelerated: Run) -> Verdict:
    """Compare two runs token by token. `position` counts from 1 within the answer."""
    left, right = plain.tokens, accelerated.tokens
    for at in range(max(len(left), len(right))):
        one = left[at] if at < len(left) else None
        other = right[at] if at < len(right) else None
        if one is None or other is None or one.id != other.id:
            slow, fast = ("the end" if t is None else detokenize([t.id]) for t in (one, other))
            by_token = at == len(right) - 1 and accelerated.finish == "eos"
            gap = gap_of(plain, one, other) if one and other else None
            return Verdict(False, at, at + 1, slow, fast, other is None or by_token, gap)
    return Verdict(True, len(left))


def gap_of(plain: Run, one: Token, other: Token) -> float | None:
    """How far apart the choices of two tokens at the same place were, in logits; None where that is
    not known.

    Probabilities are of the model itself, so the difference of their logarithms is that of logits.
    Above temperature 0 the noise of the place counts in (times the temperature), as it does in the
    choice. Each run tells of its own token: the last bits of two forwards differ, and it is
    near-ties that are looked for.
    """
    settings: Any = plain.settings.get("generation") or {}
    drawn = settings.get("sampling") or {}
    if not (one.probability > 0 and other.probability > 0 and "temperature" in drawn):
        return None
    gap = log(one.probability) - log(other.probability)
    if drawn["temperature"] >= COLDEST:
        noise = gumbel(drawn["seed"], one.position, [one.id, other.id])
        gap += drawn["temperature"] * float(noise[0] - noise[1])
    return abs(gap)


def run(
    backend: Backend,
    prompt: Sequence[int],
    method: Method,
    drafters: Sequence[Drafter],
    generation: Generation,
    cancelled: Callable[[], bool] = never,
    costs: CostCurve | None = None,
    drafts: Sequence[Backend] = (),
) -> Run:
    """Decode from nothing. `drafts` are the models that may draft in it."""
    cold((backend, *drafts))
    events = decode(backend, prompt, drafters, generation, method.drafting, cancelled, costs)
    return collected(planned(backend.info, method, generation), events)


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
        plain = run(backend, prompt, PLAIN, (), generation)
        seconds += [step.seconds for step in plain.steps if step.tokens]
        if len(seconds) >= steps:
            break
    typical = median(seconds) if seconds else 0.0
    return 1 / typical if typical else 0.0
