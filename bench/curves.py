"""What a kind of weights costs to verify: forwards by nodes of several files, side by side.

The files are loaded together, and every round times each of them at every size, in rotated order,
each forward once untimed before: what else the machine does meets all alike. Times are medians.
Beside the ratios to a forward over no nodes stands what they mean: the largest speedup by drafts of
a given acceptance (engine/drafting/ceiling.py), and its nodes. What a model says does not matter,
so random weights do.

A folder is loaded in the type of its weights that follows an @: `model@float32 model@bfloat16`.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from statistics import median

from tqdm import tqdm

from bench.options import (
    Record,
    conditions,
    headline,
    load_model,
    print_record,
    runtime_of,
    source_of,
)
from engine.backends.base import Backend
from engine.drafting.ceiling import ceiling
from engine.drafting.costs import CACHED, forward_seconds
from engine.errors import SettingError
from engine.models.load_transformers import DTYPES
from engine.models.loaders import device, need
from engine.models.memory import free_memory

ACCEPTANCES = (0.6, 0.8, 0.9)
Times = dict[int, float]
"""Seconds of a forward by its nodes."""


def run(options: argparse.Namespace, sizes: Sequence[int]) -> None:
    """Measure the models of the options, print, save. `sizes` begins with 0."""
    room = CACHED + max(sizes)
    wanted = {name: options_of(name, options, 2 * room) for name in dict.fromkeys(options.models)}
    check_memory(wanted)
    with ExitStack() as stack:
        backends = {}
        for name, own in wanted.items():
            backends[name] = load_model(own.model, own)
            stack.callback(backends[name].close)
        check_lengths(backends, room)
        found = timed(backends, sizes, options.repeats)
        rows = {
            name: conditions(backends[name], own) | row_of(backends[name], found[name])
            for name, own in wanted.items()
        }
    show(rows, sizes)
    print_record({"bench": "curves", "cached": CACHED, "models": rows}, options.save)


def options_of(name: str, options: argparse.Namespace, context: int) -> argparse.Namespace:
    """The options of one model, with so much context; its name may end in its type of weights."""
    own = copy(options)
    source, _, dtype = name.rpartition("@")
    own.model, own.dtype = (source, dtype) if dtype in DTYPES else (name, options.dtype)
    own.context_length = context
    return own


def check_memory(wanted: Mapping[str, argparse.Namespace]) -> None:
    """Raise SettingError where the models do not fit into memory together."""
    needed: dict[str, int] = {}
    for own in wanted.values():
        source, runtime = source_of(own.model), runtime_of(own)
        place = device(source, runtime)
        needed[place] = needed.get(place, 0) + need(source, runtime).total
    for place, bytes_ in needed.items():
        if bytes_ > (free := free_memory(place)):
            raise SettingError(
                f"These models need {bytes_ / 1e9:.1f} GB together, and {free / 1e9:.1f} GB are "
                f"free on {place}. Name fewer or smaller ones."
            )


def check_lengths(backends: Mapping[str, Backend], room: int) -> None:
    """Raise SettingError where a context is too short to be measured."""
    for name, backend in backends.items():
        if backend.info.context_length <= room:
            raise SettingError(
                f"The context of {name!r} has {backend.info.context_length} tokens, and more than "
                f"{room} are needed. Choose another model, or smaller --sizes."
            )


def timed(backends: Mapping[str, Backend], sizes: Sequence[int], repeats: int) -> dict[str, Times]:
    """The median seconds of a forward, by model and nodes; only plain where nothing is drafted."""
    found: dict[str, dict[int, list[float]]] = {
        name: {nodes: [] for nodes in sizes if backend.info.can_tree or not nodes}
        for name, backend in backends.items()
    }
    names = list(backends)
    for round_ in tqdm(range(repeats), desc="Rounds", leave=False):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            own, backend = list(found[name]), backends[name]
            turn = round_ * len(own) // repeats
            prompt = [(7 + 13 * at) % backend.info.vocabulary_size for at in range(CACHED)]
            for nodes in own[turn:] + own[:turn]:
                forward_seconds(backend, prompt, nodes)
                found[name][nodes].append(forward_seconds(backend, prompt, nodes))
    return {name: {n: median(each) for n, each in times.items()} for name, times in found.items()}


def row_of(backend: Backend, times: Times) -> Record:
    """What was found of one model, and what it means."""
    best = {share: ceiling(times, share) for share in ACCEPTANCES}
    return {
        "bytes": backend.info.memory_bytes,
        "tokens_per_second": 1 / times[0],
        "ms": {nodes: 1e3 * seconds for nodes, seconds in times.items()},
        "ratio": {nodes: seconds / times[0] for nodes, seconds in times.items()},
        "speedup": {share: found.speedup for share, found in best.items()},
        "nodes": {share: found.nodes for share, found in best.items()},
    }


def show(rows: Mapping[str, Record], sizes: Sequence[int]) -> None:
    """Print the table, in Markdown."""
    for row in rows.values():
        print(headline(row))
    drafted, shares = sizes[1:], [f"{share:.0%}" for share in ACCEPTANCES]
    print(
        "\nA forward over so many nodes, as a multiple of one over none; then the largest speedup\n"
        f"by drafts of which {', '.join(shares)} are accepted, and the nodes that it takes.\n"
    )
    titles = ["model", "weights", "GB", "plain tokens/s", *map(str, drafted), *shares]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for row in rows.values():
        cells = [row["model"], row["dtype"], f"{row['bytes'] / 1e9:.2f}"]
        cells.append(f"{row['tokens_per_second']:.1f}")
        ratios = (row["ratio"].get(nodes) for nodes in drafted)
        cells += [f"{ratio:.2f}" if ratio else "–" for ratio in ratios]
        cells += [f"{row['speedup'][share]:.2f}x ({row['nodes'][share]})" for share in ACCEPTANCES]
        print(f"| {' | '.join(cells)} |", flush=True)
