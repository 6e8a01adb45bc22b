"""The draft tree: a trie of candidate continuations, verified by the target in one forward.

Row 0 is the root, the last token that is already decided; drafted nodes follow, parents before
children, so row i's ancestors all have smaller rows. Two candidates with the same path are one
node, credited to the tier that proposed it first.
"""

from collections.abc import Callable, Sequence

from engine.types import Candidate


class Tree:
    """Parallel lists, one entry per row: token, parent row, depth, source, match length."""

    __slots__ = ("depths", "match_lengths", "parents", "rows", "sources", "tokens")

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [""]
        self.match_lengths = [0]
        self.rows: dict[tuple[int, ...], int] = {(): 0}

    def __len__(self) -> int:
        """The number of drafted nodes (the root is not drafted)."""
        return len(self.tokens) - 1

    def add(self, candidate: Candidate, source: str) -> bool:
        """Add one node; False when it is there already or its parent is not."""
        path = candidate.path
        parent = self.rows.get(path[:-1])
        if parent is None or path in self.rows:
            return False
        self.rows[path] = len(self.tokens)
        self.tokens.append(path[-1])
        self.parents.append(parent)
        self.depths.append(len(path))
        self.sources.append(source)
        self.match_lengths.append(candidate.match_length)
        return True

    def walk(self, choose: Callable[[int], int]) -> tuple[list[int], list[int]]:
        """Follow the target's choices from the root while they stay inside the tree.

        `choose(row)` is the target's token after that row. Returns the accepted rows and the
        tokens to emit: one per accepted row plus the bonus token chosen after the last of them.
        """
        path: tuple[int, ...] = ()
        accepted: list[int] = []
        emitted = [choose(0)]
        while (row := self.rows.get(path := (*path, emitted[-1]))) is not None:
            accepted.append(row)
            emitted.append(choose(row))
        return accepted, emitted


class Mixture:
    """The candidates of all tiers on one scale.

    Tiers are added from highest to lowest locality; each speaks for the probability that those
    before it left, as a shorter match does within a tier. Equal paths add up and belong to the
    tier that proposed them first.
    """

    def __init__(self) -> None:
        self.left = 1.0
        self.pool: dict[tuple[int, ...], tuple[Candidate, str]] = {}

    def add(self, candidates: Sequence[Candidate], source: str) -> None:
        """Mix in one tier's candidates, every prefix of a path before it."""
        left, pool = self.left, self.pool
        for candidate in candidates:
            path, share = candidate.path, left * candidate.probability
            if len(path) == 1:
                self.left -= share
            if path in pool:
                known, owner = pool[path]
                pool[path] = (known._replace(probability=known.probability + share), owner)
            else:
                pool[path] = (Candidate(path, share, candidate.match_length), source)

    def grow(self, tree: Tree, room: int) -> None:
        """Add the likeliest candidates until the tree has `room` nodes.

        A path is never likelier than its prefix, which entered the pool first, and sorting is
        stable: parents come before their children.
        """
        for candidate, source in sorted(self.pool.values(), key=lambda pair: -pair[0].probability):
            if len(tree) >= room:
                return
            tree.add(candidate, source)
