"""A GGUF model whose layers keep a state, verified as a chain.

A state represents the whole text, so reading can be undone only by going back to an earlier state.
There are two kinds of earlier states. Architectures with snapshots keep the states after the last
rows of a forward, so the library can forget up to `snapshots` rows at no cost. In all other cases
the text goes back to a mark, a copy of the states alone: keys and values of attention layers stay
in the library's cache, whose end can be removed at any time. The tokens between the mark and the
end of the decided text are left unread: the next forward reads them again, before its root. An
undone chain thus costs a few rows of a forward, not a separate forward.

A prompt leaves three marks, so that the next prompt need not be read from its beginning: where
reading began, which is the end of the last answer; shortly before its end, because templates change
the beginning of an answer once it is complete; and at its end, for a repetition of the question.

On a GPU, the copy for undoing the current step stays on the device. The library has room for one
such copy, which is lost when another conversation gets the cache.

Invariant between steps: the library has read the first `read` of the `cached` tokens, and can
forget the last `reach` of those. After a forward these include the rows of the tree. With `torn` a
forward was interrupted, which leaves the states undefined.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import llama_cpp

from engine.backends.base import Filled, LogitScores
from engine.backends.llamacpp import LlamaCppBackend
from engine.decode import never
from engine.models.gguf import TREE_ROWS
from engine.settings import Sampling
from engine.tree import Tree

Name = Literal["begin", "tail", "end", "step"]
"""The places of marks: where reading the last prompt began, shortly before its end, at its end, and
before the rows of the current step, which may have to be undone."""
MOST = 4
"""The most marks of a text: one of each name."""
TAIL = 16
"""The distance of a mark from the end of a prompt, in tokens: more than templates change there."""
WORTH = 64
"""The fewest tokens of a prompt for which that mark pays: it takes a further forward."""
MOST_UNREAD = 32
"""The most tokens that may stay unread while chains are verified. Beyond that, a plain step reads
them."""


class Marks:
    """The marks of one sequence, number `place` of the library's `context`. With `on_device` a GPU
    holds the states. A mark of `length` holds the states after the first `length` tokens of the
    present text."""

    def __init__(self, context: Any, place: int, on_device: bool) -> None:
        self.context, self.place, self.on_device = context, place, on_device
        self.kept: dict[Name, tuple[int, Any]] = {}

    @property
    def bytes(self) -> int:
        return sum(len(data) for _, data in self.kept.values())

    def keep(self, name: Name, length: int) -> None:
        """Mark the text, of which the library has read `length` tokens, if memory allows."""
        if not length or self.kept.get(name, (0, None))[0] == length:
            return
        flags = self.flags(name)
        size = llama_cpp.llama_state_seq_get_size_ext(self.context, self.place, flags)
        data = self.kept.pop(name, (0, ()))[1]
        with suppress(MemoryError):
            if len(data) != size:
                data = (ctypes.c_uint8 * size)()
            read = llama_cpp.llama_state_seq_get_data_ext(
                self.context, data, size, self.place, flags
            )
            if read == size:
                self.kept[name] = length, data

    def restore(self, most: int) -> int:
        """Restore the longest mark of at most so many tokens. Returns its length; 0 if no mark fits
        or the library rejects it, in which case the states are undefined."""
        fitting = [name for name, mark in self.kept.items() if mark[0] <= most]
        if not fitting:
            return 0
        name = max(fitting, key=lambda name: self.kept[name][0])
        length, data = self.kept[name]
        read = llama_cpp.llama_state_seq_set_data_ext(
            self.context, data, len(data), self.place, self.flags(name)
        )
        return length if read == len(data) else 0

    def flags(self, name: Name) -> int:
        stays = self.on_device and name == "step"
        device = llama_cpp.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if stays else 0
        return int(llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | device)

    def leave(self) -> None:
        """Drop what is lost when another conversation gets the cache."""
        if self.on_device:
            self.kept.pop("step", None)

    def forget(self, length: int) -> None:
        """Drop the marks beyond so many tokens, because the text has changed there."""
        self.kept = {name: mark for name, mark in self.kept.items() if mark[0] <= length}


class StatesBackend(LlamaCppBackend):
    """One sequence of a model whose layers keep a state; see LlamaCppBackend.

    Such a model has one place in the library's cache, and its sequences share no forwards: its
    marks, and what the library can forget, are those of a single text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.snapshots = int(llama_cpp.llama_n_rs_seq(self.context))
        self.begin()

    def begin(self) -> None:
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

    def prefill(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], most: int | None = None
    ) -> Filled:
        # A prompt is read as a whole, because its marks lie at its ends.
        self.enter()
        self.settle()
        return super().prefill(tokens, cancelled)

    def read_rest(self, decided: Sequence[int], cancelled: Callable[[], bool]) -> None:
        if self.read == len(decided):
            return
        self.marks.keep("begin", self.read)
        tail = len(decided) - TAIL
        if tail - self.read > WORTH:
            super().read_rest(decided[:tail], cancelled)
            if self.read == tail:
                self.marks.keep("tail", tail)
        super().read_rest(decided, cancelled)
        if self.read == len(decided):
            self.marks.keep("end", self.read)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.enter()
        if self.unread + len(tree.tokens) > TREE_ROWS:
            decided, self.cached = self.cached, self.cached[: self.read]
            super().read_rest(decided, never)
        if len(tree) > self.snapshots:
            self.marks.keep("step", self.read)
        return super().score(tree, sampling)

    def drop(self, tree: Tree, path: Sequence[int]) -> None:
        self.rewind(len(self.cached))

    def decode(
        self, sequences: Sequence[LlamaCppBackend], cancelled: Callable[[], bool] = never
    ) -> bool:
        if cancelled is not never and self.info.device == "cpu":
            # Only on a processor can a forward be interrupted in the middle.
            self.marks.keep("step", self.read)
        self.torn, rows = True, self.batch.raw.n_tokens
        if done := super().decode(sequences, cancelled):
            # The library keeps no snapshot of the states before the first row.
            self.torn, self.read = False, self.read + rows
            self.reach = min(self.snapshots, rows - 1)
        return done

    def settle(self) -> None:
        """Undo a forward that was not accepted, except for its root, which was decided before."""
        if self.pending and self.tree is not None and not self.torn:
            self.accept(())
        elif self.pending:
            self.keep(len(self.cached))

    def keep(self, length: int) -> None:
        self.rewind(length)
        del self.cached[self.read :]
        self.marks.forget(self.read)
        self.pending = 0

    def rewind(self, length: int) -> None:
        """Make the library hold no more than the first `length` tokens: exactly these if it can
        forget the others, otherwise those up to a mark."""
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
