"""The three tiers: n-grams of this conversation, of this model's past answers, and of large texts.

The earlier a tier comes here, the higher is its temporal locality.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from engine.backends.base import common_prefix
from engine.drafting.base import Frozen, NgramTable, Tier
from engine.drafting.copies import CompiledCopies, Copies, Part, Texts, copying, with_copies
from engine.drafting.ngrams import NgramCounts, counting
from engine.types import CONTEXT, MODEL, PREDICTION, STATISTICS, Followers, Gram

CONTEXT_KEY, MODEL_KEY, STATISTICS_KEY = 8, 4, 3
"""The longest keys of the tiers, in tokens."""
PROMPT_END = 24
"""The tokens at the end of a prompt by which another conversation is taken to have asked the same.
"""
SLACK = 1.25
"""The multiple of its cap at which a log is cut back to the cap. Counting it again takes a second
per 262,144 tokens, so this must be rare."""
LOGGED = 64
"""Bytes of a logged token: the id, and its entries in the log and in the text seen so far."""
GRAM = 60
"""Bytes of the token ids of an n-gram in Python, most of which are shared with others."""
REMEMBERED = 1 << 14
"""The number of cached look-ups in the statistics: a step makes the same look-ups when it drafts
and when it learns."""


class ContextTier(Tier):
    """The tokens of one conversation, counts of what followed each key of one to eight of them, and
    the longest match where more tokens match.

    Long matches make copying work, because each drafted token lengthens the match for the next one.
    `log` is the log of an earlier session, of which only the last `cap` tokens count. Between two
    answers, a log that has outgrown the cap drops its oldest tokens.
    """

    name = source = CONTEXT
    hidden: Sequence[Part] = ()

    def __init__(
        self,
        log: Sequence[int] = (),
        save: Callable[[Sequence[int]], None] = lambda tokens: None,
        cap: int = sys.maxsize,
    ) -> None:
        self.seen: list[int] = []
        self.save, self.cap = save, cap
        self.counts, self.copies = counting(CONTEXT_KEY), copying()
        self.start(log)

    def start(self, tokens: Sequence[int]) -> None:
        self.log: list[int] = []
        self.counts.clear()
        self.copies.clear()
        self.extend(tokens[-self.cap :])
        self.unsaved = len(self.log)

    @property
    def bytes(self) -> int:
        return self.counts.bytes + self.copies.bytes + len(self.log) * LOGGED

    def extend(self, tokens: Sequence[int]) -> None:
        before = self.log[-CONTEXT_KEY:]
        self.counts.read([*before, *tokens], len(before))
        self.copies.read(tokens)
        self.log += tokens

    def skip(self, tokens: Sequence[int]) -> None:
        """Log decided tokens without learning them, because that would have taken too long."""
        self.log += tokens
        self.seen += tokens

    def expect(self, prompt: Sequence[int]) -> None:
        """Set the tokens of the next prompt that a newly loaded log already contains."""
        if self.log and not self.seen:
            self.seen = list(prompt)

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return with_copies(self.counts.matches(suffix), self.copies.longest(suffix))

    def unigrams(self) -> Followers | None:
        return self.counts.unigrams

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn decided tokens; of a prompt, only those after the part that is already known."""
        start = len(tokens) - new
        if start == 0:
            start = common_prefix(self.seen, tokens)
            if start < len(self.seen):
                # The conversation was edited: keep the old tokens, and repeat the last shared ones
                # as keys for the new tokens.
                self.extend(tokens[max(0, start - CONTEXT_KEY) : start])
            del self.seen[start:]
        self.skip(tokens[len(self.seen) : start])
        self.extend(tokens[start:])
        self.seen += tokens[start:]

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Pass the tokens logged since the last call to the store, and forget those that are too
        old."""
        self.skip(tokens[max(len(self.seen), len(tokens) - new) :])
        fresh, self.unsaved = self.log[self.unsaved :], len(self.log)
        if fresh:
            self.save(fresh)
        if len(self.log) > self.cap * SLACK:
            self.start(self.log)


class PredictionTier(ContextTier):
    """A text that much of an answer may repeat, after the last tokens of its prompt: the answer may
    begin as the text does. It learns nothing."""

    name = source = PREDICTION

    def observe(self, tokens: Sequence[int], new: int) -> None:
        return

    def finish(self, tokens: Sequence[int], new: int) -> None:
        return


def grams_of(tokens: Sequence[int], new: int) -> set[tuple[int, ...]]:
    """The distinct n-grams that end within the last `new` tokens; early ones are shorter."""
    start = len(tokens) - new
    return {
        tuple(tokens[max(0, at - MODEL_KEY) : at + 1]) for at in range(max(start, 1), len(tokens))
    }


class ModelTier(Tier):
    """5-grams of one model's past answers to one owner, in any conversation, with the number of
    answers that contained each; and the texts of the owner's conversations, for long matches.

    It learns an answer when the answer is complete; within an answer, the context tier has higher
    locality. `learned` is called with each new answer's n-grams.
    """

    name = source = MODEL

    def __init__(
        self,
        grams: Iterable[Gram] = (),
        learned: Callable[[Iterable[tuple[int, ...]]], None] = lambda grams: None,
    ) -> None:
        self.counts, self.texts = counting(MODEL_KEY), Texts()
        self.hidden: Sequence[Part] = ()
        """The parts of the texts that are not copied."""
        self.learned = learned
        self.size = 0
        same: dict[int, int] = {}  # a store returns a new int object every time
        for gram in grams:
            tokens = tuple(same.setdefault(token, token) for token in gram.tokens[-MODEL_KEY - 1 :])
            self.add(tokens, gram.documents)

    @property
    def bytes(self) -> int:
        numbers = self.size * GRAM if isinstance(self.counts, NgramCounts) else 0
        return self.counts.bytes + self.texts.bytes + numbers

    @property
    def copies(self) -> Copies | CompiledCopies:
        return self.texts.copies

    def add(self, gram: tuple[int, ...], documents: int = 1) -> None:
        if len(gram) >= 2:
            self.size += self.counts.add(gram[:-1], gram[-1], documents)

    def grams(self) -> Iterator[tuple[tuple[int, ...], float]]:
        for key, followers in self.counts.items():
            if len(key) == MODEL_KEY:
                for token, documents in followers.counts.items():
                    yield (*key, token), documents

    def without(
        self, tokens: Sequence[int], new: int, conversation: str = "", prompt: Sequence[int] = ()
    ) -> "ModelTier":
        """The tier as if it had not learned this answer, the last `new` of `tokens`, and knew no
        text of its conversation, nor of any other in which the end of `prompt` was answered."""
        known = self.texts.holding(prompt[-PROMPT_END:]) if prompt else []
        hidden = [
            part for name in {conversation, *known} for part in self.texts.parts.get(name, ())
        ]
        return WithoutAnswer(self, grams_of(tokens, new), hidden)

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return with_copies(self.counted(suffix), self.copies.longest(suffix, self.hidden))

    def counted(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        return self.counts.matches(suffix)

    def unigrams(self) -> Followers | None:
        return self.counts.unigrams

    def finish(self, tokens: Sequence[int], new: int) -> None:
        grams = grams_of(tokens, new)
        for gram in grams:
            self.add(gram)
        if grams:
            self.learned(grams)


class WithoutAnswer(ModelTier):
    """A view of a tier without the n-grams of one answer, and without some parts of its texts."""

    def __init__(
        self, tier: ModelTier, grams: Iterable[tuple[int, ...]], hidden: Sequence[Part] = ()
    ) -> None:
        super().__init__()
        self.tier, self.texts, self.hidden = tier, tier.texts, (*tier.hidden, *hidden)
        for *key, token in grams:
            known = tier.counted(tuple(key))
            # It may have been pruned meanwhile.
            if len(known) == len(key) > 0 and token in known[-1].counts:
                self.add((*key, token))

    def grams(self) -> Iterator[tuple[tuple[int, ...], float]]:
        own = dict(super().grams())
        for gram, documents in self.tier.grams():
            if documents > own.get(gram, 0):
                yield gram, documents - own.get(gram, 0)

    def counted(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        found: list[Followers] = []
        for known, own in zip_longest(self.tier.counted(suffix), super().counted(suffix)):
            left = known.less(own) if known and own else known
            if left is None:
                break
            found.append(left)
        return found

    def unigrams(self) -> Followers | None:
        known, own = self.tier.unigrams(), super().unigrams()
        return known.less(own) if known and own else known


class LimitedView(Frozen):
    """A model tier that learns each answer at the usual cost and then forgets it, for measurements
    that include the time of learning but must not profit from the result."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Learn as the tier does, into a table that is never queried."""
        ModelTier().finish(tokens, new)


class StatisticsTier(Tier):
    """The followers of one to three tokens in large texts, from a read-only table for the model's
    tokenizer."""

    name = source = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table
        self.known: dict[tuple[int, ...], Sequence[Followers]] = {}

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        key = suffix[-STATISTICS_KEY:]
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.look_up(key)
            if len(self.known) > REMEMBERED:
                self.known.clear()
        return found

    def unigrams(self) -> Followers | None:
        return self.table.unigrams()

    def look_up(self, key: tuple[int, ...]) -> Sequence[Followers]:
        found = []
        for size in range(1, len(key) + 1):
            followers = self.table.look_up(key[-size:])
            if followers is None:
                break
            found.append(followers)
        return found
