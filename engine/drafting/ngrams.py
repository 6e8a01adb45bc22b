"""Counts of what followed each key of one to `longest` tokens, in memory.

Most keys occur once, and the longer keys that extend such a key contain no further information. A
key is therefore stored only under its shortest suffix that no other key has, as a leaf that holds
the whole key. The leaf moves to a longer suffix only when another key with the same suffix appears.
Look-ups return the same as a table of all keys, in half the memory and half the time.
"""

from collections.abc import Iterable, Iterator, Sequence

from engine import native
from engine.types import Followers

ENTRY, LEAF, FOLLOWERS = 120, 110, 320
"""Bytes of an entry of the table, of a leaf, and of a key's own followers; those of a key that was
seen once are shared. As measured with tracemalloc."""

FREQUENT = 256
"""The most tokens that are kept as frequent: the less frequent half is dropped when there are more.
"""

Key = tuple[int, ...]


class Leaf:
    """A key that is the only one with a certain suffix, and what followed it."""

    __slots__ = ("followers", "key")

    def __init__(self, key: Key, followers: Followers) -> None:
        self.key, self.followers = key, followers


class NgramCounts:
    """What followed each key. Every suffix of a known key is known. This is the reference."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.clear()

    def clear(self) -> None:
        self.table: dict[Key, Followers | Leaf] = {}
        self.unigrams: Followers | None = None
        """The frequent tokens after any key; None while nothing was counted."""
        self.leaves = self.owned = 0
        """The numbers of leaves, and of followers that are shared with no other key."""

    @property
    def bytes(self) -> int:
        return len(self.table) * ENTRY + self.leaves * LEAF + self.owned * FOLLOWERS

    def add(self, key: Key, token: int, count: int = 1) -> bool:
        """Count `token` after `key` and each of its suffixes; returns whether it was new after
        `key`."""
        table, key = self.table, key[-self.longest :]
        fresh = False
        if self.unigrams is None:
            self.unigrams = Followers(count, 1, {token: count})
        else:
            self.unigrams = self.unigrams.plus(token, count, FREQUENT)
        for size in range(1, len(key) + 1):
            end = key[-size:]
            known = table.get(end)
            if known is None:
                table[end] = Leaf(key, self.first(token, count))
                self.leaves += 1
                return True
            if isinstance(known, Leaf):
                leaf, known = known, known.followers
                if leaf.key == key:
                    fresh = token not in known.counts
                    leaf.followers = known.plus(token, count)
                    self.owned += leaf.followers is not known
                    return fresh
                table[end] = known = self.branch(leaf, size)
            fresh = token not in known.counts
            grown = known.plus(token, count)
            if grown is not known:
                table[end] = grown
                self.owned += 1
        return fresh

    def read(self, tokens: Sequence[int], first: int) -> None:
        for at in range(first, len(tokens)):
            self.add(tuple(tokens[max(0, at - self.longest) : at]), tokens[at])

    def first(self, token: int, count: int) -> Followers:
        if count == 1:
            return Followers.once(token)
        self.owned += 1
        return Followers(count, 1, {token: count})

    def branch(self, leaf: Leaf, size: int) -> Followers:
        """Make room for another key with the same last `size` tokens; returns the followers of that
        suffix."""
        followers = leaf.followers
        if len(leaf.key) == size:
            self.leaves -= 1
            return followers
        self.table[leaf.key[-size - 1 :]] = leaf
        if followers.total == 1:
            return followers
        self.owned += 1
        return Followers(followers.total, followers.distinct, dict(followers.counts))

    def matches(self, suffix: Key) -> list[Followers]:
        """The followers of the last 1, 2, ... tokens of `suffix`, up to the longest known."""
        table, found = self.table, []
        for size in range(1, min(len(suffix), self.longest) + 1):
            known = table.get(suffix[-size:])
            if known is None:
                break
            if isinstance(known, Leaf):
                key, followers = known.key, known.followers
                found.append(followers)
                for at in range(size + 1, min(len(suffix), len(key)) + 1):
                    if key[-at] != suffix[-at]:
                        break
                    found.append(followers)
                break
            found.append(known)
        return found

    def items(self) -> Iterator[tuple[Key, Followers]]:
        """All keys with their followers; of keys with the same unique end, only the longest."""
        for key, known in self.table.items():
            yield (known.key, known.followers) if isinstance(known, Leaf) else (key, known)


class CompiledCounts:
    """The same counts in native memory (native/src/ngrams.cpp)."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        core = self.compiled = native.core.Counts(longest)
        self.add, self.read, self.clear = core.add, core.read, core.clear

    @property
    def bytes(self) -> int:
        return int(self.compiled.bytes)

    @property
    def unigrams(self) -> Followers | None:
        found = self.compiled.often()
        return found and Followers(*found)

    def matches(self, suffix: Key) -> Sequence[Followers]:
        return [Followers(*found) for found in self.compiled.matches(suffix)]

    def items(self) -> Iterable[tuple[Key, Followers]]:
        return ((key, Followers(*found)) for key, found in self.compiled.items())


Counts = NgramCounts | CompiledCounts


def counting(longest: int) -> Counts:
    """Counts of keys of up to `longest` tokens, compiled if the core is available."""
    return NgramCounts(longest) if native.core is None else CompiledCounts(longest)
