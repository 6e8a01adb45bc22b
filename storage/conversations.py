"""Conversations and their messages, seen by one owner at a time.

Every query names the owner, so another's conversation behaves in every way as one that does not
exist. A row that is damaged is shown as far as it can be, so that it can be deleted and never hides
the others: a file may have been edited, or have come from a disk that fails.

The messages of a conversation are a tree, of which one path is shown (storage/tree.py). Nothing
that is said, said anew or answered anew takes anything away.
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
from storage import deletions, exports, steps
from storage.columns import as_seconds, as_text, clean, from_json, to_json
from storage.database import Database
from storage.exports import MAX_FOLDER, MAX_TITLE, ROLES, Export
from storage.tree import Tree

PIECE_TYPES = tuple((str, str, int, int, int, number) for number in (float, int))
LARGEST = 2**31
BRANCH = " (branch)"
COLUMNS = "id, title, system_prompt, settings, created, updated, pinned, folder"
HIT_BEFORE, HIT_AFTER = 32, 60
"""Characters that are shown around what a search found."""


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


class Hit(NamedTuple):
    """Where a conversation holds what was searched for: the message, and the words with what stands
    before and after them."""

    message: str
    before: str
    words: str
    after: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages; times are in seconds since 1970, UTC.

    Of settings that are `damaged` nothing could be read. A search that found the words in a message
    says where (`hit`).
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

    It follows `parent`, None for a first one; `versions` are the ids of all messages that follow
    the same one, in the order in which they were made, itself included. An answer's `pieces` are
    those of its run. One that was imported has pieces of its own; where it was gone on with, those
    of its run follow them.
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
        return self.MOST - self.count()

    def count(self) -> int:
        """How many conversations there are."""
        query = "SELECT count(*) FROM conversations WHERE owner = ?"
        return int(self._db.execute_read(query, [self._owner])[0][0])

    def get(self, id: str) -> Conversation:
        """One conversation."""
        rows = self._db.execute_read(
            f"SELECT {COLUMNS} FROM conversations WHERE id = ? AND owner = ?", [id, self._owner]
        )
        if not rows:
            raise _missing(id)
        return _conversation(rows[0])

    def list(self, search: str | None = None, most: int = -1) -> Sequence[Conversation]:
        """All conversations, pinned ones and those in folders first; or those with `search` in
        title or messages. Newest change first, at most `most`, where that is not negative."""
        words = clean(search or "").strip()[:MAX_TITLE]
        if words:
            return self._found(words, most)
        rows = self._db.execute_read(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = ? "
            "ORDER BY pinned != 0 OR folder != '' DESC, updated DESC, rowid DESC LIMIT ?",
            [self._owner, most],
        )
        return [_conversation(row) for row in rows]

    def _found(self, words: str, most: int) -> Sequence[Conversation]:
        """The conversations that hold these words, and where their newest such message has them."""
        pattern = re.sub(r"([\\%_])", r"\\\1", words)
        with self._db.read():
            rows = self._db.execute_read(
                f"SELECT {COLUMNS}, (SELECT max(position) FROM messages "
                "WHERE conversation = conversations.id AND content LIKE :like ESCAPE '\\') AS hit "
                "FROM conversations WHERE owner = :owner "
                "AND (hit IS NOT NULL OR title LIKE :like ESCAPE '\\') "
                "ORDER BY updated DESC, rowid DESC LIMIT :most",
                {"owner": self._owner, "like": f"%{pattern}%", "most": most},
            )
            return [_conversation(row, self._hit(row[0], row[-1], words)) for row in rows]

    def _hit(self, id: str, position: int | None, words: str) -> Hit | None:
        """The words in the message at a position, with what stands around them."""
        rows = self._db.execute_read(
            "SELECT id, substr(content, max(1, at - :before), :before - max(0, :before - at + 1)), "
            "substr(content, at, :size), substr(content, at + :size, :after) FROM ("
            "SELECT id, content, instr(lower(content), lower(:words)) AS at FROM messages "
            "WHERE conversation = :id AND position = :position) WHERE at > 0",
            {
                "id": id,
                "position": position,
                "words": words,
                "size": len(words),
                "before": HIT_BEFORE,
                "after": HIT_AFTER,
            },
        )
        if not rows:
            return None
        message, before, found, after = rows[0]
        return Hit(message, _line(before), _line(found), _line(after))

    def folders(self) -> Sequence[str]:
        """The names of all folders, in the order of the alphabet."""
        query = "SELECT DISTINCT folder FROM conversations WHERE owner = ? AND folder != ''"
        rows = self._db.execute_read(query, [self._owner])
        return sorted((as_text(row[0]) for row in rows), key=str.casefold)

    def pin(self, id: str, pinned: bool) -> None:
        """Keep a conversation on top of the list, or no longer."""
        self._arrange(id, "pinned", int(pinned))

    def file(self, id: str, folder: str) -> None:
        """Put a conversation into a folder; "" for none."""
        self._arrange(id, "folder", " ".join(clean(folder).split())[:MAX_FOLDER])

    def _arrange(self, id: str, column: str, value: str | int) -> None:
        """Change where a conversation stands in the list; it counts as no change of its own."""
        with self._db.write() as handle:
            query = f"UPDATE conversations SET {column} = ? WHERE id = ? AND owner = ?"
            if not handle.execute(query, [value, id, self._owner]).rowcount:
                raise _missing(id)

    def rename(self, id: str, title: str) -> None:
        """Give a conversation another title."""
        self._update(id, "title", _title(title))

    def set_system_prompt(self, id: str, system_prompt: str) -> None:
        """Give a conversation another system prompt; empty for none."""
        self._update(id, "system_prompt", clean(system_prompt))

    def set_settings(self, id: str, settings: Mapping[str, Any]) -> None:
        """Replace a conversation's settings, which JSON must be able to hold."""
        self._update(id, "settings", to_json(dict(settings)))

    def delete(self, id: str) -> str:
        """Delete a conversation with its messages, its token logs and its runs; what `undo` takes
        to bring it back."""
        trash = deletions.nobody(self._db)
        with self._db.write() as handle:
            self._touch(handle, id)
            return deletions.hide(handle, trash, self._owner, id)

    def delete_message(self, id: str, message_id: str) -> str:
        """Delete a message with all that follows it, in whatever version; what `undo` takes."""
        trash = deletions.nobody(self._db)
        with self._db.write() as handle:
            self._touch(handle, id)
            under = self._tree(id, message_id).under(message_id)
            return deletions.hide(handle, trash, self._owner, id, under)

    def undo(self, token: str) -> str:
        """Bring back what was deleted; the id of its conversation. Raises `StorageError` once that
        cannot be done, and where it belongs below something that is deleted itself."""
        trash = deletions.nobody(self._db)
        with self._db.write() as handle:
            id, place = deletions.find(self._db, self._owner, token)
            if id != place:
                self.get(id)
                query = (
                    "SELECT 1 FROM messages AS top JOIN messages AS up ON up.id = top.parent "
                    "WHERE top.conversation = ? AND up.conversation NOT IN (?, ?)"
                )
                if self._db.execute_read(query, [place, place, id]):
                    raise StorageError(
                        "What this message follows is deleted as well. Bring that back first."
                    )
            deletions.restore(handle, trash, self._owner, id, place)
            self._touch(handle, id)
        return id

    def revision(self, id: str) -> int:
        """A number that grows with every change of a conversation."""
        query = "SELECT revision FROM conversations WHERE id = ? AND owner = ?"
        rows = self._db.execute_read(query, [id, self._owner])
        if not rows:
            raise _missing(id)
        return int(rows[0][0])

    def remarked(self, id: str) -> None:
        """Have pages look at a conversation again, of which something new is known beside what was
        said; it is none that was used just now. Nothing where it is gone."""
        with self._db.write() as handle:
            query = "UPDATE conversations SET revision = revision + 1 WHERE id = ? AND owner = ?"
            handle.execute(query, [id, self._owner])

    def messages(
        self, id: str, pieces: bool = True, to: str | None = None
    ) -> Sequence[StoredMessage]:
        """A conversation's messages as they are shown, in order; without pieces where only their
        texts are wanted. Given a message, those that lead to it."""
        with self._db.read():
            self.get(id)
            tree = self._tree(id, to)
            path = tree.path() if to is None else tree.above(to)
            return self._read(tree, path, pieces)

    def last(self, id: str) -> str | None:
        """The id of the last message that is shown."""
        self.get(id)
        path = self._tree(id).path()
        return path[-1] if path else None

    def has(self, id: str, message_id: str) -> bool:
        """Whether a message is in a conversation, shown or not."""
        query = "SELECT 1 FROM messages WHERE id = ? AND conversation = ?"
        self.get(id)
        return bool(self._db.execute_read(query, [message_id, id]))

    def following(self, id: str, message_id: str | None) -> Sequence[str]:
        """The messages that follow a message, versions of each other; None: the first ones."""
        self.get(id)
        return self._tree(id, message_id).below.get(message_id, [])

    def show(self, id: str, message_id: str) -> None:
        """Show the path through a message; below it goes on what was shown there last."""
        with self._db.write() as handle:
            revision = self._touch(handle, id, newest=False)
            above = self._tree(id, message_id).above(message_id)
            query = "UPDATE messages SET chosen = ? WHERE id = ?"
            handle.conn.executemany(query, [(revision, each) for each in above])

    def copy(self, id: str, message_id: str) -> str:
        """A new conversation with the messages that lead to this one; its id.

        They share their runs, which are not counted twice.
        """
        with self._db.write() as handle:
            old, messages = self.get(id), self.messages(id, False, message_id)
            title = f"{old.title[: MAX_TITLE - len(BRANCH)]}{BRANCH}"
            made = self.create(title).id
            self.set_system_prompt(made, old.system_prompt)
            self.set_settings(made, old.settings)
            ids = {message.id: secrets.token_urlsafe(12) for message in messages}
            handle.conn.executemany(
                "INSERT INTO messages "
                "(id, conversation, position, role, content, run, created, pieces, parent) "
                "SELECT ?, ?, position, role, content, run, created, pieces, ? "
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
    ) -> StoredMessage:
        """Add a message behind the last one, or as another version behind the one given.

        One that is not `shown` leaves the path as it is, as long as another version is there.
        """
        if role not in ROLES:
            raise StorageError(f"A message cannot be by {role!r}. Use one of: {', '.join(ROLES)}.")
        with self._db.write() as handle:
            revision = self._touch(handle, id)
            self._check_run(run_id)
            tree = self._tree(id, after)
            parent = after or next(reversed(tree.path()), None)
            return self._insert_message(
                handle, id, revision, parent, role, content, run_id, pieces, shown
            )

    def beside(self, id: str, message_id: str, role: str, content: str) -> StoredMessage:
        """Add another version of a message, and show it."""
        with self._db.write() as handle:
            revision = self._touch(handle, id)
            parent = self._tree(id, message_id).parents[message_id]
            return self._insert_message(handle, id, revision, parent, role, content)

    def extend(self, message_id: str, text: str) -> None:
        """Add text to the end of a message."""
        with self._db.write() as handle:
            self._touch(handle, self._conversation_of(message_id))
            query = "UPDATE messages SET content = content || ? WHERE id = ?"
            handle.execute(query, [clean(text), message_id])

    def rewrite(
        self, message_id: str, text: str, run_id: str, pieces: Iterable[Sequence[Any]] | None
    ) -> None:
        """Give an answer that is gone on with the text that it begins with, and its run; `pieces`
        are those in front of its run's."""
        with self._db.write() as handle:
            self._touch(handle, self._conversation_of(message_id))
            self._check_run(run_id)
            handle.execute(
                "UPDATE messages SET content = ?, run = ?, pieces = ? WHERE id = ?",
                [clean(text), run_id, _pieces_json(pieces), message_id],
            )

    def export(self, id: str) -> dict[str, Any]:
        """The conversation as JSON values, for `import_`; it names no owner, run or token log."""
        with self._db.read():
            conversation, tree = self.get(id), self._tree(id)
            messages = self._read(tree, list(tree.parents), True)
        numbers = {message.id: number for number, message in enumerate(messages)}
        return {
            "format": exports.FORMAT,
            "version": exports.VERSION,
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

    def import_(self, found: Sequence[Export]) -> Sequence[str]:
        """Store conversations that were read from a file, the first as the newest; their ids.

        One transaction. What takes long is done before it, as no one else can write meanwhile.
        """
        made = [(secrets.token_urlsafe(12), export) for export in found]
        messages = [row for id, export in made for row in _rows(id, export)]
        with self._db.write() as handle:
            for id, export in reversed(made):
                title, system_prompt, settings, created, said, pinned, folder = export
                self._insert(handle, title, system_prompt, settings, created, id)
                newest = max((message.chosen for message in said), default=0)
                handle.execute(
                    "UPDATE conversations SET revision = ?, pinned = ?, folder = ? WHERE id = ?",
                    [max(len(said), newest), pinned, clean(folder), id],
                )
            handle.conn.executemany(
                "INSERT INTO messages "
                "(id, conversation, position, role, content, created, pieces, parent, chosen) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
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

    def _touch(self, handle: sqlite_utils.Database, id: str, newest: bool = True) -> int:
        """Mark a conversation as changed; the check that it is this owner's. Its new revision,
        which is beyond all its messages. It becomes the `newest` in the list."""
        rows = handle.execute(
            "UPDATE conversations SET updated = coalesce(?, updated), "
            "revision = 1 + max(CAST(revision AS INTEGER), (SELECT "
            "CAST(coalesce(max(position), 0) AS INTEGER) FROM messages "
            "WHERE conversation = conversations.id)) WHERE id = ? AND owner = ? RETURNING revision",
            [time.time() if newest else None, id, self._owner],
        ).fetchall()
        if not rows:
            raise _missing(id)
        return int(rows[0][0])

    def _tree(self, id: str, member: str | None = None) -> Tree:
        """The tree of a conversation; raises `StorageError` where the member is none of it."""
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
        """These messages of a tree, in this order."""
        wanted = to_json(list(ids))
        rows = self._db.execute_read(
            "SELECT id, conversation, position, role, content, run, created, "
            "CASE WHEN ? THEN pieces END "
            "FROM messages WHERE id IN (SELECT value FROM json_each(?))",
            [pieces, wanted],
        )
        emitted = steps.tokens(self._db, wanted) if pieces else {}
        found = {row[0]: _message(row, emitted, tree) for row in rows}
        return [found[id] for id in ids]

    def _insert_message(
        self,
        handle: sqlite_utils.Database,
        id: str,
        revision: int,
        parent: str | None,
        role: str,
        content: str,
        run_id: str | None = None,
        pieces: Iterable[Sequence[Any]] | None = None,
        shown: bool = True,
    ) -> StoredMessage:
        """Store a message of a conversation that was checked to be the owner's, and touched."""
        message_id = secrets.token_urlsafe(12)
        handle.execute(
            "INSERT INTO messages "
            "(id, conversation, position, role, content, run, created, pieces, parent, chosen) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                message_id,
                id,
                revision,
                role,
                clean(content),
                run_id,
                time.time(),
                _pieces_json(pieces),
                parent,
                revision if shown else 0,
            ],
        )
        return self._read(self._tree(id), [message_id], True)[0]

    def _conversation_of(self, message_id: str) -> str:
        rows = self._db.execute_read(
            "SELECT conversation FROM messages JOIN conversations ON conversations.id = "
            "conversation WHERE messages.id = ? AND owner = ?",
            [message_id, self._owner],
        )
        if not rows:
            raise _no_message(message_id)
        return str(rows[0][0])

    def _check_run(self, run_id: str | None) -> None:
        query = "SELECT 1 FROM runs WHERE id = ? AND owner = ?"
        if run_id is not None and not self._db.execute_read(query, [run_id, self._owner]):
            raise StorageError(f"There is no run {run_id!r}. Save the run before its message.")


def _rows(id: str, export: Export) -> list[tuple[Any, ...]]:
    """The rows of an imported conversation's messages."""
    ids = [secrets.token_urlsafe(12) for _ in export.messages]
    return [
        (
            ids[position],
            id,
            position,
            message.role,
            clean(message.content),
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
        not usable,
        pinned not in (0, None),
        as_text(folder)[:MAX_FOLDER],
        hit,
    )


def _line(text: object) -> str:
    """Text as part of one line."""
    return re.sub(r"\s+", " ", as_text(text))


def _message(
    row: tuple[Any, ...], emitted: Mapping[str, list[tuple[int, object]]], tree: Tree
) -> StoredMessage:
    id, conversation, position, role, content, run_id, created, pieces = row
    said = as_text(content)
    return StoredMessage(
        id,
        conversation,
        position,
        role,
        said,
        run_id,
        as_seconds(created),
        _pieces(said, pieces, emitted.get(run_id)),
        tree.parents[id],
        tree.versions(id),
    )


def _pieces(
    content: str, stored: object, emitted: list[tuple[int, object]] | None
) -> tuple[Piece, ...] | None:
    """The pieces of a message: those of its run behind those that it has of its own, as far as
    both say what it says. Of its own it has some where it was imported, or says something else."""
    own = None if stored is None else _stored_pieces(stored)
    tail = None if emitted is None else _emitted_pieces(emitted)
    if stored is None or own is None or tail is None:
        return tail if stored is None else own
    return (*own, *tail) if text_of((*own, *tail)) == content else own


def text_of(pieces: Iterable[Piece]) -> str:
    """What pieces say."""
    return "".join(piece.text for piece in pieces)


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


def _no_message(id: str) -> StorageError:
    return StorageError(f"There is no message {id!r}. It may be deleted.")


def _title(title: str) -> str:
    title = clean(title).strip()
    if not title or len(title) > MAX_TITLE:
        given = f"{title[:40]!r} ({len(title)} characters)"
        raise StorageError(f"A title cannot be {given}. Give it 1 to {MAX_TITLE} characters.")
    return title


def _pieces_json(pieces: Iterable[Sequence[Any]] | None) -> str | None:
    return None if pieces is None else to_json(list(pieces))
