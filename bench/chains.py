"""Recorded answers said by any model: tokens per forward and per second, as chains or trees.

The answers are given: every forward is a real one, and what it chooses is overridden. So a model
need not know how to write, and one of random weights shows what drafting saves on its architecture:
what a rejected chain costs is paid as in use. Each line of a traces file is {"prompt", "output",
"split"}: answers of the split "train" fill the databases, those of another one are said, plainly
and with drafts, in turn. Statistics that come along for the vocabulary are used. "all that pays"
drafts by the measured cost curve, "all" whatever it costs.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from bench.options import (
    Record,
    add_model_arguments,
    add_save_argument,
    check_save,
    conditions,
    headline,
    load_model,
    open_databases,
    print_record,
)
from bench.quotes import Given
from bench.replay import TEMPLATE, Recording, read_traces
from engine.backends.base import Backend, Filled
from engine.decode import decode
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import METHODS
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import Step

PLAIN, PAYS, ALL = "plain", "all that pays", "all"
NODES = 16
"""Nodes of a tree where costs do not count."""


class Saying:
    """A model that is made to say `text`, its prompt first; see Backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.text, self.length = backend, list[int](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        """As the model does."""
        self.length = len(tokens)
        return self.backend.prefill(tokens, cancelled)

    def score(self, tree: Tree, sampling: Sampling) -> Given:
        """The model's forward, and the choices of the text."""
        scores = self.backend.score(tree, sampling)
        return Given(scores, self.text, [self.length + depth for depth in tree.depths])

    def accept(self, rows: Sequence[int]) -> None:
        """As the model does."""
        self.length += 1 + len(rows)
        self.backend.accept(rows)


class Words:
    """The vocabulary of a loaded model, as recordings are tokenized by."""

    def __init__(self, backend: Backend) -> None:
        self.size, self.eos = backend.info.vocabulary_size, min(backend.info.eos_ids)
        self.bos: Sequence[int] = backend.tokenize(backend.info.begin)
        self.encode = backend.tokenize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench chains`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--traces", type=Path, required=True, help="recorded answers (JSON lines)")
    add("--split", default="test", help="the split whose answers are said")
    add("--limit", type=int, default=24, help="say so many, 0 for all")
    add_save_argument(parser)
    parser.set_defaults(prompts="")


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    if min(options.limit, options.threads) < 0:
        raise SettingError("Give no negative limit or threads.")
    check_save(options.save)
    backend = load_model(options.model, options)
    if not backend.info.can_tree:
        raise SettingError(f"Nothing can be drafted: {backend.info.note}")
    recordings = read_traces(options.traces, Words(backend), TEMPLATE)
    room = backend.info.context_length
    said = [r for r in recordings if r.split == options.split and len(text_of(r)) < room]
    if not said:
        raise SettingError(f"No answer of the split {options.split!r} fits the context. Give more.")
    train = [r for r in recordings if r.split == "train" != options.split]
    costs = measure_costs(backend)
    ways = {
        PLAIN: (None, Drafting()),
        PAYS: (costs, Drafting()),
        ALL: (None, Drafting(budget="fixed", nodes=NODES)),
    }
    with ExitStack() as stack:
        databases = open_databases(backend, dict.fromkeys(ways, METHODS["hd"]), None, stack)
        for filled in databases.values():
            for recording in train:
                filled.learned.finish(text_of(recording), len(recording.answer))
        found = compared(backend, said[: options.limit or None], databases, ways)
    record = conditions(backend, options) | {
        "bench": "chains",
        "leaves": backend.info.leaves,
        "levels": backend.depth_limit(2),
        "ways": found,
    }
    show(record)
    print_record(record, options.save)


def text_of(recording: Recording) -> list[int]:
    """Prompt and answer."""
    return [*recording.prompt, *recording.answer]


def compared(
    backend: Backend,
    said: Sequence[Recording],
    databases: Mapping[str, Databases],
    ways: Mapping[str, tuple[CostCurve | None, Drafting]],
) -> Record:
    """The figures of every way to say the answers, each with its databases."""
    model, steps = Saying(backend), {way: list[Step]() for way in ways}
    for number, recording in enumerate(tqdm(said, desc="Answers", leave=False)):
        model.text = text_of(recording)
        wanted = Generation(Sampling(temperature=0.0), max_tokens=len(recording.answer))
        for way, (costs, drafting) in [*ways.items()][:: -1 if number % 2 else 1]:
            drafters = () if way == PLAIN else METHODS["hd"].drafters(databases[way])
            given = cast(Backend, model), recording.prompt, drafters, wanted, drafting
            events = decode(*given, costs=costs)
            steps[way] += [event for event in events if isinstance(event, Step)]
    return {way: figures(found) for way, found in steps.items()}


def figures(steps: Sequence[Step]) -> Record:
    """What the steps of all answers come to."""
    tokens = sum(len(step.tokens) for step in steps)
    return {
        "tokens": tokens,
        "tokens_per_forward": round(tokens / len(steps), 3),
        "tokens_per_second": round(tokens / sum(step.seconds for step in steps), 1),
        "drafted": round(sum(sum(step.proposed.values()) for step in steps) / len(steps), 2),
    }


def show(record: Record) -> None:
    """Print the figures as a table."""
    headline(record)
    plain = record["ways"][PLAIN]["tokens_per_second"]
    print(f"{'drafts':16}{'tokens/forward':>16}{'drafted':>9}{'tokens/s':>10}{'against plain':>15}")
    for way, row in record["ways"].items():
        print(
            f"{way:16}{row['tokens_per_forward']:16.2f}{row['drafted']:9.1f}"
            f"{row['tokens_per_second']:10.0f}{row['tokens_per_second'] / plain:14.2f}x"
        )
