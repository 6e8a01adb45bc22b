"""Compiles the kernels of captured forwards for a kind of NVIDIA GPU, on any machine.

    python -m tests.support.cards 8.6           # a few shapes
    python -m tests.support.cards 8.6 --all

Triton brings along what makes machine code, so what a kernel needs of a GPU is known without one.
Each line of the output is JSON: a kernel, what it computes, the bytes of shared memory that a
program takes, the bytes of its registers that did not fit ("spilled"), and the instructions of
the matrix units that it uses. It must not run in Triton's interpreter.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.backends import kernels
from engine.backends.rounded import rounded

KB = 1024


class Card(NamedTuple):
    """Bytes of shared memory for a program and on a multiprocessor, and the number of these in a
    large GPU of the kind (the compute capabilities in NVIDIA's CUDA C++ Programming Guide)."""

    room: int
    together: int
    multiprocessors: int


CARDS = {
    "7.5": Card(64 * KB, 64 * KB, 68),
    "8.0": Card(163 * KB, 164 * KB, 108),
    "8.6": Card(99 * KB, 100 * KB, 84),
    "8.9": Card(99 * KB, 100 * KB, 128),
    "9.0": Card(227 * KB, 228 * KB, 132),
    "10.0": Card(227 * KB, 228 * KB, 148),
    "12.0": Card(99 * KB, 100 * KB, 170),
}
HALVES = torch.bfloat16, torch.float16
TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
UNITS = re.compile(r"\b(?:mma\.sync[\w.]*|wgmma\.mma_async|tcgen05\.mma\b)")


class Driver:
    """What Triton asks of a driver before it starts a kernel."""

    def __init__(self, capability: str) -> None:
        self.target = GPUTarget("cuda", int(capability.replace(".", "")), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def spilled(code: bytes) -> int:
    """The bytes of registers in machine code that lie in memory."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        output = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r" STACK:(\d+)", output)
    assert found, output
    return int(found[1])


def attention(kind: torch.dtype, size: int, group: int, rows: int, prompt: bool) -> None:
    shared, room, count = 2, 4096, torch.zeros(rows, dtype=torch.long)
    queries = torch.empty(1, shared * group, rows, size, dtype=kind)
    keys = torch.empty(1, shared, room, size, dtype=kind)
    paths = None if prompt else (torch.zeros(rows, rows, dtype=torch.long), count)
    kernels.tree_attention(queries, keys, keys, count, count, count, count, paths, room, size**-0.5)


def multiply(kind: torch.dtype, rows: int, bits: int) -> None:
    weight = torch.zeros(1024, 2048)
    matrix = rounded(weight, bits, "cpu") if bits else weight.to(kind)
    bias = torch.empty(1024, dtype=kind) if rows > 64 else None
    kernels.linear(torch.empty(1, rows, 2048, dtype=kind), matrix, bias)


def surround(kind: torch.dtype) -> None:
    wide = torch.empty(1, 4, 4096, dtype=kind)
    kernels.rms_norm(wide, wide[0, 0], 1e-5)
    kernels.silu_times(wide, wide)
    heads, angles = torch.empty(1, 4, 4, 128, dtype=kind), torch.empty(1, 4, 128, dtype=kind)
    kernels.rotate(heads, heads, angles, angles)


def look(kind: torch.dtype, tokens: int, of: str) -> None:
    logits = torch.empty(4, tokens, dtype=kind)
    kernels.survey(logits, of, torch.ones(2, 4), torch.zeros(4, dtype=torch.long))


def work(whole: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is computed, by name; some of it, or the `whole`."""
    sizes, kinds = ((16, 64, 128, 256), HALVES) if whole else ((128, 256), HALVES[:1])
    trees = (1, 16, 64) if whole else (64,)
    shapes = [(kinds[0], size, group) for size in sizes for group in ((1, 4) if whole else (4,))]
    shapes += [
        (kind, size, 4) for kind in (torch.float16, torch.float32) for size in sizes if whole
    ]
    for kind, size, group in shapes:
        for rows, prompt in (*((rows, False) for rows in trees), (512, True)):
            name = f"{TYPES[kind]}, {group} heads of {size} for a key, {rows} rows"
            yield name, partial(attention, kind, size, group, rows, prompt)
    for kind, rows, bits in product(kinds, (*trees, 512), (0, 4, 8) if whole else (0, 4)):
        name = f"{TYPES[kind]}, {bits or 16} bits, {rows} rows"
        yield name, partial(multiply, kind, rows, bits)
    for kind in (*kinds, torch.float32):
        yield TYPES[kind], partial(surround, kind)
        for tokens, of in product((6144, 151_936) if whole else (6144,), ("sampled", "cut")):
            yield f"{TYPES[kind]}, {tokens} tokens, {of}", partial(look, kind, tokens, of)


def main(capability: str, whole: bool) -> None:
    card, seen = CARDS[capability], set[int]()
    driver.set_active(Driver(capability))
    properties = SimpleNamespace(
        multi_processor_count=card.multiprocessors,
        shared_memory_per_block_optin=card.room,
        shared_memory_per_multiprocessor=card.together,
    )
    torch.cuda.get_device_properties = lambda device: properties
    now = SimpleNamespace()
    run, stages = JITFunction.run, kernels.stages

    def compiled(self: Any, *of: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if "compiled" in options:
            options["compiled"] = True
        made = run(self, *of, grid=grid, warmup=True, **options)
        if id(made) not in seen:
            seen.add(id(made))
            found = {
                "kernel": self.__name__,
                "what": now.what,
                "shared": made.metadata.shared,
                "spilled": spilled(made.asm["cubin"]),
                "units": sorted(set(UNITS.findall(made.asm["ptx"]))),
            }
            print(json.dumps(found), flush=True)
        return made

    JITFunction.run = compiled
    kernels.stages = lambda device, *of: stages(torch.device("cuda"), *of)
    for now.what, compute in work(whole):
        compute()


if __name__ == "__main__":
    main(sys.argv[1], "--all" in sys.argv)
