"""The program with events that wait: `python -m tests.support.held FOLDER NAME... -- ARGUMENTS`.

NAME is a handler of a tab, `module.Class.method` below app/web/tabs. It ends once FOLDER has no
file of that name (`late` in tests/support/pages.py makes and removes it), so that its answer comes
as late as a test wants it to.
"""

import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from app.cli import main

LOOK_SECONDS = 0.02


def held(method: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """A method whose answer waits while the file is there. Another file says how often it began."""
    begun = file.with_name(f"{file.name}.begun")

    @wraps(method)
    def waiting(*values: object) -> Any:
        with begun.open("a") as told:
            told.write(".")
        found = method(*values)
        while file.exists():
            time.sleep(LOOK_SECONDS)
        return found

    return waiting


def hold(folder: Path, name: str) -> None:
    """Hold a handler."""
    module, owner, method = name.split(".")
    found = getattr(import_module(f"app.web.tabs.{module}"), owner)
    setattr(found, method, held(getattr(found, method), folder / name))


if __name__ == "__main__":
    end = sys.argv.index("--")
    for each in sys.argv[2:end]:
        hold(Path(sys.argv[1]), each)
    sys.exit(main(sys.argv[end + 1 :]))
