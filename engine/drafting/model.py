"""The model tier: what this model said before, in any conversation of the same owner.

5-grams of past answers with the number of answers that held each: what followed one to four
tokens. Learns an answer when it is over (within an answer the context tier is nearer).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from engine.drafting.base import Frozen
from engine.drafting.ngrams import NgramCounts, counting
from engine.types import MODEL, Followers, Gram

KEY = 4
GRAM = 60
"""Bytes of the numbers of an n-gram in Python, most of which stand in others as well."""


def grams_of(tokens: Sequence[int], new: int) -> set[tuple[int, ...]]:
    """The distinct n-grams that end within the last `new` tokens; early ones are shorter."""
    start = len(tokens) - new
    return {tuple(tokens[max(0, at - KEY) : at + 1]) for at in range(max(start, 1), len(tokens))}


class ModelTier:
    """One model's past answers. `learned` is called with each new answer's n-grams."""

    name = source = MODEL

    def __init__(
        self,
        grams: Iterable[Gram] = (),
        learned: Callable[[Iterable[tuple[int, ...]]], None] = lambda grams: None,
    ) -> None:
        self.counts = counting(KEY)
        self.learned = learned
        self.size = 0
        same: dict[int, int] = {}  # what is read from a store is a new number every time
        for gram in grams:
            tokens = tuple(same.setdefault(token, token) for token in gram.tokens[-KEY - 1 :])
            self.add(tokens, gram.documents)

    @property
    def bytes(self) -> int:
        """About what the tier takes in memory."""
        numbers = self.size * GRAM if isinstance(self.counts, NgramCounts) else 0
        return self.counts.bytes + numbers

    def add(self, gram: tuple[int, ...], documents: int = 1) -> None:
        """Count an n-gram that was seen in so many answers."""
        if len(gram) < 2:
            return
        *_, token = gram
        self.size += self.counts.add(gram[:-1], token, documents)

    def grams(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """The full n-grams that are known, with the number of answers that held each."""
        for key, followers in self.counts.items():
            if len(key) == KEY:
                for token, documents in followers.counts.items():
                    yield (*key, token), documents

    def without(self, tokens: Sequence[int], new: int) -> "ModelTier":
        """The tier as if it had not learned this answer: the last `new` of `tokens`."""
        return Unlearned(self, grams_of(tokens, new))

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """What followed the end of `suffix` in past answers."""
        return self.counts.matches(suffix)

    def unigrams(self) -> Followers | None:
        """What is often said in past answers."""
        return self.counts.unigrams

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn before the answer is over."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Count every distinct n-gram of the answer once."""
        grams = grams_of(tokens, new)
        for gram in grams:
            self.add(gram)
        if grams:
            self.learned(grams)


class Unlearned(ModelTier):
    """A tier without the n-grams of one answer, which its own counts hold."""

    def __init__(self, tier: ModelTier, grams: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self.tier = tier
        for *key, token in grams:
            known = tier.matches(tuple(key))
            # What was pruned meanwhile is gone already.
            if len(known) == len(key) > 0 and token in known[-1].counts:
                self.add((*key, token))

    def grams(self) -> Iterator[tuple[tuple[int, ...], float]]:
        own = dict(super().grams())
        for gram, documents in self.tier.grams():
            if documents > own.get(gram, 0):
                yield gram, documents - own.get(gram, 0)

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        found: list[Followers] = []
        for known, own in zip_longest(self.tier.matches(suffix), super().matches(suffix)):
            left = known.less(own) if known and own else known
            if left is None:
                break
            found.append(left)
        return found

    def unigrams(self) -> Followers | None:
        known, own = self.tier.unigrams(), super().unigrams()
        return known.less(own) if known and own else known


class Forgetful(Frozen):
    """A frozen model tier that learns each answer at the usual cost, and then forgets it: for
    measuring, where the time of learning counts and its outcome must not."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """As for the tier, into a table that nobody asks."""
        ModelTier().finish(tokens, new)
