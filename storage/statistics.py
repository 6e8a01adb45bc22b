"""The statistics tier's file: for a key of one to three tokens, a small tree of what followed it.

One SQLite file per tokenizer, read-only while decoding. A key is packed into the integer primary
key, its tree into one blob, so a look-up is one descent of one B-tree. The file is made in one
piece (storage/statistics_build.py) and never changed afterwards.
"""

import math
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from engine.errors import StorageError
from engine.types import Continuation, Followers

FORMAT = 1
KEY_SIZE = 3
TOKEN_BITS = 20
NODES = 60
"""The most nodes a key's tree may have; parents are one byte, so at most 254 would fit."""
ROOT = 255
META = ("format", "tokenizer", "vocabulary", "tokens", "documents", "keys", "title")
COUNT_STEPS = 8
"""A key's count is one byte, in eighths of a power of two."""
LARGEST_BLOB = 1 + NODES * 6
SUFFIX = ".statistics.db"


def pack_key(key: Sequence[int]) -> int:
    """A key of one to three tokens as an integer below 2**62; its length is part of it."""
    packed = len(key)
    for token in key:
        packed = packed << TOKEN_BITS | token
    return packed


def pack_count(count: float) -> int:
    """A key's count as one byte."""
    return min(255, round(COUNT_STEPS * math.log2(max(1.0, count))))


def unpack(blob: bytes, wide: bool) -> Followers:
    """A key's count and tree.

    Raises StorageError for a blob that is not one: the file may come from anywhere.
    """
    paths: list[tuple[int, ...]] = []
    found = []
    try:
        count = 2.0 ** (blob[0] / COUNT_STEPS)
        for parent, share, token in struct.iter_unpack("<BBI" if wide else "<BBH", blob[1:]):
            path = (*paths[parent], token) if parent != ROOT else (token,)
            paths.append(path)
            found.append(Continuation(path, share / 255))
    except (struct.error, IndexError) as error:
        raise StorageError(
            "The statistics file holds a damaged entry. Build it again, or remove the file."
        ) from error
    return Followers(count, tuple(found))


class StatisticsTable:
    """An open statistics file. Look-ups are cached; any thread may ask."""

    def __init__(self, path: Path) -> None:
        self.path = path
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        try:
            self.connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                self.meta = dict(self.connection.execute("SELECT name, value FROM meta"))
                self.check()
            except BaseException:
                self.connection.close()
                raise
        except (sqlite3.Error, ValueError) as error:
            raise StorageError(
                f"The statistics file {str(path)!r} cannot be used: {error}. "
                "Build it again, or remove it; drafting goes on without it."
            ) from error
        self.wide = int(self.meta["vocabulary"]) > 1 << 16
        self.look_up_packed = lru_cache(maxsize=1 << 15)(self.read)

    def check(self) -> None:
        """Raise ValueError unless the file has the expected format and columns."""
        missing = [name for name in META if name not in self.meta]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if self.meta["format"] != str(FORMAT):
            raise ValueError(f"it has format {self.meta['format']}, this program reads {FORMAT}")
        if not str(self.meta["vocabulary"]).isdecimal():
            raise ValueError("its vocabulary is not a number")
        columns = [row[1:3] for row in self.connection.execute("PRAGMA table_info(grams)")]
        if columns != [("key", "INTEGER"), ("tree", "BLOB")]:
            raise ValueError("its table of n-grams has other columns")

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """What followed `key` (one to three tokens) in the texts; None for an unknown key."""
        return self.look_up_packed(pack_key(key))

    def read(self, packed: int) -> Followers | None:
        """The uncached look-up. A damaged file costs speed, never an answer: it finds nothing."""
        try:
            row = self.connection.execute(
                "SELECT tree FROM grams WHERE key = ?", (packed,)
            ).fetchone()
            usable = row is not None and isinstance(row[0], bytes) and len(row[0]) <= LARGEST_BLOB
            return unpack(row[0], self.wide) if usable else None
        except (sqlite3.DatabaseError, StorageError):
            return None

    def top(self, limit: int) -> Iterator[tuple[int, Continuation]]:
        """For display: one-token keys and their likeliest continuation, best first.

        A damaged entry is left out.
        """
        first = pack_key((0,))
        try:
            rows = self.connection.execute(
                "SELECT key FROM grams WHERE key BETWEEN ? AND ?",
                (first, first + (1 << TOKEN_BITS) - 1),
            ).fetchall()
        except sqlite3.DatabaseError:
            return
        found = ((packed - first, self.read(packed)) for (packed,) in rows)
        best = [(token, tree.paths[0]) for token, tree in found if tree and tree.paths]
        yield from sorted(best, key=lambda pair: -pair[1].share)[:limit]

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def find_table(
    tokenizer_fingerprint: str,
    *folders: Path,
    report: Callable[[str], None] = lambda problem: None,
) -> StatisticsTable | None:
    """The statistics for a tokenizer, from the first folder that has a usable file of that name.

    A file that cannot be used is passed over, and `report` is told why.
    """
    for folder in folders:
        path = folder / f"{tokenizer_fingerprint}{SUFFIX}"
        if not path.is_file():
            continue
        try:
            table = StatisticsTable(path)
        except StorageError as error:
            report(str(error))
            continue
        if table.meta["tokenizer"] == tokenizer_fingerprint:
            return table
        table.close()
    return None
