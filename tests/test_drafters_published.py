"""The published baseline: its constants, whatever the evidence."""

from engine.drafters.published import (
    AHEAD,
    DRAFTS,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
    flat,
)
from engine.types import Candidate, Gram
from tests.test_drafters_statistics import Table, followers


def leaves(candidates: list[Candidate]) -> list[tuple[int, ...]]:
    paths = [candidate.path for candidate in candidates]
    return [path for path in paths if not any(p[: len(path)] == path != p for p in paths)]


def test_a_flat_list_of_distinct_drafts_with_shared_prefixes_once() -> None:
    drafts = [((1, 2, 3, 4), 2), ((1, 2, 9, 9), 2), ((1, 2, 3, 4), 1), ((5,), 1)]
    found = flat(drafts)
    assert [c.path for c in found] == [
        (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 9), (1, 2, 9, 9), (5,),
    ]  # fmt: skip
    assert {c.probability for c in found} == {1.0}
    assert [c.match_length for c in found] == [2] * 6 + [1]


def test_seven_drafts_at_most() -> None:
    found = flat(((i, i, i, i), 1) for i in range(20))
    assert len(found) == DRAFTS * AHEAD and len(leaves(found)) == DRAFTS


def test_the_context_keeps_the_seven_latest_continuations() -> None:
    drafter = PublishedContext()
    tokens: list[int] = []
    for i in range(10):
        tokens += [7, 100 + i, 1, 2, 3]
    drafter.observe(tokens, len(tokens))
    drafter.observe([*tokens, 7], 1)
    found = leaves(drafter.propose([7], 28, 0.0))
    assert found == [(100 + i, 1, 2, 3) for i in range(9, 2, -1)]


def test_the_context_learns_across_steps_and_not_twice() -> None:
    whole, stepwise = PublishedContext(), PublishedContext()
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    whole.observe(tokens, len(tokens))
    stepwise.observe(tokens[:3], 3)
    for end in range(4, len(tokens) + 1):
        stepwise.observe(tokens[:end], 1)
    stepwise.observe(tokens, len(tokens))
    assert stepwise.table == whole.table
    assert all(len(gram) == AHEAD for line in whole.table.values() for gram in line)


def test_the_model_tier_ranks_by_answers() -> None:
    drafter = PublishedModel([Gram((0, 0, 0, 4, 5, 6, 7, 8), 1, 1), Gram((9,), 5, 1)])
    assert drafter.table == {4: [(5, 6, 7, 8)]}
    for _ in range(2):
        drafter.finish([4, 1, 2, 3, 3, 4, 1, 2, 3, 3], 9)
    assert leaves(drafter.propose([4], 28, 0.0))[0] == (1, 2, 3, 3)
    assert drafter.grams[(4, 1, 2, 3, 3)] == 2, "once per answer, however often it was said"
    assert all(len(line) <= DRAFTS for line in drafter.table.values())


def test_the_statistics_are_asked_with_two_tokens_then_one() -> None:
    table = Table(
        {
            (1, 2): followers(9, ((5,), 0.9), ((5, 6), 0.8), ((5, 6, 7, 8, 9), 0.1), ((3,), 0.1)),
            (2,): followers(9, ((4,), 0.5)),
        }
    )
    drafter = PublishedStatistics(table)
    found = drafter.propose([0, 1, 2], 28, 0.0)
    assert table.asked == [(1, 2), (2,)]
    assert leaves(found) == [(5, 6, 7, 8), (3,), (4,)]
    assert PublishedStatistics(Table({})).propose([1], 28, 0.0) == []


def test_an_empty_database_proposes_nothing() -> None:
    assert PublishedContext().propose([1], 28, 0.0) == []
    assert PublishedModel().propose([1], 28, 0.0) == []
