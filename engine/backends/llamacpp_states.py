"""A GGUF model whose layers keep a state, verified as a chain.

A state holds the whole text at once: what was read can be undone only by going back to an earlier
state. There are two kinds of those. Architectures that know snapshots keep the states behind the
last rows of a forward, so that the library can forget up to `snapshots` of them at once, for
nothing. Behind all others, and wherever that is not enough, the text goes back to a mark
(engine/backends/marks.py). What lies between the mark and the end of the decided text is left
unread: the next forward reads it again, before its root. So an undone chain costs a few rows of a
forward, not a forward of its own.

A prompt leaves three marks, and so the next one is not read from its beginning: where it began to
be read, which is the end of the last answer; shortly before its end, as templates write the
beginning of an answer otherwise once that is over; and its end, for the same question again.

Invariant between steps: the library has read the first `read` of the `cached` tokens, and can
forget the last `reach` of those. After a forward these include the rows of the tree. `torn` says
that a forward broke off: the states are anything then.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import llama_cpp

from engine.backends.base import Filled
from engine.backends.llamacpp import LlamaCppBackend
from engine.backends.marks import Marks
from engine.backends.scores import LogitScores
from engine.decode import never
from engine.models.gguf import TREE_ROWS
from engine.settings import Sampling
from engine.tree import Tree

TAIL = 16
"""Tokens before the end of a prompt where it is marked: more than templates change there."""
WORTH = 64
"""Tokens of a prompt that are worth that mark, which takes a forward more."""
MOST_UNREAD = 32
"""Tokens that may be left unread while chains are verified; a plain step then reads them."""


class StatesBackend(LlamaCppBackend):
    """One sequence of such a model; see LlamaCppBackend."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.snapshots = int(llama_cpp.llama_n_rs_seq(self.context))
        self.begin()

    def begin(self) -> None:
        """Nothing was read."""
        self.read = self.reach = 0
        self.torn = False
        self.marks = Marks(self.context, self.order[0], self.info.device != "cpu")

    def reset(self) -> None:
        super().reset()
        self.begin()

    def open(self) -> Self:
        other = super().open()
        other.begin()
        return other

    @property
    def bytes(self) -> int:
        return super().bytes + self.marks.bytes

    @property
    def unread(self) -> int:
        return len(self.cached) - self.read

    def depth_limit(self, length: int) -> int | None:
        if self.unread > MOST_UNREAD:
            return 0
        return self.snapshots or TREE_ROWS - MOST_UNREAD - 1

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        self.enter()
        self.settle()
        return super().prefill(tokens, cancelled)

    def read_on(self, wanted: Sequence[int], cancelled: Callable[[], bool]) -> None:
        if self.read == len(wanted):
            return
        self.marks.keep("begin", self.read)
        tail = len(wanted) - TAIL
        if tail - self.read > WORTH:
            super().read_on(wanted[:tail], cancelled)
            if self.read == tail:
                self.marks.keep("tail", tail)
        super().read_on(wanted, cancelled)
        if self.read == len(wanted):
            self.marks.keep("end", self.read)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.enter()
        if self.unread + len(tree.tokens) > TREE_ROWS:
            decided, self.cached = self.cached, self.cached[: self.read]
            super().read_on(decided, never)
        if len(tree) > self.snapshots:
            self.marks.keep("step", self.read)
        return super().score(tree, sampling)

    def drop(self, tree: Tree, path: Sequence[int]) -> None:
        self.rewind(len(self.cached))

    def decode(self, cancelled: Callable[[], bool] = never) -> bool:
        if cancelled is not never and self.info.device == "cpu":
            # Only there a forward can break off in the middle.
            self.marks.keep("step", self.read)
        self.torn, rows = True, self.batch.raw.n_tokens
        if done := super().decode(cancelled):
            # The library keeps no snapshot of what was before the first row.
            self.torn, self.read = False, self.read + rows
            self.reach = min(self.snapshots, rows - 1)
        return done

    def settle(self) -> None:
        """Undo a forward that was not accepted, but for its root, which was decided before."""
        if self.dirty and self.tree is not None and not self.torn:
            self.accept(())
        elif self.dirty:
            self.keep(len(self.cached))

    def keep(self, length: int) -> None:
        self.rewind(length)
        del self.cached[self.read :]
        self.marks.forget(self.read)
        self.dirty = False

    def rewind(self, length: int) -> None:
        """Have the library hold no more than the first `length` tokens: all of these where it can
        forget the others, else those up to a mark."""
        back, place = self.read - length, self.order[0]
        if not self.torn:
            if back <= 0:
                return
            remove = llama_cpp.llama_memory_seq_rm
            if back <= self.reach and remove(self.memory, place, length, -1):
                self.read, self.reach = length, 0
                return
        self.read, self.reach, self.torn = self.marks.restore(length), 0, False
        if not (self.read and llama_cpp.llama_memory_seq_rm(self.memory, place, self.read, -1)):
            self.clear()
            self.read = 0

    def park(self) -> None:
        self.settle()
        super().park()
        self.marks.leave()
        self.reach = 0

    def restore(self) -> bool:
        return not self.read or super().restore()
