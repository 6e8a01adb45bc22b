"""The live speedup held against the measured one: what an answer says of itself, and what is so.

Live is what one drafted run says of itself: the seconds that plain decoding would have taken at
that load (engine/drafting/controller.py) over the seconds that it took, reading the prompt and
learning included. Measured are pairs of a plain and a drafted run of the same prompt, in swapped
order, as everywhere (engine/compare.py). The drafted runs start from what was known before the live
one. The last `--hot` prompts are answered so hot that nothing can be drafted: there live must be 1.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median

from tqdm import tqdm

from bench.drafts import add_draft_arguments, load_family
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    has_drafts,
    headline,
    load_model,
    open_databases,
    print_record,
)
from bench.prompts import prepared, questions_of
from engine.backends.base import Backend
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.hsd.family import Family
from engine.methods import METHODS, Method, method_named
from engine.metrics import Metrics, summarise
from engine.runs import run as decoded
from engine.settings import Generation
from engine.types import Run
from storage.statistics import StatisticsTable

HOT = 2.0
"""The temperature at which a model says anything at all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: the live and the measured speedup, and how many plain steps the live one saw."""

    category: str
    tokens: int
    tokens_per_forward: float
    plain_steps: int
    live: float
    measured: float

    @property
    def difference(self) -> float:
        """How far the live figure is off, as a part of the measured one."""
        return self.live / self.measured - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench live`."""
    add_run_arguments(parser)
    add_draft_arguments(parser)
    parser.add_argument("--method", default="hd", help="the method that drafts")
    parser.add_argument("--hot", type=int, default=3, help=f"prompts answered at T={HOT:g}, last")
    parser.set_defaults(limit=10, repeats=3)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_run(options)
    if options.hot < 0:
        raise SettingError("Give no negative number of hot prompts.")
    generation, method = generation_of(options), method_named(options.method)
    questions = questions_of(options)
    backend = load_model(options.model, options)
    if not backend.info.can_tree:
        raise SettingError(f"{backend.info.name} decodes plainly. Choose a model that can draft.")
    prompts = prepared(backend, options, questions)
    hot = replace(generation, sampling=replace(generation.sampling, temperature=HOT, min_p=0.0))
    rows: list[Row] = []
    with ExitStack() as stack:
        databases = open_databases(backend, {method.name: method}, options.statistics, stack)
        family = None
        if has_drafts(method):
            family = load_family(backend, options, generation.sampling, stack)
        runs = Runs(backend, method, databases[method.name], measure_costs(backend), family)
        for number, (category, prompt) in enumerate(tqdm(prompts, desc="Prompts", leave=False)):
            drawn = hot if number >= len(prompts) - options.hot else generation
            rows.append(runs.row(category, prompt, drawn, options.repeats))
    record = conditions(backend, options) | {"bench": "live", "method": method.name}
    show(record, rows)
    print_record(record | {"rows": [asdict(row) for row in rows]}, options.save)


class Runs:
    """Plain and drafted runs of prompts, each from nothing; the live ones are learned from."""

    def __init__(
        self,
        backend: Backend,
        method: Method,
        databases: Databases,
        curve: CostCurve,
        family: Family | None,
    ) -> None:
        self.backend, self.method, self.databases = backend, method, databases
        self.curve, self.family = curve, family

    def row(self, category: str, prompt: list[int], generation: Generation, repeats: int) -> Row:
        """The live run of a prompt, then pairs that start from where it did."""
        before, known = self.curve.copy(), self.databases.for_measuring()
        own = self.databases.for_measuring()
        first = self.drafted(prompt, generation, own, self.curve)
        pairs = []
        for repeat in range(repeats):
            pair: dict[bool, Metrics] = {}
            for plain in (True, False) if repeat % 2 else (False, True):
                fresh = known.for_measuring()
                pair[plain] = summarise(
                    self.plain(prompt, generation)
                    if plain
                    else self.drafted(prompt, generation, fresh, before.copy())
                )
            pairs.append(pair)
        self.databases.calibration = own.calibration
        said = [token.id for token in first.tokens]
        self.databases.learned.finish([*prompt, *said], len(said))
        ratio = median(pair[True].seconds / pair[False].seconds for pair in pairs)
        steps = first.steps
        plain_steps = sum(not step.proposed for step in steps)
        live = live_speedup(first)
        return Row(category, len(said), len(said) / len(steps), plain_steps, live, ratio)

    def plain(self, prompt: list[int], generation: Generation) -> Run:
        """A plain run from nothing."""
        return self.answer(prompt, generation, METHODS["plain"], Databases(), None)

    def drafted(
        self, prompt: list[int], generation: Generation, databases: Databases, curve: CostCurve
    ) -> Run:
        """A drafted run from nothing."""
        return self.answer(prompt, generation, self.method, databases, curve)

    def answer(
        self,
        prompt: list[int],
        generation: Generation,
        method: Method,
        databases: Databases,
        curve: CostCurve | None,
    ) -> Run:
        """One answer. It finds no look-up remembered that another has paid for."""
        if isinstance(self.databases.statistics, StatisticsTable):
            self.databases.statistics.forget_look_ups()
        drafts = tuple(self.family.drafts.values()) if self.family else ()
        drafters = method.drafters(databases, self.family, generation.sampling, target=self.backend)
        return decoded(
            self.backend, prompt, method, drafters, generation, costs=curve, drafts=drafts
        )


def live_speedup(run: Run) -> float:
    """What a run says of itself: plain seconds over those that it took, prompt and all."""
    figures = summarise(run)
    plain = sum(step.plain_seconds or 0.0 for step in run.steps)
    prompt = figures.plain_prefill_seconds or figures.prefill_seconds
    return (plain + prompt) / figures.seconds


def show(record: Record, rows: Sequence[Row]) -> None:
    """Print the table."""
    print(
        f"{headline(record)}\n{record['method']}, up to {record['max_new_tokens']} tokens, "
        f"T={record['temperature']:g}, the last {record['hot']} prompts T={HOT:g}\n"
    )
    print(
        f"{'prompt':18}{'tokens':>8}{'tok/step':>10}{'plain steps':>13}{'live':>8}{'measured':>10}"
        f"{'off by':>9}"
    )
    for row in rows:
        print(
            f"{row.category:18}{row.tokens:8}{row.tokens_per_forward:10.2f}{row.plain_steps:13}"
            f"{row.live:7.2f}x{row.measured:9.2f}x{row.difference:9.1%}"
        )
    off = [abs(row.difference) for row in rows]
    print(f"\noff by {median(off):.1%} in the median, by {max(off):.1%} at most")
