"""A few cases of a grid in the place of all: nothing that two of its axes say together is left out.

A test with the mark `grid` that repeats itself over a product of parameters runs in the cases that
`spread` chooses, which are the same in every run. `--whole` runs all of them: `make soak`.
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
    """The collected tests that are cases of grids and not chosen."""
    grids = defaultdict[tuple[str, int], list[pytest.Function]](list)
    for item in items:
        mark = item.get_closest_marker("grid")
        if mark is not None and isinstance(item, pytest.Function):
            strength = mark.args[0] if mark.args else 2
            grids[item.nodeid.split("[")[0], strength].append(item)
    left = set[pytest.Item]()
    for (_, strength), cases in grids.items():
        # A value of an axis is one object in all cases, and may be none that can be compared.
        values = [{n: id(value) for n, value in case.callspec.params.items()} for case in cases]
        chosen = spread(values, strength)
        left.update(case for number, case in enumerate(cases) if number not in chosen)
    return left
