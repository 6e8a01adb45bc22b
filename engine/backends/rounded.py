"""Weights of 4 or 8 bits on a GPU: the linear layers of a model in transformers.

A weight is a whole number times a scale, which GROUP inputs of an output share. The kernel of
products (kernels.py) turns the numbers into weights of the model's type while it multiplies, so a
step reads a quarter or half of the bytes, and a row has the same bits in products of all sizes.
Embeddings and norms keep their type.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

GROUP = 64
"""Inputs that share a scale. Two groups are a step of the kernel: in 4 bits a byte has the number
of an input of the first group in its low half, and that of the second in its high half."""
STEP = 2 * GROUP
SLICE = 1 << 24
"""Weights that are converted at a time; each takes about 20 bytes meanwhile."""


def problem(device: torch.device) -> str:
    """Why weights cannot have few bits on a device that is no processor; "" if they can."""
    if device.type != "cuda":
        return f"a processor or an NVIDIA GPU is needed, and the model would run on {device}"
    if find_spec("triton") is None:
        return "Triton is missing, which torch brings along on Linux"
    return ""


class RoundedLinear(nn.Module):
    """A linear layer of few bits: maps (..., inputs) to (..., outputs), in a type of 16 bits."""

    numbers: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self, weight: torch.Tensor, bias: nn.Parameter | None, bits: int, device: str
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        self.counted = True
        """Whether its weights are no copy of others."""
        groups = -(-self.in_features // STEP) * 2
        # They come before what is freed again: torch would place them in the middle of that.
        size, made = groups * GROUP * bits // 8, partial(torch.empty, device=device)
        self.register_buffer("numbers", made((self.out_features, size), dtype=torch.uint8))
        self.register_buffer("scales", made((self.out_features, groups), dtype=torch.float16))
        rows = max(1, SLICE // self.in_features)
        for start in range(0, self.out_features, rows):
            part = slice(start, start + rows)
            self.numbers[part], self.scales[part] = rounded(weight[part].to(device), bits)
        give_back(torch.device(device))
        self.bias = bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return multiply(states, (self.numbers, self.scales), self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The weights that the numbers stand for, shape (outputs, inputs), in float32."""
        return weights(self.numbers, self.scales)[:, : self.in_features]


def give_back(device: torch.device) -> None:
    """Give back what was freed on a device: torch would place other tensors in it, and keep all of
    a segment for each of them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and the scales of a matrix, shape (outputs, inputs). In each group the weight
    that is the farthest from 0 becomes the lowest number, which has no counterpart above."""
    outputs, inputs = weight.shape
    half = 1 << (bits - 1)
    groups = nn.functional.pad(weight.float(), (0, -inputs % STEP)).view(outputs, -1, GROUP)
    places = groups.abs().argmax(dim=2, keepdim=True)
    scales = (groups.gather(2, places) / -half).to(torch.float16)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    numbers = (groups * inverse).round().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8)
    if bits == 4:
        first, second = numbers.view(outputs, -1, 2, GROUP).unbind(2)
        numbers = first | second << 4
    return numbers.reshape(outputs, -1), scales[..., 0].contiguous()


def weights(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights, shape (outputs, padded inputs), in float32."""
    outputs, groups = scales.shape
    half = 128
    if numbers.shape[1] < groups * GROUP:
        half = 8
        numbers = numbers.view(outputs, -1, 1, GROUP)
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=2)
    values = numbers.reshape(outputs, groups, GROUP).float() - half
    return (values * scales.float()[..., None]).view(outputs, -1)


def multiply(
    states: torch.Tensor, matrix: tuple[torch.Tensor, ...], bias: torch.Tensor | None
) -> torch.Tensor:
    if states.is_cuda:
        found: torch.Tensor
        found = import_module("engine.backends.kernels").linear(states, matrix, bias)
        return found
    inputs = states.shape[-1]
    weight = weights(*matrix)[:, :inputs].to(states.dtype)
    return nn.functional.linear(states, weight, bias)
