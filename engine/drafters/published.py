"""Hierarchy drafting with the constants of its paper (arXiv 2502.05609): the baseline to beat.

5-grams under one-token keys; at most 7 drafts of 4 tokens per step; the context tier keeps the 7
latest continuations per key, the model tier is ordered by document frequency, the statistics tier
is asked with the last two tokens, then one. Whatever the evidence, number and length are fixed.
Two things differ, both in its favour: shared prefixes are verified once, and there is no padding.
"""

from collections.abc import Iterable, Sequence

from engine.drafters.base import NgramTable
from engine.drafters.context import common_prefix
from engine.types import CONTEXT, MODEL, STATISTICS, Candidate, Gram

DRAFTS = 7
AHEAD = 4
NODES = DRAFTS * AHEAD
MODEL_GRAMS = 100_000


def flat(drafts: Iterable[tuple[tuple[int, ...], int]]) -> list[Candidate]:
    """Candidates for the first 7 distinct (draft, match length) pairs, all equally likely."""
    paths: dict[tuple[int, ...], int] = {}
    taken: set[tuple[int, ...]] = set()
    for draft, length in drafts:
        if draft in taken:
            continue
        taken.add(draft)
        for depth in range(1, len(draft) + 1):
            paths.setdefault(draft[:depth], length)
        if len(taken) == DRAFTS:
            break
    return [Candidate(path, 1.0, length) for path, length in paths.items()]


class PublishedContext:
    """A least-recently-used list of 7 four-token continuations per token of the conversation."""

    name = CONTEXT

    def __init__(self) -> None:
        self.table: dict[int, list[tuple[int, ...]]] = {}
        self.seen: list[int] = []

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

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """The latest continuations of the last token."""
        return flat((gram, 1) for gram in self.table.get(tokens[-1], ()))


class PublishedModel:
    """The most frequent 100,000 5-grams of past answers, under their first token."""

    name = MODEL

    def __init__(self, grams: Iterable[Gram] = ()) -> None:
        self.grams: dict[tuple[int, ...], int] = {}
        self.table: dict[int, list[tuple[int, ...]]] = {}
        for gram in grams:
            key = gram.tokens[-AHEAD - 1 :]
            if len(key) == AHEAD + 1:
                self.grams[key] = max(self.grams.get(key, 0), gram.documents)
        self.rank()

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
        start = max(0, len(tokens) - new - 1)
        for gram in {tuple(tokens[at : at + 5]) for at in range(start, len(tokens) - AHEAD)}:
            self.grams[gram] = self.grams.get(gram, 0) + 1
        self.rank()

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """The continuations of the last token that most answers held."""
        return flat((gram, 1) for gram in self.table.get(tokens[-1], ()))


class PublishedStatistics:
    """Continuations of the last two tokens, then of the last one, in large texts."""

    name = STATISTICS

    def __init__(self, table: NgramTable) -> None:
        self.table = table

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The statistics do not change while decoding."""

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """The most frequent continuations of up to four tokens, in the order of the table."""
        drafts: list[tuple[tuple[int, ...], int]] = []
        for size in (2, 1):
            found = self.table.look_up(tokens[-size:])
            paths = [path for path, _ in found.paths] if found else []
            inner = {path[:-1] for path in paths}
            drafts += [(path[:AHEAD], size) for path in paths if path not in inner]
        return flat(drafts)
