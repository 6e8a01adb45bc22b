"""The target's choice: a function of the logits, the settings and (seed, position) alone.

Gumbel-max with keyed noise: the noise of a position depends on the seed and the absolute position,
never on how the forward was arranged. So a plain run and an accelerated run that see the same
logits choose the same tokens, at every temperature. The maths is numpy, on the host, for every
backend: one sampler to prove, and the same seed gives the same text wherever the model runs.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.settings import Sampling

Floats = NDArray[np.float32]
COLDEST = 1e-4
"""Below it no token but the likeliest has a chance, and logits divided by it would overflow."""
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""
WORD = 2**64 - 1
BITS, GRID = 24, 2.0**18
"""Bits of a draw, and how many values of noise there are between two whole numbers."""


def split(state: int, number: int) -> int:
    """The number of that index, from 0 on, that the generator SplitMix64 gives from a state."""
    word = (state + (number + 1) * GAMMA) & WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def noise_key(seed: int, position: int) -> int:
    """The state that the noise of one absolute position of one seed begins from."""
    return split(split(seed, 0), position)


def gumbel(seed: int, position: int, tokens: NDArray[np.int64] | Sequence[int]) -> Floats:
    """Standard Gumbel noise of some tokens at one absolute position of one seed.

    Token t has the t-th number of a SplitMix64 generator that starts from a hash of seed and
    position, so whoever needs a few tokens computes these alone. Its upper 24 bits k give
    g = -log(-log((k + 1/2) / 2**24)), rounded to a multiple of 2**-18: of all 2**24 values none is
    nearer than 1e-12 to a middle between two multiples, so every library's logarithm gives the same
    float32. `native/src/noise.hpp` is the same in C++.
    """
    words = np.asarray(tokens, dtype=np.int64).astype(np.uint64)
    words *= np.uint64(GAMMA)
    words += np.uint64((noise_key(seed, position) + GAMMA) & WORD)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    words ^= words >> np.uint64(31)
    return noise_of(words >> np.uint64(64 - BITS))


def noise_of(draws: NDArray[np.uint64]) -> Floats:
    """The noise that draws of 24 bits stand for; it grows with them."""
    noise = (draws.astype(np.float64) + 0.5) * 2.0**-BITS
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    noise *= -GRID
    np.rint(noise, out=noise)
    noise /= GRID
    return noise.astype(np.float32)


LARGEST = noise_of(np.array([2**BITS - 1], dtype=np.uint64))[0]
"""No noise is larger: 17.3. So a token that lies farther below another can never be chosen."""


def draw(seed: int, position: int, size: int) -> Floats:
    """The noise of all tokens of a vocabulary, shape (size,)."""
    return gumbel(seed, position, np.arange(size, dtype=np.int64))


def warp(logits: Floats, sampling: Sampling) -> Floats:
    """Logits after temperature, top-k, top-p and min-p, in that order; dropped ones are -inf.

    `logits` has shape (vocabulary,); the temperature must be above 0. Ties at a cut are kept.
    """
    warped = logits / np.float32(sampling.temperature)
    floor = np.float32(-np.inf)
    if 0 < sampling.top_k < warped.size:
        floor = np.partition(warped, -sampling.top_k)[-sampling.top_k]
    if sampling.top_p < 1.0:
        floor = max(floor, nucleus_floor(warped[warped >= floor], sampling.top_p))
    if sampling.min_p > 0.0:
        floor = max(floor, warped.max() + np.float32(math.log(sampling.min_p)))
    if floor > -np.inf:
        warped[warped < floor] = -np.inf
    return warped


def nucleus_floor(warped: Floats, top_p: float) -> np.float32:
    """The smallest logit of the smallest set of tokens whose probability reaches `top_p`."""
    weights = np.exp(warped - warped.max())
    wanted = np.float64(top_p) * weights.sum(dtype=np.float64)
    # A nucleus is nearly always small, so sort a few candidates before sorting the vocabulary.
    for count in (256, warped.size):
        if count >= warped.size:
            head = np.sort(warped)[::-1]
        else:
            head = np.sort(np.partition(warped, -count)[-count:])[::-1]
        mass = np.cumsum(np.exp(head - warped.max()), dtype=np.float64)
        inside = int(np.searchsorted(mass, wanted))
        if inside < head.size:
            return np.float32(head[inside])
    return np.float32(head[-1])


def choose(logits: Floats, sampling: Sampling, position: int) -> int:
    """The token for one absolute position. `logits` has shape (vocabulary,), float32."""
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    warped = warp(logits, sampling)
    warped += draw(sampling.seed, position, logits.size)
    return int(warped.argmax())


def probabilities(logits: Floats) -> Floats:
    """The softmax of unwarped logits, shape (vocabulary,)."""
    weights: Floats = logits - logits.max()
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def distribution(logits: Floats, sampling: Sampling) -> Floats:
    """The law that `choose` samples from: probabilities of shape (vocabulary,)."""
    if sampling.temperature < COLDEST:
        certain = np.zeros_like(logits)
        certain[logits.argmax()] = 1.0
        return certain
    return probabilities(warp(logits, sampling))
