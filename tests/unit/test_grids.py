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
def test_grid(a, b, c):
    pass

@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("a", range(10))
def test_few(a):
    pass

@pytest.mark.soak
def test_long():
    pass

def test_short():
    pass
"""


@pytest.mark.parametrize(("soak", "passed"), [(True, 12 + 7 + 1), (False, 12 + 3 + 1)])
def test_each_test_is_either_run_at_once_or_left_to_the_soak(
    pytester: pytest.Pytester, soak: bool, passed: int
) -> None:
    pytester.makepyfile(GRID)
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems"
    )
    pytester.makeini("[pytest]\nmarkers =\n    grid\n    soak\n")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *["--soak"] * soak)
    done.assert_outcomes(passed=passed, deselected=24 + 10 + 1 + 1 - passed)
