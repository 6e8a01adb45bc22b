"""Where two answers part, and how near a tie plain decoding was there."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log

import numpy as np

from bench.options import Record
from engine.backends.base import Backend
from engine.decode import never
from engine.sampling import COLDEST, gumbel
from engine.settings import Sampling
from engine.tree import Tree

LEAST = float(np.finfo(np.float32).tiny)
"""No probability counts as less: a gap of more than 87 is told as that."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first departs from the plain one.

    `prompt` is its number from 0, `position` the token within the answer from 0. `gap` is how much
    higher plain decoding scored its own token there, in logits; above temperature 0 the noise of
    the position counts in (times the temperature), as it does in the choice. A gap of about one
    rounding step of the dtype is a near-tie, a larger one is a fault. None when one answer is the
    beginning of the other.
    """

    prompt: int
    position: int
    gap: float | None

    def mapping(self) -> Record:
        """As JSON values."""
        return asdict(self)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two answers part, None when they are the same."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def divergences(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    answers: Mapping[str, Sequence[Sequence[int]]],
    sampling: Sampling,
) -> dict[str, list[Divergence]]:
    """Per method the answers that differ from "plain", which is replayed to measure the gaps."""
    found: dict[str, list[Divergence]] = {name: [] for name in answers}
    for number, (prompt, plain) in enumerate(zip(prompts, answers["plain"], strict=True)):
        parts = {name: first_difference(plain, own[number]) for name, own in answers.items()}
        rivals: dict[int, set[int]] = {}
        for name, at in parts.items():
            if at is not None and at < min(len(plain), len(answers[name][number])):
                rivals.setdefault(at, {plain[at]}).add(answers[name][number][at])
        scores = replay(backend, prompt, plain, rivals, sampling) if rivals else {}
        for name, at in parts.items():
            if at is None:
                continue
            gap = None
            if at in rivals and at < len(answers[name][number]):
                gap = scores[at, plain[at]] - scores[at, answers[name][number][at]]
            found[name].append(Divergence(number, at, gap))
    return found


def replay(
    backend: Backend,
    prompt: Sequence[int],
    plain: Sequence[int],
    rivals: Mapping[int, Collection[int]],
    sampling: Sampling,
) -> dict[tuple[int, int], float]:
    """What plain decoding chose by: per (place of its answer, rival there), up to a common term.

    The same forwards again, one token at a time: logits of another arrangement would round
    differently, and the difference is what is looked for. Cuts (top-k and so on) are left out.
    """
    scores: dict[tuple[int, int], float] = {}
    tokens = [*prompt, *plain]
    for context in ([0], prompt):  # from an empty cache, as it was
        backend.prefill(context, never)
    for at in range(max(rivals) + 1):
        position = len(prompt) + at
        found = backend.score(Tree(tokens[position - 1]), sampling)
        for token in rivals.get(at, ()):
            scores[at, token] = log(max(found.probability(0, token), LEAST))
            if sampling.temperature >= COLDEST:
                (noise,) = gumbel(sampling.seed, position, [token])
                scores[at, token] += sampling.temperature * float(noise)
        backend.accept([])
    return scores
