"""Profiling: how well the models of a family draft for each other, and what that costs here.

The target answers prompts plainly. Every draft model is then asked, along the answers, what it
would have said: one forward over an answer tells that of all its positions. How well one draft
model drafts for another is seen on texts of the upper one: at intervals it goes on from where the
target was, for a few tokens. A round of verification begins where the one before it ended, so
survival is taken over the places where rounds would begin, not over all: easy stretches are passed
in few rounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from statistics import median
from time import perf_counter, time
from typing import NamedTuple

import numpy as np

from engine.backends.base import Backend, Scores
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import SURPRISE, CostCurve, measure_costs
from engine.errors import Cancelled
from engine.hsd.profile import ModelProfile, Pair, Profile, Rounds
from engine.hsd.stack import LevelDrafter
from engine.sampling import Floats
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import Rule, Step
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
PLAIN = Drafting(tiers=(), nodes=0)
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


class Profiler:
    """One profile in the making; `run` yields the share that is done, `profile` is there last.

    `databases` makes the drafters of an answer by the databases, where these are to be measured,
    for how it is drawn.
    """

    def __init__(
        self,
        target: Backend,
        drafts: Mapping[str, Backend],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        databases: Callable[[Sampling], Sequence[Drafter]] | None = None,
        tokens: int = TOKENS,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.models = {**drafts, target.info.name: target}
        self.names, self.target = list(self.models), target.info.name
        self.prompts, self.sampling, self.tokens = prompts, sampling, tokens
        self.databases, self.cancelled = databases, cancelled
        self.vocabulary = min(model.info.vocabulary_size for model in self.models.values())
        indices = range(len(self.models))
        self.judged = {(i, j): Judged() for j in indices for i in range(j)}
        self.curves: dict[str, CostCurve] = {}
        self.rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in self.names}
        """(forward, everything else) seconds of rounds without a draft, per model."""
        self.choices: dict[str, list[float]] = {name: [] for name in self.names}
        self.steps: dict[str, list[Step]] = {name: [] for name in self.names}
        self.profile: Profile | None = None

    def run(self) -> Iterator[float]:
        """Measure everything. Raises Cancelled when `cancelled()` turns true."""
        parts = len(self.names) + len(self.prompts) * (2 if self.databases else 1)
        done = 0
        for name, backend in self.models.items():
            self.check()
            self.curves[name] = measure_costs(backend, seconds=1.0)
            done += 1
            yield done / parts
        for number, prompt in enumerate(self.prompts):
            sampling = replace(self.sampling, seed=self.sampling.seed + number)
            answer = self.answer(prompt, sampling)
            if answer:
                self.judge_target(prompt, answer, sampling)
                self.judge_drafts(prompt, answer, sampling)
            done += 1
            yield done / parts
            if self.databases is not None:
                self.draft_from_databases(prompt, sampling)
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
        """The target's plain answer; its steps tell what a round costs around the forward."""
        backend, generation = self.models[self.target], Generation(sampling, self.tokens)
        found: list[int] = []
        for event in decode(backend, prompt, (), generation, PLAIN, self.cancelled):
            if isinstance(event, Step) and event.tokens:
                found += [token.id for token in event.tokens]
                rest = event.sample_seconds + event.other_seconds
                self.rounds[self.target].append((event.verify_seconds, rest))
                self.choices[self.target].append(event.sample_seconds)
        self.check()
        return found[: self.readable(prompt, found)]

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
        for above, name in enumerate(self.names[:-1]):
            level = LevelDrafter(
                name,
                self.models[name],
                BRANCH,
                sampling,
                Match(),
                self.vocabulary,
                cancelled=self.cancelled,
            )
            for at in range(0, len(answer), STRIDE if above else STRIDE * BRANCH):
                self.check()
                context = [*prompt, *answer[:at]]
                branch = self.branch(name, level, context)
                if not above or not branch:
                    continue
                upper = self.scores(name, context, branch, sampling)
                for below, lower in enumerate(self.names[:above]):
                    scores = self.scores(lower, context, branch, sampling)
                    judge(self.judged[below, above], scores, upper, branch)

    def branch(self, name: str, level: LevelDrafter, context: Sequence[int]) -> list[int]:
        """What a draft model says next; its first rounds are timed, as in a stack."""
        level.observe(context, len(context))
        # In a stack its weights have left the processor's caches while the target computed.
        target = self.models[self.target]
        self.read(target, context)
        target.score(Tree(context[-1]), level.sampling)
        target.accept(())
        clock = perf_counter()
        first = self.grown(level, context, ROUND)
        spent = perf_counter() - clock
        if first:
            forward = self.curves[name].seconds(0)
            self.rounds[name].append((forward, max(0.0, spent / len(first) - forward)))
        if len(first) < ROUND:
            return first
        return first + self.grown(level, [*context, *first], BRANCH - ROUND)

    def grown(self, level: LevelDrafter, context: Sequence[int], tokens: int) -> list[int]:
        """The next tokens by a draft model, at most so many."""
        tree, level.batch = Tree(context[-1]), tokens
        level.grow(tree, context, Budget(Drafting(), tokens, self.vocabulary))
        return list(tree.path(len(tree)))

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

    def draft_from_databases(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Every model's own answer with the databases drafting for it."""
        assert self.databases is not None
        generation = Generation(sampling, self.tokens)
        for name, backend in self.models.items():
            self.check()
            if len(prompt) >= backend.info.context_length:
                continue
            costs = self.curves[name].fresh()
            drafters = self.databases(sampling)
            events = decode(
                backend, prompt, drafters, generation, Drafting(), self.cancelled, costs
            )
            self.steps[name] += [e for e in events if isinstance(e, Step) and e.tokens]

    def result(self) -> Profile:
        """The profile, from everything that was seen."""
        self.check()
        models = tuple(self.model(name) for name in self.names)
        pairs = {levels: judged.pair() for levels, judged in self.judged.items()}
        last = len(self.names) - 1
        positions = len(self.judged[0, last].distances) if last else 0
        sampling = {name: getattr(self.sampling, name) for name in SAMPLER}
        return Profile(models, pairs, sampling, positions, time())

    def model(self, name: str) -> ModelProfile:
        """One model's costs: its curve at the pace of real rounds, and what goes on around it."""
        info, curve = self.models[name].info, self.curves[name]
        forward, around = curve.seconds(0), 0.0
        if self.rounds[name]:
            forward, around = (median(times) for times in zip(*self.rounds[name], strict=True))
        return ModelProfile(
            name,
            info.fingerprint,
            info.parameters,
            info.memory_bytes,
            {size: seconds + around for size, seconds in paced(curve.points, forward).items()},
            median(self.choices[name]) if self.choices[name] else 0.0,
            rounds_of(self.steps[name]),
        )


def paced(points: Mapping[int, float], forward: float) -> dict[int, float]:
    """A cost curve at the pace of real forwards, of which one without drafts takes `forward`.

    More rows never take less: where a curve says so, the machine hiccuped while it was measured.
    """
    pace = min(max(forward / points[0], 1 / SURPRISE), SURPRISE)
    sizes = sorted(points)
    seconds = accumulate((forward, *(pace * points[size] for size in sizes[1:])), max)
    return dict(zip(sizes, seconds, strict=True))


def rounds_of(steps: Sequence[Step]) -> Rounds | None:
    """The law of the tokens of a step, and its mean seconds; None when there was no step."""
    if not steps:
        return None
    longest = max(len(step.tokens) for step in steps)
    counts = np.bincount([len(step.tokens) for step in steps], minlength=longest + 1)
    law = tuple(float(count) for count in counts[1:] / len(steps))
    return Rounds(law, trimmed([step.seconds for step in steps]))


def trimmed(seconds: Sequence[float]) -> float:
    """The mean, with what takes more than twice the median counted as that: a machine hiccups."""
    limit = 2 * median(seconds)
    return sum(min(value, limit) for value in seconds) / len(seconds)
