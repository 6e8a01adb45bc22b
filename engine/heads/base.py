"""The seam between drafting and a head: a small network that guesses what its model says next.

A head computes from hidden states of the model, so it belongs to a backend: one per sequence. The
backend keeps the hidden states of the rows it decided, and they never leave it. Drafting sees
tokens and probabilities only (engine/drafting/head.py), so every kind of head drafts in one way.

Invariant: drafts decide nothing. A head that guesses wrongly, or fails, costs time only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sampling import COLDEST, Choice, Floats, Part, kth_largest, select
from engine.settings import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """What the rest of the program may know of a head.

    `name` is its kind, for people ("MTP", "EAGLE-3"). It guesses up to `depth` tokens ahead.
    `branches` says whether several nodes of one level may be extended in a call; if not, it guesses
    along one chain. `memory_bytes` are those of its weights beyond the model's, without its cache.
    `note` says why it does not draft, where it does not: such a head is told, never asked.
    `fingerprint` names its weights: what was learned of one head says nothing of another.
    `too_dear` says why it cannot pay on this machine, where that was found: the usual method leaves
    it alone then. It is measured at each load, in other figures each time, so it is no part of what
    makes a head: a model that comes back is the same one.
    """

    name: str
    depth: int
    branches: bool
    parameters: int = 0
    memory_bytes: int = field(default=0, compare=False)
    note: str = ""
    fingerprint: str = ""
    too_dear: str = field(default="", compare=False)

    @property
    def drafts(self) -> bool:
        """Whether it can be asked."""
        return not self.note and self.depth > 0


class Guess(Protocol):
    """A head's law of the token that follows a node, over the target's vocabulary, read lazily.

    Probabilities are those of the logits, before any sampler setting.
    """

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens, so many at most, with their probabilities in falling order."""

    def probability(self, token: int) -> float:
        """That of one token; 0 where the head does not know it."""

    def draw(self, position: int, sampling: Sampling) -> int:
        """What the target would say at that absolute position if this were its law: drawn with the
        target's own noise. The likeliest token at temperature 0."""


class Head(Protocol):
    """The head of one sequence. Calls of it and of its backend never overlap.

    Call order: `start`, any number of `extend`, `forget`; then the backend's `score` and `accept`.
    A step may go by without any of them. `prefill` and `close` of the backend may come at any time;
    what was decided is the cache of the backend afterwards. After a call that failed the head
    stays usable: the next `start` catches up from wherever it is.
    """

    info: HeadInfo

    def listen(self, on: bool) -> None:
        """Whether the answer that follows may ask this head; told before its `prefill`.

        While it is off, the backend spends nothing on it. Hidden states that are missing then are a
        gap: the head goes on behind it, with less to go by.
        """

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> Guess | None:
        """Catch up with all that was decided, and guess what follows the last one of `tokens`.

        `tokens` are all decided ones: what the cache of the backend holds, and the root of the next
        tree. None where there is nothing to go by, or once `cancelled()` is true.
        """

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> Sequence[Guess]:
        """One level deeper: `tokens[i]` behind the node that guess number `parents[i]` of the last
        call (`start` or `extend`) was made for. Returns what may follow each of them, in order.

        At most `info.depth - 1` times after a `start`; a single node where not `info.branches`.
        """

    def forget(self) -> None:
        """Drop what was guessed: its cache rolls back to what is decided. Any number of times."""


class LogitGuess:
    """A guess from logits on the host: float32, shape (vocabulary,).

    A head that knows a part of the vocabulary alone gives its `tokens`, in rising order: logit i is
    that of `tokens[i]`.
    """

    __slots__ = ("choice", "logits", "tokens")

    def __init__(self, logits: Floats, tokens: NDArray[np.int64] | None = None) -> None:
        self.logits, self.tokens = logits, tokens
        self.choice: Choice | None = None

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        if count < 1:
            return []
        logits, scale = self.logits, self.scale()
        # Few are left before anything is sorted, however large the vocabulary; all if one is odd.
        few = count < logits.size
        found = np.flatnonzero(~(logits < (kth_largest(logits, count) if few else -np.inf)))
        best = found[np.lexsort((found, -logits[found]))][:count]
        names = best if self.tokens is None else self.tokens[best]
        chances = [scale.probability(logit) for logit in logits[best].tolist()]
        return list(zip(names.tolist(), chances, strict=True))

    def probability(self, token: int) -> float:
        place = token
        if self.tokens is not None:
            place = int(np.searchsorted(self.tokens, token))
            if place == self.tokens.size or self.tokens[place] != token:
                return 0.0
        return self.scale().probability(float(self.logits[place]))

    def draw(self, position: int, sampling: Sampling) -> int:
        if self.tokens is None:
            self.choice = select(self.logits, sampling, position)
            return self.choice.token
        place = int(self.logits.argmax())
        if sampling.temperature < COLDEST:
            return int(self.tokens[place])
        chosen = Part(self.logits, self.tokens).select(sampling, position)
        return int(self.tokens[place]) if chosen is None else chosen[0]

    def scale(self) -> Choice:
        """What makes probabilities of the logits: known from a draw, or found in one pass."""
        if self.choice is None:
            self.choice = select(self.logits, GREEDY, 0)
        return self.choice
