"""Triton kernels of captured forwards: products, attention over a tree, and what surrounds them.

**The bits of a row do not depend on what is computed beside it.** Whether a token is decoded alone,
verified among drafts or read as a part of a prompt, each of its numbers is summed up in the same
order:

- A product goes through the inputs in steps of 16, the order of the matrix units, and is not
  divided among programs. With weights of 4 or 8 bits it is: into slices that depend on the matrix
  alone, and are added up in their order.
- Attention goes through the text in blocks of BLOCK positions and parts of a fixed number of
  blocks. Both are counted from the beginning of the text, and it makes no difference whether a
  position is cached or drafted: for each row, the drafted positions are those of its ancestors, in
  the order of the text. Sums within a block are products as well.

A captured forward is repeated with the numbers that lie on the device, so the attention reads there
how many tokens are cached: one recording serves texts of all lengths. The parts that are completely
cached are divided among several programs, as in flash decoding, because a few rows do not occupy a
GPU otherwise. The rest of the text, and the result of all parts, is left to one program for each
row. Prompts have enough rows, so there one program goes through the whole text.

Every row has a table entry: the first row of its sequence in the pool, a multiple of the part, and
the number of cached tokens. Rows of several sequences can therefore be computed together. Parts are
those of the pool, so a program reads one for all rows beside each other that see some of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import e, log2
from typing import TYPE_CHECKING, Any

import torch

from engine.backends import device_scores
from engine.backends.device_scores import Kind
from engine.backends.rounded import FewBits
from engine.sampling import BITS, FIRST, GAMMA, SECOND

# Triton has no types.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
jit: Callable[[Callable[..., Any]], Any] = triton.jit
if TYPE_CHECKING:
    constexpr: Any = Any
else:
    constexpr = tl.constexpr

BLOCK = 32
"""Positions of the text in a block."""
PART, MOST_PARTS = 256, 64
"""Positions in a part at least, and the number of parts of the longest text at most."""
TOGETHER = constexpr(4)
"""Parts whose sums are read at the same time."""
HELD = 2**14
"""Bytes of queries that a program of the attention holds at most, unless 16 rows take more."""
GATE_BLOCK = 1024
FEW_ROWS = 64
"""Up to so many rows, a product takes the time of reading its weights."""
STAGES, FEW_BITS_STAGES, RESIDENT = 6, 3, 3
"""The most steps of a product whose inputs are in shared memory at the same time, also with weights
of few bits, and the most programs that share this memory."""
PROGRAMS, SLICES, SLICE_STEPS = 256, 8, 4
"""Products with weights of few bits are divided into at least so many programs, if that takes at
most SLICES slices of the inputs, each of at least SLICE_STEPS steps."""
MERGE_BLOCK = 1024
RESERVED = 1024
"""Bytes of shared memory that every program takes besides."""
SURVEY_BLOCK = 1024
"""Tokens of a row of logits in a block."""
DRAWS, DRAW_SHIFT = constexpr(2**BITS), constexpr(64 - BITS)
MIX_STEP, MIX_FIRST, MIX_SECOND = constexpr(GAMMA), constexpr(FIRST), constexpr(SECOND)
"""The numbers of the noise of engine/sampling.py."""


# products


def two_of_four_bits(shift: str, exponent: int, one: int, kind: str) -> Any:
    """Instructions that turn the lower halves of four bytes, after a shift, into two pairs of
    numbers of a type. Each half becomes the end of a mantissa, under an exponent at which that
    counts in ones; then what the exponent adds is subtracted, together with the zero."""
    return constexpr(f"""{{
        .reg .b32 numbers, one;
        mov.b32 one, {one:#x};
        {shift}
        and.b32 numbers, numbers, 0x0F0F0F0F;
        prmt.b32 $0, numbers, {exponent:#x}, 0x4140;
        prmt.b32 $1, numbers, {exponent:#x}, 0x4342;
        fma.rn.{kind} $0, $0, one, $3;
        fma.rn.{kind} $1, $1, one, $4;
    }}""")


FOUR_BYTES = constexpr("=&r,=&r,r,r,r")
"""Three registers come in: four bytes, and what is subtracted from each. Two go out, and are
written before all of the others are read."""
BFLOAT16 = 0x43434343, 0x3F803F80, "bf16x2"  # 128 + the number; 1
FLOAT16 = 0x64646464, 0x3C003C00, "f16x2"  # 1,024 + the number; 1
LOWER, UPPER = "mov.b32 numbers, $2;", "shr.b32 numbers, $2, 4;"
LOWER_BFLOAT16, UPPER_BFLOAT16 = (two_of_four_bits(half, *BFLOAT16) for half in (LOWER, UPPER))
LOWER_FLOAT16, UPPER_FLOAT16 = (two_of_four_bits(half, *FLOAT16) for half in (LOWER, UPPER))


@jit
def of_four_bits(numbers, zero, upper: constexpr, kind: constexpr, compiled: constexpr):
    """The numbers in one half of each byte, less the zero of their output."""
    if not compiled:
        value = numbers >> 4 if upper else numbers & 15
        found = (value.to(tl.float32) - zero).to(kind)
    elif kind == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            UPPER_BFLOAT16 if upper else LOWER_BFLOAT16, FOUR_BYTES,
            [numbers, (-128.0 - zero).to(kind)], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            UPPER_FLOAT16 if upper else LOWER_FLOAT16, FOUR_BYTES,
            [numbers, (-1024.0 - zero).to(kind)], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return found


@jit
def of_eight_bits(numbers, zero, kind: constexpr):
    """The numbers less the zero of their output."""
    # 2**23 and a number, as the bits of float32: a conversion takes four times as long.
    value = (numbers.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (value - (8388608.0 + zero)).to(kind)


@jit
def scaled(total, part, scales, block: constexpr, wide: constexpr):
    """A sum, and one over a group times its scale, the lower float16 of a word."""
    scale = (scales & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.fma(part, tl.broadcast_to(scale[:, None], (block, wide)), total)


@jit
def product(
    states, weights, bias, out, rows, outputs, width,
    wide: constexpr, block: constexpr, deep: constexpr, biased: constexpr,
) -> None:  # fmt: skip
    """`block` outputs of `wide` rows."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    m = tl.program_id(1) * wide + tl.arange(0, wide)
    k = tl.arange(0, deep)
    used, inside = m < rows, n < outputs
    n_wide = n.to(tl.int64)[:, None]
    total = tl.zeros((block, wide), tl.float32)
    for at in range(0, width, deep):
        known = (k + at < width)[None, :]
        weight = tl.load(
            weights + n_wide * width + (k + at)[None, :],
            mask=inside[:, None] & known,
            other=0.0,
            eviction_policy="evict_first",
        )
        state = tl.load(
            states + m[:, None] * width + (k + at)[None, :], mask=used[:, None] & known, other=0.0
        )
        total = tl.dot(weight, tl.trans(state), total)
    if biased:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = out + m[None, :] * outputs + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & used[None, :])


@jit
def product_of_few_bits(
    states, weights, scales, zeros, out, rows, outputs, width, slice_steps,
    wide: constexpr, block: constexpr, group: constexpr, bits: constexpr, zeroed: constexpr,
    compiled: constexpr,
) -> None:  # fmt: skip
    """`block` outputs of `wide` rows, over a slice of the inputs. A step is two groups."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    m = tl.program_id(1) * wide + tl.arange(0, wide)
    k = tl.arange(0, group)
    used, inside = m < rows, n < outputs
    kind = states.dtype.element_ty
    size: constexpr = group * bits // 4
    steps = tl.cdiv(width, 2 * group)
    row = weights + n.to(tl.int64)[:, None] * steps * size + k[None, :]
    begin = tl.program_id(2) * slice_steps
    nothing = tl.zeros((block, wide), tl.float32)
    total = nothing
    for step in range(begin, tl.minimum(begin + slice_steps, steps)):
        at = row + step * size
        numbers = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
        if zeroed:
            pair = tl.load(zeros + n * steps + step, mask=inside, other=0)[:, None]
            zero, next_zero = (pair & 0xFFFF).to(tl.float32), (pair >> 16).to(tl.float32)
        else:
            zero = tl.full((block, 1), 1 << (bits - 1), tl.float32)
            next_zero = zero
        if bits == 4:
            first = of_four_bits(numbers, zero, False, kind, compiled)
            second = of_four_bits(numbers, next_zero, True, kind, compiled)
        else:
            first = of_eight_bits(numbers, zero, kind)
            at += group
            numbers = tl.load(at, mask=inside[:, None], other=0, eviction_policy="evict_first")
            second = of_eight_bits(numbers, next_zero, kind)
        pair = tl.load(scales + n * steps + step, mask=inside, other=0)
        here = step * 2 * group + k
        place = states + m[:, None] * width + here[None, :]
        state = tl.load(place, mask=used[:, None] & (here < width)[None, :], other=0.0)
        total = scaled(total, tl.dot(first, tl.trans(state), nothing), pair, block, wide)
        known = used[:, None] & (here + group < width)[None, :]
        state = tl.load(place + group, mask=known, other=0.0)
        total = scaled(total, tl.dot(second, tl.trans(state), nothing), pair >> 16, block, wide)
    to = out + (tl.program_id(2) * rows + m[None, :]) * outputs + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside[:, None] & used[None, :])


@jit
def merge(
    parts, bias, out, outputs, count, slices: constexpr, biased: constexpr, block: constexpr
) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0)
    for number in tl.static_range(1, slices):
        total += tl.load(parts + number * count + at, mask=inside, other=0.0)
    if biased:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@cache
def stages(device: torch.device, programs: int, step: int, most: int) -> int:
    """For how many steps of so many bytes a program has shared memory, if all programs run at the
    same time."""
    if device.type != "cuda":
        return 2
    gpu: Any = torch.cuda.get_device_properties(device)
    resident = min(RESIDENT, triton.cdiv(programs, gpu.multi_processor_count))
    room = min(gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor // resident)
    return int(max(2, min(most, (room - RESERVED) // step)))


def linear(
    states: torch.Tensor, matrix: torch.Tensor | FewBits, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of `states`, shape (..., width), with a matrix, plus `bias`; (..., outputs).

    All are of one type of 16 bits; a matrix is a tensor of shape (outputs, width), or has few bits.
    """
    few = matrix if isinstance(matrix, FewBits) else None
    if few and few.places is not None:
        states = states[..., few.places]
    states = states.contiguous()
    outputs, width = len(few.numbers if few else matrix), states.shape[-1]
    rows = states.numel() // width
    out = torch.empty((*states.shape[:-1], outputs), dtype=states.dtype, device=states.device)
    many = rows > FEW_ROWS
    wide, block = (128, 128) if many else (max(16, triton.next_power_of_2(rows)), 64)
    grid = triton.cdiv(outputs, block), triton.cdiv(rows, wide)
    tile = {"wide": wide, "block": block, "num_warps": 8 if many else 4}
    shift, biased = out if bias is None else bias, bias is not None
    if few is None:
        deep = 64 if many else 128
        step = (wide + block) * states.itemsize * deep
        ahead = stages(states.device, grid[0] * grid[1], step, STAGES)
        product[grid](
            states, matrix, shift, out, rows, outputs, width,
            deep=deep, biased=biased, num_stages=ahead, **tile,
        )  # fmt: skip
        return out
    slices, length = slices_of(outputs, width, 2 * few.group)
    whole = slices == 1 and bias is None
    shape = slices, rows, outputs
    parts = out if whole else torch.empty(shape, dtype=torch.float32, device=states.device)
    zeroed = few.zeros is not None
    pairs = [each.view(torch.int32) for each in (few.scales, few.zeros) if each is not None]
    step = 2 * few.group * (wide * states.itemsize + block * few.bits // 8)
    step += block * pairs[0].itemsize * zeroed
    ahead = stages(states.device, grid[0] * grid[1] * slices, step, FEW_BITS_STAGES)
    product_of_few_bits[(*grid, slices)](
        states, few.numbers, pairs[0], pairs[-1], parts, rows, outputs, width, length,
        group=few.group, bits=few.bits, zeroed=zeroed, compiled=states.is_cuda,
        num_stages=ahead, **tile,
    )  # fmt: skip
    if not whole:
        merge[(triton.cdiv(rows * outputs, MERGE_BLOCK),)](
            parts, shift, out, outputs, rows * outputs,
            slices=slices, biased=biased, block=MERGE_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def slices_of(outputs: int, width: int, step: int) -> tuple[int, int]:
    """Into how many slices the inputs of a matrix of few bits are divided, and their steps."""
    steps = triton.cdiv(width, step)
    slices = min(SLICES, triton.cdiv(PROGRAMS, triton.cdiv(outputs, 64)), steps // SLICE_STEPS)
    length = triton.cdiv(steps, max(1, slices))
    return triton.cdiv(steps, length), length


# attention


@jit
def absorb(peak, mass, total, q, k, v, sees, scale, precision: constexpr):
    """Sums over some positions, and those of one more block.

    The sums are relative to `peak`, the highest score: `mass` of the weights, in equal columns, and
    `total` of the weighted values.
    """
    score = tl.where(sees, tl.dot(q, k, input_precision=precision), float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2((score - level[:, None]) * scale).to(v.dtype)
    fade = tl.exp2((peak - level) * scale)[:, None]
    # A sum over a row would depend on the shape; a product with ones does not.
    ones = tl.full((weight.shape[1], 16), 1.0, v.dtype)
    mass = tl.dot(weight, ones, mass * fade, input_precision=precision)
    total = tl.dot(weight, v, total * fade, input_precision=precision)
    return higher, mass, total


@jit
def fold(peak, mass, total, next_peak, next_mass, next_total, scale):
    """Sums over some positions, and those over the next."""
    higher = tl.maximum(peak, next_peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2((peak - level) * scale)[:, None]
    more = tl.exp2((next_peak - level) * scale)[:, None]
    # Fused in each program, or in none: the bits would differ.
    mass = tl.fma(next_mass, tl.broadcast_to(more, next_mass.shape), mass * fade)
    total = tl.fma(next_total, tl.broadcast_to(more, next_total.shape), total * fade)
    return higher, mass, total


@jit
def nothing(wide: constexpr, size: constexpr):
    peak = tl.full((wide,), float("-inf"), tl.float32)
    return peak, tl.zeros((wide, 16), tl.float32), tl.zeros((wide, size), tl.float32)


@jit
def part_sums(sums, peaks, masses, at, known, wide: constexpr, size: constexpr):
    """The sums over a part; over no positions where it is not known."""
    d = tl.arange(0, size)
    peak = tl.load(peaks + at, mask=known, other=float("-inf"))
    mass = tl.load(masses + at, mask=known, other=0.0)
    total = tl.load(
        sums + at[:, None].to(tl.int64) * size + d[None, :], mask=known[:, None], other=0.0
    )
    return peak, tl.broadcast_to(mass[:, None], (wide, 16)), total


@jit
def text_at(
    keys, values, shared, places, known, key_head, key_row, value_head, value_row, size: constexpr
):  # fmt: skip
    """The keys and the values at some places; zeros where they are not known."""
    d = tl.arange(0, size)
    k = tl.load(
        keys + shared * key_head + places[None, :] * key_row + d[:, None],
        mask=known[None, :],
        other=0.0,
    )
    v = tl.load(
        values + shared * value_head + places[:, None] * value_row + d[None, :],
        mask=known[:, None],
        other=0.0,
    )
    return k, v


@jit
def attend_part(
    queries, keys, values, starts, lengths, lows, sums, peaks, masses, scale, rows, group,
    query_head, query_row, key_head, key_row, value_head, value_row,
    precision: constexpr, wide: constexpr, block: constexpr, part: constexpr, size: constexpr,
    parts: constexpr,
) -> None:  # fmt: skip
    """The sums over the cached blocks of one part, for `wide` pairs of a query head and a row. They
    are not computed where none of these sees a position."""
    shared = tl.program_id(0)
    number = tl.program_id(1)
    pair = tl.program_id(2) * wide + tl.arange(0, wide)
    used = pair < group * rows
    row = pair % rows
    head = shared * group + pair // rows
    start = tl.load(starts + row).to(tl.int32)
    cached = start + tl.load(lengths + row).to(tl.int32) // block * block
    low = start + tl.load(lows + row).to(tl.int32)
    begin = number * part
    end = tl.minimum(begin + part, tl.max(cached, 0))
    if (begin < end) & (tl.min(low, 0) < end):
        d = tl.arange(0, size)
        q = tl.load(
            queries + head[:, None] * query_head + row[:, None] * query_row + d[None, :],
            mask=used[:, None],
            other=0.0,
        )
        peak, mass, total = nothing(wide, size)
        for at in range(begin, end, block):
            n = at + tl.arange(0, block)
            n_wide = n.to(tl.int64)
            k = tl.load(keys + shared * key_head + n_wide[None, :] * key_row + d[:, None])
            v = tl.load(values + shared * value_head + n_wide[:, None] * value_row + d[None, :])
            sees = (n[None, :] >= low[:, None]) & (n[None, :] < cached[:, None])
            peak, mass, total = absorb(peak, mass, total, q, k, v, sees, scale, precision)
        own = number - start // part
        known = used & (own >= 0) & (own < parts)
        to = (head * rows + row) * parts + own
        tl.store(peaks + to, peak, mask=known)
        tl.store(masses + to, tl.max(mass, 1), mask=known)
        tl.store(sums + to[:, None].to(tl.int64) * size + d[None, :], total, mask=known[:, None])


@jit
def attend_rest(
    queries, keys, values, starts, lengths, lows, places, paths, counts, sums, peaks, masses, out,
    scale, rows, heads, group,
    query_head, query_row, key_head, key_row, value_head, value_row,
    precision: constexpr, wide: constexpr, block: constexpr, part: constexpr, size: constexpr,
    parts: constexpr,
) -> None:  # fmt: skip
    """All parts, and the blocks that are not completely cached, for one row and `group` heads."""
    shared = tl.program_id(0)
    row = tl.program_id(1)
    member = tl.arange(0, wide)
    used = member < group
    head = shared * group + member
    start = tl.load(starts + row).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    low = tl.load(lows + row).to(tl.int32)
    end = length + tl.load(counts + row).to(tl.int32)
    cached = length // block * block
    full = length // part
    first = (head * rows + row) * parts
    d = tl.arange(0, size)
    q = tl.load(
        queries + head[:, None] * query_head + row * query_row + d[None, :],
        mask=used[:, None],
        other=0.0,
    )
    peak, mass, total = nothing(wide, size)
    for begin in range(low // part, full, TOGETHER):
        # Unrolled, so that some parts are read while others are added up.
        for more in tl.static_range(TOGETHER):
            number = begin + more
            own_peak, own_mass, own_total = part_sums(
                sums, peaks, masses, first + number, used & (number < full), wide, size
            )
            peak, mass, total = fold(peak, mass, total, own_peak, own_mass, own_total, scale)
    for begin in range(tl.maximum(full, low // part) * part, end, part):
        known = tl.maximum(begin, low) < cached
        own_peak, own_mass, own_total = part_sums(
            sums, peaks, masses, first + begin // part, used & known, wide, size
        )
        for at in range(tl.maximum(begin, cached), tl.minimum(begin + part, end), block):
            position = at + tl.arange(0, block)
            seen = (position >= low) & (position < end)
            drafted = seen & (position >= length)
            other = tl.load(paths + row * rows + position - length, mask=drafted, other=0)
            place = tl.load(places + other, mask=drafted, other=0).to(tl.int32)
            n = (start + tl.where(drafted, length + place, position)).to(tl.int64)
            k, v = text_at(
                keys, values, shared, n, seen, key_head, key_row, value_head, value_row, size
            )
            own_peak, own_mass, own_total = absorb(
                own_peak, own_mass, own_total, q, k, v, seen[None, :], scale, precision
            )
        peak, mass, total = fold(peak, mass, total, own_peak, own_mass, own_total, scale)
    found = total / tl.max(mass, 1)[:, None]
    to = out + (row * heads + head)[:, None] * size + d[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=used[:, None])


@jit
def attend_prompt(
    queries, keys, values, starts, lengths, lows, places, out, scale, rows, heads, group,
    query_head, query_row, key_head, key_row, value_head, value_row,
    precision: constexpr, wide: constexpr, block: constexpr, part: constexpr, size: constexpr,
) -> None:  # fmt: skip
    """The whole text, for `wide` pairs of a query head and a row of a prompt."""
    shared = tl.program_id(0)
    pair = tl.program_id(1) * wide + tl.arange(0, wide)
    used = pair < group * rows
    row = pair // group
    row = tl.where(used, row, 0)
    head = shared * group + pair % group
    start = tl.load(starts + row).to(tl.int32)
    last = start + (tl.load(lengths + row) + tl.load(places + row)).to(tl.int32)
    low = tl.load(lows + row).to(tl.int32)
    first = tl.min(start + low // part * part, 0)
    end = tl.max(last, 0) + 1
    d = tl.arange(0, size)
    q = tl.load(
        queries + head[:, None] * query_head + row[:, None] * query_row + d[None, :],
        mask=used[:, None],
        other=0.0,
    )
    peak, mass, total = nothing(wide, size)
    for begin in range(first, end, part):
        own_peak, own_mass, own_total = nothing(wide, size)
        for at in range(begin, tl.minimum(begin + part, end), block):
            n = at + tl.arange(0, block)
            n_wide = n.to(tl.int64)
            inside = n < end
            k, v = text_at(
                keys, values, shared, n_wide, inside,
                key_head, key_row, value_head, value_row, size,
            )  # fmt: skip
            sees = (n[None, :] >= (start + low)[:, None]) & (n[None, :] <= last[:, None])
            own_peak, own_mass, own_total = absorb(
                own_peak, own_mass, own_total, q, k, v, sees, scale, precision
            )
        peak, mass, total = fold(peak, mass, total, own_peak, own_mass, own_total, scale)
    found = total / tl.max(mass, 1)[:, None]
    to = out + (row * heads + head)[:, None] * size + d[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=used[:, None])


def part_of(rows: int) -> int:
    """Positions in a part, for a sequence of so many rows."""
    return max(PART, int(triton.next_power_of_2(triton.cdiv(rows, MOST_PARTS))))


def tree_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    places: torch.Tensor,
    lows: torch.Tensor,
    paths: tuple[torch.Tensor, torch.Tensor] | None,
    room: int,
    scale: float,
) -> torch.Tensor:
    """Attention of some rows to the cached tokens and to each other; shape (1, rows, heads, size).

    `queries` have shape (1, heads, rows, size), the pool's `keys` and `values` (1, key heads, rows
    of the pool, size); `size` is a power of two, from 16 on. `starts`, `lengths` and `places` are
    whole numbers of shape (rows,), as in Table; `starts` are multiples of `part_of(room)`, where
    `room` is the number of rows of one sequence. `lows` are the first positions of the text that
    the rows see, none of them after a row's own. `paths` are those of Table; without them the rows
    are a prompt, in which a row sees what is between.
    """
    _, heads, rows, size = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    part = part_of(room)
    scale *= log2(e)  # the weights are powers of two
    strides = (
        queries.stride(1), queries.stride(2), keys.stride(1), keys.stride(2), values.stride(1),
        values.stride(2),
    )  # fmt: skip
    out = torch.empty((1, rows, heads, size), dtype=queries.dtype, device=queries.device)
    shape = {"precision": "ieee", "block": BLOCK, "part": part, "size": size}
    pairs = group * rows
    # What a program holds of the rows and the text must find room in its registers and in the
    # shared memory of any card.
    most = min(64, max(16, HELD // (size * keys.itemsize)))
    wide = 16 if pairs <= 16 else min(most, 32 if pairs <= 32 else 64)
    ahead = 3 if size * keys.itemsize <= 256 else 1
    if paths is None:
        attend_prompt[shared, triton.cdiv(pairs, wide)](
            queries, keys, values, starts, lengths, lows, places, out, scale, rows, heads, group,
            *strides, wide=wide, num_warps=8 if size > 64 else 4, num_stages=min(2, ahead), **shape,
        )  # fmt: skip
        return out
    parts = triton.cdiv(room, part)
    sums = torch.empty((heads, rows, parts, size), dtype=torch.float32, device=queries.device)
    peaks, masses = torch.empty_like(sums[..., 0]), torch.empty_like(sums[..., 0])
    attend_part[shared, triton.cdiv(keys.shape[2], part), triton.cdiv(pairs, wide)](
        queries, keys, values, starts, lengths, lows, sums, peaks, masses, scale, rows, group,
        *strides, wide=wide, parts=parts, num_warps=4, num_stages=ahead, **shape,
    )  # fmt: skip
    attend_rest[shared, rows](
        queries, keys, values, starts, lengths, lows, places, *paths, sums, peaks, masses, out,
        scale, rows, heads, group,
        *strides, wide=max(16, triton.next_power_of_2(group)), parts=parts,
        num_warps=4 if size > 128 else 2, num_stages=min(2, ahead), **shape,
    )  # fmt: skip
    return out


# what surrounds them


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


# the survey of logits (device_scores.py)


@jit
def highest(tops, tokens, size, wide: constexpr):
    """The largest logit of a row, and its first token, from those of its blocks."""
    top = tl.max(tops, 0)
    return top, tl.minimum(tl.min(tl.where(tops == top, tokens, size), 0), size - 1)


@jit
def survey_block(
    logits, numbers, tops, tokens, masses, sums, size, blocks, cut: constexpr, block: constexpr
) -> None:
    """The largest logit of a block, its first token, and the sum of e^(logit - largest); with `cut`
    also that of e^((logit - largest) / temperature)."""
    row, number = tl.program_id(0), tl.program_id(1)
    at = number * block + tl.arange(0, block)
    place = logits + row.to(tl.int64) * size + at
    x = tl.load(place, mask=at < size, other=float("-inf")).to(tl.float32)
    top, token = highest(x, at, size, block)
    less = x - tl.where(top == float("-inf"), 0.0, top)
    to = row * blocks + number
    tl.store(tops + to, top)
    tl.store(tokens + to, token)
    tl.store(masses + to, tl.sum(tl.exp(less), 0))
    if cut:
        tl.store(sums + to, tl.sum(tl.exp(less / tl.load(numbers + row)), 0))


@jit
def noise_of(word):
    """The noise of engine/sampling.py from the word that a token's draw begins with, with an error
    below 3e-5."""
    word = (word ^ (word >> 30)) * MIX_FIRST
    word = (word ^ (word >> 27)) * MIX_SECOND
    draw = ((word ^ (word >> 31)) >> DRAW_SHIFT).to(tl.int32)
    low = draw < DRAWS // 2
    near = (tl.where(low, draw, DRAWS - 1 - draw).to(tl.float32) + 0.5) / DRAWS
    # Near 1, the logarithm has no digits left that tell how near.
    series = near * (1.0 + near * (1 / 2 + near * (1 / 3 + near * (1 / 4 + near / 5))))
    small = near < 1 / 64
    high = tl.where(small, series, -tl.log(1.0 - tl.where(small, 0.5, near)))
    return -tl.log(tl.where(low, -tl.log(near), high))


@jit
def noisiest_of_block(
    logits, states, numbers, tops, tokens, sums, places, seconds, size, blocks,
    block: constexpr, wide: constexpr,
) -> None:  # fmt: skip
    """The largest sum of logit and noise in a block, its token, and the second largest, but for the
    largest logit of the row."""
    row, number = tl.program_id(0), tl.program_id(1)
    known = row * blocks + tl.arange(0, wide)
    inside = tl.arange(0, wide) < blocks
    top, token = highest(
        tl.load(tops + known, mask=inside, other=float("-inf")),
        tl.load(tokens + known, mask=inside, other=size), size, wide,
    )  # fmt: skip
    temperature = tl.load(numbers + row)
    least = top / temperature + tl.load(numbers + tl.num_programs(0) + row)
    least -= 1e-4 + 1e-6 * tl.abs(least)
    at = number * block + tl.arange(0, block)
    place = logits + row.to(tl.int64) * size + at
    warped = tl.load(place, mask=at < size, other=float("-inf")).to(tl.float32) / temperature
    words = tl.load(states + row).to(tl.uint64, bitcast=True) + at.to(tl.uint64) * MIX_STEP
    total = tl.where((warped < least) | (at == token), float("-inf"), warped + noise_of(words))
    best = tl.max(total, 0)
    chosen = tl.min(tl.where(total == best, at, size), 0)
    second = tl.max(tl.where(at == chosen, float("-inf"), total), 0)
    to = row * blocks + number
    tl.store(sums + to, best)
    tl.store(places + to, tl.minimum(chosen, size - 1))
    tl.store(seconds + to, second)


@jit
def survey_row(
    logits, numbers, tops, tokens, masses, sums, places, seconds, out, size, blocks,
    sampled: constexpr, cut: constexpr, near: constexpr, wide: constexpr,
) -> None:  # fmt: skip
    """The survey of a row from those of its blocks; with `cut` the masses, and one token."""
    row = tl.program_id(0)
    number = tl.arange(0, wide)
    known, inside = row * blocks + number, number < blocks
    peaks = tl.load(tops + known, mask=inside, other=float("-inf"))
    top, token = highest(peaks, tl.load(tokens + known, mask=inside, other=size), size, wide)
    mass = tl.sum(tl.load(masses + known, mask=inside, other=0.0) * tl.exp(peaks - top), 0)
    warped_mass = mass
    if cut:
        warped = tl.load(sums + known, mask=inside, other=0.0)
        warped_mass = tl.sum(warped * tl.exp((peaks - top) / tl.load(numbers + row)), 0)
    slot = tl.arange(0, near)
    chosen, rest = tl.full((near,), 0, tl.int32) + token, top
    if sampled:
        total = tl.load(sums + known, mask=inside, other=float("-inf"))
        place = tl.load(places + known, mask=inside, other=0)
        left = inside
        for taken in range(1, near):
            # Also a sum that is excluded comes before what was taken.
            best = tl.argmax(tl.where(left, tl.maximum(total, -3e38), float("-inf")), 0)
            chosen = tl.where(slot == taken, tl.sum(tl.where(number == best, place, 0), 0), chosen)
            left = left & (number != best)
        second = tl.load(seconds + known, mask=inside, other=float("-inf"))
        rest = tl.max(tl.maximum(second, tl.where(left, total, float("-inf"))), 0)
        chosen = tl.sort(chosen)
    to = out + row * (4 + 2 * near)
    tl.store(to, top)
    tl.store(to + 1, mass)
    tl.store(to + 2, warped_mass)
    tl.store(to + 3, rest)
    found = tl.load(logits + row.to(tl.int64) * size + chosen).to(tl.float32)
    tl.store(to + 4 + slot, found)
    tl.store(to + 4 + near + slot, chosen.to(tl.float32, bitcast=True))


def survey(
    logits: torch.Tensor, kind: Kind, numbers: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """The survey of rows of logits, as that of device_scores.py, which computes it in a few dozen
    operations. Of the kind "sampled", no more than one token of a block is transferred here, and
    some are transferred twice if there are few blocks."""
    near = device_scores.NEAR if kind == "sampled" else 1
    rows, size = logits.shape
    logits, numbers = logits.contiguous(), numbers.contiguous()
    blocks = triton.cdiv(size, SURVEY_BLOCK)
    wide = triton.next_power_of_2(blocks)
    tops, masses, sums, seconds = logits.new_empty((4, rows, blocks), dtype=torch.float32)
    tokens, places = logits.new_empty((2, rows, blocks), dtype=torch.int32)
    out = logits.new_empty((rows, 4 + 2 * near), dtype=torch.float32)
    sampled, cut = kind == "sampled", kind == "cut"
    survey_block[rows, blocks](
        logits, numbers, tops, tokens, masses, sums, size, blocks, cut=cut, block=SURVEY_BLOCK
    )
    if sampled:
        noisiest_of_block[rows, blocks](
            logits, states, numbers, tops, tokens, sums, places, seconds, size, blocks,
            block=SURVEY_BLOCK, wide=wide,
        )  # fmt: skip
    survey_row[(rows,)](
        logits, numbers, tops, tokens, masses, sums, places, seconds, out, size, blocks,
        sampled=sampled, cut=cut, near=near, wide=wide,
    )  # fmt: skip
    return torch.cat([out[:, :3], *device_scores.largest(logits)], dim=1) if cut else out
