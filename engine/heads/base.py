"""The interface between drafting and a head, a small network that predicts its model's next tokens.

A head computes from hidden states of the model, so it belongs to a backend: one per sequence. The
backend keeps the hidden states of the rows that it decided, and they never leave it. Drafting sees
only tokens and probabilities (engine/drafting/head.py), so every kind of head drafts in the same
way.

Invariant: drafts decide nothing. A head that guesses wrongly, or fails, costs only time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.sampling import COLDEST, Choice, Floats, Part, ranked, select
from engine.settings import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """What the rest of the program may know of a head.

    `name` is its kind, as shown to users ("MTP", "EAGLE-3", "DFlash"). It guesses up to `depth`
    tokens ahead, and `at_once` of them in the first call of a step.
    With `branches`, several nodes of one level may be extended in a call; otherwise it guesses
    along one chain. `memory_bytes` are those of its weights beyond the model's, without its cache.
    `note` is the reason why it does not draft, "" if it does: a head that does not draft is shown,
    but never used. `fingerprint` identifies its weights, because what was learned about one head
    does not apply to another. `expensive` is the reason why it cannot pay, "" if it may: it takes
    too long on this machine, or its guesses hold only by chance. The default method then does not
    use it. Its figures differ at each load, so it does not take part in comparisons.
    """

    name: str
    depth: int
    branches: bool
    at_once: int = 1
    parameters: int = 0
    memory_bytes: int = field(default=0, compare=False)
    note: str = ""
    fingerprint: str = ""
    expensive: str = field(default="", compare=False)

    @property
    def drafts(self) -> bool:
        return not self.note and self.depth > 0


class LogitGuess:
    """A head's distribution of the token after a node, over the target's vocabulary, from logits on
    the host: float32, shape (vocabulary,). Probabilities are those before any sampler setting.

    A head that knows only a part of the vocabulary passes its `tokens`, in rising order: logit i is
    that of `tokens[i]`.
    """

    __slots__ = ("choice", "logits", "tokens")

    def __init__(self, logits: Floats, tokens: NDArray[np.int64] | None = None) -> None:
        self.logits, self.tokens = logits, tokens
        self.choice: Choice | None = None

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens, so many at most, with their probabilities in falling order."""
        if count < 1:
            return []
        logits, scale = self.logits, self.scale()
        best = ranked(logits, count)
        names = best if self.tokens is None else self.tokens[best]
        chances = [scale.probability(logit) for logit in logits[best].tolist()]
        return list(zip(names.tolist(), chances, strict=True))

    def probability(self, token: int) -> float:
        """The probability of one token; 0 if the head does not know the token."""
        place = token
        if self.tokens is not None:
            place = int(np.searchsorted(self.tokens, token))
            if place == self.tokens.size or self.tokens[place] != token:
                return 0.0
        return self.scale().probability(float(self.logits[place]))

    def draw(self, position: int, sampling: Sampling) -> int:
        """The token that the target would choose at that absolute position from this distribution,
        with its own noise. The likeliest token at temperature 0."""
        if self.tokens is None:
            self.choice = select(self.logits, sampling, position)
            return self.choice.token
        place = int(self.logits.argmax())
        if sampling.temperature < COLDEST:
            return int(self.tokens[place])
        chosen = Part(self.logits, self.tokens).select(sampling, position)
        return int(self.tokens[place]) if chosen is None else chosen[0]

    def after(self, depth: int, token: int) -> "LogitGuess | None":
        """What may follow a token so many levels below this guess, if the call that made this guess
        computed that level as well."""
        return None

    def scale(self) -> Choice:
        """The normaliser of the logits: known from a draw, or computed in one pass."""
        if self.choice is None:
            self.choice = select(self.logits, GREEDY, 0)
        return self.choice


class BlockGuess(LogitGuess):
    """The guess of the first of some `places`, and those of all others, which the same call of the
    head computed.

    `at(depth, token)` is the guess of a place after the token before it; None if the head does not
    say what follows that token. For the first place the token is the `root`. If the head `selects`,
    the token before a place makes a difference.
    """

    __slots__ = ("at", "known", "places", "selects")

    def __init__(
        self,
        root: int,
        places: int,
        at: Callable[[int, int], LogitGuess | None],
        selects: bool,
    ) -> None:
        self.at, self.places, self.selects = at, places, selects
        self.known: dict[tuple[int, int], LogitGuess | None] = {}
        first = at(0, root)
        assert first is not None, "the root is before the first place"
        super().__init__(first.logits, first.tokens)

    def after(self, depth: int, token: int) -> LogitGuess | None:
        if depth >= self.places:
            return None
        key = depth, token if self.selects else 0
        if key not in self.known:
            self.known[key] = self.at(depth, token)
        return self.known[key]


class Head(Protocol):
    """The head of one sequence. Calls of it and of its backend never overlap.

    Call order: `start`, any number of `extend`, `forget`; then the backend's `score` and `accept`.
    A step may do without any of them. `prefill` and `close` of the backend may be called at any
    time; the decided tokens are then those in the cache of the backend. After a call that failed,
    the head stays usable: the next `start` catches up from its present state.
    """

    info: HeadInfo

    def listen(self, on: bool) -> None:
        """Set whether the next answer may use this head; called before its `prefill`.

        While this is off, the backend spends no time on the head. The hidden states that are then
        missing are a gap: the head continues after it, with less context.
        """

    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        """Catch up with all decided tokens, and guess what follows the last one of `tokens`.

        `tokens` are all decided ones: those in the cache of the backend, and the root of the next
        tree. Returns None without hidden states to start from, or once `cancelled()` is true.
        """

    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> Sequence[LogitGuess]:
        """One level deeper: `tokens[i]` after the node that guess number `parents[i]` of the last
        call (`start` or `extend`) was made for. Returns what may follow each of them, in order.

        At most `info.depth - 1` calls may follow a `start`; with a single node unless
        `info.branches`.
        """

    def forget(self) -> None:
        """Drop the guesses: the cache rolls back to the decided tokens. May be called
        repeatedly."""
