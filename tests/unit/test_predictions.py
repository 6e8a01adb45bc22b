"""Predictions against what happens: whole answers on a clock that only the models move.

Every forward takes stated seconds on it, so nothing here depends on how fast the machine is. What
a profile predicts is held against what the very same stacks take in decoding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from time import perf_counter

import pytest

from engine.decode import decode
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.hsd import planner
from engine.hsd.family import Family
from engine.hsd.measure import Lowest, Profiler, lowest_databases
from engine.hsd.planner import (
    DATABASES,
    HEAD,
    MERGED,
    SOURCES,
    Plan,
    Recursion,
    Source,
    best,
    outcome_of,
    resolve,
    stack_of,
)
from engine.hsd.profile import ENOUGH, OFF, Outcome, Pair, Profile, Rounds
from engine.hsd.trials import entries
from engine.methods import lowest, method_named
from engine.sampling import Floats, choose
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import RULES, Rule, Step, Work
from tests.support.clocked import Clock, ClockedToy, clock_of
from tests.support.toy import ToyBackend, deviating, toy_logits
from tests.unit import test_planner
from tests.unit.test_planner import every_plan, invented

CLOCKED = ("engine.decode", "engine.hsd.measure", "engine.hsd.family", "engine.drafting.costs")
COSTS = {"small": (1e-3, 2e-5), "mid": (2e-3, 3e-5), "copy": (25e-3, 3e-4), "toy": (105e-3, 11e-4)}
"""Seconds of a forward, and of every further row: about those of a model of 1.0 B parameters with
a copy of 4 bits."""
LOGITS = {"small": deviating(2.2, 3), "mid": deviating(1.6, 2), "copy": deviating(0.5, 4)}
PROMPTS = [[97 + 7 * at % 26, 97 + at % 26, 32] for at in range(24)]
TOKENS = 96
STACKS = ("mid@8", "mid@2/copy@6", "small@1/mid@3/copy@7", "databases/copy@5")


class Timed(ClockedToy):
    """A toy whose forwards take the seconds of its name, times `factor`."""

    def __init__(
        self,
        clock: Clock,
        name: str = "toy",
        logits: Callable[[tuple[int, ...]], Floats] = toy_logits,
    ) -> None:
        super().__init__(clock, self.seconds, 1e-4, name=name, logits=logits, context_length=4096)
        self.info = replace(self.info, parameters=1 + [*COSTS].index(name))
        self.factor = 1.0

    def seconds(self, nodes: int) -> float:
        first, each = COSTS[self.info.name]
        return self.factor * (first + each * nodes)


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        yield clock_of(patch, *CLOCKED)


@pytest.fixture(scope="module")
def family(clock: Clock) -> Family:
    return family_of(clock, 0.7)


class Oracle(Drafter):
    """A head of the toy: it knows what its model will say next, as often as `right` allows."""

    name = HEAD

    def __init__(self, clock: Clock, sampling: Sampling, right: float, depth: int = 3) -> None:
        self.clock, self.sampling, self.right, self.depth = clock, sampling, right, depth

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        text, row = list(tokens), 0
        for _ in range(min(self.depth, budget.depth)):
            self.clock.now += 1e-3
            said = choose(toy_logits(tuple(text[-2:])), self.sampling, len(text))
            wrong = Random(str((text[-2:], len(text)))).random() >= self.right
            text.append(97 + (said + 1) % 26 if wrong else said)
            row = tree.add(row, text[-1], HEAD)
        return {HEAD: Work(self.depth * 1e-3, self.depth)}


def family_of(
    clock: Clock, temperature: float, right: float = 0.0, prompts: int = len(PROMPTS)
) -> Family:
    """The toy family with its profile, and with a head of the target if it is ever `right`."""
    target = Timed(clock)
    drafts = {name: Timed(clock, name, logits) for name, logits in LOGITS.items()}
    lowest: dict[Source, Lowest] = {DATABASES: lowest_databases(Databases())}
    if right:
        lowest[HEAD] = Lowest(lambda model, drawn: [Oracle(clock, drawn, right)])
    sampling = Sampling(temperature, seed=1000)
    work = Profiler(target, drafts, PROMPTS[:prompts], sampling, lowest, TOKENS)
    assert [*work.run()][-1] == pytest.approx(1.0)
    return Family(target, drafts, work.profile)


def decoded(
    family: Family,
    drafters: Callable[[Sampling], Sequence[Drafter]],
    temperature: float,
    costs: CostCurve | None = None,
) -> list[Step]:
    """All steps of the answers to the prompts, each from nothing."""
    steps: list[Step] = []
    for number, prompt in enumerate(PROMPTS):
        for model in (family.target, *family.drafts.values()):
            model.close()
        wanted = Generation(Sampling(temperature, seed=number), TOKENS)
        drafting, found = Drafting(tiers=()), drafters(wanted.sampling)
        events = decode(family.target, prompt, found, wanted, drafting, costs=costs)
        steps += [event for event in events if isinstance(event, Step) and event.tokens]
    return steps


def stack_steps(
    family: Family, spec: str, temperature: float, costs: CostCurve | None = None
) -> list[Step]:
    method = method_named(f"hsd:{spec}")

    def drafters(drawn: Sampling) -> Sequence[Drafter]:
        return method.drafters(Databases().for_measuring(), family, drawn)

    return decoded(family, drafters, temperature, costs)


def per_token(steps: Sequence[Step]) -> float:
    return sum(step.seconds for step in steps) / sum(len(step.tokens) for step in steps)


# Profiles


@pytest.mark.soak
@pytest.mark.parametrize(("temperature", "bound"), [(0.0, 0.11), (0.7, 0.09)])
def test_predictions_are_within_a_tenth_of_what_stacks_take(
    clock: Clock, family: Family, temperature: float, bound: float
) -> None:
    """The profile is of the same prompts; with chance in them, of other answers. Without, the toy
    goes round in circles, where single rounds say least of the next ones."""
    family = family if temperature else family_of(clock, temperature)
    profile = family.profiled()
    planned = str(best(profile, "match"))
    recursion = Recursion(profile, "match")
    found = {spec: per_token(stack_steps(family, spec, temperature)) for spec in {*STACKS, planned}}
    for spec, seconds in found.items():
        latency = recursion.latency(resolve(profile, spec, "match"))
        assert seconds == pytest.approx(latency, rel=bound), spec
    assert found[planned] <= 1.03 * min(found.values())


def test_a_head_is_a_way_to_draft_like_the_databases(clock: Clock) -> None:
    """One that is right pays more than any stack here, one that is wrong is not planned with."""
    good = family_of(clock, 0.7, right=0.97, prompts=12)
    rounds = good.profiled().target.head
    assert rounds is not None and len(rounds.law) <= 4
    plan = best(good.profiled(), "match")
    steps = decoded(good, lambda drawn: [Oracle(clock, drawn, 0.97)], 0.7)
    predicted = Recursion(good.profiled(), "match").latency(Plan(head=True))
    assert per_token(steps) == pytest.approx(predicted, rel=0.1)
    plain = good.profiled().target.seconds(0)
    assert plan != Plan() and predicted < 0.4 * plain
    bad = family_of(clock, 0.7, right=1e-9, prompts=4).profiled()
    assert Recursion(bad, "match").latency(Plan(head=True)) > bad.target.seconds(0)
    assert not best(bad, "match", [HEAD]).head
    assert best(good.profiled(), "match", [HEAD]) == Plan(head=True)


def test_the_head_of_a_target_is_profiled_planned_and_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and in one tree with the databases, by the methods of a chat, in the same words."""
    for module in CLOCKED:
        monkeypatch.setattr(f"{module}.perf_counter", perf_counter)
    curve = CostCurve({0: 1e-3, 7: 1.1e-3, 31: 1.2e-3})
    monkeypatch.setattr("engine.hsd.measure.measure_costs", lambda backend, seconds: curve)
    target = ToyBackend(guesses=deviating(0.3))
    drafts = {"mid": ToyBackend(name="mid", logits=LOGITS["mid"])}
    databases, sampling = Databases(), Sampling(0.7, seed=3)
    ways = lowest(databases, target.info)
    assert [*ways] == [DATABASES, HEAD, MERGED] and [*lowest(databases, drafts["mid"].info)] == [
        DATABASES
    ]
    work = Profiler(target, drafts, PROMPTS[:4], sampling, ways, 24)
    assert [*work.run()][-1] == pytest.approx(1.0) and work.profile is not None
    found = work.profile.target
    assert found.head is not None and found.merged is not None
    assert len(found.head.law) > 1 and work.profile.models[0].head is None
    family = Family(target, drafts, work.profile)
    wanted = Generation(sampling, 48)
    texts, sources = set(), set()
    for spec in ("plain", "head", "databases+head"):
        method = method_named(f"hsd:{spec}")
        assert str(method.plan(family)) == spec
        target.close()
        drafters = method.drafters(databases.for_measuring(), family, sampling, target=target)
        events = decode(target, PROMPTS[0], drafters, wanted, method.drafting)
        tokens = [token for step in events if isinstance(step, Step) for token in step.tokens]
        texts.add(tuple(token.id for token in tokens))
        sources |= {token.source for token in tokens}
    assert len(texts) == 1 and HEAD in sources
    titles = {entry.title: entry.method.name for entry in entries(family, Drafting(), "")}
    assert titles["head"] == "head" and titles["databases+head"] == "hd+head"


# The plan, against every other one


def with_outcomes(profile: Profile, random: Random, rule: Rule) -> Profile:
    """The profile after answers by some of its stacks, up to twice as fast or as slow as said."""
    plain = profile.target.seconds(0)
    for stack in sorted({stack_of(plan, rule) for plan in every_plan(profile, 1)}):
        if stack != stack_of(Plan(), rule) and random.random() < 0.6:
            outcome = Outcome(ENOUGH, random.uniform(0.5, 2.0) * plain, plain, plain)
            profile = profile.learned(stack, outcome)
    return profile


@cache
def corrected(seed: int) -> Profile:
    random = Random(seed)
    return with_outcomes(invented(random, random.randint(2, 4)), random, "rejection")


def test_the_plan_is_that_of_an_exhaustive_search_also_with_what_answers_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "LONGEST", 5)
    same = 0
    for seed in range(30):
        profile = corrected(seed)
        recursion = Recursion(profile, "rejection")
        least = min(map(recursion.latency, every_plan(profile, 5)))
        found = recursion.latency(best(profile, "rejection"))
        assert least <= found * (1 + 1e-12) and found <= 1.005 * least
        same += found <= least * (1 + 1e-12)
    assert same >= 28


def test_of_many_models_every_stack_is_compared() -> None:
    """Also those that only observed answers make the best."""
    profile = invented(Random(2), 8, databases=1.0)
    plain = profile.target.seconds(0)
    for stack in ("databases/m0/m3/m6", "m2/m5", "databases/m1/m2/m3/m4/m5/m6"):
        fast = Outcome(ENOUGH, plain / 50, plain, plain)
        found = best(profile.learned(f"rejection {stack}", fast), "rejection")
        assert found.stack == stack != best(profile, "rejection").stack


def test_heads_are_planned_as_an_exhaustive_search_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head, databases and both, for any model; each source is the best one at times."""
    monkeypatch.setattr(planner, "LONGEST", 4)
    used = set()
    for seed in range(40):
        random = Random(seed)
        profile = invented(random, 3, databases=1.0)
        models = []
        for model in profile.models:
            found = [
                Rounds((0.5, 0.0, 0.5), random.uniform(1.0, 2.2) * model.seconds(0))
                for _ in range(2)
            ]
            models.append(replace(model, head=found[0], merged=found[1]))
        profile = replace(profile, models=tuple(models))
        bare = replace(profile, models=tuple(replace(m, databases=None) for m in models))
        recursion = Recursion(profile, "rejection")
        every = [
            replace(plan, databases=databases, head=head)
            for plan in every_plan(bare, 4)
            for databases, head in SOURCES.values()
        ]
        plan = best(profile, "rejection")
        assert recursion.latency(plan) <= 1.005 * min(map(recursion.latency, every))
        assert resolve(profile, str(plan), "rejection") == plan
        used.add(plan.source)
    assert used >= {DATABASES, HEAD, "databases+head"}


# What answers say


def two_models(survival: float = 0.8) -> Profile:
    models = tuple(
        test_planner.model(*one) for one in (("small", 0.1), ("mid", 0.12), ("large", 1.0))
    )
    pair = Pair(survival, dict.fromkeys(RULES, tuple(survival**k for k in range(1, 9))))
    worse = Pair(0.5, dict.fromkeys(RULES, tuple((survival - 0.05) ** k for k in range(1, 9))))
    return Profile(models, {(0, 1): pair, (0, 2): pair, (1, 2): worse}, {})


def test_a_correction_moves_the_prediction_to_what_happened_and_the_plan_with_it() -> None:
    profile = two_models()
    plan = best(profile, "match")
    assert [level.model for level in plan.levels] == ["small"]
    plain, expected = profile.target.seconds(0), Recursion(profile, "match").latency(plan)
    slow = Outcome(ENOUGH, 3 * expected, expected, plain)
    learned = profile.learned(stack_of(plan, "match"), slow)
    assert Recursion(learned, "match").latency(plan) == pytest.approx(3 * expected)
    assert Recursion(learned, "match").profiled(plan) == pytest.approx(expected)
    assert Recursion(learned, "rejection").latency(plan) == pytest.approx(expected)
    assert [level.model for level in best(learned, "match").levels] == ["mid"]
    near = Outcome(ENOUGH, OFF**0.5 * expected, expected, plain)
    assert learned.off(profile) and not profile.learned("match small", near).off(profile)


def test_an_answer_says_what_its_stack_took(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as slow a draft model as was profiled: the prediction follows, the best plan changes,
    and what is predicted then is what happens."""
    profile, spec = family.profiled(), "mid@2/copy@6"
    plan = resolve(profile, spec, "match")
    monkeypatch.setattr(family.drafts["copy"], "factor", 3.0)
    curve = CostCurve({n: 0.105 + 11e-4 * n for n in (0, 1, 3, 7, 15, 31, 63)})
    steps = stack_steps(family, spec, 0.7, curve)
    outcome = outcome_of(profile, plan, "match", steps)
    assert outcome is not None
    drafted = [step for step in steps if step.look_ups]
    assert outcome.tokens == sum(len(step.tokens) for step in drafted) > ENOUGH
    assert outcome.seconds == pytest.approx(sum(step.seconds for step in drafted))
    assert outcome.plain_seconds / outcome.tokens == pytest.approx(0.105, rel=0.02)
    learned = profile.learned(stack_of(plan, "match"), outcome)
    assert learned.off(profile) and learned.factor(stack_of(plan, "match")) > 1.4
    again = Recursion(learned, "match").latency(plan)
    assert per_token(stack_steps(family, spec, 0.7)) == pytest.approx(again, rel=0.05)
    assert outcome_of(profile, Plan(), "match", steps) is None
    assert outcome_of(profile, plan, "match", [replace(s, look_ups={}) for s in steps]) is None
