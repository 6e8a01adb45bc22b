"""The messages of a conversation as a tree: which follow which, and the path that is shown.

Messages that follow the same one are versions of each other, and the one that was chosen last is
shown. So whoever goes back to a version finds below it what was shown there last.

A message stands behind what it follows in the order in which messages were made. One that does not
is damaged, as is one that follows a message which is not there: it then follows the one made just
before it. So there are no circles, and every message is on a path.
"""

from collections.abc import Iterable
from typing import Any


class Tree:
    """Made of (id, parent, chosen) of each message, in the order in which they were made."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self.parents: dict[str, str | None] = {}
        self.below: dict[str | None, list[str]] = {}
        self.chosen: dict[str, float] = {}
        before: str | None = None
        for id, parent, chosen in rows:
            if parent is not None and parent not in self.parents:
                parent = before
            self.parents[id] = parent
            self.below.setdefault(parent, []).append(id)
            self.chosen[id] = chosen if isinstance(chosen, int | float) else 0
            before = id

    def __contains__(self, id: object) -> bool:
        return id in self.parents

    def path(self) -> list[str]:
        """What is shown, from the first message to the last."""
        found: list[str] = []
        here: str | None = None
        while versions := self.below.get(here):
            # Of equals the last one: so it was before any was chosen.
            here = max(reversed(versions), key=self.chosen.__getitem__)
            found.append(here)
        return found

    def above(self, id: str) -> list[str]:
        """The messages from the first one to this one, itself included."""
        found: list[str] = []
        here: str | None = id
        while here is not None:
            found.append(here)
            here = self.parents[here]
        return found[::-1]

    def under(self, id: str) -> list[str]:
        """A message and all that follow it, in whatever version."""
        found, left = list[str](), [id]
        while left:
            here = left.pop()
            found.append(here)
            left += self.below.get(here, ())
        return found

    def versions(self, id: str) -> tuple[str, ...]:
        """All versions at a message's place, in the order in which they were made."""
        return tuple(self.below[self.parents[id]])
