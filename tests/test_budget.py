"""The budget: it cuts a tree where an exhaustive search over all its sizes would."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import AGAIN, CREDIT, FIRST, GLANCE, LONGEST, SHORTEST, Budget, Governor
from engine.costs import IDLE, LARGEST, CostCurve, Trial
from engine.settings import Drafting
from engine.types import Step, Token

TIMES = st.floats(0.01, 10.0)
CURVES = st.builds(
    lambda first, points, node, other: CostCurve({0: first, **points}, node, other),
    TIMES,
    st.dictionaries(st.integers(1, LARGEST), TIMES, min_size=1, max_size=8),
    st.floats(0.0, 0.5),
    st.floats(0.0, 2.0),
)
RISING = st.builds(
    lambda first, steps, node: CostCurve(
        {at * 9: first + sum(steps[:at]) for at in range(len(steps) + 1)}, node
    ),
    TIMES,
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=9),
    st.floats(0.0, 0.1),
)
LIKELY = st.lists(st.floats(0.0, 1.0), max_size=60).map(lambda found: sorted(found, reverse=True))


def grown(budget: Budget, probabilities: Sequence[float]) -> int:
    """Grow as a drafter does, best first; the number of nodes that were added."""
    for size, probability in enumerate(probabilities):
        if not budget.pays(size, probability):
            return size
        budget.added(size + 1, probability)
    return len(probabilities)


def worth(costs: CostCurve, probabilities: Sequence[float], nodes: int) -> float:
    """Expected tokens per second of the first so many nodes."""
    return (1.0 + sum(probabilities[:nodes])) / costs.table[nodes]


def adaptive(costs: CostCurve, threshold: float = 0.0, nodes: int = LARGEST) -> Budget:
    return Budget(Drafting(nodes=nodes, threshold=threshold), 99, 100, costs)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.one_of(CURVES, RISING), LIKELY, st.integers(0, 40), st.sampled_from([0.0, 0.003, 0.2]))
def test_no_other_number_of_nodes_is_worth_more(
    costs: CostCurve, probabilities: list[float], nodes: int, threshold: float
) -> None:
    """Also where it stops growing early: what was not looked at could not have paid."""
    budget = adaptive(costs, threshold, nodes)
    grown(budget, probabilities)
    usable = [p for p in probabilities if p >= threshold][:nodes]
    every = [worth(costs, usable, size) for size in range(len(usable) + 1)]
    assert 0 <= budget.best < len(every)
    assert every[budget.best] >= max(every) * (1 - 1e-9)


@settings(deadline=None, derandomize=True)
@given(RISING, LIKELY)
def test_a_forced_draft_has_a_node_and_is_otherwise_the_best(
    costs: CostCurve, probabilities: list[float]
) -> None:
    costs.steps["drafted"] = IDLE
    budget = adaptive(costs, threshold=0.1)
    grown(budget, probabilities)
    usable = [p for p in probabilities if p >= 0.1]
    assert (budget.best > 0) == bool(usable)
    if usable:
        every = [worth(costs, usable, size) for size in range(1, len(usable) + 1)]
        assert every[budget.best - 1] >= max(every) * (1 - 1e-9)


def test_expected_tokens_are_the_bonus_and_what_was_added() -> None:
    budget = adaptive(CostCurve({0: 1.0, 9: 1.0}))
    assert budget.expected == 1.0
    assert grown(budget, [0.9, 0.5, 0.25]) == 3 and budget.expected == 2.65


def test_where_nodes_are_free_all_are_taken_and_where_they_cost_too_much_none() -> None:
    likely = [0.9] * 10
    free, dear = adaptive(CostCurve({0: 1.0, 99: 1.0})), adaptive(CostCurve({0: 1.0, 9: 99.0}))
    assert (grown(free, likely), free.best) == (10, 10)
    assert (grown(dear, likely), dear.best) == (0, 0)


def test_a_jump_of_the_curve_hides_nothing_behind_it() -> None:
    """The first node costs half a step, thirty of them not more."""
    costs = CostCurve({0: 1.0, 1: 1.5, 30: 1.5})
    budget = adaptive(costs)
    assert (grown(budget, [0.4] * 30), budget.best) == (30, 30)
    lonely = adaptive(costs)
    grown(lonely, [0.4])
    assert lonely.best == 0, "one alone does not pay"


def test_a_plateau_is_filled_and_the_next_jump_is_not_made() -> None:
    costs = CostCurve({0: 1.0, 8: 1.2, 16: 9.0})
    budget = adaptive(costs)
    grown(budget, [0.2] * 16)
    assert budget.best == 8


@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
def test_without_costs_all_above_the_threshold_are_taken(budget: str) -> None:
    drafting = Drafting(nodes=4, threshold=0.1, budget=budget)
    for probabilities, taken in [
        ([0.5, 0.2, 0.1, 0.09, 0.01], 3),
        ([0.9] * 9, 4),
        ([0.05], 0),
        ([], 0),
    ]:
        plenty = Budget(drafting, 9, 100)
        assert grown(plenty, probabilities) == plenty.best == taken


def test_a_fixed_budget_does_not_ask_what_a_node_costs() -> None:
    dear = CostCurve({0: 1.0, 1: 999.0})
    budget = Budget(Drafting(nodes=4, budget="fixed"), 9, 100, dear)
    assert grown(budget, [0.5] * 9) == budget.best == 4
    dear.steps["plain"] = 10 * IDLE
    assert Budget(Drafting(nodes=4, budget="fixed"), 9, 100, dear).nodes == 4


@pytest.mark.parametrize("costs", [None, CostCurve({0: 1.0, 1: 1.0})])
def test_no_nodes_or_no_depth_is_no_room(costs: CostCurve | None) -> None:
    for nodes, depth in ((0, 9), (9, 0), (9, -3)):
        budget = Budget(Drafting(nodes=nodes), depth, 100, costs)
        assert budget.nodes == 0 and grown(budget, [1.0]) == budget.best == 0
    assert Budget(Drafting(nodes=128), 1, 100, costs).nodes == 128


def test_plain_steps_are_tried_again_and_so_are_drafts() -> None:
    for dearest in (1.0, 999.0):
        for kind, own, rival in (("plain", 0, 3), ("drafted", 3, 0)):
            curve = CostCurve({0: 1.0, 9: dearest})
            for _ in range(IDLE):
                assert not curve.idle(kind)
                curve.observe(rival, curve.seconds(rival), 0.0, 0.0)
            assert curve.idle(kind)
            due = adaptive(curve)
            grown(due, [0.9])
            assert due.best == (kind == "drafted")
            curve.observe(own, curve.seconds(own), 0.0, 0.0)
            assert not curve.idle(kind), "once it was tried it is not due"


def test_the_floor_is_no_higher_than_what_could_pay() -> None:
    """What is too unlikely to be looked up at all must not be what would have paid."""
    costs = CostCurve({0: 1.0, 127: 1.0}, node=0.1)
    budget = adaptive(costs, threshold=0.001)
    assert budget.floor > 0.001
    likely = budget.floor * 0.999
    worth = [(1 + n * likely) / t for n, t in enumerate(costs.table)]
    assert max(worth) == worth[0], "no tree of such nodes beats a plain step"
    assert adaptive(costs, threshold=0.5).floor == 0.5
    costs.steps["drafted"] = IDLE
    assert adaptive(costs, threshold=0.001).floor == 0.001, "a draft that is due need not pay"


def step(nodes: int, emitted: int = 1, draft: float = 0.0, **look_ups: float) -> Step:
    """A step over so many nodes whose forward took a second, and all else almost no time."""
    return Step(
        0,
        tuple(Token(7, at, "target") for at in range(emitted)),
        {"context": nodes} if nodes else {},
        draft_seconds=draft,
        verify_seconds=1.0,
        sample_seconds=0.5,
        other_seconds=0.25,
        look_ups={name.replace("_", ":"): seconds for name, seconds in look_ups.items()},
    )


def test_what_a_draft_model_takes_says_nothing_of_what_a_node_costs() -> None:
    told: list[tuple[float, ...]] = []

    class Noting(CostCurve):
        def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
            told.append((nodes, verify, draft, other))

    governor = Governor(Drafting(), 100, Noting({0: 1.0, 9: 1.0}))
    governor.observe(step(5, draft=4.0, context=0.5, draft_small=1.0, draft_mid=2.0), learning=0.25)
    governor.observe(step(0, draft=0.5, context=0.25))
    assert told == [(5, 1.0, 0.75, 1.0), (0, 1.0, 0.5, 0.75)]


def rooms(governor: Governor, emitted: int, draft: float, steps: int) -> list[int]:
    """The nodes that the next steps have room for, if those that draft emit so many tokens."""
    found = []
    for _ in range(steps):
        found.append(governor.budget(20).nodes)
        resting = governor.costs is not None and governor.costs.trial.rest
        drafted = bool(found[-1]) and not resting
        governor.observe(step(3, emitted, draft) if drafted else step(0))
    return found


class Still(CostCurve):
    """Learns nothing."""

    def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
        """Nothing."""


def tries(credit: float, loss: float) -> int:
    """The steps after which more than the credit is lost."""
    return int(credit // loss) + 1


FIRST_REST = tries(Trial().credit, 0.5)


@pytest.mark.parametrize(
    ("emitted", "draft", "loss"), [(1, 0.125, 0.125), (2, 1.5, 0.5), (4, 3.5, 0.5), (1, 99.0, 1.0)]
)
def test_drafting_that_takes_longer_than_it_saves_rests_longer_and_longer(
    emitted: int, draft: float, loss: float
) -> None:
    governor = Governor(Drafting(nodes=9), 100, Still({0: 1.0, 9: 1.0}))
    found = rooms(governor, emitted, draft, 1500)
    rests, pause = [9] * tries(Trial().credit, loss), SHORTEST
    while len(rests) < len(found):
        steps = range(len(rests), len(rests) + pause)
        rests += [9 if at % GLANCE == FIRST else 0 for at in steps]
        rests += [9] * tries(AGAIN, loss)
        pause = min(2 * pause, LONGEST)
    assert found == rests[:1500]


def test_a_glance_asks_near_databases_alone_and_ends_a_rest_that_is_over() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    rooms(Governor(Drafting(nodes=9), 100, costs), 1, 0.5, FIRST_REST)
    for emitted, rests in ((2, True), (3, False)):
        governor = Governor(Drafting(nodes=9), 100, costs)
        for _ in range(FIRST):
            waiting = governor.budget(20)
            assert waiting.near and not waiting.nodes
            governor.observe(step(0))
        glance = governor.budget(20)
        assert glance.near and glance.nodes == 9
        governor.observe(step(3, emitted))
        assert governor.budget(20).near == rests, "one token may be chance"


def test_what_draft_models_take_is_lost_and_so_is_what_learning_takes() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    before = costs.trial.credit
    Governor(Drafting(), 100, costs).observe(step(3, 2, 1.75, draft_small=1.0), learning=0.5)
    assert costs.trial.credit == before + 2 - (1.0 + 0.25 + 1.0 + 0.5)


def test_learning_alone_can_make_drafting_rest() -> None:
    """Drafts that save half a step cost one to learn from."""
    costs = Still({0: 1.0, 9: 1.0})
    governor = Governor(Drafting(), 100, costs)
    for number in range(tries(Trial().credit, 0.5)):
        assert not costs.trial.rest, number
        governor.budget(20)
        governor.observe(step(3, 2, 1.5), learning=1.0 + (number % 2) / 8)
    assert costs.trial.rest == SHORTEST
    governor = Governor(Drafting(), 100, Still({0: 1.0, 9: 1.0}))
    for _ in range(100):
        governor.budget(20)
        governor.observe(step(3, 2, 0.5), learning=0.25)
    assert governor.costs is not None and governor.costs.trial.credit == CREDIT


def test_a_whole_text_is_paid_by_what_is_saved_before_that_counts() -> None:
    costs = Still({0: 2.0, 9: 2.0})
    governor = Governor(Drafting(), 100, costs)
    governor.taught(3.0, read=30)
    before = costs.trial.credit
    assert costs.trial.owed == 1.5
    for owed, credit in ((0.5, before), (0.0, before + 0.5), (0.0, before + 1.5)):
        governor.observe(step(3, 2))
        assert (costs.trial.owed, costs.trial.credit) == (owed, credit)
    governor.taught(9.0)
    governor.observe(step(3, 1, 1.0))
    assert (costs.trial.owed, costs.trial.credit) == (4.5, before + 1.0), "a loss is one at once"
    while not costs.trial.rest:
        governor.observe(step(3, 1, 1.0))
    assert costs.trial.owed == 0.0, "what a rest ends is not carried on"


def test_of_a_rest_the_latest_is_learned_as_far_as_it_is_cheap() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    governor = Governor(Drafting(nodes=9), 100, costs)
    costs.trial.lesson = 0.05
    governor.budget(20)
    assert governor.lesson(7) == 7, "all that a step decided"
    costs.trial.rest = 3
    for _ in range(3):
        governor.budget(20)
        assert governor.lesson(50) == 10, "10 x 0.05 is a hundredth of 50 steps"
        governor.observe(step(0))
    assert not costs.trial.rest
    governor.budget(20)
    assert governor.lesson(50) == 10, "decided in the rest that is over"
    governor.budget(20)
    assert governor.lesson(50) == 50
    costs.trial.rest, costs.trial.lesson = 3, 0.01
    governor.budget(20)
    assert governor.lesson(50) == 50, "cheap enough to leave nothing out"


def test_how_long_learning_takes_is_measured_where_nothing_else_is() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    governor = Governor(Drafting(nodes=9), 100, costs)
    governor.budget(20)
    governor.learned(99.0, 3)
    assert costs.trial.lesson == Trial().lesson, "in a step that drafts, that was about the drafts"
    governor.taught(32.0, read=32)
    assert costs.trial.lesson == pytest.approx(0.5, rel=1e-3)
    costs.trial.rest = 1
    governor.budget(20)
    governor.learned(80.0, 32)
    assert costs.trial.lesson == pytest.approx(1.5, rel=1e-3)


def test_without_an_account_all_is_learned_and_nothing_is_charged() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    for governor in (
        Governor(Drafting(), 100, None),
        Governor(Drafting(), 100, costs, rests=False),
    ):
        governor.budget(20)
        governor.taught(9.0, 9)
        governor.learned(9.0, 9)
        governor.observe(step(3, 1, 9.0), learning=5.0)
        assert governor.lesson(50) == 50
    assert costs.trial == Trial()


def test_what_drafting_was_worth_is_known_in_the_next_answer() -> None:
    costs = Still({0: 1.0, 9: 1.0})
    rooms(Governor(Drafting(nodes=9), 100, costs), 1, 0.5, FIRST_REST)
    assert Governor(Drafting(nodes=9), 100, costs).budget(20).near


@pytest.mark.parametrize(("emitted", "draft"), [(2, 0.5), (4, 2.5)])
def test_drafting_that_saves_time_goes_on(emitted: int, draft: float) -> None:
    governor = Governor(Drafting(nodes=9), 100, Still({0: 1.0, 9: 1.0}))
    assert set(rooms(governor, emitted, draft, 300)) == {9}


def test_after_a_good_time_the_first_rest_is_short_again() -> None:
    governor = Governor(Drafting(nodes=9), 100, Still({0: 1.0, 9: 1.0}))
    rooms(governor, 1, 0.5, 300)
    assert governor.costs is not None
    while governor.costs.trial.rest:
        rooms(governor, 1, 0.5, 1)
    rooms(governor, 4, 0.5, 10)
    assert governor.costs.trial.credit == CREDIT, "what was saved long ago counts no more"
    while not governor.costs.trial.rest:
        rooms(governor, 1, 0.5, 1)
    assert governor.costs.trial.rest == SHORTEST


@pytest.mark.parametrize(
    ("drafting", "costs"),
    [
        (Drafting(nodes=9), None),
        (Drafting(nodes=9, budget="fixed"), Still({0: 1.0, 9: 99.0})),
    ],
)
def test_without_costs_or_with_a_fixed_budget_nothing_rests(
    drafting: Drafting, costs: CostCurve | None
) -> None:
    assert set(rooms(Governor(drafting, 100, costs), 1, 99.0, 100)) == {9}
