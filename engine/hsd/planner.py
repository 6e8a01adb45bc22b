"""Which draft models to stack, and how many tokens each proposes: the plan of least latency.

In a stack only the smallest model decodes by itself, or with the token databases drafting for it.
Every model gathers a minimum batch of tokens and hands it up; the next one verifies what it is
handed, until it has a batch of its own; the target verifies and emits (hierarchical speculative
decoding, arXiv 2510.19705). What a plan costs per token is computed from a measured profile in two
forms, both derived for this project:

- exact: the law of the tokens that every level proposes, by dynamic programming;
- path: batches taken as their minimum. A level's latency is then a non-decreasing map of the one
  below, and as the graph of models has no cycle, one forward pass finds its shortest path.

The path form is some percent too low, more where costs jump, as it misses that batches may exceed
their minimum. So plans are found in it, and are polished and compared in the exact one.

What answers really took corrects both: each stack by a factor of its own (engine/hsd/profile.py).
Within a stack that changes no order, so the best batches stay the same. Which stack is the best
may change. So every stack is compared where there are few, and those of the path form where there
are many.
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
"""What drafts for the lowest model of a plan: nothing, the databases, its own head, both."""
SOURCES: dict[Source, tuple[bool, bool]] = {
    "": (False, False),
    DATABASES: (True, False),
    HEAD: (False, True),
    MERGED: (True, True),
}
"""The same as a plan says it: whether the databases draft, and whether the head does."""
PLAIN = "plain"
LONGEST = 32
"""The largest batch a model may be asked for."""
START = 4
"""The batch from which the best one is looked for."""
HOPELESS = 1.25
"""Plans that take so many times as long as another are not worth polishing."""
FEW = 64
"""Up to so many stacks, all are compared."""

Law = NDArray[np.float64]
"""A law of numbers of tokens: `law[n]` is the probability of n."""


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
    """Who drafts for the target: models, the smallest first, and what drafts for the lowest one:
    the databases, its own head, or both in one tree.

    With none of them it is plain decoding. `str` gives it as `resolve` reads it, such as
    "databases/small@8/mid@4".
    """

    levels: tuple[StackLevel, ...] = ()
    databases: bool = False
    head: bool = False

    @property
    def source(self) -> Source:
        """What drafts for the lowest model."""
        return next(name for name, has in SOURCES.items() if has == (self.databases, self.head))

    @property
    def below(self) -> "Plan":
        """The plan without its top level: who drafts for that."""
        return replace(self, levels=self.levels[:-1])

    @property
    def stack(self) -> str:
        """Who drafts, without the batches."""
        return "/".join([*([self.source] if self.source else []), *(x.model for x in self.levels)])

    def __str__(self) -> str:
        parts = [self.source] if self.source else []
        return (
            "/".join([*parts, *(f"{level.model}@{level.batch}" for level in self.levels)]) or PLAIN
        )


def stack_of(plan: Plan, rule: Rule) -> str:
    """The name under which a profile keeps what a plan's stack took with a rule."""
    return f"{rule} {plan.stack}"


@dataclass(frozen=True, slots=True)
class Edge:
    """One way to decode model `above`, as a map from seconds per token of `below` to its own.

    `below` is the name of what drafts for it where no model does, "" where nothing does: the
    sources of the graph, which take no batch. Models are given by their index in the profile.
    """

    below: int | Source
    above: int
    batch: int
    multiplier: float
    cost: float

    def seconds(self, below: float = 0.0) -> float:
        """Seconds per token of `above` where those of `below` take so long."""
        return self.multiplier * below + self.cost


@dataclass(frozen=True, slots=True, order=True)
class Path:
    """What drafts for a model in the end, and its seconds per token then: the less, the better."""

    seconds: float
    plan: Plan = field(compare=False)


def emitted(pair: Pair, rule: Rule, drafted: int) -> float:
    """E(n): the tokens that verifying n drafted ones emits on average, 1 to n + 1.

    The sum of survival, and one for the corrected or bonus token; with equal acceptances a it is
    (1 - a^(n + 1)) / (1 - a) (arXiv 2211.17192, eq. 1).
    """
    return 1.0 + sum(pair.survives(rule, depth) for depth in range(1, drafted + 1))


class Recursion:
    """The exact form: what every level of a stack proposes, and after how long.

    A round of level i verifies N tokens that level i - 1 proposes. It emits more than k of them
    and its own with probability S_k P(N >= k), and it takes L_(i-1) + E[c_i(N)], and the choices
    after the first. Rounds go on until the batch T_i is full, so that N_i may exceed it. Every
    partial stack is computed once, as plans to compare share most of theirs.
    """

    def __init__(self, profile: Profile, rule: Rule) -> None:
        self.profile, self.rule = profile, rule
        every = [rounds for m in profile.models for rounds in (m.databases, m.head, m.merged)]
        found = [len(rounds.law) for rounds in every if rounds]
        # Every level proposes its batch more than the one below at most.
        reach = range(LONGEST * len(profile.models) + max(found, default=0))
        # c(n) and S_n for every n that may be proposed.
        self.costs = [np.array([model.seconds(n) for n in reach]) for model in profile.models]
        self.survival = {
            levels: np.array([pair.survives(rule, n) for n in reach])
            for levels, pair in profile.pairs.items()
        }
        self.known: dict[Plan, tuple[Law, float]] = {}

    def latency(self, plan: Plan) -> float:
        """Seconds per token that the target emits, corrected by what answers took."""
        return self.profiled(plan) * self.profile.factor(stack_of(plan, self.rule))

    def profiled(self, plan: Plan) -> float:
        """The same by the profile alone, for answers as long as those of the profile.

        The last round of an answer would emit more than is left of it. By renewal theory that is
        (E[X^2] / E[X] - 1) / 2 tokens on average. Drafts stop where the answer does, so the target
        alone works for them. Rounds without draft models were measured to the end of answers.
        """
        emits, seconds = self.round(plan, len(self.profile.models) - 1)
        sizes, length = np.arange(len(emits)), self.profile.length
        tokens = float(emits @ sizes)
        if plan.levels and length:
            beyond = (float(emits @ sizes**2) / tokens - 1) / 2
            seconds += (seconds - self.handed(plan)[1]) * beyond / length
        return seconds / tokens

    def round(self, plan: Plan, above: int) -> tuple[Law, float]:
        """The law of the tokens of a round of model `above`, for which `plan` drafts; seconds."""
        model = self.profile.models[above]
        if not plan.levels:
            if not plan.source:
                return np.array([0.0, 1.0]), model.seconds(0)
            rounds = model.rounds(plan.databases, plan.head)
            assert rounds is not None, f"no {plan.source} were measured for {model.name}"
            return np.array([0.0, *rounds.law]), rounds.seconds
        law, seconds = self.handed(plan)
        below = self.profile.index(plan.levels[-1].model)
        beyond = self.survival[below, above][: len(law)] * law[::-1].cumsum()[::-1]
        emits = np.append(0.0, beyond - np.append(beyond[1:], 0.0))
        seconds += float(law @ self.costs[above][: len(law)])
        return emits, seconds + model.choice * float(beyond.sum() - 1.0)

    def handed(self, plan: Plan) -> tuple[Law, float]:
        """The law of the tokens that the top level of a plan proposes; seconds."""
        if plan not in self.known:
            top = plan.levels[-1]
            emits, seconds = self.round(plan.below, self.profile.index(top.model))
            law, rounds = gathered(emits, top.batch)
            lowest = self.profile.models[self.profile.index(top.model)]
            seen = lowest.rounds(plan.databases, plan.head) if not plan.below.levels else None
            if seen is not None and sum(seen.order) >= top.batch:
                law, rounds = gathered_as_seen(seen.order, top.batch)
            self.known[plan] = law, rounds * seconds
        return self.known[plan]


def gathered(emits: Law, batch: int) -> tuple[Law, float]:
    """Rounds until at least `batch` tokens are there: the law of their number, and E[rounds]."""
    law = np.zeros(batch + len(emits) - 1)
    law[0], rounds = 1.0, 0.0
    for tokens in range(batch):
        reached, law[tokens] = float(law[tokens]), 0.0
        rounds += reached
        law[tokens : tokens + len(emits)] += reached * emits
    return law, rounds


def gathered_as_seen(order: Sequence[int], batch: int) -> tuple[Law, float]:
    """The same from rounds in the order in which they came, which need not be independent.

    They are passed through once from each of the first places, batch after batch.
    """
    law, batches, used = np.zeros(batch + max(order)), 0, 0
    for first in range(min(batch, len(order))):
        tokens = rounds = 0
        for emitted in order[first:]:
            tokens, rounds = tokens + emitted, rounds + 1
            if tokens >= batch:
                law[tokens] += 1
                batches, used = batches + 1, used + rounds
                tokens = rounds = 0
    return law / batches, used / batches


def latency(profile: Profile, plan: Plan, rule: Rule) -> float:
    """Seconds per token of a plan, in the exact form."""
    return Recursion(profile, rule).latency(plan)


def sources(profile: Profile, above: int) -> list[Edge]:
    """The edges without a draft model: by itself, then with every source that was measured."""
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
        seconds = model.seconds(batch) + model.choice * (mean - 1.0)
        found.append(Edge(below, above, batch, batch / mean, seconds / mean))
    return found


class Graph:
    """The path form: the models that may be used as vertices, the edges between any two of them."""

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

    def start(self, above: int) -> Path:
        """The best way to decode a model for which no other drafts."""
        return min(self.started(above, edge) for edge in self.sources[above])

    def started(self, above: int, edge: Edge) -> Path:
        """The path of one source."""
        assert not isinstance(edge.below, int)
        return Path(edge.seconds(), Plan((), *SOURCES[edge.below]))

    def least(self, below: int, above: int, seconds: float) -> Edge:
        """The best batches for a pair of which the lower one takes `seconds` per token."""
        return min(self.batches[below, above], key=lambda edge: edge.seconds(seconds))

    def extended(self, path: Path, below: int, above: int) -> Path:
        """The path to `below`, and on to `above` in the best batches."""
        edge = self.least(below, above, path.seconds)
        levels = (*path.plan.levels, StackLevel(self.names[below], edge.batch))
        return Path(edge.seconds(path.seconds), replace(path.plan, levels=levels))

    def shortest(self) -> dict[int, Path]:
        """The shortest path to every model, in one forward pass: O(K^2 LONGEST).

        No other path to a model need be known, as the maps of all edges are non-decreasing.
        """
        found: dict[int, Path] = {}
        for above in self.used:
            ways = [self.extended(path, below, above) for below, path in found.items()]
            found[above] = min([self.start(above), *ways])
        return found

    def depths(self) -> list[Path]:
        """The shortest path to the target for every number of levels, from none."""
        paths, found = {level: self.start(level) for level in self.used}, []
        while paths:
            found.append(paths[self.target])
            paths = {
                above: min(self.extended(paths[i], i, above) for i in paths if i < above)
                for above in self.used
                if above > min(paths)
            }
        return found

    def stacks(self) -> list[Path]:
        """The shortest path through every stack: each choice of models and of their source."""
        drafts, found = [level for level in self.used if level != self.target], []
        for size in range(len(drafts) + 1):
            for levels in combinations(drafts, size):
                chain = [*levels, self.target]
                for edge in self.sources[chain[0]]:
                    path = self.started(chain[0], edge)
                    for below, above in pairwise(chain):
                        path = self.extended(path, below, above)
                    found.append(path)
        return found

    @property
    def few(self) -> bool:
        """Whether all stacks can be compared."""
        most = max(len(edges) for edges in self.sources.values())
        return most << (len(self.used) - 1) <= FEW


def shortest(profile: Profile, rule: Rule, allowed: Collection[str] | None = None) -> Plan:
    """The plan of least latency in path form. `allowed`: as in `best`."""
    graph = Graph(profile, rule, allowed)
    return graph.shortest()[graph.target].plan


def edges(profile: Profile, rule: Rule) -> list[Edge]:
    """The graph to draw: every source, and of every pair the batch that is best.

    Which batch that is depends on how fast `below` can be decoded: by its own shortest path.
    """
    graph = Graph(profile, rule)
    paths = graph.shortest()
    found = [edge for level in graph.used for edge in graph.sources[level]]
    return found + [graph.least(*pair, paths[pair[0]].seconds) for pair in graph.batches]


def polished(recursion: Recursion, plan: Plan, free: Collection[int] | None = None) -> Plan:
    """Change one batch after the other for the better, in the exact form, until none is.

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
    """The plan of least latency in the exact form, among those the path form finds.

    `allowed` are the names of the draft models that may be used, and "databases" if they may be;
    by default all. Plain decoding is always allowed. Where there are few stacks, each of them is
    compared. Else the search is a heuristic, as only the path form is optimised over all of them.
    """
    graph, recursion = Graph(profile, rule, allowed), Recursion(profile, rule)
    if graph.few:
        found = graph.stacks()
    else:
        paths = graph.shortest()
        through = [graph.extended(paths[i], i, graph.target) for i in paths if i < graph.target]
        found = [graph.start(graph.target), paths[graph.target], *graph.depths(), *through]
    plans = {plan: recursion.latency(plan) for plan in (Plan(), *(path.plan for path in found))}
    limit = HOPELESS * min(plans.values())
    good = [polished(recursion, plan) for plan, seconds in plans.items() if seconds <= limit]
    alone = singles(profile, rule).items()
    good += [plan for name, plan in alone if allowed is None or name in allowed]
    return min(good, key=recursion.latency)


def singles(profile: Profile, rule: Rule) -> dict[str, Plan]:
    """For every draft model the best plan with it alone, without databases."""
    recursion, names = Recursion(profile, rule), [model.name for model in profile.models[:-1]]
    return {name: polished(recursion, Plan((StackLevel(name, START),))) for name in names}


def candidates(profile: Profile, rule: Rule) -> dict[str, Plan]:
    """The plans to compare, by their text: plain decoding, what else needs no draft model, every
    draft model alone, the best stack of every height from two, and the best of all."""
    recursion = Recursion(profile, rule)
    target = profile.target
    plans = [Plan((), *has) for has in SOURCES.values() if not any(has) or target.rounds(*has)]
    plans += singles(profile, rule).values()
    plans += [polished(recursion, path.plan) for path in Graph(profile, rule).depths()[2:]]
    return {str(plan): plan for plan in [*plans, best(profile, rule)]}


def outcome_of(profile: Profile, plan: Plan, rule: Rule, steps: Iterable[Step]) -> Outcome | None:
    """What the steps came to in which a plan drafted; None where there is no such step.

    Draft models may rest in an answer (engine/drafting/controller.py). Steps without them say
    nothing of the plan.
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
    """Bytes that the models of a plan take, the target included."""
    names = {profile.target.name, *(level.model for level in plan.levels)}
    return sum(model.memory_bytes for model in profile.models if model.name in names)


def parse(spec: str) -> tuple[Source, tuple[tuple[str, int | None], ...]]:
    """What drafts for the lowest model, and the names and batches of the levels; None: not given.

    A name may hold "@": what follows the last one is the batch if it is a number. Raises
    SettingError for a plan that can be none.
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
    """The plan that a text such as "small@8/mid" describes; batches left out are the best ones.

    Raises SettingError for what the profile has no such plan for.
    """
    source, wanted = parse(spec)
    places = [place_of(profile, name) for name, _ in wanted]
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
    levels = tuple(StackLevel(name, START if batch is None else batch) for name, batch in wanted)
    free = [at for at, (_, batch) in enumerate(wanted) if batch is None]
    return polished(Recursion(profile, rule), Plan(levels, *SOURCES[source]), free)


def place_of(profile: Profile, name: str) -> int:
    """Where a draft model stands; raises SettingError where there is none of that name."""
    drafts = [model.name for model in profile.models[:-1]]
    if name in drafts:
        return drafts.index(name)
    what = "is the target and cannot draft" if name == profile.target.name else "is unknown"
    known = ", ".join(drafts) or "none in this profile"
    raise SettingError(f"The draft model {name!r} {what}. There are: {known}.")
