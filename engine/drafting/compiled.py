"""Hierarchy drafting at native speed, equal to the reference digit for digit.

engine/drafting/hierarchy.py is the version to read; native/src/hierarchy.cpp implements the same
algorithm. Tiers that keep their data in native memory are read there, without the interpreter's
lock; any other tier is called in Python. `hierarchy` chooses between the two implementations.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from engine import native
from engine.drafting import noise
from engine.drafting.base import Frozen, Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import CLASSES, MEMORY, PRIOR_OBSERVATIONS, UNSEEN, Calibration
from engine.drafting.copies import CompiledCopies
from engine.drafting.head import HeadTier
from engine.drafting.hierarchy import FAVOURED, NEGLIGIBLE, SLIGHT, Hierarchy
from engine.drafting.ngrams import CompiledCounts
from engine.drafting.tiers import (
    REMEMBERED,
    STATISTICS_KEY,
    ContextTier,
    LimitedView,
    ModelTier,
    PredictionTier,
    StatisticsTier,
    WithoutAnswer,
)
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import Work

Draft = tuple[Hierarchy, Tree, Sequence[int], Budget]
"""A drafter and the arguments of its `grow`, for one sequence."""


def hierarchy(
    tiers: Sequence[Tier], calibration: Calibration, sampling: Sampling | None = None
) -> Hierarchy:
    """Hierarchy drafting from tiers in their order, compiled if the core is installed."""
    made = Hierarchy if native.core is None else CompiledHierarchy
    return made(tiers, calibration, sampling)


def grow_all(drafts: Sequence[Draft]) -> list[Mapping[str, Work]]:
    """Grow the trees of many sequences in one call, each as its drafter's `grow` would."""
    if not all(isinstance(each, CompiledHierarchy) for each, *_ in drafts):
        return [each.grow(tree, tokens, budget) for each, tree, tokens, budget in drafts]
    compiled = [cast(CompiledHierarchy, each) for each, *_ in drafts]
    for each, (_, tree, tokens, budget) in zip(compiled, drafts, strict=True):
        each.tree, each.grown = tree, None if budget.near else len(tokens)
    requests = [(each.compiled, *rest) for each, (_, *rest) in zip(compiled, drafts, strict=True)]
    works: list[Mapping[str, Work]] = native.core.grow_all(requests)
    return works


class CompiledHierarchy(Hierarchy):
    """A hierarchy that the compiled core computes."""

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
            luckiest=FAVOURED,
            temperature=self.sampling.temperature if self.sampling else 0.0,
            seed=self.sampling.seed if self.sampling else 0,
            work=Work,
        )

    def grow_tree(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        self.tree, self.grown = tree, None if budget.near else len(tokens)
        self.on_path = None
        return cast("Mapping[str, Work]", self.compiled.grow(tree, tokens, budget))

    def of_rows(self) -> list[float]:
        return cast("list[float]", self.compiled.chances())

    def observe(self, tokens: Sequence[int], new: int) -> None:
        if self.grown == len(tokens) - new:
            self.compiled.learn(self.tree, tokens, new)
        self.grown = None
        self.forget()
        for tier in self.tiers:
            tier.observe(tokens, new)

    def forget(self, suffixes: Collection[tuple[int, ...]] | None = None) -> None:
        self.compiled.forget(None if suffixes is None else list(suffixes))


def compiled_calibration(calibration: Calibration) -> Any:
    if calibration.compiled is None:
        lengths = range(CLASSES + 1)
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
    """The object that the compiled core queries for a tier: its native memory if its class keeps
    all of its data there, otherwise the tier itself. Subclasses are queried themselves, because
    they may answer differently."""
    kind, core = type(tier), native.core
    if isinstance(tier, Frozen) and kind in (Frozen, LimitedView):
        return source_of(tier.tier)
    if isinstance(tier, HeadTier) and kind is HeadTier and tier.compiled is not None:
        return tier.compiled
    if isinstance(tier, StatisticsTier) and kind is StatisticsTier:
        table, copy = tier.table, getattr(tier.table, "in_memory", lambda: None)()
        return core.Statistics(table.look_up, table.unigrams, copy, STATISTICS_KEY, REMEMBERED)
    if (
        isinstance(tier, ContextTier | ModelTier)
        and kind in (ContextTier, PredictionTier, ModelTier, WithoutAnswer)
        and isinstance(tier.counts, CompiledCounts)
    ):
        assert isinstance(tier.copies, CompiledCopies)
        return core.Copied(counts_of(tier), tier.copies.compiled, tier.hidden)
    return core.Asked(tier.matches, tier.unigrams)


def counts_of(tier: ContextTier | ModelTier) -> Any:
    assert isinstance(tier.counts, CompiledCounts)
    if not isinstance(tier, WithoutAnswer):
        return tier.counts.compiled
    known = counts_of(tier.tier)
    return native.core.Less(known, tier.counts.compiled) if tier.size else known
