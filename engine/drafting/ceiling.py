"""What a cost curve allows: how much faster drafting can make a model, however good the drafts are.

A chain of n drafts, each accepted with probability a, gives 1 + a + ... + a^n tokens for one
forward over n nodes. The forward takes c(n) / c(0) times as long as a plain one. The largest ratio
of the two over all n is the ceiling. Drafting itself counts as free here.
"""

from collections.abc import Mapping
from typing import NamedTuple

LIKELY = 0.8
"""A share of accepted drafts that few texts reach."""


class Ceiling(NamedTuple):
    """The largest speedup, and the drafted nodes that give it; 1 and none where drafts lose."""

    speedup: float
    nodes: int


def ceiling(points: Mapping[int, float], acceptance: float) -> Ceiling:
    """The largest speedup of a model whose forwards over n nodes take `points[n]` seconds.

    `points` has a time for 0 nodes. Sizes that were not measured are not taken.
    """
    plain = points[0]
    return max(
        Ceiling(emitted(acceptance, nodes) * plain / seconds, nodes)
        for nodes, seconds in sorted(points.items(), reverse=True)
        if nodes == 0 or emitted(acceptance, nodes) * plain > seconds
    )


def emitted(acceptance: float, drafts: int) -> float:
    """Tokens of one forward over a chain: the accepted drafts and the target's own token."""
    return sum(acceptance**depth for depth in range(drafts + 1))
