"""Prompt lookup: its index finds what a scan of the whole text finds, the library's included."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafting.budget import Budget
from engine.drafting.lookup import LONGEST_COPY, LONGEST_MATCH, LookupDrafter
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import CONTEXT

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


def test_the_first_place_of_the_longest_match_counts() -> None:
    drafter = LookupDrafter()
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3, 6, 1, 2, 3]
    drafter.observe(tokens, len(tokens))
    assert draft(drafter, tokens) == ((4, 9, 2, 3, 5, 1, 2, 3, 6, 1), 3)
    assert draft(drafter, tokens, nodes=2) == draft(drafter, tokens, depth=2) == ((4, 9), 3)
    assert draft(drafter, tokens, nodes=0) == ((), 0)


def test_a_copy_ends_with_the_text() -> None:
    drafter = LookupDrafter()
    drafter.observe([7, 7, 7], 3)
    assert draft(drafter, [7, 7, 7]) == ((7,), 2)


def test_a_new_prompt_starts_a_new_text() -> None:
    drafter = LookupDrafter()
    drafter.observe([1, 2, 1], 3)
    drafter.finish([1, 2, 1], 1)
    drafter.observe([2, 3, 1], 3)
    assert draft(drafter, [2, 3, 1]) == ((), 0) == draft(LookupDrafter(), [5])
