"""The statistics tier: ever longer keys are asked until one is unknown, and nothing is learned."""

from collections.abc import Sequence

from engine.drafting.statistics import KEY, StatisticsTier
from engine.types import STATISTICS, Followers


class Table:
    """A dictionary of keys that notes what it was asked."""

    def __init__(self, entries: dict[tuple[int, ...], Followers]) -> None:
        self.entries, self.asked = entries, list[tuple[int, ...]]()
        self.often: Followers | None = None

    def look_up(self, key: Sequence[int]) -> Followers | None:
        self.asked.append(tuple(key))
        return self.entries.get(tuple(key))

    def unigrams(self) -> Followers | None:
        return self.often


def followers(**counts: float) -> Followers:
    """Followers from counts by token, written like t5=2."""
    found = {int(name[1:]): count for name, count in counts.items()}
    return Followers(sum(found.values()), len(found), found)


def test_keys_are_asked_from_short_to_long_until_one_is_unknown() -> None:
    one, two, three = followers(t7=9), followers(t7=4), followers(t8=1)
    for entries, asked, found in [
        ({}, [(4,)], []),
        ({(4,): one}, [(4,), (3, 4)], [one]),
        ({(4,): one, (3, 4): two}, [(4,), (3, 4), (2, 3, 4)], [one, two]),
        (
            {(4,): one, (3, 4): two, (2, 3, 4): three, (1, 2, 3, 4): one},
            [(4,), (3, 4), (2, 3, 4)],
            [one, two, three],
        ),
    ]:
        table = Table(entries)
        tier = StatisticsTier(table)
        assert tier.matches((1, 2, 3, 4)) == found and table.asked == asked
        assert (tier.name, tier.source) == (STATISTICS, STATISTICS)
    assert KEY == 3, "what a statistics file holds"


def test_a_key_is_never_longer_than_the_text() -> None:
    table = Table({(4,): followers(t1=1), (3, 4): followers(t1=1)})
    assert len(StatisticsTier(table).matches((3, 4))) == 2
    assert len(StatisticsTier(table).matches((4,))) == 1
    assert StatisticsTier(table).matches(()) == []
    assert table.asked == [(4,), (3, 4), (4,)]


def test_nothing_is_learned() -> None:
    table = Table({})
    tier = StatisticsTier(table)
    tier.observe([1, 2], 2)
    tier.finish([1, 2], 2)
    assert table.entries == {} and table.asked == []
