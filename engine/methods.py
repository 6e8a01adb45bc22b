"""Named ways to decode. A method is a value that creates its own drafters.

The chat, the comparison and the benchmark all choose from METHODS, so a figure in one of them means
the same in the others. A name with a plan after a colon, such as "hsd:small@8/mid@4", begins with
one of the PREFIXES.

"rest" and "lookup" are published methods, for comparison. "rest" stands for REST (arXiv
2311.08252), which drafts from a store of large texts alone. Here that store is a table of n-grams,
whose drafts have up to four tokens; REST has a suffix array, matches longer suffixes and samples
more continuations. "lookup" is prompt lookup with the library's own rules
(engine/drafting/baselines.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.backends.base import Backend, BackendInfo, ServerInfo
from engine.constraint import Constraint, FormatTier
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.baselines import LONGEST_COPY, NODES, LookupDrafter
from engine.drafting.costs import LARGEST
from engine.drafting.databases import Databases
from engine.drafting.head import FixedHead, HeadDrafter, HeadTier
from engine.errors import SettingError
from engine.hsd.family import Family, Plans
from engine.hsd.measure import Lowest, lowest_databases
from engine.hsd.planner import DATABASES, HEAD, MERGED, Plan, Source
from engine.sampling import COLDEST
from engine.settings import Drafting, Sampling, shortened
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS

AS_FAR_AS_IT_PAYS, IF_PRESENT = 0, -1
"""Two depths of a head. Both let it draft as far as this pays; the second also suits a model
without a head."""

FromDatabases = Callable[[Databases, Sequence[str], Sampling | None], list[Drafter]]
"""Creates the drafters of databases from the tiers of these names; the last argument is the
sampling of a run whose noise is known. It must be a function at the top level of a module or of a
class, because methods are sent to the engine's process by the names of their functions."""


def lookup(databases: Databases, tiers: Sequence[str], sampling: Sampling | None) -> list[Drafter]:
    """Prompt lookup: copies from the text of the run alone."""
    return [LookupDrafter()]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `title` is its name in the interface.

    `databases` creates the drafters of the databases. `stack` is the plan of the draft models after
    them: None for no models, "" for the best plan, otherwise its text (engine/hsd/planner.py).
    `head` is the depth to which the model's own head drafts: AS_FAR_AS_IT_PAYS, IF_PRESENT, which
    is the same if the model has a head that drafts, or a fixed number of tokens in each step; None
    for no head. A `settable` method uses the user's settings for drafts, and if it has all tiers,
    also the user's choice and order of them.
    """

    name: str
    title: str
    drafting: Drafting
    databases: FromDatabases = Databases.hierarchy
    stack: str | None = None
    head: int | None = None
    settable: bool = True

    @property
    def adaptive(self) -> bool:
        """Whether the number of drafted tokens depends on the cost of a forward."""
        drafting = self.drafting
        drafts = bool(drafting.tiers) or self.stack is not None or self.head is not None
        return drafts and drafting.nodes > 0 and drafting.budget == "adaptive"

    def using(self, drafting: Drafting) -> "Method":
        if not self.settable:
            return self
        tiers = drafting.tiers if self.tiers_settable else self.drafting.tiers
        return replace(self, drafting=replace(drafting, tiers=tiers))

    @property
    def tiers_settable(self) -> bool:
        return self.settable and self.drafting.tiers == TIERS

    def drafters(
        self,
        databases: Databases,
        family: Family | None = None,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = never,
        target: Backend | None = None,
        constraint: Constraint | None = None,
    ) -> list[Drafter]:
        """The drafters for one answer: the databases and the head first, then the draft models.

        `sampling` is that of the answer; without it the databases draft by probability alone.
        `cancelled` is the cancellation check of the answer, because draft models read the prompt,
        too. `target` is the sequence that the answer is decoded with, whose head may draft.
        `constraint` is the format of the answer, under which drafts are verified by equality.
        Raises SettingError if the method needs models that are not loaded or not profiled, or a
        head that does not exist.
        """
        databases.format = None if constraint is None else FormatTier(constraint)
        if constraint is not None and self.drafting.rule != "match":
            equal = replace(self, drafting=replace(self.drafting, rule="match"))
            return equal.drafters(databases, family, sampling, cancelled, target, constraint)
        known, drawn = sampling if self.drafting.rule == "match" else None, sampling or Sampling()
        if self.uses_head(None if target is None else target.info):
            found = self.with_head(databases, drawn, known, cancelled, target)
        else:
            found = self.databases(databases, self.drafting.tiers, known)
        if self.stack is None:
            return found
        plan = self.plan(family)
        assert family is not None
        if not plan.levels:
            if plan.head:
                alone = METHODS[ALONE[plan.source]]
                return alone.with_head(databases, drawn, known, cancelled, target)
            return found or (databases.hierarchy(TIERS, known) if plan.databases else [])
        below = None
        if plan.databases:
            found, below = found or [databases.learner()], databases.below(known)
        return [*found, family.stack(plan, drawn, self.drafting.rule, below, cancelled)]

    def uses_head(self, info: BackendInfo | None) -> bool:
        if self.head != IF_PRESENT:
            return self.head is not None
        return not no_head(info) and not (info and info.head and info.head.expensive)

    def missing(self, info: BackendInfo | None) -> str:
        """Why the method cannot be used with a model for want of a head; "" if it can."""
        why = no_head(info) if self.uses_head(info) else ""
        return why and f"The method {self.name!r} cannot be used. {why}"

    def with_head(
        self,
        databases: Databases,
        sampling: Sampling,
        known: Sampling | None,
        cancelled: Callable[[], bool],
        target: Backend | None,
    ) -> list[Drafter]:
        """The drafters of a head, and of the databases that draft with it. Raises SettingError if
        the target has no head that drafts."""
        head = None if target is None else target.head
        missing = self.missing(None if target is None else target.info)
        if missing or head is None:
            raise SettingError(missing)
        if self.head is not None and self.head > 0:
            return [FixedHead(head, self.head, sampling, cancelled)]
        noisy = known is not None and sampling.temperature >= COLDEST
        tier = HeadTier(sampling, noisy, head.info.at_once)
        alone, tiers = databases.with_head((), tier, known), self.drafting.tiers
        if not tiers:
            return [HeadDrafter(head, tier, alone, None, cancelled)]
        merged = databases.with_head(tiers, tier, known)
        return [merged, HeadDrafter(head, tier, alone, merged, cancelled)]

    def plan(self, family: Plans[Any] | None) -> Plan:
        """The plan of the draft models. Raises SettingError if it needs models that are not loaded
        or not profiled."""
        if family is None or not family.drafts or self.stack is None:
            raise SettingError(
                f"The method {self.name!r} needs draft models, and none is loaded. Load them in "
                "the Stack tab or with --drafts, or choose another method, such as Databases (hd)."
            )
        plan = family.plan(self.stack, self.drafting.rule)
        family.check(plan)
        return plan


def lowest(databases: Databases, target: BackendInfo) -> dict[Source, Lowest]:
    """The drafters of a model that has no draft model: the databases, and the target's head if it
    has one that drafts."""

    def alone(source: Source) -> Lowest:
        method = METHODS[ALONE[source]]

        def drafters(model: Backend, sampling: Sampling) -> Sequence[Drafter]:
            return method.drafters(databases.for_measuring(), None, sampling, target=model)

        return Lowest(drafters)

    found: dict[Source, Lowest] = {DATABASES: lowest_databases(databases)}
    return found if no_head(target) else found | {name: alone(name) for name in (HEAD, MERGED)}


def no_head(info: BackendInfo | None) -> str:
    """Why a model's head cannot draft; "" if it can."""
    if info is None or info.head is None:
        name = "This model" if info is None else info.name
        return (
            f"{name} brings no head that guesses ahead (MTP, EAGLE-3 or DFlash). Load a model or a "
            'file that has one, or choose the method "Databases".'
        )
    if not info.can_tree:
        return f"{info.name} decodes plainly. {info.note}".rstrip()
    if not info.head.drafts:
        return f"The {info.head.name} head of {info.name} does not draft: {info.head.note}"
    return ""


PLAIN = Method("plain", "Plain decoding", Drafting(tiers=(), nodes=0), settable=False)
USUAL = Method("auto", "Automatic: databases and built-in head", Drafting(), head=IF_PRESENT)
"""The default method."""
SERVER = Method("server", "As the server drafts", Drafting(tiers=()), settable=False)
"""The method of a model that a server runs. It stands for all ways to draft, and cannot be
chosen."""
METHODS = {
    method.name: method
    for method in (
        PLAIN,
        USUAL,
        Method("hd", "Databases (hierarchy drafting)", Drafting()),
        Method(
            "hd-published",
            "Databases, as published (hierarchy drafting)",
            Drafting(nodes=NODES, budget="fixed"),
            Databases.as_published,
            settable=False,
        ),
        Method(
            "rest",
            "General text only, as published (REST)",
            Drafting(tiers=(STATISTICS,), nodes=NODES, budget="fixed"),
            Databases.as_published,
            settable=False,
        ),
        Method(
            "lookup",
            "This chat only, simple copy (prompt lookup)",
            Drafting(tiers=(CONTEXT,), nodes=LONGEST_COPY, budget="fixed"),
            lookup,
            settable=False,
        ),
        Method("hsd", "Draft models (HSD)", Drafting(tiers=()), stack=""),
        Method("hd+hsd", "Databases, then draft models (HD + HSD)", Drafting(), stack=""),
        Method(
            "hd+head",
            "Databases and built-in head, in one tree",
            Drafting(),
            head=AS_FAR_AS_IT_PAYS,
        ),
        Method(
            "hd+head+hsd",
            "Databases and built-in head, then draft models",
            Drafting(),
            stack="",
            head=AS_FAR_AS_IT_PAYS,
        ),
        Method(
            "head",
            "Built-in head alone (MTP, EAGLE-3, DFlash)",
            Drafting(tiers=()),
            head=AS_FAR_AS_IT_PAYS,
        ),
        Method("context", "This chat only", Drafting(tiers=(CONTEXT,))),
        Method("model", "Past answers only", Drafting(tiers=(MODEL,))),
        Method("statistics", "General text only", Drafting(tiers=(STATISTICS,))),
    )
}


def served(method: Method, server: ServerInfo) -> Method:
    """A method as a server uses it: the server drafts in its own way, or not at all if its drafting
    can be switched off."""
    return PLAIN if method == PLAIN and server.switches else SERVER


def offered(info: BackendInfo) -> list[Method]:
    """The methods without a plan that a model can be decoded with."""
    if info.server is not None:
        return [*([PLAIN] if info.server.switches else []), USUAL]
    return [method for method in METHODS.values() if not method.missing(info)]


def stacked(prefix: str, plan: str) -> Method:
    """The method of a plan of draft models. Raises SettingError if the prefix stands for a single
    model and the plan has more."""
    name = f"{prefix}:{plan}"
    if prefix == SINGLE and "/" in plan:
        raise SettingError(f"{name!r} names more than one model. Write hsd:{plan} instead.")
    method = METHODS["hsd" if prefix == SINGLE else prefix]
    return replace(method, name=name, title=f"{PREFIXES[prefix]} {plan}", stack=plan)


def fixed_head(depth: str) -> Method:
    """The method of a head that drafts a fixed number of tokens in each step, for comparison.
    Raises SettingError."""
    if not depth.isdecimal() or not 1 <= int(depth) <= LARGEST:
        raise SettingError(
            f"A head cannot draft {shortened(depth)} tokens. Write a whole number from 1 to "
            f"{LARGEST}, as in head@3."
        )
    drafting = Drafting(tiers=(), nodes=int(depth), budget="fixed")
    return Method(
        f"head@{int(depth)}",
        f"Built-in head alone, {int(depth)} ahead",
        drafting,
        head=int(depth),
        settable=False,
    )


ALONE: dict[Source, str] = {DATABASES: "hd", HEAD: "head", MERGED: "hd+head"}
"""The methods that draft without draft models, by what drafts in them."""
SINGLE = "single"
PREFIXES = {
    "hsd": "Draft models",
    "hd+hsd": "Databases, then draft models",
    "hd+head+hsd": "Databases and built-in head, then draft models",
    SINGLE: "Draft model",
}
"""The titles of the methods that take a plan after their name and a colon, as in
"hsd:small@8/mid@4"."""
FIXED = "head@"
"""Begins the name of a head of fixed depth, as in "head@3"."""


def method_named(name: str, drafting: Drafting | None = None) -> Method:
    """The method called `name`, with those of the user's settings for drafts that it uses. Raises
    SettingError for an unknown name."""
    prefix, _, plan = name.partition(":")
    if plan and prefix in PREFIXES:
        method = stacked(prefix, plan)
    elif name.startswith(FIXED):
        method = fixed_head(name.removeprefix(FIXED))
    elif name == SERVER.name:
        method = SERVER
    elif name in METHODS:
        method = METHODS[name]
    else:
        raise SettingError(
            f"There is no method {shortened(name)}. Choose one of: {', '.join(METHODS)}, or name a "
            "stack of draft models: hsd:PLAN, hd+hsd:PLAN or single:MODEL; or a head of depth N: "
            "head@N."
        )
    return method if drafting is None else method.using(drafting)
