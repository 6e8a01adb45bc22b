"""The best path of a tree: what is drafted for a target that verifies chains alone.

The tree is grown best first as ever, so that the probability of every path in it is known. Of its
paths one is verified: the one whose tokens come fastest. That need not begin with the likeliest
token, as a copy that goes on for long may be worth more than a word that is likelier.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.drafting.budget import Budget
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import Work

MOST = 24
"""Nodes that are looked at, at most."""


class Grower(Protocol):
    """What grows trees best first: a Hierarchy."""

    def grow_tree(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add the likeliest nodes within the budget."""

    def chances(self) -> list[float]:
        """The probability of the path to each row of that tree, the root first."""


def grow_path(
    grower: Grower, tree: Tree, tokens: Sequence[int], budget: Budget
) -> Mapping[str, Work]:
    """Put the best path into the tree, which holds nothing yet; the rest is as `Drafter.grow`."""
    grown, chances, work = weighed(grower, tokens, budget)
    best, expected = best_row(grown, chances, budget)
    row = 0
    for at in path_to(grown, best):
        row = tree.add(row, grown.tokens[at], grown.sources[at], grown.match_lengths[at])
    budget.expected, budget.best = expected, len(tree)
    if budget.costs is not None:
        budget.worth = max(budget.worth, expected / budget.costs.table[len(tree)])
    return work


def weighed(
    grower: Grower, tokens: Sequence[int], budget: Budget
) -> tuple[Tree, list[float], Mapping[str, Work]]:
    """A tree with the probability of the path to each of its rows, the root first."""
    grown, room = Tree(tokens[-1]), unlimited(budget)
    room.nodes = MOST
    work = grower.grow_tree(grown, tokens, room)
    return grown, grower.chances(), work


def unlimited(budget: Budget) -> Budget:
    """The same room for nodes that need not pay."""
    room = Budget(Drafting(budget="fixed"), budget.depth, budget.vocabulary, near=budget.near)
    room.floor = budget.floor
    return room


def best_row(tree: Tree, chances: Sequence[float], budget: Budget) -> tuple[int, float]:
    """The end of the path that is worth most, and the tokens that it is expected to emit."""
    table = None if budget.costs is None else budget.costs.table
    best, most = (0, 1.0), 0.0 if table is None or budget.owed else 1.0 / table[0]
    expected = [1.0]
    for row in range(1, len(tree.tokens)):
        expected.append(expected[tree.parents[row]] + chances[row])
        depth = tree.depths[row]
        worth = expected[row] if table is None else expected[row] / table[depth]
        if depth <= budget.nodes and worth > most:
            best, most = (row, expected[row]), worth
    return best


def path_to(tree: Tree, row: int) -> list[int]:
    """The rows from below the root to that one."""
    rows: list[int] = []
    while row:
        rows.append(row)
        row = tree.parents[row]
    return rows[::-1]
