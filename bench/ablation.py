"""What each part of hierarchy drafting is worth: the same prompts with parts taken away.

Every tier alone, every pair, all three; the order of the tiers; hierarchical against merged access;
the adaptive budget against fixed ones; the successor harvest. All in one run, in rotated order.
"""

import argparse
import json
from contextlib import ExitStack
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch

from bench.peers import Peer, measure
from bench.speed import (
    EMBEDDED,
    PROMPTS,
    conditions,
    open_databases,
    prepared,
    read_prompts,
    summary,
)
from engine.backends.load import load_transformers
from engine.costs import measure_costs
from engine.errors import SettingError
from engine.methods import METHODS, Method
from engine.settings import Drafting, Generation, Sampling
from engine.types import TIERS

FIXED = (7, 15, 31)
GROUPS = ("tiers", "order", "policy", "budget", "harvest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench ablation`."""
    add = parser.add_argument
    add("--model", default="embedded", help="'embedded', a folder or a hub id")
    add("--groups", default=",".join(GROUPS), help="which comparisons to make")
    add("--prompts", default=str(PROMPTS), help="JSON lines with 'turns', or 'random' tokens")
    add("--skip", type=int, default=0, help="leave out the first N of every category")
    add("--limit", type=int, default=0, help="prompts in all, 0 for every one")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=1)
    add("--statistics", type=Path, help="a statistics file (default: the shipped)")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, default=0, help="threads of torch, 0 leaves them as they are")


def variants(groups: list[str]) -> dict[str, Drafting]:
    """The configurations by what is special about them; the first is the default."""
    found = {"all, as by default": Drafting()}
    if "tiers" in groups:
        for size in (1, 2):
            for tiers in combinations(TIERS, size):
                found[" + ".join(tiers)] = Drafting(tiers=tiers)
    if "order" in groups:
        for tiers in permutations(TIERS):
            if tiers != TIERS:
                title = f"merged: {', '.join(tiers)}"
                found[title] = Drafting(tiers=tiers)
                title = f"hierarchical: {', '.join(tiers)}"
                found[title] = Drafting(tiers=tiers, policy="hierarchical")
    if "policy" in groups:
        found["hierarchical"] = Drafting(policy="hierarchical")
        for nodes in FIXED:
            title = f"hierarchical, fixed {nodes} nodes"
            found[title] = Drafting(policy="hierarchical", nodes=nodes, budget="fixed")
    if "budget" in groups or "policy" in groups:
        for nodes in FIXED:
            found[f"merged, fixed {nodes} nodes"] = Drafting(nodes=nodes, budget="fixed")
    if "harvest" in groups:
        found["harvest on"] = Drafting(harvest=True)
        found["harvest on, fixed 15 nodes"] = Drafting(harvest=True, nodes=15, budget="fixed")
    return found


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    groups = [name.strip() for name in options.groups.split(",") if name.strip()]
    for name in groups:
        if name not in GROUPS:
            raise SettingError(f"There is no group {name!r}. Choose from: {', '.join(GROUPS)}.")
    if options.repeats < 1 or min(options.limit, options.skip, options.threads) < 0:
        raise SettingError("Give at least one repeat, and no negative limit, skip or threads.")
    questions = []
    if options.prompts != "random":
        questions = read_prompts(Path(options.prompts), options.limit, options.skip)
    if options.threads:
        torch.set_num_threads(options.threads)
    source = str(EMBEDDED) if options.model == "embedded" else options.model
    backend = load_transformers(source, options.device, options.dtype)
    sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
    generation = Generation(sampling, max_tokens=options.max_new_tokens)
    methods: dict[str, Method | Peer] = {"plain": METHODS["plain"]}
    for title, drafting in variants(groups).items():
        methods[title] = Method("hd", title, drafting)
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
    print(f"\n{json.dumps(record)}")


def show(record: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{record['model']} ({record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}), "
        f"{record['prompts']} prompts, T={record['temperature']:g}, {record['threads']} threads"
    )
    print(f"\n{'configuration':44}{'speedup':>9}{'tok/step':>10}{'draft %':>9}  same text")
    for name, figures in record["methods"].items():
        same = "yes" if figures["identical"] else f"NO: {figures['differing_answers']} differ"
        print(
            f"{name:44}{figures['speedup']:8.2f}x{figures['mean_acceptance_length']:10.2f}"
            f"{figures['draft_share']:9.1%}  {same}"
        )
