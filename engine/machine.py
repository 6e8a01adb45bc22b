"""Where models run: the processor and its number formats, and who else uses the machine.

Measurements from one machine say little about another, so its name is kept with them.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from engine.backends.base import BackendInfo

THREADS = "OMP_NUM_THREADS"
"""The environment variable with the number of computing threads, which torch reads as well."""

CPUINFO = Path("/proc/cpuinfo")
SYSTEM = Path("/sys")
CORE = ("core_cpus_list", "thread_siblings_list")
"""The file that names the logical cores of a physical one, and its name in older kernels."""
QUOTA = "fs/cgroup/cpu.max"
"""The processor time of a container in some period, and that period; the time may be "max"."""
ASK_MAC = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
NAMED = ("model name", "Model", "Hardware", "cpu model")
"""The keys under which CPUINFO has the name of a processor."""
PEOPLE = range(500 if sys.platform == "darwin" else 1000, 60_000)
"""The numbers of accounts that belong to people."""
NATIVE = {"amx_bf16", "avx512_bf16"}
"""Instructions that multiply bfloat16 numbers, by the names that Linux has for them. With both a
forward over a draft takes less time in bfloat16 than in float32 (docs/benchmarks.md)."""


def cpu_info() -> Iterator[tuple[str, list[str]]]:
    """What Linux says about each logical core: names, with the words of their values."""
    with suppress(OSError):
        for line in CPUINFO.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            yield name.strip(), value.split()


@cache
def other_people() -> Sequence[str]:
    """The accounts of this machine by which other people can log in, as far as it lists them;
    Windows lists none."""
    try:
        import pwd
    except ImportError:
        return ()
    return [
        account.pw_name
        for account in pwd.getpwall()
        if account.pw_uid in PEOPLE
        and account.pw_uid != os.getuid()
        and not account.pw_shell.endswith(("/nologin", "/false"))
    ]


@cache
def processor() -> str:
    """The maker's name of the processor; the kind of machine if there is none."""
    for name, words in cpu_info():
        if name in NAMED and words:
            return " ".join(words)
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
    flags = next((words for name, words in cpu_info() if name == "flags"), [])
    return not NATIVE.isdisjoint(flags)


def physical_cores() -> int:
    """The physical cores that this process may use, and has the time for.

    The two logical cores of one physical core share what computes, so a second thread there gains
    nothing.
    """
    usable, cores = os.cpu_count() or 1, None
    if hasattr(os, "sched_getaffinity"):
        mine = os.sched_getaffinity(0)
        usable, cores = len(mine), listed_cores(mine)
    cores = cores or min(psutil.cpu_count(logical=False) or usable, usable)
    return max(1, min(cores, quota() or cores))


def listed_cores(logical: Iterable[int]) -> int | None:
    """The number of physical cores with these logical ones; None where the system does not list
    them."""
    found = set()
    with suppress(OSError):
        for number in logical:
            folder = SYSTEM / f"devices/system/cpu/cpu{number}/topology"
            name = next((name for name in CORE if (folder / name).exists()), CORE[0])
            found.add((folder / name).read_text("utf-8").strip())
        return len(found)
    return None


def quota() -> int | None:
    """The cores for which a container has time, rounded up; None without a limit."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        time, period = (SYSTEM / QUOTA).read_text("utf-8").split()
        return max(1, -(-int(time) // int(period)))
    return None


def usual_threads() -> int:
    """The computing threads where a setting names none: OMP_NUM_THREADS, or else one for each
    physical core."""
    with suppress(ValueError):
        if (named := int(os.environ.get(THREADS, "").partition(",")[0])) > 0:
            return named
    return physical_cores()


def machine(info: "BackendInfo") -> str:
    threads = f"{info.threads} thread{'s' * (info.threads > 1)}" if info.threads else ""
    return ", ".join(filter(None, (processor(), threads, info.device, info.dtype)))
