"""What a program that was killed left behind, cleaned when the next one starts.

Another program may be running with the same data directory. So a file goes only when nobody has it
locked, or when it is too old for anyone to be waiting for it.
"""

import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from storage import deletions
from storage.database import Database

STATISTICS, UPLOADS = "statistics", "uploads"
"""Folders in the data directory: files of the statistics tier, files that a page sent."""
UPLOAD_SECONDS = 3600.0
"""An upload is read and deleted at once; one of this age was never read."""


def clean(database: Database, folder: Path) -> None:
    """Really delete what was deleted; delete answers without a word, builds that broke off,
    uploads that nobody read."""
    deletions.purge(database, seconds=0.0)
    with database.write() as handle:
        # A message is stored with its first words, and with its run when it is complete: one with
        # neither was left by a program that was killed. What follows it follows its parent then.
        empty = "role = 'assistant' AND content = '' AND run IS NULL AND pieces = '[]'"
        handle.execute(
            "UPDATE messages SET parent = (SELECT parent FROM messages AS gone "
            "WHERE gone.id = messages.parent) "
            f"WHERE parent IN (SELECT id FROM messages WHERE {empty})"
        )
        handle.execute(f"DELETE FROM messages WHERE {empty}")
    for path in (folder / STATISTICS).glob("*.partial"):
        if is_dead(path):
            with suppress(OSError):
                path.unlink()
    for path in (folder / UPLOADS).rglob("*"):
        with suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > UPLOAD_SECONDS:
                path.unlink()


def is_dead(path: Path) -> bool:
    """Whether nobody is writing a database: its writer holds the lock until it is complete."""
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        return getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY
    return True
