"""Decoding methods and their peers on the same prompts, in one process, in rotated order.

Each method opens the statistics for itself, so none finds look-ups cached that another has paid
for. Times are wall times of whole answers, including what the drafters learn at the end. The cost
of a forward is measured once, before anything else; every method with an adaptive budget starts
from it and corrects a copy of its own.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import combinations, permutations
from pathlib import Path

from bench.harness import (
    EMBEDDED,
    TRANSFORMERS,
    Add,
    Benchmark,
    Record,
    Setup,
    draft_options,
    has_drafts,
    headline,
    kind_of,
    prompts_line,
    runtime_of,
    source_of,
)
from bench.measure import (
    ASSISTED,
    OTHER_FILE,
    PEERS,
    Peer,
    compared,
    curve_for,
    is_peer,
    show_categories,
    show_methods,
)
from engine.backends.base import Backend
from engine.drafting.base import Drafter
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.errors import SettingError
from engine.methods import (
    FIXED,
    METHODS,
    PREFIXES,
    FromDatabases,
    Method,
    hierarchy,
    method_named,
)
from engine.settings import BUDGETS, Drafting, Sampling
from engine.types import TIERS

SMALL = EMBEDDED.with_name("small")
ABLATION, NODES = "ablation", (7, 15, 31)
"""A set of methods, and the fixed budgets among them."""
DEFAULTS = {
    kind: ("plain", *peers, "rest", "hd-published", "lookup", "hd") for kind, peers in PEERS.items()
}
"""The methods of a run that names none."""


def checked_methods(options: argparse.Namespace) -> list[str]:
    """The names of the methods of a run, checked before any model is loaded.

    Of the default methods those that cannot run here are left out, and a line is printed. Raises
    SettingError for unknown methods, and for peers that were named and cannot run.
    """
    kind = kind_of(options.model)
    if options.methods is None:
        names = [name for name in DEFAULTS[kind] if name != OTHER_FILE or options.gguf]
        problems = {name: obstacle(name, options) for name in names}
        for problem in dict.fromkeys(filter(None, problems.values())):
            absent = ", ".join(name for name in problems if problems[name] == problem)
            print(f"Left out: {absent}, as {problem}.")
        return [name for name, problem in problems.items() if not problem]
    if options.methods == ABLATION:
        return [ABLATION]
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not names:
        raise SettingError("Give at least one method.")
    known = ("plain", *PEERS[kind], *(name for name in METHODS if name != "plain"))
    for name in names:
        other = next((other for other in PEERS if name in PEERS[other]), kind)
        if other != kind:
            raise SettingError(
                f"The peer {name!r} is of {other} models, and {options.model!r} is none. Choose "
                f"from: {', '.join(PEERS[kind])}."
            )
        ours = name.partition(":")[0] in PREFIXES or name.startswith(FIXED)
        if name not in known and not ours:
            raise SettingError(f"There is no method {name!r}. Choose from: {', '.join(known)}.")
        if problem := obstacle(name, options):
            raise SettingError(
                f"The method {name!r} cannot run, as {problem}. Change that, or leave it out of "
                "--methods."
            )
    return names


def obstacle(name: str, options: argparse.Namespace) -> str:
    """Why a method cannot run with these options; "" if it can."""
    if name == ASSISTED and options.model != "embedded" and not options.assistant:
        return f"it needs a draft model for {options.model!r} (--assistant)"
    if name == OTHER_FILE and not options.gguf:
        return "it needs a GGUF file of the same weights (--gguf)"
    return ""


def made_peers(
    names: Sequence[str], backend: Backend, options: argparse.Namespace, stack: ExitStack
) -> dict[str, Peer]:
    """The peers among the methods, ready to answer; `stack` closes them."""
    chosen = [name for name in names if is_peer(name)]
    # Imported late, because only one of the two libraries may be installed.
    if OTHER_FILE in chosen:
        from bench.llama_peers import OtherFile

        chosen.remove(OTHER_FILE)
        other = stack.enter_context(closing(OtherFile(options.gguf, runtime_of(options))))
        return {OTHER_FILE: other, **made_peers(chosen, backend, options, stack)}
    if chosen and kind_of(options.model) == TRANSFORMERS:
        from bench.transformers_peers import transformers_peer

        assistant = options.assistant or str(SMALL)
        return {name: transformers_peer(name, backend, assistant) for name in chosen}
    if chosen:
        from bench.llama_peers import LlamaPeer

        given = backend, source_of(options.model), runtime_of(options)
        return {name: stack.enter_context(closing(LlamaPeer(name, *given))) for name in chosen}
    return {}


class Speed(Benchmark):
    """Speed of decoding methods and their peers on the same prompts."""

    groups = (*Benchmark.groups, draft_options)

    def add_options(self, add: Add) -> None:
        add("--assistant", help="the draft model of 'assisted' (the embedded model brings one)")
        defaults = "; ".join(f"{kind}: {','.join(names)}" for kind, names in DEFAULTS.items())
        add("--gguf", help=f"a file of the same weights, which {OTHER_FILE!r} decodes plainly")
        add("--methods", help=f"comma between, or {ABLATION!r}; default for {defaults}")
        add("--nodes", type=int, default=Drafting().nodes)
        add("--budget", default=Drafting().budget, help=f"{' or '.join(BUDGETS)}: limits a draft")

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        options.methods = checked_methods(options)
        Drafting(nodes=options.nodes, budget=options.budget)

    def measure(self, setup: Setup) -> Record:
        options, backend, names = setup.options, setup.backend, setup.options.methods
        drafting = Drafting(nodes=options.nodes, budget=options.budget)
        peers = made_peers(names, backend, options, setup.stack)
        methods: Mapping[str, Method | Peer] = (
            ablation()
            if names == [ABLATION]
            else {name: peers.get(name) or method_named(name, drafting) for name in names}
        )
        curve = curve_for(backend, methods)
        family = setup.family() if any(map(has_drafts, methods.values())) else None
        return compared(setup, methods, curve, family)[1] | {
            "assistant": Path(options.assistant or SMALL).name if ASSISTED in names else None,
            "drafts": list(family.drafts) if family else [],
            "forward_ms": milliseconds(curve.points) if curve else None,
        }

    def show(self, record: Record) -> None:
        statistics = "with" if record["statistics"] else "no"
        print(f"{headline(record)}\n{prompts_line(record)}, {statistics} statistics")
        if record["forward_ms"]:
            points = ", ".join(f"{n}: {ms:.4g}" for n, ms in record["forward_ms"].items())
            print(f"ms of a forward by drafted nodes: {points}")
        print()
        show_methods(record)
        print()
        show_categories(record)


def milliseconds(points: Mapping[int, float]) -> dict[int, float]:
    return {nodes: round(1e3 * seconds, 4) for nodes, seconds in points.items()}


# ablation


def tier_after_tier(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """One drafter per tier, as in the paper: each may use the nodes that those before it left."""
    tiers = databases.tiers(drafting.tiers)
    return [Hierarchy([tier], databases.calibration, sampling) for tier in tiers]


def ablation() -> dict[str, Method]:
    """Plain decoding and configurations of hierarchy drafting, by what is special about each.

    They are the tiers alone, in pairs and all together; the order of the tiers; all tiers at once
    ("merged", ours) and tier after tier ("hierarchical", as in the paper); and the adaptive budget
    and fixed ones.
    """
    found = {"plain": method_named("plain")}

    def add(title: str, drafting: Drafting, databases: FromDatabases = hierarchy) -> None:
        found[title] = Method("hd", title, drafting, databases)

    add("all, as by default", Drafting())
    for size in (1, 2):
        for tiers in combinations(TIERS, size):
            add(" + ".join(tiers), Drafting(tiers=tiers))
    for tiers in permutations(TIERS):
        if tiers != TIERS:
            add(f"merged: {', '.join(tiers)}", Drafting(tiers=tiers))
            add(f"hierarchical: {', '.join(tiers)}", Drafting(tiers=tiers), tier_after_tier)
    add("hierarchical", Drafting(), tier_after_tier)
    for nodes in NODES:
        fixed = Drafting(nodes=nodes, budget="fixed")
        add(f"hierarchical, fixed {nodes} nodes", fixed, tier_after_tier)
        add(f"merged, fixed {nodes} nodes", fixed)
    return found
