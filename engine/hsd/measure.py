"""Profiling: how well the models of a family draft for each other, and what that costs here.

Costs are those of real rounds. The target answers prompts while draft models take turns, each alone
for a few steps, with plain steps among them. Everything is thus timed in real use, at the same
load. The first step of a model's turn is not counted, because it also reads tokens that were
decided before. Other drafters (databases or a head) draft for the target in the same answers, as in
a chat, and for every draft model in half of them.

Acceptance is measured along the answers. One forward over an answer shows what a draft model would
have chosen at all its positions. How well one draft model drafts for another is measured on texts
of the larger one: at intervals it continues for a few tokens from the target's position. Survival
is averaged over the places where rounds would begin, not over all positions, because a round begins
where the one before it ended, and easy stretches are passed in few rounds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from random import Random
from statistics import mean, median
from time import perf_counter, time
from typing import NamedTuple

import numpy as np

from engine.backends.base import Backend, LogitScores
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.controller import PLAIN
from engine.drafting.costs import CostCurve, hull, measure_costs
from engine.drafting.databases import Databases
from engine.errors import Cancelled
from engine.hsd.family import LevelDrafter
from engine.hsd.planner import DATABASES, HEAD, MERGED, Source
from engine.hsd.profile import ModelProfile, Pair, Profile, Rounds
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import DRAFT, TIERS, Rule, Step, Work
from engine.verify import Match

TOKENS = 64
"""Tokens of an answer to each prompt."""
STRIDE, BRANCH = 8, 12
"""Every STRIDE tokens a draft model continues by itself, for BRANCH tokens."""
DEEPEST = 32
"""The greatest depth at which survival is measured, if enough rounds reach it."""
RAREST = 8
"""The fewest rounds of n drafts that get as far as the last one, for S_n to be estimated."""
TURN = 4
"""Consecutive steps of a turn."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""The batches of draft models, at random, so that the target is timed over such numbers of
nodes."""
STOPPED = "The profile was stopped. What was known before stays."
SAMPLER = ("temperature", "top_k", "top_p", "min_p")
"""The settings that acceptance depends on."""


@dataclass
class Judged:
    """The comparison of a pair of models, by text and position.

    `equal` is 1 where their keyed choices were the same, otherwise 0. `ratios` are q / p of the
    tokens that the upper model chose, the lower model's probability divided by its own.
    """

    distances: list[float] = field(default_factory=list)
    equal: list[list[float]] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)

    def pair(self) -> Pair:
        survival: dict[Rule, tuple[float, ...]] = {
            "match": survival_of(self.equal),
            "rejection": survival_of(self.ratios),
        }
        return Pair(1.0 - float(np.mean(self.distances or [1.0])), survival)


def survival_of(texts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """S_1, S_2, ...: what the k-th draft adds to the tokens of a round, at most 1 and never rising:
    the least concave curve above the tokens of rounds of every length.

    `texts` holds for each position what `lasting` takes. Rounds of n drafts are followed through
    every text, all their outcomes at once, from each of the first n + 1 places. They emit 1 + S_1 +
    ... + S_n tokens on average. Every n has rounds of its own, because longer ones pass an easy
    stretch in fewer rounds, so that more of them begin where drafting is hard.
    """
    reached, passed = np.zeros((DEEPEST, DEEPEST)), np.zeros((DEEPEST, DEEPEST))
    depths, drafted = np.arange(1, DEEPEST + 1), np.tri(DEEPEST, DEEPEST + 1, 1)
    for text in texts:
        # Row n - 1: how many rounds of n drafts begin at each place.
        begin = np.zeros((DEEPEST, len(text) + DEEPEST + 1))
        for number in depths[: len(text)]:
            begin[number - 1, : number + 1] = 1.0
        for at in range(len(text)):
            shares = lasting(text[at : at + DEEPEST])
            lasts = drafted * np.pad([1.0, *shares], (0, DEEPEST - len(shares)))
            rounds = begin[:, at, None]
            reached += rounds * lasts[:, :-1] * (depths <= len(shares))
            passed += rounds * lasts[:, 1:]
            begin[:, at + 1 : at + DEEPEST + 2] += rounds * -np.diff(lasts, append=0.0)
    ratios = np.divide(passed, reached, out=np.zeros_like(passed), where=reached > 0)
    emitted = np.tril(ratios.cumprod(axis=1)).sum(axis=1)
    rare = np.flatnonzero(reached.diagonal() < RAREST * (depths + 1))
    known = [0.0, *emitted[: rare[0] if rare.size else DEEPEST]]
    # A length at which rounds happen to begin badly says nothing of longer ones.
    sizes, least = hull(range(len(known)), [-each for each in known])
    smooth = -np.interp(range(len(known)), sizes, least)
    return tuple(np.clip(np.diff(smooth), 0.0, 1.0).tolist()) or (0.0,)


def lasting(ratios: Sequence[float]) -> list[float]:
    """For k = 1, 2, ...: the probability that k drafts were kept in a round that brought the upper
    model's text, given q / p of its tokens: the least product of the first ratios, at most 1.

    A text t is drafted with probability q(t) and k of its tokens are kept with probability w_k
    (engine/verify.py), so the share of p(t) that comes from kept drafts is w_k q(t) / p(t). Where
    drafts have to equal the choice, the ratio is 1 or 0.
    """
    products = accumulate(ratios, mul, initial=1.0)
    return list(accumulate(products, min))[1:]


class Scored(NamedTuple):
    """A model's keyed choice at one place, and the distribution it was drawn from."""

    choice: int
    distribution: Floats


def judge(
    judged: Judged, lower: Sequence[Scored], upper: Sequence[Scored], text: Sequence[int]
) -> None:
    equal, ratios = [], []
    for low, high, token in zip(lower, upper, text, strict=True):
        drafts, targets = low.distribution, high.distribution
        size = min(drafts.size, targets.size)
        overlap = float(np.minimum(drafts[:size], targets[:size]).sum(dtype=np.float64))
        judged.distances.append(max(0.0, 1.0 - overlap))
        equal.append(float(low.choice == token))
        drafted = float(drafts[token]) if token < drafts.size else 0.0
        target = float(targets[token]) if token < targets.size else 0.0
        ratios.append(drafted / target if target else 0.0)
    judged.equal.append(equal)
    judged.ratios.append(ratios)


@dataclass(frozen=True, slots=True)
class Lowest:
    """The drafters of a model that has no draft model: the databases, its own head, or both.

    Both functions create drafters for a model and a sampler. `alone` returns those for answers of
    the model itself; `below` returns those for a stack: one that learns from the target's text, and
    one that drafts.
    """

    alone: Callable[[Backend, Sampling], Sequence[Drafter]]
    below: Callable[[Backend, Sampling], tuple[Drafter, Drafter]] | None = None


def lowest_databases(databases: Databases) -> Lowest:
    """The databases, which keep nothing of what they learn while profiling."""

    def alone(model: Backend, sampling: Sampling) -> Sequence[Drafter]:
        return databases.for_measuring().hierarchy(TIERS, sampling)

    def below(model: Backend, sampling: Sampling) -> tuple[Drafter, Drafter]:
        own = databases.for_measuring()
        return own.learner(), own.below(sampling)

    return Lowest(alone, below)


Way = tuple[str, Source]
"""A way to draft: a model and the source that drafts for it, "" for none."""


class Turns(Drafter):
    """A drafter that lets draft models draft in turn, each alone for TURN steps. In turns of ""
    none drafts.

    `taken` lists for each step whose turn it was, and whether it was the first of the turn.
    """

    name = "turns"

    def __init__(
        self, levels: Mapping[str, LevelDrafter], order: Iterator[str], random: Random
    ) -> None:
        self.levels, self.order, self.random = levels, order, random
        self.turn = ""
        self.batch = self.left = 0
        self.taken: list[tuple[str, bool]] = []

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        if not self.left:
            self.turn, self.batch = next(self.order), self.random.choice(BATCHES)
            self.left = TURN
        self.taken.append((self.turn, self.left == TURN))
        self.left -= 1
        level = self.levels.get(self.turn)
        if level is None:
            return {}
        level.batch = self.batch
        return level.grow(tree, tokens, budget)

    def observe(self, tokens: Sequence[int], new: int) -> None:
        for level in self.levels.values():
            level.observe(tokens, new)


def in_turn(names: Sequence[str], random: Random) -> Iterator[str]:
    while True:
        yield from random.sample(names, len(names))


class Profiler:
    """Measures one profile; `run` yields the share that is done and sets `profile` at its end.

    `lowest` holds the sources that may draft besides draft models.
    """

    def __init__(
        self,
        target: Backend,
        drafts: Mapping[str, Backend],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        lowest: Mapping[Source, Lowest] | None = None,
        tokens: int = TOKENS,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.models = {**drafts, target.info.name: target}
        self.names, self.target = list(self.models), target.info.name
        self.prompts, self.sampling, self.tokens = prompts, sampling, tokens
        self.lowest, self.cancelled = lowest or {}, cancelled
        self.vocabulary = min(model.info.vocabulary_size for model in self.models.values())
        indices = range(len(self.models))
        self.judged = {(i, j): Judged() for j in indices for i in range(j)}
        self.curves: dict[str, CostCurve] = {}
        self.random = Random(sampling.seed)
        self.order = in_turn(["", *drafts], self.random)
        self.below: list[Way] = [
            (name, source)
            for source, found in self.lowest.items()
            for name in drafts
            if found.below is not None
        ]
        """The draft models for which a source can draft."""
        self.rounds: dict[str, list[tuple[int, float]]] = {name: [] for name in self.names}
        """Drafted tokens and seconds of rounds, per model, without the work of its drafters."""
        self.choices: dict[str, list[float]] = {name: [] for name in self.names}
        every: list[Way] = [(name, source) for name in self.names for source in self.lowest]
        self.emitted: dict[Way, list[int]] = {way: [] for way in every}
        self.seconds: dict[Way, list[float]] = {way: [] for way in every}
        """Tokens and seconds of rounds for which one of `lowest` drafts."""
        self.lengths: list[int] = []
        """Tokens of each answer."""
        self.profile: Profile | None = None

    def run(self) -> Iterator[float]:
        parts, done = len(self.names) + len(self.prompts) * 2, 0
        for name, backend in self.models.items():
            self.check()
            self.curves[name] = measure_costs(backend, seconds=1.0)
            done += 1
            yield done / parts
        for number, prompt in enumerate(self.prompts):
            sampling = replace(self.sampling, seed=self.sampling.seed + number)
            answer = self.answer(prompt, sampling)
            done += 1
            yield done / parts
            for source in self.lowest:
                self.answer_alone(source, prompt, sampling)
            for name, source in self.below[number % 2 :: 2]:
                self.answer_below(name, source, prompt, sampling)
            if answer:
                self.judge_target(prompt, answer, sampling)
                self.judge_drafts(prompt, answer, sampling)
            done += 1
            yield done / parts
        self.profile = self.result()

    def check(self) -> None:
        if self.cancelled():
            raise Cancelled(STOPPED)

    def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The target's answer while draft models take turns; their rounds are timed."""
        levels = {name: self.level(name, sampling) for name in self.names[:-1]}
        turns = Turns(levels, self.order, self.random)
        steps = self.decoded(self.models[self.target], prompt, [turns], sampling)
        for step, (name, first) in zip(steps, turns.taken, strict=False):
            seconds, rounds = self.time(step, name)
            if rounds and not first:
                self.rounds[name] += [(0, seconds / rounds)] * rounds
        found = [token.id for step in steps for token in step.tokens]
        self.lengths += [len(found)] if found else []
        return found[: self.readable(prompt, found)]

    def answer_below(
        self, name: str, source: Source, prompt: Sequence[int], sampling: Sampling
    ) -> None:
        """The target's answer with a draft model for which one of `lowest` drafts."""
        below = self.lowest[source].below
        assert below is not None, f"{source} cannot draft for a draft model"
        learner, drafter = below(self.models[name], sampling)
        level = self.level(name, sampling, drafter)
        level.batch = self.random.choice(BATCHES[2:-1])
        for step in self.decoded(self.models[self.target], prompt, [learner, level], sampling):
            seconds, rounds = self.time(step, name)
            self.seconds[name, source] += [seconds / rounds] * rounds if rounds else []
        self.emitted[name, source] += level.rounds

    def level(self, name: str, sampling: Sampling, below: Drafter | None = None) -> LevelDrafter:
        how = sampling, Match(), self.vocabulary, below, self.curves[name], self.cancelled
        return LevelDrafter(name, self.models[name], BRANCH, *how)

    def time(self, step: Step, name: str = "") -> tuple[float, int]:
        """Record the time of a target step without that of its drafts. Returns the seconds and
        rounds of the draft model of that name, if it drafted.

        The target's time includes receiving the drafts of a model. The time of the target's
        databases is part of their own rounds.
        """
        drafting = step.look_ups.get(DRAFT + name, 0.0)
        rounds, _, _ = step.levels.get(DRAFT + name, (0, 0, 0))
        each = step.sample_seconds / len(step.tokens)
        seconds = step.verify_seconds + step.other_seconds + each
        seconds += step.draft_seconds - drafting if rounds else 0.0
        self.rounds[self.target].append((sum(step.proposed.values()), seconds))
        self.choices[self.target].append(each)
        return drafting, rounds

    def decoded(
        self,
        model: Backend,
        prompt: Sequence[int],
        drafters: Sequence[Drafter],
        sampling: Sampling,
        costs: CostCurve | None = None,
    ) -> list[Step]:
        """The steps of a model's answer to a prompt; none if its context has no room for one."""
        if len(prompt) >= model.info.context_length:
            return []
        generation = Generation(sampling, self.tokens)
        events = decode(model, prompt, drafters, generation, Drafting(), self.cancelled, costs)
        steps = [event for event in events if isinstance(event, Step) and event.tokens]
        self.check()
        return steps

    def answer_alone(self, source: Source, prompt: Sequence[int], sampling: Sampling) -> None:
        """The target's answer once more, with one of `lowest` drafting as it would in a chat."""
        target = self.models[self.target]
        drafters = self.lowest[source].alone(target, sampling)
        costs = self.curves[self.target].fresh()
        # Without the plain steps that early answers take to measure plain decoding.
        costs.gate.plain_after = PLAIN
        for step in self.decoded(target, prompt, drafters, sampling, costs):
            self.time(step)
            self.emitted[self.target, source].append(len(step.tokens))
            self.seconds[self.target, source].append(step.seconds)

    def readable(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        context = min(model.info.context_length for model in self.models.values())
        unknown = (at for at, token in enumerate(answer) if token >= self.vocabulary)
        return max(0, min(context - len(prompt) - BRANCH, next(unknown, len(answer))))

    def judge_target(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
    ) -> None:
        scores = {name: self.scores(name, prompt, answer, sampling) for name in self.names}
        last = len(self.names) - 1
        for below in range(last):
            judge(self.judged[below, last], scores[self.names[below]], scores[self.target], answer)

    def judge_drafts(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
    ) -> None:
        """The choices of smaller draft models where a larger one continues by itself."""
        for above, name in enumerate(self.names[1:-1], start=1):
            level = self.level(name, sampling)
            for at in range(0, len(answer), STRIDE):
                self.check()
                context = [*prompt, *answer[:at]]
                tree = Tree(context[-1])
                level.grow(tree, context, Budget(Drafting(), BRANCH, self.vocabulary))
                branch = list(tree.path(len(tree)))
                if not branch:
                    continue
                upper = self.scores(name, context, branch, sampling)
                for below, lower in enumerate(self.names[:above]):
                    scores = self.scores(lower, context, branch, sampling)
                    judge(self.judged[below, above], scores, upper, branch)

    def scores(
        self, name: str, context: Sequence[int], text: Sequence[int], sampling: Sampling
    ) -> list[Scored]:
        backend = self.models[name]
        if not backend.prefill(context, self.cancelled).complete:
            raise Cancelled(STOPPED)
        tree, row = Tree(context[-1]), 0
        for token in text[:-1]:
            row = tree.add(row, token, "")
        found = backend.score(tree, sampling)
        scored = [self.scored(name, found, row) for row in range(len(text))]
        backend.accept(())
        return scored

    def scored(self, name: str, scores: LogitScores, row: int) -> Scored:
        """The choice at one place; its time is recorded for draft models."""
        clock = perf_counter()
        choice = scores.choose(row)
        if name != self.target:
            self.choices[name].append(perf_counter() - clock)
        return Scored(choice, scores.distribution(row))

    def result(self) -> Profile:
        self.check()
        models = tuple(self.model(name) for name in self.names)
        pairs = {levels: judged.pair() for levels, judged in self.judged.items()}
        last = len(self.names) - 1
        positions = len(self.judged[0, last].distances) if last else 0
        sampling = {name: getattr(self.sampling, name) for name in SAMPLER}
        length = mean(self.lengths) if self.lengths else 0.0
        return Profile(models, pairs, sampling, positions, time(), length)

    def model(self, name: str) -> ModelProfile:
        info = self.models[name].info
        lowest: dict[Source, Rounds | None] = {
            source: rounds_of(
                self.emitted[name, source], self.seconds[name, source], name != self.target
            )
            for source in self.lowest
        }
        return ModelProfile(
            name,
            info.fingerprint,
            info.parameters,
            info.memory_bytes,
            timed(self.curves[name].points, self.rounds[name]),
            trimmed(self.choices[name]) if self.choices[name] else 0.0,
            lowest.get(DATABASES),
            lowest.get(HEAD),
            lowest.get(MERGED),
        )


def timed(points: Mapping[int, float], rounds: Sequence[tuple[int, float]]) -> dict[int, float]:
    """A cost curve corrected by real rounds, each given as (drafted tokens, seconds).

    A size that occurred in rounds costs what it took there. Other sizes cost what `points` say,
    shifted by the mean difference if rounds took longer (the work around a forward), or scaled if
    they were faster (the machine was busy while the curve was measured). The result never falls:
    neighbouring sizes that would make it fall get their mean.
    """
    sizes = sorted(points)
    real: dict[int, list[float]] = {size: [] for size in sizes}
    for drafted, seconds in rounds:
        real[sizes[min(bisect_left(sizes, drafted), len(sizes) - 1)]].append(seconds)
    seen = {size: trimmed(found) for size, found in real.items() if found}
    counts = {size: len(found) for size, found in real.items()}
    known = sum(counts[size] * points[size] for size in seen)
    apart = sum(counts[size] * seen[size] for size in seen) - known
    more = max(0.0, apart) / max(1, sum(counts.values()))
    pace = 1 + min(0.0, apart) / known if known else 1.0
    merged: list[tuple[float, int, int]] = []
    for size in sizes:
        value = seen.get(size, pace * points[size] + more)
        weight, covered = max(1, counts[size]), 1
        while merged and merged[-1][0] > value:
            last, before, joined = merged.pop()
            value = (last * before + value * weight) / (before + weight)
            weight, covered = weight + before, covered + joined
        merged.append((value, weight, covered))
    values = [value for value, _, covered in merged for _ in range(covered)]
    return dict(zip(sizes, values, strict=True))


def rounds_of(
    emitted: Sequence[int], seconds: Sequence[float], ordered: bool = False
) -> Rounds | None:
    """The distribution of the tokens of a round, and its mean seconds; None if there was no round.
    With `ordered` the order of the rounds is kept."""
    if not emitted or not seconds:
        return None
    counts = np.bincount(emitted)
    distribution = tuple(float(count) for count in counts[1:] / len(emitted))
    return Rounds(distribution, trimmed(seconds), tuple(emitted) if ordered else ())


def trimmed(seconds: Sequence[float]) -> float:
    """The mean, with outliers counted as twice the median."""
    limit = 2 * median(seconds)
    return sum(min(value, limit) for value in seconds) / len(seconds)
