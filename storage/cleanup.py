"""Cleans up at the start what a killed program left behind.

Another program may be running with the same data directory. A file is therefore deleted only if
nobody has it locked, or if it is too old for anyone to be waiting for it.
"""

import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from storage import deletions
from storage.database import Database
from storage.drafting import BENCHMARK, wipe

STATISTICS, UPLOADS = "statistics", "uploads"
"""Folders in the data directory: files of the statistics tier, files that a page sent."""
UPLOAD_SECONDS = 3600.0
"""Uploads are read and deleted at once, so an upload of this age was never read."""


def clean(database: Database, folder: Path) -> None:
    """Delete for good: deleted rows, empty answers, the past that a benchmark ran with, interrupted
    builds, and uploads that nobody read."""
    deletions.purge(database, seconds=0.0)
    with database.write() as handle:
        # An answer gets its text as it grows and its run when it is complete. An answer with
        # neither was left by a killed program; messages below it move to its parent.
        empty = "role = 'assistant' AND content = '' AND run IS NULL AND pieces = '[]'"
        handle.execute(
            "UPDATE messages SET parent = (SELECT parent FROM messages AS gone "
            "WHERE gone.id = messages.parent) "
            f"WHERE parent IN (SELECT id FROM messages WHERE {empty})"
        )
        handle.execute(f"DELETE FROM messages WHERE {empty}")
        if database.find("owners", BENCHMARK) is not None:
            wipe(database, BENCHMARK)
    for path in (folder / STATISTICS).glob("*.partial"):
        if is_dead(path):
            with suppress(OSError):
                path.unlink()
    for path in (folder / UPLOADS).rglob("*"):
        with suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > UPLOAD_SECONDS:
                path.unlink()


def is_dead(path: Path) -> bool:
    """Whether no process is writing a statistics file: its writer holds the lock until it is
    complete."""
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY
    return True
