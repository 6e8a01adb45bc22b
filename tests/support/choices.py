"""Rows of logits of all kinds, and the choice from one as the law is written down."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine import native
from engine.sampling import COLDEST, Floats, compiled, gumbel, warp
from engine.settings import Sampling

if TYPE_CHECKING:
    from engine.backends.device_scores import DeviceScores

Made = Callable[[np.random.Generator, int], np.ndarray]


def masked(stream: np.random.Generator, size: int) -> np.ndarray:
    row = stream.normal(0, 2.5, size)
    row[1:][stream.random(size - 1) < 0.5] = -np.inf
    return row


def spiked(stream: np.random.Generator, size: int) -> np.ndarray:
    row = stream.normal(0, 2.5, size)
    row[stream.integers(size, size=5)] += 15
    return row


KINDS: dict[str, Made] = {
    "usual": lambda stream, size: stream.normal(0, 2.5, size),
    "whole numbers": lambda stream, size: np.round(stream.normal(0, 2.5, size)),
    "halves, far from 0": lambda stream, size: np.round(stream.normal(0, 5, size)) / 2 + 20,
    "all alike": lambda stream, size: np.ones(size),
    "nearly alike": lambda stream, size: stream.normal(0, 0.01, size),
    "spiked": spiked,
    "masked": masked,
    "steep": lambda stream, size: stream.normal(0, 20, size),
    "falling": lambda stream, size: -np.sort(stream.normal(0, 2.5, size)),
}
"""What rows there are. Equal logits, and sums that are equal, are everywhere in some of them."""
SIZES = (1, 2, 63, 64, 65, 300, 1025, 6144)


def rows_of(kind: str, stream: np.random.Generator, size: int, count: int) -> list[Floats]:
    return [KINDS[kind](stream, size).astype(np.float32) for _ in range(count)]


def samplers(temperature: float, stream: np.random.Generator) -> Iterator[Sampling]:
    """All cuts with each other."""
    for top_k in (0, 1, 20, 64, 1000):
        for top_p in (1.0, 0.99, 0.5, 0.0):
            for min_p in (0.0, 0.05, 1.0):
                yield Sampling(temperature, top_k, top_p, min_p, int(stream.integers(2**63)))


def by_law(logits: Floats, sampling: Sampling, position: int) -> int:
    """The choice with nothing left out: the noise of all tokens, the largest sum."""
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    noise = gumbel(sampling.seed, position, np.arange(logits.size))
    return int((warp(logits, sampling) + noise).argmax())


def by_core(logits: Floats, sampling: Sampling, position: int) -> int | None:
    """The compiled core's choice, None where it leaves it to Python or is not there."""
    if native.core is None:
        return None
    place = native.core.choose(logits, *compiled(sampling), sampling.seed, position)[0]
    return int(place) if place >= 0 else None


def on_device(
    rows: Sequence[Floats] | Floats,
    positions: Sequence[int],
    sampling: Sampling,
    read: list[int] | None = None,
    half: bool = False,
) -> "DeviceScores":
    """The rows as logits on a device, which is torch on the host. Rows that are read as a whole are
    written down. In half precision, they are rounded first."""
    import torch

    from engine.backends.device_scores import DeviceScores

    logits = torch.from_numpy(np.array(rows))
    logits = logits.bfloat16() if half else logits

    def whole(row: int) -> Floats:
        if read is not None:
            read.append(row)
        return logits[row].float().numpy()

    return DeviceScores(logits, whole, positions, sampling)
