"""The draft tree: one node per path, parents first; cutting, grafting, the walk."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tree import Tree, graft

PATHS = st.lists(st.lists(st.integers(0, 4), max_size=6).map(tuple), max_size=40)
Path = tuple[int, ...]


def tree_of(*paths: Path) -> Tree:
    """A tree of the paths in their order, with all that leads to them."""
    tree = Tree(99)
    for path in paths:
        graft(tree, path, "context", len(path), 10**6)
    return tree


def paths_of(tree: Tree) -> list[Path]:
    return [tree.path(row) for row in range(len(tree) + 1)]


def assert_valid(tree: Tree) -> None:
    """All columns are of one length and say the same as the maps of children."""
    rows = len(tree.tokens)
    assert len(tree) == rows - 1
    columns = (tree.parents, tree.depths, tree.sources, tree.match_lengths, tree.children)
    assert {len(column) for column in columns} == {rows}
    assert (tree.parents[0], tree.depths[0], tree.sources[0]) == (-1, 0, "")
    for row in range(1, rows):
        assert 0 <= tree.parents[row] < row
        assert tree.depths[row] == tree.depths[tree.parents[row]] + 1 == len(tree.path(row))
    children: list[dict[int, int]] = [{} for _ in range(rows)]
    for row in range(1, rows):
        assert tree.tokens[row] not in children[tree.parents[row]], "siblings differ"
        children[tree.parents[row]][tree.tokens[row]] = row
    assert children == tree.children
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)


@settings(deadline=None, derandomize=True)
@given(PATHS)
def test_rows_hold_a_trie_whatever_is_added(paths: list[Path]) -> None:
    tree, known = Tree(99), {()}
    for path in paths:
        row = 0
        for depth, token in enumerate(path, start=1):
            before = len(tree)
            row = tree.add(row, token, "model", depth)
            assert tree.path(row) == path[:depth]
            assert len(tree) - before == (path[:depth] not in known)
            known.add(path[:depth])
    assert_valid(tree)
    assert set(paths_of(tree)) == known and tree.tokens[0] == 99


def test_equal_paths_are_one_node_of_the_first_source() -> None:
    tree = Tree(0)
    assert tree.add(0, 1, "context", 3) == tree.add(0, 1, "model", 7) == 1
    assert (tree.sources, tree.match_lengths) == (["", "context"], [0, 3])


@settings(deadline=None, derandomize=True)
@given(PATHS, st.integers(0, 60))
def test_cutting_keeps_the_first_nodes_and_a_valid_tree(paths: list[Path], nodes: int) -> None:
    tree = tree_of(*paths)
    before = (paths_of(tree), tree.sources[:], tree.match_lengths[:])
    tree.cut(nodes)
    assert_valid(tree)
    assert len(tree) == min(nodes, len(before[0]) - 1)
    assert (paths_of(tree), tree.sources, tree.match_lengths) == tuple(
        column[: nodes + 1] for column in before
    )


@settings(deadline=None, derandomize=True)
@given(PATHS, st.integers(0, 30))
def test_grafting_adds_what_fits_and_follows_what_is_there(paths: list[Path], nodes: int) -> None:
    tree, known = Tree(99), {()}
    for number, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            if path[:depth] not in known and len(known) - 1 >= nodes:
                break
            known.add(path[:depth])
        graft(tree, path, str(number), 2, nodes)
        assert set(paths_of(tree)) == known
    assert_valid(tree)
    assert len(tree) <= nodes and set(tree.match_lengths[1:]) <= {2}


def test_the_walk_is_the_longest_agreeing_path() -> None:
    draw = random.Random(0)
    for number in range(300):
        drawn = [tuple(draw.choices(range(3), k=draw.randrange(1, 6))) for _ in range(30)]
        tree = tree_of(*drawn)
        if number % 2:
            tree.cut(draw.randrange(len(tree) + 1))
        truth = [draw.randrange(3) for _ in range(10)]
        rows, emitted = tree.walk(lambda row: truth[tree.depths[row]])  # noqa: B023
        longest = max(len(path) for path in paths_of(tree) if path == tuple(truth[: len(path)]))
        assert len(rows) == longest and emitted == truth[: longest + 1]
        assert not rows or tree.path(rows[-1]) == tuple(truth[:longest])
        assert [tree.parents[row] for row in rows] == [0, *rows][: len(rows)]


@settings(deadline=None, derandomize=True)
@given(PATHS, PATHS, st.data())
def test_attaching_a_tree_adds_its_paths_below_a_row(
    paths: list[Path], more: list[Path], data: st.DataObject
) -> None:
    tree, other = tree_of(*paths), tree_of(*more)
    row = data.draw(st.integers(0, len(tree)))
    before = (paths_of(tree), tree.sources[:], tree.match_lengths[:])
    head, attached = tree.path(row), paths_of(other)
    tree.attach(row, other)
    assert_valid(tree)
    assert set(paths_of(tree)) == {*before[0], *(head + path for path in attached)}
    rows = len(before[0])
    assert (paths_of(tree)[:rows], tree.sources[:rows], tree.match_lengths[:rows]) == before
    assert paths_of(other) == attached, "the other tree stays as it is"


def test_an_attached_node_keeps_its_source_and_what_is_there_keeps_its_own() -> None:
    tree, other = tree_of((1, 2)), Tree(1)
    for token in (2, 3):
        other.add(len(other), token, "draft:small", 7)
    tree.attach(1, other)
    assert tree.sources == ["", "context", "context", "draft:small"]
    assert tree.match_lengths == [0, 2, 2, 7] and tree.path(3) == (1, 2, 3)


def chain_of(*tokens: int) -> Tree:
    """A chain in which every token was drawn from a law."""
    tree = Tree(99)
    for token in tokens:
        row = tree.add(len(tree), token, "draft:small")
        tree.distributions[row] = np.full(2, token, np.float32)
    return tree


def test_laws_go_with_their_nodes_to_another_tree() -> None:
    """Also where the node is there already, without one."""
    tree = tree_of((1, 2), (3,), (4,))
    assert tree.distributions == {}
    tree.attach(0, chain_of(3, 2, 5))
    assert paths_of(tree)[3:] == [(3,), (4,), (3, 2), (3, 2, 5)]
    assert {tree.path(row): law[0] for row, law in tree.distributions.items()} == {
        (3,): 3, (3, 2): 2, (3, 2, 5): 5,
    }  # fmt: skip
    tree.attach(4, chain_of(9))
    assert tree.path(7) == (4, 9) and tree.distributions[7][0] == 9


@pytest.mark.parametrize("nodes", range(5))
def test_laws_of_nodes_that_are_cut_are_gone(nodes: int) -> None:
    tree = chain_of(1, 2, 3)
    tree.cut(nodes)
    assert set(tree.distributions) == {*range(1, min(nodes, 3) + 1)}
    row = tree.add(len(tree), 7, "context")
    assert row not in tree.distributions, "a new node has none of an old one"


# Fewer leaves.


def leaves_of(tree: Tree) -> int:
    """How many branches there are: one for a tree of the root alone."""
    return tree.children.count({})


@settings(deadline=None, derandomize=True, max_examples=300)
@given(PATHS, st.integers(1, 12))
def test_within_its_leaves_a_tree_keeps_what_came_first(paths: list[Path], most: int) -> None:
    tree = tree_of(*paths)
    for row in range(1, len(tree) + 1):
        tree.sources[row], tree.match_lengths[row] = f"source {row}", row
        if row % 3 == 0:
            tree.distributions[row] = np.full(2, row, np.float32)
    before = (paths_of(tree), tree.sources[:], tree.match_lengths[:], dict(tree.distributions))
    kept = tree.within(most)
    assert_valid(kept)
    assert leaves_of(kept) <= most and kept.tokens[0] == tree.tokens[0]
    assert (paths_of(tree), tree.sources, tree.match_lengths, tree.distributions) == before, (
        "it stays"
    )
    rows = {path: row for row, path in enumerate(before[0])}
    same = [rows[path] for path in paths_of(kept)]
    assert same == sorted(same) and same[0] == 0, "a part of it, in its order"
    for row, old in enumerate(same):
        assert kept.sources[row] == tree.sources[old]
        assert kept.match_lengths[row] == tree.match_lengths[old]
        assert kept.distributions.get(row) is tree.distributions.get(old)
    # What was left out would have branched: its parent is gone, or was no leaf any more.
    kept_paths, grown = set(paths_of(kept)), Tree(99)
    for path in before[0][1:]:
        parent = rows_of(grown).get(path[:-1])
        fits = parent is not None and (not grown.children[parent] or leaves_of(grown) < most)
        assert (path in kept_paths) == fits, path
        if parent is not None and fits:
            grown.add(parent, path[-1], "")


def rows_of(tree: Tree) -> dict[Path, int]:
    return {path: row for row, path in enumerate(paths_of(tree))}


@settings(deadline=None, derandomize=True)
@given(PATHS, st.integers(0, 5), st.sampled_from([None, 1, 3]))
def test_within_its_levels_a_tree_keeps_what_is_not_deeper(
    paths: list[Path], levels: int, leaves: int | None
) -> None:
    tree = tree_of(*paths)
    before = paths_of(tree)
    kept = tree.within(leaves, levels)
    assert_valid(kept)
    assert (kept is tree) == (
        max(tree.depths) <= levels and (leaves is None or leaves_of(tree) <= leaves)
    )
    flat = tree_of(*[path for path in before if 0 < len(path) <= levels])
    assert paths_of(kept) == paths_of(flat.within(leaves)) and paths_of(tree) == before
