"""The statistics tier's file: which tokens followed a key of one to three tokens, and how often.

One SQLite file per tokenizer, made in one piece (storage/statistics_build.py) and never changed
afterwards. A key is packed into the integer primary key, the frequent next tokens into one blob, so
a look-up is one descent of one B-tree. The invariant: all suffixes of a stored key are stored, so a
look-up with ever longer keys may stop at the first unknown one.

A file may come from anywhere. It is used only if it holds the two tables and nothing else, because
a view, trigger or virtual table would run its author's code. An entry that no builder writes is
treated like a missing one. A poisoned file can therefore make drafts useless, but never hang, crash
or change an answer.

With the compiled core (engine/native.py) drafting uses a copy in native memory instead, which is
loaded in the background. Until that is done, or if the file is too large or damaged, look-ups read
the file.
"""

import sqlite3
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from engine import native
from engine.errors import StorageError
from engine.types import Followers

FORMAT = 2
KEY_SIZE = 3
LARGEST_VOCABULARY = (1 << 20) - 1
"""A packed key of three tokens and its length must fit a signed 64-bit integer."""
FOLLOWERS = 16
"""The most next tokens that are kept for a key."""
FREQUENT = 1024
"""The most tokens that are returned as frequent."""
META = ("format", "tokenizer", "vocabulary", "tokens", "documents", "keys", "entries", "title")
SCHEMA = """\
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE grams (key INTEGER PRIMARY KEY, followers BLOB NOT NULL);
"""
SUFFIX = ".statistics.db"
OBJECTS: set[tuple[str, str, str | None]] = {
    *(("table", line.split()[2], line) for line in SCHEMA.replace(";", "").splitlines()),
    ("index", "sqlite_autoindex_meta_1", None),
}
"""All that a file of this format holds, as SQLite describes it."""
OPEN_SECONDS = 5.0
LONGEST = 10_000
"""The most bytes of a value in the file; SQLite refuses to read a longer one."""
LARGEST_NUMBER = 1 << 48
ROUNDED = 1.05
"""The tolerance of the value that a byte stands for."""
CACHED = 1 << 16
"""Decoded keys that are kept in memory."""
CACHED_BYTES = 700
"""Approximate bytes of a cached look-up; a known key takes 900, an unknown one 100 (measured)."""

EXACT = 12
COUNTS = tuple(float(n) if n <= EXACT else EXACT * 2 ** ((n - EXACT) / 8) for n in range(1, 257))
"""The counts that a byte can stand for: exact up to 12, then in eighths of a power of two."""
SHARES = tuple(2.0 ** (-step / 16) for step in range(256))
"""The shares that a byte can stand for: 1 down to 2**-15.9, each 4 % below the one before."""
HEAD = 2
NARROW, WIDE = struct.Struct("<BH"), struct.Struct("<BI")
"""An entry: its share and its token, which takes four bytes where two are not enough."""

IN_MEMORY = 96 << 20
"""The most bytes of a copy in native memory, some three million keys. For a larger table only a
filter of its keys is kept there."""
READ_SECONDS = 60.0
STEPS = 100_000
"""SQLite instructions between two checks of the clock."""
BATCH = """\
SELECT max(key), group_concat(key || ' ' || hex(followers), ',') FROM
(SELECT key, followers FROM grams WHERE key > ? AND typeof(followers) = 'blob'
AND length(followers) <= ? ORDER BY key LIMIT 16384)"""
"""The next entries in one text, which SQLite builds without the interpreter's lock."""
LONGEST_BATCH = 8 << 20
LONGEST_ENTRY = HEAD + FOLLOWERS * WIDE.size
SMALLEST_ENTRY = 8
"""The fewest bytes of an entry in the file, which limits how many keys the file can hold."""


def key_bits(vocabulary: int) -> int:
    """The bits of a token in a packed key: enough for every token and one number more."""
    return vocabulary.bit_length()


def entry_format(vocabulary: int) -> struct.Struct:
    return WIDE if vocabulary > 1 << 16 else NARROW


def pack_key(key: Sequence[int], bits: int) -> int:
    """A key of one to three tokens of `bits` bits as one integer, which also encodes the length."""
    packed = len(key)
    for token in key:
        packed = packed << bits | token
    return packed


def unpack(blob: bytes, entry: struct.Struct) -> Followers:
    """The tokens that followed the key of a blob, the likeliest first.

    Raises StorageError for an invalid blob: the file may come from anywhere.
    """
    try:
        if not HEAD < len(blob) <= HEAD + FOLLOWERS * entry.size:
            raise ValueError("it has another size")
        total = COUNTS[blob[0]]
        shares = {token: SHARES[step] for step, token in entry.iter_unpack(blob[HEAD:])}
        if sum(shares.values()) > ROUNDED or list(shares.values()) != sorted(shares.values())[::-1]:
            raise ValueError("its shares are not those of one key, the likeliest first")
        distinct = COUNTS[blob[1]]
        if not len(shares) <= distinct * ROUNDED or not distinct <= total * ROUNDED**2:
            raise ValueError("it has another number of tokens than it says")
        return Followers(total, distinct, {t: total * share for t, share in shares.items()})
    except (struct.error, ValueError) as error:
        raise StorageError(
            "The statistics file holds a damaged entry. Build it again, or remove the file."
        ) from error


class Likeliest(NamedTuple):
    """For display: a one-token key, its likeliest next token, and the share of that token."""

    key: int
    token: int
    share: float


class StatisticsTable:
    """An open statistics file. Look-ups are cached; any thread may ask."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.connection = connected(path, LONGEST)
            try:
                late = time.monotonic() + OPEN_SECONDS
                self.connection.set_progress_handler(lambda: time.monotonic() > late, 10_000)
                self.meta = self.read_meta()
                self.check()
                self.connection.set_progress_handler(None, 0)
            except BaseException:
                self.connection.close()
                raise
        except (sqlite3.Error, ValueError) as error:
            raise StorageError(
                f"The statistics file {str(path)!r} cannot be used: {error}. Build it again, or "
                "remove it; drafting continues without it."
            ) from error
        vocabulary = int(self.meta["vocabulary"])
        self.bits, self.entry = key_bits(vocabulary), entry_format(vocabulary)
        self.vocabulary, self.tokens = vocabulary, int(self.meta["tokens"])
        self.look_up_packed = lru_cache(maxsize=CACHED)(self.read)
        self.memory: Any = None
        self.reader: Thread | None = None
        self.closed = Event()

    def read_meta(self) -> dict[str, str]:
        query = "SELECT type, name, sql FROM sqlite_master LIMIT ?"
        self.objects = set(self.connection.execute(query, (len(OBJECTS) + 1,)))
        kinds = sorted({str(kind) for kind, _, _ in self.objects} - {"table", "index"})
        if kinds:
            raise ValueError(f"it holds a {kinds[0]}, and only tables may be in it")
        if not {found for found in OBJECTS if found[1] == "meta"} <= self.objects:
            raise ValueError("it has no table of meta data, or another one")
        names = ", ".join("?" * len(META))
        rows = self.connection.execute(
            f"SELECT name, value FROM meta WHERE name IN ({names})", META
        )
        return {name: str(value) for name, value in rows}

    def check(self) -> None:
        """Raise ValueError unless the file has the expected format, tables and numbers."""
        version = self.meta.get("format", "none")
        if version != str(FORMAT):
            raise ValueError(f"it has format {version}, this program reads {FORMAT}")
        missing = [name for name in META if name not in self.meta]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        limits = {"vocabulary": LARGEST_VOCABULARY}
        for name in ("vocabulary", "tokens", "documents", "keys", "entries"):
            value = self.meta[name]
            most = limits.get(name, LARGEST_NUMBER)
            if not value.isdecimal() or len(value) > len(str(most)) or int(value) > most:
                raise ValueError(f"its number of {name} is {value[:30]!r}, which cannot be")
        if not int(self.meta["vocabulary"]):
            raise ValueError("its vocabulary is empty")
        if self.objects != OBJECTS:
            raise ValueError("it has other tables, or tables with other columns")

    def check_all(self, seconds: float) -> None:
        """Raise StorageError unless SQLite can read the whole file within `seconds`. The entries
        are checked when they are used."""
        late = time.monotonic() + seconds
        self.connection.set_progress_handler(lambda: time.monotonic() > late, STEPS)
        try:
            (verdict,) = self.connection.execute("PRAGMA quick_check(1)").fetchone()
            (keys,) = self.connection.execute("SELECT count(followers) FROM grams").fetchone()
            if verdict != "ok" or keys != int(self.meta["keys"]):
                counts = f"it has {keys:,} keys, and should have {self.meta['keys']}"
                raise ValueError(str(verdict) if verdict != "ok" else counts)
        except (sqlite3.Error, ValueError) as error:
            raise StorageError(
                f"The statistics file {str(self.path)!r} is damaged: {error}. Build it again."
            ) from error
        finally:
            self.connection.set_progress_handler(None, 0)

    def look_up(self, key: Sequence[int]) -> Followers | None:
        """The tokens that followed `key` (one to three tokens) in the texts; None for an unknown
        key.

        Callers must not change the result: equal look-ups share it.
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
            found = unpack(row[0], self.entry)
            if max(found.counts) >= self.vocabulary or found.total > self.tokens * ROUNDED:
                return None
            return found
        except (sqlite3.DatabaseError, StorageError, OverflowError):
            return None

    @cached_property
    def frequent(self) -> Followers | None:
        """The most frequent tokens of the texts; None if the file cannot be read.

        For a one-token key, one byte says how often it was seen; here it is enough that it exists.
        """
        first = pack_key((0,), self.bits)
        try:
            rows = self.connection.execute(
                "SELECT key - ?, substr(followers, 1, 1) FROM grams WHERE key BETWEEN ? AND ?",
                (first, first, first + self.vocabulary - 1),
            ).fetchall()
        except sqlite3.DatabaseError:
            return None
        heads = {token: head for token, head in rows if isinstance(head, bytes) and head}
        counts = {token: COUNTS[head[0]] for token, head in heads.items()}
        kept = sorted(counts, key=lambda token: (-counts[token], token))[:FREQUENT]
        if not kept:
            return None
        return Followers(sum(counts.values()), len(counts), {t: counts[t] for t in kept})

    def unigrams(self) -> Followers | None:
        return self.frequent

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

    def in_memory(self, wait: float = 0.0) -> Any:
        """The copy in native memory, which is loaded in the background from the first call on; None
        without the compiled core. Waits so many seconds for it."""
        if self.memory is None and native.core is not None:
            self.memory = native.core.Table(
                counts=COUNTS,
                shares=SHARES,
                rounded=ROUNDED,
                tokens=self.tokens,
                vocabulary=self.vocabulary,
                bits=self.bits,
                widest=FOLLOWERS,
                wide=self.entry is WIDE,
                limit=IN_MEMORY,
                expected=min(int(self.meta["keys"]), self.size_bytes // SMALLEST_ENTRY),
            )
            # The reader must not keep the table alive: collecting the table stops the reader.
            weakref.finalize(self, self.closed.set)
            self.reader = Thread(target=read_all, args=(self.path, self.memory, self.closed))
            self.reader.start()
        if self.reader is not None and wait:
            self.reader.join(wait)
        return self.memory

    def forget_look_ups(self) -> None:
        """Make the next look-ups read the file, as the first ones did. The copy in native memory
        has no cache, so each of its look-ups is like the first one."""
        self.look_up_packed.cache_clear()

    @property
    def cached_bytes(self) -> int:
        copied = self.memory.bytes if self.memory is not None else 0
        return self.look_up_packed.cache_info().currsize * CACHED_BYTES + int(copied)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def close(self) -> None:
        self.closed.set()
        self.connection.close()


def read_all(path: Path, memory: Any, closed: Event) -> None:
    """Load the whole file into native memory, which then answers look-ups; if the file cannot be
    read to its end, the copy stays unused."""
    late = time.monotonic() + READ_SECONDS
    last = 0
    try:
        with closing(connected(path, LONGEST_BATCH)) as connection:
            connection.set_progress_handler(
                lambda: closed.is_set() or time.monotonic() > late, STEPS
            )
            while not closed.is_set():
                key, text = connection.execute(BATCH, (last, LONGEST_ENTRY)).fetchone()
                if key is None:
                    memory.seal()
                    return
                if key <= last:
                    return
                memory.read(text)
                last = key
    except (sqlite3.Error, UnicodeError):
        return


def connected(path: Path, longest: int) -> sqlite3.Connection:
    """A connection that reads the file and trusts nothing in it; no value may be longer."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
    except BaseException:
        connection.close()
        raise
    return connection


def find_table(
    tokenizer_fingerprint: str, *folders: Path, report: Callable[[str], None] = lambda problem: None
) -> StatisticsTable | None:
    """The statistics for a tokenizer, from the first folder that has a usable file of that name.

    An unusable file is skipped, and `report` is called with the reason.
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


def open_table(
    folders: Sequence[Path], tokenizer_fingerprint: str, report: Callable[[str], None]
) -> StatisticsTable | None:
    """Like `find_table`, but the table is closed once nothing refers to it, because a tab may still
    read it after its model was unloaded."""
    table = find_table(tokenizer_fingerprint, *folders, report=report)
    if table is not None:
        weakref.finalize(table, table.connection.close)
    return table
