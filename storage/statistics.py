"""The statistics tier's file: for a key of one to three tokens, how often which token came next.

One SQLite file per tokenizer, read-only while decoding. A key is packed into the integer primary
key, the frequent next tokens into one blob, so a look-up is one descent of one B-tree. The file is
made in one piece (storage/statistics_build.py) and never changed afterwards. The invariant: with a
key, all its suffixes are stored, so who asks with ever longer keys may stop at the first unknown.
"""

import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from engine.errors import StorageError
from engine.types import Followers

FORMAT = 2
KEY_SIZE = 3
LARGEST_VOCABULARY = (1 << 20) - 1
"""A packed key of three tokens and its length must fit a signed 64-bit integer."""
FOLLOWERS = 16
"""The most next tokens that are kept for a key."""
META = ("format", "tokenizer", "vocabulary", "tokens", "documents", "keys", "entries", "title")
SCHEMA = """\
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE grams (key INTEGER PRIMARY KEY, followers BLOB NOT NULL);
"""
SUFFIX = ".statistics.db"
CACHED = 1 << 16
"""Decoded keys that are kept in memory, about 1 KB each."""

EXACT = 12
COUNTS = tuple(float(n) if n <= EXACT else EXACT * 2 ** ((n - EXACT) / 8) for n in range(1, 257))
"""The counts that a byte can stand for: exact up to 12, then in eighths of a power of two."""
SHARES = tuple(2.0 ** (-step / 16) for step in range(256))
"""The shares that a byte can stand for: 1 down to 2**-15.9, each 4 % below the one before."""
HEAD = 2
NARROW, WIDE = struct.Struct("<BH"), struct.Struct("<BI")
"""An entry: its share and its token, which takes four bytes where two are not enough."""


def key_bits(vocabulary: int) -> int:
    """The bits of a token in a packed key: enough for every token and one number more."""
    return vocabulary.bit_length()


def entry_format(vocabulary: int) -> struct.Struct:
    """The layout of an entry for a vocabulary of that many tokens."""
    return WIDE if vocabulary > 1 << 16 else NARROW


def pack_key(key: Sequence[int], bits: int) -> int:
    """A key of one to three tokens of `bits` bits as one integer; its length is part of it."""
    packed = len(key)
    for token in key:
        packed = packed << bits | token
    return packed


def unpack(blob: bytes, entry: struct.Struct) -> Followers:
    """What a blob says followed its key, the likeliest token first.

    Raises StorageError for a blob that is not one: the file may come from anywhere.
    """
    try:
        if not HEAD < len(blob) <= HEAD + FOLLOWERS * entry.size:
            raise ValueError("it has another size")
        total = COUNTS[blob[0]]
        counts = {token: total * SHARES[step] for step, token in entry.iter_unpack(blob[HEAD:])}
        return Followers(total, COUNTS[blob[1]], counts)
    except (struct.error, ValueError) as error:
        raise StorageError(
            "The statistics file holds a damaged entry. Build it again, or remove the file."
        ) from error


class Likeliest(NamedTuple):
    """For display: a one-token key, its likeliest next token, and that one's share."""

    key: int
    token: int
    share: float


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
        vocabulary = int(self.meta["vocabulary"])
        self.bits, self.entry = key_bits(vocabulary), entry_format(vocabulary)
        self.look_up_packed = lru_cache(maxsize=CACHED)(self.read)

    def check(self) -> None:
        """Raise ValueError unless the file has the expected format and columns."""
        version = self.meta.get("format", "none")
        if version != str(FORMAT):
            raise ValueError(f"it has format {version}, this program reads {FORMAT}")
        missing = [name for name in META if name not in self.meta]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        vocabulary = str(self.meta["vocabulary"])
        if not vocabulary.isdecimal() or not 0 < int(vocabulary) <= LARGEST_VOCABULARY:
            raise ValueError("its vocabulary is not a number that can be")
        columns = [row[1:3] for row in self.connection.execute("PRAGMA table_info(grams)")]
        if columns != [("key", "INTEGER"), ("followers", "BLOB")]:
            raise ValueError("its table of n-grams has other columns")

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """What followed `key` (one to three tokens) in the texts; None for an unknown key.

        The answer is shared with whoever asks the same: it must not be changed.
        """
        return self.look_up_packed(pack_key(key, self.bits))

    def read(self, packed: int) -> Followers | None:
        """The uncached look-up. A damaged file costs speed, never an answer: it finds nothing."""
        try:
            row = self.connection.execute(
                "SELECT followers FROM grams WHERE key = ?", (packed,)
            ).fetchone()
            if row is None or not isinstance(row[0], bytes):
                return None
            return unpack(row[0], self.entry)
        except (sqlite3.DatabaseError, StorageError, OverflowError):
            return None

    def top(self, limit: int) -> Iterator[Likeliest]:
        """For display: one-token keys with their likeliest next token, best first.

        A damaged entry is left out.
        """
        first = pack_key((0,), self.bits)
        try:
            rows = self.connection.execute(
                "SELECT key FROM grams WHERE key BETWEEN ? AND ?",
                (first, first + (1 << self.bits) - 1),
            ).fetchall()
        except sqlite3.DatabaseError:
            return
        best = []
        for (packed,) in rows:
            if found := self.read(packed):
                token, count = next(iter(found.counts.items()))
                best.append(Likeliest(packed - first, token, count / found.total))
        yield from sorted(best, key=lambda pair: -pair.share)[:limit]

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
