"""The planner: its formulas against simulation, its search against trying everything."""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import SettingError
from engine.hsd import planner
from engine.hsd.planner import (
    DATABASES,
    LONGEST,
    Graph,
    Plan,
    Recursion,
    StackLevel,
    batches,
    best,
    candidates,
    emitted,
    latency,
    memory,
    parse,
    resolve,
    singles,
    sources,
)
from engine.hsd.profile import ModelProfile, Pair, Profile, Rounds
from engine.types import RULES, Rule

RULE: Rule = "rejection"
PLAIN, DATABASES_ONLY = Plan(), Plan(databases=True)
ZERO = (0.0,) * 4


def model(
    name: str,
    seconds: float,
    each: float = 0.0,
    choice: float = 0.0,
    databases: Rounds | None = None,
) -> ModelProfile:
    """A model whose forward takes `seconds`, and `each` more for every drafted token."""
    costs = {n: seconds + each * n for n in range(2 * LONGEST)}
    return ModelProfile(name, name, 1, 1, costs, choice, databases)


def family(
    models: Sequence[ModelProfile], survival: Callable[[int, int], Sequence[float]]
) -> Profile:
    """A profile by the survival of every pair. Under the other rule nothing is ever accepted."""
    pairs = {
        (i, j): Pair(0.5, {"rejection": tuple(survival(i, j)), "match": ZERO})
        for i, j in combinations(range(len(models)), 2)
    }
    return Profile(tuple(models), pairs, {})


def geometric(a: float, depth: int = 16) -> tuple[float, ...]:
    return tuple(a**k for k in range(1, depth + 1))


def mixed(rng: random.Random, depth: int = 12) -> tuple[float, ...]:
    """Survival over contexts of different acceptance: no single one gives the same."""
    contexts = [rng.uniform(0.2, 1.0) for _ in range(3)]
    return tuple(sum(a**k for a in contexts) / 3 for k in range(1, depth + 1))


def rounds(rng: random.Random, seconds: float) -> Rounds:
    weights = [rng.random() ** 3 for _ in range(rng.randint(1, 6))]
    return Rounds(tuple(w / sum(weights) for w in weights), seconds * rng.uniform(1.0, 1.5))


def invented(rng: random.Random, size: int, databases: float = 0.5) -> Profile:
    """A family of random models, each larger than the last, with costs that rise in steps."""
    models, seconds = [], rng.uniform(0.5, 1.0)
    for number in range(size):
        costs = {0: seconds}
        for n in (1, 2, 4, 8, 16, 32):
            costs[n] = costs[max(costs)] * rng.uniform(1.0, 1.3)
        found = rounds(rng, seconds) if rng.random() < databases else None
        choice = rng.choice((0.0, 0.02)) * seconds
        models.append(ModelProfile(f"m{number}", "", 1, 1 << number, costs, choice, found))
        seconds *= rng.uniform(1.2, 4.0)
    return family(models, lambda i, j: mixed(rng))


def every_plan(profile: Profile, longest: int) -> Iterator[Plan]:
    drafts = range(len(profile.models) - 1)
    for size in range(len(profile.models)):
        for places in combinations(drafts, size):
            lowest = profile.models[[*places, -1][0]]
            for chosen in product(range(1, longest + 1), repeat=size):
                levels = tuple(map(StackLevel, (profile.models[i].name for i in places), chosen))
                yield Plan(levels)
                if lowest.databases:
                    yield Plan(levels, True)


def path_latency(profile: Profile, plan: Plan, rule: Rule) -> float:
    """Seconds per token of a plan, in the path form."""
    levels = [*(profile.index(level.model) for level in plan.levels), len(profile.models) - 1]
    seconds = sources(profile, levels[0])[plan.databases].seconds()
    for (below, above), level in zip(pairwise(levels), plan.levels, strict=True):
        seconds = batches(profile, rule, below, above)[level.batch - 1].seconds(seconds)
    return seconds


def shortest(profile: Profile, rule: Rule, allowed: Collection[str] | None = None) -> Plan:
    """The plan of least latency in the path form."""
    graph = Graph(profile, rule, allowed)
    return graph.shortest()[graph.target].plan


def path_form(profile: Profile, plan: Plan) -> float:
    """Written down once more, from the design: lambda_j = (T lambda_i + c_j(T) + ...) / E_ij."""
    levels = [int(level.model[1:]) for level in plan.levels] + [len(profile.models) - 1]
    lowest = profile.models[levels[0]]
    seconds = lowest.costs[0]
    if plan.databases:
        assert lowest.databases
        seconds = lowest.databases.seconds / sum(
            share * (k + 1) for k, share in enumerate(lowest.databases.law)
        )
    for (i, j), level in zip(pairwise(levels), plan.levels, strict=True):
        survival = profile.pairs[i, j].survival[RULE][: level.batch]
        more = sum(survival)
        step = profile.models[j].seconds(level.batch) + profile.models[j].choice * level.batch
        seconds = (level.batch * seconds + step) / (1 + more)
    return seconds


# The search


def test_the_shortest_path_is_that_of_an_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LONGEST", 5)
    rng, kinds = random.Random(1), set()
    for _ in range(240):
        profile = invented(rng, rng.randint(1, 4))
        least = min(path_form(profile, plan) for plan in every_plan(profile, 5))
        found = shortest(profile, RULE)
        assert path_form(profile, found) == pytest.approx(least, rel=1e-12)
        assert path_latency(profile, found, RULE) == pytest.approx(least, rel=1e-12)
        kinds.add((len(found.levels), found.databases))
    assert len(kinds) > 5, "the instances must differ in what is best for them"


def test_candidates_are_of_every_kind_and_named_once() -> None:
    profile = invented(random.Random(137), 5, databases=1.0)
    found = candidates(profile, RULE)
    assert list(found)[:2] == ["plain", "databases"]
    models = [[level.model for level in plan.levels] for plan in found.values()]
    assert models[2:6] == [["m0"], ["m1"], ["m2"], ["m3"]]
    assert [len(levels) for levels in models[6:]] == [2, 3, 4]
    assert str(best(profile, RULE)) == "databases/m0@4/m2@29" == list(found)[6]
    assert all(str(plan) == text for text, plan in found.items())
    assert len(set(found.values())) == len(found)
    bare = candidates(invented(random.Random(5), 1, databases=0.0), RULE)
    assert bare == {"plain": PLAIN}


def without(profile: Profile, names: set[str]) -> Profile:
    """The profile as if some of its models had not been there."""
    kept = [i for i, found in enumerate(profile.models) if found.name not in names]
    pairs = {
        (kept.index(i), kept.index(j)): pair
        for (i, j), pair in profile.pairs.items()
        if i in kept and j in kept
    }
    return Profile(tuple(profile.models[i] for i in kept), pairs, {})


def test_what_is_not_allowed_might_as_well_not_be_there() -> None:
    rng = random.Random(8)
    for _ in range(6):
        profile = invented(rng, 4, databases=1.0)
        for allowed in ({"m0", "m2"}, {"m1"}, set[str]()):
            rest = without(profile, {"m0", "m1", "m2"} - allowed)
            bare = replace(rest, models=tuple(replace(m, databases=None) for m in rest.models))
            for find in (best, shortest):
                assert find(profile, RULE, [*allowed, DATABASES]) == find(rest, RULE)
                assert find(profile, RULE, allowed) == find(bare, RULE)


# The formulas


@pytest.mark.parametrize("a", [0.0, 0.3, 0.8, 0.99])
@pytest.mark.parametrize("batch", [1, 2, 7, 32])
def test_with_one_draft_it_is_the_formula_of_speculative_decoding(a: float, batch: int) -> None:
    """arXiv 2211.17192, theorem 3.8; beyond the measured depths as well."""
    profile = family([model("m0", 0.2), model("m1", 1.0, 0.01)], lambda i, j: geometric(a))
    expected = (batch * 0.2 + 1.0 + 0.01 * batch) * (1 - a) / (1 - a ** (batch + 1))
    plan = Plan((StackLevel("m0", batch),))
    assert latency(profile, plan, RULE) == pytest.approx(expected, rel=1e-9)
    assert path_latency(profile, plan, RULE) == pytest.approx(expected, rel=1e-9)


Floats = NDArray[np.float64]


class Simulation:
    """produce(i) as it is done, for many contexts side by side; the draws are all it shares."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.random = np.random.default_rng(1)
        self.profile, self.plan = profile, plan
        self.levels = [profile.index(level.model) for level in plan.levels] + [-1]

    def verified(self, height: int, count: int) -> tuple[NDArray[np.int64], Floats]:
        """Rounds of the model at a height: tokens and seconds of each of them."""
        found = self.profile.models[self.levels[height]]
        if height == 0:
            if not self.plan.databases:
                return np.ones(count, int), np.full(count, found.seconds(0))
            assert found.databases
            law = found.databases.law
            tokens = self.random.choice(len(law), size=count, p=law) + 1
            return tokens, np.full(count, found.databases.seconds)
        drafted, seconds = self.produce(height - 1, count)
        below, above = self.levels[height - 1], self.levels[height] % len(self.profile.models)
        survives = self.profile.pairs[below, above].survives
        accepted, going, lasts = np.zeros(count, int), np.ones(count, bool), 1.0
        for depth in range(1, int(drafted.max()) + 1):
            # Each further one with what is left of the survival so far.
            going &= self.random.random(count) * lasts < survives(RULE, depth)
            going &= drafted >= depth
            accepted += going
            lasts = survives(RULE, depth)
        costs = np.array([found.seconds(n) for n in range(int(drafted.max()) + 1)])
        # A chain is read as a whole.
        return accepted + 1, seconds + costs[drafted] + found.choice * drafted

    def produce(self, height: int, count: int) -> tuple[NDArray[np.int64], Floats]:
        """Rounds until each has a batch: its tokens and seconds."""
        tokens, seconds = np.zeros(count, int), np.zeros(count)
        while len(open_ := np.flatnonzero(tokens < self.plan.levels[height].batch)):
            more, spent = self.verified(height, len(open_))
            tokens[open_] += more
            seconds[open_] += spent
        return tokens, seconds

    def latency(self, count: int) -> tuple[float, float]:
        """Seconds per token of the target, and its relative standard error."""
        tokens, seconds = self.verified(len(self.plan.levels), count)
        found = float(seconds.sum() / tokens.sum())
        error = float((seconds - found * tokens).std() / tokens.mean() / count**0.5)
        return found, error / found


@pytest.mark.parametrize("databases", [False, True])
@pytest.mark.parametrize("batches", [(5,), (1, 6), (8, 3), (3, 2, 7), (2, 5, 4)])
def test_the_exact_form_is_what_a_simulation_finds(
    batches: tuple[int, ...], databases: bool
) -> None:
    profile = invented(random.Random(13), len(batches) + 1, databases=1.0)
    plan = Plan(tuple(StackLevel(f"m{i}", t) for i, t in enumerate(batches)), databases)
    found, error = Simulation(profile, plan).latency(100_000)
    assert 3 * error < 0.01
    assert latency(profile, plan, RULE) == pytest.approx(found, rel=0.01)


def test_only_the_accepted_drafts_are_read_where_each_is_compared() -> None:
    profile = invented(random.Random(13), 2)
    free = replace(profile, models=tuple(replace(m, choice=0.0) for m in profile.models))
    dear = replace(profile, models=tuple(replace(m, choice=1.0) for m in profile.models))
    plan = Plan((StackLevel("m0", 5),))
    for rule in RULES:
        emits = emitted(profile.pairs[0, 1], rule, 5)
        more = 5.0 if rule == "rejection" else emits - 1.0
        gap = latency(dear, plan, rule) - latency(free, plan, rule)
        assert gap == pytest.approx(more / emits)
        dearest, cheapest = (batches(each, rule, 0, 1)[4].cost for each in (dear, free))
        assert dearest - cheapest == pytest.approx(more / emits)


def test_memory_is_that_of_the_models_involved() -> None:
    profile = invented(random.Random(15), 4)
    assert memory(profile, PLAIN) == memory(profile, DATABASES_ONLY) == 8
    assert memory(profile, Plan((StackLevel("m0", 1), StackLevel("m2", 1)), True)) == 1 + 4 + 8


# Texts

NAMES = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=8).filter(
    lambda name: name == name.strip()
)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(NAMES, st.integers(1, LONGEST)), max_size=4), st.booleans())
def test_what_a_plan_is_called_is_read_back(levels: list[tuple[str, int]], databases: bool) -> None:
    plan = Plan(tuple(StackLevel(name, batch) for name, batch in levels), databases)
    assert parse(str(plan)) == (DATABASES if databases else "", tuple(levels))


def test_a_plan_is_resolved_and_what_it_leaves_open_is_filled_with_the_best() -> None:
    rng = random.Random(16)
    profile = invented(rng, 3, databases=1.0)
    for text in ("plain", "databases", "m0@3", "m0@32/m1@1", "databases/m1@7"):
        assert str(resolve(profile, text, RULE)) == text
    assert resolve(profile, "m1", RULE) == singles(profile, RULE)["m1"]
    recursion = Recursion(profile, RULE)
    batches = range(1, LONGEST + 1)
    every = [Plan((StackLevel("m0", t), StackLevel("m1", 6)), True) for t in batches]
    assert resolve(profile, "databases/m0/m1@6", RULE) == min(every, key=recursion.latency)
    least = min(
        recursion.latency(Plan((StackLevel("m0", t), StackLevel("m1", u))))
        for t in batches
        for u in batches
    )
    found = resolve(profile, "m0/m1", RULE)
    assert recursion.latency(found) <= 1.005 * least


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The plan cannot be ''. Name draft models"),
        ("small@8//mid@4", "The plan cannot be 'small@8//mid@4'. Name draft models"),
        ("huge@8", "'huge' is unknown. There are: small, mid."),
        ("small@x", "'small@x' is unknown. There are: small, mid."),
        ("plain/small", "'plain' is unknown. There are: small, mid."),
        ("small@0", "The batch of 'small' cannot be 0. Give a whole number from 1 to 32."),
        ("small@33", "The batch of 'small' cannot be 33."),
        ("small@-4", "The batch of 'small' cannot be -4."),
        ("small@2/small@4", "'small@2/small@4' is out of order. .* smallest first: small."),
        ("mid/small@4", "'mid/small@4' is out of order. .* smallest first: small, mid."),
        ("small/large", "'large' is the target and cannot draft. There are: small, mid."),
        ("small/databases", "the databases can draft for the smallest model only. Write databases"),
        ("databases/databases", "the databases can draft for the smallest model only."),
        ("databases/mid@2", "does not say how the databases would draft for 'mid'."),
        ("databases", "does not say how the databases would draft for 'large'."),
    ],
)
def test_a_plan_that_is_none_is_explained(text: str, message: str) -> None:
    models = [model("small", 1.0, databases=Rounds((1.0,), 1.0)), model("mid", 2.0)]
    profile = family([*models, model("large", 3.0)], lambda i, j: geometric(0.5))
    with pytest.raises(SettingError, match=message):
        resolve(profile, text, RULE)


def test_without_drafts_there_is_none_to_choose() -> None:
    alone = family([model("large", 1.0)], lambda i, j: ZERO)
    with pytest.raises(SettingError, match="There are: none in this profile"):
        resolve(alone, "small", RULE)
    assert resolve(alone, "plain", RULE) == best(alone, RULE) == PLAIN
