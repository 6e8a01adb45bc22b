"""The target's choice: a function of the logits, the settings and (seed, position) alone.

This is the Gumbel-max trick with keyed noise. The noise of a position depends on the seed and the
absolute position, never on how the forward was arranged. A plain run and an accelerated run that
see the same logits therefore choose the same tokens, at every temperature. The computation is in
numpy on the host for every backend, so there is one sampler to prove, and the same seed gives the
same text wherever the model runs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine import native
from engine.settings import Sampling

Floats = NDArray[np.float32]
Floor = np.float32
COLDEST = 1e-4
"""Below this temperature only the likeliest token has a chance, and logits divided by it would
overflow."""
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""
WORD = 2**64 - 1
BITS, GRID = 24, 2.0**18
"""Bits of a draw, and how many values of noise there are between two whole numbers."""


def split(state: int, number: int) -> int:
    """The number with this index, from 0, of the generator SplitMix64 with this state."""
    word = (state + (number + 1) * GAMMA) & WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def noise_key(seed: int, position: int) -> int:
    """The state of the generator for the noise of one absolute position of one seed."""
    return split(split(seed, 0), position)


def gumbel(seed: int, position: int, tokens: NDArray[np.int64] | Sequence[int]) -> Floats:
    """Standard Gumbel noise of some tokens at one absolute position of one seed.

    Token t uses the t-th number of a SplitMix64 generator that starts from a hash of seed and
    position, so the noise of a few tokens can be computed without the others. The upper 24 bits k
    of that number give g = -log(-log((k + 1/2) / 2**24)), rounded to a multiple of 2**-18. None of
    the 2**24 values is nearer than 1e-12 to the middle between two multiples, so every library's
    logarithm gives the same float32. `native/src/noise.hpp` is the same in C++.
    """
    if native.core is None:
        return noise_of(draws_of(seed, position, tokens))
    ids = np.asarray(tokens, dtype=np.int64)
    noise = np.empty(ids.size, dtype=np.float32)
    native.core.gumbel(seed, position, ids, noise)
    return noise


def draws_of(
    seed: int, position: int, tokens: NDArray[np.int64] | Sequence[int]
) -> NDArray[np.uint64]:
    words = np.asarray(tokens, dtype=np.int64).astype(np.uint64)
    words *= np.uint64(GAMMA)
    words += np.uint64((noise_key(seed, position) + GAMMA) & WORD)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    words ^= words >> np.uint64(31)
    return words >> np.uint64(64 - BITS)


def noise_of(draws: NDArray[np.uint64]) -> Floats:
    """The noise for draws of 24 bits; it increases with them."""
    noise = (draws.astype(np.float64) + 0.5) * 2.0**-BITS
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    noise *= -GRID
    np.rint(noise, out=noise)
    noise /= GRID
    return noise.astype(np.float32)


LARGEST = noise_of(np.array([2**BITS - 1], dtype=np.uint64))[0]
"""The largest possible noise, 17.3. A token whose logit is further below another can never be
chosen."""


BLOCK, HEAD, DEPTHS = 64, 1024, (4.0, 12.0, np.inf)
"""The number of candidates that are examined first: for the k-th largest, for the largest sum, for
a nucleus."""
MASS_ERROR = 4e-5
"""The tolerance for a row's mass that was computed elsewhere."""


def warp(logits: Floats, sampling: Sampling) -> Floats:
    """Logits after temperature, top-k, top-p and min-p, in that order; dropped ones are -inf.

    `logits` has shape (vocabulary,); the temperature must be above 0. Ties at a cut are kept.
    """
    warped = logits / np.float32(sampling.temperature)
    floor, _ = floors(warped, sampling)
    if floor > -np.inf:
        warped[warped < floor] = -np.inf
    return warped


def floors(warped: Floats, sampling: Sampling, mass: float | None = None) -> tuple[Floor, Floor]:
    """The lowest logit that is kept, of logits divided by the temperature; and how much higher the
    limit might be, if the `mass` of all that top-k does not drop was computed elsewhere."""
    floor, top = np.float32(-np.inf), warped.max()
    if 0 < sampling.top_k < warped.size:
        floor = kth_largest(warped, sampling.top_k)
    sure = floor
    if sampling.top_p < 1.0:
        kept = warped if floor == -np.inf else warped[warped >= floor]
        error = 0.0 if mass is None else MASS_ERROR
        if mass is None:
            mass = float(np.exp(kept - top).sum(dtype=np.float64))
        loose = nucleus_floor(kept, mass * (sampling.top_p + error))
        sure = max(sure, nucleus_floor(kept, mass * (sampling.top_p - error)) if error else loose)
        floor = max(floor, loose)
    if sampling.min_p > 0.0:
        least = top + np.float32(math.log(sampling.min_p))
        floor, sure = max(floor, least), max(sure, least)
    return floor, sure


def kth_largest(values: Floats, k: int) -> Floor:
    """The k-th largest of some numbers.

    The largest of BLOCK numbers each are looked at first: the k-th of these is no larger.
    """
    blocks = values.size // BLOCK
    if blocks > k:
        largest = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        values = values[values >= np.partition(largest, -k)[-k]]
    return np.float32(np.partition(values, -k)[-k])


def ranked(logits: Floats, count: int) -> NDArray[np.intp]:
    """The places of the `count` largest logits in falling order, the first of equal ones first."""
    # Few are left before anything is sorted, however large the vocabulary; all if one is odd.
    floor = kth_largest(logits, count) if count < logits.size else -np.inf
    found = np.flatnonzero(~(logits < floor))
    return found[np.lexsort((found, -logits[found]))][:count]


def nucleus_floor(warped: Floats, target: float) -> Floor:
    """The smallest logit of the nucleus: the fewest largest logits whose weights e^(logit -
    largest) add up to `target`; -inf if all of them do not."""
    top = warped.max()
    for depth in DEPTHS:  # a nucleus is nearly always a few tokens near the largest
        head = np.sort(warped[warped >= top - depth])[::-1]
        mass = np.cumsum(np.exp(head - top), dtype=np.float64)
        inside = int(np.searchsorted(mass, target))
        if inside < head.size:
            return np.float32(head[inside])
    return np.float32(-np.inf)


class Choice(NamedTuple):
    """The result for a row: the chosen token, the largest logit, the sum of e^(logit - top)."""

    token: int
    top: float
    mass: float

    def probability(self, logit: float) -> float:
        return math.exp(logit - self.top) / self.mass


def select(logits: Floats, sampling: Sampling, position: int) -> Choice:
    """The choice for one absolute position. `logits` has shape (vocabulary,), float32."""
    if native.core is not None:
        place, top, mass, _ = native.core.choose(
            logits, *compiled(sampling), sampling.seed, position
        )
        if place >= 0:
            return Choice(place, top, mass)
    highest = logits.max()
    mass = float(np.exp(logits - highest).sum())
    return Choice(reference(logits, sampling, position), float(highest), mass)


def choose(logits: Floats, sampling: Sampling, position: int) -> int:
    return select(logits, sampling, position).token


def compiled(sampling: Sampling) -> tuple[float, int, float, float]:
    cold = sampling.temperature < COLDEST
    least = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    return 0.0 if cold else sampling.temperature, sampling.top_k, sampling.top_p, least


def reference(logits: Floats, sampling: Sampling, position: int) -> int:
    """The token with the largest sum of warped logit and noise, the first of equals: the choice,
    as the compiled core makes it too."""
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    warped = logits / np.float32(sampling.temperature)
    floor, _ = floors(warped, sampling)
    return strongest(warped, floor, sampling.seed, position)[0]


def strongest(
    warped: Floats, floor: Floor, seed: int, position: int, tokens: NDArray[np.int64] | None = None
) -> tuple[int, Floor]:
    """The index of the largest sum of warped logit and noise, and the sum.

    Only tokens that can win are examined. No noise is above LARGEST, so a known sum rules out all
    tokens that are so far below it. Most others are ruled out by their draw u before a logarithm is
    taken, because -log(1 - u) is more than their noise. `tokens` are the ids of the logits, in
    rising order; 0, 1, 2, ... by default.
    """
    top = int(warped.argmax())
    name = top if tokens is None else int(tokens[top])
    reached = warped[top] + gumbel(seed, position, [name])[0]
    best, found = np.float32(-np.inf), top
    slack = np.float32(1e-3) + np.float32(1e-6) * abs(reached)
    places = np.flatnonzero(warped >= max(floor, reached - LARGEST - slack))
    for part in (places[:HEAD], places[HEAD:]):
        draws = draws_of(seed, position, part if tokens is None else tokens[part])
        rest = np.float32(2**BITS) - draws.astype(np.float32)
        near = rest <= np.exp(warped[part] - (reached - slack)) * np.float32(2**BITS) + 1
        part, draws = part[near], draws[near]
        sums = warped[part] + noise_of(draws)
        if sums.size and sums.max() > best:
            found, best = int(part[sums.argmax()]), sums.max()
            reached = max(reached, best)
    return found, best


class Part(NamedTuple):
    """The known part of a row on a device: some logits, with their tokens in rising order.

    No other logit of the row is above `rest`; it is -inf if none of the others can be chosen.
    `mass` is that of the whole row, the sum of e^((logit - largest) / temperature), or 0.
    """

    logits: Floats
    tokens: NDArray[np.int64]
    mass: float = 0.0
    rest: float = -math.inf

    def select(self, sampling: Sampling, position: int) -> tuple[int, float] | None:
        """The choice from the row and its sum of warped logit and noise, above temperature 0; None
        if the unknown part may matter."""
        if native.core is None:
            return self.reference(sampling, position)
        own = *compiled(sampling), sampling.seed, position
        place, _, _, score = native.core.choose(
            self.logits, *own, self.tokens, self.mass, self.rest
        )
        return (int(self.tokens[place]), score) if place >= 0 else None

    def reference(self, sampling: Sampling, position: int) -> tuple[int, float] | None:
        temperature = np.float32(sampling.temperature)
        warped, rest = self.logits / temperature, np.float32(self.rest) / temperature
        counted = 0 < sampling.top_k < warped.size
        if counted and sampling.top_p < 1.0 and kth_largest(warped, sampling.top_k) <= rest:
            return None
        floor, sure = floors(warped, sampling, None if counted else self.mass or None)
        place, score = strongest(warped, floor, sampling.seed, position, self.tokens)
        if warped[place] < sure or (floor <= rest and score <= rest + LARGEST):
            return None
        return int(self.tokens[place]), float(score)


def probabilities(logits: Floats) -> Floats:
    """The softmax of unwarped logits, shape (vocabulary,)."""
    weights: Floats = logits - logits.max()
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def distribution(logits: Floats, sampling: Sampling) -> Floats:
    """The distribution that `choose` samples from: probabilities of shape (vocabulary,)."""
    if sampling.temperature < COLDEST:
        certain = np.zeros_like(logits)
        certain[logits.argmax()] = 1.0
        return certain
    return probabilities(warp(logits, sampling))
