"""Conversations and their messages, seen by one owner at a time.

Every query names the owner, so another owner's conversation behaves in every way like one that does
not exist. A damaged row (the file may have been edited, or come from a failing disk) is shown as
far as possible, so that it can be deleted and never hides other rows.

The messages of a conversation are a tree, of which one path is shown. Messages that follow the same
message are versions of each other, and the version that was selected last is shown; returning to a
version shows the path that was last shown below it. Editing or regenerating never removes a
message.
"""

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, NamedTuple, Self

import sqlite_utils
from pydantic import Field, TypeAdapter, ValidationError

from engine.errors import StorageError
from engine.text import find_folded, folded, well_formed
from engine.types import TARGET, Token
from storage import deletions, imports, steps
from storage.database import Database, as_seconds, as_text, from_json, to_json
from storage.exported import MAX_TITLE, Export
from storage.imports import MAX_FOLDER, ROLES

LARGEST = 2**31
Small = Annotated[int, Field(ge=0, le=LARGEST)]
BRANCH = " (branch)"
COLUMNS = "id, title, system_prompt, settings, created, updated, pinned, folder"
MESSAGE = "id, conversation, position, role, content, run, created, pieces, parent, chosen"
INSERT_MESSAGE = f"INSERT INTO messages ({MESSAGE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
AS_LISTED = "ORDER BY pinned != 0 OR folder != '' DESC, updated DESC, rowid DESC"
"""The order of the list: conversations that are pinned or in a folder, then the others; newest
change first."""
HIT_BEFORE, HIT_AFTER = 32, 60
"""The most characters that are shown before and after the words that a search found."""


class Piece(NamedTuple):
    """One piece of an answer in the token view: its text and its source."""

    text: str
    source: str
    match_length: Small
    step: Small
    position: Small
    probability: Annotated[float, Field(ge=0, le=1)]

    @classmethod
    def of(cls, token: Token, step: int) -> Self:
        source, probability = token.source or TARGET, round(token.probability, 4)
        return cls(token.text, source, token.match_length, step, token.position, probability)


PIECES = TypeAdapter(tuple[Piece, ...])


class Hit(NamedTuple):
    """A search hit in a conversation: the message, and the words with the text before and after
    them."""

    message: str
    before: str
    words: str
    after: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages; times are in seconds since 1970, UTC.

    `damaged` says that the settings could not be read. `hit` is the place of a search hit in a
    message.
    """

    id: str
    title: str
    system_prompt: str
    settings: dict[str, Any]
    created: float
    updated: float
    damaged: bool = False
    pinned: bool = False
    folder: str = ""
    hit: Hit | None = None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message; positions grow within a conversation, in the order in which messages are made.

    A message follows its `parent`, None for a first message; `versions` are the ids of all messages
    with the same parent, itself included, in the order in which they were made. An answer's
    `pieces` are those of its run. An imported answer has its own pieces, followed by those of its
    run if it was continued.
    """

    id: str
    conversation_id: str
    position: int
    role: str
    content: str
    run_id: str | None
    created: float
    pieces: tuple[Piece, ...] | None
    parent: str | None = None
    versions: tuple[str, ...] = ()


class Tree:
    """The messages of a conversation: which follows which, and the path that is shown.

    Built from (id, parent, chosen) of each message, in the order in which they were made. A message
    comes after its parent in that order. A message that does not, or whose parent does not exist,
    is damaged and follows the message made just before it. So there are no cycles, and every
    message is on a path.
    """

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self.parents: dict[str, str | None] = {}
        self.below: dict[str | None, list[str]] = {}
        self.chosen: dict[str, float] = {}
        before: str | None = None
        for id, parent, chosen in rows:
            if parent is not None and parent not in self.parents:
                parent = before
            self.parents[id] = parent
            self.below.setdefault(parent, []).append(id)
            self.chosen[id] = chosen if isinstance(chosen, int | float) else 0
            before = id

    def __contains__(self, id: object) -> bool:
        return id in self.parents

    def path(self) -> list[str]:
        found: list[str] = []
        here: str | None = None
        while versions := self.below.get(here):
            # Among equals the last version is shown, as nothing was selected yet.
            here = max(reversed(versions), key=self.chosen.__getitem__)
            found.append(here)
        return found

    def above(self, id: str) -> list[str]:
        found: list[str] = []
        here: str | None = id
        while here is not None:
            found.append(here)
            here = self.parents[here]
        return found[::-1]

    def under(self, id: str) -> list[str]:
        found, left = list[str](), [id]
        while left:
            here = left.pop()
            found.append(here)
            left += self.below.get(here, ())
        return found

    def versions(self, id: str) -> tuple[str, ...]:
        return tuple(self.below[self.parents[id]])


class Conversations:
    """One owner's conversations; an id that is not theirs raises `StorageError`."""

    MOST = 20_000
    """The conversations that an owner may keep."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self.owner_id = db.key("owners", owner)

    def create(self, title: str = "New conversation") -> Conversation:
        if self.room() <= 0:
            raise StorageError(
                f"You have {self.MOST:,} conversations, the most. Delete some first."
            )
        with self._db.write() as handle:
            id = secrets.token_urlsafe(12)
            self._insert(handle, id, Export(title, "", {}, time.time(), []))
            return self.get(id)

    def room(self) -> int:
        return self.MOST - self.count()

    def count(self) -> int:
        query = "SELECT count(*) FROM conversations WHERE owner = ?"
        return int(self._db.execute_read(query, [self.owner_id])[0][0])

    def get(self, id: str) -> Conversation:
        return _conversation(self._row(COLUMNS, id))

    def exists(self, id: str) -> bool:
        query = "SELECT 1 FROM conversations WHERE id = ? AND owner = ?"
        return bool(self._db.execute_read(query, [id, self.owner_id]))

    def list(self, search: str | None = None, most: int = -1) -> Sequence[Conversation]:
        """All conversations, pinned ones and those in folders first; or those with `search` in
        title or messages. Newest change first, at most `most` unless that is negative."""
        words = well_formed(search or "").strip()[:MAX_TITLE]
        if words:
            return self._found(words, most)
        rows = self._db.execute_read(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = ? {AS_LISTED} LIMIT ?",
            [self.owner_id, most],
        )
        return [_conversation(row) for row in rows]

    def outline(self, most: int = -1) -> Sequence[tuple[Any, ...]]:
        """(id, title, pinned, folder, number of conversations) for each conversation, in the order
        of `list` and without the cost of reading settings."""
        query = (
            "SELECT id, title, pinned, folder, count(*) OVER () FROM conversations "
            f"WHERE owner = ? {AS_LISTED} LIMIT ?"
        )
        return [tuple(row) for row in self._db.execute_read(query, [self.owner_id, most])]

    def _found(self, words: str, most: int) -> Sequence[Conversation]:
        with self._db.read():
            rows = self._db.execute_read(
                f"SELECT {COLUMNS}, (SELECT max(position) FROM messages "
                "WHERE conversation = conversations.id "
                "AND holds(CAST(content AS BLOB), :words)) AS hit "
                "FROM conversations WHERE owner = :owner "
                "AND (hit IS NOT NULL OR holds(CAST(title AS BLOB), :words)) "
                "ORDER BY updated DESC, rowid DESC LIMIT :most",
                {"owner": self.owner_id, "words": folded(words), "most": most},
            )
            return [_conversation(row, self._hit(row[0], row[-1], words)) for row in rows]

    def _hit(self, id: str, position: int | None, words: str) -> Hit | None:
        rows = self._db.execute_read(
            "SELECT id, content FROM messages WHERE conversation = ? AND position = ?",
            [id, position],
        )
        for message, content in rows:
            text = as_text(content)
            if (found := find_folded(words, text)) is not None:
                start, end = found
                # One character more on each side shows whether the text continues there.
                before = text[max(0, start - HIT_BEFORE - 1) : start]
                after, hit = text[end : end + HIT_AFTER + 1], text[start:end]
                return Hit(message, _end(_line(before)), _line(hit), _beginning(_line(after)))
        return None

    def folders(self) -> Sequence[str]:
        query = "SELECT DISTINCT folder FROM conversations WHERE owner = ? AND folder != ''"
        rows = self._db.execute_read(query, [self.owner_id])
        return sorted((as_text(row[0]) for row in rows), key=folded)

    def pin(self, id: str, pinned: bool) -> None:
        self._arrange(id, "pinned", int(pinned))

    def file(self, id: str, folder: str) -> None:
        """Put a conversation into a folder; "" for none. A name in other letters, such as small
        ones, means the folder that exists."""
        name = " ".join(well_formed(folder).split())[:MAX_FOLDER]
        known = {folded(each): each for each in self.folders()} if name else {}
        self._arrange(id, "folder", known.get(folded(name), name))

    def _arrange(self, id: str, column: str, value: str | int) -> None:
        """Change the place of a conversation in the list. This does not count as a change of the
        conversation."""
        query = f"UPDATE conversations SET {column} = ? WHERE id = ? AND owner = ?"
        if not self._db.execute_write(query, [value, id, self.owner_id]):
            raise _missing(id)

    def rename(self, id: str, title: str) -> None:
        self._update(id, "title", _title(title))

    def set_system_prompt(self, id: str, system_prompt: str) -> None:
        self._update(id, "system_prompt", well_formed(system_prompt))

    def set_settings(self, id: str, settings: Mapping[str, Any]) -> None:
        self._update(id, "settings", to_json(dict(settings)))

    def delete(self, id: str) -> str:
        """Delete a conversation with its messages, its token logs and its runs. Returns the token
        for `undo`."""
        with self._db.write() as handle:
            self._touch(handle, id)
            return deletions.hide(self._db, self.owner_id, id)

    def delete_message(self, id: str, message_id: str) -> str:
        """Delete a message with everything that follows it, in all versions. Returns the token for
        `undo`."""
        with self._db.write() as handle:
            self._touch(handle, id)
            under = self._tree(id, message_id).under(message_id)
            return deletions.hide(self._db, self.owner_id, id, under)

    def undo(self, token: str) -> str:
        """Undo a deletion; returns the id of its conversation. Raises `StorageError` if it cannot
        be undone any more, or if the parent of the messages is deleted as well."""
        with self._db.write() as handle:
            id = deletions.restore(self._db, self.owner_id, token)
            self._touch(handle, id)
        return id

    def revision(self, id: str) -> int:
        return int(self._row("revision", id)[0])

    def mark_changed(self, id: str) -> None:
        """Make pages read a conversation again because of new data other than its messages, without
        moving it to the top of the list. Does nothing if the conversation is gone."""
        query = "UPDATE conversations SET revision = revision + 1 WHERE id = ? AND owner = ?"
        self._db.execute_write(query, [id, self.owner_id])

    def messages(
        self, id: str, pieces: bool = True, to: str | None = None
    ) -> Sequence[StoredMessage]:
        """A conversation's messages on the shown path, in order, or on the path to the message
        `to`. Without `pieces`, those are not read."""
        with self._db.read():
            self.get(id)
            tree = self._tree(id, to)
            path = tree.path() if to is None else tree.above(to)
            return self._read(tree, path, pieces)

    def last(self, id: str) -> str | None:
        self.get(id)
        path = self._tree(id).path()
        return path[-1] if path else None

    def has(self, id: str, message_id: str) -> bool:
        query = "SELECT 1 FROM messages WHERE id = ? AND conversation = ?"
        self.get(id)
        return bool(self._db.execute_read(query, [message_id, id]))

    def following(self, id: str, message_id: str | None) -> Sequence[str]:
        """The ids of the messages that follow a message, which are versions of each other; for
        None, those of the first messages."""
        self.get(id)
        return self._tree(id, message_id).below.get(message_id, [])

    def show(self, id: str, message_id: str) -> None:
        """Show the path through a message; below it, the path that was last shown there."""
        with self._db.write() as handle:
            revision = self._touch(handle, id, newest=False)
            above = self._tree(id, message_id).above(message_id)
            query = "UPDATE messages SET chosen = ? WHERE id = ?"
            handle.conn.executemany(query, [(revision, each) for each in above])

    def copy(self, id: str, message_id: str) -> str:
        """Copy the messages up to this one to a new conversation; returns its id.

        The copies share the runs of the originals, so no run counts twice.
        """
        with self._db.write() as handle:
            old, messages = self.get(id), self.messages(id, False, message_id)
            title = f"{old.title[: MAX_TITLE - len(BRANCH)]}{BRANCH}"
            made = self.create(title).id
            self.set_system_prompt(made, old.system_prompt)
            self.set_settings(made, old.settings)
            ids = {message.id: secrets.token_urlsafe(12) for message in messages}
            handle.conn.executemany(
                f"INSERT INTO messages ({MESSAGE}) "
                "SELECT ?, ?, position, role, content, run, created, pieces, ?, 0 "
                "FROM messages WHERE id = ?",
                [(ids[m.id], made, ids.get(m.parent or ""), m.id) for m in messages],
            )
            self._touch(handle, made)
        return made

    def append(
        self,
        id: str,
        role: str,
        content: str,
        run_id: str | None = None,
        pieces: Iterable[Sequence[Any]] | None = None,
        after: str | None = None,
        shown: bool = True,
        version_of: str | None = None,
    ) -> StoredMessage:
        """Add a message after the last one, as another version after the given parent, or as
        another version of a message.

        A message that is not `shown` leaves the path unchanged, provided that another version
        exists.
        """
        if role not in ROLES:
            raise StorageError(f"A message cannot be by {role!r}. Use one of: {', '.join(ROLES)}.")
        with self._db.write() as handle:
            revision = self._touch(handle, id)
            self._check_run(run_id)
            tree = self._tree(id, version_of or after)
            parent = after or next(reversed(tree.path()), None)
            if version_of is not None:
                parent = tree.parents[version_of]
            message_id = secrets.token_urlsafe(12)
            row = [message_id, id, revision, role, well_formed(content), run_id, time.time()]
            row += [_pieces_json(pieces), parent, revision if shown else 0]
            handle.execute(INSERT_MESSAGE, row)
            return self._read(self._tree(id), [message_id], True)[0]

    def copy_as_version(self, id: str, message_id: str, version_of: str) -> None:
        """Copy an answer as another version of an earlier answer, and show it. The copy shares the
        run of the original."""
        with self._db.write() as handle:
            revision, tree = self._touch(handle, id), self._tree(id, message_id)
            if version_of not in tree:
                raise _no_message(version_of)
            row = [secrets.token_urlsafe(12), revision, tree.parents[version_of], revision]
            handle.execute(
                f"INSERT INTO messages ({MESSAGE}) "
                "SELECT ?, conversation, ?, role, content, run, created, pieces, ?, ? "
                "FROM messages WHERE id = ?",
                [*row, message_id],
            )

    def extend(self, message_id: str, text: str) -> None:
        with self._db.write() as handle:
            self._touch(handle, self._conversation_of(message_id))
            query = "UPDATE messages SET content = content || ? WHERE id = ?"
            handle.execute(query, [well_formed(text), message_id])

    def rewrite(
        self, message_id: str, text: str, run_id: str, pieces: Iterable[Sequence[Any]] | None
    ) -> None:
        """Replace the text of an answer that is continued, and its run. `pieces` come before the
        pieces of its run."""
        with self._db.write() as handle:
            self._touch(handle, self._conversation_of(message_id))
            self._check_run(run_id)
            handle.execute(
                "UPDATE messages SET content = ?, run = ?, pieces = ? WHERE id = ?",
                [well_formed(text), run_id, _pieces_json(pieces), message_id],
            )

    def export(self, id: str) -> dict[str, Any]:
        """The conversation as JSON values, for `import_`, without owner, runs and token logs."""
        with self._db.read():
            conversation, tree = self.get(id), self._tree(id)
            messages = self._read(tree, list(tree.parents), True)
        numbers = {message.id: number for number, message in enumerate(messages)}
        return {
            "format": imports.FORMAT,
            "version": imports.VERSION,
            "title": conversation.title,
            "system_prompt": conversation.system_prompt,
            "settings": conversation.settings,
            "created": conversation.created,
            "pinned": conversation.pinned,
            "folder": conversation.folder,
            "messages": [
                {
                    "role": message.role,
                    "content": message.content,
                    "created": message.created,
                    "pieces": None if message.pieces is None else [*map(list, message.pieces)],
                    "parent": numbers.get(message.parent or ""),
                    "chosen": int(min(max(0, tree.chosen[message.id]), LARGEST - 1)),
                }
                for message in messages
            ],
        }

    def stored(self, found: Sequence[Export]) -> Sequence[str | None]:
        """For each conversation that was read from a file, the id of a stored one with the same
        title, system prompt and messages, in all versions; None if there is none.

        Each stored conversation stands for one in the file, so that none is missing where a file
        holds two that are the same.
        """
        titles = {_title(export.title) for export in found}
        same: dict[bytes, list[str]] = {}
        with self._db.read():
            rows = self._db.execute_read(
                "SELECT id, title, system_prompt FROM conversations "
                "WHERE owner = ? AND title IN (SELECT value FROM json_each(?)) ORDER BY updated",
                [self.owner_id, to_json(sorted(titles))],
            )
            for id, title, system_prompt in rows:
                same.setdefault(self._digest(id, title, system_prompt), []).append(id)
        left = [same.get(_digest_of(export)) for export in found]
        return [ids.pop() if ids else None for ids in left]

    def _digest(self, id: str, title: object, system_prompt: object) -> bytes:
        tree = self._tree(id)
        numbers = {each: number for number, each in enumerate(tree.parents)}
        rows = self._db.execute_read(
            "SELECT role, content FROM messages WHERE conversation = ? ORDER BY position", [id]
        )
        messages = [
            (as_text(role), as_text(content), numbers.get(parent or ""))
            for (role, content), parent in zip(rows, tree.parents.values(), strict=True)
        ]
        return _digest(as_text(title), as_text(system_prompt), messages)

    def import_(self, found: Sequence[Export]) -> Sequence[str]:
        """Store conversations that were read from a file, the first as the newest; returns their
        ids.

        This is one transaction. Slow work is done before it, because it blocks all other writers.
        """
        made = [(secrets.token_urlsafe(12), export) for export in found]
        messages = [row for id, export in made for row in _rows(id, export)]
        with self._db.write() as handle:
            for id, export in reversed(made):
                self._insert(handle, id, export)
            handle.conn.executemany(INSERT_MESSAGE, messages)
        return [id for id, _ in made]

    def _row(self, columns: str, id: str) -> tuple[Any, ...]:
        query = f"SELECT {columns} FROM conversations WHERE id = ? AND owner = ?"
        rows = self._db.execute_read(query, [id, self.owner_id])
        if not rows:
            raise _missing(id)
        return rows[0]

    def _insert(self, handle: sqlite_utils.Database, id: str, export: Export) -> None:
        title, system_prompt = _title(export.title), well_formed(export.system_prompt)
        newest = max((message.chosen for message in export.messages), default=0)
        row = [id, self.owner_id, title, system_prompt, to_json(export.settings), export.created]
        row += [time.time(), max(len(export.messages), newest)]
        handle.execute(
            "INSERT INTO conversations (id, owner, title, system_prompt, settings, created, "
            "updated, revision, pinned, folder) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [*row, export.pinned, well_formed(export.folder)],
        )

    def _update(self, id: str, column: str, value: str) -> None:
        with self._db.write() as handle:
            self._touch(handle, id)
            handle.execute(f"UPDATE conversations SET {column} = ? WHERE id = ?", [value, id])

    def _touch(self, handle: sqlite_utils.Database, id: str, newest: bool = True) -> int:
        """Mark a conversation as changed, after checking that it is this owner's. Returns its new
        revision, which is larger than the positions of all its messages. With `newest` it moves to
        the top of the list."""
        rows = handle.execute(
            "UPDATE conversations SET updated = coalesce(?, updated), "
            "revision = 1 + max(CAST(revision AS INTEGER), (SELECT "
            "CAST(coalesce(max(position), 0) AS INTEGER) FROM messages "
            "WHERE conversation = conversations.id)) WHERE id = ? AND owner = ? RETURNING revision",
            [time.time() if newest else None, id, self.owner_id],
        ).fetchall()
        if not rows:
            raise _missing(id)
        return int(rows[0][0])

    def _tree(self, id: str, member: str | None = None) -> Tree:
        """The tree of a conversation; raises `StorageError` if the given message is not in it."""
        tree = Tree(
            self._db.execute_read(
                "SELECT id, parent, chosen FROM messages WHERE conversation = ? ORDER BY position",
                [id],
            )
        )
        if member is not None and member not in tree:
            raise _no_message(member)
        return tree

    def _read(self, tree: Tree, ids: Sequence[str], pieces: bool) -> Sequence[StoredMessage]:
        id_list = to_json(list(ids))
        rows = self._db.execute_read(
            "SELECT id, conversation, position, role, content, run, created, "
            "CASE WHEN ? THEN pieces END "
            "FROM messages WHERE id IN (SELECT value FROM json_each(?))",
            [pieces, id_list],
        )
        emitted = steps.tokens(self._db, id_list) if pieces else {}
        found = {row[0]: _message(row, emitted, tree) for row in rows if row[0] in tree}
        if not found.keys() >= set(ids):
            raise self._db.damaged()  # A table and its index disagree.
        return [found[id] for id in ids]

    def _conversation_of(self, message_id: str) -> str:
        rows = self._db.execute_read(
            "SELECT conversation FROM messages JOIN conversations ON conversations.id = "
            "conversation WHERE messages.id = ? AND owner = ?",
            [message_id, self.owner_id],
        )
        if not rows:
            raise _no_message(message_id)
        return str(rows[0][0])

    def _check_run(self, run_id: str | None) -> None:
        query = "SELECT 1 FROM runs WHERE id = ? AND owner = ?"
        if run_id is not None and not self._db.execute_read(query, [run_id, self.owner_id]):
            raise StorageError(f"There is no run {run_id!r}. Save the run before its message.")


def _digest(
    title: str, system_prompt: str, messages: Sequence[tuple[str, str, int | None]]
) -> bytes:
    return sha256(to_json([title, system_prompt, messages]).encode()).digest()


def _digest_of(export: Export) -> bytes:
    messages = [(m.role, well_formed(m.content), m.parent) for m in export.messages]
    return _digest(_title(export.title), well_formed(export.system_prompt), messages)


def _rows(id: str, export: Export) -> list[tuple[Any, ...]]:
    ids = [secrets.token_urlsafe(12) for _ in export.messages]
    return [
        (
            ids[position],
            id,
            position,
            message.role,
            well_formed(message.content),
            None,
            message.created,
            _pieces_json(message.pieces),
            None if message.parent is None else ids[message.parent],
            message.chosen,
        )
        for position, message in enumerate(export.messages)
    ]


def _conversation(row: tuple[Any, ...], hit: Hit | None = None) -> Conversation:
    id, title, system_prompt, text, created, updated, pinned, folder = row[:8]
    settings = from_json(text)
    usable = isinstance(settings, dict)
    return Conversation(
        id,
        as_text(title)[:MAX_TITLE],
        as_text(system_prompt),
        settings if usable else {},
        as_seconds(created),
        as_seconds(updated),
        damaged=not usable,
        pinned=pinned not in (0, None),
        folder=as_text(folder)[:MAX_FOLDER],
        hit=hit,
    )


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _end(text: str) -> str:
    """At most HIT_BEFORE characters before a hit, from the beginning of a word if possible."""
    if len(text) <= HIT_BEFORE:
        return text
    words = text.partition(" ")[2]
    return "…" + (words if len(words) > HIT_BEFORE // 2 else text[1:])


def _beginning(text: str) -> str:
    """At most HIT_AFTER characters after a hit, to the end of a word if possible."""
    if len(text) <= HIT_AFTER:
        return text
    words = text.rpartition(" ")[0]
    return (words if len(words) > HIT_AFTER // 2 else text[:-1]) + "…"


def _message(
    row: tuple[Any, ...], emitted: Mapping[str, list[tuple[int, object]]], tree: Tree
) -> StoredMessage:
    id, conversation, position, role, content, run_id, created, stored = row
    text = as_text(content)
    pieces = _pieces(text, stored, emitted.get(run_id))
    own = id, conversation, position, role, text, run_id, as_seconds(created), pieces
    return StoredMessage(*own, tree.parents[id], tree.versions(id))


def _pieces(
    content: str, stored: object, emitted: list[tuple[int, object]] | None
) -> tuple[Piece, ...] | None:
    """The pieces of a message: its own, then those of its run if together they make up its text. A
    message has its own pieces if it was imported, or if its text differs from that of its run."""
    own = None if stored is None else _checked_pieces(from_json(stored))
    tail = None if emitted is None else _emitted_pieces(emitted)
    if stored is None or own is None or tail is None:
        return tail if stored is None else own
    return (*own, *tail) if text_of((*own, *tail)) == content else own


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _emitted_pieces(emitted: list[tuple[int, object]]) -> tuple[Piece, ...] | None:
    """The pieces of an answer from the tokens of its run's steps; None if they are damaged."""
    try:
        rows = tuple(
            (text, source or TARGET, length, index, position, round(probability, 4))
            for index, (_, position, source, length, text, probability) in steps.parsed(emitted)
        )
    except (OverflowError, TypeError, ValueError):
        return None
    return _checked_pieces(rows)


def _checked_pieces(rows: object) -> tuple[Piece, ...] | None:
    """The pieces of these rows; None if one of them is damaged."""
    try:
        return PIECES.validate_python(tuple(rows) if isinstance(rows, list) else rows, strict=True)
    except ValidationError:
        return None


def _missing(id: str) -> StorageError:
    return StorageError(f"There is no conversation {id!r}. It may be deleted: pick another.")


def _no_message(id: str) -> StorageError:
    return StorageError(f"There is no message {id!r}. It may be deleted.")


def _title(title: str) -> str:
    title = well_formed(title).strip()
    if not title or len(title) > MAX_TITLE:
        given = f"{title[:40]!r} ({len(title)} characters)"
        raise StorageError(f"A title cannot be {given}. Give it 1 to {MAX_TITLE} characters.")
    return title


def _pieces_json(pieces: Iterable[Sequence[Any]] | None) -> str | None:
    return None if pieces is None else to_json(list(pieces))
