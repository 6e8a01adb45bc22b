"""Can a head bring more than it takes on this machine? Timed once, when a model is loaded.

A call of a head is a forward of its own. Beside a model that is itself small it takes so long that
no guess can make up for it, however often it is right. To listen takes a little in every step, too.
Then the usual method leaves the head alone, and says so. Where it can pay, whether it does is for
the controller to find out, answer by answer (engine/drafting/controller.py).
"""

from dataclasses import dataclass
from time import perf_counter

from engine.backends.base import Backend
from engine.decode import never
from engine.drafting.ceiling import LIKELY, emitted
from engine.drafting.costs import SLOW, CostCurve
from engine.heads.base import Head
from engine.settings import Sampling
from engine.tree import Tree

TOKENS = 32
"""Of the text before the calls that are timed."""
ROUNDS, FEW = 6, 2
"""Calls of each kind: the fastest counts. Few where forwards are slow."""


@dataclass(frozen=True, slots=True)
class HeadTimes:
    """Seconds of the first call of a step, of a further one, and what listening adds to a step."""

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


def too_dear(backend: Backend, head: Head, curve: CostCurve) -> str:
    """Why a head cannot pay on this machine, as the end of a sentence; "" where it can. Leaves the
    cache of the backend as it likes."""
    rounds = FEW if curve.seconds(0) > SLOW else ROUNDS
    times = timed(backend, head, rounds)
    if times is None or times.best(curve, head.info.depth) > 1:
        return ""
    guess, step = 1e3 * (times.start + times.listening), 1e3 * curve.seconds(0)
    return (
        f"left alone: a guess takes {guess:.1f} ms beside steps of {step:.1f} ms, more than it can "
        "save here"
    )


def timed(backend: Backend, head: Head, rounds: int) -> HeadTimes | None:
    """What a head takes; None where it has nothing to say."""
    vocabulary = backend.info.vocabulary_size
    tokens = [(7 + 13 * at) % vocabulary for at in range(TOKENS)]
    starts, extends, steps = [], [], []
    for listens in (True, False):
        # What was read without listening says nothing to it.
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
    # The first call reads the text, and makes room.
    heard, silent = min(steps[1 : rounds + 1]), min(steps[rounds + 2 :])
    return HeadTimes(min(starts[1:]), min(extends[1:], default=0.0), max(0.0, heard - silent))
