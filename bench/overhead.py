"""What our Python costs around llama.cpp's forwards, and plain decoding against llama-cpp-python's.

A step is `score` of a tree and `accept` of a path through it; its overhead is what of its time is
not spent in `llama_decode`, by one clock around both. Trees are of random shape and random tokens,
the accepted path is a random one from the root, all sizes in turn, each behind the same prompt.
Then the same questions are answered by our loop without drafts and by the library's own `generate`,
in rotated order. `overhead_ms` is to be at most WANTED_MS for a tree of WANTED_NODES nodes, and
`plain_ratio`, the speed of our loop over that of the library's, at least WANTED_RATIO.

What a choice takes at larger vocabularies comes first, and needs no model (bench/choices.py).
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from tqdm import tqdm

from bench.choices import show_choices, time_choices
from bench.measure import measure
from bench.options import (
    LLAMA_CPP,
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    kind_of,
    load_model,
    print_record,
)
from bench.peer import LLAMA, Peer
from bench.peers import made_peers
from bench.prompts import prepared, questions_of
from bench.speed import speed
from engine.backends.base import Backend
from engine.decode import never
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import METHODS, Method
from engine.settings import Sampling
from engine.tree import Tree

SIZES = (0, 16, 64)
WANTED_MS, WANTED_NODES, WANTED_RATIO = 0.15, 16, 0.95
CACHED, SEED = 256, 0
"""Tokens behind which every tree stands, and the seed of the trees."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench overhead`."""
    add_run_arguments(parser)
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed of each size")
    parser.add_argument(
        "--choices", action="store_true", help="time choices by vocabulary alone, without a model"
    )
    parser.set_defaults(model="embedded-gguf", repeats=3)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    if options.choices:
        choices = time_choices()
        show_choices(choices)
        print_record({"bench": "overhead", "choices": choices}, options.save)
        return
    check_run(options)
    if options.steps < 2:
        raise SettingError(f"Time at least two steps, not {options.steps}.")
    if kind_of(options.model) != LLAMA_CPP:
        raise SettingError(
            f"The model {options.model!r} is no GGUF file, and the overhead around llama.cpp is of "
            "those. Name one with --model."
        )
    generation = generation_of(options)
    questions = questions_of(options)
    backend = load_model(options.model, options)
    prompts = prepared(backend, options, questions)
    steps = time_steps(backend, options.steps)
    with ExitStack() as stack:
        methods: dict[str, Method | Peer] = {"plain": METHODS["plain"]}
        methods |= made_peers([LLAMA], backend, options, stack)
        databases = {name: Databases() for name in methods}
        results = measure(backend, databases, methods, prompts, generation, options.repeats)
    plain, theirs = results["plain"], results[LLAMA]
    record = conditions(backend, options) | {
        "bench": "overhead",
        "prompts": len(prompts),
        "steps": options.steps,
        "choices": time_choices(),
        "trees": {size: figures(found) for size, found in steps.items()},
        "tokens_per_second": {name: speed(own) for name, own in results.items()},
        "plain_ratio": speed(plain) / speed(theirs),
        "decode_ratio": speed(plain, decode_only=True) / speed(theirs, decode_only=True),
        "same_text": sum(a.tokens == b.tokens for a, b in zip(plain, theirs, strict=True)),
    }
    show(record)
    print_record(record, options.save)


def time_steps(backend: Backend, steps: int) -> dict[int, list[tuple[float, float]]]:
    """Per size of the tree, (seconds of a step, of these in llama_decode), `steps` times each."""
    size = backend.info.vocabulary_size
    draw = Random(SEED)
    prompt = draw.choices(range(size), k=min(CACHED, backend.info.context_length // 2))
    found: dict[int, list[tuple[float, float]]] = {nodes: [] for nodes in SIZES}
    sampling = Sampling(temperature=0.0)
    with clocked_decode() as spent:
        # The first round meets cold caches and buffers that are yet to grow: it does not count.
        for round_ in tqdm(range(steps + 1), desc="Steps", leave=False):
            for nodes, times in found.items():
                tree = random_tree(prompt[-1], nodes, size, draw)
                rows = random_path(tree, draw)
                backend.prefill(prompt, never)
                spent.clear()
                start = perf_counter()
                backend.score(tree, sampling)
                backend.accept(rows)
                seconds = perf_counter() - start
                if round_:
                    times.append((seconds, sum(spent)))
    return found


@contextmanager
def clocked_decode() -> Iterator[list[float]]:
    """While it is entered, the seconds of every forward of our backend are added to the list.

    A GPU's forward goes on behind the call, so its end is waited for inside of it.
    """
    import llama_cpp  # late, as it may be missing where no GGUF file is measured

    library: Any = llama_cpp
    decode, spent = library.llama_decode, []

    def clocked(context: object, batch: object) -> int:
        start = perf_counter()
        code = int(decode(context, batch))
        library.llama_synchronize(context)
        spent.append(perf_counter() - start)
        return code

    library.llama_decode = clocked
    try:
        yield spent
    finally:
        library.llama_decode = decode


def random_tree(root: int, nodes: int, vocabulary: int, draw: Random) -> Tree:
    """A tree whose every node hangs below one of those before it, all equally likely."""
    tree = Tree(root)
    while len(tree) < nodes:
        tree.add(draw.randrange(len(tree) + 1), draw.randrange(vocabulary), "")
    return tree


def random_path(tree: Tree, draw: Random) -> list[int]:
    """The rows of a path from the root, which ends at any row, all equally likely."""
    row, rows = draw.randrange(len(tree) + 1), []
    while row:
        rows.append(row)
        row = tree.parents[row]
    return rows[::-1]


def figures(steps: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians in milliseconds, and the overhead's upper quartile."""
    around = [whole - inside for whole, inside in steps]
    return {
        "step_ms": round(1e3 * median(whole for whole, _ in steps), 4),
        "decode_ms": round(1e3 * median(inside for _, inside in steps), 4),
        "overhead_ms": round(1e3 * median(around), 4),
        "overhead_ms_upper_quartile": round(1e3 * quantiles(around, n=4)[2], 4),
    }


def show(record: Record) -> None:
    """Print the tables."""
    print(f"{headline(record)}\n")
    show_choices(record["choices"])
    print()
    print(f"{'nodes':>5}{'step ms':>10}{'llama_decode ms':>18}{'overhead ms':>14}{'quartile':>10}")
    for nodes, f in record["trees"].items():
        print(
            f"{nodes:5}{f['step_ms']:10.3f}{f['decode_ms']:18.3f}{f['overhead_ms']:14.3f}"
            f"{f['overhead_ms_upper_quartile']:10.3f}"
        )
    measured = record["trees"][WANTED_NODES]["overhead_ms"]
    print(
        f"wanted for {WANTED_NODES} nodes: at most {WANTED_MS} ms: "
        f"{'yes' if measured <= WANTED_MS else 'NO'}"
    )
    ours, theirs = record["tokens_per_second"].values()
    print(
        f"\nplain decoding, {record['prompts']} prompts, up to {record['max_new_tokens']} tokens, "
        f"T={record['temperature']:g}: ours {ours:.1f} tok/s, {LLAMA} {theirs:.1f} tok/s, "
        f"{record['plain_ratio']:.3f}x (decode only {record['decode_ratio']:.3f}x), "
        f"{record['same_text']} of {record['prompts']} texts the same"
    )
    print(
        f"wanted: at least {WANTED_RATIO}x: "
        f"{'yes' if record['plain_ratio'] >= WANTED_RATIO else 'NO'}"
    )
