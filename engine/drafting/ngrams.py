"""Counts of what followed each key of one to `longest` tokens, in memory.

Most keys occur once, and of such a key the longer ones say nothing more. So a key is kept by its
shortest end that no other key has: there stands a leaf, with the whole key. Only when another key
with that end comes by does the leaf move on to a longer one. Answers are those of a table of all
keys, in half the memory and half the time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from engine import native
from engine.types import Followers

ENTRY, LEAF, FOLLOWERS = 120, 110, 320
"""Bytes of an entry of the table, of a leaf, and of followers of its own: those of a key that was
seen once are shared. As measured with tracemalloc."""

FREQUENT = 256
"""The most tokens that are kept as often counted: the rarer half goes when there are more."""

Key = tuple[int, ...]


class Counts(Protocol):
    """What tiers need of counts: those below in Python, or compiled."""

    @property
    def bytes(self) -> int:
        """About what the counts take in memory."""

    @property
    def unigrams(self) -> Followers | None:
        """What is often counted, whatever the key; None while nothing was."""

    def add(self, key: Key, token: int, count: int = 1) -> bool:
        """Count `token` after `key` and after each of its suffixes; whether the two were new."""

    def read(self, tokens: Sequence[int], first: int) -> None:
        """Count each of the tokens from `first` on after the keys that end before it."""

    def clear(self) -> None:
        """Forget everything."""

    def matches(self, suffix: Key) -> Sequence[Followers]:
        """The followers of the last 1, 2, ... tokens of `suffix`, up to the longest known."""

    def items(self) -> Iterable[tuple[Key, Followers]]:
        """All keys with what followed them; of those with the same unique end, the longest."""


def counting(longest: int) -> Counts:
    """Counts of keys of up to so many tokens, compiled where the core is there."""
    return NgramCounts(longest) if native.core is None else CompiledCounts(longest)


class CompiledCounts:
    """The same counts in native memory (native/src/ngrams.cpp)."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.compiled: Any = native.core.Counts(longest)
        self.add, self.read, self.clear = (
            self.compiled.add,
            self.compiled.read,
            self.compiled.clear,
        )

    @property
    def bytes(self) -> int:
        """What the counts take in memory."""
        return int(self.compiled.bytes)

    @property
    def unigrams(self) -> Followers | None:
        """What is often counted, whatever the key; None while nothing was."""
        said = self.compiled.often()
        return said and Followers(*said)

    def matches(self, suffix: Key) -> Sequence[Followers]:
        """The followers of the last 1, 2, ... tokens of `suffix`, up to the longest known."""
        return [Followers(*said) for said in self.compiled.matches(suffix)]

    def items(self) -> Iterable[tuple[Key, Followers]]:
        """All keys with what followed them; of those with the same unique end, the longest."""
        return ((key, Followers(*said)) for key, said in self.compiled.items())


class Leaf:
    """The only key with a certain end, and what followed it."""

    __slots__ = ("followers", "key")

    def __init__(self, key: Key, followers: Followers) -> None:
        self.key, self.followers = key, followers


class NgramCounts:
    """What followed each key. Every suffix of a known key is known."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.table: dict[Key, Followers | Leaf] = {}
        self.unigrams: Followers | None = None
        """What is often counted, whatever the key."""
        self.leaves = self.owned = 0
        """Leaves, and followers that are shared with no other key."""

    @property
    def bytes(self) -> int:
        """About what the counts take in memory."""
        return len(self.table) * ENTRY + self.leaves * LEAF + self.owned * FOLLOWERS

    def add(self, key: Key, token: int, count: int = 1) -> bool:
        """Count `token` after `key` and after each of its suffixes; whether the two were new."""
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
        """Count each of the tokens from `first` on after the keys that end before it."""
        for at in range(first, len(tokens)):
            self.add(tuple(tokens[max(0, at - self.longest) : at]), tokens[at])

    def first(self, token: int, count: int) -> Followers:
        """The followers of a new key."""
        if count == 1:
            return Followers.once(token)
        self.owned += 1
        return Followers(count, 1, {token: count})

    def branch(self, leaf: Leaf, size: int) -> Followers:
        """Make room for another key with the same end of `size` tokens: what followed that end."""
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
        """All keys with what followed them; of those with the same unique end, the longest."""
        for key, known in self.table.items():
            yield (known.key, known.followers) if isinstance(known, Leaf) else (key, known)
