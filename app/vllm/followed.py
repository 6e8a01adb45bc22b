"""Follows the sequences in vLLM's rows by their tokens, because rows are slots that move.

A row holds all tokens of a request. Requests begin, end, are preempted and come back in other rows,
and vLLM does not say which request is which. So a sequence is recognised by its tokens alone: a row
continues the sequence whose tokens it begins with. The sequence that was last in the row is tried
first, then all others. A row that continues none begins a new sequence, whose prompt is everything
except the newly sampled tokens.

Invariant: a sequence's tokens are those of its row. The result depends only on the order of rows
and calls.
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
"""A row: the tokens of a sequence, with room for more."""
GONE = 4
"""After how many calls without a sequence its answer counts as over. It may still come back."""
PATIENCE, LONGEST_REST = 4, 8
"""After every PATIENCE useless drafts the pause before the next draft grows by one step, up to
LONGEST_REST. Drafting takes time, and a sequence without useful drafts will seldom have one
soon."""
DRAFTERS, RECORDS = 16, 256
"""How many finished sequences keep their drafter, and how many are remembered at all."""


@dataclass(slots=True, eq=False)
class Followed:
    """One sequence: its tokens, its drafter, and the sources of its answer.

    The first `prompt` tokens are the prompt. `sources` names the drafter of each further token, or
    the target for its own tokens, as the last one of each step; None if unknown. `drafted` counts
    the drafted tokens that were verified. The first `learned` tokens are in the lasting databases.
    `idle` counts the useless drafts since the last useful one, and `rest` the remaining steps of a
    pause.
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
    """The draft for the next step; None if none was tried."""
    idle: int = 0
    rest: int = 0

    def extend(self, row: Tokens, length: int, sampled: int) -> Chain:
        """Take over the tokens up to `length`, of which the last step sampled the last `sampled`;
        returns the accepted part of the chain that was drafted for this step."""
        fresh = row[len(self.tokens) : length].tolist()
        last = fresh[-sampled:]
        chain = self.chain or NOTHING
        kept = min(len(last) - 1, len(chain.tokens)) if len(last) == sampled else 0
        kept = kept if chain.tokens[:kept] == last[:kept] else 0
        accepted = Chain(chain.tokens[:kept], chain.sources[:kept])
        if kept:
            self.idle = self.rest = 0
        elif self.chain is not None:
            self.idle += 1
            self.rest = min(self.idle // PATIENCE, LONGEST_REST)
        unknown = len(fresh) - len(last)
        target = len(last) - kept
        self.sources += [None] * unknown + accepted.sources + [TARGET] * target
        self.tokens += fresh
        self.seen = row[:length].tobytes()
        return accepted

    def begins(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` follow this prompt here; -1 if the prompt or a token differs."""
        size = len(prompt)
        if self.tokens[:size] != list(prompt):
            return -1
        known = self.tokens[size : size + len(tokens)]
        return len(known) if known == list(tokens[: len(known)]) else -1

    def sources_of(self, begin: int, size: int) -> list[str | None]:
        """The sources of at most `size` tokens from number `begin` on."""
        unknown: list[str | None] = [None] * (self.prompt - begin)
        return [*unknown, *self.sources[max(0, begin - self.prompt) :]][:size]


class Sequences:
    """The current and the recent sequences.

    `make` creates the drafter of a sequence; `over` is called when an answer seems to be over.
    """

    def __init__(self, make: Callable[[], Hierarchy], over: Callable[[Followed], None]) -> None:
        self.make, self.over = make, over
        self.calls = 0
        self.rows: dict[int, Followed] = {}
        self.present: OrderedDict[int, Followed] = OrderedDict()
        """All sequences, the least recently used first."""
        self.waiting: OrderedDict[int, Followed] = OrderedDict()
        """The sequences whose answers do not count as over yet."""

    def begin(self) -> None:
        self.calls += 1

    def follow(
        self, number: int, row: Tokens, length: int, sampled: int
    ) -> tuple[Followed, Hierarchy]:
        """The sequence in a row, with its drafter. The row has `length` tokens, of which the last
        `sampled` are new; the sequence's own tokens are not extended yet."""
        found = self.rows.get(number)
        if found is None or not self.continues(found, row, length):
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

    def continues(self, sequence: Followed, row: Tokens, length: int) -> bool:
        """Whether a row continues a sequence that no other row of this call continues."""
        size = len(sequence.tokens)
        return (
            sequence.used < self.calls
            and size < length
            and int(row[size - 1]) == sequence.tokens[-1]
            and row[:size].tobytes() == sequence.seen
        )

    def search(self, row: Tokens, length: int, sampled: int) -> Followed | None:
        """The longest sequence that a row continues; of equally long ones the latest."""
        best = None
        for sequence in reversed(self.present.values()):
            if best is not None and len(sequence.tokens) <= len(best.tokens):
                continue
            if self.continues(sequence, row, length):
                best = sequence
                if len(best.tokens) == length - sampled:
                    break
        return best

    def sweep(self) -> None:
        """Learn the answers that seem to be over, and forget old sequences."""
        while self.waiting:
            oldest = next(iter(self.waiting.values()))
            if self.calls - oldest.used < GONE:
                break
            del self.waiting[id(oldest)]
            self.over(oldest)
        finished = len(self.present) - len(self.waiting)
        for sequence in list(self.present.values())[: max(0, finished - DRAFTERS)]:
            sequence.drafter = None
        while len(self.present) - len(self.waiting) > RECORDS:
            _, sequence = self.present.popitem(last=False)
            if self.rows.get(sequence.row) is sequence:
                del self.rows[sequence.row]

    def find(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Followed | None, int]:
        """The latest sequence with this prompt and these tokens, and how many of them it has."""
        best: tuple[Followed | None, int] = None, 0
        for sequence in self.present.values():
            known = sequence.begins(prompt, tokens)
            if known >= max(best[1], 1):
                best = sequence, known
        return best


def new(row: Tokens, prompt: int) -> Followed:
    """A sequence of which only the prompt is known."""
    return Followed(row[:prompt].tolist(), prompt, seen=row[:prompt].tobytes(), learned=prompt)
