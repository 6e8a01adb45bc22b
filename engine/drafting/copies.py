"""The longest earlier match of a text's last tokens, over all that was read before.

Counts of n-grams tell what follows a few tokens. Where a text repeats another, much longer matches
exist, and the longer a match is, the surer is its continuation. A place is found by the LONGEST
tokens before it, and compared from there backwards.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from engine import native
from engine.drafting.calibration import LONG, LONGEST, WINDOW
from engine.types import Followers, holds

EXAMINED = 16
"""The most places that are compared, the newest first."""
MOST = 1 << 20
"""The most tokens of texts that are kept, in about 20 bytes each."""
SLACK = 1.25
"""The multiple of it at which the oldest are forgotten."""
END = 2**32 - 1
"""Stands after each text, and in place of what was removed."""
Part = tuple[int, int]
"""A part of the texts: its first place, and the first one after it."""


class Copies:
    """Texts one after the other, and the places in them after each run of LONGEST tokens. This is
    the reference."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.tokens: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}
        self.unbroken = 0
        """The number of tokens since the last END."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        """The approximate size in memory."""
        return 240 * len(self.tokens)

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.chain(len(self.tokens) - 1)

    def chain(self, place: int) -> None:
        if self.tokens[place] == END:
            self.unbroken = 0
            return
        if self.unbroken >= LONGEST:
            key = tuple(self.tokens[place - LONGEST : place])
            self.places.setdefault(key, []).append(place)
        self.unbroken += 1

    def end(self) -> None:
        self.read((END,))

    def remove(self, start: int, end: int) -> None:
        """Never copy the tokens from place `start` on and before `end` again."""
        end = min(end, len(self.tokens))
        self.tokens[start:end] = [END] * (end - start)
        self.places, self.unbroken = {}, 0
        for place in range(len(self.tokens)):
            self.chain(place)

    def part(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]

    def longest(
        self, suffix: Sequence[int], hidden: Sequence[Part] = ()
    ) -> tuple[int, Followers | None]:
        """The length of the longest match of the end of `suffix`, with what followed it; 0 and None
        if it is shorter than LONGEST. Places in `hidden` parts do not count."""
        best, counts = 0, dict[int, float]()
        places = self.places.get(tuple(suffix[-LONGEST:]), ())
        seen = [at for at in places if not any(start <= at < end for start, end in hidden)]
        for place in seen[: -EXAMINED - 1 : -1]:
            length = LONGEST
            while length < min(len(suffix), place):
                if suffix[-1 - length] != self.tokens[place - 1 - length]:
                    break
                length += 1
            if length > best:
                best, counts = length, {}
            if length == best:
                token = self.tokens[place]
                counts[token] = counts.get(token, 0) + 1
        if not best:
            return 0, None
        return best, Followers(sum(counts.values()), len(counts), counts)


class CompiledCopies:
    """The same in native memory (native/src/copies.cpp)."""

    def __init__(self) -> None:
        core = self.compiled = native.core.Copies()
        self.read, self.end, self.remove, self.part = core.read, core.end, core.remove, core.part
        self.clear = core.clear

    def __len__(self) -> int:
        return len(self.compiled)

    @property
    def bytes(self) -> int:
        return int(self.compiled.bytes)

    def longest(
        self, suffix: Sequence[int], hidden: Sequence[Part] = ()
    ) -> tuple[int, Followers | None]:
        length, found = self.compiled.longest(suffix[-WINDOW:], hidden)
        return length, found and Followers(*found)


def copying() -> Copies | CompiledCopies:
    """Texts to copy from, compiled if the core is available."""
    return Copies() if native.core is None else CompiledCopies()


def with_copies(
    found: Sequence[Followers], copied: tuple[int, Followers | None]
) -> Sequence[Followers]:
    """The followers of the last 1, 2, ... tokens by counts, then those of a longer match, by its
    class (engine/drafting/calibration.py)."""
    length, followers = copied
    if followers is None:
        return found
    size = LONGEST + bisect_right(LONG, length)
    return [*found, *[followers] * (size - len(found))]


class Texts:
    """What an owner has read and the models have said, by conversation: the newest `most` tokens,
    and some more."""

    def __init__(self, most: int = MOST) -> None:
        self.most, self.copies = most, copying()
        self.parts = defaultdict[str, list[Part]](list)
        self.last = ""
        """The conversation that was read last."""

    def read(self, conversation: str, tokens: Sequence[int]) -> None:
        start, parts = len(self.copies), self.parts[conversation]
        if conversation == self.last and parts:
            start = parts.pop()[0]
        elif self.last:
            self.copies.end()
            start += 1
        self.last = conversation
        self.copies.read(tokens)
        parts.append((start, len(self.copies)))
        if len(self.copies) > self.most * SLACK:
            self.trim()

    def trim(self) -> None:
        oldest = len(self.copies) - self.most
        found = sorted((part, name) for name, parts in self.parts.items() for part in parts)
        kept = [
            (name, self.copies.part(max(start, oldest), end))
            for (start, end), name in found
            if end > oldest
        ]
        self.copies.clear()
        self.parts.clear()
        self.last = ""
        for name, tokens in kept:
            self.read(name, tokens)

    def holding(self, tokens: Sequence[int]) -> list[str]:
        wanted = array("I", tokens).tobytes()
        return [
            name
            for name, parts in self.parts.items()
            if any(holds(array("I", self.copies.part(*part)).tobytes(), wanted) for part in parts)
        ]

    def forget(self, conversation: str) -> None:
        """Never copy from a conversation again."""
        for part in self.parts.pop(conversation, ()):
            self.copies.remove(*part)

    @property
    def bytes(self) -> int:
        return self.copies.bytes
