"""The interfaces of drafters and tiers, and wrappers that work with any of them.

Drafts can never change an answer, and a faulty drafter cannot end one either (`FailSafeDrafter`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.drafting.budget import Budget
from engine.tree import Tree
from engine.types import Followers, Work


class Learns(Protocol):
    """Learns from answers; nothing unless it overrides these methods."""

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn that the last `new` of `tokens` were decided: first the prompt, then the tokens of
        each step."""
        return

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Learn the complete answer, the last `new` of `tokens`."""
        return


class Drafter(Learns, Protocol):
    """Grows draft trees. It sees decided tokens only and can cost speed, never correctness."""

    name: str

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add drafts of the tokens after `tokens` to the tree, within the budget.

        Returns the work of each of its sources.
        """

    def saved(self, emitted: Sequence[int], seconds: float) -> float:
        """How many plain steps the latest drafts saved, compared with those of the drafters before,
        if the target chose these tokens and the step took so many seconds. 0 if that is unknown."""
        return 0.0


class Tier(Learns, Protocol):
    """A database of n-grams: one level of temporal locality.

    `name` identifies its evidence in the calibration; `source` is the source of its tokens.
    """

    name: str
    source: str

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """The followers of the last 1, 2, 3, ... tokens of `suffix`, as far as they are known."""

    def unigrams(self) -> Followers | None:
        """The tokens that are frequent in any context; None while there are none."""


class NgramTable(Protocol):
    """A store of n-grams, as a tier needs it."""

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """The followers of the tokens of `key`; None if the key is unknown.

        Every suffix of a known key is known.
        """

    def unigrams(self) -> Followers | None:
        """The tokens that are frequent in any context; None if unknown."""

    def forget_look_ups(self) -> None:
        """Forget cached look-ups, so that a measured run does not profit from those of another."""


class Frozen(Tier):
    """A tier that can be queried but does not learn, for measuring without side effects.

    Without it, the second of two runs of one prompt would draft the answer of the first.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier, self.name, self.source = tier, tier.name, tier.source

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return self.tier.matches(suffix)

    def unigrams(self) -> Followers | None:
        return self.tier.unigrams()


class Learner(Drafter):
    """Drafts nothing and lets tiers learn that draft elsewhere or in later answers."""

    name = "databases"

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        return {}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        for tier in self.tiers:
            tier.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        for tier in self.tiers:
            tier.finish(tokens, new)


class FailSafeDrafter(Drafter):
    """A drafter whose faults cost only speed. It may replace the drafts of earlier drafters.

    A drafter that raises an exception is switched off for the rest of the answer, and the user
    gets a notice through `report`.
    """

    def __init__(self, drafter: Drafter, report: Callable[[str], None]) -> None:
        self.drafter, self.report = drafter, report
        self.name = drafter.name

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Let the drafter grow the tree; if it fails, its additions are removed."""
        before = list(tree.tokens)
        try:
            work = self.drafter.grow(tree, tokens, budget)
            drafted = tree.tokens[1:]
            if drafted and not 0 <= min(drafted) <= max(drafted) < budget.vocabulary:
                raise ValueError("it drafted a token that the model does not have")
            return work
        except Exception as error:
            # Whatever a damaged source raises, the target can continue without it.
            kept = tree.tokens[: len(before)] == before
            tree.cut(len(before) - 1 if kept else 0)
            self.switch_off(error)
            return {}

    def saved(self, emitted: Sequence[int], seconds: float) -> float:
        try:
            return self.drafter.saved(emitted, seconds)
        except Exception as error:
            self.switch_off(error)
            return 0.0

    def observe(self, tokens: Sequence[int], new: int) -> None:
        try:
            self.drafter.observe(tokens, new)
        except Exception as error:
            self.switch_off(error)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        try:
            self.drafter.finish(tokens, new)
        except Exception as error:
            self.switch_off(error)

    def switch_off(self, error: Exception) -> None:
        self.drafter = Learner(())
        self.report(
            f"Drafting from the {self.name} failed ({error}) and was switched off for this "
            "answer. The text is not affected."
        )
