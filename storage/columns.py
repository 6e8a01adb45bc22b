"""What lies in a column: texts and JSON that any page can be sent, read whatever became of them.

SQLite takes any type in any column, and a file may have been edited or have come from a disk that
fails. So nothing that is read here raises.
"""

import json
import re
from typing import Any


def clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 and so SQLite cannot hold."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def to_json(value: object) -> str:
    """A JSON text, clean like all texts that are stored."""
    return clean(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def from_json(text: object) -> Any:
    """The value of a stored JSON text; None where it is damaged."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
        # JSON can write half a surrogate pair, which cannot be sent to a page.
        return json.loads(to_json(found)) if "\\ud" in text.lower() else found
    except (RecursionError, ValueError):
        return None


def as_text(value: object) -> str:
    """A text column's value, of whatever type it was found to be."""
    return value if isinstance(value, str) else repr(value)


def as_seconds(value: object) -> float:
    """A time column's value; 0 where it is none."""
    return float(value) if isinstance(value, int | float) else 0.0
