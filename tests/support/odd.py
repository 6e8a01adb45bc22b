"""Values that are not what a model of values from outside declares, at each place of a sound one.

So a field that a model gains is tested with the others, and no list of bad values has to be kept.
"""

from collections.abc import Iterator
from typing import Any

NESTED: list[Any] = []
for _ in range(500):
    NESTED = [NESTED]
ODD: tuple[Any, ...] = (
    True, -1, 1.5, 2**70, 10**400, float("nan"), float("inf"), "", "x", "\ud800", "y" * 100_000,
    [], [1], [None], {}, {"a": 1}, {"a": NESTED}, NESTED,
)  # fmt: skip
"""One of each type, and what is hard to read, to quote or to store."""


def kind(value: object) -> str:
    """The type of a value in JSON."""
    if isinstance(value, bool):
        return "boolean"
    names: tuple[tuple[Any, str], ...] = (((int, float), "number"), (str, "string"), (list, "list"))
    return next((name for types, name in names if isinstance(value, types)), "object")


def spoiled(sound: Any, free: frozenset[str] = frozenset()) -> Iterator[Any]:
    """A sound value again and again, each time with a value of another type at one of its places.
    Under the names that are `free` anything may stand."""
    yield from (odd for odd in ODD if kind(odd) != kind(sound))
    if not isinstance(sound, dict | list):
        return
    for place, value in sound.items() if isinstance(sound, dict) else enumerate(sound):
        for bad in spoiled(value, free) if place not in free else ():
            copy = sound.copy()
            copy[place] = bad
            yield copy
