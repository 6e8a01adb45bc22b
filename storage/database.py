"""One SQLite file, safe to use from any thread: a connection each, and one writer at a time.

A write is one transaction that happens wholly or not at all. What SQLite refuses because of the
disk, the file or another program becomes a `StorageError`; what it refuses because of our own SQL
stays an exception of sqlite3.
"""

import os
import sqlite3
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, Self

import sqlite_utils

from engine.errors import StorageError
from storage import migrations

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
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


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as they lie in every blob: little-endian, four bytes each."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """The token ids of a blob that `pack_tokens` made."""
    return struct.unpack(f"<{len(blob) // 4}I", blob)


class Database:
    """A database file, made if need be and brought up to date; in memory when there is no path.

    `notices` holds what the user should be told about opening it. In memory there is only one
    connection, so reads wait for the writer too.
    """

    BUSY_SECONDS = 5.0
    CHECKED_BYTES = 64 * 2**20
    """Files up to this size are checked in full when opened, at about 2 ms per MiB."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._name = str(path or "The in-memory database")
        self.notices: list[str] = []
        self._lock = threading.RLock()
        self._writing = False
        self._closed = False
        self._made = False
        self._handles: dict[threading.Thread, sqlite_utils.Database] = {}
        self._local: Any = threading.local() if path else SimpleNamespace()
        self._reading: AbstractContextManager[Any] = nullcontext() if path else self._lock
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

        A block inside another joins it and can be undone alone.
        """
        with self._lock, self._explained():
            handle = self._handle()
            if self._writing:
                with handle.atomic():
                    yield handle
                return
            assert not handle.conn.in_transaction, "write() inside read()"
            self._writing = True
            try:
                handle.execute("BEGIN IMMEDIATE")
                yield handle
                handle.execute("COMMIT")
            except BaseException:
                handle.rollback()
                raise
            finally:
                self._writing = False

    @contextmanager
    def read(self) -> Iterator[sqlite_utils.Database]:
        """One snapshot: everything read in the block belongs to the same moment."""
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
        """All rows of one query, by the shortest way: no snapshot, no sugar."""
        with self._reading:
            try:
                return self._handle().conn.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                self._explain(error)

    def key(self, table: Literal["owners", "fingerprints"], name: str) -> int:
        """The number that stands for an owner or a fingerprint, assigned at first sight."""
        query = f"SELECT id FROM {table} WHERE name = ?"
        if not self.execute_read(query, [name]):
            with self.write() as handle:
                handle.execute(f"INSERT OR IGNORE INTO {table} (name) VALUES (?)", [name])
        return int(self.execute_read(query, [name])[0][0])

    def close(self) -> None:
        """Close every thread's connection, once the running write has ended. Final."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _handle(self) -> sqlite_utils.Database:
        """This thread's connection, opened at first use."""
        handle: sqlite_utils.Database | None = getattr(self._local, "handle", None)
        if handle is None or self._closed:
            handle = self._local.handle = self._connect()
        return handle

    def _connect(self) -> sqlite_utils.Database:
        if self._closed:
            raise StorageError(f"{self._name} is closed. Start the program again.")
        # Only the first connection may make the file: should it vanish, an empty one in its place
        # would say that there never were any tables.
        mode = "rw" if self._made else "rwc"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}" if self.path else ":memory:",
            uri=self.path is not None,
            timeout=self.BUSY_SECONDS,
            isolation_level=None,  # transactions begin where we say so
            check_same_thread=False,  # close() runs on a thread of its own
        )
        connection.text_factory = _decoded
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
        # Worker threads come and go; what ended without closing is closed by who comes next.
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
        """Make the directory, put a damaged file aside, switch to write-ahead logging."""
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
        """What is wrong with the file's structure; None when nothing is."""
        small = path.exists() and path.stat().st_size <= self.CHECKED_BYTES
        check = "PRAGMA quick_check(1)" if small else "SELECT 'ok', count(*) FROM sqlite_master"
        try:
            verdict = str(self._handle().execute(check).fetchone()[0])
        except sqlite3.DatabaseError as error:
            if _code(error) not in DAMAGED:
                raise
            verdict = str(error)
        return None if verdict == "ok" else verdict

    def _put_aside(self, path: Path, damage: str) -> None:
        """Rename the file with its log, which may hold its last commits; nothing is deleted."""
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
        except sqlite3.Error as error:
            self._explain(error)

    def _explain(self, error: sqlite3.Error) -> NoReturn:
        """Raise what the user can act on as `StorageError`, anything else as it is."""
        explanation = EXPLANATIONS.get(_code(error))
        if explanation is None:
            raise error
        raise StorageError(explanation.format(path=self._name)) from error


def _decoded(text: bytes) -> str:
    """A text as it was stored; a flipped byte in one must not hide all rows beside it."""
    return text.decode("utf-8", "replace")


def _code(error: sqlite3.Error) -> int:
    """The primary result code; errors of the Python module itself have none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
