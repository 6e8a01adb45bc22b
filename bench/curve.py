"""c(n, length): forwards over n nodes behind texts of several lengths, measured and expected.

A transformers model is timed with the library's attention and with the folded one, in one run and
in rotated order; times are medians, beside them their ratio to the plain step. `expected` is what
the cost curve says that was measured before, as at load, at the pace of the plain step behind the
first text: drafting decides by ratios. No text is read where a cache can be
stretched: a forward takes as long over zeros. `--size` takes a model of a made-up shape with random
weights, as nothing here asks what it says.

`--quotes N` adds answers of N tokens that quote long prompts, see bench/quotes.py. Models that are
named first are timed side by side instead, behind one length, see bench/curves.py.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.curves import run as side_by_side
from bench.inflate import inflated_config
from bench.options import (
    EMBEDDED,
    Record,
    add_model_arguments,
    add_save_argument,
    check_save,
    conditions,
    headline,
    load_model,
    print_record,
)
from bench.quotes import BEFORE, LONGEST, NOW, quotes
from bench.shape import SHAPES
from engine.backends.base import Backend
from engine.backends.folded_attention import FOLDED, LIBRARY, fold, unfold
from engine.backends.transformers import TransformersBackend
from engine.drafting.costs import CostCurve, Stretchable, forward_seconds, measure_costs
from engine.errors import SettingError
from engine.models.load_transformers import NO_LIMIT, describe, pick_device, pick_dtype

LENGTHS, NODES = (256, 2000, 8000), (0, 1, 3, 7, 15, 31)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench curve`."""
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="timed side by side; of a folder also DIR@DTYPE")
    add_model_arguments(parser)
    add("--size", help=f"{', '.join(SHAPES)}: a made-up model in place of --model")
    add("--lengths", default=",".join(map(str, LENGTHS)), help="cached tokens, comma between")
    add("--sizes", default=",".join(map(str, NODES)), help="nodes of the trees, comma between")
    add("--repeats", type=int, default=5)
    add("--quotes", type=int, default=0, metavar="N", help="then answers of N tokens that quote")
    add_save_argument(parser)
    parser.set_defaults(prompts="")


def numbers(text: str, least: int) -> list[int]:
    """The numbers of an option. Raises SettingError for any other text."""
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise SettingError(f"{text!r} is no list of numbers from {least} on. Give some like 3,7.")
    return found


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    lengths, sizes = numbers(options.lengths, 2), sorted({0, *numbers(options.sizes, 0)})
    if options.repeats < 1 or options.quotes < 0 or options.threads < 0:
        raise SettingError("Give at least one repeat, and no negative quotes or threads.")
    if options.models and (options.size or options.quotes):
        raise SettingError("Several models are timed without --size and --quotes. Leave them out.")
    if options.size is not None and options.size not in SHAPES:
        raise SettingError(f"There is no size {options.size!r}. Choose from: {', '.join(SHAPES)}.")
    check_save(options.save)
    if options.models:
        side_by_side(options, sizes)
        return
    longest = LONGEST + options.quotes if options.quotes else 0
    backend = open_model(options, max([*lengths, longest]) + max(sizes) + 1)
    room, ways = backend.info.context_length, ways_of(backend)
    lengths = [length for length in lengths if length + max(sizes) < room]
    if not lengths or longest >= room:
        raise SettingError(
            f"The context of {backend.info.name} has {room} tokens, which is too short for this. "
            "Give smaller --lengths and no --quotes, or another model."
        )
    if options.quotes and len(ways) == 1:
        raise SettingError(f"{backend.info.name} has one attention alone. Leave out --quotes.")
    curve = measure_costs(backend)
    found = {length: timed(backend, length, sizes, ways, options.repeats) for length in lengths}
    record = conditions(backend, options) | {
        "bench": "curve",
        "growth_ns": {"token": 1e9 * curve.growth.token, "row": 1e9 * curve.growth.row},
        "lengths": compared(found, curve),
    }
    show(record, ways)
    if options.quotes and isinstance(backend, TransformersBackend):
        record["quotes"] = quotes(backend, curve, options.quotes, options.repeats)
        show_quotes(record["quotes"])
    print_record(record, options.save)


def open_model(options: argparse.Namespace, context: int) -> Backend:
    """The model of the options, with that much context at most."""
    options.context_length = context
    return made_up(options) if options.size else load_model(options.model, options)


def made_up(options: argparse.Namespace) -> TransformersBackend:
    """A model of random weights in the shape that the options name, with the embedded tokenizer."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    config = inflated_config(AutoConfig.from_pretrained(EMBEDDED), SHAPES[options.size])
    config.max_position_embeddings = options.context_length
    torch.set_num_threads(options.threads or torch.get_num_threads())
    kind = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config, dtype=kind)  # type: ignore[no-untyped-call]
    model.eval().requires_grad_(False).to(device)
    fold(model)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.model_max_length = NO_LIMIT
    info = describe(str(EMBEDDED), model, tokenizer, options.context_length)
    return TransformersBackend(model, tokenizer, replace(info, name=f"made-up {options.size}"))


def ways_of(backend: Backend) -> list[str]:
    """The attentions that a model can be timed with, by their names; the last is its own."""
    if not isinstance(backend, TransformersBackend):
        return [backend.info.kind]
    own = str(backend.model.config._attn_implementation)
    return [LIBRARY, FOLDED] if own == FOLDED else [own]


def use(backend: Backend, way: str) -> None:
    """Give the model an attention, where there is a choice."""
    if isinstance(backend, TransformersBackend):
        (fold if way == FOLDED else unfold)(backend.model)


def timed(
    backend: Backend, length: int, sizes: Sequence[int], ways: Sequence[str], repeats: int
) -> dict[tuple[str, int], float]:
    """The median seconds of a forward, by attention and nodes, behind so many tokens."""
    prompt = [0] * length
    forward_seconds(backend, prompt[:9], 0)
    if isinstance(backend, Stretchable):
        backend.stretch(prompt[:-1])
    cases = [(way, nodes) for way in ways for nodes in sizes]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for round_ in tqdm(range(repeats), desc=f"{length} tokens", leave=False):
        turn = round_ * len(cases) // repeats
        for way, nodes in cases[turn:] + cases[:turn]:
            use(backend, way)
            forward_seconds(backend, prompt, nodes)
            found[way, nodes].append(forward_seconds(backend, prompt, nodes))
    use(backend, ways[-1])
    backend.close()
    return {case: median(times) for case, times in found.items()}


def compared(
    found: Mapping[int, Mapping[tuple[str, int], float]], curve: CostCurve
) -> dict[int, Record]:
    """By length, attention and nodes: milliseconds, their ratio to the plain step, and what was
    expected of the model's own attention."""
    record: dict[int, Record] = {}
    pace = 0.0
    for length, times in found.items():
        curve.reach(length)
        own = list(times)[-1][0]
        pace = pace or times[own, 0] / curve.seconds(0)
        record[length] = {}
        for (way, nodes), seconds in times.items():
            row = {"ms": 1e3 * seconds, "ratio": seconds / times[way, 0]}
            if way == own:
                expected = pace * curve.seconds(nodes)
                row |= {"expected_ms": 1e3 * expected, "off": expected / seconds - 1}
            record[length].setdefault(way, {})[nodes] = row
    return record


def show(record: Record, ways: Sequence[str]) -> None:
    """Print the tables of forwards."""
    print(headline(record))
    for length, found in record["lengths"].items():
        print(f"\n{length:,} cached tokens: ms of a forward (its ratio to the plain one)")
        sizes = list(found[ways[0]])
        print(f"{'nodes':>12}" + "".join(f"{nodes:>16}" for nodes in sizes))
        for way in ways:
            cells = (f"{row['ms']:8.1f} ({row['ratio']:.2f})" for row in found[way].values())
            print(f"{way:>12}" + "".join(f"{cell:>16}" for cell in cells))
        own = found[ways[-1]].values()
        cells = (f"{row['expected_ms']:8.1f} ({row['off']:+.0%})" for row in own)
        print(f"{'expected':>12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def show_quotes(record: Record) -> None:
    """Print how fast answers were that quote."""
    print("\nanswers that quote prompts of 6,000 to 7,500 tokens")
    for name, row in record.items():
        print(
            f"{name:>12} {row['tokens_per_second']:8.2f} tokens/s, "
            f"{row['tokens_per_forward']:.2f} per forward, {row['nodes']:.1f} nodes"
        )
    ratio = record[NOW]["tokens_per_second"] / record[BEFORE]["tokens_per_second"]
    print(f"{'':>12} {ratio:8.2f} times as fast")
