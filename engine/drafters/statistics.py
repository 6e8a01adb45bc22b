"""The statistics tier: n-grams of large texts, the lowest temporal locality.

The table answers a key of up to three tokens with a small tree of what followed it in the texts;
longer keys are asked first and shorter ones get the probability they leave. Read-only.
"""

from collections.abc import Sequence

from engine.drafters.base import NgramTable
from engine.drafters.votes import Votes
from engine.types import STATISTICS, Candidate

KEYS = (3, 2, 1)
DOUBT = (100.0, 60.0, 30.0)
"""A key of 1, 2, 3 tokens seen n times gets n / (n + DOUBT) of the remaining probability."""


class StatisticsDrafter:
    """Drafts from a table of text statistics for the model's tokenizer."""

    name = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """Continuations of the longest known key, then of shorter ones with what is left."""
        votes, left = Votes(threshold), 1.0
        for size in KEYS:
            found = self.table.look_up(tokens[-size:]) if size <= len(tokens) else None
            if found is None:
                continue
            trust = found.total / (found.total + DOUBT[size - 1])
            said = left * trust
            for path, share in found.paths:
                if said * share < votes.least:
                    break  # paths come likeliest first
                votes.add(path, said * share, size)
            left -= said
            if left < threshold:
                break
        return votes.ranked(room)
