"""Profiling: how well the models of a family draft for each other, and what that costs here.

Costs are those of real rounds. The target answers prompts while draft models take turns, each by
itself for a few steps, nobody among them. So all of them are timed in use, at the load of the same
moment. A model's first step in a row is not counted, as it then reads what was decided meanwhile.
What else may draft, databases or a head, drafts for the target in the same answers, as in a chat,
and for every draft model in half of them.

Acceptance is taken along the answers. One forward over an answer tells what a draft model would
have said at all its positions. How well one draft model drafts for another is seen on texts of the
upper one: at intervals it goes on from where the target was, for a few tokens. A round begins where
the one before it ended, so survival is taken over the places where rounds would begin, not over
all: easy stretches are passed in few rounds.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean, median
from time import perf_counter, time
from typing import NamedTuple

import numpy as np

from engine.backends.base import Backend, Scores
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import CostCurve, measure_costs
from engine.drafting.databases import Databases
from engine.errors import Cancelled
from engine.hsd.planner import DATABASES, HEAD, MERGED, Source
from engine.hsd.profile import ModelProfile, Pair, Profile, Rounds
from engine.hsd.stack import LevelDrafter
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import DRAFT, TIERS, Rule, Step, Work
from engine.verify import Match

TOKENS = 64
"""Tokens of an answer to each prompt."""
STRIDE, BRANCH = 8, 12
"""Every so many tokens a draft model goes on by itself, for so many tokens."""
ROUND = 4
"""Drafted tokens of the rounds that decide over which places survival is taken."""
DEEPEST = 32
"""Survival is measured up to this depth, or to where it is too rare to be seen."""
RAREST = 8
"""The fewest rounds that a survival may rest on."""
TURN = 4
"""Steps that a way to draft has in a row."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
"""What draft models are asked for in turn: so the target is timed over as many nodes."""
STOPPED = "The profile was stopped. What was known before stays."
SAMPLER = ("temperature", "top_k", "top_p", "min_p")
"""The settings that acceptance depends on."""


@dataclass
class Judged:
    """What is known of a pair of models, position by position, text by text.

    `equal` says whether their keyed choices were the same; `kept` is min(1, q / p) of the token
    that the upper one said: its mean is the probability that rejection sampling accepts a draft.
    """

    distances: list[float] = field(default_factory=list)
    equal: list[list[float]] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)

    def pair(self) -> Pair:
        """The figures of the profile."""
        survival: dict[Rule, tuple[float, ...]] = {
            "match": survival_of(self.equal),
            "rejection": survival_of(self.kept),
        }
        return Pair(1.0 - float(np.mean(self.distances or [1.0])), survival)


def survival_of(texts: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, ...]:
    """S_1, S_2, ...: how likely the first k drafts of a round are all accepted.

    `texts` holds the probability of acceptance at each position. Rounds of ROUND drafts are walked
    through every text, from each of the first places. Every S_k follows from S_(k-1) by the rounds
    that reach as far, so that it cannot rise.
    """
    random = Random(seed)
    reached, passed = np.zeros(DEEPEST), np.zeros(DEEPEST)
    rounds = np.zeros(DEEPEST, dtype=int)
    for text in texts:
        for first in range(min(ROUND + 1, len(text))):
            for start in starts(text, first, random):
                share = 1.0
                for depth, accepted in enumerate(text[start : start + DEEPEST]):
                    reached[depth] += share
                    rounds[depth] += share > 0
                    share *= accepted
                    passed[depth] += share
    survival: list[float] = []
    for depth in range(DEEPEST):
        if rounds[depth] < RAREST * (ROUND + 1) or not reached[depth]:
            break
        before = survival[-1] if survival else 1.0
        survival.append(before * min(1.0, float(passed[depth] / reached[depth])))
    return tuple(survival) or (0.0,)


def starts(text: Sequence[float], first: int, random: Random) -> Iterator[int]:
    """Where rounds begin, if the first one begins at `first`."""
    at = first
    while at < len(text):
        yield at
        drafts = text[at : at + ROUND]
        accepted = next((i for i, p in enumerate(drafts) if random.random() >= p), len(drafts))
        at += accepted + 1


class Scored(NamedTuple):
    """What a model thinks of one place: its keyed choice, and the law it drew it from."""

    choice: int
    law: Floats


def judge(
    judged: Judged, lower: Sequence[Scored], upper: Sequence[Scored], text: Sequence[int]
) -> None:
    """Compare two models along a text that the upper one said."""
    equal, kept = [], []
    for low, high, token in zip(lower, upper, text, strict=True):
        size = min(low.law.size, high.law.size)
        overlap = float(np.minimum(low.law[:size], high.law[:size]).sum(dtype=np.float64))
        judged.distances.append(max(0.0, 1.0 - overlap))
        equal.append(float(low.choice == token))
        drafted = float(low.law[token]) if token < low.law.size else 0.0
        said = float(high.law[token]) if token < high.law.size else 0.0
        kept.append(min(1.0, drafted / said) if said else 0.0)
    judged.equal.append(equal)
    judged.kept.append(kept)


@dataclass(frozen=True, slots=True)
class Lowest:
    """What drafts for a model that has no draft model: the databases, its own head, or both.

    Each makes drafters for a model and for how an answer is drawn. `alone` are those of its own
    answers. `below` are those of a stack: what learns from the target's text, and what drafts.
    """

    alone: Callable[[Backend, Sampling], Sequence[Drafter]]
    below: Callable[[Backend, Sampling], tuple[Drafter, Drafter]] | None = None


def lowest_databases(databases: Databases) -> Lowest:
    """The databases; what they learn from a profile leaves no trace."""

    def alone(model: Backend, sampling: Sampling) -> Sequence[Drafter]:
        return databases.for_measuring().hierarchy(TIERS, sampling)

    def below(model: Backend, sampling: Sampling) -> tuple[Drafter, Drafter]:
        own = databases.for_measuring()
        return own.learner(), own.below(sampling)

    return Lowest(alone, below)


Way = tuple[str, Source]
"""A way to draft: a model and what drafts for it, "" for nothing. ("", "") is a plain step."""


class Turns:
    """A drafter that lets draft models draft in turn, each by itself for TURN steps; "" is nobody.

    `taken` says of each step whose turn it was, and whether that was the first in a row.
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
        """Have the model draft whose turn it is, in a batch that was drawn for its turn."""
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
        """All of them read a prompt."""
        for level in self.levels.values():
            level.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


def in_turn(names: Sequence[str], random: Random) -> Iterator[str]:
    """Each of them as often as any other, in an order that is drawn anew every time."""
    while True:
        yield from random.sample(names, len(names))


class Profiler:
    """One profile in the making; `run` yields the share that is done, `profile` is there last.

    `lowest` is what may draft beside draft models.
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
        """The draft models that something can draft for."""
        self.rounds: dict[str, list[tuple[int, float]]] = {name: [] for name in self.names}
        """Drafted tokens and seconds of rounds without what drafts for the model, per model."""
        self.choices: dict[str, list[float]] = {name: [] for name in self.names}
        every: list[Way] = [(name, source) for name in self.names for source in self.lowest]
        self.emitted: dict[Way, list[int]] = {way: [] for way in every}
        self.seconds: dict[Way, list[float]] = {way: [] for way in every}
        """Tokens, and seconds, of rounds for which one of `lowest` drafts."""
        self.lengths: list[int] = []
        """Tokens of each answer."""
        self.profile: Profile | None = None

    def run(self) -> Iterator[float]:
        """Measure everything. Raises Cancelled when `cancelled()` turns true."""
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
        """Stop if the user wants that."""
        if self.cancelled():
            raise Cancelled(STOPPED)

    def read(self, backend: Backend, context: Sequence[int]) -> None:
        """Have a model read a text, unless that is stopped."""
        if not backend.prefill(context, self.cancelled).complete:
            raise Cancelled(STOPPED)

    def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The target's answer, for which draft models take turns; their rounds are timed."""
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
        """A draft model as a level of a stack."""
        model, vocabulary = self.models[name], self.vocabulary
        return LevelDrafter(
            name,
            model,
            BRANCH,
            sampling,
            Match(),
            vocabulary,
            below,
            self.curves[name],
            cancelled=self.cancelled,
        )

    def time(self, step: Step, name: str = "") -> tuple[float, int]:
        """Note what a step of the target took without its drafts; returns the seconds and rounds
        of the draft model of that name, if one drafted.

        Handing its drafts over is the target's. What databases of the target took is in their own
        rounds.
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
        """The steps of a model's answer to a prompt, none where it has no room for one."""
        if len(prompt) >= model.info.context_length:
            return []
        wanted = Generation(sampling, self.tokens)
        events = decode(model, prompt, drafters, wanted, Drafting(), self.cancelled, costs)
        steps = [event for event in events if isinstance(event, Step) and event.tokens]
        self.check()
        return steps

    def answer_alone(self, source: Source, prompt: Sequence[int], sampling: Sampling) -> None:
        """The target's answer once more, with one of `lowest` drafting as it would in a chat."""
        target = self.models[self.target]
        drafters = self.lowest[source].alone(target, sampling)
        for step in self.decoded(
            target, prompt, drafters, sampling, self.curves[self.target].fresh()
        ):
            self.time(step)
            self.emitted[self.target, source].append(len(step.tokens))
            self.seconds[self.target, source].append(step.seconds)

    def readable(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """How many tokens of an answer all models know and have the context for."""
        context = min(model.info.context_length for model in self.models.values())
        unknown = (at for at, token in enumerate(answer) if token >= self.vocabulary)
        return max(0, min(context - len(prompt) - BRANCH, next(unknown, len(answer))))

    def judge_target(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
    ) -> None:
        """What every draft model would have said along the target's answer."""
        scores = {name: self.scores(name, prompt, answer, sampling) for name in self.names}
        last = len(self.names) - 1
        for below in range(last):
            judge(self.judged[below, last], scores[self.names[below]], scores[self.target], answer)

    def judge_drafts(
        self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
    ) -> None:
        """What the smaller draft models would have said where a larger one goes on by itself."""
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
        """A model's choice and law at every place of a text, from one forward."""
        backend = self.models[name]
        self.read(backend, context)
        tree, row = Tree(context[-1]), 0
        for token in text[:-1]:
            row = tree.add(row, token, "")
        found = backend.score(tree, sampling)
        scored = [self.scored(name, found, row) for row in range(len(text))]
        backend.accept(())
        return scored

    def scored(self, name: str, scores: Scores, row: int) -> Scored:
        """One place; what the choice takes is noted for draft models."""
        clock = perf_counter()
        choice = scores.choose(row)
        if name != self.target:
            self.choices[name].append(perf_counter() - clock)
        return Scored(choice, scores.distribution(row))

    def result(self) -> Profile:
        """The profile, from everything that was seen."""
        self.check()
        models = tuple(self.model(name) for name in self.names)
        pairs = {levels: judged.pair() for levels, judged in self.judged.items()}
        last = len(self.names) - 1
        positions = len(self.judged[0, last].distances) if last else 0
        sampling = {name: getattr(self.sampling, name) for name in SAMPLER}
        length = mean(self.lengths) if self.lengths else 0.0
        return Profile(models, pairs, sampling, positions, time(), length)

    def model(self, name: str) -> ModelProfile:
        """One model's costs, and its rounds with what may draft for it."""
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
    """A cost curve as real rounds have it: (drafted tokens, seconds) of each.

    Every size counts as it was timed there. Of what was not, the curve tells: rounds that take more
    do so for what goes on around a forward, and where they take less the machine was busy when the
    curve was made. More rows never take less: where they seem to, their mean counts for both.
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
    """The law of the tokens of a round, and its mean seconds; None when there was no round. Their
    order is kept where they are `ordered`."""
    if not emitted or not seconds:
        return None
    counts = np.bincount(emitted)
    law = tuple(float(count) for count in counts[1:] / len(emitted))
    return Rounds(law, trimmed(seconds), tuple(emitted) if ordered else ())


def trimmed(seconds: Sequence[float]) -> float:
    """The mean, with what takes more than twice the median counted as that: a machine hiccups."""
    limit = 2 * median(seconds)
    return sum(min(value, limit) for value in seconds) / len(seconds)
