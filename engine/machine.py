"""Where models run: the processor and its number formats.

Measurements from one machine say little about another, so its name is kept with them.
"""

import platform
import subprocess
from contextlib import suppress
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
    return ", ".join(filter(None, (processor(), threads, info.device, info.dtype)))
