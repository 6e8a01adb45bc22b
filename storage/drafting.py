"""Stores what drafting remembers, for the process that runs the model. The interface is documented
in engine/drafting/databases.py.

An error here never fails an answer: unreadable data counts as missing, a write that has to wait is
done later (`Writes` in storage/database.py), and other errors go to `report(owner, notice)`. What
was learned from an answer is not stored if its owner's past was wiped since it was read, and
neither is the log of a conversation that was deleted in the meantime.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from engine.types import CalibrationRow, Costs, Past, Taught, holds
from storage.conversations import Conversations
from storage.database import Database, Writes, pack_tokens, unpack_tokens
from storage.machine import CostStore
from storage.ngrams import ModelNgrams

MODEL_GRAMS = 100_000
SLACK = 1.1
"""The n-grams are pruned to MODEL_GRAMS when they exceed it by this factor, rather than after
every answer."""
BENCHMARK = ":benchmark"
"""The reserved owner that benchmarks run as, with a copy of a user's past answers."""
UNREAD = -1
"""A number of wipes that never occurs, so a past that could not be read is not written either."""


class ContextStore:
    """The context tier: per conversation and tokenizer, the log of all token ids seen in it.

    The log keeps text that the conversation no longer shows, such as regenerated and edited
    answers, because such text tends to come back. It is stored as chunks that are never rewritten:
    appending costs only the new tokens, and the oldest chunks are dropped whole. Every method
    but `has` raises `StorageError` for a conversation this owner does not have.
    """

    CAP = 262_144
    """The most tokens that a log returns; older ones are forgotten."""
    CHUNK = 8_192
    """The most tokens in a row, and so the most by which a log exceeds its cap on disk."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)

    def has(self, conversation_id: str) -> bool:
        return self._conversations.exists(conversation_id)

    def load(self, conversation_id: str, fingerprint: str) -> list[int]:
        """The newest `CAP` tokens of the log, oldest first; empty if nothing was appended.

        A damaged chunk is skipped: it costs drafts, not the conversation.
        """
        key = self._key(conversation_id, fingerprint)
        rows = self._db.execute_read(
            "SELECT tokens FROM contexts WHERE conversation = ? AND fingerprint = ? ORDER BY start",
            key,
        )
        blobs = [blob for (blob,) in rows if isinstance(blob, bytes) and len(blob) % 4 == 0]
        return [token for blob in blobs for token in unpack_tokens(blob)][-self.CAP :]

    def append(self, conversation_id: str, fingerprint: str, tokens: Sequence[int]) -> None:
        """Append tokens to the log, and delete the chunks that lie completely before the cap."""
        with self._db.write() as handle:
            key = self._key(conversation_id, fingerprint)
            start = self._end(key)
            for offset in range(0, len(tokens), self.CHUNK):
                chunk = pack_tokens(tokens[offset : offset + self.CHUNK])
                handle.execute(
                    "INSERT INTO contexts (conversation, fingerprint, start, tokens) "
                    "VALUES (?, ?, ?, ?)",
                    (*key, start + offset, chunk),
                )
            oldest = start + len(tokens) - self.CAP
            handle.execute(
                "DELETE FROM contexts WHERE conversation = ? AND fingerprint = ? AND start < ? "
                "AND start + length(tokens) / 4 <= ?",
                (*key, oldest, oldest),
            )

    def size(self, conversation_id: str, fingerprint: str) -> int:
        key = self._key(conversation_id, fingerprint)
        (first,) = self._db.execute_read(
            "SELECT coalesce(min(start), 0) FROM contexts WHERE conversation = ? "
            "AND fingerprint = ?",
            key,
        )[0]
        return min(self.CAP, self._end(key) - int(first))

    def clear(self, conversation_id: str) -> None:
        self._conversations.get(conversation_id)
        self._db.execute_write("DELETE FROM contexts WHERE conversation = ?", [conversation_id])

    def _key(self, conversation_id: str, fingerprint: str) -> tuple[str, int]:
        self._conversations.get(conversation_id)
        return conversation_id, self._db.key("fingerprints", fingerprint)

    def _end(self, key: tuple[str, int]) -> int:
        rows = self._db.execute_read(
            "SELECT start + length(tokens) / 4 FROM contexts WHERE conversation = ? "
            "AND fingerprint = ? ORDER BY start DESC LIMIT 1",
            key,
        )
        return int(rows[0][0]) if rows else 0


class TextStore:
    """What an owner has read and the models have said, in the tokens of one tokenizer: the logs of
    all conversations, since past answers were last wiped."""

    CAP = 1 << 20
    """The number of tokens beyond which older ones are not returned."""

    def __init__(self, db: Database, owner: str, tokenizer: str = "") -> None:
        self._db = db
        self._key = (owner, tokenizer)

    def wipe(self) -> None:
        """Never return what is there now, of any tokenizer."""
        self._db.execute_write(
            "UPDATE owners SET wiped = (SELECT coalesce(max(rowid), 0) FROM contexts) "
            "WHERE name = ?",
            self._key[:1],
        )

    def load(self) -> Sequence[tuple[str, Sequence[int]]]:
        """The newest parts of logs, with their conversations, oldest first."""
        return [(conversation, unpack_tokens(blob)) for conversation, blob in self._chunks()][::-1]

    def place(self, tokens: Sequence[int], asked_in: str) -> tuple[str, str] | None:
        """The id and the title of the newest other conversation with these tokens among the newest
        parts of logs; None if there is none."""
        wanted = pack_tokens(tokens)
        where = "AND instr(tokens, ?) AND conversation <> ?"
        for conversation, blob in self._chunks(where, wanted, asked_in):
            if holds(blob, wanted):
                query = "SELECT title FROM conversations WHERE id = ?"
                (title,) = self._db.execute_read(query, [conversation])[0]
                return conversation, str(title)
        return None

    def _chunks(self, more: str = "", *values: bytes | str) -> Iterator[tuple[str, bytes]]:
        """The newest chunks of logs with their conversations, the newest first; damaged ones are
        skipped. `newer` is the number of bytes in newer ones; only sizes are read to find it."""
        rows = self._db.execute_read(
            "SELECT conversation, tokens FROM (SELECT contexts.rowid AS at, sum(length(tokens)) "
            "OVER (ORDER BY contexts.rowid DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) "
            "AS newer FROM contexts JOIN conversations ON conversations.id = conversation "
            "JOIN owners ON owners.id = owner "
            "JOIN fingerprints ON fingerprints.id = fingerprint "
            "WHERE owners.name = ? AND fingerprints.name = ? AND contexts.rowid > owners.wiped) "
            "CROSS JOIN contexts ON contexts.rowid = at "
            f"WHERE coalesce(newer, 0) < ? {more} ORDER BY at DESC",
            (*self._key, 4 * self.CAP, *values),
        )
        for conversation, blob in rows:
            if isinstance(blob, bytes) and len(blob) % 4 == 0:
                yield conversation, blob


class CalibrationStore:
    """How reliable each kind of evidence was in one owner's answers from one model, as counts.

    A file may come from anywhere, so an impossible row (a text in place of a number, an infinite
    number) is ignored, and its weight is learned again.
    """

    def __init__(self, db: Database, owner: str, fingerprint: str) -> None:
        self._db = db
        self._key = (db.key("owners", owner), db.key("fingerprints", fingerprint))

    def load(self) -> list[CalibrationRow]:
        rows = self._db.execute_read(
            "SELECT tier, match_length, strength, reached, trusted FROM calibrations "
            "WHERE owner = ? AND fingerprint = ?",
            self._key,
        )
        return [CalibrationRow(*row) for row in rows if _usable(*row)]

    def save(self, rows: Iterable[CalibrationRow]) -> None:
        with self._db.write() as handle:
            handle.execute(
                "DELETE FROM calibrations WHERE owner = ? AND fingerprint = ?", self._key
            )
            handle.conn.executemany(
                "INSERT INTO calibrations "
                "(owner, fingerprint, tier, match_length, strength, reached, trusted) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((*self._key, *row) for row in rows),
            )


def _usable(tier: Any, *numbers: Any) -> bool:
    """Whether the values are what `save` writes; SQLite itself takes any type in any column."""
    kinds = [int, int, int | float, int | float]
    return isinstance(tier, str) and all(
        isinstance(number, kind) and 0 <= number < inf
        for number, kind in zip(numbers, kinds, strict=True)
    )


class DraftingStore:
    """The store that the process of the model uses: see the module's docstring."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.report: Callable[[str, str], None] = lambda owner, notice: None
        self.writes = Writes(database, lambda owner, notice: self.report(owner, notice))

    @property
    def locked(self) -> str:
        return self.writes.locked

    @property
    def cap(self) -> int:
        return ContextStore.CAP

    def past(self, owner: str, fingerprint: str) -> Past:
        def read() -> Past:
            with self.database.read():
                wipes = self.database.wipes(owner)
                if None in (
                    self.database.find("owners", owner),
                    self.database.find("fingerprints", fingerprint),
                ):
                    return Past((), (), wipes)
                grams = tried(owner, ModelNgrams(self.database, owner, fingerprint).load)
                rows = tried(owner, CalibrationStore(self.database, owner, fingerprint).load)
                return Past(grams or (), rows, wipes)

        tried = self.writes.tried
        return tried(owner, read) or Past((), None, UNREAD)

    def texts(self, owner: str, tokenizer: str) -> Iterable[tuple[str, Sequence[int]]]:
        return self.writes.tried(owner, TextStore(self.database, owner, tokenizer).load) or ()

    def log(self, owner: str, conversation: str, tokenizer: str) -> Sequence[int]:
        def read() -> Sequence[int]:
            store = ContextStore(self.database, owner)
            return store.load(conversation, tokenizer) if store.has(conversation) else ()

        return self.writes.tried(owner, read) or ()

    def costs(self, key: tuple[str, str, str, str, int]) -> Costs | None:
        return CostStore(self.database, *key).load()

    def learn(self, taught: Taught) -> bool:
        """Store what was learned from an answer, at once or later. Returns whether copies of the
        past are out of date, because it was wiped or pruned."""
        outdated: list[bool] = []
        self.writes.do(taught.owner, lambda: outdated.append(self.write(taught)))
        return any(outdated)

    def write(self, taught: Taught) -> bool:
        owner, fingerprint = taught.owner, taught.fingerprint
        over = taught.size > MODEL_GRAMS * SLACK
        with self.database.write():
            wiped = self.database.wipes(owner) != taught.wipes
            if not wiped:
                ngrams = ModelNgrams(self.database, owner, fingerprint)
                ngrams.learn(taught.grams)
                if over:
                    ngrams.prune(MODEL_GRAMS)
                if taught.rows is not None:
                    CalibrationStore(self.database, owner, fingerprint).save(taught.rows)
            log = ContextStore(self.database, owner)
            if taught.tokens and log.has(taught.conversation):
                log.append(taught.conversation, taught.tokenizer, taught.tokens)
            if wiped:
                TextStore(self.database, owner).wipe()
        return wiped or over


def wipe(database: Database, owner: str, fingerprint: str | None = None) -> None:
    """Forget an owner's past answers from a model, or from all models. Running answers will not add
    to them either."""
    values = {"owner": database.key("owners", owner), "name": fingerprint}
    with database.write() as handle:
        for table in ("answers", "calibrations"):  # the n-grams go with the answers
            handle.execute(
                f"DELETE FROM {table} WHERE owner = :owner AND (:name IS NULL OR fingerprint = "
                "(SELECT id FROM fingerprints WHERE name = :name))",
                values,
            )
        handle.execute("UPDATE owners SET wipes = wipes + 1 WHERE id = :owner", values)
        TextStore(database, owner).wipe()


def lend(database: Database, owner: str | None, fingerprint: str) -> None:
    """Give BENCHMARK a copy of an owner's past answers; for None, an empty past."""
    with database.write():
        wipe(database, BENCHMARK)
        if owner is not None:
            known = ModelNgrams(database, owner, fingerprint)
            ModelNgrams(database, BENCHMARK, fingerprint).merge(known.learned(), known.load())
            rows = CalibrationStore(database, owner, fingerprint).load()
            CalibrationStore(database, BENCHMARK, fingerprint).save(rows)
