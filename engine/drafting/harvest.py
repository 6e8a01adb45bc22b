"""Successor harvest: what else the target thought of, remembered from its logits.

Verification computes the target's whole distribution wherever it chooses a token; the likeliest
few are kept per last one and two tokens, and drafted when these come by again. The idea is Token
Recycling's (arXiv 2408.08696). No position is computed for it. It belongs to the context tier: it
lives as long as the conversation is open, and what it drafts is credited to the context.
"""

from collections.abc import Sequence

from engine.drafting.base import Likely
from engine.types import CONTEXT, HARVEST, Followers

KEY = 2
OCCURRENCES = 10.0
LARGEST = 1 << 16
"""Entries that are kept at most: then it begins anew, as what is near counts most."""
ENTRY = 300
"""Bytes of an entry, as measured: two share their followers."""


class HarvestTier:
    """The target's likeliest successors of the last tokens, as it saw them last."""

    name, source = HARVEST, CONTEXT

    def __init__(self) -> None:
        self.table: dict[tuple[int, ...], Followers] = {}

    @property
    def bytes(self) -> int:
        """About what the tier takes in memory."""
        return len(self.table) * ENTRY

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """The successors of the last token, then of the last two."""
        found = []
        for size in range(1, min(KEY, len(suffix)) + 1):
            followers = self.table.get(suffix[-size:])
            if followers is None:
                break
            found.append(followers)
        return found

    def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
        """Keep the successors at the last of the new tokens, in place of what was known.

        That is where the drafts ended, so where the target thought of something else.
        """
        if likely is None:
            return
        if len(self.table) >= LARGEST:
            self.table.clear()
        successors = likely(new - 1)
        # Occurrences that would have given these probabilities, so that a sure successor counts as
        # strong evidence and a vague one as weak.
        counts = {token: OCCURRENCES * share for token, share in successors}
        distinct = OCCURRENCES * (1.0 - successors[0][1]) + 0.5
        followers = Followers(OCCURRENCES, distinct, counts)
        for size in range(1, KEY + 1):
            self.table[tuple(tokens[-1 - size : -1])] = followers

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Logits are not stored."""
