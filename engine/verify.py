"""The two rules by which a model verifies drafts: they decide which drafts it keeps and which token
it chooses next.

`Match`, the default: the model's own choice at every position is keyed to (seed, position), and a
draft is kept if it equals that choice. The same seed gives the same text, whatever was drafted.

`Rejection` keeps drafts that were drawn from distributions q so that the output is distributed
exactly as the model's p; other drafts give another text. The drafts of a chain are verified
together (block verification, arXiv 2403.10444). A chain of n drafts is kept with probability w_n,
where w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)). Otherwise its last draft is dropped and the
shorter chain is tried, until one is kept. Let r be the sum of the positive part of w_i p - q over
all tokens that may follow x_i. The shorter chain is kept with probability r / (r + 1 - w_i), and
the token after it is drawn from this positive part. At least i drafts are then kept with
probability w_i, which no rule exceeds that verifies them one by one.

When a chain ends may depend on its tokens, not on what would have followed: this is why a chain may
end with the answer, and why what one level of a stack keeps is a chain that the next can verify.

A draft without a distribution counts as certain (q = 1); the rule then becomes: draw from p, and
keep the draft if it is the drawn token. Nodes from databases may therefore be siblings of one node
with a distribution. Its chain is tried first, and the others are compared with the token that is
drawn after it.
"""

from collections.abc import Sequence
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
            chain = chain_after(tree, following)
            laws, token = self.verify(tree, scores, following, chain)
            kept = chain[: len(laws) - 1]
            walk.rows.extend(kept)
            walk.tokens.extend([*(tree.tokens[draft] for draft in kept), token])
            walk.distributions.extend(laws)
            following = tree.children[kept[-1] if kept else following].get(token)
            if following is not None:
                walk.rows.append(following)
        return walk

    def distribution(self, scores: LogitScores, row: int) -> Floats:
        distribution = scores.distribution(row)
        if distribution.size <= self.vocabulary:
            return distribution
        return normalised(distribution[: self.vocabulary].copy())

    def verify(
        self, tree: Tree, scores: LogitScores, row: int, chain: Sequence[int]
    ) -> tuple[list[Floats], int]:
        """The distributions after `row` and after each draft of the `chain` that is kept, and the
        token that follows."""
        found, weights, parents = list[Floats](), [1.0], [row, *chain]
        for parent, draft in zip(parents, chain, strict=False):
            if not weights[-1]:
                break
            found.append(self.distribution(scores, parent))
            token, proposed = tree.tokens[draft], tree.distributions[draft]
            weights.append(min(1.0, weights[-1] * float(found[-1][token]) / float(proposed[token])))
        if len(weights) == len(parents) and self.accepts(weights[-1]):
            found.append(self.distribution(scores, parents[-1]))
            return found, self.draw(found[-1])
        for weight in reversed(weights[: len(found)]):
            rest = residual(found[-1], tree.distributions[chain[len(found) - 1]], weight)
            if self.accepts(share_kept(weight, float(rest.sum(dtype=np.float64)))):
                # Rounding may leave nothing where the distributions are equal.
                return found, self.draw(rest if rest.any() else found[-1])
            found.pop()
        raise AssertionError("the empty chain is always kept")

    def accepts(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def draw(self, distribution: Floats) -> int:
        mass = np.cumsum(distribution, dtype=np.float64)
        at = int(np.searchsorted(mass, self.random.random() * mass[-1], side="right"))
        return min(at, int(np.flatnonzero(distribution)[-1]))


def chain_after(tree: Tree, row: int) -> list[int]:
    """The rows below `row` that have a distribution, each the child of the one before."""
    chain = list[int]()
    found: int | None = row
    while found is not None:
        chain.append(found)
        drafts = tree.children[found].values()
        found = next((draft for draft in drafts if draft in tree.distributions), None)
    return chain[1:]


def share_kept(weight: float, rest: float) -> float:
    """How often a chain of this weight is kept once the draft after it was dropped."""
    return 1.0 if weight == 1.0 else rest / (rest + 1.0 - weight)


def residual(distribution: Floats, proposed: Floats, weight: float = 1.0) -> Floats:
    """The positive part of w p - q, not normalised."""
    rest, shared = distribution * np.float32(weight), min(distribution.size, proposed.size)
    rest[:shared] -= proposed[:shared]
    np.maximum(rest, 0.0, out=rest)
    return rest


def normalised(distribution: Floats) -> Floats:
    """The distribution scaled to add up to 1; uniform if nothing is left of it."""
    if not distribution.any():
        distribution += 1
    distribution /= distribution.sum(dtype=np.float64)
    return distribution


def verifier(rule: Rule, seed: int, stream: int, vocabulary: int) -> Verifier:
    """The rule for a run; see `Rejection` for the other arguments."""
    return Match() if rule == "match" else Rejection(seed, stream, vocabulary)
