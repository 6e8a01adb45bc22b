"""What drafting costs per step: the compiled core and the reference in Python, in one run.

Each question is answered with trees of a fixed number of nodes, the model's forward between two
drafts: so drafting finds the processor's caches as in use ("cold"). Then the same steps are drafted
and learned again without the model ("warm"). The order of cores and sizes rotates from question to
question. Past answers are those to the other questions. `share` is drafting and learning over the
whole time of a step.

Last, the trees of many sequences are grown in one call, behind memory that was touched to empty the
caches. What is wanted is in WANTED.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from time import perf_counter

import numpy as np
from tqdm import tqdm

from assets import ASSETS
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    load_model,
    print_record,
)
from bench.prompts import prepared, questions_of
from engine import native
from engine.backends.base import Backend
from engine.decode import decode
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.compiled import Draft, grow_all
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.model import ModelTier
from engine.errors import SettingError
from engine.settings import Drafting, Generation
from engine.tree import Tree
from engine.types import TIERS, Step, Work
from storage.statistics import StatisticsTable, find_table

SIZES = (8, 32)
CORES = ("compiled", "Python")
WANTED: Mapping[int, float] = {8: 60.0, 32: 200.0}
"""Microseconds per step at most, cold, of the compiled core."""
WANTED_MS, WANTED_SHARE = 1.5, 0.02
"""Milliseconds for all sequences in one call, and drafting's part of a step of 8 nodes."""
EVICTED = 64 << 20
"""Bytes that are touched to empty the processor's caches."""
ROUNDS = 20

Steps = list[tuple[float, float]]
"""Seconds of drafting and of learning of each step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench drafting`."""
    add_run_arguments(parser)
    parser.add_argument("--sequences", type=int, default=32, help="grown together in one call")
    parser.set_defaults(limit=4, max_new_tokens=96, temperature=0.7)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_run(options)
    if options.sequences < 1:
        raise SettingError(f"Grow at least one sequence, not {options.sequences}.")
    if native.core is None:
        raise SettingError(f"There is no compiled core: {native.missing}.")
    generation, questions = generation_of(options), questions_of(options)
    backend = load_model(options.model, options)
    prompts = [tokens for _, tokens in prepared(backend, options, questions)]
    with ExitStack() as stack:
        table = table_of(backend, options)
        if table is not None:
            stack.callback(table.close)
            in_memory(table)
        bench = Bench(backend, generation, prompts, table)
        bench.run(options.repeats)
        together = {core: grown_together(bench, core, options.sequences) for core in CORES}
    record = conditions(backend, options) | {
        "bench": "drafting",
        "prompts": len(prompts),
        "steps": {core: {n: figures(bench.found[core, n]) for n in SIZES} for core in CORES},
        "sequences": options.sequences,
        "sequences_ms": {core: round(1e3 * median(found), 3) for core, found in together.items()},
    }
    show(record)
    print_record(record, options.save)


def table_of(backend: Backend, options: argparse.Namespace) -> StatisticsTable | None:
    """The statistics that are asked."""
    if options.statistics:
        return StatisticsTable(options.statistics)
    return find_table(backend.info.tokenizer_fingerprint, ASSETS / "statistics")


def in_memory(table: StatisticsTable) -> None:
    """Have all of it read, as it is soon after a model was loaded."""
    table.in_memory()
    if table.reader is not None:
        table.reader.join()


@contextmanager
def running_on(core: str) -> Iterator[None]:
    """What is made meanwhile is of this core."""
    found = native.core
    native.core = found if core == CORES[0] else None
    try:
        yield
    finally:
        native.core = found


class Clocked:
    """A drafter whose steps are timed: what it drafted, and what it learned from that."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, drafter.name
        self.grown = 0.0
        self.steps: Steps = []

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Draft."""
        clock = perf_counter()
        work = self.drafter.grow(tree, tokens, budget)
        self.grown = perf_counter() - clock
        return work

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn; what comes before the first draft is the prompt."""
        clock = perf_counter()
        self.drafter.observe(tokens, new)
        if self.grown:
            self.steps.append((self.grown, perf_counter() - clock))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


@dataclass
class Found:
    """What was measured of one core and size."""

    cold: Steps = field(default_factory=list)
    warm: Steps = field(default_factory=list)
    seconds: float = 0.0
    """Of all steps, the forwards included."""
    emitted: int = 0


class Bench:
    """The questions with their plain answers, and what was measured on them."""

    def __init__(
        self,
        backend: Backend,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        table: StatisticsTable | None,
    ) -> None:
        self.backend, self.generation, self.prompts = backend, generation, prompts
        self.table = table
        self.answers = [
            [token.id for step in self.steps(prompt, (), 0) for token in step.tokens]
            for prompt in tqdm(prompts, desc="Answers", leave=False)
        ]
        self.found = {each: Found() for each in product(CORES, SIZES)}

    def databases(self, asked: int) -> Databases:
        """Databases that know the answers to the other questions."""
        model = ModelTier()
        for number, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            if number != asked:
                model.finish([*prompt, *answer], len(answer))
        return Databases(model=model, statistics=self.table)

    def hierarchy(self, core: str, asked: int) -> Hierarchy:
        """A drafter for one question."""
        with running_on(core):
            (made,) = self.databases(asked).hierarchy(TIERS, self.generation.sampling)
        assert isinstance(made, Hierarchy)
        return made

    def run(self, repeats: int) -> None:
        """Measure every question with every core and size, in rotated order."""
        entries = [*self.found.items()]
        rounds = [*product(range(repeats), range(len(self.prompts)))]
        for number, (_, asked) in enumerate(tqdm(rounds, desc="Questions", leave=False)):
            turn = number % len(entries)
            for (core, nodes), found in [*entries[turn:], *entries[:turn]]:
                if self.table is not None:
                    self.table.forget_look_ups()
                self.measure(core, nodes, asked, found)

    def measure(self, core: str, nodes: int, asked: int, found: Found) -> None:
        """One answer with the model, and its steps without."""
        prompt = self.prompts[asked]
        clocked = Clocked(self.hierarchy(core, asked))
        emitted = []
        for step in self.steps(prompt, [clocked], nodes):
            found.seconds += step.seconds
            emitted.append([token.id for token in step.tokens])
        found.emitted += sum(map(len, emitted))
        found.cold += clocked.steps
        again, tokens = Clocked(self.hierarchy(core, asked)), list(prompt)
        again.observe(tokens, len(tokens))
        for said in emitted:
            again.grow(Tree(tokens[-1]), tokens, self.budget(nodes))
            tokens += said
            again.observe(tokens, len(said))
        found.warm += again.steps

    def steps(self, prompt: Sequence[int], drafters: Sequence[Drafter], nodes: int) -> list[Step]:
        """The steps of an answer, with trees of so many nodes."""
        drafting = drafting_of(nodes)
        events = decode(self.backend, prompt, drafters, self.generation, drafting)
        return [event for event in events if isinstance(event, Step)]

    def budget(self, nodes: int) -> Budget:
        """A budget as the decode loop makes them, in the middle of an answer."""
        depth = self.generation.max_tokens
        return Budget(drafting_of(nodes), depth, self.backend.info.vocabulary_size)


def drafting_of(nodes: int) -> Drafting:
    """Trees of so many nodes."""
    return Drafting(nodes=nodes, budget="fixed")


def grown_together(bench: Bench, core: str, sequences: int) -> list[float]:
    """Seconds of one call that grows the trees of many sequences, of ROUNDS rounds. Each sequence
    is a question with as many tokens of its answer as make it another one."""
    drafters: list[tuple[Hierarchy, list[int]]] = []
    for number in range(sequences):
        asked = number % len(bench.prompts)
        answer = bench.answers[asked]
        kept = len(answer) * (number // len(bench.prompts) + 1) * len(bench.prompts) // sequences
        tokens = [*bench.prompts[asked], *answer[: max(1, kept - ROUNDS)]]
        drafter = bench.hierarchy(core, asked)
        drafter.observe(tokens, len(tokens))
        drafters.append((drafter, tokens))
    touched = np.zeros(EVICTED, dtype=np.uint8)
    found = []
    for _ in range(ROUNDS):
        drafts: list[Draft] = [
            (drafter, Tree(tokens[-1]), tokens, bench.budget(SIZES[0]))
            for drafter, tokens in drafters
        ]
        touched += 1
        clock = perf_counter()
        grow_all(drafts)
        found.append(perf_counter() - clock)
        for (drafter, tokens), (_, tree, *_) in zip(drafters, drafts, strict=True):
            tokens.append(tree.tokens[1] if len(tree) else tokens[-1])
            drafter.observe(tokens, 1)
    return found


def figures(found: Found) -> dict[str, float]:
    """Medians in microseconds, and drafting's share of all steps."""
    spent = sum(map(sum, found.cold))
    return {
        "steps": len(found.cold),
        **{
            f"{name}_{state}_us": round(1e6 * median(step[part] for step in steps), 1)
            for state, steps in (("cold", found.cold), ("warm", found.warm))
            for part, name in enumerate(("draft", "learn"))
        },
        "step_ms": round(1e3 * found.seconds / max(1, len(found.cold)), 3),
        "tokens_per_step": round(found.emitted / max(1, len(found.cold)), 3),
        "share": round(spent / found.seconds, 5),
    }


def show(record: Record) -> None:
    """Print the tables."""
    print(f"{headline(record)}\n")
    print(
        f"{'core':10}{'nodes':>6}{'draft us, cold':>16}{'warm':>8}{'learn us, cold':>16}{'warm':>8}"
        f"{'step ms':>9}{'share':>8}{'tok/step':>10}"
    )
    for core, sizes in record["steps"].items():
        for nodes, f in sizes.items():
            print(
                f"{core:10}{nodes:6}{f['draft_cold_us']:16.1f}{f['draft_warm_us']:8.1f}"
                f"{f['learn_cold_us']:16.1f}{f['learn_warm_us']:8.1f}{f['step_ms']:9.2f}"
                f"{f['share']:8.1%}{f['tokens_per_step']:10.2f}"
            )
    for core, spent in record["sequences_ms"].items():
        print(f"{core:10} {record['sequences']} sequences in one call: {spent:.2f} ms")
    compiled = record["steps"][CORES[0]]
    print()
    for nodes, most in WANTED.items():
        spent = compiled[nodes]["draft_cold_us"]
        told(f"a draft of {nodes} nodes at most {most:g} us", spent <= most)
    share = compiled[SIZES[0]]["share"]
    told(f"drafting at most {WANTED_SHARE:.0%} of a step", share <= WANTED_SHARE)
    told(
        f"{record['sequences']} sequences at most {WANTED_MS:g} ms",
        record["sequences_ms"][CORES[0]] <= WANTED_MS,
    )


def told(wanted: str, met: bool) -> None:
    """Say whether something wanted was met."""
    print(f"wanted: {wanted}: {'yes' if met else 'NO'}")
