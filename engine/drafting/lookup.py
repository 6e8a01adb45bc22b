"""Prompt lookup: copy what followed the first earlier place where the last tokens stand.

The engine's counterpart of the library's `prompt_lookup_num_tokens` (transformers, class
PromptLookupCandidateGenerator), for a like-for-like comparison: the longest n-gram of three, two,
one tokens that occurs earlier in the text, its first place there, up to ten tokens of what follows
that place, never past the end of the text. The library scans the text at every step; here an index
of first places is kept, so a step costs three look-ups however long the text is. The library also
cuts a draft before an end token; the decode loop ends there by itself, after the same forwards.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter

from engine.drafting.budget import Budget
from engine.tree import Tree, graft
from engine.types import CONTEXT, Work

LONGEST_MATCH = 3
LONGEST_COPY = 10


class LookupDrafter:
    """Drafts one chain from the text of one run, prompt and answer."""

    name = CONTEXT

    def __init__(self) -> None:
        self.first: dict[tuple[int, ...], int] = {}
        """Where each n-gram ends for the first time: the index of the token behind it."""

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

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The next prompt holds this answer, if it matters then."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """What followed the first place of the longest n-gram, as a chain, however likely."""
        clock = perf_counter()
        for size in range(min(LONGEST_MATCH, len(tokens)), 0, -1):
            end = self.first.get(tuple(tokens[-size:]), len(tokens))
            if end < len(tokens):
                copy = tokens[end : end + min(budget.depth, LONGEST_COPY)]
                graft(tree, copy, self.name, size, budget.nodes)
                break
        return {self.name: Work(perf_counter() - clock)}
