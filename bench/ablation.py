"""What each part of hierarchy drafting is worth: the same prompts with parts taken away.

Every tier alone, every pair, all three; the order of the tiers; all tiers at once ("merged", ours)
against tier after tier ("hierarchical", the paper's); the adaptive budget against fixed ones. All
in one run, in rotated order.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations, permutations

from bench.measure import measure
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    load_model,
    open_databases,
    print_record,
)
from bench.peer import Peer
from bench.prompts import prepared, questions_of
from bench.speed import summary, times
from engine.drafting.base import Drafter
from engine.drafting.costs import measure_costs
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.errors import SettingError
from engine.methods import PLAIN, FromDatabases, Method, hierarchy
from engine.settings import Drafting, Sampling
from engine.types import TIERS

FIXED = (7, 15, 31)
GROUPS = ("tiers", "order", "access", "budget")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench ablation`."""
    add_run_arguments(parser)
    parser.add_argument("--groups", default=",".join(GROUPS), help="which comparisons to make")


def tier_after_tier(
    databases: Databases, drafting: Drafting, sampling: Sampling | None = None
) -> list[Drafter]:
    """Access in the order of the paper: a drafter per tier, each of which gets the room that those
    before it did not want."""
    tiers = databases.tiers(drafting.tiers)
    return [Hierarchy([tier], databases.calibration, sampling) for tier in tiers]


def variants(groups: Sequence[str]) -> list[Method]:
    """The configurations, by title: what is special about each. The first is the usual one."""
    found = [Method("hd", "all, as by default", Drafting())]

    def add(title: str, drafting: Drafting, databases: FromDatabases = hierarchy) -> None:
        found.append(Method("hd", title, drafting, databases))

    if "tiers" in groups:
        for size in (1, 2):
            for tiers in combinations(TIERS, size):
                add(" + ".join(tiers), Drafting(tiers=tiers))
    if "order" in groups:
        for tiers in permutations(TIERS):
            if tiers != TIERS:
                add(f"merged: {', '.join(tiers)}", Drafting(tiers=tiers))
                add(f"hierarchical: {', '.join(tiers)}", Drafting(tiers=tiers), tier_after_tier)
    if "access" in groups:
        add("hierarchical", Drafting(), tier_after_tier)
        for nodes in FIXED:
            drafting = Drafting(nodes=nodes, budget="fixed")
            add(f"hierarchical, fixed {nodes} nodes", drafting, tier_after_tier)
    if "budget" in groups or "access" in groups:
        for nodes in FIXED:
            add(f"merged, fixed {nodes} nodes", Drafting(nodes=nodes, budget="fixed"))
    return found


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    groups = [name.strip() for name in options.groups.split(",") if name.strip()]
    for name in groups:
        if name not in GROUPS:
            raise SettingError(f"There is no group {name!r}. Choose from: {', '.join(GROUPS)}.")
    check_run(options)
    generation = generation_of(options)
    questions = questions_of(options)
    backend = load_model(options.model, options)
    methods: dict[str, Method | Peer] = {"plain": PLAIN}
    methods |= {method.title: method for method in variants(groups)}
    prompts = prepared(backend, options, questions)
    curve = measure_costs(backend)
    with ExitStack() as stack:
        databases = open_databases(backend, methods, options.statistics, stack)
        results = measure(backend, databases, methods, prompts, generation, options.repeats, curve)
    record = conditions(backend, options) | {
        "bench": "ablation",
        "prompts": len(prompts),
        "methods": {name: summary(name, results, options.temperature) for name in methods},
    }
    show(record)
    print_record(record, options.save)


def show(record: Record) -> None:
    """Print the table."""
    print(
        f"{headline(record)}\n"
        f"{record['prompts']} prompts, up to {record['max_new_tokens']} tokens, "
        f"T={record['temperature']:g}"
    )
    print(f"\n{'configuration':44}{'speedup':>9}{'tok/step':>10}{'draft %':>9}  same text")
    for name, figures in record["methods"].items():
        same = "yes" if figures["identical"] else f"NO: {figures['differing_answers']} differ"
        print(
            f"{name:44}{times(figures['speedup']):>9}{figures['mean_acceptance_length']:10.2f}"
            f"{figures['draft_share']:9.1%}  {same}"
        )
