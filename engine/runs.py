"""Builds a run from its events, compares two runs, and makes runs that start with empty caches.

Runs that are compared start with empty caches (engine/compare.py), and neither may learn from the
other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from statistics import median
from typing import Any

from engine.backends.base import Backend, BackendInfo
from engine.compare import Speedup, reset_caches, speedup
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve
from engine.methods import PLAIN, Method, served
from engine.metrics import summarise
from engine.sampling import COLDEST, gumbel
from engine.settings import Generation, Sampling
from engine.thinking import MARKS
from engine.types import Event, Learned, Prefill, Run, Token


class Collector:
    """Collects the events of a planned run, or of one that is continued."""

    def __init__(self, plan: Run) -> None:
        self.plan, self.steps = plan, list(plan.steps)

    def add(self, event: Event) -> None:
        if isinstance(event, Prefill):
            self.plan = replace(self.plan, prefill=event)
        elif isinstance(event, Learned):
            self.plan = replace(self.plan, learned=event)
        else:
            self.steps.append(event)

    @property
    def run(self) -> Run:
        return replace(self.plan, steps=tuple(self.steps))


def planned(info: BackendInfo, method: Method, generation: Generation, thinks: bool = False) -> Run:
    """A run of which nothing is decoded yet. With `thinks` it begins inside thinking, because the
    chat template opened it. The marks of its thinking are kept, unless nothing is known of them.
    Drafts of a server are not part of the plan."""
    settings: dict[str, Any] = {"generation": asdict(generation), "weights": info.weights}
    if info.server is not None:
        method = served(method, info.server)
        # Whether the guessed tokens of the answer are known.
        sources = info.server.sources or method == PLAIN
        settings["server"] = {"host": info.server.host, "sources": sources}
    else:
        settings["drafting"] = asdict(method.drafting)
    if thinks:
        settings["thinks"] = True
    if info.marks != MARKS:
        settings["marks"] = [each.begin for each in info.marks]
    return Run(method.name, info.name, info.fingerprint, settings)


def collected(plan: Run, events: Iterable[Event]) -> Run:
    collector = Collector(plan)
    for event in events:
        collector.add(event)
    return collector.run


def from_server(run: Run) -> Mapping[str, Any] | None:
    """The recorded facts about the server of a run; None for a run of this machine."""
    found = run.settings.get("server")
    return found if isinstance(found, Mapping) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether two runs emitted the same tokens; if not, the position of the first difference and
    the token of each run at it.

    With `ended_early` the accelerated run ended at that position, and the plain one continued.
    `gap` is the difference of the two tokens in logits (see `gap_of`); None if one run has no token
    at that position.
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
    """Tokens per second of plain decoding, and when they were measured: "after loading", "by the
    last answer". Other programs and the browser slow it too, so a recent figure is more accurate.
    """

    tokens_per_second: float
    when: str


UNMEASURED = PlainSpeed(0.0, "")


def keeps_text(method: Method, sampling: Sampling) -> bool:
    """Whether the text of a seed must be that of plain decoding, not only its distribution."""
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
    """The difference in logits of two tokens at the same position, as in the choice between them;
    None if unknown.

    Probabilities are those of the model itself, so the difference of their logarithms is that of
    the logits. Above temperature 0 the noise of the position, times the temperature, is included,
    as in the choice. The figures of each token are those of its own run: the last bits of two
    forwards differ, and the purpose is to recognise near-ties.
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
    """Decode with empty caches. `drafts` are the models that may draft, whose caches are emptied
    too."""
    reset_caches((backend, *drafts))
    events = decode(backend, prompt, drafters, generation, method.drafting, cancelled, costs)
    return collected(planned(backend.info, method, generation), events)


def warm_up(
    backend: Backend, prompt: Sequence[int], generation: Generation, steps: int = 4
) -> None:
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
    typical = median(seconds or [0.0])
    return 1 / typical if typical else 0.0
