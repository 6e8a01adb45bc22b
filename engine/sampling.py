"""The target's choice: a function of the logits, the settings and (seed, position) alone.

Gumbel-max with keyed noise: the noise of a position depends on the seed and the absolute position,
never on how the forward was arranged. So a plain run and an accelerated run that see the same
logits choose the same tokens, at every temperature. The maths is numpy, on the host, for every
backend: one sampler to prove, and the same seed gives the same text wherever the model runs.
"""

import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from engine.settings import Sampling

Floats = NDArray[np.float32]
COLDEST = 1e-4
"""Below it no token but the likeliest has a chance, and logits divided by it would overflow."""
POSITIONS, NOISE = 128, 32 << 20
"""Noise is kept of so many positions and bytes: of 262,144 tokens, 32 positions take them."""


def draw(seed: int, position: int, size: int) -> Floats:
    """Standard Gumbel noise, shape (size,), for one absolute position of one seed.

    Philox is counter-based: the seed is its key and the position the high word of its counter, so
    the streams of different positions never overlap.
    """
    stream = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position]))
    noise = stream.standard_exponential(size, dtype=np.float32)
    # In single precision one in 2**23 is an exact zero, and would win its position: made usual.
    noise[noise == 0] = 1
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    noise.flags.writeable = False
    return noise


class Noise:
    """What `draw` gave last, POSITIONS and `limit` bytes at most: a drafted position is often
    visited again by the next step."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cache_clear()

    def cache_clear(self) -> None:
        """Forget all of it."""
        self.kept: OrderedDict[tuple[int, int, int], Floats] = OrderedDict()
        self.bytes = 0

    def __call__(self, seed: int, position: int, size: int) -> Floats:
        """The noise of one position, drawn if need be."""
        key = seed, position, size
        noise = self.kept.get(key)
        if noise is None:
            noise = self.kept[key] = draw(seed, position, size)
            self.bytes += noise.nbytes
            while len(self.kept) > POSITIONS or (self.bytes > self.limit and len(self.kept) > 1):
                self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return noise


gumbel = Noise(NOISE)


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
    warped += gumbel(sampling.seed, position, logits.size)
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
