"""Drafters of other publications, the baselines that hierarchy drafting is compared with.

`PublishedContext`, `PublishedModel` and `PublishedStatistics` are hierarchy drafting with the
constants of its paper (arXiv 2502.05609): 5-grams under one-token keys; at most 7 drafts of 4
tokens per step. The context tier keeps the 7 latest continuations per key, the model tier is
ordered by document frequency, and the statistics tier is queried with the last two tokens, then
with one. Number and length of the drafts are fixed, whatever the evidence. Two differences favour
this implementation: shared prefixes are verified once, and there is no padding.

`LookupDrafter` is the counterpart of the library's `prompt_lookup_num_tokens` (transformers, class
PromptLookupCandidateGenerator): it takes the longest n-gram of three, two or one tokens that occurs
earlier in the text, and copies up to ten tokens after its first occurrence, never past the end of
the text. The library scans the text at every step; here an index of first occurrences is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

from engine.backends.base import common_prefix
from engine.drafting.base import Drafter, NgramTable
from engine.drafting.budget import Budget
from engine.tree import Tree, graft
from engine.types import CONTEXT, MODEL, STATISTICS, Work

DRAFTS = 7
AHEAD = 4
NODES = DRAFTS * AHEAD
MODEL_GRAMS = 100_000
GRAM = 300
"""Bytes of a remembered n-gram with its places in the tables, as measured."""
LONGEST_MATCH = 3
LONGEST_COPY = 10

Draft = tuple[tuple[int, ...], int]
"""Tokens that may follow, and the length of the key under which they were found."""


class Flat(Drafter):
    """A tier with ordered drafts: the first 7 distinct ones become paths of the tree."""

    @property
    def bytes(self) -> int:
        """The approximate size in memory."""
        return 0

    def drafts(self, tokens: Sequence[int]) -> Iterable[Draft]:
        raise NotImplementedError

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
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


class KeyedByToken(Flat):
    """Continuations under the token before them, the best first."""

    table: dict[int, list[tuple[int, ...]]]

    def drafts(self, tokens: Sequence[int]) -> Iterable[Draft]:
        return ((gram, 1) for gram in self.table.get(tokens[-1], ()))


class PublishedContext(KeyedByToken):
    """A least-recently-used list of 7 four-token continuations per token of the conversation."""

    name = CONTEXT

    def __init__(self) -> None:
        self.table = {}
        self.seen: list[int] = []

    @property
    def bytes(self) -> int:
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


class PublishedModel(KeyedByToken):
    """The most frequent 100,000 5-grams of past answers, under their first token."""

    name = MODEL

    def __init__(self, grams: Iterable[tuple[tuple[int, ...], float]] = ()) -> None:
        self.grams = {gram: documents for gram, documents in grams if len(gram) == AHEAD + 1}
        self.learns = True
        self.rank()

    @property
    def bytes(self) -> int:
        return GRAM * len(self.grams)

    def frozen(self) -> "PublishedModel":
        """A copy with the same table that learns nothing."""
        twin = PublishedModel()
        twin.grams, twin.table, twin.learns = self.grams, self.table, False
        return twin

    def rank(self) -> None:
        self.table = {}
        for gram, _ in sorted(self.grams.items(), key=lambda pair: -pair[1])[:MODEL_GRAMS]:
            line = self.table.setdefault(gram[0], [])
            if len(line) < DRAFTS:
                line.append(gram[1:])

    def finish(self, tokens: Sequence[int], new: int) -> None:
        if not self.learns:
            return
        start = max(0, len(tokens) - new - 1)
        for gram in {tuple(tokens[at : at + 5]) for at in range(start, len(tokens) - AHEAD)}:
            self.grams[gram] = self.grams.get(gram, 0) + 1
        self.rank()


class PublishedStatistics(Flat):
    """Continuations of the last two tokens, then of the last one, in large texts."""

    name = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def drafts(self, tokens: Sequence[int]) -> Iterable[Draft]:
        """Continuations of up to four tokens, most frequent first, each key's in its order.

        The table holds next tokens only, so a draft is built step by step: each next token is
        followed by its most frequent successor.
        """
        for size in (2, 1):
            found = self.table.look_up(tokens[-size:])
            for token in list(found.counts)[:DRAFTS] if found else ():
                yield self.chain([*tokens[-size:], token], size), size

    def chain(self, tokens: list[int], size: int) -> tuple[int, ...]:
        """The tokens after the key, continued up to a whole draft."""
        while len(tokens) < size + AHEAD:
            found = self.table.look_up(tokens[-3:]) or self.table.look_up(tokens[-2:])
            if found is None:
                break
            tokens.append(next(iter(found.counts)))
        return tuple(tokens[size:])


class LookupDrafter(Drafter):
    """Drafts one chain from the text of one run, prompt and answer."""

    name = CONTEXT

    def __init__(self) -> None:
        self.first: dict[tuple[int, ...], int] = {}
        """The first occurrence of each n-gram, as the index of the token after it."""

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Index every n-gram that the new tokens complete; a prompt starts a new text."""
        start = len(tokens) - new
        if start == 0:
            self.first = {}
        tail = tuple(tokens[max(0, start - LONGEST_MATCH + 1) :])
        begin = len(tokens) - len(tail)
        for end in range(start + 1, len(tokens) + 1):
            for size in range(1, min(LONGEST_MATCH, end) + 1):
                self.first.setdefault(tail[end - size - begin : end - begin], end)

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add what followed the first occurrence of the longest n-gram, as a chain, whatever its
        probability."""
        clock = perf_counter()
        for size in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
            end = self.first.get(tuple(tokens[-size:]), len(tokens))
            if end < len(tokens):
                copy = tokens[end : end + min(budget.depth, LONGEST_COPY)]
                graft(tree, copy, self.name, size, budget.nodes)
                break
        return {self.name: Work(perf_counter() - clock)}
