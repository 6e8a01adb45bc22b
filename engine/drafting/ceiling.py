"""The largest speedup that drafting can give on this machine, however good the drafts are.

A chain of n drafts, each accepted with probability a, gives 1 + a + ... + a^n tokens for one
forward over n nodes. That forward takes c(n) / c(0) times as long as a plain one. The largest ratio
of the two over all n is the ceiling, if drafting itself costs nothing.

A call of a head is a forward of its own. If the model itself is small, a call takes so long in
comparison that no guess can make up for it, however often it is right; recording hidden states
costs a little in every step, too. A head is therefore timed once when its model is loaded. If it
cannot pay, the default method does not use it, and reports this. Otherwise the controller finds out
in every answer whether it does pay (engine/drafting/controller.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from engine.backends.base import Backend
from engine.decode import never
from engine.drafting.costs import SLOW, CostCurve
from engine.heads.base import Head
from engine.settings import Sampling
from engine.tree import Tree

LIKELY = 0.8
"""An optimistic share of accepted drafts, which few texts reach."""


class Ceiling(NamedTuple):
    """The largest speedup, and the drafted nodes that give it; 1 and 0 if drafting always loses."""

    speedup: float
    nodes: int


def ceiling(points: Mapping[int, float], acceptance: float) -> Ceiling:
    """The largest speedup of a model whose forwards over n nodes take `points[n]` seconds.

    `points` has a time for 0 nodes. Only measured sizes are considered.
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


TOKENS = 32
"""Tokens of the text before the timed calls."""
ROUNDS, FEW = 6, 2
"""Calls of each kind, of which the fastest counts: usually, and if forwards are slow."""


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """Seconds of the first call of a step, of a further one, and of recording hidden states per
    step."""

    start: float
    extend: float
    listening: float

    def best(self, curve: CostCurve, depth: int) -> float:
        """The largest speedup of drafts by the head alone, up to `depth` tokens, if LIKELY of its
        guesses are right."""
        plain = curve.seconds(0)
        return max(
            emitted(LIKELY, nodes)
            * plain
            / (curve.seconds(nodes) + self.listening + self.start + (nodes - 1) * self.extend)
            for nodes in range(1, depth + 1)
        )


def expensive(backend: Backend, head: Head, curve: CostCurve) -> str:
    """Why a head cannot pay on this machine, as the end of a sentence; "" if it can. The content of
    the backend's cache is undefined afterwards."""
    rounds = FEW if curve.seconds(0) > SLOW else ROUNDS
    times = timed(backend, head, rounds)
    if times is None or times.best(curve, head.info.depth) > 1:
        return ""
    guess, step = 1e3 * (times.start + times.listening), 1e3 * curve.seconds(0)
    return (
        f"not used: a guess takes {guess:.1f} ms where a step takes {step:.1f} ms, more than it "
        "can save here"
    )


def timed(backend: Backend, head: Head, rounds: int) -> HeadTimes | None:
    vocabulary = backend.info.vocabulary_size
    tokens = [(7 + 13 * at) % vocabulary for at in range(TOKENS)]
    starts, extends, steps = [], [], []
    for listens in (True, False):
        # Tokens that were read while the head did not listen are of no use to it.
        backend.close()
        head.listen(listens)
        backend.prefill(tokens, never)
        for _ in range(rounds + 1):
            if listens:
                clock = perf_counter()
                guess = head.start(tokens, Sampling(), never)
                starts.append(perf_counter() - clock)
                if guess is None:
                    return None
                if head.info.depth > 1:
                    clock = perf_counter()
                    head.extend([0], [guess.likeliest(1)[0][0]])
                    extends.append(perf_counter() - clock)
                head.forget()
            clock = perf_counter()
            backend.score(Tree(tokens[-1]), Sampling(temperature=0.0)).choose(0)
            backend.accept(())
            steps.append(perf_counter() - clock)
            tokens.append((tokens[-1] + 5) % vocabulary)
    # The first calls also read the text and allocate memory.
    heard, silent = min(steps[1 : rounds + 1]), min(steps[rounds + 2 :])
    return HeadTimes(min(starts[1:]), min(extends[1:], default=0.0), max(0.0, heard - silent))
