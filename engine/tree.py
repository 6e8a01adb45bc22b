"""The draft tree: a trie of candidate continuations, verified by the target in one forward.

Row 0 is the root, the last token that is already decided; drafted nodes follow, parents before
children, so row i's ancestors all have smaller rows. Two drafts with the same path are one node,
credited to the source that proposed it first.
"""

from collections.abc import Callable, Container, Sequence

import numpy as np
from numpy.typing import NDArray


class Tree:
    """Parallel lists, one entry per row: token, parent row, depth, source, match length.

    `children[row]` maps the tokens drafted after a row to their rows. `match_lengths` holds the
    number of context tokens that led to a node. `distributions` holds the distribution that a
    node's token was drawn from, if the verification rule needs it: at most one sibling has one.
    """

    __slots__ = (
        "children",
        "depths",
        "distributions",
        "match_lengths",
        "parents",
        "sources",
        "tokens",
    )

    def __init__(self, root: int) -> None:
        self.begin(root)

    def begin(self, root: int) -> None:
        """Begin with the root alone. A copy made before keeps the nodes."""
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [""]
        self.match_lengths = [0]
        self.children: list[dict[int, int]] = [{}]
        self.distributions: dict[int, NDArray[np.float32]] = {}

    def __len__(self) -> int:
        """The number of drafted nodes (the root is not drafted)."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: int, source: str, match_length: int = 0) -> int:
        """The row of `token` after row `parent`, which is added if it does not exist."""
        known = self.children[parent].get(token)
        if known is not None:
            return known
        row = len(self.tokens)
        self.children[parent][token] = row
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.match_lengths.append(match_length)
        self.children.append({})
        return row

    def cut(self, nodes: int) -> None:
        """Keep the first `nodes` nodes; as parents come first, what stays is a tree."""
        rows = nodes + 1
        for row in range(rows, len(self.tokens)):
            if self.parents[row] < rows:
                del self.children[self.parents[row]][self.tokens[row]]
            self.distributions.pop(row, None)
        del self.tokens[rows:], self.parents[rows:], self.depths[rows:]
        del self.sources[rows:], self.match_lengths[rows:], self.children[rows:]

    def path(self, row: int) -> tuple[int, ...]:
        """The tokens from just after the root to `row`."""
        path: list[int] = []
        while row:
            path.append(self.tokens[row])
            row = self.parents[row]
        return tuple(reversed(path))

    def attach(self, row: int, other: "Tree", excluded: Container[int] = ()) -> None:
        """Add the nodes of another tree below a row, without the excluded ones and all below
        these."""
        rows = {0: row}
        for at in range(1, len(other.tokens)):
            parent, token = rows.get(other.parents[at]), other.tokens[at]
            if parent is None or at in excluded:
                continue
            rows[at] = self.add(parent, token, other.sources[at], other.match_lengths[at])
            if at in other.distributions:
                self.distributions[rows[at]] = other.distributions[at]

    def within(self, leaves: int | None, levels: int | None = None) -> "Tree":
        """The tree with at most so many leaves, and so many levels below the root: what would
        branch or reach beyond them is left out.

        Of its rows the first ones stay. Returns the tree itself where nothing is left out.
        """
        narrow = leaves is None or len(self) <= leaves or self.children.count({}) <= leaves
        if narrow and (levels is None or len(self) <= levels or max(self.depths) <= levels):
            return self
        excluded, branched, count = set[int](), set[int](), 1
        for row in range(1, len(self.tokens)):
            parent = self.parents[row]
            ends = levels is not None and self.depths[row] > levels
            if parent in excluded or ends or (parent in branched and count == leaves):
                excluded.add(row)
                continue
            count += parent in branched
            branched.add(parent)
        return self.without(excluded)

    def without(self, excluded: Container[int]) -> "Tree":
        kept = Tree(self.tokens[0])
        kept.attach(0, self, excluded)
        return kept

    def walk(self, choose: Callable[[int], int], row: int = 0) -> tuple[list[int], list[int]]:
        """Follow the target's choices from a row on while they stay inside the tree.

        `choose(row)` is the target's token after that row. Returns the accepted rows and the
        tokens to emit: one per accepted row plus the bonus token chosen after the last of them.
        """
        accepted: list[int] = []
        emitted = [choose(row)]
        while (child := self.children[row].get(emitted[-1])) is not None:
            row = child
            accepted.append(row)
            emitted.append(choose(row))
        return accepted, emitted


def graft(tree: Tree, path: Sequence[int], source: str, match_length: int, nodes: int) -> None:
    """Add a draft, token by token, while the tree has fewer than `nodes` nodes."""
    row = 0
    for token in path:
        if len(tree) >= nodes and token not in tree.children[row]:
            return
        row = tree.add(row, token, source, match_length)
