"""c(n, length): forwards over n nodes after texts of several lengths, and what they mean.

All models are loaded together, and every round times each of them at every size, in rotated order;
times are medians. A transformers model with folded attention is also timed with the library's
attention. `model@float32` loads a folder with weights of the type after the @, and `model@4` with
weights of 4 bits. If a cache can be stretched, no text is read, because a forward over zeros takes
as long.

The table also shows the largest speedup by drafts of a given acceptance, with its number of nodes
(engine/drafting/ceiling.py). `off` is the largest difference from the cost curve, which is measured
before, as it is when a model is loaded. It is scaled to the plain step after the first text,
because drafting decides by ratios.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from statistics import median

from tqdm import tqdm

from bench.harness import (
    Add,
    Measurement,
    Record,
    at_least,
    conditions,
    headline,
    load_model,
    model_options,
    numbers,
    runtime_of,
    source_of,
    table,
)
from engine.backends.base import Backend
from engine.backends.folded_attention import FOLDED, LIBRARY, fold, unfold
from engine.backends.transformers import TransformersBackend
from engine.compare import rotated
from engine.drafting.ceiling import ceiling
from engine.drafting.costs import CostCurve, Stretchable, forward_seconds, measure_costs
from engine.errors import SettingError
from engine.models.load_transformers import DTYPES
from engine.models.loaders import device, need
from engine.models.memory import free_memory

BITS = ("8", "4")
LENGTHS, NODES = "256,2000,8000", "0,1,3,7,15,31"
ACCEPTANCES = (0.6, 0.8, 0.9)

Times = dict[int, float]
"""Seconds of a forward by its nodes."""
HEADS = ("model", "weights", "GB", "attention", "cached", "plain ms", "tok/s")


@dataclass
class Way:
    """A model with one of its attentions; the `curve` is known of the one that it runs with.

    `pace` is how many times as long a plain step took as the curve says.
    """

    name: str
    backend: Backend
    attention: str
    curve: CostCurve | None
    pace: float = 0.0

    def forward(self, prompt: Sequence[int], nodes: int) -> float:
        """The seconds of a forward that comes after another of its size."""
        if isinstance(self.backend, TransformersBackend):
            (fold if self.attention == FOLDED else unfold)(self.backend.model)
        forward_seconds(self.backend, prompt, nodes)
        return forward_seconds(self.backend, prompt, nodes)

    def row(self, length: int, times: Times) -> Record:
        """What was found after a text of this length, and what it means."""
        best = {share: ceiling(times, share) for share in ACCEPTANCES}
        return {
            "model": self.name,
            "attention": self.attention,
            "length": length,
            "ms": {nodes: 1e3 * seconds for nodes, seconds in times.items()},
            "ratio": {nodes: seconds / times[0] for nodes, seconds in times.items()},
            "speedup": {share: found.speedup for share, found in best.items()},
            "nodes": {share: found.nodes for share, found in best.items()},
            "off": self.off(length, times),
        }

    def off(self, length: int, times: Times) -> dict[int, float] | None:
        """How far the curve is from the measured times, as a share of them."""
        if self.curve is None:
            return None
        self.curve.reach(length)
        self.pace = self.pace or times[0] / self.curve.seconds(0)
        return {n: self.pace * self.curve.seconds(n) / spent - 1 for n, spent in times.items()}


class Curve(Measurement):
    """Forwards over n nodes after texts of several lengths, measured and expected."""

    groups = (model_options,)

    def add_options(self, add: Add) -> None:
        add(
            "models",
            nargs="*",
            metavar="MODEL",
            help="timed side by side; a folder as DIR@DTYPE or DIR@BITS",
        )
        add("--lengths", type=numbers(2), default=LENGTHS, help="cached tokens, comma between")
        add("--sizes", type=numbers(0), default=NODES, help="nodes of the trees, comma between")
        add("--repeats", type=at_least(1), default=5)

    def check(self, options: argparse.Namespace) -> None:
        options.sizes = sorted({0, *options.sizes})

    def record(self, options: argparse.Namespace) -> Record:
        names = dict.fromkeys(options.models or [options.model])
        given = {name: options_of(name, options) for name in names}
        check_memory(given)
        with ExitStack() as stack:
            ways: list[Way] = []
            for name, own in given.items():
                backend = load_model(own.model, own)
                stack.callback(backend.close)
                ways += ways_of(name, backend)
            lengths = fitting(ways, options.lengths, max(options.sizes))
            rows = [
                way.row(length, times)
                for length in lengths
                for way, times in zip(ways, timed(ways, length, options), strict=True)
            ]
            models = {
                way.name: conditions(way.backend, given[way.name])
                | {"bytes": way.backend.info.memory_bytes}
                for way in ways
            }
        return {"models": models, "rows": rows}

    def show(self, record: Record) -> None:
        for model in record["models"].values():
            print(headline(model))
        shares = [f"{share:.0%}" for share in ACCEPTANCES]
        print(
            "\nA forward over so many nodes, as a multiple of one over none; then the largest "
            f"speedup\nby drafts of which {', '.join(shares)} are accepted, and the nodes that it "
            "takes; then how\nfar the cost curve is off at most.\n"
        )
        drafted = sorted({nodes for row in record["rows"] for nodes in row["ratio"]} - {0})
        rows = []
        for row in record["rows"]:
            model, plain = record["models"][row["model"]], row["ms"][0]
            cells = [model["model"], model["dtype"], f"{model['bytes'] / 1e9:.2f}"]
            cells += [row["attention"], f"{row['length']:,}", f"{plain:.2f}", f"{1e3 / plain:.1f}"]
            ratios = (row["ratio"].get(nodes) for nodes in drafted)
            cells += [f"{ratio:.2f}" if ratio else "-" for ratio in ratios]
            cells += [f"{row['speedup'][s]:.2f}x ({row['nodes'][s]})" for s in ACCEPTANCES]
            cells.append(f"{max(map(abs, row['off'].values())):.0%}" if row["off"] else "-")
            rows.append(cells)
        table((*HEADS, *map(str, drafted), *shares, "off"), rows)


def options_of(name: str, options: argparse.Namespace) -> argparse.Namespace:
    """The options of one model, whose context has room for what is timed."""
    own = copy(options)
    source, _, kind = name.rpartition("@")
    own.model = source if kind in (*DTYPES, *BITS) else name
    own.dtype = kind if kind in DTYPES else options.dtype
    own.bits = kind if kind in BITS else options.bits
    own.context_length = max(options.lengths) + max(options.sizes) + 1
    return own


def ways_of(name: str, backend: Backend) -> list[Way]:
    attention = backend.info.kind
    if isinstance(backend, TransformersBackend):
        attention = str(backend.model.config._attn_implementation)
    curve = measure_costs(backend) if backend.info.can_tree else None
    others = [Way(name, backend, LIBRARY, None)] if attention == FOLDED else []
    return [*others, Way(name, backend, attention, curve)]


def check_memory(given: Mapping[str, argparse.Namespace]) -> None:
    """Raise SettingError where the models do not fit into memory together."""
    needed: dict[str, int] = {}
    for own in given.values():
        source, runtime = source_of(own.model), runtime_of(own)
        place = device(source, runtime)
        needed[place] = needed.get(place, 0) + need(source, runtime).total
    for place, bytes_ in needed.items():
        if bytes_ > (free := free_memory(place)):
            raise SettingError(
                f"These models need {bytes_ / 1e9:.1f} GB together, and {free / 1e9:.1f} GB are "
                f"free on {place}. Name fewer or smaller ones."
            )


def fitting(ways: Sequence[Way], lengths: Sequence[int], nodes: int) -> list[int]:
    """The lengths for which every context has room. Raises SettingError where none has."""
    least = min((way.backend.info for way in ways), key=lambda info: info.context_length)
    found = [length for length in lengths if length + nodes < least.context_length]
    if not found:
        raise SettingError(
            f"The context of {least.name} has {least.context_length} tokens, which is too short "
            "for this. Give smaller --lengths or --sizes, or another model."
        )
    return found


def timed(ways: Sequence[Way], length: int, options: argparse.Namespace) -> list[Times]:
    """The median seconds of every way after a text of this length, by nodes."""
    prompts, found = [], []
    for way in ways:
        size, can_tree = way.backend.info.vocabulary_size, way.backend.info.can_tree
        prompt = [(7 + 13 * at) % size for at in range(length)]
        forward_seconds(way.backend, prompt[:9], 0)
        if isinstance(way.backend, Stretchable):
            way.backend.stretch(prompt[:-1])
        prompts.append(prompt)
        found.append({nodes: list[float]() for nodes in options.sizes if can_tree or not nodes})
    for round_ in tqdm(range(options.repeats), desc=f"{length} tokens", leave=False):
        for at in rotated(range(len(ways)), round_):
            for nodes in rotated([*found[at]], round_ * len(found[at]) // options.repeats):
                found[at][nodes].append(ways[at].forward(prompts[at], nodes))
    for way in ways:
        way.backend.close()
    return [{nodes: median(spent) for nodes, spent in own.items()} for own in found]
