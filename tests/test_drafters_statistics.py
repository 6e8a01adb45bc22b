"""The statistics tier: longer keys first, trust by count, and tables that lie."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.statistics import DOUBT, StatisticsDrafter
from engine.types import Continuation, Followers
from tests.test_drafters_context import keeps_its_promises


class Table:
    """A dictionary of keys that notes what it was asked."""

    def __init__(self, entries: dict[tuple[int, ...], Followers]) -> None:
        self.entries, self.asked = entries, list[tuple[int, ...]]()

    def look_up(self, key: Sequence[int]) -> Followers | None:
        self.asked.append(tuple(key))
        return self.entries.get(tuple(key))


def followers(count: float, *paths: tuple[tuple[int, ...], float]) -> Followers:
    return Followers(count, tuple(Continuation(path, share) for path, share in paths))


def test_keys_are_asked_from_long_to_short_and_never_longer_than_the_text() -> None:
    table = Table({})
    drafter = StatisticsDrafter(table)
    for tokens, asked in [
        ([1, 2, 3, 4], [(2, 3, 4), (3, 4), (4,)]),
        ([1, 2], [(1, 2), (2,)]),
        ([1], [(1,)]),
    ]:
        table.asked.clear()
        assert drafter.propose(tokens, 9, 0.01) == [] and table.asked == asked


def test_the_arithmetic_of_back_off() -> None:
    table = Table(
        {
            (2, 3): followers(60.0, ((5,), 0.5), ((5, 6), 0.25)),
            (3,): followers(100.0, ((5,), 0.2), ((7,), 0.6)),
        }
    )
    found = StatisticsDrafter(table).propose([2, 3], 9, 0.01)
    two, one = 60 / (60 + DOUBT[1]), 100 / (100 + DOUBT[0])
    values = {c.path: (c.probability, c.match_length) for c in found}
    assert values == {
        (5,): (pytest.approx(two * 0.5 + (1 - two) * one * 0.2), 2),
        (5, 6): (pytest.approx(two * 0.25), 2),
        (7,): (pytest.approx((1 - two) * one * 0.6), 1),
    }


def test_a_rare_key_is_trusted_less() -> None:
    likely = [
        StatisticsDrafter(Table({(1,): followers(count, ((5,), 1.0))})).propose([1], 1, 0.0)
        for count in (2.0, 50.0, 5000.0)
    ]
    values = [found[0].probability for found in likely]
    assert values == sorted(values) and values[0] < 0.05 and values[2] > 0.9


PATHS = st.recursive(
    st.just([()]),
    lambda known: st.tuples(known, st.integers(0, 5), st.integers(0, 30)).map(
        lambda x: [*x[0], (*x[0][x[2] % len(x[0])], x[1])]
    ),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True)
@given(PATHS, PATHS, st.integers(0, 9), st.floats(0.0, 0.4), st.integers(1, 4000))
def test_well_formed_tables_make_well_formed_drafts(
    long: list[tuple[int, ...]],
    short: list[tuple[int, ...]],
    room: int,
    threshold: float,
    count: int,
) -> None:
    def tree(paths: list[tuple[int, ...]]) -> Followers:
        whole = list(dict.fromkeys(paths[1:]))
        values = {(): 1.0}
        for path in whole:
            rivals = sum(other[:-1] == path[:-1] for other in whole)
            values[path] = values[path[:-1]] / rivals
        ranked = sorted(whole, key=lambda path: -values[path])
        return followers(float(count), *((path, values[path]) for path in ranked))

    table = Table({(1, 2): tree(long), (2,): tree(short)})
    keeps_its_promises(StatisticsDrafter(table).propose([1, 2], room, threshold), room, threshold)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2**32), max_size=4).map(tuple), st.floats(0, 1)),
        max_size=12,
    )
)
def test_tables_that_lie_do_no_harm(paths: list[tuple[tuple[int, ...], float]]) -> None:
    table = Table({(1,): followers(1e9, *paths)})
    assert len(StatisticsDrafter(table).propose([1], 5, 0.01)) <= 5


def test_nothing_is_learned() -> None:
    table = Table({})
    drafter = StatisticsDrafter(table)
    drafter.observe([1, 2], 2)
    drafter.finish([1, 2], 2)
    assert table.entries == {} and table.asked == []
