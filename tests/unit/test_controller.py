"""The controller: what drafting saved recently decides whether it continues, for databases and
draft models alike.

Steps take stated times here, on a machine whose costs stay as they were stated; whole answers on a
simulated clock are in tests/unit/test_never_slower.py.
"""

import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random

import pytest

from engine.drafting.base import Drafter, Learner
from engine.drafting.budget import Budget
from engine.drafting.controller import (
    DRAFTED,
    FIRST,
    FULL,
    LONGEST,
    PLAIN,
    PROBE,
    PROBE_SHARE,
    SHORTEST,
    TRIAL,
    DraftController,
)
from engine.drafting.costs import COUNTED, STEADY, CostCurve, Gain, Gate
from engine.settings import Drafting
from engine.types import DATABASES, HEAD, STACK, Step, Token

START = Gain().balance
PLAIN_STEPS = [False] * (STEADY + COUNTED)
"""Whether drafting is asked in the plain steps that tell what plain decoding takes."""
WAYS = [DATABASES, STACK]


class Still(CostCurve):
    """Learns nothing."""

    def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
        """Nothing."""


def named(name: str) -> Drafter:
    """A drafter that is only a name."""
    drafter = Learner(())
    drafter.name = name
    return drafter


def flat() -> CostCurve:
    """The first plain steps are over."""
    costs = Still({0: 1.0, 9: 1.0})
    costs.gate.plain_after = PLAIN
    return costs


NINE = Drafting(nodes=9)


def controller(costs: CostCurve | None, *ways: str, drafting: Drafting = NINE) -> DraftController:
    return DraftController([named(name) for name in ways or (DATABASES,)], drafting, 100, costs)


def gain(costs: CostCurve, name: str = DATABASES) -> Gain:
    return costs.gate.gains[name]


def step(nodes: int, emitted: int = 1, draft: float = 0.0, **look_ups: float) -> Step:
    """A step over so many nodes whose forward took a second. Tokens are sampled one by one."""
    return Step(
        0,
        tuple(Token(7, at, "target") for at in range(emitted)),
        {"context": nodes} if nodes else {},
        draft_seconds=draft,
        verify_seconds=1.0,
        sample_seconds=0.5 * emitted,
        other_seconds=0.25 * emitted,
        look_ups={name.replace("_", ":"): seconds for name, seconds in look_ups.items()},
    )


def asked(plan: tuple[Budget, Sequence[Drafter]]) -> list[str]:
    return [drafter.name for drafter in plan[1]]


def drafts(name: str, emitted: int, draft: float) -> Step:
    """A step whose drafts are of databases, or of a draft model."""
    return step(3, emitted, draft, **({"draft_small": draft} if name == STACK else {}))


def test_what_a_draft_model_takes_says_nothing_of_what_a_node_costs() -> None:
    told: list[tuple[float, ...]] = []

    class Noting(CostCurve):
        def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
            told.append((nodes, verify, draft, other))

    at_work = controller(Noting({0: 1.0, 9: 1.0}))
    at_work.observe(step(5, draft=4.0, context=0.5, draft_small=1.0, draft_mid=2.0), learning=0.25)
    for _ in range(STEADY):
        at_work.observe(step(0))
    at_work.observe(step(0, draft=0.5, context=0.25))
    assert told == [(5, 1.0, 0.75, 1.0), (0, 1.0, 0.5, 0.75)], "only after steady plain steps"


# the balance and the back-off, one rule for both


def tried(name: str, costs: CostCurve, emitted: int, draft: float, steps: int) -> list[bool]:
    """Whether a way is asked in the next steps, if it emits so many tokens where it is."""
    at_work, found = controller(costs, name), list[bool]()
    for _ in range(steps):
        found.append(bool(asked(at_work.plan(20))))
        at_work.observe(drafts(name, emitted, draft) if found[-1] else step(0))
    return found


@pytest.mark.parametrize("name", WAYS)
def test_a_way_that_saves_time_continues_except_for_plain_steps(name: str) -> None:
    """These measure plain decoding: soon at first, then rarely."""
    found = tried(name, Still({0: 1.0, 9: 1.0}), 2, 0.5, 8 + 64 + 512 + 3 * len(PLAIN_STEPS))
    assert found == [asks for n in (8, 64, 512) for asks in [True] * n + PLAIN_STEPS]
    found = tried(name, flat(), 4, 2.5, 3 * (PLAIN + len(PLAIN_STEPS)))
    assert found == ([True] * PLAIN + PLAIN_STEPS) * 3


def test_a_way_that_has_not_drafted_for_long_is_tried_again() -> None:
    """Draft models that databases outdo; databases whose drafts the costs forbid, not because of
    the balance: who drafts nothing loses its look-ups, and these may be free."""
    at_work = controller(flat(), DATABASES, STACK)
    for at in range(PROBE + 2):
        budget, _ = at_work.plan(20)
        assert (budget.due == STACK) == (at == PROBE)
        at_work.observe(drafts(STACK, 2, 0.5) if budget.due else step(3, 3, 0.25))
    at_work = controller(flat())
    for at in range(DRAFTED + 2):
        budget, _ = at_work.plan(20)
        assert (budget.due == DATABASES) == (at == DRAFTED)
        at_work.observe(step(3 if budget.due else 0))


def lost(balance: float, loss: float) -> int:
    """The steps after which more than the balance is lost."""
    return int(balance // loss) + 1


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    ("emitted", "draft", "loss"), [(1, 0.125, 0.125), (2, 1.5, 0.5), (4, 3.5, 0.5), (1, 99.0, 1.0)]
)
def test_a_way_that_takes_longer_than_it_saves_backs_off_longer_and_longer(
    name: str, emitted: int, draft: float, loss: float
) -> None:
    """And its probes take two hundredths of the time at most: the more they lose, the fewer."""
    costs, spent, lengths = flat(), 0.0, []
    at_work = controller(costs, name)
    for _ in range(4000):
        resting = at_work.backing_off(name)
        used = bool(asked(at_work.plan(20)))
        spent += loss if used and resting and at_work.steps > FIRST + 1 else 0.0
        at_work.observe(drafts(name, emitted, draft) if used else step(0))
        if not resting and at_work.backing_off(name):
            lengths.append(gain(costs, name).backoff)
            assert gain(costs, name).balance == TRIAL
    assert lengths == [SHORTEST << at for at in range(5)] + [LONGEST] * (len(lengths) - 5)
    assert len(lengths) > 8 and spent <= PROBE_SHARE * 4000 + 2 * loss * len(lengths)
    first = tried(name, flat(), emitted, draft, lost(START, loss) + SHORTEST)
    assert first[: lost(START, loss)] == [True] * lost(START, loss)
    assert not any(first[lost(START, loss) + FIRST :])


@pytest.mark.parametrize("name", WAYS)
def test_a_probe_that_saves_something_ends_a_back_off_and_pays_for_the_try(name: str) -> None:
    for emitted, over in ((1, False), (2, True), (4, True)):
        costs = flat()
        gain(costs, name).backoff = gain(costs, name).length = 256
        at_work = controller(costs, name)
        for _ in range(2 * PROBE):
            plan = at_work.plan(20)
            if asked(plan):
                assert plan[0].near == (name == DATABASES) and plan[0].nodes == 9
            at_work.observe(drafts(name, emitted, 0.25) if asked(plan) else step(0))
            if not at_work.backing_off(name):
                break
        assert at_work.backing_off(name) != over, "one token less would have been plain"
        if over:
            assert gain(costs, name).length == 0, "the next one is short again"
            assert gain(costs, name).balance == pytest.approx(TRIAL + emitted - 1.25, rel=1e-4)


def guessed(right: float, seconds: float) -> float:
    """The share of 4,000 steps in which a head drafts three guesses, each right so often, for so
    many plain steps."""
    costs, chances, used = flat(), Random(7), 0
    at_work = controller(costs, HEAD)
    for _ in range(4000):
        asks = bool(asked(at_work.plan(20)))
        emitted = 1
        while asks and emitted < 4 and chances.random() < right:
            emitted += 1
        took = seconds - 1.0
        one = step(3, emitted, took, head=took) if asks else step(0)
        at_work.observe(replace(one, levels={HEAD: (3, 3, 3)}) if asks else one)
        used += asks
    return used / 4000


def test_a_head_whose_gains_come_in_bursts_goes_on_and_one_that_is_wrong_does_not() -> None:
    assert guessed(0.53, 1.74) > 0.9 and guessed(0.02, 1.74) < 0.03


def test_draft_models_that_lose_leave_the_databases_at_work_and_the_other_way_round() -> None:
    """Either has a balance of its own."""
    costs = flat()
    at_work = controller(costs, DATABASES, STACK)
    for _ in range(50):
        at_work.plan(20)
        losing = not at_work.backing_off(STACK)
        at_work.observe(drafts(STACK, 1, 0.5) if losing else step(3, 2, 0.25))
    assert at_work.backing_off(STACK) and gain(costs).balance > START
    assert asked(at_work.plan(20)) == [DATABASES]
    costs = flat()
    at_work = controller(costs, DATABASES, STACK)
    for _ in range(50):
        at_work.plan(20)
        at_work.observe(step(3, 3, 1.25, draft_small=1.0))
    assert at_work.backing_off(DATABASES) and gain(costs, STACK).balance == FULL
    assert asked(at_work.plan(20)) == [STACK], "their look-ups came to nothing"


# learning is charged


def test_look_ups_and_learning_are_charged_to_databases_unless_these_back_off() -> None:
    """Then they learn only for the draft models, and everything that was decided."""
    costs = flat()
    at_work = controller(costs, DATABASES, STACK)
    at_work.observe(step(3, 3, 1.5, draft_small=1.0), learning=0.25)
    assert gain(costs, STACK).balance == START + 3 - 2
    assert gain(costs, DATABASES).balance == START - 0.5
    gain(costs, DATABASES).backoff = 9
    at_work.observe(step(3, 2, 1.25, draft_small=1.0), learning=0.25)
    assert gain(costs, STACK).balance == START + 1 - 0.25
    for _ in range(9):
        budget, _ = at_work.plan(20)
        assert at_work.learns(budget) and at_work.learnable(50) == 50


@pytest.mark.parametrize("name", WAYS)
def test_a_whole_text_is_paid_by_what_is_saved_before_that_counts(name: str) -> None:
    """The prompt that databases learn and draft models read, and the answer that is kept."""
    costs = Still({0: 2.0, 9: 2.0})
    at_work = controller(costs, name)
    at_work.read({name: 3.0}, 30)
    assert gain(costs, name).debt == 1.5
    for debt, balance in ((0.5, START), (0.0, START + 0.5), (0.0, START + 1.5)):
        at_work.observe(drafts(name, 2, 0.0))
        assert (gain(costs, name).debt, gain(costs, name).balance) == (debt, balance)
    at_work.charge({name: 9.0})
    at_work.observe(drafts(name, 1, 1.0))
    assert gain(costs, name).debt == 4.5
    assert gain(costs, name).balance == START + 1.0, "a loss is one at once"
    while not gain(costs, name).backoff:
        at_work.observe(drafts(name, 1, 1.0))
    assert gain(costs, name).debt == 0.0, "what a back-off ends is not carried on"


def test_of_a_back_off_the_latest_is_learned_as_far_as_it_is_cheap() -> None:
    costs = flat()
    at_work = controller(costs)
    costs.gate.learn_seconds = 0.05
    at_work.plan(20)
    assert at_work.learnable(7) == 7, "all that a step decided"
    gain(costs).backoff = 3
    budget, _ = at_work.plan(20)
    assert at_work.learns(budget) and at_work.learnable(50) == 50, "decided before it began"
    at_work.observe(step(0))
    for _ in range(2):
        budget, _ = at_work.plan(20)
        assert at_work.learns(budget) == bool(budget.nodes)
        assert at_work.learnable(50) == 10, "10 x 0.05 is a hundredth of 50 steps"
        at_work.observe(step(0))
    assert not gain(costs).backoff
    at_work.plan(20)
    assert at_work.learnable(50) == 10, "decided in the back-off that is over"
    at_work.plan(20)
    assert at_work.learnable(50) == 50
    gain(costs).backoff, costs.gate.learn_seconds = 3, 0.01
    at_work.plan(20)
    at_work.plan(20)
    assert at_work.learnable(50) == 50, "cheap enough to leave nothing out"


def test_how_long_learning_takes_is_measured_where_nothing_else_is() -> None:
    costs = flat()
    at_work = controller(costs)
    at_work.plan(20)
    at_work.learned(3200.0, 32)
    assert costs.gate.learn_seconds == Gate().learn_seconds, (
        "in a step that drafts, that was about the drafts"
    )
    assert costs.gate.learn_and_calibrate_seconds == pytest.approx(50, rel=1e-3)
    at_work.read({DATABASES: 32.0}, 32)
    assert costs.gate.learn_seconds == pytest.approx(0.5, rel=1e-3)
    gain(costs).backoff = 2
    at_work.plan(20)
    at_work.plan(20)
    at_work.learned(80.0, 32)
    assert costs.gate.learn_seconds == pytest.approx(1.5, rel=1e-3)


# what is known from answer to answer, and what is not weighed


def test_what_is_known_is_plain_data_and_a_copy_of_it_is_apart() -> None:
    costs = CostCurve({0: 1.0, 9: 2.0}, 0.25, 0.5)
    tried(DATABASES, costs, 1, 0.5, 50)
    costs.gate.gains[STACK].debt = 2.5
    copy = costs.copy()
    known = (costs.points, costs.node, costs.other, costs.table, asdict(costs.gate))
    assert (copy.points, copy.node, copy.other, copy.table, asdict(copy.gate)) == known
    assert pickle.loads(pickle.dumps(costs.gate)) == costs.gate != Gate()
    for _ in range(100):
        copy.observe(9, 9.0, 1.0, 1.0)
    tried(STACK, copy, 1, 0.5, 50)
    assert (costs.points, costs.node, costs.other, costs.table, asdict(costs.gate)) == known


@pytest.mark.parametrize(
    ("drafting", "costs"),
    [
        (Drafting(nodes=9), None),
        (Drafting(nodes=9, budget="fixed"), Still({0: 1.0, 9: 99.0})),
    ],
)
def test_without_costs_or_with_a_fixed_budget_all_draft_and_learn_always(
    drafting: Drafting, costs: CostCurve | None
) -> None:
    at_work = controller(costs, DATABASES, STACK, drafting=drafting)
    for _ in range(2 * max(PLAIN, DRAFTED)):
        plan = at_work.plan(20)
        assert asked(plan) == WAYS and plan[0].nodes == 9 and not plan[0].due
        at_work.read({DATABASES: 9.0, STACK: 9.0}, 9)
        at_work.learned(9.0, 9)
        at_work.observe(step(3, 1, 9.0), learning=5.0)
        assert at_work.learns(plan[0]) and at_work.learnable(50) == 50
    assert costs is None or costs.gate == Gate()
