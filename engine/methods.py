"""Named ways to decode, and the three databases that they draft from.

A method is a `Drafting` with a name. The chat, the comparison and the benchmark all choose from
METHODS, so a figure in one of them means the same in the others.

"rest" and "lookup" are peers, for comparison. "rest" stands for REST (arXiv 2311.08252): it drafts
from a store of large texts alone. It differs in the store, a table of n-grams with counts, asked
with two tokens and then one and answering up to four, where REST has a suffix array, matches
longer suffixes and samples more continuations; the drafts are verified in one tree in both.
"lookup" is prompt lookup with the library's own rules (engine/drafting/lookup.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.decode import never
from engine.drafting.base import Drafter, Frozen, Learner, NgramTable, Tier
from engine.drafting.calibration import Calibration
from engine.drafting.context import ContextTier
from engine.drafting.harvest import HarvestTier
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.lookup import LONGEST_COPY, LookupDrafter
from engine.drafting.model import Forgetful, ModelTier
from engine.drafting.published import (
    NODES,
    Flat,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
)
from engine.drafting.statistics import StatisticsTier
from engine.errors import SettingError
from engine.hsd.family import Family, Plans
from engine.hsd.planner import Plan
from engine.settings import Drafting, Sampling, shortened
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `title` is for people.

    `stack` is the plan of the draft models behind the databases: None for no models, "" for the
    best plan there is, else its text (engine/hsd/planner.py).
    """

    name: str
    title: str
    drafting: Drafting
    stack: str | None = None


METHODS = {
    method.name: method
    for method in (
        Method("plain", "Plain decoding", Drafting(tiers=(), nodes=0)),
        Method("hd", "Hierarchy drafting", Drafting()),
        Method(
            "hd-published",
            "Hierarchy drafting, as published",
            Drafting(nodes=NODES, budget="fixed"),
        ),
        Method(
            "rest",
            "Statistics as published, alone",
            Drafting(tiers=(STATISTICS,), nodes=NODES, budget="fixed"),
        ),
        Method(
            "lookup",
            "Prompt lookup",
            Drafting(tiers=(CONTEXT,), nodes=LONGEST_COPY, budget="fixed"),
        ),
        Method("hsd", "Draft models, as planned", Drafting(tiers=()), stack=""),
        Method("hd+hsd", "Hierarchy drafting, then draft models", Drafting(), stack=""),
        Method("context", "Context tier alone", Drafting(tiers=(CONTEXT,))),
        Method("model", "Model tier alone", Drafting(tiers=(MODEL,))),
        Method("statistics", "Statistics tier alone", Drafting(tiers=(STATISTICS,))),
    )
}
FIXED = ("plain", "hd-published", "rest", "lookup")
"""Methods whose drafting is what they are: no setting changes it."""


PREFIXES = {"hsd": "Stack", "hd+hsd": "Hierarchy drafting, then stack", "single": "Draft model"}
"""Names that a plan follows, as in "hsd:small@8/mid@4"."""


def method_named(name: str, drafting: Drafting | None = None) -> Method:
    """The method called `name`; `drafting` overrides its node limit, threshold, policy and rule.

    "hd" and "hd+hsd" also take the tiers and their order from `drafting`; the FIXED ones take
    nothing. "hsd:PLAN", "hd+hsd:PLAN" and "single:MODEL" name a stack of draft models.
    """
    kind, colon, plan = name.partition(":")
    if colon and plan and kind in PREFIXES:
        if kind == "single" and "/" in plan:
            raise SettingError(f"{name!r} names more than one model. Write hsd:{plan} instead.")
        base = METHODS["hsd" if kind == "single" else kind]
        method = replace(base, name=name, title=f"{PREFIXES[kind]} {plan}", stack=plan)
    elif name in METHODS:
        method = METHODS[name]
    else:
        raise SettingError(
            f"There is no method {shortened(name)}. Choose one of: {', '.join(METHODS)}, or name a "
            "stack of draft models: hsd:PLAN, hd+hsd:PLAN or single:MODEL."
        )
    if drafting is None or name in FIXED:
        return method
    tiers = drafting.tiers if kind in ("hd", "hd+hsd") else method.drafting.tiers
    return replace(method, drafting=replace(drafting, tiers=tiers))


def drafters_of(
    method: Method,
    databases: "Databases",
    family: Family | None,
    sampling: Sampling,
    cancelled: Callable[[], bool] = never,
) -> list[Drafter]:
    """All drafters of a method, made for one answer: the databases first, then the draft models.

    `cancelled` is the one that the answer is decoded with: draft models read the prompt, too.
    Raises SettingError when it takes models that are not loaded or not profiled.
    """
    found = databases.drafters(method)
    if method.stack is None:
        return found
    plan = plan_of(method, family)
    assert family is not None
    rule = method.drafting.rule
    if plan.databases and not found:
        all_tiers = replace(method, drafting=replace(method.drafting, tiers=TIERS))
        if not plan.levels:
            return databases.drafters(all_tiers)
        found = [databases.learner()]
    if not plan.levels:
        return found
    below = databases.below() if plan.databases else None
    return [*found, family.stack(plan, sampling, rule, below, cancelled)]


def plan_of(method: Method, family: Plans[Any] | None) -> Plan:
    """The plan of a method's draft models. Raises SettingError when it takes models that are not
    loaded or not profiled."""
    if family is None or not family.drafts or method.stack is None:
        raise SettingError(
            f"The method {method.name!r} needs draft models, and none is loaded. Choose them in "
            "the Stack tab, or choose hierarchy drafting."
        )
    plan = family.plan(method.stack, method.drafting.rule)
    family.check(plan)
    return plan


class Databases:
    """The context of one conversation, the past of one model, the statistics of one tokenizer.

    With them goes the calibration: what was learned about how far each can be trusted.
    """

    def __init__(
        self,
        context: ContextTier | None = None,
        model: ModelTier | None = None,
        statistics: NgramTable | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.context = context or ContextTier()
        self.harvest = HarvestTier()
        self.learned = model or ModelTier()
        self.model: Tier = self.learned
        self.statistics = statistics
        self.calibration = calibration or Calibration()
        self.published: dict[str, Drafter] = {}

    @property
    def bytes(self) -> int:
        """About what they take in memory, beside the past that conversations share."""
        flat = (tier.bytes for tier in self.published.values() if isinstance(tier, Flat))
        return self.context.bytes + self.harvest.bytes + sum(flat)

    def drafters(self, method: Method) -> list[Drafter]:
        """The method's drafters in its order; they learn from the runs they take part in.

        The statistics tier is left out when there is no table for the tokenizer.
        """
        drafting = method.drafting
        if method.name == "lookup":
            return [LookupDrafter()]
        if method.name in ("hd-published", "rest"):
            return self.as_published(drafting.tiers)
        chosen = self.tiers(drafting.tiers, drafting.harvest)
        return [Hierarchy(chosen, self.calibration, drafting.policy)] if chosen else []

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

    def tiers(self, names: Sequence[str], harvest: bool = False) -> list[Tier]:
        """The tiers of these names; that of the statistics is left out when there is no table."""
        known: dict[str, list[Tier]] = {CONTEXT: [self.context], MODEL: [self.model]}
        if harvest:
            known[CONTEXT].append(self.harvest)
        if self.statistics is not None:
            known[STATISTICS] = [StatisticsTier(self.statistics)]
        return [tier for name in names for tier in known.get(name, ())]

    def below(self) -> Drafter:
        """Drafts for a draft model: asks the tiers, whose learning is left to another drafter.

        How far they can be trusted there is learned anew, from what is trusted here.
        """
        tiers = [Frozen(tier) for tier in self.tiers(TIERS)]
        return Hierarchy(tiers, Calibration(self.calibration.rows()))

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
