"""The three databases of hierarchy drafting, and what drafts with them.

One value holds what belongs together: the context of one conversation, a model's past answers to
one owner, the statistics of one tokenizer, and the calibration learned on them.
"""

from collections.abc import Iterable, Sequence

from engine.drafting.base import Drafter, Frozen, Learner, NgramTable, Tier
from engine.drafting.calibration import Calibration
from engine.drafting.compiled import hierarchy
from engine.drafting.context import ContextTier
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.model import Forgetful, ModelTier
from engine.drafting.published import (
    Flat,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
)
from engine.drafting.statistics import StatisticsTier
from engine.settings import Sampling
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS


class Databases:
    """`learned` holds the past answers and learns from each new one; `model` is what is asked of
    them, which may be a copy that forgets. `published` is made when it is first needed."""

    def __init__(
        self,
        context: ContextTier | None = None,
        model: ModelTier | None = None,
        statistics: NgramTable | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.context = context or ContextTier()
        self.learned = model or ModelTier()
        self.model: Tier = self.learned
        self.statistics = statistics
        self.calibration = calibration or Calibration()
        self.published: dict[str, Drafter] = {}

    @property
    def bytes(self) -> int:
        """About what they take in memory, beside the past answers that conversations share."""
        flat = (tier.bytes for tier in self.published.values() if isinstance(tier, Flat))
        return self.context.bytes + sum(flat)

    def hierarchy(self, tiers: Sequence[str], sampling: Sampling | None = None) -> list[Drafter]:
        """Hierarchy drafting from these tiers, in this order; it learns from the runs it takes
        part in. No drafter where none of the tiers is there. `sampling` is that of a run whose
        noise is known."""
        chosen = self.tiers(tiers)
        return [hierarchy(chosen, self.calibration, sampling)] if chosen else []

    def beside(
        self, tiers: Sequence[str], head: Tier, sampling: Sampling | None = None
    ) -> Hierarchy:
        """The same with what a head guesses as one more tier, the first. What evidence is worth
        beside it is learned for itself."""
        return hierarchy([head, *self.tiers(tiers)], self.calibration.with_head(), sampling)

    def as_published(self, tiers: Sequence[str] = TIERS) -> list[Drafter]:
        """The paper's own three tiers, filled from what the model tier holds, made once."""
        if not self.published:
            self.published = {
                CONTEXT: PublishedContext(),
                MODEL: PublishedModel(self.learned.grams()),
            }
            if self.statistics is not None:
                self.published[STATISTICS] = PublishedStatistics(self.statistics)
        return [self.published[name] for name in tiers if name in self.published]

    def tiers(self, names: Sequence[str]) -> list[Tier]:
        """The tiers of these names; that of the statistics is left out when there is no table."""
        known: dict[str, Tier] = {CONTEXT: self.context, MODEL: self.model}
        if self.statistics is not None:
            known[STATISTICS] = StatisticsTier(self.statistics)
        return [known[name] for name in names if name in known]

    def below(self, sampling: Sampling | None = None) -> Drafter:
        """Drafts for a draft model: asks the tiers, whose learning is left to another drafter.

        What the evidence is worth there is learned anew, beginning with what it is worth here.
        `sampling` is the draft model's, where its noise is known.
        """
        tiers = [Frozen(tier) for tier in self.tiers(TIERS)]
        return hierarchy(tiers, Calibration(self.calibration.rows()), sampling)

    def learner(self) -> Drafter:
        """Drafts nothing, and lets the tiers learn the answer."""
        return Learner(self.tiers(TIERS))

    def next_conversation(self) -> "Databases":
        """Databases of another conversation with the same model: only the context is fresh."""
        copy = Databases(None, self.learned, self.statistics, self.calibration)
        if self.published:
            copy.published = {**self.published, CONTEXT: PublishedContext()}
        return copy

    def for_measuring(self, log: Iterable[int] = ()) -> "Databases":
        """A copy whose runs leave no trace: its own context and calibration, a model tier that
        forgets.

        Without it, the second of two runs on one prompt would draft the first one's answer. What
        learning costs in memory is spent all the same, but by the published model tier, whose
        sorting of everything anew is not the paper's; what storing costs is not.
        """
        calibration = Calibration(self.calibration.rows())
        copy = Databases(ContextTier(tuple(log)), self.learned, self.statistics, calibration)
        copy.model = Forgetful(self.learned)
        if self.published:
            copy.published = {**self.published, CONTEXT: PublishedContext()}
            past = self.published[MODEL]
            if isinstance(past, PublishedModel):
                copy.published[MODEL] = past.frozen()
        return copy
