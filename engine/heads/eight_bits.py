"""Matrices of eight bits, for guesses on a processor.

A guess multiplies a few rows by all weights of a head. On a processor that takes as long as the
weights take to come from memory, and eight bits come four times as fast as 32. What is lost is
rounding: it moves guesses a little, and no answer, as guesses decide nothing.

Whether the library computes it fast depends on the processor. So it is tried, not assumed.
"""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch.nn import functional

COPIED = 64 << 20
"""The bytes of a copy at most, where the matrix itself has to stay for others."""
LANES = 64
"""The library reads so many inputs at a time, or a part of it, and beyond the end of others."""
ROWS, ROUNDS = 2, 5
"""Rows of a trial: a guess mostly reads one or two. And how often it is run."""


class EightBits:
    """A matrix of shape (outputs, inputs), rounded: whole numbers, and a scale for each output."""

    def __init__(self, weight: torch.Tensor) -> None:
        scales = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / 127
        self.numbers = (weight / scales).round().to(torch.int8)
        self.scales = scales[:, 0].bfloat16()

    @property
    def bytes(self) -> int:
        return self.numbers.numel() + 2 * self.scales.numel()

    def times(self, states: torch.Tensor) -> torch.Tensor:
        """What `linear` makes of some rows."""
        rows = states.to(torch.bfloat16).contiguous()
        out: torch.Tensor = torch._weight_int8pack_mm(rows, self.numbers, self.scales)
        return out.to(states.dtype)


Matrix = torch.Tensor | EightBits


def linear(states: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As in torch, of rows, shape (rows, inputs), and a matrix of either kind."""
    if isinstance(matrix, EightBits):
        out = matrix.times(states)
        return out if bias is None else out + bias
    return functional.linear(states, matrix, bias)


def bytes_of(matrix: Matrix) -> int:
    """What a matrix takes in memory."""
    if isinstance(matrix, EightBits):
        return matrix.bytes
    return matrix.numel() * matrix.element_size()


def packed(matrix: torch.Tensor) -> Matrix:
    """A matrix of eight bits where the library can multiply with it."""
    return matrix if matrix.shape[1] % LANES else EightBits(matrix)


@torch.inference_mode()
def faster(matrices: Sequence[torch.Tensor]) -> bool:
    """Whether a few rows are multiplied faster with eight bits here."""
    if not hasattr(torch, "_weight_int8pack_mm") or matrices[0].device.type != "cpu":
        return False
    rounded = [packed(each) for each in matrices]
    states = [each.new_ones(ROWS, each.shape[1]) for each in matrices]
    times: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for found, kind in zip(times, (matrices, rounded), strict=True):
            clock = perf_counter()
            for rows, matrix in zip(states, kind, strict=True):
                linear(rows, matrix)
            found.append(perf_counter() - clock)
    plain, eight = map(min, times)
    return eight < plain
