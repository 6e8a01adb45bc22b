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
from engine.drafting.controller import DRAFTED, PLAIN, PROBE, DraftController
from engine.drafting.costs import CostCurve, Gate
from engine.settings import Drafting
from engine.types import DATABASES, HEAD, STACK, Step, Token

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


# the balance and the back-off, one rule for both


def tried(name: str, costs: CostCurve, emitted: int, draft: float, steps: int) -> list[bool]:
    """Whether a way is asked in the next steps, if it emits so many tokens where it is."""
    at_work, found = controller(costs, name), list[bool]()
    for _ in range(steps):
        found.append(bool(asked(at_work.plan(20))))
        at_work.observe(drafts(name, emitted, draft) if found[-1] else step(0))
    return found


def lost(balance: float, loss: float) -> int:
    """The steps after which more than the balance is lost."""
    return int(balance // loss) + 1


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


def test_a_head_that_is_only_tried_now_and_then_does_not_keep_an_answer_from_pausing() -> None:
    """Its databases back off. As the head was called in vain, it is not asked in every step."""
    costs = flat()
    databases, head = costs.gate.gains[DATABASES], costs.gate.gains[HEAD]
    databases.backoff = databases.length = 512
    head.wait = 200
    costs.gate.learn_seconds = 1.0
    at_work = controller(costs, DATABASES, HEAD)
    asks, learned = list[list[str]](), 0
    for _ in range(400):
        asks.append(asked(at_work.plan(20)))
        called = HEAD in asks[-1]
        one = step(0, draft=2.0, head=2.0) if called else step(0)
        at_work.observe(replace(one, levels={HEAD: (3,)}) if called else one)
        learned += at_work.learnable(1)
        assert at_work.paused
    at_work.wake()
    tried = sum(map(bool, asks))
    assert tried < 10 and [HEAD] in asks and [DATABASES] in asks
    assert learned <= 1 + tried, "most tokens are not learned while nothing is drafted"
    assert databases.backoff == 512 - 400, "steps without decisions are counted"


def test_savings_by_chance_do_not_make_the_next_pause_short() -> None:
    costs = flat()
    gain = costs.gate.gains[DATABASES]
    gain.backoff, gain.length, gain.unused = 100, 256, PROBE
    at_work = controller(costs)
    assert asked(at_work.plan(20)) == [DATABASES]
    at_work.observe(step(3, 3))
    assert not gain.backoff and gain.length == 256
    while not gain.backoff:
        at_work.plan(20)
        at_work.observe(step(3, 1, 0.5))
    assert gain.backoff == gain.length == 512


# learning is charged


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
    [(Drafting(nodes=9), None), (Drafting(nodes=9, budget="fixed"), Still({0: 1.0, 9: 99.0}))],
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
