"""The figures of a run, with the field's definitions (docs/how-it-works.md).

`mean_acceptance_length` = emitted tokens / target forwards, bonus included; `acceptance_rate` =
accepted / drafted nodes; `acceptance_ratio` = share of the output emitted in steps that emitted
more than one token (arXiv 2502.05609).

A run is counted while it grows. Adding an event takes time proportional to its size, and reading
the figures takes time proportional to the number of sources, however many steps there were.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from engine.types import Event, Learned, Prefill, Run, Step


@dataclass(slots=True)
class Metrics:
    """One run's figures; times in seconds. `share` and `rate` are per source.

    `levels` gives for each draft model the number of its forwards, and how many tokens were drafted
    for it and accepted by it. `kept_lengths` counts the steps that drafted by the number of tokens
    that they kept; `by_depth` holds the (drafted, kept) tokens of depth 1, 2, ... `several` counts
    the tokens of the steps that emitted more than one.

    `plain_seconds` is the time that plain decoding would have taken for these tokens at the load of
    the machine, None if it is unknown for a step, and `plain_prefill_seconds` the same for the
    prompt; `plain_steps` is the number of steps that drafted nothing. `resumed_seconds` is the time
    for reading again when an answer was continued. It is in no other figure, because an answer
    without interruption does not need it. `beside` adds up the other answers that shared each
    forward.
    """

    tokens: int = 0
    forwards: int = 0
    several: int = 0
    plain_steps: int = 0
    beside: int = 0
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    other_seconds: float = 0.0
    learning_seconds: float = 0.0
    resumed_seconds: float = 0.0
    plain_prefill_seconds: float | None = None
    plain_seconds: float | None = None
    sources: Counter[str] = field(default_factory=Counter)
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    kept_lengths: Counter[int] = field(default_factory=Counter)
    by_depth: tuple[tuple[int, int], ...] = ()
    look_up_seconds: dict[str, float] = field(default_factory=dict)
    levels: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def ttft_seconds(self) -> float:
        return self.prefill_seconds + self.first_seconds

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.sample_seconds + self.other_seconds

    @property
    def mean_acceptance_length(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def answers_at_once(self) -> float:
        """How many answers shared a forward, this one included, on average."""
        return 1 + self.beside / self.forwards if self.forwards else 1.0

    @property
    def acceptance_rate(self) -> float:
        drafted = self.proposed.total()
        return self.kept / drafted if drafted else 0.0

    @property
    def acceptance_ratio(self) -> float:
        return self.several / self.tokens if self.tokens else 0.0

    @property
    def share(self) -> dict[str, float]:
        return {source: count / self.tokens for source, count in self.sources.items()}

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens per second of stepping, without the prefill."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def plain_tokens_per_second(self) -> float:
        """The decode speed of plain decoding at the load of these steps, 0 if unknown."""
        return self.tokens / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the whole answer: reading the prompt, decoding, and learning the answer."""
        return self.prefill_seconds + self.decode_seconds + self.learning_seconds

    @property
    def kept(self) -> int:
        return self.accepted.total()

    def rate(self, source: str) -> float:
        proposed = self.proposed.get(source, 0)
        return self.accepted.get(source, 0) / proposed if proposed else 0.0


class Tally(Metrics):
    """Counts one run, event by event. A step without tokens was cancelled, and is no forward."""

    def add(self, event: Event) -> None:
        if isinstance(event, Prefill):
            self.prefill_seconds = event.seconds
            self.plain_prefill_seconds = event.plain_seconds
        elif isinstance(event, Learned):
            self.learning_seconds = event.seconds
        elif event.tokens:
            self.count(event)
            self.clock(event)

    def resume(self, prefill: Prefill) -> None:
        self.resumed_seconds += prefill.seconds

    def count(self, step: Step) -> None:
        emitted = len(step.tokens)
        self.tokens += emitted
        self.several += emitted if emitted > 1 else 0
        if any(step.proposed.values()):
            self.kept_lengths[sum(step.accepted.values())] += 1
        else:
            self.plain_steps += 1
        depths = zip_longest(self.by_depth, step.by_depth, fillvalue=(0, 0))
        self.by_depth = tuple((a + c, b + d) for (a, b), (c, d) in depths)
        self.lengths[emitted] += 1
        self.sources.update(token.source for token in step.tokens)
        self.proposed.update(step.proposed)
        self.accepted.update(step.accepted)
        for name, (forwards, drafted, accepted) in step.levels.items():
            before = self.levels.get(name, (0, 0, 0))
            self.levels[name] = (before[0] + forwards, before[1] + drafted, before[2] + accepted)

    def clock(self, step: Step) -> None:
        known = self.plain_seconds if self.forwards else 0.0
        plain = step.plain_seconds
        self.plain_seconds = None if known is None or plain is None else known + plain
        self.first_seconds = self.first_seconds if self.forwards else step.seconds
        self.forwards += 1
        self.beside += step.beside
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.sample_seconds += step.sample_seconds
        self.other_seconds += step.other_seconds
        for name, seconds in step.look_ups.items():
            self.look_up_seconds[name] = self.look_up_seconds.get(name, 0.0) + seconds

    def metrics(self) -> Metrics:
        """The figures of the run so far; may be called from another thread than the one that adds
        events."""
        return Metrics(*(copy(getattr(self, each.name)) for each in fields(Metrics)))


def summarise(run: Run) -> Metrics:
    return tallied(run).metrics()


def tallied(run: Run) -> Tally:
    """A counted run, which may be continued."""
    tally = Tally()
    for event in (run.prefill, *run.steps, run.learned):
        if event is not None:
            tally.add(event)
    for part in run.parts:
        tally.resume(part.prefill)
    return tally
