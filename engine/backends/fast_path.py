"""Whether llama.cpp's fast path works on this machine: tried once, in a process of its own.

llama.cpp rearranges weights for the processor that it runs on (tiles of Intel's AMX, AVX-512, ...)
and has kernels that read them so. On some machines such a kernel ends the process at the first
prompt, and nothing inside that process can prevent it. So before the first file with certain types
of weights is loaded, a process of its own reads a prompt with a tiny model of the same types
(engine/backends/fast_path_trial.py). Where it crashes, files of these types run without rearranged
weights: slower, but safely.

What was found is remembered as long as the library, the processor and the system stay the same. A
trial takes 0.2 s, so no machine and no type is left out.
"""

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

from engine.backends.base import digest
from engine.process import RAISED, ending, run

SECONDS = 60.0
FAULT = "STRATA_FAULT"
"""The environment variable that makes up faults, for tests: "extra_bufts" has every trial over
quantized weights crash, as the fast path does on some processors with AMX."""
PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
"""What Linux says of a processor that does not change from one moment to the next."""
CPUINFO = Path("/proc/cpuinfo")
FILE = user_cache_path("strata", appauthor=False) / "fast_path.json"


def problem(types: Collection[str]) -> str:
    """What the fast path does wrong over weights of these types, "" where it works."""
    name, here = " ".join(sorted(types)), machine()
    known = remembered(here)
    if name in known:
        return known[name]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ended = run("engine.backends.fast_path_trial", folder, *sorted(types), seconds=SECONDS)
    except (subprocess.TimeoutExpired, OSError):
        return "cannot be tried"
    if ended.returncode == RAISED:
        return "cannot be tried"
    known[name] = f"crashes ({ending(ended.returncode)})" if ended.returncode else ""
    remember(here, known)
    return known[name]


def machine() -> str:
    """Names what a trial depends on: the library's build, the processor and the system."""
    found = find_spec("llama_cpp")
    places = [Path(place) / "lib" for place in (found and found.submodule_search_locations) or ()]
    parts = [platform.machine(), platform.release(), platform.version(), processor()]
    for file in sorted(file for place in places for file in place.glob("*")):
        state = file.stat()
        parts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    return digest([*parts, os.environ.get(FAULT, "")])


def processor() -> str:
    """The kind of processor and what it can do."""
    try:
        lines = CPUINFO.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in PROCESSOR)


def remembered(here: str) -> dict[str, str]:
    """What trials on this machine found, by types; nothing where the file is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        stored = json.loads(FILE.read_text("utf-8"))
        if stored["machine"] == here:
            return {str(types): str(found) for types, found in stored["found"].items()}
    return {}


def forget() -> None:
    """Try again what was found: a process that used these libraries ended."""
    with suppress(OSError):
        FILE.unlink(missing_ok=True)


def remember(here: str, known: dict[str, str]) -> None:
    """Write the file anew, in one step; without a place to write, each load tries again."""
    with suppress(OSError):
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=FILE.parent, suffix=".partial", delete=False
        ) as file:
            json.dump({"machine": here, "found": known}, file)
        os.replace(file.name, FILE)
