"""What a machine is called, so that figures of the same machine can be told from others."""

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


def machine(info: BackendInfo) -> str:
    """Where a model runs: the processor, its threads, the device, and the format of numbers."""
    threads = f"{info.threads} thread{'s' * (info.threads > 1)}" if info.threads else ""
    return ", ".join(filter(None, (processor(), threads, info.device, info.dtype)))
