"""Traces: the runs of answers and comparisons, kept so that they can be drawn again.

A run comes back equal to the one that was saved. One that is under way is saved with the steps that
there are, and extended by those that follow. A run that is damaged in the file raises
`StorageError` where it is asked for, and is left out of the history.
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
from storage import digests
from storage import steps as rows_of
from storage.columns import as_text, from_json, to_json
from storage.conversations import Conversations
from storage.database import Database, pack_tokens, unpack_tokens
from storage.steps import Said

Kind = Literal["chat", "compare"]
TRACE_COLUMNS = """runs.id, conversation, kind, model, fingerprints.name, method, emitted_tokens,
    decode_seconds, forwards, created, speedup, decode_speedup
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""
MATCHING = """owner = :owner
    AND (:model IS NULL OR model = :model) AND (:method IS NULL OR method = :method)
    AND (:conversation IS NULL OR conversation = :conversation)
    AND (:kind IS NULL OR kind = :kind) AND created >= :since"""
NEWEST_FIRST = "ORDER BY created DESC, runs.rowid DESC"
TREND = f"""WITH numbered AS (
    SELECT id, method = 'plain' AS plain, emitted_tokens, decode_seconds, speedup,
    row_number() OVER (ORDER BY created, rowid) - 1 AS number, count(*) OVER () AS count
    FROM runs WHERE {MATCHING} AND emitted_tokens > 0 AND decode_seconds > 0
) SELECT id, plain, max(number), count(*), sum(emitted_tokens) / sum(decode_seconds), avg(speedup)
FROM numbered GROUP BY number * min(count, :points) / count, plain ORDER BY max(number)"""
RUN_COLUMNS = """method, model, fingerprints.name, settings, prompt_tokens, reused_tokens,
    prefill_seconds, plain_prefill_seconds, learning_seconds
    FROM runs JOIN fingerprints ON fingerprints.id = fingerprint"""
PARTS = """SELECT position, method, model, fingerprints.name, settings, prompt_tokens,
    reused_tokens, prefill_seconds, plain_prefill_seconds
    FROM parts JOIN fingerprints ON fingerprints.id = fingerprint WHERE run = ? ORDER BY position"""


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


@dataclass(frozen=True, slots=True)
class Filter:
    """Which runs: all of them but for what is given. `since` is in seconds since 1970, UTC."""

    model: str | None = None
    method: str | None = None
    conversation: str | None = None
    kind: Kind | None = None
    since: float = 0.0


ALL = Filter()


class Asked(NamedTuple):
    """What a run answered, as far as it is stored: the title of its conversation, the system
    prompt that this has now, and (role, text) of the messages before the answer."""

    title: str
    system_prompt: str
    messages: list[tuple[str, str]]


class Mark(NamedTuple):
    """Runs that are next to each other in time, as one point of a chart: the number of the newest
    one and its id, how many they are, tokens per second of all, the mean of the known speedups."""

    id: str
    plain: bool
    number: int
    runs: int
    speed: float
    speedup: float | None


class Worth(NamedTuple):
    """What the run of an answer came to: its tokens, those of them that were guessed, the seconds
    of the whole answer, and what plain decoding would have taken at the same load; None where that
    is not known. `proof` is what a proof in the background found, {} where there was none. `thinks`
    says that the answer begins within thinking, as the chat template had begun that. `known` says
    whether it is known which tokens were guessed: a server need not tell."""

    tokens: int
    guessed: int
    seconds: float
    plain_seconds: float | None
    proof: Mapping[str, Any]
    thinks: bool = False
    known: bool = True


class Traces:
    """One owner's runs."""

    KEPT = 2_000
    """The runs kept per owner, beside those of messages. Older ones are dropped with their steps.
    """
    LOOKED_AT = 32
    """Of those that are too old, as many are looked at when a run is saved."""
    PROMPTS = 200
    """The runs per owner of which the prompt's tokens are kept: 4 bytes each."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._conversations = Conversations(db, owner)
        self._owner = db.key("owners", owner)

    def save(
        self,
        run: Run,
        conversation_id: str | None = None,
        kind: Kind = "chat",
        prompt: Sequence[int] = (),
    ) -> str:
        """Store a run in one transaction, and drop the oldest beyond `KEPT`. Returns its id. With
        the tokens of its prompt it can be gone on with to the token.

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
                    "accepted_tokens": 0,
                    "plain_seconds": 0.0,
                    "decode_seconds": 0.0,
                    "forwards": 0,
                    "created": time.time(),
                }
            )
            self.extend(run_id, run.steps, run.learned)
            for part in run.parts:
                self._keep_part(handle, run_id, part)
            self._keep_prompt(handle, run_id, 0, prompt)
            self._drop_oldest(handle)
        return run_id

    def extend(self, run_id: str, steps: Sequence[Step], learned: Learned | None = None) -> None:
        """Store further steps of a run, and what the drafters took to learn it where it is over.

        Raises `StorageError` for a run this owner does not have.
        """
        forwards = [step for step in steps if step.tokens]
        tokens = sum(len(step.tokens) for step in forwards)
        accepted = sum(sum(step.accepted.values()) for step in forwards)
        seconds = sum(step.seconds for step in forwards)
        plain = [step.plain_seconds for step in forwards]
        # A sum that lacks one step is none: NULL stays NULL whatever is added.
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
            rows_of.insert(handle, run_id, steps)

    def go_on(self, run_id: str, last: Step, part: Part, prompt: Sequence[int] = ()) -> str:
        """Store that a run goes on behind this step, which is its last one with tokens.

        `prompt` are the tokens in front of the part, where these are not those of the run so far.
        Returns the id of the run that goes on: a copy, where another message has this one. Raises
        `StorageError` for a run this owner does not have.
        """
        with self._db.write() as handle:
            self._row("runs.id FROM runs", run_id)
            query = "SELECT count(*) FROM messages WHERE run = ?"
            if self._db.execute_read(query, [run_id])[0][0] > 1:
                run_id = _copy(handle, run_id)
            rows_of.reopen(handle, run_id, last)
            # What was proved is the beginning of another answer now.
            handle.execute("UPDATE runs SET proof = NULL WHERE id = ?", [run_id])
            self._keep_part(handle, run_id, part)
            self._keep_prompt(handle, run_id, part.step, prompt)
        return run_id

    def prompt(self, run_id: str) -> tuple[int, tuple[int, ...]] | None:
        """The newest prompt of a run that is kept: the number of the step behind it, its tokens."""
        self._row("runs.id FROM runs", run_id)
        query = "SELECT position, tokens FROM prompts WHERE run = ? ORDER BY position DESC LIMIT 1"
        for position, blob in self._db.execute_read(query, [run_id]):
            if isinstance(blob, bytes) and blob and len(blob) % 4 == 0:
                return int(position), unpack_tokens(blob)
        return None

    def note(self, run_id: str, speedup: float | None, decode_speedup: float | None) -> None:
        """Store what a run was worth, measured after it; nothing for a run that is gone."""
        with self._db.write() as handle:
            handle.execute(
                "UPDATE runs SET speedup = ?, decode_speedup = ? WHERE id = ? AND owner = ?",
                [speedup, decode_speedup, run_id, self._owner],
            )

    def tell_counts(self, run_id: str, counted: Mapping[str, int | None]) -> None:
        """Store what the counters of the server told that a run came from."""
        with self._db.write() as handle:
            handle.execute(
                "UPDATE runs SET settings = json_set(settings, '$.server.counted', json(?)) "
                "WHERE id = ? AND owner = ? AND json_valid(settings)",
                [json.dumps(dict(counted)), run_id, self._owner],
            )

    def prove(self, run_id: str, proof: Mapping[str, Any]) -> None:
        """Store what a proof of a run found, as JSON can hold it; nothing where that is gone."""
        with self._db.write() as handle:
            handle.execute(
                "UPDATE runs SET proof = ? WHERE id = ? AND owner = ?",
                [to_json(dict(proof)), run_id, self._owner],
            )

    def worths(self, conversation_id: str) -> dict[str, Worth]:
        """What the answers of a conversation came to, by run; a damaged one is left out."""
        found = {}
        for run_id, *row in self._db.execute_read(
            "SELECT id, emitted_tokens, accepted_tokens, prefill_seconds + decode_seconds + "
            "coalesce(learning_seconds, 0), coalesce(plain_prefill_seconds, prefill_seconds) + "
            "plain_seconds, proof, CASE WHEN json_valid(settings) "
            "THEN json_extract(settings, '$.thinks') END, CASE WHEN json_valid(settings) "
            "THEN coalesce(json_extract(settings, '$.server.sources'), 1) END "
            "FROM runs WHERE conversation = ? AND owner = ?",
            [conversation_id, self._owner],
        ):
            with suppress(*MISSHAPEN):
                tokens, guessed, seconds, plain, proof, thinks, known = row
                told = from_json(proof)
                worth = int(tokens), int(guessed), float(seconds), _known(plain)
                proved = told if isinstance(told, dict) else {}
                found[run_id] = Worth(*worth, proved, bool(thinks), known != 0)
        return found

    def speaker(self, run_id: str) -> str:
        """The fingerprint of the model that gave a run's answer; "" where several did."""
        trace = self.get(run_id)
        query = (
            "SELECT name FROM parts JOIN fingerprints ON fingerprints.id = fingerprint "
            "WHERE run = ? AND name != ?"
        )
        others = self._db.execute_read(query, [run_id, trace.fingerprint])
        return "" if others else trace.fingerprint

    def said(self, run_id: str) -> list[Said]:
        """The tokens of a run, in order."""
        with self._db.read():
            self._row("runs.id FROM runs", run_id)
            with _checked(run_id):
                return rows_of.said(self._db, run_id)

    def get(self, run_id: str) -> Trace:
        """A run's line of the history; `StorageError` when this owner has none of that id."""
        return _trace(self._row(TRACE_COLUMNS, run_id))

    def load(self, run_id: str, steps: bool = True) -> Run:
        """A run as it was saved, or without its steps; `StorageError` when this owner has none of
        that id."""
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
                    rows_of.read(self._db, run_id) if steps else (),
                    None if learning is None else Learned(float(learning)),
                    tuple(_part(*each) for each in self._db.execute_read(PARTS, [run_id])),
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

    def page(self, chosen: Filter = ALL, start: int = 0, limit: int = -1) -> list[Trace]:
        """The runs of a filter from number `start` on, newest first; all where `limit` is -1. One
        that is damaged in the file is left out."""
        query = f"SELECT {TRACE_COLUMNS} WHERE {MATCHING} {NEWEST_FIRST} LIMIT :limit OFFSET :start"
        values = {**self._values(chosen), "limit": limit, "start": max(0, start)}
        found = []
        for row in self._db.execute_read(query, values):
            with suppress(StorageError):
                found.append(_trace(row))
        return found

    def count(self, chosen: Filter = ALL) -> int:
        """How many runs a filter lets through."""
        query = f"SELECT count(*) FROM runs WHERE {MATCHING}"
        return int(self._db.execute_read(query, self._values(chosen))[0][0])

    def trend(self, chosen: Filter = ALL) -> list[Mark]:
        """How fast the runs of a filter were, oldest first: at most `digests.POINTS` of each kind,
        plain and with drafts."""
        values = {**self._values(chosen), "points": digests.POINTS}
        return [
            Mark(id, bool(plain), int(number), int(runs), float(speed), _known(speedup))
            for id, plain, number, runs, speed, speedup in self._db.execute_read(TREND, values)
        ]

    def names(self, column: Literal["model", "method", "kind"]) -> list[str]:
        """The models, methods or kinds that there are runs of."""
        query = f"SELECT DISTINCT {column} FROM runs WHERE owner = ? ORDER BY {column}"
        return [str(name) for (name,) in self._db.execute_read(query, [self._owner])]

    def conversations(self, most: int) -> list[tuple[str, str]]:
        """The conversations that there are runs of, as (id, title); used last first."""
        query = (
            "SELECT id, title FROM conversations WHERE owner = ? AND EXISTS (SELECT 1 FROM runs "
            "WHERE conversation = conversations.id) ORDER BY updated DESC LIMIT ?"
        )
        rows = self._db.execute_read(query, [self._owner, most])
        return [(str(id), as_text(title)) for id, title in rows]

    def asked(self, run_id: str) -> Asked | None:
        """What a run answered; None for one that no message belongs to any more, or never did."""
        with self._db.read():
            self.get(run_id)
            found = self._db.execute_read(
                "SELECT conversation, messages.id FROM messages JOIN conversations "
                "ON conversations.id = conversation WHERE run = ? AND owner = ? LIMIT 1",
                [run_id, self._owner],
            )
            if not found:
                return None
            id, message_id = map(str, found[0])
            place = self._conversations.get(id)
            *before, _ = self._conversations.messages(id, False, message_id)
        messages = [(message.role, message.content) for message in before]
        return Asked(place.title, place.system_prompt, messages)

    def digest(self, run_id: str) -> digests.Digest:
        """What charts show of a run."""
        with self._db.read():
            trace = self.get(run_id)
            name = trace.method, trace.model, trace.fingerprint
            return digests.summed(self._db, run_id, *name)

    def steps(self, run_id: str, start: int = 0, limit: int = -1) -> tuple[Step, ...]:
        """The steps of a run from number `start` on."""
        with self._db.read():
            self.get(run_id)
            with _checked(run_id):
                return rows_of.read(self._db, run_id, max(0, start), limit)

    def step_count(self, run_id: str) -> int:
        """How many steps are stored of a run."""
        self.get(run_id)
        query = "SELECT count(*) FROM steps WHERE run = ?"
        return int(self._db.execute_read(query, [run_id])[0][0])

    def _values(self, chosen: Filter) -> dict[str, Any]:
        """A filter as the parameters of a query."""
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

    def _owned(self, conversation_id: str | None) -> str | None:
        """The id, after making sure that the conversation is this owner's."""
        return None if conversation_id is None else self._conversations.get(conversation_id).id

    def _keep_part(self, handle: sqlite_utils.Database, run_id: str, part: Part) -> None:
        handle.table("parts").insert(
            {
                "run": run_id,
                "position": part.step,
                "model": part.model,
                "fingerprint": self._db.key("fingerprints", part.fingerprint),
                "method": part.method,
                "settings": json.dumps(dict(part.settings)),
                "prompt_tokens": part.prefill.tokens,
                "reused_tokens": part.prefill.reused,
                "prefill_seconds": part.prefill.seconds,
                "plain_prefill_seconds": part.prefill.plain_seconds,
                "created": time.time(),
            },
            replace=True,
        )

    def _keep_prompt(
        self, handle: sqlite_utils.Database, run_id: str, step: int, tokens: Sequence[int]
    ) -> None:
        """Keep the tokens in front of a step. Only those of the newest runs stay."""
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
        """A message reads its tokens from its run, so that one lives as long as the message.

        With each run that is saved one becomes too old, so the first of those that are will do. To
        look at all of them took as long as an answer, where there were tens of thousands.
        """
        handle.execute(
            "DELETE FROM runs WHERE id IN (SELECT id FROM runs WHERE owner = ? "
            "ORDER BY created DESC, rowid DESC LIMIT ? OFFSET ?) "
            "AND NOT EXISTS (SELECT 1 FROM messages WHERE run = runs.id)",
            [self._owner, self.LOOKED_AT, self.KEPT],
        )


def _copy(handle: sqlite_utils.Database, run_id: str) -> str:
    """Copy a run with all that belongs to it; the copy's id."""
    copy = secrets.token_urlsafe(12)
    for table, key in (("runs", "id"), ("steps", "run"), ("parts", "run"), ("prompts", "run")):
        others = [column.name for column in handle.table(table).columns if column.name != key]
        names = ", ".join(others)
        handle.execute(
            f"INSERT INTO {table} ({key}, {names}) SELECT ?, {names} FROM {table} WHERE {key} = ?",
            [copy, run_id],
        )
    return copy


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


def _prefill(tokens: Any, reused: Any, seconds: Any, plain: Any) -> Prefill:
    return Prefill(int(tokens), int(reused), float(seconds), _known(plain))


def _part(step: Any, method: str, model: str, fingerprint: str, settings: str, *read: Any) -> Part:
    return Part(int(step), method, model, fingerprint, dict(json.loads(settings)), _prefill(*read))


def _known(value: Any) -> float | None:
    return None if value is None else float(value)
