"""Deletions that can be undone until they become permanent.

Deleted rows belong to a reserved owner. Every query names an owner, so no query of anybody else
finds them. A deleted message is moved, with everything below it, to a separate conversation. A run
is deleted with its messages, unless a message elsewhere still shows it.
"""

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import StorageError
from storage.database import Database

NOBODY = "(deleted)"
"""The name of the reserved owner of deleted rows. Other owners are "local", or have a colon in
their names."""
SECONDS = 3600.0
"""Seconds during which a deletion can be undone."""


class Gone(NamedTuple):
    """A conversation from which something was permanently deleted: all of it, or some messages."""

    owner: str
    conversation: str
    token: str


def hide(db: Database, owner: int, id: str, messages: Sequence[str] = ()) -> str:
    """Delete an owner's conversation, or only some of its messages. Returns the token for
    `restore`."""
    token, place = secrets.token_urlsafe(12), id
    trash = db.key("owners", NOBODY)
    with db.write() as handle:
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
            "SELECT conversation FROM messages JOIN conversations "
            "ON conversations.id = conversation WHERE run = runs.id AND owner = :owner"
        )
        handle.execute(
            f"UPDATE runs SET owner = :owner, conversation = ({elsewhere} LIMIT 1) "
            f"WHERE conversation = :place AND EXISTS ({elsewhere})",
            {"place": place, "owner": owner},
        )
        handle.execute(
            "INSERT INTO deletions (token, owner, conversation, place, created) "
            "VALUES (?, ?, ?, ?, ?)",
            [token, owner, id, place, time.time()],
        )
    return token


def restore(db: Database, owner: int, token: str) -> str:
    """Undo a deletion; returns the id of its conversation. Raises `StorageError` if it cannot be
    undone, was another owner's, or if the parent of its messages is deleted as well."""
    query = "SELECT conversation, place FROM deletions WHERE token = ? AND owner = ?"
    rows = db.execute_read(query, [token, owner])
    if not rows:
        raise StorageError(
            f"The deletion {token[:40]!r} cannot be undone any more. That works for an hour, and "
            "until the program is closed."
        )
    id, place = map(str, rows[0])
    orphans = (
        "SELECT 1 FROM messages AS top JOIN messages AS up ON up.id = top.parent "
        "WHERE top.conversation = ? AND up.conversation NOT IN (?, ?)"
    )
    if id != place and db.execute_read(orphans, [place, place, id]):
        raise StorageError("The message before it is deleted as well. Restore that one first.")
    trash = db.key("owners", NOBODY)
    with db.write() as handle:
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
            query = "UPDATE messages SET conversation = ? WHERE conversation = ?"
            handle.execute(query, [id, place])
            handle.execute("DELETE FROM conversations WHERE id = ?", [place])
    return id


def oldest(db: Database) -> float | None:
    (found,) = db.execute_read("SELECT min(created) FROM deletions")[0]
    return None if found is None else float(found)


def purge(db: Database, seconds: float) -> list[Gone]:
    """Permanently delete what was deleted at least `seconds` ago. Returns the conversations
    concerned.

    If a conversation lost messages, its token log is deleted as well, because it contains their
    text. A new log starts with the next answer.
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
