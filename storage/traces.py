"""Traces: the runs of answers and comparisons, kept so that they can be drawn again.

A run comes back equal to the one that was saved. One that is under way is saved with the steps that
there are, and extended by those that follow. A run that is damaged in the file raises
`StorageError` where it is asked for, and is left out of the history.
"""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import sqlite_utils

from engine.errors import StorageError
from engine.types import Learned, Prefill, Run, Step
from storage import steps as rows_of
from storage.conversations import Conversations
from storage.database import Database

Kind = Literal["chat", "compare"]
TRACE_COLUMNS = """runs.id, conversation, kind, model, fingerprints.name, method, emitted_tokens,
    decode_seconds, forwards, created, speedup, decode_speedup
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""
RUN_COLUMNS = """method, model, fingerprints.name, settings, prompt_tokens, reused_tokens,
    prefill_seconds, plain_prefill_seconds, learning_seconds
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""


@dataclass(frozen=True, slots=True)
class Trace:
    """A stored run as a line of the history: where it belongs, and sums of its steps.

    `speedup` (of whole answers) and `decode_speedup` are against a plain run of the same prompt,
    None where there was none or no gain to tell; `created` is in seconds since 1970, UTC.
    """

    id: str
    conversation_id: str | None
    kind: Kind
    model: str
    fingerprint: str
    method: str
    emitted_tokens: int
    decode_seconds: float
    forwards: int
    created: float
    speedup: float | None
    decode_speedup: float | None


class Traces:
    """One owner's runs."""

    KEPT = 2_000
    """The runs kept per owner, beside those of messages. Older ones are dropped with their steps.
    """

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)
        self._owner = db.key("owners", owner)

    def save(self, run: Run, conversation_id: str | None = None, kind: Kind = "chat") -> str:
        """Store a run in one transaction, and drop the oldest beyond `KEPT`. Returns its id.

        Raises `StorageError` for a conversation this owner does not have.
        """
        run_id, prefill = secrets.token_urlsafe(12), run.prefill or Prefill(0, 0)
        with self._db.write() as handle:
            handle.table("runs").insert(
                {
                    "id": run_id,
                    "owner": self._owner,
                    "conversation": self._owned(conversation_id),
                    "kind": kind,
                    "model": run.model,
                    "fingerprint": self._db.key("fingerprints", run.fingerprint),
                    "method": run.method,
                    "settings": json.dumps(dict(run.settings)),
                    "prompt_tokens": prefill.tokens,
                    "reused_tokens": prefill.reused,
                    "prefill_seconds": prefill.seconds,
                    "plain_prefill_seconds": prefill.plain_seconds,
                    "emitted_tokens": 0,
                    "decode_seconds": 0.0,
                    "forwards": 0,
                    "created": time.time(),
                }
            )
            self.extend(run_id, run.steps, run.learned)
            self._drop_oldest(handle)
        return run_id

    def extend(self, run_id: str, steps: Sequence[Step], learned: Learned | None = None) -> None:
        """Store further steps of a run, and what the drafters took to learn it where it is over.

        Raises `StorageError` for a run this owner does not have.
        """
        forwards = [step for step in steps if step.tokens]
        tokens = sum(len(step.tokens) for step in forwards)
        seconds = sum(step.seconds for step in forwards)
        learning = None if learned is None else learned.seconds
        with self._db.write() as handle:
            found = handle.execute(
                "UPDATE runs SET emitted_tokens = emitted_tokens + ?, forwards = forwards + ?, "
                "decode_seconds = decode_seconds + ?, learning_seconds = ? "
                "WHERE id = ? AND owner = ?",
                [tokens, len(forwards), seconds, learning, run_id, self._owner],
            )
            if not found.rowcount:
                raise self._missing(run_id)
            rows_of.insert(handle, run_id, steps)

    def note(self, run_id: str, speedup: float | None, decode_speedup: float | None) -> None:
        """Store what a run was worth, measured after it; nothing for a run that is gone."""
        with self._db.write() as handle:
            handle.execute(
                "UPDATE runs SET speedup = ?, decode_speedup = ? WHERE id = ? AND owner = ?",
                [speedup, decode_speedup, run_id, self._owner],
            )

    def get(self, run_id: str) -> Trace:
        """A run's line of the history; `StorageError` when this owner has none of that id."""
        return _trace(self._row(TRACE_COLUMNS, run_id))

    def load(self, run_id: str) -> Run:
        """A run as it was saved; `StorageError` when this owner has none of that id."""
        with self._db.read():
            row = self._row(RUN_COLUMNS, run_id)
            with _checked(run_id):
                method, model, fingerprint, settings, tokens, reused, *seconds, learning = row
                return Run(
                    method,
                    model,
                    fingerprint,
                    dict(json.loads(settings)),
                    Prefill(int(tokens), int(reused), float(seconds[0]), _known(seconds[1])),
                    rows_of.read(self._db, run_id),
                    None if learning is None else Learned(float(learning)),
                )

    def history(self, limit: int = 100) -> list[Trace]:
        """The newest `limit` runs, newest first."""
        query = (
            f"SELECT {TRACE_COLUMNS} WHERE owner = ? ORDER BY created DESC, runs.rowid DESC LIMIT ?"
        )
        found = []
        for row in self._db.execute_read(query, [self._owner, max(0, limit)]):
            with suppress(StorageError):
                found.append(_trace(row))
        return found

    def _row(self, columns: str, run_id: str) -> tuple[Any, ...]:
        query = f"SELECT {columns} WHERE runs.id = ? AND owner = ?"
        rows = self._db.execute_read(query, [run_id, self._owner])
        if not rows:
            raise self._missing(run_id)
        return rows[0]

    def _missing(self, run_id: str) -> StorageError:
        return StorageError(
            f"There is no run {run_id!r}. Only the newest {self.KEPT} are kept: pick another."
        )

    def _owned(self, conversation_id: str | None) -> str | None:
        """The id, after making sure that the conversation is this owner's."""
        return None if conversation_id is None else self._conversations.get(conversation_id).id

    def _drop_oldest(self, handle: sqlite_utils.Database) -> None:
        """A message reads its tokens from its run, so that one lives as long as the message."""
        handle.execute(
            "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE owner = ? "
            "ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?) "
            "AND NOT EXISTS (SELECT 1 FROM messages WHERE run = runs.id)",
            [self._owner, self.KEPT],
        )


MISSHAPEN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What reading stored values raises where they are not what was stored."""


@contextmanager
def _checked(run_id: object) -> Iterator[None]:
    try:
        yield
    except MISSHAPEN as error:
        raise StorageError(
            f"The run {run_id!r} is damaged in the database: its figures cannot be shown."
        ) from error


def _trace(row: tuple[Any, ...]) -> Trace:
    values = list(row)
    with _checked(row[0]):
        values[6:10] = int(row[6]), float(row[7]), int(row[8]), float(row[9])
        values[10:] = map(_known, row[10:])
    return Trace(*values)


def _known(value: Any) -> float | None:
    return None if value is None else float(value)
