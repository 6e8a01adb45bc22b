"""The context tier: what this conversation said before, the highest temporal locality.

An append-only log of the conversation's tokens and, for every three tokens (and two, and one), the
latest places where they end in it. Those places are compared backwards to find how long each match
really is; what followed the longest ones is proposed, as far as it stays likely.
"""

from collections.abc import Callable, Sequence

from engine.drafters.votes import Votes, confidence
from engine.types import CONTEXT, Candidate

KEYS = (3, 2, 1)
PLACES = 8
LONGEST_MATCH = 12
LONGEST_COPY = 24
CONFIDENCE = (0.22, 0.36, 0.46, 0.54, 0.62, 0.68, 0.72, 0.76, 0.80, 0.84, 0.88, 0.92)
"""Chance that the token after a match of length 1, 2, ... follows again (docs/log.md)."""


class ContextDrafter:
    """Drafts from one conversation. `log` may start with what an earlier session stored."""

    name = CONTEXT

    def __init__(
        self,
        log: Sequence[int] = (),
        save: Callable[[Sequence[int]], None] = lambda tokens: None,
    ) -> None:
        self.log: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}
        self.seen: list[int] = []
        self.save = save
        self.extend(log)
        self.unsaved = len(self.log)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the log and remember where each of their suffixes ends."""
        log, places = self.log, self.places
        for token in tokens:
            log.append(token)
            end = len(log)
            for size in KEYS:
                if size <= end:
                    key = tuple(log[end - size :])
                    found = places.get(key)
                    if found is None:
                        places[key] = [end]
                    else:
                        found.append(end)
                        if len(found) > 2 * PLACES:
                            del found[:-PLACES]

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn decided tokens; a prompt only from where it departs from what was seen before."""
        start = len(tokens) - new
        if start == 0:
            start = common_prefix(self.seen, tokens)
            if start < len(self.seen):
                # The conversation was edited: keep the old words, lead in with the shared ones.
                self.extend(tokens[max(0, start - max(KEYS)) : start])
            del self.seen[start:]
        self.extend(tokens[start:])
        self.seen += tokens[start:]

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Hand what was logged since the last time to the store."""
        fresh, self.unsaved = self.log[self.unsaved :], len(self.log)
        if fresh:
            self.save(fresh)

    def propose(self, tokens: Sequence[int], room: int, threshold: float) -> list[Candidate]:
        """Continuations of the longest matches, then of shorter ones with what is left."""
        votes, left = Votes(threshold), 1.0
        for length, ends in self.matches():
            share = left * confidence(CONFIDENCE, length) / len(ends)
            for end in ends:
                self.copy(votes, end, share, length, min(room, LONGEST_COPY))
            left *= 1.0 - confidence(CONFIDENCE, length)
            if left < threshold:
                break
        return votes.ranked(room)

    def copy(self, votes: Votes, end: int, probability: float, length: int, longest: int) -> None:
        """Vote for what followed the place `end`, token by token while it stays likely."""
        path: tuple[int, ...] = ()
        for ahead, token in enumerate(self.log[end : end + longest]):
            if ahead:
                probability *= confidence(CONFIDENCE, length + ahead)
            if probability < votes.least:
                break
            path = (*path, token)
            votes.add(path, probability, length)

    def matches(self) -> list[tuple[int, list[int]]]:
        """(match length, places) of the current suffix, longest first, latest place first."""
        log = self.log
        here = len(log)
        lengths: dict[int, int] = {}
        for size in KEYS:
            if size > here:
                continue
            for end in reversed(self.places.get(tuple(log[here - size :]), ())):
                if end == here or end in lengths:
                    continue
                length = size
                while length < min(LONGEST_MATCH, end) and (
                    log[end - length - 1] == log[here - length - 1]
                ):
                    length += 1
                lengths[end] = length
                if len(lengths) >= PLACES:
                    break
            if len(lengths) >= PLACES:
                break
        groups: dict[int, list[int]] = {}
        for end, length in lengths.items():
            groups.setdefault(length, []).append(end)
        return sorted(groups.items(), reverse=True)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of leading tokens that two sequences share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(i for i in range(size) if left[i] != right[i])
