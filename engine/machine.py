"""What a machine is called, and what it does natively: figures of one say little of another."""

import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from engine.backends.base import BackendInfo

CPUINFO = Path("/proc/cpuinfo")
ASK_MAC = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
NAMED = ("model name", "Model", "Hardware", "cpu model")
"""What kinds of processors call their name there."""
NATIVE = {"amx_bf16", "avx512_bf16"}
"""Instructions that multiply bfloat16 numbers, by the names that Linux has for them. With both a
forward over a draft takes less time in bfloat16 than in float32 (docs/benchmarks.md)."""


@cache
def processor() -> str:
    """The name of the processor, as its maker gave it; the kind of machine where it has none."""
    with suppress(OSError):
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in NAMED and value.strip():
                return " ".join(value.split())
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(ASK_MAC, capture_output=True, text=True, timeout=5).stdout
            if said.strip():
                return said.strip()
    return platform.processor() or platform.machine()


def computes_bfloat16() -> bool:
    """Whether the processor computes with bfloat16 numbers itself, and so faster than with float32.

    Others convert each number. What is not known counts as one of them.
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
