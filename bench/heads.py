"""A model's head beside its databases: each alone, the head at fixed depths, and both in one tree.

Every method answers the same prompts in one process, in rotated order, at each temperature; peers
of the same kind of model run beside them where they can. `shuffled` is the merged method with a
head that is as sure as the real one and always of other tokens: what a bad head costs. Speeds are
of whole answers, as everywhere (bench/speed.py). The bars that a head has to clear are in BARS; of
each it is said what was measured, and whether that is enough.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from bench.measure import Result, measure
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    kind_of,
    load_model,
    open_databases,
    print_record,
)
from bench.peer import Peer
from bench.peers import PEERS, PLAIN, made_peers, obstacle, program_versions
from bench.prompts import prepared, questions_of
from bench.speed import add_gaps, categories, speed, summary, times, verdict
from engine.backends.base import Backend, BackendInfo
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.heads.base import Guess, Head, HeadInfo
from engine.hsd.family import Family
from engine.methods import FIXED, Method, method_named, no_head
from engine.settings import Sampling
from engine.types import HEAD

DATABASES, ALONE, MERGED, SHUFFLED = "hd", "head", "hd+head", "shuffled"
DEPTHS = "1,2,3,4,6"
TEMPERATURES = "0,0.7"
OVER_EACH, NEVER_BELOW = 1.15, 0.97
"""The merged tree's speed over that of either alone, at least, and anybody's over plain."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench heads`."""
    add_run_arguments(parser)
    add = parser.add_argument
    add("--depths", default=DEPTHS, help="the fixed depths, comma between (default: %(default)s)")
    add("--temperatures", default=TEMPERATURES, help="comma between (default: %(default)s)")
    add("--peers", help="comma between; default: those that run here, '' for none")
    add("--assistant", help="the draft model of the peer 'assisted' (the embedded model has one)")
    parser.set_defaults(limit=39)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_run(options)
    depths, temperatures = numbers(options.depths, int), numbers(options.temperatures, float)
    questions, peers = questions_of(options), peers_of(options)
    backend = load_model(options.model, options)
    if missing := no_head(backend.info):
        raise SettingError(missing)
    prompts = prepared(backend, options, questions)
    head = backend.info.head
    assert head is not None
    fixed = [f"{FIXED}{depth}" for depth in depths if depth <= head.depth]
    names = ["plain", DATABASES, *fixed, ALONE, MERGED, SHUFFLED, *peers]
    record = conditions(backend, options) | {
        "bench": "heads",
        "head": {"name": head.name, "depth": head.depth, "parameters": head.parameters},
        "programs": program_versions(names),
        "prompts": len(prompts),
        "runs": {},
    }
    curve = measure_costs(backend)
    print(f"{headline(record)}\n{head.name} head, {len(prompts)} prompts\n")
    for temperature in temperatures:
        options.temperature = temperature
        with ExitStack() as stack:
            results = answered(backend, names, prompts, curve, options, stack)
        found = figures(results, temperature)
        sampling = generation_of(options).sampling
        add_gaps(backend, found["methods"], results, [tokens for _, tokens in prompts], sampling)
        record["runs"][f"{temperature:g}"] = found
        show(temperature, found)
    print_record(record, options.save)


def numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    """The numbers of a list. Raises SettingError for what is none, or below zero."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"{text!r} is no list of numbers. Write them as in 1,2,3.") from error
    if min(found) < 0:
        raise SettingError(f"{text!r} has a number below zero.")
    return found


def peers_of(options: argparse.Namespace) -> list[str]:
    """The peers to run. Raises SettingError for one that is none, or cannot run."""
    known = PEERS[kind_of(options.model)]
    if options.peers is None:
        return [name for name in known if name not in PLAIN and not obstacle(name, options)]
    names = [name.strip() for name in options.peers.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SettingError(f"There is no peer {name!r} here. Choose from: {', '.join(known)}.")
        if problem := obstacle(name, options):
            raise SettingError(f"The peer {name!r} cannot run, as {problem}.")
    return names


def answered(
    backend: Backend,
    names: Sequence[str],
    prompts: Sequence[tuple[str, list[int]]],
    curve: CostCurve,
    options: argparse.Namespace,
    stack: ExitStack,
) -> dict[str, list[Result]]:
    """Every method on every prompt."""
    methods: dict[str, Method | Peer] = dict(made_peers(names, backend, options, stack))
    for name in names:
        if name == SHUFFLED:
            methods[name] = ShuffledMethod.of(method_named(MERGED))
        elif name not in methods:
            methods[name] = method_named(name)
    methods = {name: methods[name] for name in names}
    databases = open_databases(backend, methods, options.statistics, stack)
    generation = generation_of(options)
    return measure(backend, databases, methods, prompts, generation, options.repeats, curve)


# a head that is wrong


class ShuffledGuess:
    """A guess with its tokens exchanged, each for the one half the vocabulary away."""

    def __init__(self, guess: Guess, size: int) -> None:
        self.guess, self.size = guess, size

    def other(self, token: int) -> int:
        return (token + self.size // 2) % self.size

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        return [(self.other(token), chance) for token, chance in self.guess.likeliest(count)]

    def probability(self, token: int) -> float:
        return self.guess.probability((token - self.size // 2) % self.size)

    def draw(self, position: int, sampling: Sampling) -> int:
        return self.other(self.guess.draw(position, sampling))


class ShuffledHead:
    """A head whose guesses are shuffled: it takes what the real one takes."""

    def __init__(self, head: Head, size: int) -> None:
        self.head, self.size = head, size
        self.info: HeadInfo = head.info
        self.listen, self.forget = head.listen, head.forget

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> Guess | None:
        guess = self.head.start(tokens, sampling, cancelled)
        return None if guess is None else ShuffledGuess(guess, self.size)

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Guess]:
        guesses = self.head.extend(parents, tokens)
        return [ShuffledGuess(guess, self.size) for guess in guesses]


@dataclass(frozen=True, slots=True)
class Wearing:
    """A backend with another head, as far as methods look at it."""

    info: BackendInfo
    head: Head


class ShuffledMethod(Method):
    """A method that is given a shuffled head."""

    @classmethod
    def of(cls, method: Method) -> "ShuffledMethod":
        """The same with such a head."""
        drafting, databases = method.drafting, method.databases
        return cls(SHUFFLED, "A bad head", drafting, databases, head=method.head)

    def drafters(
        self,
        databases: Databases,
        family: Family | None = None,
        sampling: Sampling | None = None,
        cancelled: Callable[[], bool] = never,
        target: Any = None,
    ) -> list[Drafter]:
        """Its drafters, for a target with a shuffled head."""
        bad = Wearing(target.info, ShuffledHead(target.head, target.info.vocabulary_size))
        real = replace(method_named(MERGED), drafting=self.drafting)
        return real.drafters(databases, family, sampling, cancelled, bad)  # type: ignore[arg-type]


# figures


def figures(results: dict[str, list[Result]], temperature: float) -> Record:
    """What came of one temperature."""
    found = {
        name: summary(name, results, temperature) | head_figures(own)
        for name, own in results.items()
    }
    by_category = dict(categories(results, temperature))
    fixed = [name for name in results if name.startswith(FIXED)]
    best = max(fixed, key=lambda name: speed(results[name])) if fixed else ALONE
    return {
        "methods": found,
        "categories": by_category,
        "best_fixed": best,
        "bars": dict(bars(results, by_category, best)),
    }


def head_figures(own: Sequence[Result]) -> Record:
    """How often a head was called, and how many of its tokens were kept at each depth."""
    steps = [step for result in own if result.run for step in result.run.steps]
    calls = [step.levels[HEAD][0] for step in steps if HEAD in step.levels]
    drafted = sum(step.proposed.get(HEAD, 0) for step in steps)
    if not steps or not (calls or drafted):
        return {}
    depth = max(len(step.by_depth) for step in steps)
    at = [[step.by_depth[d] for step in steps if len(step.by_depth) > d] for d in range(depth)]
    kept = [sum(k for _, k in each) for each in at]
    reached = [sum(n > 0 for n, _ in at[0]), *kept]
    return {
        "head_calls_per_step": sum(calls) / len(steps),
        "head_asked": len(calls) / len(steps),
        "head_drafted": drafted,
        "head_accepted": sum(step.accepted.get(HEAD, 0) for step in steps),
        "kept_of_reached": [round(k / r, 3) for k, r in zip(kept, reached, strict=False) if r],
    }


def bars(
    results: Mapping[str, Sequence[Result]],
    by_category: Mapping[str, Mapping[str, float | None]],
    best: str,
) -> Iterator[tuple[str, Record]]:
    """What has to be reached, and what was."""
    merged = speed(results[MERGED])

    def bar(measured: float, least: float) -> Record:
        return {"measured": measured, "least": least, "reached": measured >= least}

    yield "merged over databases", bar(merged / speed(results[DATABASES]), OVER_EACH)
    yield f"merged over {best}", bar(merged / speed(results[best]), OVER_EACH)
    plain = {category: over_plain(results, MERGED, category) for category in by_category}
    yield "merged over plain, least category", bar(min(plain.values()), NEVER_BELOW)
    yield (
        "bad head over plain",
        bar(speed(results[SHUFFLED]) / speed(results["plain"]), NEVER_BELOW),
    )
    yield (
        "bad head over databases",
        bar(speed(results[SHUFFLED]) / speed(results[DATABASES]), NEVER_BELOW),
    )


def over_plain(results: Mapping[str, Sequence[Result]], name: str, category: str) -> float:
    """A method's speed over plain decoding in one category."""
    own, plain = (
        [result for result in results[each] if result.category == category]
        for each in (name, "plain")
    )
    return speed(own) / speed(plain)


def show(temperature: float, found: Record) -> None:
    """Print the tables of one temperature."""
    methods = found["methods"]
    wide = max(14, *(len(name) + 2 for name in methods))
    print(
        f"T={temperature:g}\n{'method':{wide}}{'tok/s':>8}{'speedup':>9}{'decode':>8}"
        f"{'tok/step':>10}{'calls':>7}{'asked':>7}{'draft %':>9}  same text  kept by depth"
    )
    for name, f in methods.items():
        calls = (
            f"{f['head_calls_per_step']:7.2f}{f['head_asked']:7.0%}"
            if "head_asked" in f
            else " " * 14
        )
        drafted = f"{f['draft_share']:9.1%}" if "draft_share" in f else " " * 9
        kept = ", ".join(f"{share:.0%}" for share in f.get("kept_of_reached", [])[:6])
        print(
            f"{name:{wide}}{f['tokens_per_second']:8.1f}{times(f['speedup']):>9}"
            f"{times(f['decode_speedup']):>8}{f['mean_acceptance_length']:10.2f}{calls}{drafted}"
            f"  {verdict(f):9}  {kept}"
        )
    print(f"\n{'category':18}" + "".join(f"{name:>{wide}}" for name in methods))
    for category, speedups in found["categories"].items():
        print(f"{category:18}" + "".join(f"{times(value):>{wide}}" for value in speedups.values()))
    print()
    for name, bar in found["bars"].items():
        said = "reached" if bar["reached"] else "NOT reached"
        print(f"{name}: {bar['measured']:.2f}x, at least {bar['least']:.2f}x: {said}")
    print()
