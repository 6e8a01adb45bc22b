"""The matrices of a folder that was quantised already, as the compiled core takes them, or the
kernels of a GPU.

Numbers keep their bits. Scales become those of the core: float16 for 32 inputs, or float32 for 128
in 8 bits. Where zeros are not in the middle of the numbers, the core subtracts a low from all
weights of a group, which is the product of its zero and its scale in float16. On a GPU scales are
float16 for 64 or 32 inputs, and zeros are subtracted as they are.

The formats, by their own descriptions: GPTQ packs numbers along the inputs, the lowest bits first,
and stores zeros less 1, but gptq_v2 stores them as they are. AWQ packs along the outputs, eight at
a time in the order 0, 2, 4, 6, 1, 3, 5, 7. compressed-tensors has the outputs first, and packs
numbers along the inputs and zeros along the outputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import parse_local_safetensors_file_metadata
from safetensors import safe_open

from engine.backends.quantised import Layout, Numbers, StoredMatrix
from engine.backends.rounded import FewBits, few_bits
from engine.models.memory import prediction
from engine.models.quantised_files import (
    AWQ,
    COARSE,
    FINE,
    GPTQ,
    PACKED,
    WHOLE,
    Form,
    Matrix,
    matrices,
    unknown,
)

LAYOUTS = {4: Layout(16, 0, 16, 1), 8: Layout(32, 0, 32)}
"""Rows as the core gets them, by bits: blocks of 32 numbers, in 4 bits two neighbours in a byte."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""By bits, the whole number that has a 1 in each of its parts."""
OUTPUTS_OF_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the numbers of eight outputs are."""


def stored(form: Form, layers: int | None, files: Sequence[str]) -> dict[str, StoredMatrix]:
    """The matrices of few bits in the weight files of a model with so many layers, by their places
    in it. Raises ValueError for one whose numbers cannot be kept."""
    listed: dict[str, Any] = {}
    opened: dict[str, Any] = {}
    for file in files:
        own = parse_local_safetensors_file_metadata(Path(file)).tensors
        listed |= own
        opened |= dict.fromkeys(own, safe_open(file, framework="pt"))

    def tensor(name: str) -> torch.Tensor:
        found: torch.Tensor = opened[name].get_tensor(name)
        return found

    ahead = prediction(listed, layers or len(listed))
    found = matrices(form, listed, ahead.names if ahead else ())
    return {
        place: StoredMatrix(
            (matrix.outputs, matrix.inputs),
            f"{place}.bias" in listed,
            [*matrix.tensors],
            partial(read, place, form, matrix, tensor),
        )
        for place, matrix in found.items()
    }


def read(
    place: str,
    form: Form,
    matrix: Matrix,
    tensor: Callable[[str], torch.Tensor],
    device: str | None,
) -> Numbers | FewBits:
    """A matrix for the kernels of a device, or for the core."""
    half = 1 << (matrix.bits - 1)
    parts = {part: tensor(name).to(device) for part, name in matrix.tensors.items()}
    rows = rows_of(parts[form.parts.numbers], form, matrix.bits)
    scales = parts[form.parts.scales].float()
    scales = scales.T if form.parts in (GPTQ, AWQ) else scales
    zeros = zeros_of(parts[form.parts.zeros], form, matrix) if form.parts.zeros in parts else None
    if zeros is not None and not matrix.lows and bool((zeros != half).any()):
        raise unknown(place, "has zeros of its own, and config.json says that it has none")
    places, groups = None, torch.arange(matrix.inputs, device=device) // matrix.span
    index = parts.get(form.parts.groups, groups)
    if not torch.equal(index, groups):
        places = index.argsort(stable=True)
        rows, groups = packed(unpacked(rows, matrix.bits)[:, places], matrix.bits), index[places]
    together = matrix.rounded if device else FINE if matrix.fine else COARSE
    chosen = groups[::together].long()
    if bool((chosen.repeat_interleave(together)[: len(groups)] != groups).any()):
        raise unknown(place, f"has groups that are no multiples of {together} inputs")
    scales = scales[:, chosen]
    zeros = zeros[:, chosen] if zeros is not None and matrix.lows else None
    if device:
        numbers = unpacked(rows, matrix.bits)
        return few_bits(numbers, scales, matrix.bits, together, zeros, places)
    lows = None
    if matrix.bits == 8:
        rows, zeros = rows ^ half, None if zeros is None else zeros - half
    if zeros is not None:
        lows = scales * zeros
    order = np.arange(matrix.outputs)
    layout = LAYOUTS[matrix.bits]
    return Numbers(matrix.bits, layout, rows.numpy(), order, scales, lows, matrix.fine, places)


def rows_of(numbers: torch.Tensor, form: Form, bits: int) -> torch.Tensor:
    """The bytes of the outputs, shape (outputs, bytes)."""
    if form.parts == AWQ:
        return packed(outputs_of_awq(unpacked(bytes_of(numbers), bits)).T, bits)
    rows = bytes_of(numbers.T if form.parts == GPTQ else numbers)
    return rows ^ 128 if form.parts == WHOLE else rows


def zeros_of(zeros: torch.Tensor, form: Form, matrix: Matrix) -> torch.Tensor:
    """Zeros that count from the lowest number on, shape (outputs, groups), in int16."""
    if zeros.dtype == torch.int8:
        return zeros.short() + (1 << (matrix.bits - 1))
    words = zeros.T if form.parts == PACKED else zeros + form.less * ONES[matrix.bits]
    found = unpacked(bytes_of(words), matrix.bits)
    found = outputs_of_awq(found) if form.parts == AWQ else found
    return found.T[: matrix.outputs].short()


def outputs_of_awq(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(len(numbers), -1, 8)[..., OUTPUTS_OF_AWQ].flatten(1)


def bytes_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def unpacked(rows: torch.Tensor, bits: int) -> torch.Tensor:
    return rows if bits == 8 else torch.stack((rows & 15, rows >> 4), -1).flatten(1)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    rows = numbers if bits == 8 else numbers[:, ::2] | numbers[:, 1::2] << 4
    return rows.contiguous()
