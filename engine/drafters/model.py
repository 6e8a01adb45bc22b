"""The model tier: what this model said before, in any conversation of the same owner.

Eight-token n-grams of past answers with the number of answers that held each: four tokens of key,
four of continuation, found by their last 4, 3, 2 or 1 key tokens. Learns an answer when it is over
(within an answer the context tier is nearer), most frequent first, then most recent.
"""

from collections.abc import Callable, Iterable, Sequence

from engine.drafters.votes import Votes, confidence
from engine.types import MODEL, Candidate, Gram

KEY = 4
AHEAD = 4
SIZE = KEY + AHEAD
WIDTH = 8
CONFIDENCE = (0.10, 0.25, 0.38, 0.46, 0.52, 0.56, 0.60)
"""Chance that a gram found by 1, 2, ... matching tokens goes on as it did (docs/log.md)."""


def grams_of(tokens: Sequence[int], new: int) -> set[tuple[int, ...]]:
    """The distinct n-grams whose continuation lies within the last `new` tokens.

    The first keys of an answer lie in its prompt; n-grams at its end are shorter than SIZE.
    """
    start = len(tokens) - new
    return {tuple(tokens[at - KEY : at + AHEAD]) for at in range(max(start, KEY), len(tokens))}


class ModelDrafter:
    """Drafts from one model's past answers. `learned` is called with each new answer's n-grams."""

    name = MODEL

    def __init__(
        self,
        grams: Iterable[Gram] = (),
        learned: Callable[[Iterable[tuple[int, ...]]], None] = lambda grams: None,
    ) -> None:
        self.table: dict[tuple[int, ...], Gram] = {}
        self.keys: dict[tuple[int, ...], list[Gram]] = {}
        self.learned = learned
        self.answers = 0
        for gram in sorted(grams, key=lambda gram: (gram.documents, gram.seen)):
            self.insert(gram)
            self.answers = max(self.answers, gram.seen)

    def insert(self, gram: Gram) -> None:
        """Put one n-gram under its keys, first in line: callers insert the best last."""
        self.table[gram.tokens] = gram
        for size in range(1, KEY + 1):
            line = self.keys.setdefault(gram.tokens[KEY - size : KEY], [])
            line[:] = [gram, *(old for old in line if old.tokens != gram.tokens)][: 2 * WIDTH]
            line.sort(key=lambda gram: (-gram.documents, -gram.seen))

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn before the answer is over."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Count every distinct n-gram of the answer once."""
        grams = grams_of(tokens, new)
        if not grams:
            return
        self.answers += 1
        for tokens_ in grams:
            old = self.table.get(tokens_)
            self.insert(Gram(tokens_, old.documents + 1 if old else 1, self.answers))
        self.learned(grams)

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """Continuations under the longest key that is known, then under shorter ones."""
        votes, left = Votes(threshold), 1.0
        for size in range(min(KEY, len(tokens)), 0, -1):
            line = self.keys.get(tuple(tokens[-size:]))
            if not line:
                continue
            trust = confidence(CONFIDENCE, size)
            documents = sum(gram.documents for gram in line[:WIDTH])
            for gram in line[:WIDTH]:
                probability = left * trust * gram.documents / documents
                for depth in range(1, len(gram.tokens) - KEY + 1):
                    if depth > 1:
                        probability *= confidence(CONFIDENCE, size + depth - 1)
                    if probability < votes.least:
                        break
                    votes.add(gram.tokens[KEY : KEY + depth], probability, size)
            left *= 1.0 - trust
            if left < threshold:
                break
        return votes.ranked(room)
