"""Tests whether a loaded model computes trees as it computes plain text.

A model that computes branches wrongly may still verify chains. If it computes chains wrongly, or
cannot undo a rejected one, it decodes plainly. If even plain decoding with its cache is wrong, the
model is refused. A few tokens show most faults. Layers that see a limited number of tokens need a
test of as many tokens, which is made if it takes little time.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from engine.backends.base import Backend, BackendInfo, Batching, Wanted
from engine.decode import never
from engine.errors import ModelError, first_line
from engine.heads.base import Head
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree, graft

TREE = ((3,), (3, 5), (4,), (3, 5, 9), (4, 6), (3, 8))
TAKEN = 3, 5
"""A tree of two branches that share a first node and another branch, and the accepted rows."""
CHAIN = ((3,), (3, 5), (3, 5, 9))
KEPT = 1, 2
FEW = 7
"""Tokens before the checked tree."""
LONG = 9
"""Nodes of the longest checked chain: longer ones show no further faults."""
HEAD_TEXT = 12
"""Tokens of the text after which a head is tried."""
STOPPED = 3
"""The number of cancellation checks of a prompt before it is stopped."""
LITTLE = {"cpu": 1e10}
ACCELERATED = 1e12
"""The most parameters times tokens for which a longer check is made, on the processor and
elsewhere: it computes them about ten times."""
PARTS = 4, 70
"""Lengths up to which a text is read first and then second. The second part is longer than the
pieces in which layers that keep a state compute."""


class Checkable(Backend, Protocol):
    def reset(self) -> None:
        """Empty the cache."""


class Resuming(Checkable, Protocol):
    """A backend whose layers may keep a state; with `resumes` they can continue from it with
    several tokens at a time."""

    resumes: bool


class Joining(Batching, Protocol):
    """A backend whose sequences share forwards if it `joins` them."""

    joins: bool

    def reset(self) -> None:
        """Empty the cache."""

    def open(self) -> "Joining": ...


def check(
    backend: Checkable,
    alone: Callable[[Sequence[int]], Floats],
    allowed: float,
    reach: int = 0,
    back: bool = True,
) -> BackendInfo:
    """The model's info with the abilities that it was found to have, and a note on what it lacks.
    Leaves the cache empty.

    `alone(tokens)` computes the logits after some tokens in an independent way, shape
    (vocabulary,); `allowed` is the largest difference that rounding explains. `reach` is the number
    of tokens that layers with a limited view see, 0 without such layers. With `back` undoing chains
    is tested as well, for which texts grow. Raises ModelError.
    """
    info, sizes = backend.info, [FEW]
    if reach - 1 > FEW and worth(info, reach):
        # The tree then lies across the limit of what such layers see.
        sizes.append(reach - 1)

    def gap(paths: Sequence[tuple[int, ...]], taken: Sequence[int]) -> float:
        return float(np.max([tree_gap(backend, alone, paths, taken, size) for size in sizes]))

    if info.can_tree:
        trees = ""
        if info.leaves != 1:
            trees = problem_of(lambda: gap(TREE, TAKEN), allowed, backend)
            if not trees:
                return info
        chains = problem_of(lambda: gap(CHAIN, KEPT), allowed, backend)
        undone = chains
        if back and not chains:
            undone = problem_of(lambda: undone_gap(backend, alone), allowed, backend)
        if not undone:
            note = f"{info.name} verifies chains, not trees: its tree forward {trees}."
            return replace(info, leaves=1, note=note if trees else info.note)
        what = "tree forward" if trees else "chain forward" if chains else "way back from a chain"
        note = f"{info.name} decodes plainly: its {what} {trees or undone}."
        info = replace(info, can_tree=False, note=note)
        backend.info = info
        backend.reset()
    plain = problem_of(lambda: plain_gap(backend, alone), allowed, backend)
    if plain:
        raise ModelError(
            f"{info.name} cannot be used: decoding with its cache {plain}. "
            "Choose a model of another architecture; download this one again if it is damaged."
        )
    return info


def worth(info: BackendInfo, tokens: int) -> bool:
    little = LITTLE.get(info.device, ACCELERATED)
    return tokens + len(TREE) < info.context_length and info.parameters * tokens <= little


def resumes(backend: Resuming, alone: Callable[[Sequence[int]], Floats], allowed: float) -> bool:
    """Whether a model continues from a state with several tokens at a time as it does with one.
    Some layers begin with an empty state instead. With small weights this makes only a small
    difference, so the difference is compared with that of rounding alone."""
    backend.resumes = False
    rounding = plain_gap(backend, alone)
    backend.reset()
    backend.resumes = True
    allowed = max(4 * rounding, allowed / 100)
    return not problem_of(lambda: plain_gap(backend, alone, *PARTS), allowed, backend)


def check_apart(
    backend: Checkable, alone: Callable[[Sequence[int]], Floats], allowed: float
) -> None:
    """Raise ModelError unless two sequences of a model are independent: some models store what they
    read in their layers instead of in the cache that is passed to them."""
    problem = problem_of(lambda: mixed_gap(backend, alone), allowed, backend)
    if problem:
        raise ModelError(
            f"{backend.info.name} cannot be used: with a second conversation open, the first one "
            f"{problem}. Its layers keep what they read beside the cache. Choose a model of "
            "another architecture."
        )


def joins(backend: Joining, allowed: float) -> bool:
    """Whether two sequences of a model get the same logits in one forward as each alone. Leaves the
    caches empty."""
    backend.joins = True
    return not problem_of(lambda: joined_gap(backend), allowed, backend)


def joined_gap(backend: Joining) -> float:
    size, pair = backend.info.vocabulary_size, (backend, backend.open())
    found: dict[bool, list[Floats]] = {}
    for together in (True, False):
        roots = []
        for sequence, tokens in zip(pair, PARTS, strict=True):
            text = [7 * i % size for i in range(1, min(tokens, backend.info.context_length // 2))]
            sequence.reset()
            sequence.prefill(text, never)
            roots.append(text[-1])
        rows = found[together] = []
        for paths, taken in ((TREE, TAKEN), ((), ())):
            trees = [Tree(root) for root in roots]
            for tree, fewer in zip(trees, (0, 2), strict=True):
                for path in paths[fewer:]:
                    graft(tree, [token % size for token in path], "check", 0, len(paths))
            wanted = [Wanted(*each, Sampling()) for each in zip(pair, trees, strict=True)]
            scores = (
                backend.score_all(wanted)
                if together
                # Each is read before the next forward, which may overwrite its logits.
                else (each.sequence.score(each.tree, each.sampling) for each in wanted)
            )
            for tree, each in zip(trees, scores, strict=True):
                rows += [each.row(row).copy() for row in range(len(tree) + 1)]
            pair[0].accept(taken)
            pair[1].accept(())
    pair[1].close()
    return float(np.max([difference(*each) for each in zip(*found.values(), strict=True)]))


def gives_numbers(backend: Checkable, head: Head, levels: int) -> bool:
    """Whether a head of this backend guesses so many levels with sound probabilities. Raises any
    exception of the head. Leaves all caches empty."""
    tokens = [7 * i % backend.info.vocabulary_size for i in range(1, HEAD_TEXT + 1)]
    head.listen(True)
    try:
        backend.prefill(tokens, never)
        guess = head.start(tokens, Sampling(), never)
        for level in range(levels):
            if guess is None:
                return False
            token, chance = guess.likeliest(1)[0]
            if not 0 < chance <= 1:
                return False
            if level + 1 < levels:
                (guess,) = head.extend([0], [token])
        return True
    finally:
        head.listen(False)
        backend.reset()


def mixed_gap(backend: Checkable, alone: Callable[[Sequence[int]], Floats]) -> float:
    """The largest logit difference if another sequence reads a text before the next token."""
    size, other = backend.info.vocabulary_size, backend.open()
    text = [7 * i % size for i in range(1, FEW + 1)]
    backend.prefill(text, never)
    other.prefill([5 * i % size for i in range(1, FEW + 1)], never)
    found = backend.score(Tree(text[-1]), Sampling()).row(0).copy()
    backend.accept([])
    other.close()
    return difference(found, alone(text))


def problem_of(gap: Callable[[], float], allowed: float, backend: Checkable) -> str:
    """The problem of a forward, "" for none."""
    try:
        found = gap()
    except Warning:
        raise  # Where warnings are errors: a deprecated name makes no model unusable.
    except Exception as error:
        # A model may raise any exception for masks or positions that it does not expect.
        return f"fails ({first_line(error).rstrip('.')})"
    finally:
        backend.reset()
    if np.isnan(found):
        return "gives no numbers"
    return "" if found <= allowed else f"is off by {found:.3g}"


def difference(one: Floats, other: Floats) -> float:
    """The largest difference of two rows of logits, nan if either contains one. Tokens that a model
    never emits may be -inf in both."""
    with np.errstate(invalid="ignore"):
        return float(np.where(one == other, 0.0, abs(one - other)).max())


def plain_gap(
    backend: Checkable,
    alone: Callable[[Sequence[int]], Floats],
    first: int = 5,
    second: int = 8,
) -> float:
    """The largest logit difference after a prefill up to one length and then up to another, and
    one decoded token."""
    size = backend.info.vocabulary_size
    prompt = [7 * i % size for i in range(1, second + 2)]
    backend.prefill(prompt[:first], never)
    backend.prefill(prompt[:second], never)
    backend.score(Tree(prompt[-2]), Sampling())
    backend.accept([])
    found = backend.score(Tree(prompt[-1]), Sampling()).row(0).copy()
    return difference(found, alone(prompt))


def undone_gap(backend: Checkable, alone: Callable[[Sequence[int]], Floats]) -> float:
    """The largest logit difference after undone forwards, compared with the same texts alone:
    chains rejected twice in a row, a chain longer than the model will verify, a chain without a
    decision, a stopped prompt, and texts with the same beginning that continue differently."""
    size = backend.info.vocabulary_size
    text = [7 * i % size for i in range(1, FEW + 1)]
    limit = min(backend.depth_limit(FEW) or LONG, LONG)
    found: list[tuple[list[int], Floats]] = []

    def scored(length: int) -> None:
        tree = Tree(text[-1])
        graft(tree, [(5 * i + 3) % size for i in range(length)], "check", 0, length)
        found.append(([*text], backend.score(tree, Sampling()).row(0).copy()))

    def decided(length: int, taken: int) -> None:
        scored(length)
        backend.accept(range(1, taken + 1))
        text.extend((5 * i + 3) % size for i in range(taken))
        text.append(11 * len(text) % size)

    backend.prefill(text, never)
    for length, taken in ((2, 0), (2, 0), (limit + 1, 1), (0, 0)):
        decided(length, taken)
    scored(2)
    checks = iter(range(STOPPED))
    backend.prefill([*text, *text], lambda: next(checks, None) is None)
    for other in ([*text, 2 % size, 1], [*text[: FEW - 1], 4 % size]):
        text = other
        backend.prefill(text, never)
        decided(0, 0)
    # The first two rows show nothing that the third does not.
    return float(np.max([difference(row, alone(before)) for before, row in found[2:]]))


def tree_gap(
    backend: Checkable,
    alone: Callable[[Sequence[int]], Floats],
    paths: Sequence[tuple[int, ...]],
    taken: Sequence[int],
    before: int = FEW,
) -> float:
    """The largest logit difference between a tree forward after `before` tokens, its root counted,
    and the same rows run as chains."""
    size = backend.info.vocabulary_size
    prompt = [7 * i % size for i in range(1, before + 1)]
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
