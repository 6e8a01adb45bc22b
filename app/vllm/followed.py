"""Sequences as vLLM's rows show them: followed by what they say, as rows are slots that move.

A row holds the tokens of a request from its first one on. Requests come, end, are preempted and
come back, in other rows, and nothing says which is which. So a sequence is known again by its
tokens alone: a row goes on with the sequence whose tokens it begins with. The row in which a
sequence stood is asked first, then those of the same words. A row that goes on with none begins a
new sequence, whose prompt is all but what was sampled just now.

Invariant: a sequence's tokens are those of its row. The order of rows and calls decides everything.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.drafting.chains import NOTHING, Chain
from engine.drafting.hierarchy import Hierarchy
from engine.types import TARGET

Tokens = NDArray[np.int32]
"""A row: the tokens of a sequence, and room for more."""
GONE = 4
"""Calls without a sequence after which its answer counts as over. It may come back all the same."""
PATIENCE, LONGEST_REST = 4, 8
"""After each so many drafts in vain, one more step goes by before the next one, up to so many.
Looking takes time, too, and who has found nothing for long will seldom find something now."""
DRAFTERS, RECORDS = 16, 256
"""Sequences that stay beyond that: those of them that keep what drafts for them, and all."""


@dataclass(slots=True, eq=False)
class Followed:
    """One sequence: its tokens, what drafts for it, and where its answer came from.

    `prompt` of its tokens came first. Of each further one `sources` says who drafted it, or that it
    is the target's own, as the last one of each step is; None where nobody knows. `drafted` counts
    what was verified. `learned` of the tokens are in the databases that outlive it. `idle` counts
    the drafts without any use since the last one that had some; `rest` the steps without a draft
    that are left.
    """

    tokens: list[int]
    prompt: int
    drafter: Hierarchy | None = None
    seen: bytes = b""
    sources: list[str | None] = field(default_factory=list)
    drafted: int = 0
    learned: int = 0
    used: int = 0
    row: int = -1
    chain: Chain | None = None
    """What was drafted for the next step; None where nobody tried."""
    idle: int = 0
    rest: int = 0

    def extend(self, row: Tokens, length: int, sampled: int) -> Chain:
        """Take over the tokens up to `length`, the last `sampled` of which are of the step just
        now; the part of the chain drafted for it that was verified and kept."""
        fresh = row[len(self.tokens) : length].tolist()
        said = fresh[-sampled:]
        chain = self.chain or NOTHING
        kept = min(len(said) - 1, len(chain.tokens)) if len(said) == sampled else 0
        kept = kept if chain.tokens[:kept] == said[:kept] else 0
        accepted = Chain(chain.tokens[:kept], chain.sources[:kept])
        if kept:
            self.idle = self.rest = 0
        elif self.chain is not None:
            self.idle += 1
            self.rest = min(self.idle // PATIENCE, LONGEST_REST)
        unknown = len(fresh) - len(said)
        target = len(said) - kept
        self.sources += [None] * unknown + accepted.sources + [TARGET] * target
        self.tokens += fresh
        self.seen = row[:length].tobytes()
        return accepted

    def begins(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` are those behind this prompt; -1 where it is another one's."""
        size = len(prompt)
        if self.tokens[:size] != list(prompt):
            return -1
        said = self.tokens[size : size + len(tokens)]
        return len(said) if said == list(tokens[: len(said)]) else -1

    def sources_of(self, begin: int, size: int) -> list[str | None]:
        """Where so many tokens came from, the first of which is number `begin`."""
        unknown: list[str | None] = [None] * (self.prompt - begin)
        return [*unknown, *self.sources[max(0, begin - self.prompt) :]][:size]


class Sequences:
    """The sequences that are under way, and those that were lately.

    `make` gives a new one its drafter; `over` is told when an answer seems to be.
    """

    def __init__(self, make: Callable[[], Hierarchy], over: Callable[[Followed], None]) -> None:
        self.make, self.over = make, over
        self.calls = 0
        self.rows: dict[int, Followed] = {}
        self.present: OrderedDict[int, Followed] = OrderedDict()
        """All of them, that which was used longest ago first."""
        self.waiting: OrderedDict[int, Followed] = OrderedDict()
        """Those whose answers are not known to be over."""

    def begin(self) -> None:
        """A call begins."""
        self.calls += 1

    def follow(
        self, number: int, row: Tokens, length: int, sampled: int
    ) -> tuple[Followed, Hierarchy]:
        """The sequence in a row, which has `length` tokens, the last `sampled` of them new, and
        what drafts for it. Its own tokens end where they were."""
        found = self.rows.get(number)
        if found is None or not self.goes_on(found, row, length):
            found = self.search(row, length, sampled) or new(row, length - sampled)
        if found.row != number:
            if self.rows.get(found.row) is found:
                del self.rows[found.row]
            self.rows[number] = found
            found.row = number
        if found.drafter is None:
            found.drafter = self.make()
            found.drafter.observe(found.tokens, len(found.tokens))
        found.used = self.calls
        self.present[id(found)] = self.waiting[id(found)] = found
        self.present.move_to_end(id(found))
        self.waiting.move_to_end(id(found))
        return found, found.drafter

    def goes_on(self, sequence: Followed, row: Tokens, length: int) -> bool:
        """Whether a row goes on with a sequence that no other row of this call has."""
        size = len(sequence.tokens)
        return (
            sequence.used < self.calls
            and size < length
            and int(row[size - 1]) == sequence.tokens[-1]
            and row[:size].tobytes() == sequence.seen
        )

    def search(self, row: Tokens, length: int, sampled: int) -> Followed | None:
        """The longest sequence that a row goes on with; of equal ones the latest."""
        best = None
        for sequence in reversed(self.present.values()):
            if best is not None and len(sequence.tokens) <= len(best.tokens):
                continue
            if self.goes_on(sequence, row, length):
                best = sequence
                if len(best.tokens) == length - sampled:
                    break
        return best

    def sweep(self) -> None:
        """Learn the answers that seem to be over, and forget what is old."""
        while self.waiting:
            oldest = next(iter(self.waiting.values()))
            if self.calls - oldest.used < GONE:
                break
            del self.waiting[id(oldest)]
            self.over(oldest)
        gone = len(self.present) - len(self.waiting)
        for sequence in list(self.present.values())[: max(0, gone - DRAFTERS)]:
            sequence.drafter = None
        while len(self.present) - len(self.waiting) > RECORDS:
            _, sequence = self.present.popitem(last=False)
            if self.rows.get(sequence.row) is sequence:
                del self.rows[sequence.row]

    def asked(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Followed | None, int]:
        """The latest sequence with this prompt and these tokens, and how many of them it has."""
        best: tuple[Followed | None, int] = None, 0
        for sequence in self.present.values():
            known = sequence.begins(prompt, tokens)
            if known >= max(best[1], 1):
                best = sequence, known
        return best


def new(row: Tokens, prompt: int) -> Followed:
    """A sequence of which the prompt alone is known."""
    return Followed(row[:prompt].tolist(), prompt, seen=row[:prompt].tobytes(), learned=prompt)
