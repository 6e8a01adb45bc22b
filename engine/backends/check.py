"""Whether a loaded model computes trees as it computes plain text: measured, not assumed.

A model that gets branches wrong may still verify chains; one that gets those wrong decodes plainly.
One that even plain decoding with its cache gets wrong is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from engine.backends.base import Backend, BackendInfo
from engine.backends.scores import LogitScores
from engine.decode import never
from engine.errors import ModelError, first_line
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree, graft

TREE = ((3,), (3, 5), (4,), (3, 5, 9), (4, 6), (3, 8))
TAKEN = 3, 5
"""Two branches that share a first node, another beside them; and the rows that are accepted."""
CHAIN = ((3,), (3, 5), (3, 5, 9))
KEPT = 1, 2


class Checkable(Backend, Protocol):
    """A backend whose logits can be read, and whose cache can be emptied."""

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores: ...

    def reset(self) -> None:
        """Empty the cache."""


def check(
    backend: Checkable, alone: Callable[[Sequence[int]], Floats], allowed: float
) -> BackendInfo:
    """What the model can do, with the reason where it decodes plainly; leaves its cache empty.

    `alone(tokens)` are the logits after some tokens by other means, shape (vocabulary,); `allowed`
    is the largest difference that rounding explains. Raises ModelError.
    """
    info = backend.info
    if info.can_tree:
        trees = problem_of(lambda: tree_gap(backend, alone, TREE, TAKEN), allowed, backend)
        if not trees:
            return info
        if not problem_of(lambda: tree_gap(backend, alone, CHAIN, KEPT), allowed, backend):
            note = f"{info.name} verifies chains, not trees: its tree forward {trees}."
            return replace(info, leaves=1, note=note)
        info = replace(
            info, can_tree=False, note=f"{info.name} decodes plainly: its tree forward {trees}."
        )
        backend.info = info
        backend.reset()
    plain = problem_of(lambda: plain_gap(backend, alone), allowed, backend)
    if plain:
        raise ModelError(
            f"{info.name} cannot be used: decoding with its cache {plain}. "
            "Choose a model of another architecture; download this one again if it is damaged."
        )
    return info


def problem_of(gap: Callable[[], float], allowed: float, backend: Checkable) -> str:
    """What is wrong with a forward, "" if nothing is."""
    try:
        found = gap()
    except Exception as error:
        # Whatever a model does with masks or positions that it does not expect.
        return f"fails ({first_line(error).rstrip('.')})"
    finally:
        backend.reset()
    if np.isnan(found):
        return "gives no numbers"
    return "" if found <= allowed else f"is off by {found:.3g}"


def difference(one: Floats, other: Floats) -> float:
    """The largest difference of two rows of logits, nan where either holds one; tokens that a model
    never says may be -inf in both."""
    with np.errstate(invalid="ignore"):
        return float(np.where(one == other, 0.0, abs(one - other)).max())


def plain_gap(backend: Checkable, alone: Callable[[Sequence[int]], Floats]) -> float:
    """The largest logit difference after a prefill in two parts and one decoded token."""
    size = backend.info.vocabulary_size
    prompt = [7 * i % size for i in range(1, 10)]
    backend.prefill(prompt[:5], never)
    backend.prefill(prompt[:8], never)
    backend.score(Tree(prompt[7]), Sampling())
    backend.accept([])
    found = backend.score(Tree(prompt[8]), Sampling()).row(0).copy()
    return difference(found, alone(prompt))


def tree_gap(
    backend: Checkable,
    alone: Callable[[Sequence[int]], Floats],
    paths: Sequence[tuple[int, ...]],
    taken: Sequence[int],
) -> float:
    """The largest logit difference between a tree forward and the same rows run as chains."""
    size = backend.info.vocabulary_size
    prompt = [7 * i % size for i in range(1, 8)]
    tree = Tree(prompt[-1])
    for path in paths:
        graft(tree, [token % size for token in path], "check", 0, len(paths))
    backend.prefill(prompt, never)
    branched = backend.score(tree, Sampling())
    together = [branched.row(row).copy() for row in range(len(tree) + 1)]
    backend.accept(taken)
    follow = backend.score(Tree(11 % size), Sampling()).row(0).copy()
    backend.accept([])
    gaps = []
    for row, path in enumerate([(), *paths]):
        chain = alone([*prompt, *(token % size for token in path)])
        gaps.append(difference(chain, together[row]))
    chain = alone([*prompt, *tree.path(taken[-1]), 11 % size])
    return float(np.max([*gaps, difference(chain, follow)]))
