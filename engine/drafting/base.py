"""The seams of drafting: what the decode loop asks of a drafter, and a drafter of its databases."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.drafting.budget import Budget
from engine.tree import Tree
from engine.types import Followers, Work


class Drafter(Protocol):
    """Grows draft trees. It sees decided tokens only and can cost speed, never correctness."""

    name: str

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add drafts of what follows `tokens` to the tree, within the budget.

        Returns what each of its sources did for it.
        """

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The last `new` of `tokens` were decided: the prompt at first, then each step's tokens."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The answer is over: its tokens are the last `new` of `tokens`."""


class Tier(Protocol):
    """A database of n-grams: one level of temporal locality.

    `name` identifies its evidence to the calibration; `source` is what its tokens are credited to.
    """

    name: str
    source: str

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """What followed the last 1, 2, 3, ... tokens of `suffix`, as far as they are known."""

    def unigrams(self) -> Followers | None:
        """What is often said, whatever came before; None while nothing is known."""

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """As for a drafter."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """As for a drafter."""


class NgramTable(Protocol):
    """What a tier needs of a store of n-grams."""

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """What followed the tokens of `key`; None when the key is unknown.

        Every suffix of a known key is known.
        """

    def unigrams(self) -> Followers | None:
        """What is often said, whatever came before; None where that is not known."""

    def forget_look_ups(self) -> None:
        """Make the next look-ups as slow as the first ones: a run that is measured must not find
        what another one has paid for."""


class Frozen:
    """A tier that answers but does not keep what it sees: for measuring without a trace.

    Without it, the second of two runs on one prompt would draft the first one's answer.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier, self.name, self.source = tier, tier.name, tier.source
        self.matches, self.unigrams = tier.matches, tier.unigrams

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


class Learner:
    """A drafter that drafts nothing and lets tiers learn: they draft elsewhere, or next time."""

    name = "databases"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Nothing is added."""
        return {}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Pass it on."""
        for tier in self.tiers:
            tier.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Pass it on."""
        for tier in self.tiers:
            tier.finish(tokens, new)
