"""What two runs of one prompt must share to be compared, and what their times then say.

Each run starts from nothing (`cold`). There is one definition of speedup: wall time of whole
answers (reading the prompt, drafting, decoding, learning the answer), plain over accelerated; that
of decoding alone stands beside it under its own name. Both are per token, as a run that keeps only
the distribution may say more or less than the plain one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.backends.base import Backend
from engine.decode import never
from engine.metrics import Metrics
from engine.sampling import gumbel

Pairs = Sequence[tuple[Metrics, Metrics]]
"""Plain and accelerated runs of the same prompt."""


def cold(models: Iterable[Backend]) -> None:
    """Have the next run start from nothing: caches of the models empty, no noise drawn.

    What the run before left in either would cost this one nothing.
    """
    for model in models:
        model.prefill([0], never)
    gumbel.cache_clear()


def gain(plain: float, fast: float, accepted: int) -> float | None:
    """The plain time over the accelerated one, None where that says nothing.

    A run that accepted no draft makes a forward per token, like plain decoding, and cannot be
    faster: a ratio above 1 is noise, and is not told. One below 1 is: looking for drafts costs.
    """
    if plain <= 0 or fast <= 0:
        return None
    ratio = plain / fast
    return ratio if accepted or ratio <= 1 else None


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast whole answers came, and decoding alone; None: see `gain`."""

    whole: float | None = None
    decoding: float | None = None


UNKNOWN = Speedup()


def speedup(pairs: Pairs, accepted: int | None = None) -> Speedup:
    """The median over repeats of one prompt. `accepted` drafts are those of the accelerated runs
    unless given."""
    told = [(plain, fast) for plain, fast in pairs if plain.tokens and fast.tokens]
    kept = sum(fast.kept for _, fast in told) if accepted is None else accepted

    def middle(seconds: Callable[[Metrics], float]) -> float | None:
        ratios = [
            (seconds(plain) / plain.tokens) / (seconds(fast) / fast.tokens)
            for plain, fast in told
            if seconds(fast)
        ]
        return gain(median(ratios), 1.0, kept) if ratios else None

    return Speedup(middle(lambda run: run.seconds), middle(lambda run: run.decode_seconds))


def overall(plain: Sequence[Metrics], fast: Sequence[Metrics]) -> Speedup:
    """Over several prompts: all the time per token of all answers."""
    kept = sum(run.kept for run in fast)

    def per_token(runs: Sequence[Metrics], seconds: Callable[[Metrics], float]) -> float:
        tokens = sum(run.tokens for run in runs)
        return sum(map(seconds, runs)) / tokens if tokens else 0.0

    def ratio(seconds: Callable[[Metrics], float]) -> float | None:
        return gain(per_token(plain, seconds), per_token(fast, seconds), kept)

    return Speedup(ratio(lambda run: run.seconds), ratio(lambda run: run.decode_seconds))
