"""c(n, length): forwards over n nodes after texts of several lengths, and what they mean.

All models are loaded together, and every round times each of them at every size, in rotated order;
times are medians. `model@float32` loads a folder with weights of that type, and `model@4` with
weights of 4 bits. If a cache can be stretched, no text is read, because a forward over zeros takes
as long.

The table also shows the largest speedup by drafts of a given acceptance, with its number of nodes
(engine/drafting/ceiling.py). `off` is the largest difference from the cost curve, which is measured
before, as it is when a model is loaded. It is scaled to the plain step after the first text,
because drafting decides by ratios.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from statistics import median

from tqdm import tqdm

from bench.harness import Add, Measurement, at_least, load_model, numbers
from bench.report import Record, conditions, headline, table
from engine.backends.base import Backend
from engine.backends.transformers import TransformersBackend
from engine.compare import rotated
from engine.drafting.ceiling import ceiling
from engine.drafting.costs import CostCurve, Stretchable, forward_seconds, measure_costs
from engine.errors import SettingError
from engine.models.load_transformers import DTYPES

BITS = ("8", "4")
LENGTHS, NODES = "256,2000,8000", "0,1,3,7,15,31"
ACCEPTANCES = (0.6, 0.8, 0.9)
HEADS = ("model", "weights", "GB", "attention", "cached", "plain ms", "tok/s")

Times = dict[int, float]
"""Seconds of a forward by its nodes."""


@dataclass
class Timed:
    """A model, its cost curve, and how many times as long a plain step took as that says."""

    name: str
    backend: Backend
    curve: CostCurve | None
    pace: float = 0.0

    def row(self, length: int, times: Times) -> Record:
        best = {share: ceiling(times, share) for share in ACCEPTANCES}
        return {
            "model": self.name,
            "attention": attention_of(self.backend),
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

    groups = ("model",)

    def add_options(self, add: Add) -> None:
        add("models", nargs="*", metavar="MODEL", help="a folder as DIR@DTYPE or DIR@BITS")
        add("--lengths", type=numbers(2), default=LENGTHS, help="cached tokens, comma between")
        add("--sizes", type=numbers(0), default=NODES, help="nodes of the trees, comma between")
        add("--repeats", type=at_least(1), default=5)

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        options.sizes = sorted({0, *options.sizes})
        models: list[Timed] = []
        described = {}
        for name in dict.fromkeys(options.models or [options.model]):
            own = options_of(name, options)
            backend = load_model(own.model, own)
            stack.callback(backend.close)
            curve = measure_costs(backend) if backend.info.can_tree else None
            models.append(Timed(name, backend, curve))
            described[name] = conditions(backend, own) | {"bytes": backend.info.memory_bytes}
        rows = [
            model.row(length, times)
            for length in fitting(models, options.lengths, max(options.sizes))
            for model, times in zip(models, timed(models, length, options), strict=True)
        ]
        return {"models": described, "rows": rows}

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


def attention_of(backend: Backend) -> str:
    if isinstance(backend, TransformersBackend):
        return str(backend.model.config._attn_implementation)
    return backend.info.kind


def fitting(models: Sequence[Timed], lengths: Sequence[int], nodes: int) -> list[int]:
    """The lengths for which every context has room. Raises SettingError where none has."""
    least = min((model.backend.info for model in models), key=lambda info: info.context_length)
    found = [length for length in lengths if length + nodes < least.context_length]
    if not found:
        raise SettingError(
            f"The context of {least.name} has {least.context_length} tokens, which is too short "
            "for this. Give smaller --lengths or --sizes, or another model."
        )
    return found


def timed(models: Sequence[Timed], length: int, options: argparse.Namespace) -> list[Times]:
    """The median seconds of every model after a text of this length, by nodes."""
    prompts, found = [], []
    for backend in (model.backend for model in models):
        prompt = [(7 + 13 * at) % backend.info.vocabulary_size for at in range(length)]
        forward_seconds(backend, prompt[:9], 0)
        if isinstance(backend, Stretchable):
            backend.stretch(prompt[:-1])
        prompts.append(prompt)
        sizes = options.sizes if backend.info.can_tree else [0]
        found.append({nodes: list[float]() for nodes in sizes})
    for round_ in tqdm(range(options.repeats), desc=f"{length} tokens", leave=False):
        for at in rotated(range(len(models)), round_):
            for nodes in rotated([*found[at]], round_ * len(found[at]) // options.repeats):
                # A forward counts that comes after another of its size.
                forward_seconds(models[at].backend, prompts[at], nodes)
                spent = forward_seconds(models[at].backend, prompts[at], nodes)
                found[at][nodes].append(spent)
    for model in models:
        model.backend.close()
    return [{nodes: median(spent) for nodes, spent in own.items()} for own in found]
