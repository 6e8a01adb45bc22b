"""What drafting costs per step: the compiled core and the reference in Python, in one run.

Each question is answered with trees of a fixed number of nodes. Between two drafts the model runs a
forward, so drafting finds the processor's caches in use ("cold"). Then the same steps are drafted
and learned again without the model ("warm"). The order of cores and sizes rotates from question to
question. Past answers are the answers to all other questions. `share` is the time of drafting and
learning over the whole time of a step.

Finally, the trees of many sequences are grown in one call, after touching memory to empty the
caches. `choices` measures what choosing a token costs.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import numpy as np
from tqdm import tqdm

from bench.harness import (
    Add,
    Bar,
    Benchmark,
    Measurement,
    Record,
    Setup,
    at_least,
    headline,
    show_bars,
    show_rows,
    statistics_for,
    table,
)
from bench.measure import plain_answers
from engine import native
from engine.backends.base import LogitScores
from engine.compare import rotated
from engine.decode import decode
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.compiled import Draft, grow_all
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import ModelTier
from engine.errors import SettingError
from engine.sampling import Floats
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from engine.types import TIERS, Step, Work
from storage.statistics import StatisticsTable

SIZES = (8, 32)
CORES = ("compiled", "Python")
BARS = (
    Bar("us_8", "us of a compiled draft of 8 nodes, cold", 60, shown="{:.0f}"),
    Bar("us_32", "us of a compiled draft of 32 nodes, cold", 200, shown="{:.0f}"),
    Bar("share", "drafting's share of a step of 8 nodes", 0.02, shown="{:.1%}"),
    Bar("together_ms", "ms of a compiled draft for all sequences in one call", 1.5),
    Bar("together_python_ms", "ms of the same in Python"),
)

EVICTED, ROUNDS = 64 << 20, 20
"""Bytes that are touched to empty the processor's caches; calls that draft for all sequences."""

Answered = tuple[list[int], list[int]]
"""The tokens of a prompt and of its plain answer."""
Make = Callable[[str, int], Hierarchy]
"""Makes the drafter of a core for the question with this number."""
Steps = list[tuple[float, float]]
"""Seconds of drafting and of learning of each step."""


class DraftingCost(Benchmark):
    """What drafting costs per step: the compiled core and the reference in Python, in one run."""

    defaults = {"limit": 4, "max_new_tokens": 96, "temperature": 0.7}

    def add_options(self, add: Add) -> None:
        add("--sequences", type=at_least(1), default=32, help="grown together in one call")

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        if native.core is None:
            raise SettingError(f"There is no compiled core: {native.missing}.")

    def measure(self, setup: Setup) -> Record:
        statistics = opened(setup)
        answers = plain_answers(setup.backend, setup.tokens, setup.generation)
        answered = [*zip(setup.tokens, answers, strict=True)]
        make: Make = partial(hierarchy, answered, statistics, setup.generation.sampling)
        found = {case: Found() for case in product(CORES, SIZES)}
        rounds = [*product(range(setup.options.repeats), range(len(answered)))]
        for number, (_, question) in enumerate(tqdm(rounds, desc="Questions", leave=False)):
            for core, nodes in rotated([*found], number):
                if statistics is not None:
                    statistics.forget_look_ups()
                drafters = Clocked(make(core, question)), Clocked(make(core, question))
                time_case(setup, *drafters, nodes, setup.tokens[question], found[core, nodes])
        steps = [
            {"core": core, "nodes": nodes} | figures(each) for (core, nodes), each in found.items()
        ]
        small, large = (row for row in steps if row["core"] == CORES[0])
        bars = {"us_8": small["draft_cold_us"], "us_32": large["draft_cold_us"]}
        bars |= {"share": small["share"]}
        for name, core in zip(("together_ms", "together_python_ms"), CORES, strict=True):
            bars[name] = together_ms(setup, answered, partial(make, core))
        return {"steps": steps, "sequences": setup.options.sequences, "bars": bars}

    def show(self, record: Record) -> None:
        print(f"{headline(record)}\n")
        columns = {
            "core": "{core}",
            "nodes": "{nodes}",
            "draft us, cold": "{draft_cold_us:.1f}",
            "draft, warm": "{draft_warm_us:.1f}",
            "learn us, cold": "{learn_cold_us:.1f}",
            "learn, warm": "{learn_warm_us:.1f}",
            "step ms": "{step_ms:.2f}",
            "share": "{share:.1%}",
            "tok/step": "{tokens_per_step:.2f}",
        }
        show_rows(record["steps"], columns)
        print()
        show_bars(BARS, record["bars"])


def opened(setup: Setup) -> StatisticsTable | None:
    """The statistics, read completely, as they are soon after a model was loaded."""
    found = statistics_for(setup.backend, setup.options.statistics)
    if found is not None:
        setup.stack.callback(found.close)
        found.in_memory()
        if found.reader is not None:
            found.reader.join()
    return found


@contextmanager
def running_on(core: str) -> Iterator[None]:
    """While entered, new drafters use the core of this name, one of CORES."""
    found = native.core
    native.core = found if core == CORES[0] else None
    try:
        yield
    finally:
        native.core = found


class Clocked:
    """A drafter that measures the time of its drafts and of learning."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name = drafter, drafter.name
        self.grown = 0.0
        self.steps: Steps = []

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        clock = perf_counter()
        work = self.drafter.grow(tree, tokens, budget)
        self.grown = perf_counter() - clock
        return work

    def observe(self, tokens: Sequence[int], new: int) -> None:
        clock = perf_counter()
        self.drafter.observe(tokens, new)
        if self.grown:
            self.steps.append((self.grown, perf_counter() - clock))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


@dataclass
class Found:
    """The measurements of one core and size; `seconds` covers all steps, forwards included."""

    cold: Steps = field(default_factory=list)
    warm: Steps = field(default_factory=list)
    seconds: float = 0.0
    emitted: int = 0


def hierarchy(
    answered: Sequence[Answered],
    statistics: StatisticsTable | None,
    sampling: Sampling,
    core: str,
    question: int,
) -> Hierarchy:
    """A drafter on this core that has learned the answers to all questions but this one."""
    with running_on(core):
        model = ModelTier()
        for prompt, answer in [*answered[:question], *answered[question + 1 :]]:
            model.finish([*prompt, *answer], len(answer))
        (made,) = Databases(model=model, statistics=statistics).hierarchy(TIERS, sampling)
    assert isinstance(made, Hierarchy)
    return made


def time_case(
    setup: Setup, cold: Clocked, warm: Clocked, nodes: int, prompt: list[int], found: Found
) -> None:
    """Answer a prompt with trees of so many nodes, then draft the same steps without the model."""
    generation, drafting = setup.generation, Drafting(nodes=nodes, budget="fixed")
    emitted = []
    for event in decode(setup.backend, prompt, [cold], generation, drafting):
        if isinstance(event, Step):
            found.seconds += event.seconds
            emitted.append([token.id for token in event.tokens])
    found.emitted += sum(map(len, emitted))
    found.cold += cold.steps
    tokens = list(prompt)
    warm.observe(tokens, len(tokens))
    for new in emitted:
        budget = Budget(drafting, generation.max_tokens, setup.backend.info.vocabulary_size)
        warm.grow(Tree(tokens[-1]), tokens, budget)
        tokens += new
        warm.observe(tokens, len(new))
    found.warm += warm.steps


def together_ms(
    setup: Setup, answered: Sequence[Answered], make: Callable[[int], Hierarchy]
) -> float:
    """Milliseconds of one call that grows the trees of many sequences.

    The sequences are questions, each with a different number of tokens of its answer.
    """
    count, drafting = setup.options.sequences, Drafting(nodes=SIZES[0], budget="fixed")
    sequences: list[tuple[Hierarchy, list[int]]] = []
    for number in range(count):
        prompt, answer = answered[number % len(answered)]
        kept = len(answer) * (number // len(answered) + 1) * len(answered) // count
        tokens = [*prompt, *answer[: max(1, kept - ROUNDS)]]
        drafter = make(number % len(answered))
        drafter.observe(tokens, len(tokens))
        sequences.append((drafter, tokens))
    size, depth = setup.backend.info.vocabulary_size, setup.generation.max_tokens
    touched, seconds = np.zeros(EVICTED, dtype=np.uint8), []
    for _ in range(ROUNDS):
        drafts: list[Draft] = [
            (drafter, Tree(tokens[-1]), tokens, Budget(drafting, depth, size))
            for drafter, tokens in sequences
        ]
        touched += 1
        clock = perf_counter()
        grow_all(drafts)
        seconds.append(perf_counter() - clock)
        for (drafter, tokens), (_, tree, *_) in zip(sequences, drafts, strict=True):
            tokens.append(tree.tokens[1] if len(tree) else tokens[-1])
            drafter.observe(tokens, 1)
    return round(1e3 * median(seconds), 3)


def figures(found: Found) -> dict[str, float]:
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


# choosing a token


VOCABULARIES = (32_000, 152_000, 262_144)
SAMPLERS = {
    "T=0": Sampling(0.0),
    "T=0.7": Sampling(0.7),
    "top-k 20": Sampling(0.7, top_k=20),
    "top-p 0.9": Sampling(0.7, top_p=0.9),
    "min-p 0.05": Sampling(0.7, min_p=0.05),
}
SEED, ROWS, STEEPNESS = 0, 60, 1.5
"""Seed and number of the rows; how fast the logarithm of a probability falls with its rank's."""
CHOICE_BARS = (
    Bar("152000", "ms at 152,000 tokens, T=0.7, compiled", 0.15, shown="{:.3f}"),
    Bar("262144", "ms at 262,144 tokens, T=0.7, compiled", 0.25, shown="{:.3f}"),
)


class Choices(Measurement):
    """What choosing a token takes at large vocabularies, compiled and in Python.

    No model is needed: rows of logits are made whose softmax falls with the rank as that of
    language models does. Every row is seen once per sampler, as after a forward. Times are medians
    per emitted token, of the choice and of its probability.
    """

    def record(self, options: argparse.Namespace) -> Record:
        cores = CORES if native.core is not None else CORES[1:]
        found: Record = {}
        for size in VOCABULARIES:
            rows = made_rows(size, ROWS)
            found[str(size)] = {
                name: {core: milliseconds(rows, sampler, core) for core in cores}
                for name, sampler in SAMPLERS.items()
            }
        return {"bench": "choices", "choices": found}

    def show(self, record: Record) -> None:
        print("choice and probability, ms per emitted token: compiled core / Python")
        found = record["choices"]
        rows = [
            [
                f"{int(size):,}",
                *(" / ".join(f"{ms:.3f}" for ms in own[name].values()) for name in own),
            ]
            for size, own in found.items()
        ]
        table(("vocabulary", *SAMPLERS), rows)
        print()
        compiled = {size: own["T=0.7"].get(CORES[0]) for size, own in found.items()}
        show_bars(CHOICE_BARS if native.core is not None else (), compiled)


def made_rows(vocabulary: int, count: int) -> list[Floats]:
    """Rows of logits that fall with the rank, with noise, in a random order of tokens."""
    stream = np.random.default_rng((SEED, vocabulary))
    falling = -STEEPNESS * np.log(np.arange(1, vocabulary + 1))
    noisy = falling + stream.normal(size=(count, vocabulary))
    return [stream.permutation(row).astype(np.float32) for row in noisy]


def milliseconds(rows: Sequence[Floats], sampler: Sampling, core: str) -> float:
    seconds = []
    with running_on(core):
        scores = LogitScores(rows.__getitem__, range(len(rows)), sampler)
        for row in range(len(rows)):
            clock = perf_counter()
            scores.probability(row, scores.choose(row))
            seconds.append(perf_counter() - clock)
    return 1e3 * median(seconds)
