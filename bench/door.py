"""What the engine's door costs: the same answers decoded directly, in this process, and in another.

Three ways, in rotated order, from nothing each time: `decode()` called directly; the door in this
process (engine/local.py); the door of an engine process (engine/remote.py). All start from the same
cost curve and the same empty databases. Times are wall times as the caller sees them, from the
request to the last event.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from assets import ASSETS
from bench.options import (
    SHORT,
    Record,
    add_run_arguments,
    check_run,
    generation_of,
    print_record,
    runtime_of,
)
from bench.prompts import prepared, questions_of
from engine.compare import cold
from engine.decode import decode
from engine.drafting.base import NgramTable
from engine.drafting.databases import Databases
from engine.engine import Engine, Load, Measured, Request, WantedCosts, answered, unknown
from engine.loaded import Costs
from engine.local import Local
from engine.methods import Method, method_named
from engine.metrics import summarise
from engine.remote import Remote
from engine.runs import collected
from engine.settings import Generation
from engine.types import NO_RUN, Learned, Prefill, Run, Step
from storage.statistics import open_table

WAYS = ("direct", "door", "process")
Answer = Callable[[list[int], Method, Generation], tuple[Run, float]]
"""Decodes a prompt: the run, and the seconds as seen from here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench door`."""
    add_run_arguments(parser)
    parser.add_argument("--methods", default="plain,hd", help="comma between")


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_run(options)
    generation, questions = generation_of(options), questions_of(options)
    methods = [method_named(name) for name in options.methods.split(",")]
    source = str(SHORT.get(options.model, options.model))
    opener = partial(open_table, (ASSETS / "statistics",))
    with ExitStack() as stack:
        local = Local(opener)
        stack.callback(local.close)
        remote = Remote(partial(Local, opener))
        stack.callback(remote.close)
        wanted = Load(source, runtime_of(options))
        load(local, wanted, None)
        load(remote, wanted, local.loaded.costs)
        backend = local.loaded.backend
        prompts = [tokens for _, tokens in prepared(backend, options, questions)]
        ways: dict[str, Answer] = {
            "direct": partial(direct, local),
            "door": partial(through, local),
            "process": partial(through, remote),
        }
        found = measure(ways, methods, prompts, generation, options.repeats)
    record: Record = {"model": Path(source).name, "prompts": len(prompts)}
    record["methods"] = {name: figures(rows) for name, rows in found.items()}
    show(record)
    print_record(record, options.save)


def load(engine: Engine, wanted: Load, costs: Costs | None) -> None:
    """Load the model, with what its forwards are known to cost."""

    def reply(asked: WantedCosts) -> Costs | None:
        return costs if isinstance(asked, WantedCosts) else unknown(asked)

    for _ in answered(engine.load(wanted), reply):
        pass


def direct(
    local: Local, prompt: list[int], method: Method, generation: Generation
) -> tuple[Run, float]:
    """The loop itself, as `bench speed` calls it."""
    loaded, table = local.loaded, local.table
    drafters = method.drafters(fresh(table), None, generation.sampling, target=loaded.backend)
    curve = loaded.copy_of(method) if drafters else None
    cold((loaded.backend,))
    start = perf_counter()
    events = decode(loaded.backend, prompt, drafters, generation, method.drafting, costs=curve)
    return told(events, start)


def fresh(table: NgramTable | None) -> Databases:
    """Databases that know nothing but the statistics."""
    return Databases(statistics=table).for_measuring()


def through(
    engine: Engine, prompt: list[int], method: Method, generation: Generation
) -> tuple[Run, float]:
    """The same through a door."""
    request = Request((), tuple(prompt), generation, method, measured=Measured())
    start = perf_counter()
    return told(answered(engine.generate(request), unknown), start)


def told(events: Iterator[object], start: float) -> tuple[Run, float]:
    """What the events of a run come to."""
    run = collected(NO_RUN, (e for e in events if isinstance(e, Prefill | Step | Learned)))
    return run, perf_counter() - start


@dataclass
class Runs:
    """The repeats of one prompt in one way: seconds as seen, the engine's own, and the tokens."""

    seen: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


Row = dict[str, Runs]
"""Of one prompt, by way."""


def measure(
    ways: dict[str, Answer],
    methods: list[Method],
    prompts: list[list[int]],
    generation: Generation,
    repeats: int,
) -> dict[str, list[Row]]:
    """Every method on every prompt in every way, the order rotated."""
    short = replace(generation, max_tokens=8)
    for answer in ways.values():
        for method in methods:
            answer(prompts[0], method, short)
    found: dict[str, list[Row]] = {method.name: [] for method in methods}
    for number, prompt in enumerate(prompts):
        for method in methods:
            row: Row = {way: Runs() for way in ways}
            for repeat in range(repeats):
                turn = (number + repeat) % len(ways)
                for way in [*ways][turn:] + [*ways][:turn]:
                    run, seconds = ways[way](prompt, method, generation)
                    row[way].seen.append(seconds)
                    row[way].own.append(summarise(run).seconds)
                    row[way].tokens.append([token.id for token in run.tokens])
            found[method.name].append(row)
    return found


def figures(rows: list[Row]) -> Record:
    """One method's speeds in every way, and over the direct one; the median over prompts."""

    def speeds(way: str, own: bool = False) -> list[float]:
        runs = [row[way] for row in rows]
        return [len(r.tokens[0]) / median(r.own if own else r.seen) for r in runs]

    said = [(row["direct"].tokens[0], row[way].tokens) for row in rows for way in WAYS]
    same = all(tokens == first for first, repeats in said for tokens in repeats)
    result: Record = {"identical": same}
    for way in WAYS:
        seen, own = speeds(way), speeds(way, own=True)
        result[way] = {
            "tokens_per_second": median(seen),
            "engine_tokens_per_second": median(own),
            "over_direct": median(a / b for a, b in zip(seen, speeds("direct"), strict=True)),
        }
    return result


def show(record: Record) -> None:
    """Print the table."""
    print(f"{record['model']}, {record['prompts']} prompts; tokens/s as the caller sees them\n")
    print(f"{'method':10}{'way':10}{'tok/s':>8}{'engine':>8}{'over direct':>13}  same text")
    for name, found in record["methods"].items():
        for way in WAYS:
            f = found[way]
            print(
                f"{name:10}{way:10}{f['tokens_per_second']:8.1f}"
                f"{f['engine_tokens_per_second']:8.1f}{f['over_direct']:12.3f}x"
                f"  {'yes' if found['identical'] else 'NO'}"
            )
