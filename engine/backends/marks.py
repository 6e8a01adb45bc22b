"""Copies of what the layers of a GGUF model that keep a state remember: marks of a text.

Such a state holds the whole text at once, so it cannot be shortened; a text goes back to a mark. A
mark holds the states alone: the keys and values of layers that attend stay in the library's cache,
which can forget its end at any time.

On a GPU a copy of what has to be undone at once stays there. The library has room for one of those,
whoever it belongs to: it is gone once another conversation has the cache.

Invariant: a mark of `length` is what the layers remember behind the first `length` tokens of the
text as it is; `forget` drops those of a text that went on otherwise.
"""

import ctypes
from contextlib import suppress
from typing import Any, Literal

import llama_cpp

Name = Literal["begin", "tail", "end", "step"]
"""Where the last prompt began to be read, shortly before its end, its end; and before what may
have to be undone at once."""
MOST = 4
"""Marks of a text at most: one of each name."""


class Marks:
    """The marks of one sequence, which is number `place` of the library's `context`; `on_device`
    says that a GPU holds the states."""

    def __init__(self, context: Any, place: int, on_device: bool) -> None:
        self.context, self.place, self.on_device = context, place, on_device
        self.kept: dict[Name, tuple[int, Any]] = {}

    @property
    def bytes(self) -> int:
        """What they take in the host's memory."""
        return sum(len(data) for _, data in self.kept.values())

    def keep(self, name: Name, length: int) -> None:
        """Mark the text, of which the library has read so many tokens, where memory allows."""
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
        """Have the layers remember the longest marked text of at most so many tokens: its length,
        0 where there is none, or the library did not take it. They remember anything then."""
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
        """How a mark is copied."""
        stays = self.on_device and name == "step"
        device = llama_cpp.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE if stays else 0
        return int(llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | device)

    def leave(self) -> None:
        """Another conversation has the cache from now on."""
        if self.on_device:
            self.kept.pop("step", None)

    def forget(self, length: int) -> None:
        """Only so many tokens of the text are still the same."""
        self.kept = {name: mark for name, mark in self.kept.items() if mark[0] <= length}
