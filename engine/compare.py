"""What two runs of one prompt must share to be compared, and what their times then say.

Each run starts from nothing (`cold`). There is one definition of speedup: wall time of whole
answers (reading the prompt, drafting, decoding, learning the answer), plain over accelerated; that
of decoding alone stands beside it under its own name. Both are per token, as a run that keeps only
the distribution may say more or less than the plain one.

The plain time is measured, or it is told by the answer itself: `live` takes what plain decoding
would have taken for the same tokens at the load that the machine had just then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

from engine.backends.base import Backend
from engine.decode import never
from engine.metrics import Metrics

T = TypeVar("T")
Pairs = Sequence[tuple[Metrics, Metrics]]
"""Plain and accelerated runs of the same prompt."""


class Timed(Protocol):
    """An answer as far as its speed goes: Metrics, or what a store keeps of them."""

    @property
    def tokens(self) -> int: ...

    @property
    def kept(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def decode_seconds(self) -> float: ...


def rotated(methods: Sequence[T], turn: int) -> list[T]:
    """The order of methods in the turn of this number. Each comes first equally often, so that a
    machine that warms up or slows down favours none."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def cold(models: Iterable[Backend]) -> None:
    """Have the next run start from nothing: what the run before left in the models' caches would
    cost this one nothing."""
    for model in models:
        model.prefill([0], never)


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
    """How many times as fast whole answers came, and decoding alone; None: see `gain`.

    `plain_steps` is None where a plain run was measured. Else the plain time was told by the answer
    itself, of which so many steps were plain (`live`).
    """

    whole: float | None = None
    decoding: float | None = None
    plain_steps: int | None = None


UNKNOWN = Speedup()


FEWEST = 16
"""Tokens of an answer before its own speedup means something."""


def live(run: Metrics) -> Speedup:
    """The speedup of an answer, finished or under way, over plain decoding at the same load.

    Both figures are None while they mean nothing: in an answer of less than FEWEST tokens, or of
    which the plain seconds are not known. Where no draft was accepted they are 1 at most: see
    `gain`.
    """
    if run.plain_seconds is None or run.tokens < FEWEST:
        return Speedup(plain_steps=run.plain_steps)
    prompt = run.plain_prefill_seconds
    prompt = run.prefill_seconds if prompt is None else prompt

    def ratio(plain: float, fast: float) -> float | None:
        if plain <= 0 or fast <= 0:
            return None
        return plain / fast if run.kept else min(plain / fast, 1.0)

    return Speedup(
        ratio(prompt + run.plain_seconds, run.seconds),
        ratio(run.plain_seconds, run.decode_seconds),
        run.plain_steps,
    )


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


def overall(plain: Sequence[Timed], fast: Sequence[Timed]) -> Speedup:
    """Over several prompts: all the time per token of all answers."""
    kept = sum(run.kept for run in fast)

    def per_token(runs: Sequence[Timed], seconds: Callable[[Timed], float]) -> float:
        tokens = sum(run.tokens for run in runs)
        return sum(map(seconds, runs)) / tokens if tokens else 0.0

    def ratio(seconds: Callable[[Timed], float]) -> float | None:
        return gain(per_token(plain, seconds), per_token(fast, seconds), kept)

    return Speedup(ratio(lambda run: run.seconds), ratio(lambda run: run.decode_seconds))
