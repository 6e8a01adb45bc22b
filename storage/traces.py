"""Traces: what each run did, step by step, so that its charts can be drawn again.

The steps of a run come back equal to those that were saved, timings included. A run that is damaged
in the file raises `StorageError` where it is asked for, and is left out of the history.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import sqlite_utils

from engine.errors import StorageError
from engine.types import Finish, Step, Token
from storage.conversations import Conversations
from storage.database import Database

Kind = Literal["chat", "compare"]
RUN_COLUMNS = """runs.id, conversation, model, fingerprints.name, method, settings, prompt_tokens,
    emitted_tokens, reused_tokens, ttft_seconds, decode_seconds, forwards, finish, created,
    speedup, decode_speedup, kind FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer as it was decoded, without its steps.

    `reused_tokens` of the prompt were in the cache already; `decode_seconds` is the time of all
    steps; `speedup` (of whole answers) and `decode_speedup` are against a plain run of the same
    prompt, None where there was none or no gain to tell; `created` is in seconds since 1970, UTC.
    """

    id: str
    conversation_id: str | None
    model: str
    fingerprint: str
    method: str
    settings: dict[str, Any]
    prompt_tokens: int
    emitted_tokens: int
    reused_tokens: int
    ttft_seconds: float
    decode_seconds: float
    forwards: int
    finish: Finish | None
    created: float
    speedup: float | None
    decode_speedup: float | None
    kind: Kind


class Traces:
    """One owner's runs."""

    KEPT = 2_000
    """The runs kept per owner; older ones are dropped with their steps."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)
        self._owner = db.key("owners", owner)

    def save(
        self,
        *,
        conversation_id: str | None,
        model: str,
        fingerprint: str,
        method: str,
        settings: Mapping[str, Any],
        prompt_tokens: int,
        emitted_tokens: int,
        reused_tokens: int,
        ttft_seconds: float,
        decode_seconds: float,
        forwards: int,
        finish: Finish | None,
        steps: Sequence[Step],
        speedup: float | None = None,
        decode_speedup: float | None = None,
        kind: Kind = "chat",
    ) -> Run:
        """Store a run with its steps, in one transaction, and drop the oldest beyond `KEPT`.

        Raises `StorageError` for a conversation this owner does not have.
        """
        run_id = secrets.token_urlsafe(12)
        with self._db.write() as handle:
            handle.table("runs").insert(
                {
                    "id": run_id,
                    "owner": self._owner,
                    "conversation": self._owned(conversation_id),
                    "kind": kind,
                    "model": model,
                    "fingerprint": self._db.key("fingerprints", fingerprint),
                    "method": method,
                    "settings": json.dumps(dict(settings)),
                    "prompt_tokens": prompt_tokens,
                    "emitted_tokens": emitted_tokens,
                    "reused_tokens": reused_tokens,
                    "ttft_seconds": ttft_seconds,
                    "decode_seconds": decode_seconds,
                    "forwards": forwards,
                    "finish": finish,
                    "speedup": speedup,
                    "decode_speedup": decode_speedup,
                    "created": time.time(),
                }
            )
            self._insert_steps(handle, run_id, steps)
            self._drop_oldest(handle)
            return self.get(run_id)

    def note(self, run_id: str, speedup: float | None, decode_speedup: float | None) -> None:
        """Store what a run was worth, measured after it; nothing for a run that is gone."""
        with self._db.write() as handle:
            handle.execute(
                "UPDATE runs SET speedup = ?, decode_speedup = ? WHERE id = ? AND owner = ?",
                [speedup, decode_speedup, run_id, self._owner],
            )

    def get(self, run_id: str) -> Run:
        """One run; `StorageError` when this owner has none of that id."""
        query = f"SELECT {RUN_COLUMNS} WHERE runs.id = ? AND owner = ?"
        rows = self._db.execute_read(query, [run_id, self._owner])
        if not rows:
            raise StorageError(
                f"There is no run {run_id!r}. Only the newest {self.KEPT} are kept: pick another."
            )
        return _run(rows[0])

    def history(self, limit: int = 100) -> list[Run]:
        """The newest `limit` runs, newest first."""
        query = (
            f"SELECT {RUN_COLUMNS} WHERE owner = ? ORDER BY created DESC, runs.rowid DESC LIMIT ?"
        )
        found = []
        for row in self._db.execute_read(query, [self._owner, max(0, limit)]):
            with suppress(StorageError):
                found.append(_run(row))
        return found

    def steps(self, run_id: str) -> list[Step]:
        """The run's steps, in order; `StorageError` when this owner has no such run."""
        self.get(run_id)
        rows = self._db.execute_read(
            "SELECT position, tokens, proposed, accepted, by_depth, draft_seconds, verify_seconds, "
            "sample_seconds, other_seconds, look_ups, levels, finish FROM steps WHERE run = ? "
            "ORDER BY position",
            [run_id],
        )
        with _checked(run_id):
            return [_step(row) for row in rows]

    def _owned(self, conversation_id: str | None) -> str | None:
        """The id, after making sure that the conversation is this owner's."""
        return None if conversation_id is None else self._conversations.get(conversation_id).id

    def _insert_steps(
        self, handle: sqlite_utils.Database, run_id: str, steps: Sequence[Step]
    ) -> None:
        handle.conn.executemany(
            "INSERT INTO steps (run, position, tokens, proposed, accepted, by_depth, "
            "draft_seconds, verify_seconds, sample_seconds, other_seconds, look_ups, levels, "
            "finish) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            ((run_id, *_step_row(step)) for step in steps),
        )

    def _drop_oldest(self, handle: sqlite_utils.Database) -> None:
        handle.execute(
            "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE owner = ? "
            "ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?)",
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


def _run(row: tuple[Any, ...]) -> Run:
    values = list(row)
    with _checked(row[0]):
        values[5] = dict(json.loads(row[5]))
        values[6:9] = map(int, row[6:9])
        values[9:12] = float(row[9]), float(row[10]), int(row[11])
        values[13] = float(row[13])
        values[14] = None if row[14] is None else float(row[14])
    return Run(*values)


def _step_row(step: Step) -> tuple[Any, ...]:
    tokens = [
        [token.id, token.position, token.source, token.match_length, token.text, token.probability]
        for token in step.tokens
    ]
    return (
        step.index,
        json.dumps(tokens),
        json.dumps(dict(step.proposed)),
        json.dumps(dict(step.accepted)),
        json.dumps(step.by_depth),
        step.draft_seconds,
        step.verify_seconds,
        step.sample_seconds,
        step.other_seconds,
        json.dumps(dict(step.look_ups)),
        json.dumps(dict(step.levels)),
        step.finish,
    )


def _token(
    id: int, position: int, source: str, match_length: int, text: str, probability: float
) -> Token:
    """A token from its stored values, whose order is fixed however the class may grow."""
    return Token(
        id=int(id),
        position=int(position),
        source=str(source),
        match_length=int(match_length),
        text=str(text),
        probability=float(probability),
    )


def _step(row: tuple[Any, ...]) -> Step:
    index, tokens, proposed, accepted, by_depth, *seconds, look_ups, levels, finish = row
    draft, verify, sample, other = map(float, seconds)
    return Step(
        index=int(index),
        tokens=tuple(_token(*values) for values in json.loads(tokens)),
        proposed=_counts(proposed),
        accepted=_counts(accepted),
        by_depth=tuple((int(depth[0]), int(depth[1])) for depth in json.loads(by_depth)),
        draft_seconds=draft,
        verify_seconds=verify,
        sample_seconds=sample,
        other_seconds=other,
        look_ups={name: float(value) for name, value in json.loads(look_ups).items()},
        levels={name: (int(n[0]), int(n[1]), int(n[2])) for name, n in json.loads(levels).items()},
        finish=cast(Finish | None, finish),
    )


def _counts(text: str) -> dict[str, int]:
    return {name: int(count) for name, count in json.loads(text).items()}
