"""The budget: it cuts a tree where an exhaustive search over all its sizes would."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.budget import Budget
from engine.drafting.costs import LARGEST, CostCurve
from engine.settings import Drafting
from engine.types import DATABASES, STACK

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


def adaptive(
    costs: CostCurve, threshold: float = 0.0, nodes: int = LARGEST, due: str = ""
) -> Budget:
    return Budget(Drafting(nodes=nodes, threshold=threshold), 99, 100, costs, due)


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
def test_a_draft_that_is_due_has_a_node_and_is_otherwise_the_best(
    costs: CostCurve, probabilities: list[float]
) -> None:
    budget = adaptive(costs, threshold=0.1, due=DATABASES)
    grown(budget, probabilities)
    usable = [p for p in probabilities if p >= 0.1]
    assert (budget.best > 0) == bool(usable)
    if usable:
        every = [worth(costs, usable, size) for size in range(1, len(usable) + 1)]
        assert every[budget.best - 1] >= max(every) * (1 - 1e-9)


@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
def test_without_costs_or_with_a_fixed_budget_all_above_the_threshold_are_taken(
    budget: str,
) -> None:
    drafting = Drafting(nodes=4, threshold=0.1, budget=budget)
    dear = CostCurve({0: 1.0, 1: 999.0}) if budget == "fixed" else None
    for probabilities, taken in [
        ([0.5, 0.2, 0.1, 0.09, 0.01], 3),
        ([0.9] * 9, 4),
        ([0.05], 0),
        ([], 0),
    ]:
        plenty = Budget(drafting, 9, 100, dear)
        assert grown(plenty, probabilities) == plenty.best == taken


@pytest.mark.parametrize("costs", [None, CostCurve({0: 1.0, 1: 1.0})])
def test_no_nodes_or_no_depth_is_no_room(costs: CostCurve | None) -> None:
    for nodes, depth in ((0, 9), (9, 0), (9, -3)):
        budget = Budget(Drafting(nodes=nodes), depth, 100, costs)
        assert budget.nodes == 0 and grown(budget, [1.0]) == budget.best == 0
    assert Budget(Drafting(nodes=128), 1, 100, costs).nodes == 128


def test_the_floor_is_no_higher_than_what_could_pay() -> None:
    """What is too unlikely to be looked up at all must not be what would have paid."""
    costs = CostCurve({0: 1.0, 127: 1.0}, node=0.1)
    budget = adaptive(costs, threshold=0.001)
    assert budget.floor > 0.001
    likely = budget.floor * 0.999
    worth = [(1 + n * likely) / t for n, t in enumerate(costs.table)]
    assert max(worth) == worth[0], "no tree of such nodes beats a plain step"
    assert adaptive(costs, threshold=0.5).floor == 0.5
    due = adaptive(costs, threshold=0.001, due=DATABASES)
    assert due.floor == 0.001, "a draft that is due need not pay"
    assert adaptive(costs, threshold=0.001, due=STACK).floor == budget.floor, "it is another's"
