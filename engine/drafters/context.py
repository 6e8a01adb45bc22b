"""The context tier: what this conversation said before, the highest temporal locality.

An append-only log of the conversation's tokens, and counts of what followed each one to eight of
them. Long matches are what copying lives on: a drafted token is found by a longer match still.
"""

from collections.abc import Callable, Sequence

from engine.backends.base import common_prefix
from engine.drafters.base import Likely
from engine.drafters.ngrams import NgramCounts
from engine.types import CONTEXT, Followers

KEY = 8


class ContextTier:
    """The n-grams of one conversation. `log` may start with what an earlier session stored."""

    name = source = CONTEXT

    def __init__(
        self,
        log: Sequence[int] = (),
        save: Callable[[Sequence[int]], None] = lambda tokens: None,
    ) -> None:
        self.log: list[int] = []
        self.counts = NgramCounts(KEY)
        self.seen: list[int] = []
        self.save = save
        self.extend(log)
        self.unsaved = len(self.log)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the log and count each after the keys that end before it."""
        log, add = self.log, self.counts.add
        for token in tokens:
            add(tuple(log[-KEY:]), token)
            log.append(token)

    def expect(self, prompt: Sequence[int]) -> None:
        """A log that was just loaded holds these tokens of the next prompt already."""
        if self.log and not self.seen:
            self.seen = list(prompt)

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """What followed the end of `suffix` in this conversation."""
        return self.counts.matches(suffix)

    def observe(self, tokens: Sequence[int], new: int, likely: Likely | None) -> None:
        """Learn decided tokens; a prompt only from where it departs from what was seen before."""
        start = len(tokens) - new
        if start == 0:
            start = common_prefix(self.seen, tokens)
            if start < len(self.seen):
                # The conversation was edited: keep the old words, lead in with the shared ones.
                self.extend(tokens[max(0, start - KEY) : start])
            del self.seen[start:]
        self.extend(tokens[start:])
        self.seen += tokens[start:]

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Hand what was logged since the last time to the store."""
        fresh, self.unsaved = self.log[self.unsaved :], len(self.log)
        if fresh:
            self.save(fresh)
