"""Weights of 4 or 8 bits on a GPU: the linear layers of a model in transformers.

A weight is a whole number, less a zero, times a scale; a group of inputs of an output shares both.
The kernel of products (kernels.py) turns the numbers into weights of the model's type while it
multiplies, so a step reads a quarter or half of the bytes, and a row has the same bits in products
of all sizes. Embeddings and norms keep their type.

Weights are rounded here, with half of all numbers as the zero of every group, or the numbers are
those of files (engine/models/load_quantised.py).
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn

GROUP = 64
"""Inputs that share a scale; numbers of files may also have groups of 32. Two groups are a step of
the kernel: in 4 bits a byte has the number of an input of the first group in its low half, and that
of the second in its high half."""
SLICE = 1 << 24
"""Weights that are converted at a time; each takes about 20 bytes meanwhile."""
AMPERE = 8, 0
"""The compute capability from which on GPUs have matrix units for bfloat16, and Triton uses matrix
units at all (github.com/triton-lang/triton/pull/5066)."""


def problem(device: torch.device) -> str:
    """Why the kernels of products cannot be used on a device that is no processor; "" if they
    can."""
    if device.type != "cuda":
        return f"a processor or an NVIDIA GPU is needed, and the model would run on {device}"
    if find_spec("triton") is None:
        return "Triton is missing, which torch brings along on Linux"
    if before_ampere(device):
        own, least = (".".join(map(str, each)) for each in (capability(device), AMPERE))
        return f"the GPU has compute capability {own}, and Triton compiles for {least} and later"
    return ""


def before_ampere(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of an older generation."""
    found = device.type == "cuda" and torch.cuda.is_available()
    return found and capability(device) < AMPERE


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class FewBits(NamedTuple):
    """A matrix of few bits, whose inputs are padded to whole steps of the kernel.

    `numbers` are bytes, shape (outputs, padded inputs x bits / 8). `scales` are float16 and `zeros`
    int16, shape (outputs, padded inputs / group); without zeros, half of all numbers is subtracted.
    Number k of an output belongs to input `places[k]`, or to input k if `places` is None.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    places: torch.Tensor | None
    bits: int
    group: int
    inputs: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        found = self.numbers, self.scales, self.zeros, self.places
        return [each for each in found if each is not None]

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.numbers.nbytes + self.scales.nbytes + zeros

    @property
    def weight(self) -> torch.Tensor:
        """The weights that the numbers stand for, shape (outputs, inputs), in float32."""
        (outputs, groups), numbers = self.scales.shape, self.numbers
        if self.bits == 4:
            numbers = numbers.view(outputs, -1, 1, self.group)
            numbers = torch.cat([numbers & 15, numbers >> 4], dim=2)
        values = numbers.view(outputs, groups, self.group).float()
        values -= 1 << (self.bits - 1) if self.zeros is None else self.zeros[..., None]
        values *= self.scales.float()[..., None]
        weight = values.view(outputs, -1)[:, : self.inputs]
        return weight if self.places is None else weight[:, self.places.argsort()]


class RoundedLinear(nn.Module):
    """A linear layer of few bits: maps (..., inputs) to (..., outputs), in a type of 16 bits."""

    def __init__(self, matrix: FewBits, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = len(matrix.numbers), matrix.inputs
        self.matrix, self.bias = matrix, bias
        self.counted = True
        """Whether its weights are no copy of others."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return multiply(states, self.matrix, self.bias)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def weight(self) -> torch.Tensor:
        return self.matrix.weight


def give_back(device: torch.device) -> None:
    """Give back the memory that was freed on a device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def settle(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Move tensors of a device together, by way of the host. Where they are, torch could not give
    back what was freed around them."""
    for each in tensors:
        each.data = each.data.cpu()
    give_back(device)
    for each in tensors:
        each.data = each.data.to(device)


def rounded(weight: torch.Tensor, bits: int, device: str) -> FewBits:
    """A matrix in floating point, shape (outputs, inputs), in few bits on a device."""
    rows = max(1, SLICE // weight.shape[1])
    parts = [rounded_rows(part.to(device), bits) for part in torch.split(weight, rows)]
    numbers, scales = (torch.cat(each) for each in zip(*(part[:2] for part in parts), strict=True))
    return parts[0]._replace(numbers=numbers, scales=scales)


def rounded_rows(weight: torch.Tensor, bits: int) -> FewBits:
    """In each group the weight that is the farthest from 0 becomes the lowest number, which has no
    counterpart above."""
    outputs, inputs = weight.shape
    half = 1 << (bits - 1)
    groups = nn.functional.pad(weight.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    places = groups.abs().argmax(dim=2, keepdim=True)
    scales = (groups.gather(2, places) / -half).to(torch.float16)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    numbers = (groups * inverse).round().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8)
    return few_bits(numbers.view(outputs, -1)[:, :inputs], scales[..., 0], bits)


def few_bits(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    group: int = GROUP,
    zeros: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> FewBits:
    """A matrix with these numbers, shape (outputs, inputs), in uint8, and with a scale and perhaps
    a zero for each group of inputs, shape (outputs, groups). Raises ValueError for scales that are
    too large."""
    outputs, inputs = numbers.shape
    groups = -(-inputs // (2 * group)) * 2
    numbers = padded(numbers, groups * group)
    scales = padded(converted(scales, torch.float16), groups)
    zeros = None if zeros is None else padded(zeros, groups)
    if bits == 4:
        first, second = numbers.view(outputs, -1, 2, group).unbind(2)
        numbers = (first | second << 4).flatten(1)
    return FewBits(numbers, scales, zeros, places, bits, group, inputs)


def padded(values: torch.Tensor, columns: int) -> torch.Tensor:
    return nn.functional.pad(values, (0, columns - values.shape[1])).contiguous()


def converted(scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Scales in another type. Raises ValueError if one is too large for it."""
    found = scales.to(kind)
    if not torch.equal(found.isfinite(), scales.isfinite()):
        raise ValueError("its matrices have scales that are too large for float16")
    return found


def multiply(states: torch.Tensor, matrix: FewBits, bias: torch.Tensor | None) -> torch.Tensor:
    if states.is_cuda:
        found: torch.Tensor
        found = import_module("engine.backends.kernels").linear(states, matrix, bias)
        return found
    return nn.functional.linear(states, matrix.weight.to(states.dtype), bias)
