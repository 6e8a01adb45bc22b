"""Access to the compiled core, if it is installed: drafting and sampling at native speed.

`make native` builds `native/`. Every caller also has a pure Python implementation with the same
results, as a reference and as a fallback. `STRATA_NATIVE=0` makes everything run in Python.
"""

import os
from importlib import import_module
from typing import Any

INTERFACE = 12
"""The version of the interface to the core. A core that was built for another one is not used."""


def find() -> tuple[Any, str]:
    """The core and "", or None and the reason."""
    if os.environ.get("STRATA_NATIVE") == "0":
        return None, "STRATA_NATIVE is 0"
    try:
        found = import_module("strata_native")
    except ImportError as error:
        return None, f"{error}. Run `make native`"
    if found.INTERFACE != INTERFACE:
        return None, "it was built for another version. Run `make native`"
    return found, ""


core, missing = find()
"""The core, None without one, and the reason why there is none."""


def multiplies_few_bits() -> bool:
    """Whether the core multiplies weights of few bits with instructions of this processor, instead
    of plain C++, which is slow."""
    return hasattr(core, "Matrix") and core.levels()[-1] != "plain"


def verifies_cheaply() -> bool:
    """Whether the core computes a few rows in little more than the time of one: with VNNI
    instructions, but not with AVX2 alone. On ARM this was never measured."""
    return multiplies_few_bits() and core.levels()[-1] in ("avxvnni", "avx512", "amx")


def has_tiles() -> bool:
    """Whether the core multiplies many rows by the tiles of Intel's AMX."""
    return multiplies_few_bits() and core.levels()[-1] == "amx"
