"""Grids of tests: a few cases, always the same, that hold all that two axes say together."""

from itertools import combinations, product
from math import prod

import pytest

from tests.support.grids import Case, spread

SIZES = [(7,), (3, 4), (2, 2, 4), (4, 2, 3, 7), (10, 3, 2, 2)]


def cases_of(sizes: tuple[int, ...]) -> list[Case]:
    return [dict(enumerate(case)) for case in product(*map(range, sizes))]  # type: ignore[misc]


def parts(cases: list[Case], strength: int) -> set[object]:
    return {part for case in cases for part in combinations(sorted(case.items()), strength)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_pair_that_occurs_is_run(sizes: tuple[int, ...], strength: int) -> None:
    cases = cases_of(sizes)
    chosen = spread(cases, strength)
    depth = min(strength, len(sizes))
    assert parts([cases[number] for number in chosen], depth) == parts(cases, depth)
    assert chosen == spread(cases, strength), "no run has others"
    least = prod(sorted(sizes)[-depth:])
    assert least <= len(chosen) <= 1.5 * least


def test_what_does_not_occur_is_not_asked_for() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]
    assert len(spread(cases, 2)) == 2 == len(spread(cases, 1))


GRID = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("a", [[], "x"])
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(4))
def test_it(a, b, c):
    pass

@pytest.mark.parametrize("a", range(5))
def test_other(a):
    pass
"""


@pytest.mark.parametrize(("whole", "grid"), [(True, 24), (False, 12)])
def test_all_of_a_grid_is_run_when_it_is_asked_for(
    pytester: pytest.Pytester, whole: bool, grid: int
) -> None:
    pytester.makepyfile(GRID)
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems"
    )
    pytester.makeini("[pytest]\nmarkers = grid\n")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *["--whole"] * whole)
    done.assert_outcomes(passed=grid + 5, deselected=24 - grid)
