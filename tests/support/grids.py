"""Which tests `make test` runs, and which it leaves to `make soak`.

A test with the mark `soak` is left to `make soak`; `soak(stay=3)` keeps three of its cases. A test
with the mark `grid` repeats itself over a product of parameters: `make test` runs the cases that
`spread` chooses, in which every pair of values occurs, and `make soak` runs the others. Both
choices are the same in every run.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest

Case = Mapping[str, int]


def spread(cases: Sequence[Case], strength: int) -> set[int]:
    """The numbers of cases, few of them, in which everything occurs that occurs in any: every value
    of an axis for strength 1, every pair of values of two axes for strength 2."""
    tuples = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set[Any]().union(*tuples)
    order = Random(0).sample(range(len(cases)), len(cases))
    chosen = set[int]()
    while missing:
        best = max(order, key=lambda number: len(tuples[number] & missing))
        chosen.add(best)
        missing -= tuples[best]
    return chosen


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The collected tests that `make test` does not run."""
    left = set[pytest.Item]()
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("soak") or item.get_closest_marker("grid"):
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: case.nodeid)  # They come in another order each time.
        mark = cases[0].get_closest_marker("soak")
        if mark is not None:
            stay = mark.kwargs.get("stay", 0)
            kept = {number * len(cases) // stay for number in range(stay)}
        else:
            kept = chosen(cases)
        left.update(case for number, case in enumerate(cases) if number not in kept)
    return left


def chosen(cases: Sequence[pytest.Item]) -> set[int]:
    """The numbers of the cases of a grid that run in `make test`."""
    mark = cases[0].get_closest_marker("grid")
    assert mark is not None
    # A value of an axis is one object in all cases, and may be none that can be compared.
    values = [
        {name: id(value) for name, value in case.callspec.params.items()}
        for case in cases
        if isinstance(case, pytest.Function)
    ]
    return spread(values, mark.args[0] if mark.args else 2)
