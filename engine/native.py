"""The compiled core, where it is there: what runs per drafted node and per token, at native speed.

`native/` is built by `make native`. Whoever uses it keeps a pure Python of the same results, to
compare with and to fall back on. `STRATA_NATIVE=0` makes everything run in Python.
"""

import os
from importlib import import_module
from typing import Any

INTERFACE = 4
"""How this program talks to the core; one that was built for another number is left alone."""


def find() -> tuple[Any, str]:
    """The core, or None and why."""
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
"""The core (None where there is none) and why it is not there."""
