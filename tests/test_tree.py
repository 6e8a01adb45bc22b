"""The draft tree: one node per path, parents first, the walk, the mixture of tiers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tree import Mixture, Tree
from engine.types import Candidate

PATHS = st.lists(
    st.lists(st.integers(0, 4), min_size=0, max_size=6).map(tuple), min_size=0, max_size=40
)


def tree_of(*paths: tuple[int, ...]) -> Tree:
    tree = Tree(99)
    for path in paths:
        assert tree.add(Candidate(path, 1.0, len(path)), "context")
    return tree


@settings(deadline=None, derandomize=True)
@given(PATHS)
def test_rows_hold_a_trie_whatever_is_added(paths: list[tuple[int, ...]]) -> None:
    tree = Tree(99)
    there: set[tuple[int, ...]] = {()}
    for path in paths:
        fits = path not in there and path[:-1] in there
        assert tree.add(Candidate(path, 0.5, 1), "model") == fits
        if fits:
            there.add(path)
    assert set(tree.rows) == there and len(tree) == len(there) - 1
    assert tree.parents[0] == -1 and tree.depths[0] == 0 and tree.tokens[0] == 99
    for path, row in tree.rows.items():
        assert tree.depths[row] == len(path)
        if path:
            assert tree.tokens[row] == path[-1]
            assert tree.parents[row] == tree.rows[path[:-1]] < row


def test_equal_paths_are_one_node_of_the_first_tier() -> None:
    tree = Tree(0)
    assert tree.add(Candidate((1,), 0.5, 3), "context")
    assert not tree.add(Candidate((1,), 0.9, 7), "model")
    assert (tree.sources, tree.match_lengths) == (["", "context"], [0, 3])


def test_a_node_without_its_parent_is_refused() -> None:
    tree = Tree(0)
    assert not tree.add(Candidate((1, 2), 0.5, 1), "context")
    assert not tree.add(Candidate((), 1.0, 1), "context")
    assert len(tree) == 0


def test_siblings_with_equal_tokens_under_other_parents_are_apart() -> None:
    tree = tree_of((1,), (2,), (1, 3), (2, 3))
    assert tree.parents == [-1, 0, 0, 1, 2]


def test_the_walk_of_an_empty_tree_is_the_plain_step() -> None:
    assert Tree(5).walk(lambda row: 7) == ([], [7])


@pytest.mark.parametrize(
    ("truth", "rows", "emitted"),
    [
        ({0: 1, 1: 3, 3: 4}, [1, 3], [1, 3, 4]),
        ({0: 2, 2: 9}, [2], [2, 9]),
        ({0: 9}, [], [9]),
        ({0: 1, 1: 9}, [1], [1, 9]),
        ({0: 2, 2: 3, 4: 5, 5: 6}, [2, 4, 5], [2, 3, 5, 6]),
    ],
)
def test_the_walk_follows_the_target_into_the_tree_and_out_of_it(
    truth: dict[int, int], rows: list[int], emitted: list[int]
) -> None:
    tree = tree_of((1,), (2,), (1, 3), (2, 3), (2, 3, 5))
    asked: list[int] = []
    assert tree.walk(lambda row: asked.append(row) or truth[row]) == (rows, emitted)  # type: ignore[func-returns-value]
    assert asked == [0, *rows], "only visited rows are sampled, each once"


def test_the_walk_is_the_longest_agreeing_path() -> None:
    draw = random.Random(0)
    for _ in range(300):
        tree = Tree(0)
        for _ in range(30):
            path = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 6)))
            for depth in range(1, len(path) + 1):
                tree.add(Candidate(path[:depth], 1.0, 1), "context")
        truth = [draw.randrange(3) for _ in range(10)]
        rows, emitted = tree.walk(lambda row: truth[tree.depths[row]])  # noqa: B023
        longest = max(len(p) for p in tree.rows if p == tuple(truth[: len(p)]))
        assert len(rows) == longest and emitted == truth[: longest + 1]


def mixed(room: int, *tiers: list[Candidate]) -> Tree:
    mixture, tree = Mixture(), Tree(0)
    for number, candidates in enumerate(tiers):
        mixture.add(candidates, str(number))
    mixture.grow(tree, room)
    return tree


def test_lower_tiers_speak_for_what_higher_ones_left() -> None:
    high = [Candidate((1,), 0.6, 4), Candidate((1, 2), 0.3, 4)]
    low = [Candidate((3,), 0.9, 1), Candidate((3, 4), 0.8, 1)]
    # The lower tier's share is 0.4: its paths weigh 0.36 and 0.32, before the 0.3 of (1, 2).
    tree = mixed(3, high, low)
    assert list(tree.rows)[1:] == [(1,), (3,), (3, 4)]
    assert tree.sources[1:] == ["0", "1", "1"]


def test_equal_paths_add_up_and_belong_to_the_first_tier() -> None:
    tree = mixed(1, [Candidate((1,), 0.4, 5), Candidate((2,), 0.3, 5)], [Candidate((2,), 0.9, 2)])
    # (2,) weighs 0.3 + 0.3 * 0.9 = 0.57.
    assert (tree.tokens[1], tree.sources[1], tree.match_lengths[1]) == (2, "0", 5)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.tuples(PATHS.filter(bool), st.floats(0, 1)), max_size=4), min_size=0, max_size=3
    ),
    st.integers(0, 12),
)
def test_a_mixture_of_anything_grows_a_tree_within_its_room(
    tiers: list[list[tuple[list[tuple[int, ...]], float]]], room: int
) -> None:
    """Drafters that break their promises cost nodes, nothing else."""
    candidates = [
        [Candidate(path, value, 1) for paths, value in tier for path in paths if path]
        for tier in tiers
    ]
    tree = mixed(room, *candidates)
    assert len(tree) <= room
    assert all(tree.parents[row] < row for row in range(1, len(tree) + 1))


def test_no_room_is_no_tree() -> None:
    assert len(mixed(0, [Candidate((1,), 1.0, 1)])) == 0
