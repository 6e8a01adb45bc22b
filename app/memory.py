"""One limit for all that drafting keeps in memory, of all owners and conversations together.

Open conversations hold their context tiers, owners their pasts. Both are stored, so whatever was
used longest ago can be dropped, and is read again when it is needed. That happens on the model's
thread alone, before and after an answer: nothing that a run uses goes.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from app.loaded import Loaded
from app.rooms import Rooms

LIMIT = 512 << 20
"""Bytes for open conversations, pasts and remembered look-ups in the statistics together. What the
answer under way uses stays even where that alone is more: a log at its cap (storage/contexts.py)
takes up to 140 MB. Beside it, what is shared by all is bounded where it is kept: noise by 32 MB
(engine/sampling.py), followers of keys seen once by 32 MB (engine/types.py)."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Memory:
    """Keeps what drafting knows within `limit` bytes."""

    limit: int = LIMIT

    def taken(self, loaded: Loaded, rooms: Rooms) -> int:
        """About the bytes that are taken now."""
        table = loaded.statistics
        return rooms.bytes + loaded.pasts.bytes + (table.cached_bytes if table else 0)

    def fit(self, loaded: Loaded, rooms: Rooms, owner: str) -> None:
        """Drop what was used longest ago until the rest fits.

        The owner's past stays, and the conversation entered last. A past that goes takes all rooms
        along that draft from it.
        """
        entered = sorted(rooms.ages())
        ages = [*entered[:-1], *((used, who, None) for used, who in loaded.pasts.ages())]
        for _, who, what in sorted(ages, key=lambda age: age[0]):
            if self.taken(loaded, rooms) <= self.limit:
                return
            if what is not None:
                rooms.close(who, what)
            elif who != owner:
                rooms.close(who)
                loaded.pasts.drop(who)


class Latest(OrderedDict[K, V]):
    """A mapping that keeps the entries which were set last: browsers come and go unannounced."""

    LIMIT = 1_000

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.LIMIT:
            self.popitem(last=False)
