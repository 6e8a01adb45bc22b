"""Counts of what followed each key of one to `longest` tokens, in memory."""

from engine.types import Followers


class NgramCounts:
    """A table from keys to followers. Every suffix of a known key is known."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.table: dict[tuple[int, ...], Followers] = {}

    def add(self, key: tuple[int, ...], token: int, count: int = 1) -> None:
        """Count `token` after `key` and after each of its suffixes."""
        table = self.table
        for start in range(max(0, len(key) - self.longest), len(key)):
            part = key[start:]
            known = table.get(part)
            if known is not None:
                table[part] = known.plus(token, count)
            elif count == 1:
                table[part] = Followers.once(token)
            else:
                table[part] = Followers(count, 1, {token: count})

    def remove(self, key: tuple[int, ...], token: int) -> None:
        """Take back what one `add` counted. No other table that shares its values is changed."""
        for start in range(max(0, len(key) - self.longest), len(key)):
            part = key[start:]
            known = self.table.get(part)
            if known is not None and known.total > 1:
                self.table[part] = known.minus(token)
            elif known is not None:
                del self.table[part]

    def matches(self, suffix: tuple[int, ...]) -> list[Followers]:
        """The followers of the last 1, 2, ... tokens of `suffix`, up to the longest known."""
        table, found, size = self.table, [], len(suffix)
        for start in range(size - 1, max(-1, size - self.longest - 1), -1):
            followers = table.get(suffix[start:])
            if followers is None:
                break
            found.append(followers)
        return found
