"""Traces: the runs of answers and comparisons, stored so that they can be drawn again.

A run that is read back equals the one that was saved. A run in progress is saved with its steps so
far, and extended by later steps. Reading a damaged run raises `StorageError`; the history leaves
it out.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import sqlite_utils

from engine.errors import StorageError
from engine.types import Learned, Part, Prefill, Run, Step
from storage import steps as step_rows
from storage.conversations import Conversations
from storage.database import Database, as_text, from_json, pack_tokens, to_json, unpack_tokens
from storage.exported import MAX_TITLE
from storage.steps import RunToken

Kind = Literal["chat", "compare"]
WEIGHTS = """coalesce(
    CASE WHEN json_valid(settings) THEN json_extract(settings, '$.weights') END,
    (SELECT min(kind || ', ' || dtype) FROM costs WHERE costs.fingerprint = runs.fingerprint
    HAVING count(DISTINCT kind || dtype) = 1), '')"""
"""The library that ran a model, and the type of its weights. For older runs, which do not contain
them, they are taken from the measured costs of the same model, if there are any."""
LABEL = f"model || coalesce(' (' || nullif({WEIGHTS}, '') || ')', '')"
"""The name of a model that distinguishes its formats: `Trace.label` in SQL."""
TRACE_COLUMNS = f"""runs.id, conversation, kind, model, fingerprints.name, method, emitted_tokens,
    decode_seconds, forwards, created, speedup, decode_speedup, {WEIGHTS}
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""
MATCHING = f"""owner = :owner
    AND (:model IS NULL OR {LABEL} = :model) AND (:method IS NULL OR method = :method)
    AND (:conversation IS NULL OR conversation = :conversation)
    AND (:kind IS NULL OR kind = :kind) AND created >= :since"""
NEWEST_FIRST = "ORDER BY created DESC, runs.rowid DESC"
TREND = f"""WITH chosen AS (
    SELECT id, method = 'plain' AS plain, {LABEL} AS label, emitted_tokens, decode_seconds, speedup,
    row_number() OVER (ORDER BY created, rowid) - 1 AS number
    FROM runs WHERE {MATCHING} AND emitted_tokens > 0 AND decode_seconds > 0
), placed AS (
    SELECT *, row_number() OVER series - 1 AS place,
    count(*) OVER (PARTITION BY label, plain) AS count,
    max(1, :points / (SELECT count(DISTINCT label) FROM chosen)) AS points
    FROM chosen WINDOW series AS (PARTITION BY label, plain ORDER BY number)
) SELECT id, plain, max(number), count(*), sum(emitted_tokens) / sum(decode_seconds), avg(speedup),
label FROM placed GROUP BY label, plain, place * min(count, points) / count ORDER BY max(number)"""
RUN_COLUMNS = """method, model, fingerprints.name, settings, prompt_tokens, reused_tokens,
    prefill_seconds, plain_prefill_seconds, learning_seconds
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""
SUMS = ("emitted_tokens", "accepted_tokens", "plain_seconds", "decode_seconds", "forwards")
"""The sums over its steps that a run begins with."""
PARTS = """SELECT position, method, model, fingerprints.name, settings, prompt_tokens,
    reused_tokens, prefill_seconds, plain_prefill_seconds
    FROM parts JOIN fingerprints ON fingerprints.id = fingerprint WHERE run = ? ORDER BY position"""


@dataclass(frozen=True, slots=True)
class Trace:
    """A stored run as a line of the history: where it belongs, and sums over its steps.

    `speedup` (of whole answers) and `decode_speedup` are relative to a plain run of the same
    prompt, None if there was no such run or no meaningful gain; `created` is in seconds since 1970,
    UTC. `weights` is the library that ran the model and the type of its weights, "" if unknown.
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
    weights: str = ""

    @property
    def label(self) -> str:
        return f"{self.model} ({self.weights})" if self.weights else self.model


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of runs. Fields that are not given select all; `model` is a `Trace.label`; `since`
    is in seconds since 1970, UTC."""

    model: str | None = None
    method: str | None = None
    conversation: str | None = None
    kind: Kind | None = None
    since: float = 0.0


ALL = Filter()


class StoredPrompt(NamedTuple):
    """The conversation that a run answered: its title, its current system prompt, and (role, text)
    of the messages before the answer."""

    title: str
    system_prompt: str
    messages: list[tuple[str, str]]


class Mark(NamedTuple):
    """Consecutive runs of one model as one point of a chart: the id and number of the newest run,
    the number of runs, tokens per second over all of them, the mean of the known speedups, and the
    `Trace.label` of the model."""

    id: str
    plain: bool
    number: int
    runs: int
    speed: float
    speedup: float | None
    label: str = ""


class Worth(NamedTuple):
    """Figures of the run of an answer: its tokens, how many of them were guessed, the seconds of
    the whole answer, and the seconds of plain decoding under the same load, None if unknown.

    `proof` is the result of a background proof, {} if there was none. `thinks` says that the answer
    begins inside thinking, because the chat template opened it; `marks` begin thinking of its
    model, none if that is not known. `known` says whether the guessed tokens are known; a server
    may not report them. `json` says that the answer was bound to JSON.
    """

    tokens: int
    guessed: int
    seconds: float
    plain_seconds: float | None
    proof: Mapping[str, Any]
    thinks: bool = False
    known: bool = True
    marks: Sequence[str] = ()
    json: bool = False


class Traces:
    KEPT = 2_000
    """The number of runs kept per owner, in addition to those of messages. Older ones are deleted
    with their steps."""
    LOOKED_AT = 32
    """How many of the runs beyond `KEPT` are examined when a run is saved."""
    PROMPTS = 200
    """The number of runs per owner whose prompt tokens are kept, 4 bytes each."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)
        self._owner = self._conversations.owner_id

    def save(
        self,
        run: Run,
        conversation_id: str | None = None,
        kind: Kind = "chat",
        prompt: Sequence[int] = (),
    ) -> str:
        """Store a run in one transaction, and delete the oldest beyond `KEPT`. Returns its id. With
        the tokens of its prompt, the run can later be continued exactly.

        Raises `StorageError` for a conversation this owner does not have.
        """
        if conversation_id is not None:
            self._conversations.get(conversation_id)
        run_id = secrets.token_urlsafe(12)
        with self._db.write() as handle:
            handle.table("runs").insert(
                {
                    "id": run_id,
                    "owner": self._owner,
                    "conversation": conversation_id,
                    "kind": kind,
                    **self._origin(run, run.prefill or Prefill(0, 0)),
                    **dict.fromkeys(SUMS, 0),
                }
            )
            self.extend(run_id, run.steps, run.learned)
            for part in run.parts:
                self._keep_part(handle, run_id, part)
            self._keep_prompt(handle, run_id, 0, prompt)
            self._drop_oldest(handle)
        return run_id

    def extend(self, run_id: str, steps: Sequence[Step], learned: Learned | None = None) -> None:
        """Append steps to a run. `learned`, given at its end, is the time that the drafters took to
        learn from it.

        Raises `StorageError` for a run this owner does not have.
        """
        forwards = [step for step in steps if step.tokens]
        tokens = sum(len(step.tokens) for step in forwards)
        accepted = sum(sum(step.accepted.values()) for step in forwards)
        seconds = sum(step.seconds for step in forwards)
        plain = [step.plain_seconds for step in forwards]
        # A sum without one of the steps would be wrong, and NULL stays NULL in later additions.
        known = None if None in plain else sum(filter(None, plain))
        learning = None if learned is None else learned.seconds
        with self._db.write() as handle:
            found = handle.execute(
                "UPDATE runs SET emitted_tokens = emitted_tokens + ?, "
                "accepted_tokens = accepted_tokens + ?, forwards = forwards + ?, "
                "decode_seconds = decode_seconds + ?, plain_seconds = plain_seconds + ?, "
                "learning_seconds = ? WHERE id = ? AND owner = ?",
                [tokens, accepted, len(forwards), seconds, known, learning, run_id, self._owner],
            )
            if not found.rowcount:
                raise self._missing(run_id)
            step_rows.insert(handle, run_id, steps)

    def continue_run(self, run_id: str, last: Step, part: Part, prompt: Sequence[int] = ()) -> str:
        """Prepare a run to be continued after this step, its last one with tokens.

        `prompt` holds the tokens before the new part, if they differ from those of the run so far.
        Returns the id of the run to extend: a copy if another message has this run as well. Raises
        `StorageError` for a run this owner does not have.
        """
        with self._db.write() as handle:
            self._row("runs.id FROM runs", run_id)
            query = "SELECT count(*) FROM messages WHERE run = ?"
            if self._db.execute_read(query, [run_id])[0][0] > 1:
                run_id = _copy(handle, run_id)
            step_rows.reopen(handle, run_id, last)
            # The proof was that of the shorter answer.
            handle.execute("UPDATE runs SET proof = NULL WHERE id = ?", [run_id])
            self._keep_part(handle, run_id, part)
            self._keep_prompt(handle, run_id, part.step, prompt)
        return run_id

    def prompt(self, run_id: str) -> tuple[int, tuple[int, ...]] | None:
        """The newest stored prompt of a run: the number of the step after it, and the tokens."""
        self._row("runs.id FROM runs", run_id)
        query = "SELECT position, tokens FROM prompts WHERE run = ? ORDER BY position DESC LIMIT 1"
        for position, blob in self._db.execute_read(query, [run_id]):
            if isinstance(blob, bytes) and blob and len(blob) % 4 == 0:
                return int(position), unpack_tokens(blob)
        return None

    def note(self, run_id: str, speedup: float | None, decode_speedup: float | None) -> None:
        """Store the speedup of a run, measured later; does nothing if the run is gone."""
        self._update(run_id, "speedup = ?, decode_speedup = ?", speedup, decode_speedup)

    def store_counts(self, run_id: str, counted: Mapping[str, int | None]) -> None:
        counts = (
            "CASE WHEN json_valid(settings) THEN json_set(settings, '$.server.counted', json(?))"
        )
        self._update(run_id, f"settings = {counts} ELSE settings END", json.dumps(dict(counted)))

    def prove(self, run_id: str, proof: Mapping[str, Any]) -> None:
        """Store the result of a proof of a run, a JSON value; does nothing if the run is gone."""
        self._update(run_id, "proof = ?", to_json(dict(proof)))

    def worths(self, conversation_id: str) -> dict[str, Worth]:
        """The figures of the answers of a conversation, by run; damaged ones are left out."""
        found = {}
        for run_id, *row in self._db.execute_read(
            "SELECT id, emitted_tokens, accepted_tokens, prefill_seconds + decode_seconds + "
            "coalesce(learning_seconds, 0), coalesce(plain_prefill_seconds, prefill_seconds) + "
            "plain_seconds, proof, json_extract(valid, '$.thinks'), "
            "coalesce(json_extract(valid, '$.server.sources'), 1), json_extract(valid, '$.marks'), "
            "json_extract(valid, '$.generation.format.kind') FROM (SELECT *, "
            "CASE WHEN json_valid(settings) THEN settings ELSE '{}' END AS valid FROM runs) "
            "WHERE conversation = ? AND owner = ?",
            [conversation_id, self._owner],
        ):
            with suppress(*MISSHAPEN):
                tokens, guessed, seconds, plain, proof, thinks, known, marks, form = row
                numbers = int(tokens), int(guessed), float(seconds), _known(plain)
                proved = from_json(proof)
                proved = proved if isinstance(proved, dict) else {}
                begins = tuple(mark for mark in from_json(marks or "[]") if isinstance(mark, str))
                said = bool(thinks), known != 0, begins, form == "json_schema"
                found[run_id] = Worth(*numbers, proved, *said)
        return found

    def model_fingerprint(self, run_id: str) -> str:
        """The fingerprint of the model that answered; "" if several models did."""
        trace = self.get(run_id)
        query = (
            "SELECT name FROM parts JOIN fingerprints ON fingerprints.id = fingerprint "
            "WHERE run = ? AND name != ?"
        )
        others = self._db.execute_read(query, [run_id, trace.fingerprint])
        return "" if others else trace.fingerprint

    def tokens(self, run_id: str) -> list[RunToken]:
        with self._db.read():
            self._row("runs.id FROM runs", run_id)
            with _checked(run_id):
                return step_rows.run_tokens(self._db, run_id)

    def get(self, run_id: str) -> Trace:
        return _trace(self._row(TRACE_COLUMNS, run_id))

    def load(self, run_id: str) -> Run:
        """A run as it was saved. Raises `StorageError` if this owner has no such run."""
        with self._db.read():
            row = self._row(RUN_COLUMNS, run_id)
            with _checked(run_id):
                method, model, fingerprint, settings, *read, learning = row
                return Run(
                    method,
                    model,
                    fingerprint,
                    dict(json.loads(settings)),
                    _prefill(*read),
                    step_rows.read(self._db, run_id),
                    None if learning is None else Learned(float(learning)),
                    tuple(_part(*each) for each in self._db.execute_read(PARTS, [run_id])),
                )

    def history(self, limit: int = 100) -> list[Trace]:
        return self.page(limit=max(0, limit))

    def page(self, chosen: Filter = ALL, start: int = 0, limit: int = -1) -> list[Trace]:
        """The runs of a filter from number `start` on, newest first; all of them if `limit` is -1.
        A damaged run is left out."""
        query = f"SELECT {TRACE_COLUMNS} WHERE {MATCHING} {NEWEST_FIRST} LIMIT :limit OFFSET :start"
        values = {**self._values(chosen), "limit": limit, "start": max(0, start)}
        found = []
        for row in self._db.execute_read(query, values):
            with suppress(StorageError):
                found.append(_trace(row))
        return found

    def count(self, chosen: Filter = ALL) -> int:
        query = f"SELECT count(*) FROM runs WHERE {MATCHING}"
        return int(self._db.execute_read(query, self._values(chosen))[0][0])

    def matches(self, run_id: str, chosen: Filter) -> bool:
        query = f"SELECT 1 FROM runs WHERE {MATCHING} AND id = :id"
        return bool(self._db.execute_read(query, {**self._values(chosen), "id": run_id}))

    def trend(self, chosen: Filter = ALL) -> list[Mark]:
        """The speeds of the runs of a filter, oldest first: about `steps.POINTS` points each for
        plain and drafted runs, shared among the models. A point never mixes two models."""
        values = {**self._values(chosen), "points": step_rows.POINTS}
        return [
            Mark(id, bool(plain), int(number), int(runs), float(speed), _known(speedup), label)
            for id, plain, number, runs, speed, speedup, label in self._db.execute_read(
                TREND, values
            )
        ]

    def names(self, column: Literal["model", "method", "kind"]) -> list[str]:
        """The models, methods or kinds of the stored runs; models as `Trace.label`."""
        named = LABEL if column == "model" else column
        query = f"SELECT DISTINCT {named} AS name FROM runs WHERE owner = ? ORDER BY name"
        return [str(name) for (name,) in self._db.execute_read(query, [self._owner])]

    def conversations(self, most: int) -> list[tuple[str, str]]:
        """The conversations with runs, as (id, title), the most recently used first."""
        query = (
            "SELECT id, title FROM conversations WHERE owner = ? AND EXISTS (SELECT 1 FROM runs "
            "WHERE conversation = conversations.id) ORDER BY updated DESC LIMIT ?"
        )
        rows = self._db.execute_read(query, [self._owner, most])
        return [(str(id), as_text(title)) for id, title in rows]

    def stored_prompt(self, run_id: str) -> StoredPrompt | None:
        """The conversation that a run answered; None if the run has no message (any more)."""
        with self._db.read():
            self.get(run_id)
            found = self._db.execute_read(
                "SELECT conversation, messages.id, title, system_prompt FROM messages "
                "JOIN conversations ON conversations.id = conversation "
                "WHERE run = ? AND owner = ? LIMIT 1",
                [run_id, self._owner],
            )
            if not found:
                return None
            id, message_id, title, system_prompt = map(as_text, found[0])
            *before, _ = self._conversations.messages(id, False, message_id)
        messages = [(message.role, message.content) for message in before]
        return StoredPrompt(title[:MAX_TITLE], system_prompt, messages)

    def steps(self, run_id: str, start: int = 0, limit: int = -1) -> tuple[Step, ...]:
        with self._db.read():
            self.get(run_id)
            with _checked(run_id):
                return step_rows.read(self._db, run_id, max(0, start), limit)

    def step_count(self, run_id: str) -> int:
        self.get(run_id)
        query = "SELECT count(*) FROM steps WHERE run = ?"
        return int(self._db.execute_read(query, [run_id])[0][0])

    def _update(self, run_id: str, columns: str, *values: object) -> None:
        query = f"UPDATE runs SET {columns} WHERE id = ? AND owner = ?"
        self._db.execute_write(query, [*values, run_id, self._owner])

    def _values(self, chosen: Filter) -> dict[str, Any]:
        return {**asdict(chosen), "owner": self._owner}

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

    def _origin(self, run: Run | Part, prefill: Prefill) -> dict[str, Any]:
        return {
            "model": run.model,
            "fingerprint": self._db.key("fingerprints", run.fingerprint),
            "method": run.method,
            "settings": json.dumps(dict(run.settings)),
            "prompt_tokens": prefill.tokens,
            "reused_tokens": prefill.reused,
            "prefill_seconds": prefill.seconds,
            "plain_prefill_seconds": prefill.plain_seconds,
            "created": time.time(),
        }

    def _keep_part(self, handle: sqlite_utils.Database, run_id: str, part: Part) -> None:
        row = {"run": run_id, "position": part.step, **self._origin(part, part.prefill)}
        handle.table("parts").insert(row, replace=True)

    def _keep_prompt(
        self, handle: sqlite_utils.Database, run_id: str, step: int, tokens: Sequence[int]
    ) -> None:
        """Store the tokens before a step. Only those of the newest runs are kept."""
        if not tokens:
            return
        handle.execute(
            "INSERT OR REPLACE INTO prompts (run, position, tokens) VALUES (?, ?, ?)",
            [run_id, step, pack_tokens(tokens)],
        )
        handle.execute(
            "DELETE FROM prompts WHERE (SELECT owner FROM runs WHERE id = run) = :owner "
            "AND run NOT IN (SELECT id FROM runs WHERE owner = :owner "
            "ORDER BY created DESC, rowid DESC LIMIT :most)",
            {"owner": self._owner, "most": self.PROMPTS},
        )

    def _drop_oldest(self, handle: sqlite_utils.Database) -> None:
        """Delete the oldest runs beyond `KEPT`, except runs of messages, which read their tokens
        from them.

        Each saved run makes one run too old, so examining the first few is enough. Examining all
        of tens of thousands of runs took as long as an answer.
        """
        handle.execute(
            "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE owner = ? "
            "ORDER BY created DESC, rowid DESC LIMIT ? OFFSET ?) "
            "AND NOT EXISTS (SELECT 1 FROM messages WHERE run = runs.id)",
            [self._owner, self.LOOKED_AT, self.KEPT],
        )


def _copy(handle: sqlite_utils.Database, run_id: str) -> str:
    copy = secrets.token_urlsafe(12)
    for table, key in (("runs", "id"), ("steps", "run"), ("parts", "run"), ("prompts", "run")):
        others = [column.name for column in handle.table(table).columns if column.name != key]
        names = ", ".join(others)
        handle.execute(
            f"INSERT INTO {table} ({key}, {names}) SELECT ?, {names} FROM {table} WHERE {key} = ?",
            [copy, run_id],
        )
    return copy


MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading stored values raises if they are damaged."""


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
        values[10:12] = map(_known, row[10:12])
        values[12] = str(row[12])
    return Trace(*values)


def _prefill(tokens: Any, reused: Any, seconds: Any, plain: Any) -> Prefill:
    return Prefill(int(tokens), int(reused), float(seconds), _known(plain))


def _part(step: Any, method: str, model: str, fingerprint: str, settings: str, *read: Any) -> Part:
    return Part(int(step), method, model, fingerprint, dict(json.loads(settings)), _prefill(*read))


def _known(value: Any) -> float | None:
    return None if value is None else float(value)
