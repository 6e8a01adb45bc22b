"""The two rules by which a model verifies drafts: they decide which drafts it keeps and which token
it chooses next.

`Match`, the default: the model's own choice at every position is keyed to (seed, position), and a
draft is kept if it equals that choice. The same seed gives the same text, whatever was drafted.

`Rejection` (arXiv 2211.17192, 2510.19705): a draft x that was drawn from a distribution q is kept
with probability min(1, p(x) / q(x)). Otherwise the next token is drawn from the positive part of p
- q. The output is distributed exactly as p, but other drafts give another text. A draft without a
distribution counts as certain (q = 1); the rule then becomes: draw from p, and keep the draft if it
is the drawn token. Nodes from databases may therefore be siblings of one node with a distribution.
That node is tried first, and the others are compared with the token drawn after its rejection.
"""

from typing import NamedTuple, Protocol

import numpy as np

from engine.backends.base import LogitScores
from engine.sampling import Floats
from engine.tree import Tree
from engine.types import Rule


class Walk(NamedTuple):
    """The result of a verification: the `rows` that were kept, in order, and the tokens to emit.

    `tokens[i]` follows `rows[i - 1]` (for i = 0, the row where the walk began), so there is one
    token more than there are rows: the bonus token. `distributions[i]` is the distribution that
    `tokens[i]` was drawn from, if the rule needs it.
    """

    rows: list[int]
    tokens: list[int]
    distributions: list[Floats]


class Verifier(Protocol):
    """A rule applied in one run."""

    def walk(self, tree: Tree, scores: LogitScores, row: int = 0) -> Walk:
        """Verify the drafts after `row`."""


class Match:
    """Keep drafts that equal the model's own keyed choice."""

    def walk(self, tree: Tree, scores: LogitScores, row: int = 0) -> Walk:
        return Walk(*tree.walk(scores.choose, row), [])


class Rejection:
    """Keep drafts so that the output has the model's own distribution.

    The random numbers depend on the seed and the stream; every model of a stack needs a stream of
    its own. Only tokens below `vocabulary` are drawn, because all models of a stack have to know
    the drafts.
    """

    def __init__(self, seed: int, stream: int, vocabulary: int) -> None:
        counter = [0, 0, stream + 1, 0]
        self.random = np.random.Generator(np.random.Philox(key=seed, counter=counter))
        self.vocabulary = vocabulary

    def walk(self, tree: Tree, scores: LogitScores, row: int = 0) -> Walk:
        walk = Walk([], [], [])
        following: int | None = row
        while following is not None:
            distribution = self.distribution(scores, following)
            token = self.verify(tree, following, distribution)
            walk.tokens.append(token)
            walk.distributions.append(distribution)
            following = tree.children[following].get(token)
            if following is not None:
                walk.rows.append(following)
        return walk

    def distribution(self, scores: LogitScores, row: int) -> Floats:
        distribution = scores.distribution(row)
        if distribution.size <= self.vocabulary:
            return distribution
        return normalised(distribution[: self.vocabulary].copy())

    def verify(self, tree: Tree, row: int, distribution: Floats) -> int:
        """The token after `row`: the draft that has a distribution, or another one."""
        drafts = tree.children[row]
        drawn = next(
            (token for token, child in drafts.items() if child in tree.distributions), None
        )
        if drawn is None:
            return self.draw(distribution)
        proposed = tree.distributions[drafts[drawn]]
        if self.accepts(float(distribution[drawn]), float(proposed[drawn])):
            return drawn
        return self.draw(residual(distribution, proposed))

    def accepts(self, target: float, proposed: float) -> bool:
        """True with probability min(1, p / q)."""
        return bool(self.random.random() * proposed < target)

    def draw(self, distribution: Floats) -> int:
        mass = np.cumsum(distribution, dtype=np.float64)
        at = int(np.searchsorted(mass, self.random.random() * mass[-1], side="right"))
        return min(at, int(np.flatnonzero(distribution)[-1]))


def residual(distribution: Floats, proposed: Floats) -> Floats:
    """The positive part of p - q, not normalised; p if rounding leaves nothing of that part."""
    rest, shared = distribution.copy(), min(distribution.size, proposed.size)
    rest[:shared] -= proposed[:shared]
    np.maximum(rest, 0.0, out=rest)
    return rest if rest.any() else distribution


def normalised(distribution: Floats) -> Floats:
    """The distribution scaled to add up to 1; uniform if nothing is left of it."""
    if not distribution.any():
        distribution += 1
    distribution /= distribution.sum(dtype=np.float64)
    return distribution


def verifier(rule: Rule, seed: int, stream: int, vocabulary: int) -> Verifier:
    """The rule for a run; see `Rejection` for the other arguments."""
    return Match() if rule == "match" else Rejection(seed, stream, vocabulary)
