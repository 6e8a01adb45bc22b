"""Triton kernels of captured forwards: attention over a tree, and what surrounds it in a layer.

A captured forward is repeated with the numbers that lie on the device, so the attention reads there
how many tokens are cached: one recording serves texts of all lengths. The cached tokens are divided
among several programs, whose results are then merged (as in flash decoding), because a few rows do
not occupy a GPU otherwise.

Every row has a table entry: the first row of its sequence in the pool, the number of cached tokens,
and its own place after these. Rows of several sequences can therefore be computed together.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

# Triton has no types.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
jit: Callable[[Callable[..., None]], Any] = triton.jit
if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr

PROGRAMS, MOST_SPLITS = 512, 32
"""The cached tokens are divided until there are so many programs, into so many parts at most."""
BLOCK = 64
"""Cached tokens that a program reads at a time."""
GATE_BLOCK = 1024


@jit
def attend_part(
    queries, keys, values,
    starts, lengths, places, visible,
    sums, peaks, masses,
    scale, rows, group,
    query_head, query_row, key_head, key_row, value_head, value_row,
    prompt: constexpr, precision: constexpr, wide: constexpr, block: constexpr, size: constexpr,
    splits: constexpr,
) -> None:  # fmt: skip
    """One part of the cached tokens, for `wide` pairs of a query head and a row."""
    shared = tl.program_id(0)
    split = tl.program_id(1)
    pair = tl.program_id(2) * wide + tl.arange(0, wide)
    used = pair < group * rows
    row = pair % rows
    head = shared * group + pair // rows
    start = tl.load(starts + row).to(tl.int32)
    drafted_from = start + tl.load(lengths + row).to(tl.int32)
    place = tl.load(places + row).to(tl.int32)
    first = tl.min(start, 0)
    last = tl.max(drafted_from + place, 0) + 1
    part = tl.cdiv(tl.cdiv(last - first, splits), block) * block
    begin = first + split * part
    end = tl.minimum(begin + part, last)
    d = tl.arange(0, size)
    q = tl.load(
        queries + head[:, None] * query_head + row[:, None] * query_row + d[None, :],
        mask=used[:, None],
        other=0.0,
    )
    peak = tl.full((wide,), float("-inf"), tl.float32)
    mass = tl.zeros((wide,), tl.float32)
    total = tl.zeros((wide, size), tl.float32)
    for at in range(begin, end, block):
        n = at + tl.arange(0, block)
        inside = n < end
        k = tl.load(
            keys + shared * key_head + n[None, :].to(tl.int64) * key_row + d[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision=precision) * scale
        after = n[None, :] - drafted_from[:, None]
        sees = (n[None, :] >= start[:, None]) & (after < 0)
        if prompt:
            sees = sees | ((after >= 0) & (after <= place[:, None]))
        else:
            other = row[:, None] - place[:, None] + after
            drafted = (after >= 0) & (other < rows) & used[:, None] & inside[None, :]
            shown = tl.load(visible + row[:, None] * rows + other, mask=drafted, other=0)
            sees = sees | (shown != 0)
        score = tl.where(sees & inside[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - level[:, None])
        fade = tl.exp(peak - level)
        mass = mass * fade + tl.sum(weight, 1)
        v = tl.load(
            values + shared * value_head + n[:, None].to(tl.int64) * value_row + d[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        total = total * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
        peak = higher
    to = (head * rows + row) * splits + split
    tl.store(peaks + to, peak, mask=used)
    tl.store(masses + to, mass, mask=used)
    tl.store(sums + to[:, None].to(tl.int64) * size + d[None, :], total, mask=used[:, None])


@jit
def merge_parts(
    sums, peaks, masses, out, rows, heads,
    size: constexpr, splits: constexpr,
) -> None:  # fmt: skip
    """The parts of one query head and row, together."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, size)
    at = (head * rows + row) * splits + tl.arange(0, splits)
    peak = tl.load(peaks + at)
    weight = tl.exp(peak - tl.max(peak, 0))
    total = tl.load(sums + at[:, None].to(tl.int64) * size + d[None, :])
    found = tl.sum(total * weight[:, None], 0) / tl.sum(tl.load(masses + at) * weight, 0)
    tl.store(out + (row * heads + head) * size + d, found.to(out.dtype.element_ty))


def tree_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    places: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of some rows to the cached tokens and to each other; shape (1, rows, heads, size).

    `queries` have shape (1, heads, rows, size), the pool's `keys` and `values` (1, key heads, rows
    of the pool, size); `size` is a power of two, from 16 on. `starts`, `lengths` and `places` are
    whole numbers of shape (rows,), as in the module's docstring. A row sees a row of its sequence
    where `visible`, shape (rows, rows), is not 0; without it, all rows up to its own.
    """
    _, heads, rows, size = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    pairs = group * rows
    wide = 16 if pairs <= 16 else 32 if pairs <= 32 else 64
    blocks = triton.cdiv(pairs, wide)
    splits = 1
    while splits < MOST_SPLITS and 2 * splits * shared * blocks <= PROGRAMS:
        splits *= 2
    sums = torch.empty((heads, rows, splits, size), dtype=torch.float32, device=queries.device)
    peaks, masses = torch.empty_like(sums[..., 0]), torch.empty_like(sums[..., 0])
    out = torch.empty((1, rows, heads, size), dtype=queries.dtype, device=queries.device)
    attend_part[shared, splits, blocks](
        queries, keys, values,
        starts, lengths, places, places if visible is None else visible,
        sums, peaks, masses,
        scale, rows, group,
        queries.stride(1), queries.stride(2), keys.stride(1), keys.stride(2), values.stride(1),
        values.stride(2),
        prompt=visible is None, precision="ieee", wide=wide, block=BLOCK, size=size, splits=splits,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    merge_parts[heads, rows](
        sums, peaks, masses, out, rows, heads, size=size, splits=splits, num_warps=4
    )
    return out


@jit
def norm_row(states, weights, out, eps, width: constexpr, block: constexpr) -> None:
    row = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(states + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, (x * scale).to(weight.dtype) * weight, mask=inside)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, as the library's Llama-like models compute it."""
    states = states.contiguous()
    out, width = torch.empty_like(states), states.shape[-1]
    block = triton.next_power_of_2(width)
    norm_row[(states.numel() // width,)](
        states, weight, out, eps, width=width, block=block, num_warps=8 if block > 1024 else 1
    )
    return out


@jit
def gate_block(gates, ups, out, width, gate_row, up_row, block: constexpr) -> None:
    row = tl.program_id(1)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gates + row * gate_row + at, mask=inside, other=0.0)
    up = tl.load(ups + row * up_row + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + at, (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up, mask=inside)


def silu_times(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(gates) * ups, both of shape (1, rows, width), whose rows may lie apart in memory."""
    width = gates.shape[-1]
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    gate_block[triton.cdiv(width, GATE_BLOCK), gates.numel() // width](
        gates, ups, out, width, gates.stride(-2), ups.stride(-2), block=GATE_BLOCK, num_warps=4
    )
    return out


@jit
def rotate_row(
    states, cosines, sines, out, heads, by_head, by_row,
    half: constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, half)
    left = tl.load(states + head * by_head + row * by_row + at)
    right = tl.load(states + head * by_head + row * by_row + half + at)
    cosines += row * 2 * half + at
    sines += row * 2 * half + at
    out += (row * heads + head) * 2 * half + at
    tl.store(out, left * tl.load(cosines) - right * tl.load(sines))
    tl.store(out + half, right * tl.load(cosines + half) + left * tl.load(sines + half))


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Rotary embedding, as the library's `apply_rotary_pos_emb`: `queries` and `keys` of shape (1,
    heads, rows, size), where half the size is a power of two, `cos` and `sin` (1, rows, size)."""
    found = []
    for states in (queries, keys):
        _, heads, rows, size = states.shape
        out = torch.empty((1, rows, heads, size), dtype=states.dtype, device=states.device)
        strides = states.stride(1), states.stride(2)
        rotate_row[rows, heads](states, cos, sin, out, heads, *strides, half=size // 2, num_warps=1)
        found.append(out.transpose(1, 2))
    return tuple(found)
