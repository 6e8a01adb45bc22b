"""What a step keeps of its draft tree: enough to show every guess and what became of it.

A node takes nine bytes, in the order of the tree's rows, without the root. The source is a number
among those of `Step.proposed`, in their order. Which nodes were accepted is not written down: it
follows from what the step emitted. Where a guess was copied from is not written down either: who
wants to know searches the text for it later (app/service/origins.py). So recording costs a step
some microseconds, which count among its own.

Invariant: nothing that is drafted, verified or learned depends on what is recorded here.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from engine.backends.base import Scores
from engine.tree import Tree
from engine.types import Step

NODE = struct.Struct("<IHBBB")
"""Token, row of the parent, number of the source, match length, percent."""
MOST = 255
"""The largest match length that is told apart."""


class Node(NamedTuple):
    """One guess: `token` after row `parent`, where row 0 is the root and row i the i-th node.

    `percent` is what the target itself gave it, at least 1; 0 where that is not known, as for what
    follows a guess that was wrong. Whether it was `accepted`, and whether the target looked at it
    at all: it `reached` the place behind what it had accepted.
    """

    token: int
    parent: int
    source: str
    match_length: int
    percent: int
    accepted: bool
    reached: bool


def percent(probability: float) -> int:
    """A probability in whole percent, at least 1; 0 where it is not known."""
    return min(100, max(1, round(100 * probability))) if probability > 0 else 0


def recorded(tree: Tree, scores: Scores, accepted: Sequence[int]) -> bytes:
    """The tree as bytes; `accepted` rows are those of the path that was kept."""
    count = len(tree)
    if not count:
        return b""
    percents = [0] * (count + 1)
    for before in (0, *accepted):
        for token, row in tree.children[before].items():
            percents[row] = percent(scores.known(before, token))
    numbers = {source: number for number, source in enumerate(dict.fromkeys(tree.sources[1:]))}
    sources = map(numbers.__getitem__, tree.sources[1:])
    lengths = (min(length, MOST) for length in tree.match_lengths[1:])
    packed = map(NODE.pack, tree.tokens[1:], tree.parents[1:], sources, lengths, percents[1:])
    return b"".join(packed)


def nodes(step: Step) -> tuple[Node, ...] | None:
    """The guesses of a step, parents before children; None where they were not recorded.

    Raises ValueError or IndexError for what no step records: it may come from a damaged file.
    """
    if step.tree is None:
        return None
    try:
        rows = [*NODE.iter_unpack(step.tree)]
    except struct.error as error:
        raise ValueError("no draft tree") from error
    sources = [*step.proposed]
    kept = path(rows, [token.id for token in step.tokens])
    visited = {0, *kept}
    found = []
    for row, (token, parent, number, length, chance) in enumerate(rows, 1):
        if parent >= row:
            raise ValueError("a node before its parent")
        source = sources[number]
        found.append(Node(token, parent, source, length, chance, row in kept, parent in visited))
    return tuple(found)


def path(rows: Sequence[tuple[int, ...]], emitted: Sequence[int]) -> list[int]:
    """The rows that were accepted: the emitted tokens, as far as they lead through the tree."""
    children = {(parent, token): row for row, (token, parent, *_) in enumerate(rows, 1)}
    kept: list[int] = []
    for token in emitted:
        following = children.get((kept[-1] if kept else 0, token))
        if following is None:
            break
        kept.append(following)
    return kept
