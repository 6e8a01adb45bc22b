"""Named ways to decode. A method is a value that makes its own drafters.

The chat, the comparison and the benchmark all choose from METHODS, so a figure in one of them means
the same in the others. A new method is one entry in METHODS; where it drafts in a new way, that is
a function from the databases and the settings to drafters. Names with a plan behind a colon, as
"hsd:small@8/mid@4", are read by the entries of PREFIXES.

"rest" and "lookup" are peers, for comparison. "rest" stands for REST (arXiv 2311.08252): it drafts
from a store of large texts alone. It differs in the store, a table of n-grams with counts, asked
with two tokens and then one and answering up to four, where REST has a suffix array, matches
longer suffixes and samples more continuations; the drafts are verified in one tree in both.
"lookup" is prompt lookup with the library's own rules (engine/drafting/lookup.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.backends.base import Backend, BackendInfo, ServerInfo
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.costs import LARGEST
from engine.drafting.databases import Databases
from engine.drafting.head import FixedHead, head_drafters
from engine.drafting.lookup import LONGEST_COPY, LookupDrafter
from engine.drafting.published import NODES
from engine.errors import SettingError
from engine.hsd.family import Family, Plans
from engine.hsd.measure import Lowest, lowest_databases
from engine.hsd.planner import DATABASES, HEAD, MERGED, Plan, Source
from engine.sampling import COLDEST
from engine.settings import Drafting, Sampling, shortened
from engine.types import CONTEXT, MODEL, STATISTICS, TIERS

AS_FAR_AS_IT_PAYS, WHERE_THERE = 0, -1
"""The depth of a head that is asked as far as it pays, and of one that may not be there."""

FromDatabases = Callable[[Databases, Drafting, Sampling | None], list[Drafter]]
"""Makes the drafters that databases feed; the last is the sampling of a run whose noise is known.
At the top level of a module, as methods are sent to the engine's process by the names of their
functions."""


def hierarchy(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """Ours: one tree from all chosen tiers (engine/drafting/hierarchy.py)."""
    return databases.hierarchy(drafting.tiers, sampling)


def published(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """The paper's own tiers, with its constants (engine/drafting/published.py)."""
    return databases.as_published(drafting.tiers)


def lookup(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """Copies from the text of the run alone."""
    return [LookupDrafter()]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `title` is for people.

    `databases` makes what drafts from the databases. `stack` is the plan of the draft models behind
    them: None for no models, "" for the best plan there is, else its text (engine/hsd/planner.py).
    `head` is how deep the model's own head drafts: AS_FAR_AS_IT_PAYS, which WHERE_THERE means as
    well where the model has a head that drafts, or so many tokens in each step. None for no head.
    A `settable` method takes the user's settings for drafts; with `tiers_settable` their tiers and
    the order of these as well.
    """

    name: str
    title: str
    drafting: Drafting
    databases: FromDatabases = hierarchy
    stack: str | None = None
    head: int | None = None
    settable: bool = True
    tiers_settable: bool = False

    @property
    def adaptive(self) -> bool:
        """Whether how much it drafts depends on what a forward costs."""
        drafting = self.drafting
        drafts = bool(drafting.tiers) or self.stack is not None or self.head is not None
        return drafts and drafting.nodes > 0 and drafting.budget == "adaptive"

    def using(self, drafting: Drafting) -> "Method":
        """The same with the user's settings, as far as it takes them."""
        if not self.settable:
            return self
        tiers = drafting.tiers if self.tiers_settable else self.drafting.tiers
        return replace(self, drafting=replace(drafting, tiers=tiers))

    def drafters(
        self,
        databases: Databases,
        family: Family | None = None,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = never,
        target: Backend | None = None,
    ) -> list[Drafter]:
        """All its drafters, made for one answer: the head and the databases first, then the draft
        models.

        `sampling` is the answer's; who leaves it out has the databases draft by probability alone.
        `cancelled` is the one that the answer is decoded with: draft models read the prompt, too.
        `target` is the sequence that the answer is decoded with, whose head may draft. Raises
        SettingError when it takes models that are not loaded or not profiled, or a head that is not
        there.
        """
        known = sampling if self.drafting.rule == "match" else None
        if self.asks(None if target is None else target.info):
            found = self.with_head(databases, sampling or Sampling(), known, cancelled, target)
        else:
            found = self.databases(databases, self.drafting, known)
        if self.stack is None:
            return found
        plan = self.plan(family)
        assert family is not None
        if plan.head and not plan.levels:
            alone = METHODS[ALONE[plan.source]]
            return alone.with_head(databases, sampling or Sampling(), known, cancelled, target)
        if plan.databases and not found:
            if not plan.levels:
                return databases.hierarchy(TIERS, known)
            found = [databases.learner()]
        if not plan.levels:
            return found
        below = None
        if plan.databases:
            smallest = plan.levels[0].model
            below = databases.below(known and family.sampling_of(smallest, known))
        drawn = sampling or Sampling()
        return [*found, family.stack(plan, drawn, self.drafting.rule, below, cancelled)]

    def asks(self, info: BackendInfo | None) -> bool:
        """Whether it asks the head of a model."""
        if self.head != WHERE_THERE:
            return self.head is not None
        return not no_head(info) and not (info and info.head and info.head.too_dear)

    def missing(self, info: BackendInfo | None) -> str:
        """Why it cannot be used with a model, as far as its head is concerned; "" where it can."""
        why = no_head(info) if self.asks(info) else ""
        return why and f"The method {self.name!r} cannot be used. {why}"

    def with_head(
        self,
        databases: Databases,
        sampling: Sampling,
        known: Sampling | None,
        cancelled: Callable[[], bool],
        target: Backend | None,
    ) -> list[Drafter]:
        """The drafters of a head, and of the databases beside it. Raises SettingError where the
        target has none that drafts."""
        head = None if target is None else target.head
        missing = self.missing(None if target is None else target.info)
        if missing or head is None:
            raise SettingError(missing)
        if self.head is not None and self.head > 0:
            return [FixedHead(head, self.head, sampling, cancelled)]
        tiers = self.drafting.tiers
        return head_drafters(
            head,
            lambda tier: databases.beside((), tier, known),
            (lambda tier: databases.beside(tiers, tier, known)) if tiers else None,
            sampling,
            known is not None and sampling.temperature >= COLDEST,
            cancelled,
        )

    def plan(self, family: Plans[Any] | None) -> Plan:
        """The plan of its draft models. Raises SettingError when it takes models that are not
        loaded or not profiled."""
        if family is None or not family.drafts or self.stack is None:
            raise SettingError(
                f"The method {self.name!r} needs draft models, and none is loaded. Load them in "
                'the Stack tab, or choose the method "Databases" in the Settings tab.'
            )
        plan = family.plan(self.stack, self.drafting.rule)
        family.check(plan)
        return plan


def lowest(databases: Databases, target: BackendInfo) -> dict[Source, Lowest]:
    """What may draft for a model where no draft model does: the databases, and the target's head
    where it has one that drafts."""

    def alone(source: Source) -> Lowest:
        method = METHODS[ALONE[source]]

        def drafters(model: Backend, sampling: Sampling) -> Sequence[Drafter]:
            return method.drafters(databases.for_measuring(), None, sampling, target=model)

        return Lowest(drafters)

    found: dict[Source, Lowest] = {DATABASES: lowest_databases(databases)}
    return found if no_head(target) else found | {name: alone(name) for name in (HEAD, MERGED)}


def no_head(info: BackendInfo | None) -> str:
    """Why a model's head cannot draft, "" where it can."""
    if info is None or info.head is None:
        name = "This model" if info is None else info.name
        return (
            f"{name} brings no head that guesses ahead (MTP or EAGLE-3). Load a model or a file "
            'that has one, or choose the method "Databases".'
        )
    if not info.can_tree:
        return f"{info.name} decodes plainly. {info.note}".rstrip()
    if not info.head.drafts:
        return f"The {info.head.name} head of {info.name} does not draft: {info.head.note}"
    return ""


PLAIN = Method("plain", "Plain decoding", Drafting(tiers=(), nodes=0), settable=False)
USUAL = Method(
    "auto",
    "Automatic: databases and built-in head",
    Drafting(),
    head=WHERE_THERE,
    tiers_settable=True,
)
"""What is used unless something else is chosen."""
SERVER = Method("server", "As the server drafts", Drafting(tiers=()), settable=False)
"""How a model is decoded that a server runs; nobody chooses it, it stands for all ways to draft."""
METHODS = {
    method.name: method
    for method in (
        PLAIN,
        USUAL,
        Method("hd", "Databases (hierarchy drafting)", Drafting(), tiers_settable=True),
        Method(
            "hd-published",
            "Databases, as published (hierarchy drafting)",
            Drafting(nodes=NODES, budget="fixed"),
            published,
            settable=False,
        ),
        Method(
            "rest",
            "General text only, as published (REST)",
            Drafting(tiers=(STATISTICS,), nodes=NODES, budget="fixed"),
            published,
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
        Method(
            "hd+hsd",
            "Databases, then draft models (HD + HSD)",
            Drafting(),
            stack="",
            tiers_settable=True,
        ),
        Method(
            "hd+head",
            "Databases and built-in head, in one tree",
            Drafting(),
            head=AS_FAR_AS_IT_PAYS,
            tiers_settable=True,
        ),
        Method(
            "hd+head+hsd",
            "Databases and built-in head, then draft models",
            Drafting(),
            stack="",
            head=AS_FAR_AS_IT_PAYS,
            tiers_settable=True,
        ),
        Method(
            "head",
            "Built-in head alone (MTP, EAGLE-3)",
            Drafting(tiers=()),
            head=AS_FAR_AS_IT_PAYS,
        ),
        Method("context", "This chat only (context tier)", Drafting(tiers=(CONTEXT,))),
        Method("model", "Past answers only (model tier)", Drafting(tiers=(MODEL,))),
        Method("statistics", "General text only (statistics tier)", Drafting(tiers=(STATISTICS,))),
    )
}


def served(method: Method, server: ServerInfo) -> Method:
    """A method as a server follows it: it drafts in its own way, or not at all where it can be told
    so."""
    return PLAIN if method == PLAIN and server.switches else SERVER


def offered(info: BackendInfo) -> list[Method]:
    """The methods that are not of one plan, as far as a model can be decoded with them."""
    if info.server is not None:
        return [*([PLAIN] if info.server.switches else []), USUAL]
    return [method for method in METHODS.values() if not method.missing(info)]


def stack(plan: str) -> Method:
    """Draft models in a stack."""
    return replace(METHODS["hsd"], name=f"hsd:{plan}", title=f"Draft models {plan}", stack=plan)


def hierarchy_then_stack(plan: str) -> Method:
    """Hierarchy drafting, and a stack behind it."""
    title = f"Databases, then draft models {plan}"
    return replace(METHODS["hd+hsd"], name=f"hd+hsd:{plan}", title=title, stack=plan)


def head_then_stack(plan: str) -> Method:
    """Hierarchy drafting with a head, and a stack behind both."""
    name, title = f"hd+head+hsd:{plan}", f"Databases and built-in head, then draft models {plan}"
    return replace(METHODS["hd+head+hsd"], name=name, title=title, stack=plan)


def single(model: str) -> Method:
    """One draft model. Raises SettingError for more than one."""
    name = f"single:{model}"
    if "/" in model:
        raise SettingError(f"{name!r} names more than one model. Write hsd:{model} instead.")
    return replace(stack(model), name=name, title=f"Draft model {model}")


def fixed_head(depth: str) -> Method:
    """A head that drafts so many tokens in each step, for comparison. Raises SettingError."""
    if not depth.isdecimal() or not 1 <= int(depth) <= LARGEST:
        raise SettingError(
            f"A head cannot draft {shortened(depth)} tokens. Write a whole number from 1 to "
            f"{LARGEST}, as in head@3."
        )
    drafting = Drafting(tiers=(), nodes=int(depth), budget="fixed")
    return Method(
        f"head@{int(depth)}",
        f"Built-in head alone, {int(depth)} deep",
        drafting,
        head=int(depth),
        settable=False,
    )


ALONE: dict[Source, str] = {DATABASES: "hd", HEAD: "head", MERGED: "hd+head"}
"""The method of what drafts for a model where no draft model does."""
PREFIXES: dict[str, Callable[[str], Method]] = {
    "hsd": stack,
    "hd+hsd": hierarchy_then_stack,
    "hd+head+hsd": head_then_stack,
    "single": single,
}
"""What makes a method of the plan behind a name and a colon, as in "hsd:small@8/mid@4"."""
FIXED = "head@"
"""Begins the name of a head of fixed depth, as in "head@3"."""


def method_named(name: str, drafting: Drafting | None = None) -> Method:
    """The method called `name`, with the user's settings for drafts as far as it takes them."""
    prefix, _, plan = name.partition(":")
    if plan and prefix in PREFIXES:
        method = PREFIXES[prefix](plan)
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
