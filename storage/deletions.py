"""What was deleted and can come back, until it really goes.

What is deleted changes its owner to one that nobody is. So it is nowhere to be found, whoever
looks: every query names an owner. A deleted message lies, with all below it, in a conversation of
its own. A run goes with its messages, unless a message elsewhere still shows it.
"""

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import sqlite_utils

from engine.errors import StorageError
from storage.database import Database

NOBODY = "(deleted)"
"""The owner of what is deleted. Others are "local", or have a colon in their names."""
SECONDS = 3600.0
"""So long a deletion can be undone."""


class Gone(NamedTuple):
    """A conversation that lost something for good: all of it, or some messages."""

    owner: str
    conversation: str
    token: str


def nobody(db: Database) -> int:
    """The number of the owner that nobody is."""
    return db.key("owners", NOBODY)


def hide(
    handle: sqlite_utils.Database, trash: int, owner: int, id: str, messages: Sequence[str] = ()
) -> str:
    """Delete an owner's conversation, or only some of its messages; the token that undoes it."""
    token, place = secrets.token_urlsafe(12), id
    if messages:
        place = secrets.token_urlsafe(12)
        handle.execute(
            "INSERT INTO conversations (id, owner, title, created, updated) "
            "VALUES (?, ?, '', 0, 0)",
            [place, trash],
        )
        handle.conn.executemany(
            "UPDATE messages SET conversation = ? WHERE id = ?",
            [(place, each) for each in messages],
        )
    else:
        handle.execute("UPDATE conversations SET owner = ? WHERE id = ?", [trash, id])
    handle.execute(
        "UPDATE runs SET conversation = :place, owner = :trash WHERE conversation = :id "
        "AND (:id = :place OR id IN (SELECT run FROM messages WHERE conversation = :place))",
        {"place": place, "trash": trash, "id": id},
    )
    elsewhere = (
        "SELECT conversation FROM messages JOIN conversations ON conversations.id = conversation "
        "WHERE run = runs.id AND owner = :owner"
    )
    handle.execute(
        f"UPDATE runs SET owner = :owner, conversation = ({elsewhere} LIMIT 1) "
        f"WHERE conversation = :place AND EXISTS ({elsewhere})",
        {"place": place, "owner": owner},
    )
    handle.execute(
        "INSERT INTO deletions (token, owner, conversation, place, created) VALUES (?, ?, ?, ?, ?)",
        [token, owner, id, place, time.time()],
    )
    return token


def find(db: Database, owner: int, token: str) -> tuple[str, str]:
    """The conversation that a deletion took from, and where it lies; `StorageError` where that
    cannot be undone, or was another owner's."""
    query = "SELECT conversation, place FROM deletions WHERE token = ? AND owner = ?"
    rows = db.execute_read(query, [token, owner])
    if not rows:
        raise StorageError(
            f"The deletion {token[:40]!r} cannot be undone any more. That works for an hour, and "
            "until the program is closed."
        )
    return str(rows[0][0]), str(rows[0][1])


def restore(handle: sqlite_utils.Database, trash: int, owner: int, id: str, place: str) -> None:
    """Bring a conversation back from where it lies, or messages into their conversation."""
    handle.execute(
        "UPDATE runs SET owner = :owner, conversation = :id WHERE owner = :trash "
        "AND (conversation = :place OR id IN "
        "(SELECT run FROM messages WHERE conversation = :place))",
        {"owner": owner, "id": id, "place": place, "trash": trash},
    )
    if id == place:
        handle.execute("UPDATE conversations SET owner = ? WHERE id = ?", [owner, id])
        handle.execute("DELETE FROM deletions WHERE place = ?", [place])
    else:
        handle.execute("UPDATE messages SET conversation = ? WHERE conversation = ?", [id, place])
        handle.execute("DELETE FROM conversations WHERE id = ?", [place])


def oldest(db: Database) -> float | None:
    """When the oldest deletion was made that can be undone."""
    (found,) = db.execute_read("SELECT min(created) FROM deletions")[0]
    return None if found is None else float(found)


def purge(db: Database, seconds: float) -> list[Gone]:
    """Really delete what was deleted so many seconds ago; which conversations it was of.

    The token log of a conversation that lost messages goes as well, as it holds their text. It is
    begun anew with the next answer.
    """
    due = {"before": time.time() - seconds}
    query = (
        "SELECT owners.name, conversation, token FROM deletions "
        "JOIN owners ON owners.id = owner WHERE created <= :before"
    )
    found = [Gone(*map(str, row)) for row in db.execute_read(query, due)]
    if found:
        with db.write() as handle:
            handle.execute(
                "DELETE FROM contexts WHERE conversation IN "
                "(SELECT conversation FROM deletions WHERE created <= :before)",
                due,
            )
            handle.execute(
                "DELETE FROM conversations WHERE id IN "
                "(SELECT place FROM deletions WHERE created <= :before)",
                due,
            )
    return found
