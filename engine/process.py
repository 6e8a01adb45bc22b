"""Runs a module of this program in a separate Python process.

This is for native libraries that may crash, which no error handling survives, and for code that may
never end, because a thread cannot be stopped. If the process ends, the application keeps running.

A process can also return freed memory to the system, which GNU's allocator keeps by default.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

RAISED = 1
"""The exit status of Python after an exception; it differs from those after a crash in a
library."""
FAULTS = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"}
ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, which does not import files from the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> Mapping[str, str]:
    places = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": places, "GGML_NO_BACKTRACE": "1"}


def run(module: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(module, *arguments),
        env=environment(),
        capture_output=True,
        timeout=seconds,
        check=False,
    )


def ending(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


def death(status: int, who: str = "The process that runs the model") -> str:
    """The message for a process that ended by itself, with what the user can do."""
    name = ending(status)
    if name == "SIGKILL":
        why = " Systems do this when memory runs out: a smaller model or context needs less of it."
    elif name in FAULTS:
        why = " A native library failed: another model, or safer settings, may avoid it."
    else:
        why = ""
    return f"{who} ended ({name}).{why} Please try again."


LARGE = 1 << 20
"""The smallest block of memory, in bytes, that is worth the call that returns it to the system."""
MMAP_THRESHOLD = -3
"""The parameter of mallopt for the size from which on a block is mapped separately."""


@cache
def library() -> ctypes.CDLL | None:
    """The C library, if it is GNU's."""
    found = ctypes.CDLL(None) if sys.platform == "linux" else None
    return found if hasattr(found, "malloc_trim") and hasattr(found, "mallopt") else None


def give_back_large_blocks() -> None:
    """Return each large block to the system as soon as it is freed.

    Without this, the allocator keeps all large blocks after the first one was freed. Not for a
    process that computes, which allocates and frees large blocks in every forward.
    """
    found = library()
    if found is not None:
        found.mallopt(MMAP_THRESHOLD, LARGE)


def give_back_freed() -> None:
    """Return all freed memory to the system, once. This takes some milliseconds."""
    found = library()
    if found is not None:
        found.malloc_trim(0)
