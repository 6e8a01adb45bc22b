"""Decoding methods and their peers on the same prompts, in one process, in rotated order.

Times are wall times of whole answers, including what the drafters learn at the end. The cost of a
forward is measured once, before anything else; every method with an adaptive budget starts from it
and corrects a copy of its own.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import combinations, permutations

from bench.harness import Add, Benchmark, Setup, has_drafts, kind_of, runtime_of, source_of
from bench.measure import (
    ASSISTED,
    OTHER_FILE,
    PEERS,
    SMALL,
    Peer,
    compared,
    is_peer,
    show_methods,
)
from bench.report import TRANSFORMERS, Record, headline
from engine.drafting.base import Drafter
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.errors import SettingError
from engine.methods import PLAIN, FromDatabases, Method, method_named
from engine.settings import Drafting, Sampling
from engine.types import TIERS

ABLATION, NODES = "ablation", (7, 15, 31)
"""A set of methods, and the fixed budgets among them."""
DEFAULTS = {
    kind: ("plain", *peers, "rest", "hd-published", "lookup", "hd") for kind, peers in PEERS.items()
}
"""The methods of a run that names none."""


def checked_methods(options: argparse.Namespace) -> list[str]:
    """The names of the methods of a run, by default those that can run here. Raises SettingError
    for unknown methods, and for peers that were named and cannot run."""
    # A GGUF file with chosen bits runs as a transformers model does.
    kind, lacking = TRANSFORMERS if options.bits in ("8", "4") else kind_of(options.model), {}
    if options.model != "embedded":
        lacking[ASSISTED] = "the embedded model, which brings a draft model"
    if not options.gguf:
        lacking[OTHER_FILE] = "a GGUF file of the same weights (--gguf)"
    if options.methods is None:
        return [name for name in DEFAULTS[kind] if name not in lacking]
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not names:
        raise SettingError("Give at least one method.")
    for name in names if names != [ABLATION] else ():
        if not is_peer(name):
            method_named(name)
        elif name not in PEERS[kind]:
            raise SettingError(
                f"The peer {name!r} does not run {kind} models, such as {options.model!r}. Choose "
                f"from: {', '.join(PEERS[kind])}."
            )
        elif name in lacking:
            raise SettingError(f"The method {name!r} needs {lacking[name]}. Leave it out.")
    return names


def made_peer(name: str, setup: Setup) -> Peer:
    """The peer called `name`. Libraries are imported here, because one of them may be missing."""
    backend, options, runtime = setup.backend, setup.options, runtime_of(setup.options)
    if name == OTHER_FILE:
        from bench.llama_peers import OtherFile

        return OtherFile(options.gguf, runtime)
    if backend.info.kind == TRANSFORMERS:
        from bench.transformers_peers import transformers_peer

        return transformers_peer(name, backend)
    from bench.llama_peers import LlamaPeer

    peer = LlamaPeer(backend, source_of(options.model), runtime)
    return setup.stack.enter_context(closing(peer))


class Speed(Benchmark):
    """Speed of decoding methods and their peers on the same prompts."""

    groups = (*Benchmark.groups, "drafts")

    def add_options(self, add: Add) -> None:
        defaults = "; ".join(f"{kind}: {','.join(names)}" for kind, names in DEFAULTS.items())
        add("--gguf", help=f"a file of the same weights, which {OTHER_FILE!r} decodes plainly")
        add("--methods", help=f"comma between, or {ABLATION!r}; default for {defaults}")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        options.methods = checked_methods(options)
        return super().record(options, stack)

    def measure(self, setup: Setup) -> Record:
        names, methods = setup.options.methods, ablation()
        if names != [ABLATION]:
            methods = {
                name: made_peer(name, setup) if is_peer(name) else method_named(name)
                for name in names
            }
        family = setup.family() if any(map(has_drafts, methods.values())) else None
        return compared(setup, methods, family)[1] | {
            "assistant": SMALL.name if ASSISTED in names else None,
            "drafts": list(family.drafts) if family else [],
        }

    def show(self, record: Record) -> None:
        print(
            f"{headline(record)}\n{record['prompts']} prompts, up to {record['max_new_tokens']} "
            f"tokens, T={record['temperature']:g}, min-p {record['min_p']:g}, "
            f"{'with' if record['statistics'] else 'no'} statistics"
        )
        if record["forward_ms"]:
            points = ", ".join(f"{n}: {ms:.4g}" for n, ms in record["forward_ms"].items())
            print(f"ms of a forward by drafted nodes: {points}")
        print()
        show_methods(record)


# ablation


def tier_after_tier(
    databases: Databases, tiers: Sequence[str], sampling: Sampling | None = None
) -> list[Drafter]:
    """One drafter per tier, as in the paper: each may use the nodes that those before it left."""
    chosen = databases.tiers(tiers)
    return [Hierarchy([tier], databases.calibration, sampling) for tier in chosen]


def ablation() -> dict[str, Method | Peer]:
    """Plain decoding and configurations of hierarchy drafting: which tiers, in which order, all at
    once ("merged", ours) or tier after tier ("hierarchical", as in the paper), and which budget."""
    found: dict[str, Method | Peer] = {"plain": PLAIN}

    def add(title: str, drafting: Drafting, databases: FromDatabases = Databases.hierarchy) -> None:
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
