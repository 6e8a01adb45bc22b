"""Conversations and their messages, seen by one owner at a time.

Every query names the owner, so another's conversation behaves in every way as one that does not
exist. A row that is damaged is shown as far as it can be, so that it can be deleted and never hides
the others: a file may have been edited, or have come from a disk that fails.
"""

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import sqlite_utils

from engine.errors import StorageError
from engine.types import TARGET, Token
from storage import exports, steps
from storage.columns import as_seconds, as_text, clean, from_json, to_json
from storage.database import Database
from storage.exports import MAX_TITLE, ROLES, Export

PIECE_TYPES = tuple((str, str, int, int, int, number) for number in (float, int))
LARGEST = 2**31


class Piece(NamedTuple):
    """What the token view shows of one piece of an answer: its text and where it came from."""

    text: str
    source: str
    match_length: int
    step: int
    position: int
    probability: float

    @classmethod
    def of(cls, token: Token, step: int) -> Self:
        """What the token view shows of a token that this step emitted."""
        source, probability = token.source or TARGET, round(token.probability, 4)
        return cls(token.text, source, token.match_length, step, token.position, probability)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages; times are in seconds since 1970, UTC.

    Of settings that are `damaged` nothing could be read.
    """

    id: str
    title: str
    system_prompt: str
    settings: dict[str, Any]
    created: float
    updated: float
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message; positions grow within a conversation, from 0.

    An answer's `pieces` are those of its run. One that was imported has pieces of its own.
    """

    id: str
    conversation_id: str
    position: int
    role: str
    content: str
    run_id: str | None
    created: float
    pieces: tuple[Piece, ...] | None


class Conversations:
    """One owner's conversations; an id that is not theirs raises `StorageError`."""

    MOST = 20_000
    """The conversations that an owner may keep."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._owner = db.key("owners", owner)

    def create(self, title: str = "New conversation") -> Conversation:
        """A new, empty conversation. Raises `StorageError` beyond the most there may be."""
        if self.room() <= 0:
            raise StorageError(
                f"You have {self.MOST:,} conversations, the most. Delete some first."
            )
        with self._db.write() as handle:
            return self.get(self._insert(handle, title, "", {}, time.time()))

    def room(self) -> int:
        """How many more conversations may be kept."""
        query = "SELECT count(*) FROM conversations WHERE owner = ?"
        return self.MOST - int(self._db.execute_read(query, [self._owner])[0][0])

    def get(self, id: str) -> Conversation:
        """One conversation."""
        rows = self._db.execute_read(
            "SELECT id, title, system_prompt, settings, created, updated FROM conversations "
            "WHERE id = ? AND owner = ?",
            [id, self._owner],
        )
        if not rows:
            raise _missing(id)
        return _conversation(rows[0])

    def list(self, search: str | None = None, most: int = -1) -> Sequence[Conversation]:
        """All conversations, or those with `search` in title or messages; newest change first.

        At most `most`, where that is not negative.
        """
        words = clean(search or "").strip()[:MAX_TITLE]
        pattern = re.sub(r"([\\%_])", r"\\\1", words)
        rows = self._db.execute_read(
            "SELECT id, title, system_prompt, settings, created, updated FROM conversations "
            "WHERE owner = :owner AND (:like = '%%' OR title LIKE :like ESCAPE '\\' OR EXISTS ("
            "SELECT 1 FROM messages WHERE conversation = conversations.id "
            "AND content LIKE :like ESCAPE '\\')) ORDER BY updated DESC, rowid DESC LIMIT :most",
            {"owner": self._owner, "like": f"%{pattern}%", "most": most},
        )
        return [_conversation(row) for row in rows]

    def rename(self, id: str, title: str) -> None:
        """Give a conversation another title."""
        self._update(id, "title", _title(title))

    def set_system_prompt(self, id: str, system_prompt: str) -> None:
        """Give a conversation another system prompt; empty for none."""
        self._update(id, "system_prompt", clean(system_prompt))

    def set_settings(self, id: str, settings: Mapping[str, Any]) -> None:
        """Replace a conversation's settings, which JSON must be able to hold."""
        self._update(id, "settings", to_json(dict(settings)))

    def delete(self, id: str) -> None:
        """Delete a conversation with its messages, its token logs and its runs."""
        with self._db.write() as handle:
            self._touch(handle, id)
            handle.execute("DELETE FROM conversations WHERE id = ?", [id])

    def messages(self, id: str, pieces: bool = True) -> Sequence[StoredMessage]:
        """A conversation's messages in order; without pieces where only their texts are wanted."""
        with self._db.read():
            self.get(id)
            rows = self._db.execute_read(
                "SELECT id, conversation, position, role, content, run, created, "
                "CASE WHEN ? THEN pieces END "
                "FROM messages WHERE conversation = ? ORDER BY position",
                [pieces, id],
            )
            emitted = steps.tokens(self._db, id) if pieces else {}
        return [_message(row, emitted) for row in rows]

    def last(self, id: str) -> str | None:
        """The id of a conversation's last message."""
        self.get(id)
        query = "SELECT id FROM messages WHERE conversation = ? ORDER BY position DESC LIMIT 1"
        rows = self._db.execute_read(query, [id])
        return str(rows[0][0]) if rows else None

    def append(
        self,
        id: str,
        role: str,
        content: str,
        run_id: str | None = None,
        pieces: Iterable[Sequence[Any]] | None = None,
        after: str | None = None,
    ) -> StoredMessage:
        """Add a message at the end; given the message that it is to follow, only behind that."""
        if role not in ROLES:
            raise StorageError(f"A message cannot be by {role!r}. Use one of: {', '.join(ROLES)}.")
        with self._db.write() as handle:
            self._touch(handle, id)
            self._check_run(run_id)
            if after is not None and self.last(id) != after:
                raise StorageError(
                    "The answer is not kept: the conversation went on without it. Ask again."
                )
            place = (id, self._end(id))
            return _insert_message(handle, place, role, content, run_id, time.time(), pieces)

    def extend(self, message_id: str, text: str) -> None:
        """Add text to the end of a message."""
        with self._db.write() as handle:
            self._touch(handle, self._conversation_of(message_id))
            query = "UPDATE messages SET content = content || ? WHERE id = ?"
            handle.execute(query, [clean(text), message_id])

    def truncate(self, id: str, from_position: int) -> int:
        """Delete the message at a position and all after it; the number deleted."""
        with self._db.write() as handle:
            self._touch(handle, id)
            query = "DELETE FROM messages WHERE conversation = ? AND position >= ?"
            return handle.execute(query, [id, from_position]).rowcount

    def export(self, id: str) -> dict[str, Any]:
        """The conversation as JSON values, for `import_`; it names no owner, run or token log."""
        with self._db.read():
            conversation, messages = self.get(id), self.messages(id)
        return {
            "format": exports.FORMAT,
            "version": exports.VERSION,
            "title": conversation.title,
            "system_prompt": conversation.system_prompt,
            "settings": conversation.settings,
            "created": conversation.created,
            "messages": [
                {
                    "role": message.role,
                    "content": message.content,
                    "created": message.created,
                    "pieces": None if message.pieces is None else [*map(list, message.pieces)],
                }
                for message in messages
            ],
        }

    def import_(self, found: Sequence[Export]) -> Sequence[str]:
        """Store conversations that were read from a file, the first as the newest; their ids.

        One transaction. What takes long is done before it, as no one else can write meanwhile.
        """
        made = [(secrets.token_urlsafe(12), export) for export in found]
        messages = [
            (secrets.token_urlsafe(12), id, position, role, clean(content), created, pieces)
            for id, export in made
            for position, (role, content, created, rows) in enumerate(export.messages)
            for pieces in [_pieces_json(rows)]
        ]
        with self._db.write() as handle:
            for id, export in reversed(made):
                title, system_prompt, settings, created, _ = export
                self._insert(handle, title, system_prompt, settings, created, id)
            handle.conn.executemany(
                "INSERT INTO messages (id, conversation, position, role, content, created, pieces) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                messages,
            )
        return [id for id, _ in made]

    def _insert(
        self,
        handle: sqlite_utils.Database,
        title: str,
        system_prompt: str,
        settings: Mapping[str, Any],
        created: float,
        id: str = "",
    ) -> str:
        id, words = id or secrets.token_urlsafe(12), (_title(title), clean(system_prompt))
        handle.execute(
            "INSERT INTO conversations (id, owner, title, system_prompt, settings, created, "
            "updated) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [id, self._owner, *words, to_json(dict(settings)), created, time.time()],
        )
        return id

    def _update(self, id: str, column: str, value: str) -> None:
        with self._db.write() as handle:
            self._touch(handle, id)
            handle.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", [value, id])

    def _touch(self, handle: sqlite_utils.Database, id: str) -> None:
        """Mark a conversation as changed; the check that it is this owner's."""
        query = "UPDATE conversations SET updated = ? WHERE id = ? AND owner = ?"
        if not handle.execute(query, [time.time(), id, self._owner]).rowcount:
            raise _missing(id)

    def _end(self, id: str) -> int:
        query = "SELECT coalesce(max(position) + 1, 0) FROM messages WHERE conversation = ?"
        return int(self._db.execute_read(query, [id])[0][0])

    def _conversation_of(self, message_id: str) -> str:
        rows = self._db.execute_read(
            "SELECT conversation FROM messages JOIN conversations ON conversations.id = "
            "conversation WHERE messages.id = ? AND owner = ?",
            [message_id, self._owner],
        )
        if not rows:
            raise StorageError(f"There is no message {message_id!r}. It may be deleted.")
        return str(rows[0][0])

    def _check_run(self, run_id: str | None) -> None:
        query = "SELECT 1 FROM runs WHERE id = ? AND owner = ?"
        if run_id is not None and not self._db.execute_read(query, [run_id, self._owner]):
            raise StorageError(f"There is no run {run_id!r}. Save the run before its message.")


def _insert_message(
    handle: sqlite_utils.Database,
    place: tuple[str, int],
    role: str,
    content: str,
    run_id: str | None,
    created: float,
    pieces: Iterable[Sequence[Any]] | None,
) -> StoredMessage:
    """Store a message at a (conversation, position) that was checked to be the owner's."""
    id, rows = secrets.token_urlsafe(12), _pieces_json(pieces)
    handle.execute(
        "INSERT INTO messages (id, conversation, position, role, content, run, created, pieces) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [id, *place, role, clean(content), run_id, created, rows],
    )
    stored = _stored_pieces(rows)
    return StoredMessage(id, *place, role, clean(content), run_id, created, stored)


def _conversation(row: tuple[Any, ...]) -> Conversation:
    id, title, system_prompt, text, created, updated = row
    settings = from_json(text)
    usable = isinstance(settings, dict)
    return Conversation(
        id,
        as_text(title)[:MAX_TITLE],
        as_text(system_prompt),
        settings if usable else {},
        as_seconds(created),
        as_seconds(updated),
        not usable,
    )


def _message(
    row: tuple[Any, ...], emitted: Mapping[str, list[tuple[int, object]]]
) -> StoredMessage:
    id, conversation, position, role, content, run_id, created, pieces = row
    own = pieces is not None or run_id not in emitted
    return StoredMessage(
        id,
        conversation,
        position,
        role,
        as_text(content),
        run_id,
        as_seconds(created),
        _stored_pieces(pieces) if own else _emitted_pieces(emitted[run_id]),
    )


def _emitted_pieces(emitted: list[tuple[int, object]]) -> tuple[Piece, ...] | None:
    """The pieces of an answer from the tokens of its run's steps; None where these are damaged."""
    try:
        found = [
            Piece(text, source or TARGET, length, index, position, round(probability, 4))
            for index, (_, position, source, length, text, probability) in steps.parsed(emitted)
        ]
    except (OverflowError, TypeError, ValueError):
        return None
    return tuple(found) if all(_is_piece([*piece]) for piece in found) else None


def _stored_pieces(text: object) -> tuple[Piece, ...] | None:
    """The pieces of a message; None, as for one without, where they are damaged."""
    rows = None if text is None else from_json(text)
    if not isinstance(rows, list) or not all(map(_is_piece, rows)):
        return None
    return tuple(Piece(*row) for row in rows)


def _is_piece(row: Any) -> bool:
    """Whether a row is what `_pieces_json` writes."""
    if not isinstance(row, list) or tuple(map(type, row)) not in PIECE_TYPES:
        return False
    length, step, position, probability = row[2:]
    whole = 0 <= length <= LARGEST and 0 <= step <= LARGEST and 0 <= position <= LARGEST
    return bool(whole and 0 <= probability <= 1)


def _missing(id: str) -> StorageError:
    return StorageError(f"There is no conversation {id!r}. It may be deleted: pick another.")


def _title(title: str) -> str:
    title = clean(title).strip()
    if not title or len(title) > MAX_TITLE:
        given = f"{title[:40]!r} ({len(title)} characters)"
        raise StorageError(f"A title cannot be {given}. Give it 1 to {MAX_TITLE} characters.")
    return title


def _pieces_json(pieces: Iterable[Sequence[Any]] | None) -> str | None:
    return None if pieces is None else to_json(list(pieces))
