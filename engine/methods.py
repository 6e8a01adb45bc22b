"""Named ways to decode, and the three databases that they draft from.

A method is a `Drafting` with a name. The chat, the comparison and the benchmark all choose from
METHODS, so a figure in one of them means the same in the others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.drafters.base import Drafter, Frozen, NgramTable
from engine.drafters.context import ContextDrafter
from engine.drafters.model import ModelDrafter
from engine.drafters.published import (
    NODES,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
)
from engine.drafters.statistics import StatisticsDrafter
from engine.errors import SettingError
from engine.settings import Drafting
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `title` is for people."""

    name: str
    title: str
    drafting: Drafting


METHODS = {
    method.name: method
    for method in (
        Method("plain", "Plain decoding", Drafting(tiers=(), nodes=0)),
        Method("hd", "Hierarchy drafting", Drafting()),
        Method(
            "hd-published",
            "Hierarchy drafting, as published",
            Drafting(policy="hierarchical", nodes=NODES, threshold=0.0),
        ),
        Method("context", "Context tier alone", Drafting(tiers=(CONTEXT,))),
        Method("model", "Model tier alone", Drafting(tiers=(MODEL,))),
        Method("statistics", "Statistics tier alone", Drafting(tiers=(STATISTICS,))),
    )
}


def method_named(name: str, drafting: Drafting | None = None) -> Method:
    """The method called `name`; `drafting` overrides its node limit, threshold and policy.

    "hd" also takes the tiers and their order from `drafting`.
    """
    if name not in METHODS:
        raise SettingError(f"There is no method {name!r}. Choose one of: {', '.join(METHODS)}.")
    method = METHODS[name]
    if drafting is None or name in ("plain", "hd-published"):
        return method
    tiers = drafting.tiers if name == "hd" else method.drafting.tiers
    return replace(method, drafting=replace(drafting, tiers=tiers))


class Databases:
    """The context of one conversation, the past of one model, the statistics of one tokenizer."""

    def __init__(
        self,
        context: ContextDrafter | None = None,
        model: ModelDrafter | None = None,
        statistics: NgramTable | None = None,
    ) -> None:
        self.context = context or ContextDrafter()
        self.model = model or ModelDrafter()
        self.statistics = statistics
        self.published: dict[str, Drafter] = {}

    def drafters(self, method: Method) -> list[Drafter]:
        """The method's drafters in its order; they learn from the runs they take part in.

        The statistics tier is left out when there is no table for the tokenizer.
        """
        if method.name == "hd-published":
            return self.as_published(method.drafting.tiers)
        tiers: dict[str, Drafter] = {CONTEXT: self.context, MODEL: self.model}
        if self.statistics is not None:
            tiers[STATISTICS] = StatisticsDrafter(self.statistics)
        return [tiers[name] for name in method.drafting.tiers if name in tiers]

    def as_published(self, tiers: Sequence[str] = TIERS) -> list[Drafter]:
        """The paper's own three tiers, filled from what the model tier holds, made once."""
        if not self.published:
            self.published = {
                CONTEXT: PublishedContext(),
                MODEL: PublishedModel(self.model.table.values()),
            }
            if self.statistics is not None:
                self.published[STATISTICS] = PublishedStatistics(self.statistics)
        return [self.published[name] for name in tiers if name in self.published]

    def for_measuring(self, log: Iterable[int] = ()) -> "Databases":
        """A copy whose runs leave no trace: its own context, the same model tier and statistics."""
        copy = Databases(ContextDrafter(tuple(log)), self.model, self.statistics)
        if self.published:
            copy.published = {**self.published, CONTEXT: PublishedContext()}
        return copy


def untraced(drafters: Sequence[Drafter]) -> list[Drafter]:
    """Drafters that forget what they see, except the context tier, which is the run's own."""
    return [drafter if drafter.name == CONTEXT else Frozen(drafter) for drafter in drafters]
