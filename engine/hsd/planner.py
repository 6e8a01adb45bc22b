"""Plans which draft models to stack, and how many tokens each proposes, for the lowest latency.

Every model collects a minimum batch of tokens and passes it up. The next model verifies the tokens
that it receives, until it has a batch of its own; the target verifies and emits (hierarchical
speculative decoding, arXiv 2510.19705). The cost of a plan per token is computed from a measured
profile in two forms, both derived for this project:

- exact: the distribution of the number of tokens that every level proposes, by dynamic programming;
- path: every batch is assumed to have its minimum size. A level's latency is then a non-decreasing
  function of the latency below it, and as the graph of models has no cycle, one forward pass finds
  its shortest path.

The path form is some per cent too low, or more if costs jump, because batches may exceed their
minimum. Plans are therefore found in the path form, then improved and compared in the exact form.

Observed answers correct both forms, with one factor per stack (engine/hsd/profile.py). Within a
stack this changes no order, so the best batches stay the same, but another stack may become the
best. All stacks are therefore compared: about a thousand with eight draft models.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import SettingError
from engine.hsd.profile import Outcome, Pair, Profile
from engine.types import DRAFT, Rule, Step

DATABASES: Literal["databases"] = "databases"
HEAD: Literal["head"] = "head"
MERGED: Literal["databases+head"] = "databases+head"
Source = Literal["", "databases", "head", "databases+head"]
"""The drafter of the lowest model of a plan: none, the databases, its own head, or both."""
NAMES: dict[Source, str] = {
    DATABASES: "databases",
    HEAD: "built-in head",
    MERGED: "databases and built-in head",
}
"""The sources as sentences name them."""
SOURCES: dict[Source, tuple[bool, bool]] = {
    "": (False, False),
    DATABASES: (True, False),
    HEAD: (False, True),
    MERGED: (True, True),
}
"""For each source, whether the databases draft, and whether the head does."""
PLAIN = "plain"
LONGEST = 32
"""The largest batch of a model."""
START = 4
"""The batch from which the search for the best one starts."""
HOPELESS = 1.25
"""Plans that take this many times as long as the best one are not polished."""
POLISHED = 8
"""The most plans that are polished, the best ones."""

Distribution = NDArray[np.float64]
"""A distribution of numbers of tokens: element n is the probability of n."""


@dataclass(frozen=True, slots=True)
class StackLevel:
    """A draft model of a stack and the least number of tokens it proposes, from 1 to LONGEST."""

    model: str
    batch: int

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= LONGEST:
            raise SettingError(
                f"The batch of {self.model!r} cannot be {self.batch}. "
                f"Give a whole number from 1 to {LONGEST}."
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """What drafts for the target: models, the smallest first, and for the lowest of them (or the
    target) the databases, its own head, or both in one tree.

    A plan without any of these is plain decoding. `str` returns the text that `resolve` reads, such
    as "databases/small@8/mid@4".
    """

    levels: tuple[StackLevel, ...] = ()
    databases: bool = False
    head: bool = False

    @property
    def source(self) -> Source:
        return next(name for name, has in SOURCES.items() if has == (self.databases, self.head))

    @property
    def below(self) -> "Plan":
        return replace(self, levels=self.levels[:-1])

    @property
    def stack(self) -> str:
        return "/".join(filter(None, [self.source, *(level.model for level in self.levels)]))

    def __str__(self) -> str:
        levels = [f"{level.model}@{level.batch}" for level in self.levels]
        return "/".join(filter(None, [self.source, *levels])) or PLAIN


def stack_of(plan: Plan, rule: Rule) -> str:
    """The name under which a profile keeps the outcomes of a plan's stack with a rule."""
    return f"{rule} {plan.stack}"


@dataclass(frozen=True, slots=True)
class Edge:
    """One way to decode model `above`: maps the seconds per token of `below` to those of `above`.

    Models are given by their index in the profile. If no model drafts for `above`, `below` is the
    source that does, "" for none; these edges are the sources of the graph and have no batch.
    """

    below: int | Source
    above: int
    batch: int
    multiplier: float
    cost: float

    def seconds(self, below: float = 0.0) -> float:
        return self.multiplier * below + self.cost


@dataclass(frozen=True, slots=True, order=True)
class Path:
    """A plan that drafts for a model, with its seconds per token, by which paths are ordered."""

    seconds: float
    plan: Plan = field(compare=False)


def emitted(pair: Pair, rule: Rule, drafted: int) -> float:
    """E(n): the mean number of tokens that verifying n drafted ones emits, 1 to n + 1.

    The sum of survival, and one for the corrected or bonus token; with equal acceptances a it is
    (1 - a^(n + 1)) / (1 - a) (arXiv 2211.17192, eq. 1).
    """
    return 1.0 + sum(pair.survives(rule, depth) for depth in range(1, drafted + 1))


def choices(rule: Rule, drafted: float, emitted: float) -> float:
    """The places after the first that a round reads: those of all drafts if they are verified as a
    chain, and otherwise those of the accepted ones."""
    return drafted if rule == "rejection" else emitted - 1.0


class Recursion:
    """The exact form: the number of tokens that every level of a stack proposes, and the time that
    this takes.

    A round of level i verifies N tokens that level i - 1 proposes. It emits more than k tokens with
    probability S_k P(N >= k), and it takes L_(i-1) + E[c_i(N)] and the time of the choices after
    the first (`choices`). Rounds continue until the batch T_i is full, so that N_i may exceed it.
    Every partial stack is computed once, because the compared plans share most of them.
    """

    def __init__(self, profile: Profile, rule: Rule) -> None:
        self.profile, self.rule = profile, rule
        every = [rounds for m in profile.models for rounds in (m.databases, m.head, m.merged)]
        found = [len(rounds.law) for rounds in every if rounds]
        # Every level proposes at most its batch more than the level below.
        reach = range(LONGEST * len(profile.models) + max(found, default=0))
        # c(n) and S_n for every n that may be proposed.
        self.costs = [np.array([model.seconds(n) for n in reach]) for model in profile.models]
        self.survival = {
            levels: np.array([pair.survives(rule, n) for n in reach])
            for levels, pair in profile.pairs.items()
        }
        self.known: dict[Plan, tuple[Distribution, float]] = {}

    def latency(self, plan: Plan) -> float:
        """Seconds per token that the target emits, corrected by observed answers."""
        return self.profiled(plan) * self.profile.factor(stack_of(plan, self.rule))

    def profiled(self, plan: Plan) -> float:
        """Seconds per token by the profile alone, for answers as long as those of the profile.

        The last round of an answer emits some tokens beyond its end, by renewal theory (E[X^2] /
        E[X] - 1) / 2 on average. Drafts stop at the end of the answer, so these tokens cost only
        the time of the target. Rounds without draft models were measured to the end of answers.
        """
        emits, seconds = self.round(plan, len(self.profile.models) - 1)
        sizes, length = np.arange(len(emits)), self.profile.length
        tokens = float(emits @ sizes)
        if plan.levels and length:
            beyond = (float(emits @ sizes**2) / tokens - 1) / 2
            seconds += (seconds - self.proposed(plan)[1]) * beyond / length
        return seconds / tokens

    def round(self, plan: Plan, above: int) -> tuple[Distribution, float]:
        """The tokens of a round of model `above`, for which `plan` drafts, and its seconds."""
        model = self.profile.models[above]
        if not plan.levels:
            if not plan.source:
                return np.array([0.0, 1.0]), model.seconds(0)
            rounds = model.rounds(plan.databases, plan.head)
            assert rounds is not None, f"no {plan.source} were measured for {model.name}"
            return np.array([0.0, *rounds.law]), rounds.seconds
        shares, seconds = self.proposed(plan)
        below = self.profile.index(plan.levels[-1].model)
        beyond = self.survival[below, above][: len(shares)] * shares[::-1].cumsum()[::-1]
        emits = np.append(0.0, beyond - np.append(beyond[1:], 0.0))
        seconds += float(shares @ self.costs[above][: len(shares)])
        drafted = float(shares @ np.arange(len(shares)))
        return emits, seconds + model.choice * choices(self.rule, drafted, float(beyond.sum()))

    def proposed(self, plan: Plan) -> tuple[Distribution, float]:
        """The number of tokens that the top level of a plan proposes, and the seconds for this."""
        if plan not in self.known:
            top = plan.levels[-1]
            emits, seconds = self.round(plan.below, self.profile.index(top.model))
            shares, rounds = gathered(emits, top.batch)
            lowest = self.profile.models[self.profile.index(top.model)]
            seen = lowest.rounds(plan.databases, plan.head) if not plan.below.levels else None
            if seen is not None and sum(seen.order) >= top.batch:
                shares, rounds = gathered_in_order(seen.order, top.batch)
            self.known[plan] = shares, rounds * seconds
        return self.known[plan]


def gathered(emits: Distribution, batch: int) -> tuple[Distribution, float]:
    """The number of tokens of as many rounds as give at least `batch` of them, and E[rounds]."""
    shares = np.zeros(batch + len(emits) - 1)
    shares[0], rounds = 1.0, 0.0
    for tokens in range(batch):
        reached, shares[tokens] = float(shares[tokens]), 0.0
        rounds += reached
        shares[tokens : tokens + len(emits)] += reached * emits
    return shares, rounds


def gathered_in_order(order: Sequence[int], batch: int) -> tuple[Distribution, float]:
    """The same from rounds in their observed order, which need not be independent.

    The rounds are divided into batches, starting once from each of the first places.
    """
    shares, batches, used = np.zeros(batch + max(order)), 0, 0
    for first in range(min(batch, len(order))):
        tokens = rounds = 0
        for emitted in order[first:]:
            tokens, rounds = tokens + emitted, rounds + 1
            if tokens >= batch:
                shares[tokens] += 1
                batches, used = batches + 1, used + rounds
                tokens = rounds = 0
    return shares / batches, used / batches


def latency(profile: Profile, plan: Plan, rule: Rule) -> float:
    return Recursion(profile, rule).latency(plan)


def sources(profile: Profile, above: int) -> list[Edge]:
    """The edges without a draft model: plain decoding, then every source that was measured."""
    model = profile.models[above]
    found = [Edge("", above, 0, 0.0, model.seconds(0))]
    for source, has in SOURCES.items():
        if rounds := model.rounds(*has):
            mean = sum(tokens * share for tokens, share in enumerate(rounds.law, start=1))
            found.append(Edge(source, above, 0, 0.0, rounds.seconds / mean))
    return found


def batches(profile: Profile, rule: Rule, below: int, above: int) -> list[Edge]:
    """The parallel edges of a pair of models, one for every batch from 1 to LONGEST."""
    model, pair = profile.models[above], profile.pairs[below, above]
    found = []
    for batch in range(1, LONGEST + 1):
        mean = emitted(pair, rule, batch)
        seconds = model.seconds(batch) + model.choice * choices(rule, batch, mean)
        found.append(Edge(below, above, batch, batch / mean, seconds / mean))
    return found


class Graph:
    """The path form: usable models as vertices, with the edges between any two of them."""

    def __init__(
        self, profile: Profile, rule: Rule, allowed: Collection[str] | None = None
    ) -> None:
        self.names = [model.name for model in profile.models]
        self.target = len(self.names) - 1
        usable = {*(self.names if allowed is None else allowed), self.names[-1]}
        self.used = [level for level, name in enumerate(self.names) if name in usable]
        self.sources = {
            level: [
                edge
                for edge in sources(profile, level)
                if allowed is None or set(str(edge.below).split("+")) <= {"", *allowed}
            ]
            for level in self.used
        }
        self.batches = {
            (below, above): batches(profile, rule, below, above)
            for below, above in combinations(self.used, 2)
        }

    def starts(self, above: int) -> list[Path]:
        """The paths without a draft model."""
        return [
            Path(edge.seconds(), Plan((), *SOURCES[edge.below]))
            for edge in self.sources[above]
            if not isinstance(edge.below, int)
        ]

    def least(self, below: int, above: int, seconds: float) -> Edge:
        return min(self.batches[below, above], key=lambda edge: edge.seconds(seconds))

    def extended(self, path: Path, below: int, above: int) -> Path:
        edge = self.least(below, above, path.seconds)
        levels = (*path.plan.levels, StackLevel(self.names[below], edge.batch))
        return Path(edge.seconds(path.seconds), replace(path.plan, levels=levels))

    def shortest(self) -> dict[int, Path]:
        """The shortest path to every model, in one forward pass: O(K^2 LONGEST).

        The shortest path to each model suffices, because the functions of all edges are
        non-decreasing.
        """
        found: dict[int, Path] = {}
        for above in self.used:
            ways = [self.extended(path, below, above) for below, path in found.items()]
            found[above] = min([*self.starts(above), *ways])
        return found

    def stacks(self) -> list[Path]:
        """The shortest path through every stack: each choice of models and of their source."""
        drafts, found = [level for level in self.used if level != self.target], []
        for size in range(len(drafts) + 1):
            for levels in combinations(drafts, size):
                chain = [*levels, self.target]
                for path in self.starts(chain[0]):
                    for below, above in pairwise(chain):
                        path = self.extended(path, below, above)
                    found.append(path)
        return found


def edges(profile: Profile, rule: Rule) -> list[Edge]:
    """The graph to draw: every source, and for every pair of models the best batch.

    The best batch depends on the seconds per token of `below`, taken from its shortest path.
    """
    graph = Graph(profile, rule)
    paths = graph.shortest()
    found = [edge for level in graph.used for edge in graph.sources[level]]
    return found + [graph.least(*pair, paths[pair[0]].seconds) for pair in graph.batches]


def polished(recursion: Recursion, plan: Plan, free: Collection[int] | None = None) -> Plan:
    """Improve one batch after the other, in the exact form, until nothing improves.

    `free` are the indices of the levels whose batch may be changed, by default all.
    """
    found, previous = plan, None
    while found != previous:
        previous = found
        for at in range(len(plan.levels)) if free is None else free:
            head, level, tail = found.levels[:at], found.levels[at], found.levels[at + 1 :]
            options = [
                replace(found, levels=(*head, replace(level, batch=batch), *tail))
                for batch in range(1, LONGEST + 1)
            ]
            found = min(options, key=recursion.latency)
    return found


def best(profile: Profile, rule: Rule, allowed: Collection[str] | None = None) -> Plan:
    """The plan of least latency in the exact form, among the shortest paths through every stack.

    `allowed` are the names of the draft models and sources that may be used, by default all. Plain
    decoding is always allowed.
    """
    recursion, stacks = Recursion(profile, rule), Graph(profile, rule, allowed).stacks()
    plans = {plan: recursion.latency(plan) for plan in (Plan(), *(path.plan for path in stacks))}
    limit = HOPELESS * min(plans.values())
    close = sorted((plan for plan in plans if plans[plan] <= limit), key=plans.__getitem__)
    good = [polished(recursion, plan) for plan in close[:POLISHED]]
    alone = singles(profile, rule).items()
    good += [plan for name, plan in alone if allowed is None or name in allowed]
    return min(good, key=recursion.latency)


def singles(profile: Profile, rule: Rule) -> dict[str, Plan]:
    """For every draft model, the best plan with this model alone, without databases."""
    recursion, names = Recursion(profile, rule), [model.name for model in profile.models[:-1]]
    return {name: polished(recursion, Plan((StackLevel(name, START),))) for name in names}


def candidates(
    profile: Profile, rule: Rule, allowed: Collection[str] | None = None
) -> dict[str, Plan]:
    """The plans to compare, by their text: plain decoding, other plans without a draft model, every
    draft model alone, the best stack of each height from two, and the best plan of all. `allowed`
    is as in `best`."""
    recursion = Recursion(profile, rule)
    plans = [Plan(), *without_models(profile, allowed).values()]
    plans += singles(profile, rule).values()
    shortest: dict[int, Path] = {}
    for path in Graph(profile, rule, allowed).stacks():
        height = len(path.plan.levels)
        shortest[height] = min(shortest.get(height, path), path)
    plans += [polished(recursion, path.plan) for height, path in shortest.items() if height > 1]
    return {str(plan): plan for plan in [*plans, best(profile, rule, allowed)]}


def without_models(profile: Profile, allowed: Collection[str] | None = None) -> dict[Source, Plan]:
    """The plans in which a source drafts without a draft model, if they were measured and are
    `allowed`."""
    return {
        source: Plan((), *has)
        for source, has in SOURCES.items()
        if profile.target.rounds(*has) is not None
        and (allowed is None or {*source.split("+")} <= {*allowed})
    }


def outcome_of(profile: Profile, plan: Plan, rule: Rule, steps: Iterable[Step]) -> Outcome | None:
    """The outcome of the steps in which a plan drafted; None if there are none.

    Draft models may pause in an answer (engine/drafting/controller.py). Steps without them are no
    evidence about the plan.
    """
    drafted = [
        (step, step.plain_seconds)
        for step in steps
        if step.tokens
        and step.plain_seconds
        and (not plan.levels or any(source.startswith(DRAFT) for source in step.look_ups))
    ]
    if not drafted or not (plan.levels or plan.source):
        return None
    plain = sum(seconds for _, seconds in drafted)
    ratio = Recursion(profile, rule).profiled(plan) / profile.target.seconds(0)
    seconds = sum(step.seconds for step, _ in drafted)
    return Outcome(sum(len(step.tokens) for step, _ in drafted), seconds, ratio * plain, plain)


def memory(profile: Profile, plan: Plan) -> int:
    names = {profile.target.name, *(level.model for level in plan.levels)}
    return sum(model.memory_bytes for model in profile.models if model.name in names)


def parse(spec: str) -> tuple[Source, tuple[tuple[str, int | None], ...]]:
    """The source of the lowest model, and the names and batches of the levels (None: not given).

    A name may contain "@"; a number after the last one is the batch. Raises SettingError for an
    impossible plan.
    """
    parts = [part.strip() for part in spec.split("/")]
    if parts == [PLAIN]:
        return "", ()
    if not all(parts):
        raise SettingError(
            f"The plan cannot be {spec!r}. Name draft models, the smallest first, such as "
            f"small@8/mid@4, or give {PLAIN} or {DATABASES}."
        )
    source: Source = next((name for name in SOURCES if name == parts[0]), "")
    levels: list[tuple[str, int | None]] = []
    for part in parts[bool(source) :]:
        if part in SOURCES:
            raise SettingError(
                f"The plan {spec!r} is not possible: the {part} can draft for the smallest model "
                f"only. Write {part} once, in front."
            )
        numbered = re.fullmatch(r"(.+)@(-?\d{1,9})", part, re.DOTALL)
        levels.append((numbered[1], int(numbered[2])) if numbered else (part, None))
    return source, tuple(levels)


def resolve(profile: Profile, spec: str, rule: Rule) -> Plan:
    """The plan that a text such as "small@8/mid" describes, with the best batches for those left
    out.

    Raises SettingError if the profile cannot provide the plan.
    """
    source, named = parse(spec)
    places = [place_of(profile, name) for name, _ in named]
    if sorted(set(places)) != places:
        names = ", ".join(profile.models[place].name for place in sorted(set(places)))
        raise SettingError(
            f"The plan {spec!r} is out of order. Name every draft model once, the smallest "
            f"first: {names}."
        )
    lowest = profile.models[places[0]] if places else profile.target
    if source and lowest.rounds(*SOURCES[source]) is None:
        raise SettingError(
            f"The plan {spec!r} is not possible: the profile does not say how the {source} would "
            f"draft for {lowest.name!r}. Profile it with that, or leave {source} out."
        )
    levels = tuple(StackLevel(name, START if batch is None else batch) for name, batch in named)
    free = [at for at, (_, batch) in enumerate(named) if batch is None]
    return polished(Recursion(profile, rule), Plan(levels, *SOURCES[source]), free)


def place_of(profile: Profile, name: str) -> int:
    drafts = [model.name for model in profile.models[:-1]]
    if name in drafts:
        return drafts.index(name)
    what = "is the target and cannot draft" if name == profile.target.name else "is unknown"
    known = ", ".join(drafts) or "none in this profile"
    raise SettingError(f"The draft model {name!r} {what}. There are: {known}.")
