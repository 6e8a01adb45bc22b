"""The context tier: what this conversation said before, the highest temporal locality.

A log of the conversation's tokens, and counts of what followed each one to eight of them. Long
matches are what copying lives on: a drafted token is found by a longer match still. The log forgets
its oldest tokens once it has outgrown its cap, between two answers.
"""

import sys
from collections.abc import Callable, Sequence

from engine.backends.base import common_prefix
from engine.drafting.ngrams import counting
from engine.types import CONTEXT, Followers

KEY = 8
SLACK = 1.25
"""A log is cut to its cap once it is so much longer: counting it anew takes a second per 262,144
tokens, and so comes once in very many answers."""
TOKEN = 64
"""Bytes of a logged token: the number, and its places in the log and in what was seen."""


class ContextTier:
    """The n-grams of one conversation. `log` may start with what an earlier session stored; only
    its last `cap` tokens count."""

    name = source = CONTEXT

    def __init__(
        self,
        log: Sequence[int] = (),
        save: Callable[[Sequence[int]], None] = lambda tokens: None,
        cap: int = sys.maxsize,
    ) -> None:
        self.seen: list[int] = []
        self.save, self.cap = save, cap
        self.counts = counting(KEY)
        self.start(log)

    def start(self, tokens: Sequence[int]) -> None:
        """Begin with a log that is stored: its newest tokens."""
        self.log: list[int] = []
        self.counts.clear()
        self.extend(tokens[-self.cap :])
        self.unsaved = len(self.log)

    @property
    def bytes(self) -> int:
        """About what the tier takes in memory."""
        return self.counts.bytes + len(self.log) * TOKEN

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the log and count each after the keys that end before it."""
        before = self.log[-KEY:]
        self.counts.read([*before, *tokens], len(before))
        self.log += tokens

    def skip(self, tokens: Sequence[int]) -> None:
        """Log decided tokens that are not learned, as that would have taken too long."""
        self.log += tokens
        self.seen += tokens

    def expect(self, prompt: Sequence[int]) -> None:
        """A log that was just loaded holds these tokens of the next prompt already."""
        if self.log and not self.seen:
            self.seen = list(prompt)

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        """What followed the end of `suffix` in this conversation."""
        return self.counts.matches(suffix)

    def unigrams(self) -> Followers | None:
        """What is often said in this conversation."""
        return self.counts.unigrams

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn decided tokens; a prompt only from where it departs from what was seen before."""
        start = len(tokens) - new
        if start == 0:
            start = common_prefix(self.seen, tokens)
            if start < len(self.seen):
                # The conversation was edited: keep the old words, lead in with the shared ones.
                self.extend(tokens[max(0, start - KEY) : start])
            del self.seen[start:]
        self.skip(tokens[len(self.seen) : start])
        self.extend(tokens[start:])
        self.seen += tokens[start:]

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Hand what was logged since the last time to the store; forget what is too old."""
        self.skip(tokens[max(len(self.seen), len(tokens) - new) :])
        fresh, self.unsaved = self.log[self.unsaved :], len(self.log)
        if fresh:
            self.save(fresh)
        if len(self.log) > self.cap * SLACK:
            self.start(self.log)
