"""Records the draft tree of a step compactly, so that every guess and its outcome can be shown
later.

Nodes are stored in the order of the tree's rows, without the root, in six bytes each. The source is
an index into `Step.proposed`. Which nodes were accepted follows from the emitted tokens, and the
place that a guess was copied from is found by searching the text (app/service/why.py).

Invariant: nothing that is drafted, verified or learned depends on this record.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from engine.backends.base import LogitScores
from engine.tree import Tree
from engine.types import Step

NODE = struct.Struct("<HBBBB")
"""The token in three bytes, the row of the parent, the index of the source and the match length in
half a byte each, and a percentage."""
ROWS, TOKENS, SOURCES = 256, 1 << 24, 16
"""The largest numbers of rows, tokens and sources that can be recorded."""
LENGTHS = (*range(9), 16, 32, 64)
"""The match lengths that can be recorded; another one becomes the next smaller."""


class Node(NamedTuple):
    """One guess: `token` after row `parent`, where row 0 is the root and row i the i-th node.

    `percent` is the probability that the target gave it, at least 1; 0 if unknown, as for nodes
    below a wrong guess. `accepted` is true if it was kept, and `reached` if the target considered
    it, because its parent is on the accepted path.
    """

    token: int
    parent: int
    source: str
    match_length: int
    percent: int
    accepted: bool
    reached: bool


def percent(probability: float) -> int:
    """A probability in whole percent, at least 1; 0 if unknown."""
    return min(100, max(1, round(100 * probability))) if probability > 0 else 0


def recorded(tree: Tree, scores: LogitScores, accepted: Sequence[int]) -> bytes | None:
    """The tree as bytes; `accepted` rows are those of the path that was kept."""
    count = len(tree)
    if not count:
        return b""
    tokens, numbers = tree.tokens[1:], {s: n for n, s in enumerate(dict.fromkeys(tree.sources[1:]))}
    if count >= ROWS or max(tokens) >= TOKENS or len(numbers) > SOURCES:
        return None
    percents = [0] * (count + 1)
    for before in (0, *accepted):
        for token, row in tree.children[before].items():
            percents[row] = percent(scores.known(before, token))
    pairs = zip(tree.sources[1:], tree.match_lengths[1:], strict=True)
    packed = map(
        NODE.pack,
        [token & 0xFFFF for token in tokens],
        [token >> 16 for token in tokens],
        tree.parents[1:],
        [numbers[source] << 4 | bisect_right(LENGTHS, length) - 1 for source, length in pairs],
        percents[1:],
    )
    return b"".join(packed)


def nodes(step: Step) -> tuple[Node, ...] | None:
    """The guesses of a step, parents before children; None if they were not recorded.

    Raises ValueError or IndexError for impossible data: it may come from a damaged file.
    """
    if step.tree is None:
        return None
    try:
        rows = [(low | high << 16, *rest) for low, high, *rest in NODE.iter_unpack(step.tree)]
    except struct.error as error:
        raise ValueError("no draft tree") from error
    sources = [*step.proposed]
    kept = path(rows, [token.id for token in step.tokens])
    visited = {0, *kept}
    found = []
    for row, (token, parent, evidence, chance) in enumerate(rows, 1):
        if parent >= row:
            raise ValueError("a node before its parent")
        source, length = sources[evidence >> 4], LENGTHS[evidence & 15]
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
