"""Where models run: the processor with its number formats, and the ranks of a split model.

Measurements from one machine say little about another, so its name is kept with them.

A model may be split, so that each rank, a process, holds a part of every layer. Rank 0 is the
engine, with drafting, sampling and everything else; the others only take part in its forwards
(engine/backends/parallel.py). Either the engine starts them on this machine, or torchrun started
this program once per rank, on one or more machines. In the second case rank 0 is the app, and every
other process follows as one rank.
"""

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.backends.base import BackendInfo

CPUINFO = Path("/proc/cpuinfo")
ASK_MAC = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
NAMED = ("model name", "Model", "Hardware", "cpu model")
"""The keys under which CPUINFO has the name of a processor."""
NATIVE = {"amx_bf16", "avx512_bf16"}
"""Instructions that multiply bfloat16 numbers, by the names that Linux has for them. With both a
forward over a draft takes less time in bfloat16 than in float32 (docs/benchmarks.md)."""


@cache
def processor() -> str:
    """The maker's name of the processor; the kind of machine if there is none."""
    with suppress(OSError):
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in NAMED and value.strip():
                return " ".join(value.split())
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(ASK_MAC, capture_output=True, text=True, timeout=5).stdout
            if output.strip():
                return output.strip()
    return platform.processor() or platform.machine()


def computes_bfloat16() -> bool:
    """Whether the processor computes with bfloat16 numbers itself, and so faster than with float32.

    Other processors convert each number. An unknown processor counts as one of these.
    """
    with suppress(OSError):
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return not NATIVE.isdisjoint(value.split())
    return False


def machine(info: BackendInfo) -> str:
    """Where a model runs: the processor, its threads, the device, and the format of numbers."""
    threads = f"{info.threads} thread{'s' * (info.threads > 1)}" if info.threads else ""
    ranks = f"{info.ranks} ranks" if info.ranks > 1 else ""
    return ", ".join(filter(None, (processor(), threads, info.device, ranks, info.dtype)))


AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun if its own process hosts the store of the ranks."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one of `size` ranks. `local_size` of them are on its machine, where it has
    number `local_rank`. The ranks meet at `host` and `port`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int


def launched() -> Place | None:
    """The place that torchrun has given this process; None without torchrun, or with one rank."""
    known = os.environ
    if known.get(AGENT) != "True" or int(known["WORLD_SIZE"]) == 1:
        return None
    return Place(
        int(known["RANK"]),
        int(known["WORLD_SIZE"]),
        int(known["LOCAL_RANK"]),
        int(known["LOCAL_WORLD_SIZE"]),
        known["MASTER_ADDR"],
        int(known["MASTER_PORT"]),
    )


def usual_size() -> int:
    """The default number of ranks of a model."""
    place = launched()
    return place.size if place else 1


def ranks_here(size: int) -> int:
    """The number of a model's ranks that run on this machine."""
    place = launched()
    return place.local_size if place and place.size == size else size
