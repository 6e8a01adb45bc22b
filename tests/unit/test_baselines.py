"""The baselines: prompt lookup finds what a scan of the whole text finds, the library's included;
the paper's configuration keeps its constants, whatever the evidence."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.baselines import (
    AHEAD,
    DRAFTS,
    LONGEST_COPY,
    LONGEST_MATCH,
    NODES,
    Flat,
    LookupDrafter,
    PublishedContext,
    PublishedModel,
    PublishedStatistics,
)
from engine.drafting.budget import Budget
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import CONTEXT
from tests.support.tiers import Table, followers

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def scan(tokens: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The draft and its match length, the slow and obvious way."""
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        for at in range(len(tokens) - size):
            if list(tokens[at : at + size]) == list(tokens[-size:]):
                return tuple(tokens[at + size : at + size + LONGEST_COPY]), size
    return (), 0


def draft(
    drafter: LookupDrafter, tokens: Sequence[int], nodes: int = 99, depth: int = 99
) -> tuple[tuple[int, ...], int]:
    """The chain that is drafted, and the match length it is credited with."""
    tree = Tree(tokens[-1])
    budget = Budget(Drafting(nodes=nodes, budget="fixed", threshold=0.5), depth, 10**6)
    assert set(drafter.grow(tree, tokens, budget)) == {CONTEXT}
    assert tree.parents[1:] == list(range(len(tree))), "one chain"
    assert set(tree.sources[1:]) <= {CONTEXT} and len(set(tree.match_lengths[1:])) <= 1
    return tree.path(len(tree)), tree.match_lengths[-1]


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_the_index_finds_what_a_scan_finds(tokens: list[int], steps: list[int]) -> None:
    drafter = LookupDrafter()
    end = steps[0]
    drafter.observe(tokens[:end], len(tokens[:end]))
    for step in steps[1:]:
        assert draft(drafter, tokens[:end]) == scan(tokens[:end])
        if end >= len(tokens):
            break
        before, end = end, min(end + step, len(tokens))
        drafter.observe(tokens[:end], end - before)


def test_a_new_prompt_starts_a_new_text() -> None:
    drafter = LookupDrafter()
    drafter.observe([1, 2, 1], 3)
    drafter.finish([1, 2, 1], 1)
    drafter.observe([2, 3, 1], 3)
    assert draft(drafter, [2, 3, 1]) == ((), 0) == draft(LookupDrafter(), [5])


# the paper's configuration

Paths = list[tuple[int, ...]]


def grown(
    drafter: Flat, tokens: Sequence[int], nodes: int = NODES, depth: int = 99, vocabulary: int = 999
) -> Tree:
    tree = Tree(tokens[-1])
    budget = Budget(Drafting(nodes=nodes, budget="fixed"), depth, vocabulary)
    assert set(drafter.grow(tree, tokens, budget)) == {drafter.name}
    assert set(tree.sources[1:]) <= {drafter.name}
    return tree


def leaves(tree: Tree) -> Paths:
    return [tree.path(row) for row in range(1, len(tree) + 1) if not tree.children[row]]


class Listed(Flat):
    """A tier that says what it was given."""

    name = "model"

    def __init__(self, *drafts: tuple[tuple[int, ...], int]) -> None:
        self.given = drafts

    def drafts(self, tokens: Sequence[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
        return self.given


def test_seven_drafts_of_four_tokens_at_most() -> None:
    tree = grown(Listed(*(((i, i, i, i), 1) for i in range(20))), [0], nodes=128)
    assert leaves(tree) == [(i,) * AHEAD for i in range(DRAFTS)]
    assert len(tree) == NODES == DRAFTS * AHEAD == 28


def test_drafts_stay_within_the_budget_and_the_vocabulary() -> None:
    drafter = Listed(((1, 2, 3, 4), 2), ((5, 999), 2), ((5, 6, 7), 1))
    assert leaves(grown(drafter, [0])) == [(1, 2, 3, 4), (5, 6, 7)]
    assert leaves(grown(drafter, [0], depth=2)) == [(1, 2), (5, 6)]
    assert leaves(grown(drafter, [0], nodes=5)) == [(1, 2, 3, 4), (5,)]
    assert leaves(grown(drafter, [0], vocabulary=1000))[1] == (5, 999)


def test_the_context_keeps_the_seven_latest_continuations() -> None:
    drafter = PublishedContext()
    tokens: list[int] = []
    for i in range(10):
        tokens += [7, 100 + i, 1, 2, 3]
    drafter.observe(tokens, len(tokens))
    drafter.observe([*tokens, 7], 1)
    assert leaves(grown(drafter, [7])) == [(100 + i, 1, 2, 3) for i in range(9, 2, -1)]


def test_the_model_tier_ranks_by_answers() -> None:
    drafter = PublishedModel([((4, 5, 6, 7, 8), 1.0), ((9, 9), 5.0)])
    assert leaves(grown(drafter, [4])) == [(5, 6, 7, 8)] and leaves(grown(drafter, [9])) == []
    for _ in range(2):
        drafter.finish([4, 1, 2, 3, 3, 4, 1, 2, 3, 3], 9)
    assert leaves(grown(drafter, [4]))[0] == (1, 2, 3, 3)
    assert drafter.grams[(4, 1, 2, 3, 3)] == 2, "once per answer, however often it was said"
    for token in range(20, 40):
        drafter.finish([4, token, token, token, token], 4)
    assert len(leaves(grown(drafter, [4], nodes=128))) == DRAFTS
    assert leaves(grown(drafter, [4]))[0] == (1, 2, 3, 3), "the frequent are not pushed out"


def test_the_statistics_are_asked_with_two_tokens_then_one() -> None:
    table = Table(
        {
            (1, 2): followers({5: 8, 3: 1}),
            (2,): followers({4: 5}),
            (1, 2, 5): followers({6: 2}),
            (2, 5, 6): followers({7: 1}),
            (6, 7): followers({8: 1}),
            (7, 8): followers({9: 1}),
        }
    )
    drafter = PublishedStatistics(table)
    tree = grown(drafter, [0, 1, 2])
    assert table.asked[0] == (1, 2) and (2,) in table.asked
    assert leaves(tree) == [(5, 6, 7, 8), (3,), (4,)]
    assert [tree.match_lengths[tree.children[0][token]] for token in (5, 3, 4)] == [2, 2, 1]
    drafter.observe([1, 2], 2)
    drafter.finish([1, 2], 2)
    assert len(table.entries) == 6
