"""The statistics tier: n-grams of large texts, the lowest temporal locality. Read-only."""

from collections.abc import Sequence

from engine.drafting.base import NgramTable
from engine.types import STATISTICS, Followers

KEY = 3
REMEMBERED = 1 << 14
"""Answers kept: a step asks for the same keys when it drafts and when it learns."""


class StatisticsTier:
    """What followed one to three tokens in large texts, from a table for the model's tokenizer."""

    name = source = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table
        self.known: dict[tuple[int, ...], Sequence[Followers]] = {}

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """What followed the end of `suffix` in the texts."""
        key = suffix[-KEY:]
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.look_up(key)
            if len(self.known) > REMEMBERED:
                self.known.clear()
        return found

    def unigrams(self) -> Followers | None:
        """What is often said in the texts."""
        return self.table.unigrams()

    def look_up(self, key: tuple[int, ...]) -> Sequence[Followers]:
        """The followers of the last 1, 2, ... tokens of `key`."""
        found = []
        for size in range(1, len(key) + 1):
            followers = self.table.look_up(key[-size:])
            if followers is None:
                break
            found.append(followers)
        return found

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""
