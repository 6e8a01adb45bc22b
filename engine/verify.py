"""The two rules by which a model verifies drafts: which of them it keeps, and what it says next.

`Match`, the default: the model's own choice at every place is keyed to (seed, position), and a
draft is kept when it equals that choice. Same seed, same text, whatever was drafted.

`Rejection` (arXiv 2211.17192, 2510.19705): a draft x that was drawn from a law q is kept with
probability min(1, p(x) / q(x)); if it is not, the next token is drawn from the positive part of
p - q. What comes out is distributed as p, exactly, but another draft means another text. A draft
without a law is certain of itself, for which the rule becomes: draw from p and see whether it was
drafted. So nodes from databases may stand beside one node with a law: it is tried first, they are
compared with what is drawn after it was refused.
"""

from typing import NamedTuple, Protocol

import numpy as np

from engine.backends.base import Scores
from engine.sampling import Floats
from engine.tree import Tree
from engine.types import Rule


class Walk(NamedTuple):
    """What a model kept of a tree: `rows` in their order, and the tokens it says.

    `tokens[i]` follows `rows[i - 1]` (where the walk began, for i = 0), so there is one more of
    them: the bonus token. `laws[i]` is what `tokens[i]` was drawn from, where a rule needs that.
    """

    rows: list[int]
    tokens: list[int]
    laws: list[Floats]


class Verifier(Protocol):
    """A rule at work in one run."""

    def walk(self, tree: Tree, scores: Scores, row: int = 0) -> Walk:
        """Verify what is drafted after `row`."""


class Match:
    """Keep what equals the model's own keyed choice."""

    def walk(self, tree: Tree, scores: Scores, row: int = 0) -> Walk:
        return Walk(*tree.walk(scores.choose, row), [])


class Rejection:
    """Keep drafts so that the output has the model's own distribution.

    The random numbers depend on the seed and the stream; every model of a stack needs a stream of
    its own. Tokens from `vocabulary` on are never drawn, for drafts that others have to know.
    """

    def __init__(self, seed: int, stream: int, vocabulary: int) -> None:
        counter = [0, 0, stream + 1, 0]
        self.random = np.random.Generator(np.random.Philox(key=seed, counter=counter))
        self.vocabulary = vocabulary

    def walk(self, tree: Tree, scores: Scores, row: int = 0) -> Walk:
        walk = Walk([], [], [])
        following: int | None = row
        while following is not None:
            law = self.law(scores, following)
            token = self.verify(tree, following, law)
            walk.tokens.append(token)
            walk.laws.append(law)
            following = tree.children[following].get(token)
            if following is not None:
                walk.rows.append(following)
        return walk

    def law(self, scores: Scores, row: int) -> Floats:
        """The distribution after `row` over the tokens that may be drawn."""
        law = scores.distribution(row)
        if law.size <= self.vocabulary:
            return law
        return normalised(law[: self.vocabulary].copy())

    def verify(self, tree: Tree, row: int, law: Floats) -> int:
        """The token after `row`: the draft that came with a law, or another one."""
        drafts = tree.children[row]
        drawn = next((token for token, child in drafts.items() if child in tree.laws), None)
        if drawn is None:
            return self.draw(law)
        proposed = tree.laws[drafts[drawn]]
        if self.accepts(float(law[drawn]), float(proposed[drawn])):
            return drawn
        return self.draw(residual(law, proposed))

    def accepts(self, wanted: float, proposed: float) -> bool:
        """True with probability min(1, p / q)."""
        return bool(self.random.random() * proposed < wanted)

    def draw(self, law: Floats) -> int:
        """A token of that distribution, which need not add up to 1."""
        mass = np.cumsum(law, dtype=np.float64)
        at = int(np.searchsorted(mass, self.random.random() * mass[-1], side="right"))
        return min(at, int(np.flatnonzero(law)[-1]))


def residual(law: Floats, proposed: Floats) -> Floats:
    """The positive part of p - q, not normalised; p where rounding leaves nothing of it."""
    rest, shared = law.copy(), min(law.size, proposed.size)
    rest[:shared] -= proposed[:shared]
    np.maximum(rest, 0.0, out=rest)
    return rest if rest.any() else law


def normalised(law: Floats) -> Floats:
    """The law scaled to add up to 1; all alike where nothing is left of it."""
    if not law.any():
        law += 1
    law /= law.sum(dtype=np.float64)
    return law


def verifier(rule: Rule, seed: int, stream: int, vocabulary: int) -> Verifier:
    """The rule at work; see `Rejection` for what the rest is for."""
    return Match() if rule == "match" else Rejection(seed, stream, vocabulary)
