"""What a run was worth, with the field's definitions (docs/how-it-works.md).

`mean_acceptance_length` = emitted tokens / target forwards, bonus included; `acceptance_rate` =
accepted / drafted nodes; `acceptance_ratio` = share of the output emitted in steps that emitted
more than one token (arXiv 2502.05609).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.types import Learned, Prefill, Step


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run's figures; times in seconds. `share` and `rate` are per source.

    `levels` says of each draft model how many forwards it made, and how many tokens were drafted
    for it and accepted by it.
    """

    tokens: int
    forwards: int
    ttft_seconds: float
    decode_seconds: float
    draft_seconds: float
    verify_seconds: float
    sample_seconds: float
    other_seconds: float
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_ratio: float
    proposed: dict[str, int]
    accepted: dict[str, int]
    share: dict[str, float]
    look_up_seconds: dict[str, float]
    lengths: dict[int, int]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens per second of stepping, without the prefill."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def end_to_end_tokens_per_second(self) -> float:
        """Tokens per second of the whole answer."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the whole answer: reading the prompt, decoding, and learning the answer."""
        return self.prefill_seconds + self.decode_seconds + self.learning_seconds

    @property
    def kept(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted.values())

    prefill_seconds: float = 0.0
    learning_seconds: float = 0.0
    levels: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def rate(self, source: str) -> float:
        """Accepted / proposed nodes of one source."""
        proposed = self.proposed.get(source, 0)
        return self.accepted.get(source, 0) / proposed if proposed else 0.0


def summarise(
    prefill: Prefill | None, steps: Sequence[Step], learned: Learned | None = None
) -> Metrics:
    """The figures of one run, from its events."""
    forwards = [step for step in steps if step.tokens]
    tokens = sum(len(step.tokens) for step in forwards)
    proposed, accepted = total(s.proposed for s in forwards), total(s.accepted for s in forwards)
    sources = Counter(token.source for step in forwards for token in step.tokens)
    several = sum(len(step.tokens) for step in forwards if len(step.tokens) > 1)
    look_ups: dict[str, float] = {}
    for step in forwards:
        for name, seconds in step.look_ups.items():
            look_ups[name] = look_ups.get(name, 0.0) + seconds
    prefill_seconds = prefill.seconds if prefill else 0.0
    drafted = sum(proposed.values())
    return Metrics(
        tokens=tokens,
        forwards=len(forwards),
        ttft_seconds=prefill_seconds + (forwards[0].seconds if forwards else 0.0),
        decode_seconds=sum(step.seconds for step in forwards),
        draft_seconds=sum(step.draft_seconds for step in forwards),
        verify_seconds=sum(step.verify_seconds for step in forwards),
        sample_seconds=sum(step.sample_seconds for step in forwards),
        other_seconds=sum(step.other_seconds for step in forwards),
        mean_acceptance_length=tokens / len(forwards) if forwards else 0.0,
        acceptance_rate=sum(accepted.values()) / drafted if drafted else 0.0,
        acceptance_ratio=several / tokens if tokens else 0.0,
        proposed=dict(proposed),
        accepted=dict(accepted),
        share={source: n / tokens for source, n in sources.items()},
        look_up_seconds=look_ups,
        lengths=dict(sorted(Counter(len(step.tokens) for step in forwards).items())),
        prefill_seconds=prefill_seconds,
        learning_seconds=learned.seconds if learned else 0.0,
        levels=levels_of(forwards),
    )


def levels_of(steps: Iterable[Step]) -> dict[str, tuple[int, int, int]]:
    """What the levels of a stack did, summed over steps."""
    found: dict[str, tuple[int, int, int]] = {}
    for step in steps:
        for name, (forwards, drafted, accepted) in step.levels.items():
            before = found.get(name, (0, 0, 0))
            found[name] = (before[0] + forwards, before[1] + drafted, before[2] + accepted)
    return found


def total(counts: Iterable[dict[str, int] | object]) -> Counter[str]:
    """The sum of per-source counts."""
    result: Counter[str] = Counter()
    for count in counts:
        result.update(count)  # type: ignore[arg-type]
    return result
