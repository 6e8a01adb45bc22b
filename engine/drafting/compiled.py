"""Hierarchy drafting at native speed: the trees and the learning of the reference, digit for digit.

engine/drafting/hierarchy.py is where the algorithm is to be read; native/src/hierarchy.cpp is the
same once more. What a tier keeps in native memory is read there, without the interpreter's lock.
Any other tier is asked in Python. `hierarchy` makes the one or the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine import native
from engine.drafting import noise
from engine.drafting.base import Frozen, Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import (
    LONGEST,
    MEMORY,
    PRIOR_OBSERVATIONS,
    UNSEEN,
    Calibration,
)
from engine.drafting.context import ContextTier
from engine.drafting.hierarchy import LUCKIEST, NEGLIGIBLE, SLIGHT, Hierarchy
from engine.drafting.model import Forgetful, ModelTier, Unlearned
from engine.drafting.ngrams import CompiledCounts
from engine.drafting.statistics import KEY, REMEMBERED, StatisticsTier
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import Work

Draft = tuple[Hierarchy, Tree, Sequence[int], Budget]
"""What one sequence asks for: see Drafter.grow."""


def hierarchy(
    tiers: Sequence[Tier], calibration: Calibration, sampling: Sampling | None = None
) -> Hierarchy:
    """Drafts from tiers in their order: compiled where the core is there."""
    made = Hierarchy if native.core is None else CompiledHierarchy
    return made(tiers, calibration, sampling)


def grow_all(drafts: Sequence[Draft]) -> list[Mapping[str, Work]]:
    """Grow the trees of many sequences in one call, each as its drafter's `grow` would."""
    if not all(isinstance(each, CompiledHierarchy) for each, *_ in drafts):
        return [each.grow(tree, tokens, budget) for each, tree, tokens, budget in drafts]
    compiled = [cast(CompiledHierarchy, each) for each, *_ in drafts]
    for each, (_, tree, tokens, budget) in zip(compiled, drafts, strict=True):
        each.tree, each.grown = tree, None if budget.near else len(tokens)
    asked = [(each.compiled, *rest) for each, (_, *rest) in zip(compiled, drafts, strict=True)]
    works: list[Mapping[str, Work]] = native.core.grow_all(asked)
    return works


class CompiledHierarchy(Hierarchy):
    """The compiled twin of a hierarchy."""

    def __init__(
        self, tiers: Sequence[Tier], calibration: Calibration, sampling: Sampling | None = None
    ) -> None:
        super().__init__(tiers, calibration, sampling)
        specified = [
            (source_of(tier), tier.name, self.sources[tier.name], tier.source) for tier in tiers
        ]
        self.compiled: Any = native.core.Hierarchy(
            specified,
            compiled_calibration(calibration),
            negligible=NEGLIGIBLE,
            slight=SLIGHT,
            luckiest=LUCKIEST,
            temperature=self.sampling.temperature if self.sampling else 0.0,
            seed=self.sampling.seed if self.sampling else 0,
            work=Work,
        )

    def grow_tree(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """As the reference does."""
        self.tree, self.grown = tree, None if budget.near else len(tokens)
        work: Mapping[str, Work] = self.compiled.grow(tree, tokens, budget)
        return work

    def chances(self) -> list[float]:
        """As the reference does."""
        chances: list[float] = self.compiled.chances()
        return chances

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """As the reference does."""
        if self.grown == len(tokens) - new:
            self.compiled.learn(self.tree, tokens, new)
        self.grown = None
        self.forget()
        for tier in self.tiers:
            tier.observe(tokens, new)

    def forget(self) -> None:
        """As the reference does."""
        self.compiled.forget()


def compiled_calibration(calibration: Calibration) -> Any:
    """The compiled core's view of what is learned, made once."""
    if calibration.compiled is None:
        lengths = range(LONGEST + 1)
        calibration.compiled = native.core.Calibration(
            {tier: [calibration.of(tier, n) for n in lengths] for tier in calibration.weights},
            calibration.errors,
            prior_observations=PRIOR_OBSERVATIONS,
            memory=MEMORY,
            unseen=UNSEEN,
            least=noise.LEAST,
            trust_memory=noise.MEMORY,
            ranges=noise.RANGES,
        )
    return calibration.compiled


def source_of(tier: Tier) -> Any:
    """What the compiled core asks for a tier: native memory where its class is known to keep all
    there, else the tier itself. A class that is derived from a known one may answer otherwise."""
    kind, core = type(tier), native.core
    if isinstance(tier, Frozen) and kind in (Frozen, Forgetful):
        return source_of(tier.tier)
    if isinstance(tier, StatisticsTier) and kind is StatisticsTier:
        in_memory = getattr(tier.table, "in_memory", lambda: None)
        asked = tier.table.look_up, tier.table.unigrams
        return core.Statistics(*asked, in_memory(), KEY, REMEMBERED)
    if isinstance(tier, ContextTier | ModelTier) and isinstance(tier.counts, CompiledCounts):
        if kind in (ContextTier, ModelTier):
            return tier.counts.compiled
        if isinstance(tier, Unlearned) and kind is Unlearned:
            return core.Less(source_of(tier.tier), tier.counts.compiled)
    return core.Asked(tier.matches, tier.unigrams)
