"""A conversation that was read from a file, and checks of the values in one."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from engine.errors import StorageError
from storage.validation import quoted

MAX_TITLE = 200
LATEST = 2**33
"""Seconds since 1970, in the year 2242."""
T = TypeVar("T")


class ExportedMessage(NamedTuple):
    """A message; a piece is [text, source, match_length, step, position, probability].

    It follows the earlier message with the number `parent`; None for a first message. Of the
    messages with the same parent, the one with the largest `chosen` is shown.
    """

    role: str
    content: str
    created: float
    pieces: Sequence[Sequence[Any]] | None
    parent: int | None = None
    chosen: int = 0


class Export(NamedTuple):
    """A conversation; times are in seconds since 1970, or now if the file has none."""

    title: str
    system_prompt: str
    settings: dict[str, Any]
    created: float
    messages: list[ExportedMessage]
    pinned: bool = False
    folder: str = ""
    left_out: Mapping[str, int] = {}
    """What was left out of the file, as texts for the user, and how often."""

    @property
    def chars(self) -> int:
        pieces = (piece for message in self.messages for piece in message.pieces or ())
        texts = (len(message.content) for message in self.messages)
        return len(self.system_prompt) + sum(texts) + sum(len(p[0]) + len(p[1]) for p in pieces)

    @property
    def pieces(self) -> int:
        return sum(len(message.pieces or ()) for message in self.messages)


def refusal(problem: str) -> StorageError:
    return StorageError(
        f"The conversation cannot be imported: {problem}. Export it again, or repair the file."
    )


def inside(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def typed(value: object, kind: type[T], name: str) -> T:
    """The value, if it is of exactly this type: a JSON true is not an integer."""
    if type(value) is not kind:
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise refusal(f"{name} is {found}, not of type {kind.__name__}")
    return value


def moment(value: object, name: str) -> float:
    """A time in seconds since 1970, now if there is none."""
    if value is None:
        return time.time()
    # The comparison is false for NaN, and for integers that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        raise refusal(f"{name} is {quoted(value)}, not a time in seconds since 1970")
    return float(value)
