"""What a token's choice and probability take at real vocabularies: part of `bench overhead`.

No model is needed: rows of logits are made whose softmax falls with the rank as that of language
models does. Every row is seen once per sampler, as after a forward, and not found in a cache.
`milliseconds` are medians per emitted token, by the compiled core and by Python alone; with the
sampler `T=0.7` they are to be at most WANTED_MS.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import numpy as np

from engine import native
from engine.backends.scores import LogitScores
from engine.sampling import Floats
from engine.settings import Sampling

VOCABULARIES = (32_000, 152_000, 262_144)
WANTED_MS = {152_000: 0.15, 262_144: 0.25}
SAMPLERS = {
    "T=0": Sampling(0.0),
    "T=0.7": Sampling(0.7),
    "top-k 20": Sampling(0.7, top_k=20),
    "top-p 0.9": Sampling(0.7, top_p=0.9),
    "min-p 0.05": Sampling(0.7, min_p=0.05),
}
ROWS, STEEPNESS, SEED = 60, 1.5, 0
"""Rows that are timed; how fast the logarithm of a probability falls with that of its rank."""

Choices = dict[str, dict[str, dict[str, float]]]
"""Milliseconds per vocabulary, sampler and core."""


def time_choices() -> Choices:
    """Time them all: by the compiled core where it is there, and by Python alone."""
    found: Choices = {}
    for size in VOCABULARIES:
        rows = made_rows(size, ROWS)
        found[str(size)] = {name: timed(rows, sampler) for name, sampler in SAMPLERS.items()}
    return found


def made_rows(vocabulary: int, count: int) -> list[Floats]:
    """Rows of logits that fall with the rank, with noise, in a random order of tokens."""
    stream = np.random.default_rng((SEED, vocabulary))
    falling = -STEEPNESS * np.log(np.arange(1, vocabulary + 1))
    noisy = falling + stream.normal(size=(count, vocabulary))
    return [stream.permutation(row).astype(np.float32) for row in noisy]


def timed(rows: Sequence[Floats], sampler: Sampling) -> dict[str, float]:
    """Milliseconds per emitted token, by core."""
    found = {}
    if native.core is not None:
        found["native"] = milliseconds(rows, sampler)
    with in_python():
        found["python"] = milliseconds(rows, sampler)
    return found


def milliseconds(rows: Sequence[Floats], sampler: Sampling) -> float:
    """The median of choice and probability over the rows."""
    seconds = []
    scores = LogitScores(rows.__getitem__, range(len(rows)), sampler)
    for row in range(len(rows)):
        clock = perf_counter()
        scores.probability(row, scores.choose(row))
        seconds.append(perf_counter() - clock)
    return 1e3 * median(seconds)


@contextmanager
def in_python() -> Iterator[None]:
    """While it is entered, choices are made without the compiled core."""
    core, native.core = native.core, None
    try:
        yield
    finally:
        native.core = core


def show_choices(found: Choices) -> None:
    """Print the table."""
    print("choice and probability, ms per emitted token: compiled core / Python")
    print(f"{'vocabulary':>10}" + "".join(f"{name:>16}" for name in SAMPLERS))
    for size, samplers in found.items():
        cells = (
            " / ".join(f"{times[core]:.3f}" for core in ("native", "python") if core in times)
            for times in samplers.values()
        )
        print(f"{int(size):10,}" + "".join(f"{cell:>16}" for cell in cells))
    for vocabulary, limit in WANTED_MS.items():
        native = found[str(vocabulary)]["T=0.7"].get("native")
        if native is not None:
            verdict = "yes" if native <= limit else "NO"
            print(f"wanted at {vocabulary:,}, T=0.7: at most {limit} ms: {verdict}")
