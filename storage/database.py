"""One SQLite file, safe to use from any thread, with one connection per thread and one writer at a
time. Also converts the texts, JSON values and tokens of its columns.

A write is one transaction that happens completely or not at all. Errors that come from the disk,
the file or another program become a `StorageError`; errors in our own SQL stay exceptions of
sqlite3.
"""

import json
import logging
import os
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, Self, TypeVar

import sqlite_utils

from engine.errors import StorageError
from engine.text import folded, read_json, well_formed
from storage import migrations

SURROUNDINGS = (
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_AUTH,
)
"""The error codes that can occur while a sound file is opened; any other error is a fault of the
file."""
FORMATS, FORMAT_BYTES = (1, 2), slice(18, 20)
"""The format versions for writing and reading that a file may state, and their offsets in its
header. SQLite treats a file with other versions as a read-only one of a later version."""
EXPLANATIONS = {
    sqlite3.SQLITE_FULL: "The disk is full: {path} cannot grow. Free some space and try again.",
    sqlite3.SQLITE_BUSY: "{path} is locked by another program. Close that program and try again.",
    sqlite3.SQLITE_LOCKED: "{path} is locked by another task. Wait a moment and try again.",
    sqlite3.SQLITE_READONLY: "{path} is read-only. Allow writing to it, or choose another "
    "data directory.",
    sqlite3.SQLITE_CANTOPEN: "{path} cannot be opened. Choose a data directory you can write to.",
    sqlite3.SQLITE_IOERR: "{path} cannot be read or written. Check the disk it is on.",
    sqlite3.SQLITE_CORRUPT: "{path} is damaged. Close the program, move that file away and start "
    "again.",
    sqlite3.SQLITE_NOTADB: "{path} is not a database. Close the program, move that file away and "
    "start again.",
}
MOST_WAITING = 1000
"""The most writes that may wait; further ones are not stored."""
PAUSE = 0.5
"""Seconds between two attempts to store the waiting writes."""
DROPPED = "Too many writes are waiting, so what was learned from the last answer is forgotten."
STORED = "The database is not locked any more. Everything that waited is stored."
Write = Callable[[], object]
T = TypeVar("T")
log = logging.getLogger(__name__)


class LockedError(StorageError):
    """Another program is writing to the file, and has not finished within the time limit."""


def path_bytes(path: str) -> bytes:
    """A path or a model's source as it is stored: paths need not be text."""
    return path.encode("utf-8", "surrogateescape")


def path_text(stored: bytes) -> str:
    return stored.decode("utf-8", "surrogateescape")


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as stored in every blob: little-endian, four bytes each."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}I", blob)


# columns whose content may be damaged: reading never raises


def to_json(value: object) -> str:
    return str(well_formed(json.dumps(value, ensure_ascii=False, separators=(",", ":"))))


def from_json(text: object) -> Any:
    """The value of a stored JSON text; None if the text is damaged."""
    if not isinstance(text, str):
        return None
    try:
        return read_json(text)
    except (RecursionError, ValueError):
        return None


def as_text(value: object) -> str:
    """A text column's value, whatever type the column holds."""
    return value if isinstance(value, str) else repr(value)


def as_seconds(value: object) -> float:
    """A time column's value; 0 if it is not a number."""
    return float(value) if isinstance(value, int | float) else 0.0


def _holds(text: bytes | None, words: str) -> bool:
    """Whether the bytes of a text hold folded words. SQLite cannot pass on a text whose bytes are
    damaged."""
    return words in folded((text or b"").decode("utf-8", "replace"))


class Turn:
    """The turn of one process of this program to write: it holds the empty database `path` locked.
    The system releases the lock when a process ends, however it ends.

    Entering never waits, and returns whether it is this process's turn. If the file cannot be made,
    nothing can be written to its folder either, and every process has its turn.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None

    def __enter__(self) -> bool:
        try:
            if self.connection is None:
                self.connection = sqlite3.connect(
                    self.path, timeout=0, isolation_level=None, check_same_thread=False
                )
            self.connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            return _code(error) != sqlite3.SQLITE_BUSY
        return True

    def __exit__(self, *_: object) -> None:
        if self.connection is not None:
            self.connection.rollback()

    def close(self) -> None:
        """Close the file. Nobody in this process may have its turn."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Database:
    """A database file, created if necessary and brought up to date; in memory if there is no path.

    With `made`, another process of this program has prepared the file, which is only opened.
    Processes of this program take turns in writing, so a file that is locked during this process's
    turn is locked by another program. `notices` holds messages for the user about opening the file.
    In memory there is only one connection, so reads also wait for the writer.
    """

    BUSY_SECONDS, BUSY_LOOK = 5.0, 0.02
    """Seconds to wait for another program that is writing, and between two attempts."""
    TURN_SECONDS = 60.0
    """Seconds to wait for another process of this program. It may import a large file, but it may
    also have been suspended."""
    CHECKED_BYTES = 64 * 2**20
    """Files up to this size are checked in full when opened, at about 7 ms per MiB."""

    def __init__(self, path: Path | None = None, made: bool = False) -> None:
        self.path = path
        self._name = str(path or "The in-memory database")
        self.notices: list[str] = []
        self._lock = threading.RLock()
        self._writing = False
        self._closed = False
        self._made = made
        self._turn = Turn(Path(f"{path}-turn")) if path else None
        self._handles: dict[threading.Thread, sqlite_utils.Database] = {}
        self._local: Any = threading.local() if path else SimpleNamespace()
        self._reading: AbstractContextManager[Any] = nullcontext() if path else self._lock
        if made:
            return
        try:
            if path is not None:
                self._prepare(path)
            with self.write() as handle:
                migrations.apply(handle, self._name)
            self._made = True
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def write(self) -> Iterator[sqlite_utils.Database]:
        """One transaction: committed at the end of the block, undone if the block raises.

        A block inside another joins it and can be undone alone. Raises `LockedError` where another
        program writes for longer than BUSY_SECONDS.
        """
        with self._explained(), ExitStack() as held:
            held.enter_context(self._lock)
            handle = self._handle()
            if self._writing:
                with handle.atomic():
                    yield handle
                return
            assert not handle.conn.in_transaction, "write() inside read()"
            handle = self._begin(held)
            self._writing = True
            try:
                yield handle
                handle.execute("COMMIT")
            except BaseException:
                handle.rollback()
                raise
            finally:
                self._writing = False

    def _begin(self, held: ExitStack) -> sqlite_utils.Database:
        """Begin a write transaction. While it waits for another process, it does not hold the lock
        that other threads need."""
        start = monotonic()
        while True:
            waited, handle = monotonic() - start, self._handle()
            with ExitStack() as turn:
                if self._turn is None or turn.enter_context(self._turn):
                    handle.execute("PRAGMA busy_timeout = 0")
                    try:
                        handle.execute("BEGIN IMMEDIATE")
                        held.push(turn.pop_all())
                        return handle
                    except sqlite3.OperationalError as error:
                        hurried = self._hurried or waited >= self.BUSY_SECONDS
                        if _code(error) != sqlite3.SQLITE_BUSY or hurried:
                            raise
                    finally:
                        handle.execute(f"PRAGMA busy_timeout = {int(1000 * self.BUSY_SECONDS)}")
                elif waited >= self.TURN_SECONDS:
                    raise LockedError(EXPLANATIONS[sqlite3.SQLITE_BUSY].format(path=self._name))
            held.close()
            sleep(self.BUSY_LOOK)
            held.enter_context(self._lock)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block this thread does not wait for other programs: `write` raises
        `LockedError` at once. It still waits for the turn of another process of this program."""
        before, self._local.hurried = self._hurried, True
        try:
            yield
        finally:
            self._local.hurried = before

    @property
    def _hurried(self) -> bool:
        return bool(getattr(self._local, "hurried", False))

    @contextmanager
    def read(self) -> Iterator[sqlite_utils.Database]:
        """One snapshot: all reads in the block see the same state of the database."""
        with self._reading, self._explained():
            handle = self._handle()
            if handle.conn.in_transaction:
                yield handle
                return
            handle.execute("BEGIN")
            try:
                yield handle
            finally:
                handle.rollback()

    def execute_read(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """All rows of one query, without the overhead of a snapshot or of sqlite_utils."""
        with self._reading:
            try:
                return self._handle().conn.execute(sql, parameters).fetchall()
            except (sqlite3.Error, UnicodeDecodeError) as error:
                self._explain(error)

    def execute_write(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> int:
        """Run one statement as a transaction, or as part of the open one. Returns the number of
        changed rows."""
        with self.write() as handle:
            return handle.execute(sql, parameters).rowcount

    def key(self, table: Literal["owners", "fingerprints"], name: str) -> int:
        """The id of an owner or a fingerprint, assigned when it is first used."""
        number = self.find(table, name)
        if number is None:
            self.execute_write(f"INSERT OR IGNORE INTO {table} (name) VALUES (?)", [name])
            number = self.find(table, name)
        if number is None:
            raise self.damaged()
        return number

    def find(self, table: Literal["owners", "fingerprints"], name: str) -> int | None:
        found = self.execute_read(f"SELECT id FROM {table} WHERE name = ?", [name])
        return int(found[0][0]) if found else None

    def wipes(self, owner: str) -> int:
        found = self.execute_read("SELECT wipes FROM owners WHERE name = ?", [owner])
        return found[0][0] if found and isinstance(found[0][0], int) else 0

    def damaged(self) -> StorageError:
        """The error for an inconsistent file, for damage that SQLite does not notice itself."""
        return StorageError(EXPLANATIONS[sqlite3.SQLITE_CORRUPT].format(path=self._name))

    def close(self) -> None:
        """Close every thread's connection for good, once the running write has ended."""
        with self._lock:
            self._closed = True
            self._disconnect()
            if self._turn is not None:
                self._turn.close()

    def _handle(self) -> sqlite_utils.Database:
        handle: sqlite_utils.Database | None = getattr(self._local, "handle", None)
        if handle is None or self._closed:
            handle = self._local.handle = self._connect()
        return handle

    def _connect(self) -> sqlite_utils.Database:
        if self._closed:
            raise StorageError(f"{self._name} is closed. Start the program again.")
        # Only the first connection may make the file. If the file vanished later, a new empty one
        # would hide the loss.
        mode = "rw" if self._made else "rwc"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}" if self.path else ":memory:",
            uri=self.path is not None,
            timeout=self.BUSY_SECONDS,
            isolation_level=None,  # we begin transactions explicitly
            check_same_thread=False,  # close() runs on a thread of its own
        )
        connection.text_factory = _decoded
        connection.create_function("holds", 2, _holds, deterministic=True)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = NORMAL")  # reads the file, so it may fail
            if self._made and not connection.execute("PRAGMA schema_version").fetchone()[0]:
                raise StorageError(
                    f"{self._name} was replaced by an empty file while the program ran. Close the "
                    "program, put the file back if you have it, and start again."
                )
        except BaseException:
            connection.close()
            raise
        handle = sqlite_utils.Database(connection, execute_plugins=False)
        # Threads end without closing their connections, so each new connection closes those.
        for thread in [thread for thread in self._handles.copy() if not thread.is_alive()]:
            if dead := self._handles.pop(thread, None):
                dead.close()
        self._handles[threading.current_thread()] = handle
        return handle

    def _disconnect(self) -> None:
        for handle in list(self._handles.values()):
            handle.close()
        self._handles.clear()
        self._local.__dict__.clear()

    def _prepare(self, path: Path) -> None:
        """Create the directory, rename a damaged file, and switch to write-ahead logging."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_directory = path.is_dir()
        except OSError as error:
            raise StorageError(
                f"The data directory {path.parent} cannot be used ({error.strerror}). "
                "Choose one you can write to."
            ) from error
        if is_directory:
            raise StorageError(f"{path} is a directory, not a database. Name a file in it.")
        with self._explained():
            if damage := self._damage(path):
                self._put_aside(path, damage)
            self._handle().execute("PRAGMA journal_mode = WAL")

    def _damage(self, path: Path) -> str | None:
        """What is wrong with the file, or None.

        A single wrong byte may make two pages disagree, or change words of the schema. Without this
        check, such damage might only be noticed when an answer is stored.
        """
        small = path.exists() and path.stat().st_size <= self.CHECKED_BYTES
        check = "PRAGMA integrity_check(1)" if small else "SELECT 'ok', count(*) FROM sqlite_master"
        try:
            handle = self._handle()
            verdict = str(handle.execute(check).fetchone()[0])
            if verdict == "ok":
                verdict = _unknown_format(path) or migrations.damage(handle) or "ok"
        except UnicodeDecodeError:  # SQLite quotes the damaged schema in its error
            verdict = "words of its schema are not readable"
        except sqlite3.DatabaseError as error:
            if _code(error) in SURROUNDINGS:
                raise
            verdict = str(error)
        return None if verdict == "ok" else verdict

    def _put_aside(self, path: Path, damage: str) -> None:
        self._disconnect()
        aside = f"{path}.corrupt-{datetime.now():%Y%m%d-%H%M%S-%f}"
        try:
            for suffix in ("", "-wal", "-shm"):
                if os.path.exists(f"{path}{suffix}"):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        except OSError as error:
            raise StorageError(
                f"{path} is damaged ({damage}) and cannot be moved away ({error.strerror}). "
                "Move it yourself and start again."
            ) from error
        self.notices.append(
            f"The database {path} was damaged ({damage}). It was kept as {aside}, and a new, "
            "empty one was made. If you have a backup, close the program and put it in its place."
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._explain(error)

    def _explain(self, error: sqlite3.Error | UnicodeDecodeError) -> NoReturn:
        """Raise errors that the user can act on as `StorageError`, and others unchanged."""
        if isinstance(error, UnicodeDecodeError):
            # Wrong bytes of stored texts are replaced, so the text that cannot be decoded is
            # SQLite's own error, which quotes a schema with a wrong byte.
            raise self.damaged() from error
        explanation = EXPLANATIONS.get(_code(error))
        if explanation is None:
            raise error
        kind = LockedError if _code(error) == sqlite3.SQLITE_BUSY else StorageError
        raise kind(explanation.format(path=self._name)) from error


class Writes:
    """A queue of writes that nobody waits for. Each is done at once, or as soon as another program
    unlocks the database.

    A backup or a second program may lock the database for any length of time. Answers end as usual
    in the meantime; their texts and what drafting learned from them wait here, in order. Problems
    are passed to `report(owner, notice)`.
    """

    def __init__(self, database: Database, report: Callable[[str, str], None]) -> None:
        self.database, self.report = database, report
        self.waiting: deque[tuple[str, Write]] = deque()
        self.lock = threading.Lock()
        self.idle = threading.Event()
        """Set while no write waits and the owners of earlier ones have been notified."""
        self.idle.set()

    @property
    def locked(self) -> str:
        """Why writes wait, and what to do about it; "" if none waits. The server's health report
        shows this text to everybody, so it contains no path."""
        if not self.waiting:
            return ""
        name = self.database.path.name if self.database.path else "in memory"
        return (
            f"The database {name} is locked by another program. Answers continue. They, and "
            "what was learned from them, are stored once it is unlocked. Close that program before "
            "you close Strata, or they are lost."
        )

    def do(self, owner: str, write: Write) -> None:
        """Write at once, or later if the database is locked. Other errors become a notice.

        A later write runs on another thread, and perhaps several times until it succeeds, so it
        has to be one transaction.
        """
        if not self.queue(owner, write, first=False):
            try:
                with self.database.at_once():
                    write()
            except LockedError:
                self.queue(owner, write, first=True)
            except StorageError as error:
                self.report(owner, str(error))

    def tried(self, owner: str, work: Callable[[], T]) -> T | None:
        """The result of `work`, without waiting for a lock; None if it fails. A failure becomes a
        notice, except for a lock, where the caller decides what to do later."""
        try:
            with self.database.at_once():
                return work()
        except LockedError:
            return None
        except StorageError as error:
            self.report(owner, str(error))
            return None

    def queue(self, owner: str, write: Write, first: bool) -> bool:
        """Add a write to the queue. Returns False for an empty queue, unless the write may be its
        `first`."""
        with self.lock:
            if not self.waiting and not first:
                return False
            full = len(self.waiting) >= MOST_WAITING
            if not full:
                self.waiting.append((owner, write))
            notice = DROPPED if full else self.locked
            if self.idle.is_set():
                threading.Thread(target=self.write_waiting, name="writes", daemon=True).start()
                self.idle.clear()
        self.report(owner, notice)
        return True

    def write_waiting(self) -> None:
        while True:
            for owner in self.store_waiting():
                self.tell(owner, STORED)
            with self.lock:
                if not self.waiting:
                    self.idle.set()
                    return

    def store_waiting(self) -> set[str]:
        """Store the waiting writes in order, as soon as the database is unlocked. Returns their
        owners."""
        owners = set[str]()
        while self.waiting:
            owner, write = self.waiting[0]
            try:
                with self.database.at_once():
                    write()
            except LockedError:
                threading.Event().wait(PAUSE)
                continue
            except StorageError as error:
                self.tell(owner, str(error))
            except Exception:
                log.exception("A waiting write could not be stored.")
            owners.add(owner)
            with self.lock:
                self.waiting.popleft()
        return owners

    def tell(self, owner: str, notice: str) -> None:
        """Report a notice. A report that fails does not end the thread that stores."""
        try:
            self.report(owner, notice)
        except Exception:
            log.exception("A notice about stored writes could not be delivered.")


def _unknown_format(path: Path) -> str:
    """What is wrong with the format versions of a file; "" if nothing is."""
    with path.open("rb") as file:
        versions = file.read(FORMAT_BYTES.stop)[FORMAT_BYTES]
    unknown = [number for number in versions if number not in FORMATS]
    return f"its header names the unknown format {unknown[0]}" if unknown else ""


def _decoded(text: bytes) -> str:
    """A stored text, with wrong bytes replaced: a flipped byte must not hide all other rows."""
    return text.decode("utf-8", "replace")


def _code(error: sqlite3.Error) -> int:
    """The primary result code; errors of the Python module itself have none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
