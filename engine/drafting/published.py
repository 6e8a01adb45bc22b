"""Hierarchy drafting with the constants of its paper (arXiv 2502.05609): the baseline to beat.

5-grams under one-token keys; at most 7 drafts of 4 tokens per step; the context tier keeps the 7
latest continuations per key, the model tier is ordered by document frequency, the statistics tier
is asked with the last two tokens, then one. Whatever the evidence, number and length are fixed.
Two things differ, both in its favour: shared prefixes are verified once, and there is no padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

from engine.backends.base import common_prefix
from engine.drafting.base import NgramTable
from engine.drafting.budget import Budget
from engine.tree import Tree, graft
from engine.types import CONTEXT, MODEL, STATISTICS, Work

DRAFTS = 7
AHEAD = 4
NODES = DRAFTS * AHEAD
MODEL_GRAMS = 100_000
GRAM = 300
"""Bytes of a remembered n-gram with its places in the tables, as measured."""


class Flat:
    """A tier with drafts in its order: the first 7 distinct ones become paths of the tree."""

    name: str

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return 0

    def drafts(self, tokens: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """Drafts of what follows, with the number of tokens that each was found by."""
        raise NotImplementedError

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add the drafts, whatever they are worth."""
        clock = perf_counter()
        taken: set[tuple[int, ...]] = set()
        for draft, length in self.drafts(tokens):
            if draft in taken or max(draft) >= budget.vocabulary:
                continue
            taken.add(draft)
            graft(tree, draft[: budget.depth], self.name, length, budget.nodes)
            if len(taken) == DRAFTS:
                break
        return {self.name: Work(perf_counter() - clock)}


class PublishedContext(Flat):
    """A least-recently-used list of 7 four-token continuations per token of the conversation."""

    name = CONTEXT

    def __init__(self) -> None:
        self.table: dict[int, list[tuple[int, ...]]] = {}
        self.seen: list[int] = []

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return GRAM * sum(len(line) for line in self.table.values())

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn every 5-gram that the new tokens complete."""
        start = len(tokens) - new
        if start == 0:
            start = common_prefix(self.seen, tokens)
        for at in range(max(0, start - AHEAD), len(tokens) - AHEAD):
            gram = tuple(tokens[at + 1 : at + 1 + AHEAD])
            line = self.table.setdefault(tokens[at], [])
            if gram in line:
                line.remove(gram)
            line.insert(0, gram)
            del line[DRAFTS:]
        self.seen = list(tokens)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Everything was learned on the way."""

    def drafts(self, tokens: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The latest continuations of the last token."""
        return ((gram, 1) for gram in self.table.get(tokens[-1], ()))


class PublishedModel(Flat):
    """The most frequent 100,000 5-grams of past answers, under their first token."""

    name = MODEL

    def __init__(self, grams: Iterable[tuple[tuple[int, ...], float]] = ()) -> None:
        self.grams = {gram: documents for gram, documents in grams if len(gram) == AHEAD + 1}
        self.learns = True
        self.table: dict[int, list[tuple[int, ...]]] = {}
        self.rank()

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        return GRAM * len(self.grams)

    def frozen(self) -> "PublishedModel":
        """The same table, which learns nothing."""
        twin = PublishedModel()
        twin.grams, twin.table, twin.learns = self.grams, self.table, False
        return twin

    def rank(self) -> None:
        """Rebuild the look-up table from the most frequent n-grams."""
        self.table = {}
        for gram, _ in sorted(self.grams.items(), key=lambda pair: -pair[1])[:MODEL_GRAMS]:
            line = self.table.setdefault(gram[0], [])
            if len(line) < DRAFTS:
                line.append(gram[1:])

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Nothing to learn before the answer is over."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Count the distinct 5-grams of the answer once."""
        if not self.learns:
            return
        start = max(0, len(tokens) - new - 1)
        for gram in {tuple(tokens[at : at + 5]) for at in range(start, len(tokens) - AHEAD)}:
            self.grams[gram] = self.grams.get(gram, 0) + 1
        self.rank()

    def drafts(self, tokens: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """The continuations of the last token that most answers held."""
        return ((gram, 1) for gram in self.table.get(tokens[-1], ()))


class PublishedStatistics(Flat):
    """Continuations of the last two tokens, then of the last one, in large texts."""

    name = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def drafts(self, tokens: Sequence[int]) -> Iterable[tuple[tuple[int, ...], int]]:
        """Continuations of up to four tokens, most frequent first, each key's in its order.

        The table knows next tokens only, so a draft is their likeliest sequence: from each next
        token on, the most frequent one that follows.
        """
        for size in (2, 1):
            found = self.table.look_up(tokens[-size:])
            for token in list(found.counts)[:DRAFTS] if found else ():
                yield self.chain([*tokens[-size:], token], size), size

    def chain(self, tokens: list[int], size: int) -> tuple[int, ...]:
        """The tokens behind the key, continued up to a whole draft."""
        while len(tokens) < size + AHEAD:
            found = self.table.look_up(tokens[-3:]) or self.table.look_up(tokens[-2:])
            if found is None:
                break
            tokens.append(next(iter(found.counts)))
        return tuple(tokens[size:])
