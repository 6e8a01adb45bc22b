"""The conditions under which two runs of one prompt are compared, and the definition of speedup.

Each run starts with empty caches (`reset_caches`). There is one definition of speedup: the wall
time per token of the whole plain answer (reading the prompt, drafting, decoding, learning the
answer) divided by that of the whole accelerated answer. The ratio for decoding alone is kept
separately. Times are per token because a run that keeps only the distribution may emit more or
fewer tokens than the plain one.

The plain time is either measured, or estimated from the accelerated answer itself: `live` adds up
the time that plain decoding would have taken for each step at the load of that moment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median, median_low
from typing import NamedTuple, Protocol, TypeVar

from engine.backends.base import Backend
from engine.decode import never
from engine.metrics import Metrics

T = TypeVar("T")
Pairs = Sequence[tuple[Metrics, Metrics]]
"""Plain and accelerated runs of the same prompt."""


class Timed(Protocol):
    """The figures of an answer that speedups need: Metrics, or a stored record of them."""

    @property
    def tokens(self) -> int: ...

    @property
    def kept(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def decode_seconds(self) -> float: ...


def rotated(methods: Sequence[T], turn: int) -> list[T]:
    """The order of methods in turn number `turn`. Each method comes first equally often, so a
    machine that warms up or slows down favours none."""
    first = turn % len(methods)
    return [*methods[first:], *methods[:first]]


def reset_caches(models: Iterable[Backend]) -> None:
    """Empty the caches of the models, so that the next run does not profit from the run before."""
    for model in models:
        model.prefill([0], never)


def gain(plain: float, fast: float, accepted: int) -> float | None:
    """The plain time divided by the accelerated one, or None if that is meaningless.

    A run that accepted no draft makes one forward per token, like plain decoding, and cannot be
    faster: a ratio above 1 is noise, and is not returned. A ratio below 1 is, because looking for
    drafts takes time.
    """
    if plain <= 0 or fast <= 0:
        return None
    ratio = plain / fast
    return ratio if accepted or ratio <= 1 else None


@dataclass(frozen=True, slots=True)
class Speedup:
    """The speedup of whole answers, and of decoding alone; None: see `gain`.

    `plain_steps` is None if a plain run was measured. Otherwise the plain time was estimated from
    the answer itself (`live`), which contained this many plain steps. `low` and `high` are the
    range of `whole` if it was measured several times (`interval`). If that range includes 1, there
    is no measurable difference, and only the range is given.
    """

    whole: float | None = None
    decoding: float | None = None
    plain_steps: int | None = None
    low: float | None = None
    high: float | None = None


UNKNOWN = Speedup()


FEWEST = 16
"""The fewest tokens of an answer for which its estimated speedup is meaningful."""


def live(run: Metrics) -> Speedup:
    """The estimated speedup of an answer, finished or in progress, over plain decoding at the same
    load.

    Both ratios are None if they would be meaningless: in an answer of less than FEWEST tokens, or
    if the plain seconds are unknown. If no draft was accepted they are 1 at most: see `gain`.
    """
    if run.plain_seconds is None or run.tokens < FEWEST:
        return Speedup(plain_steps=run.plain_steps)

    def ratio(plain: float, fast: float) -> float | None:
        if plain <= 0 or fast <= 0:
            return None
        return plain / fast if run.kept else min(plain / fast, 1.0)

    return Speedup(
        ratio(plain_reading(run) + run.plain_seconds, run.seconds),
        ratio(run.plain_seconds, run.decode_seconds),
        run.plain_steps,
    )


def plain_reading(run: Metrics) -> float:
    """The seconds in which plain decoding reads the prompt."""
    plain = run.plain_prefill_seconds
    return run.prefill_seconds if plain is None else plain


def speedup(pairs: Pairs, accepted: int | None = None) -> Speedup:
    """The median over repeats of one prompt. `accepted` drafts are those of the accelerated runs
    unless given."""
    usable = [(plain, fast) for plain, fast in pairs if plain.tokens and fast.tokens]
    kept = sum(fast.kept for _, fast in usable) if accepted is None else accepted

    def middle(seconds: Callable[[Metrics], float]) -> float | None:
        ratios = [
            (seconds(plain) / plain.tokens) / (seconds(fast) / fast.tokens)
            for plain, fast in usable
            if seconds(fast)
        ]
        return gain(median(ratios), 1.0, kept) if ratios else None

    return Speedup(middle(lambda run: run.seconds), middle(lambda run: run.decode_seconds))


DOUBT = 0.1
"""The probability that the true median lies outside the range that is shown."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The confidence interval of the median, by order statistics, with an error of at most DOUBT.
    It makes no assumption about the distribution of the values, and ignores outliers. For less than
    eight values it is their whole range, whose error may be larger."""
    ordered, left_out = sorted(values), 0
    ways = 2.0 ** len(ordered)
    doubt = 2 / ways
    while (doubt := doubt + 2 * comb(len(ordered), left_out + 1) / ways) <= DOUBT:
        left_out += 1
    return ordered[left_out], ordered[-1 - left_out]


class Reruns(NamedTuple):
    """The result of pairs of reruns of an answer: the number of pairs, the index of the median
    pair, the seconds of the whole answer in it, plainly and with drafts, the range of the ratio of
    the two, and the speedup, whose fields may be None."""

    pairs: int
    middle: int
    plain_seconds: float
    seconds: float
    range: tuple[float, float]
    speedup: Speedup


def middle_of(ratios: Mapping[int, float]) -> int:
    """The index of the median, of the lower one if two are in the middle."""
    return sorted(ratios, key=ratios.__getitem__)[(len(ratios) - 1) // 2]


def reruns(pairs: Pairs, shown: Metrics) -> Reruns:
    """The speedup of an answer, from pairs of a plain and an accelerated rerun.

    It is the speedup that `live` estimates, with the plain time measured: of the whole answer as it
    was `shown`. Reading the prompt therefore takes the time that it took for the answer, which may
    have found most of the prompt in the cache, while a rerun has to read all of it. Times are per
    token, as above. If no draft was accepted, in the answer or in the typical rerun, there is no
    speedup.
    """
    times = [
        (
            plain_reading(shown) + plain.decode_seconds,
            shown.prefill_seconds + fast.decode_seconds + fast.learning_seconds,
        )
        for plain, fast in pairs
    ]
    ratios = {
        at: slow / plain.tokens / (quick / fast.tokens)
        for at, ((plain, fast), (slow, quick)) in enumerate(zip(pairs, times, strict=True))
        if plain.tokens and fast.tokens and slow > 0 and quick > 0
    }
    if not ratios:
        return Reruns(0, 0, 0.0, 0.0, (1.0, 1.0), UNKNOWN)
    # The shown speedup must be the ratio of the shown times.
    middle = middle_of(ratios)
    plain, fast = pairs[middle]
    accepted = min(shown.kept, median_low(pairs[at][1].kept for at in ratios))
    low, high = interval([*ratios.values()])
    gained = Speedup(low=low, high=high)
    if not accepted:
        gained = UNKNOWN
    elif len(ratios) == 1 or not low <= 1 <= high:
        decoding = plain.decode_seconds / plain.tokens / (fast.decode_seconds / fast.tokens)
        gained = Speedup(ratios[middle], decoding, None, low, high)
    return Reruns(len(ratios), middle, *times[middle], (low, high), gained)


def overall(plain: Sequence[Timed], fast: Sequence[Timed]) -> Speedup:
    """The speedup over several prompts: the total time per token of all answers."""
    kept = sum(run.kept for run in fast)

    def per_token(runs: Sequence[Timed], seconds: Callable[[Timed], float]) -> float:
        tokens = sum(run.tokens for run in runs)
        return sum(map(seconds, runs)) / tokens if tokens else 0.0

    def ratio(seconds: Callable[[Timed], float]) -> float | None:
        return gain(per_token(plain, seconds), per_token(fast, seconds), kept)

    return Speedup(ratio(lambda run: run.seconds), ratio(lambda run: run.decode_seconds))
