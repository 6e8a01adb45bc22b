"""Where the files lie that come along: the demonstration model, its statistics, styles, scripts."""

from functools import cache
from pathlib import Path

ASSETS = Path(__file__).resolve().parent


@cache
def read(*names: str) -> str:
    """The text of these files, one after the other."""
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)
