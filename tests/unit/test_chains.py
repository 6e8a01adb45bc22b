"""Chains of many sequences: the best paths, and the best use of the rows of one forward."""

import random
from contextlib import nullcontext
from itertools import product

import pytest

from engine.drafting import chains
from engine.drafting.calibration import Calibration
from engine.drafting.chains import Room, StepCost, grow_chains
from engine.drafting.compiled import hierarchy
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import ContextTier
from engine.tree import Tree
from engine.types import CONTEXT
from tests.support.tiers import using

FREE = StepCost(1e12)
"""Rows cost nothing."""


def drafter(text: list[int]) -> Hierarchy:
    """Hierarchy drafting from one text."""
    return hierarchy([ContextTier(text)], Calibration())


def random_tree(draw: random.Random) -> tuple[Tree, list[float]]:
    """A tree with the probability of the path to each row."""
    tree, found = Tree(0), [1.0]
    left = {0: 1.0}
    for token in range(1, draw.randrange(1, 9)):
        parent = draw.randrange(len(tree.tokens))
        share = left[parent] * draw.random()
        row = tree.add(parent, token, CONTEXT)
        left[parent] -= share
        left[row] = share
        found.append(share)
    return tree, found


def expected(tree: Tree, chances: list[float], row: int) -> float:
    """The drafted tokens that the path to a row is expected to emit."""
    total = 0.0
    while row:
        total, row = total + chances[row], tree.parents[row]
    return total


def test_both_cores_find_the_same_chances() -> None:
    draw = random.Random(4)
    text = [draw.randrange(5) for _ in range(300)]
    found = []
    for slow in (True, False):
        with using(None) if slow else nullcontext():
            made = drafter(text)
        for at in range(3, 60):
            tree, budget = Tree(text[at]), Room(6, 5, 0.02).budget()
            made.grow(tree, text[: at + 1], budget)
            chances = made.chances()
            assert len(chances) == len(tree.tokens) and chances[0] == 1.0
            assert sum(chances) == pytest.approx(budget.expected)
            found.append(chances)
            made.observe(text[: at + 3], 2)
    assert found[:57] == found[57:]


def test_the_best_ends_rise_by_ever_less_and_nothing_better_is_left_out() -> None:
    draw = random.Random(5)
    for _ in range(300):
        tree, shares = random_tree(draw)
        ends = [(0, 1.0), *chains.hull(tree, shares)]
        slopes = [slope for _, slope in ends]
        depths = [tree.depths[row] for row, _ in ends]
        assert slopes == sorted(slopes, reverse=True) and depths == sorted(set(depths))
        for row in range(1, len(tree.tokens)):
            for (here, _), (there, slope) in zip(ends, ends[1:], strict=False):
                if tree.depths[here] <= tree.depths[row] <= tree.depths[there]:
                    line = expected(tree, shares, here) + slope * (
                        tree.depths[row] - tree.depths[here]
                    )
                    assert expected(tree, shares, row) <= line + 1e-9


@pytest.mark.parametrize("cost", [StepCost(3.0), StepCost(30.0), StepCost(8.0, 0.3), FREE])
def test_no_other_choice_of_paths_is_worth_more(cost: StepCost) -> None:
    draw = random.Random(6)
    for _ in range(60):
        trees = [random_tree(draw) for _ in range(3)]
        steps, before = [], [0] * 3
        for number, (tree, found) in enumerate(trees):
            for row, slope in chains.hull(tree, found):
                steps.append((slope, number, row, tree.depths[row] - before[number]))
                before[number] = tree.depths[row]
        ends = chains.affordable(steps, 3, cost)

        def worth(rows: tuple[int, ...], trees: list[tuple[Tree, list[float]]] = trees) -> float:
            drafted = sum(tree.depths[row] for (tree, _), row in zip(trees, rows, strict=True))
            tokens = sum(expected(*one, row) for one, row in zip(trees, rows, strict=True))
            return (3 + tokens) / cost.of(3 + drafted, drafted)

        chosen = worth(tuple(ends.get(number, 0) for number in range(3)))
        every = product(*(range(len(tree.tokens)) for tree, _ in trees))
        assert chosen == pytest.approx(max(map(worth, every)))


def test_a_chain_is_the_path_that_goes_on_for_long() -> None:
    text = [1, 2, 3, 4, 5, 6, 7] * 9
    (made,) = grow_chains([(drafter(text), text, Room(5, 10, 0.02))], FREE)
    assert made.tokens == [1, 2, 3, 4, 5] and made.sources == [CONTEXT] * 5


def test_the_larger_the_crowd_the_less_is_drafted() -> None:
    draw = random.Random(8)
    text = [draw.randrange(4) for _ in range(400)]
    lengths = []
    for crowd in (1, 8, 64):
        asked = [(drafter(text[:100]), text[: 100 + at], Room(6, 10, 0.02)) for at in range(crowd)]
        made = grow_chains(asked, StepCost(16.0))
        lengths.append(sum(len(chain.tokens) for chain in made) / crowd)
    assert lengths[0] > lengths[1] > lengths[2]


def test_no_room_and_no_sequences_are_no_drafts() -> None:
    text = [1, 2, 3] * 9
    assert grow_chains([(drafter(text), text, Room(0, 10, 0.02))], FREE) == [chains.NOTHING]
    assert grow_chains([], FREE) == []
    (made,) = grow_chains([(drafter(text), text, Room(4, 3, 0.02))], FREE)
    assert 3 not in made.tokens and max([0, *made.tokens]) < 3
