"""A module of ours in a Python process of its own: whatever ends that process, the application goes
on.

For native libraries that crash and for what never ends: no error handling survives the one, and no
thread can be stopped in the other.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

RAISED = 1
"""How a process of Python ends over an exception. Where a library ends it, the status differs."""
FAULTS = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"}
ENDING: list[Callable[[str], None]] = []
"""How this process ends with a reason for whoever started it; empty where nobody would hear it."""
ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """The words that start a module; files of the current folder do not matter to it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> Mapping[str, str]:
    """Ours, with the same packages to import from."""
    places = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": places, "GGML_NO_BACKTRACE": "1"}


def run(module: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a module to its end. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        command(module, *arguments),
        env=environment(),
        capture_output=True,
        timeout=seconds,
        check=False,
    )


def ending(status: int) -> str:
    """The name of the signal that ended a process, else its status."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


def death(status: int, who: str = "The process that runs the model") -> str:
    """Why a process that nobody here ended did, and what can be done."""
    name = ending(status)
    if name == "SIGKILL":
        why = " Systems do this when memory runs out: a smaller model or context needs less of it."
    elif name in FAULTS:
        why = " A native library failed: another model, or safer settings, may avoid it."
    else:
        why = ""
    return f"{who} ended ({name}).{why} Please try again."


def end(reason: str) -> None:
    """End this process with a reason, where somebody would hear it; else do nothing."""
    for each in ENDING:
        each(reason)
