"""Benchmarks: what was asked, by which methods, and every single result, stored as soon as it is
there. So one that is cancelled, or whose program ended, goes on where it stopped.

What is read may have been damaged: a benchmark that cannot be raises `StorageError` where it is
asked for, and is left out of the list; a result that cannot be counts as not measured yet.
"""

import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engine.errors import StorageError
from engine.types import Question
from storage.columns import clean, from_json, to_json
from storage.database import Database, pack_tokens, unpack_tokens
from storage.traces import MISSHAPEN

COLUMNS = """benchmarks.id, title, model, fingerprints.name, machine, version, asked, plan, runs,
    created, (SELECT count(*) FROM results WHERE benchmark = benchmarks.id)
    FROM benchmarks JOIN fingerprints ON fingerprints.id = fingerprint"""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark as a line of the list.

    `asked` names its set of questions (`engine.questions.digest`), `plan` holds the methods and
    settings as JSON values. `done` of its `runs` are over. `created` is in seconds since 1970, UTC.
    """

    id: str
    title: str
    model: str
    fingerprint: str
    machine: str
    version: str
    asked: str
    plan: Mapping[str, Any]
    runs: int
    created: float
    done: int


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the question at `position`, by a method, for the `repeat`-th time from 0.

    `first_seconds` is the time until the model had its first token. `disturbed`: other work went on
    meanwhile. `problem` says why there is no answer, "" where there is one.
    """

    position: int
    method: str
    repeat: int
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    kept: int = 0
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    learning_seconds: float = 0.0
    disturbed: bool = False
    problem: str = ""
    answer: tuple[int, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Wall time of the whole answer."""
        return self.prefill_seconds + self.decode_seconds + self.learning_seconds


class Benchmarks:
    """One owner's benchmarks."""

    KEPT = 100
    """So many are kept. Older ones are dropped with their results."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._owner = db.key("owners", owner)

    def create(
        self,
        title: str,
        model: str,
        fingerprint: str,
        machine: str,
        version: str,
        asked: str,
        plan: Mapping[str, Any],
        questions: Sequence[Question],
        runs: int,
    ) -> str:
        """Store a benchmark that is to be made; returns its id."""
        made = secrets.token_urlsafe(12)
        with self._db.write() as handle:
            handle.execute(
                "INSERT INTO benchmarks (id, owner, title, model, fingerprint, machine, version, "
                "asked, plan, runs, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    made,
                    self._owner,
                    clean(title),
                    clean(model),
                    self._db.key("fingerprints", fingerprint),
                    machine,
                    version,
                    asked,
                    to_json(plan),
                    runs,
                    time.time(),
                ],
            )
            handle.conn.executemany(
                "INSERT INTO questions (benchmark, position, name, category, text) "
                "VALUES (?, ?, ?, ?, ?)",
                (
                    (made, at, clean(each.id), clean(each.category), clean(each.text))
                    for at, each in enumerate(questions)
                ),
            )
            handle.execute(
                "DELETE FROM benchmarks WHERE id IN (SELECT id FROM benchmarks WHERE owner = ? "
                "ORDER BY created DESC, rowid DESC LIMIT -1 OFFSET ?)",
                [self._owner, self.KEPT],
            )
        return made

    def add(self, benchmark: str, result: Result) -> None:
        """Store a result, in the place of one that was damaged."""
        self.get(benchmark)
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO results (benchmark, position, method, repeat, tokens, "
                "forwards, drafted, kept, prefill_seconds, first_seconds, decode_seconds, "
                "learning_seconds, disturbed, problem, answer) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    benchmark,
                    result.position,
                    clean(result.method),
                    result.repeat,
                    result.tokens,
                    result.forwards,
                    result.drafted,
                    result.kept,
                    result.prefill_seconds,
                    result.first_seconds,
                    result.decode_seconds,
                    result.learning_seconds,
                    int(result.disturbed),
                    clean(result.problem),
                    pack_tokens(result.answer),
                ],
            )

    def list(self, limit: int = KEPT) -> Sequence[Benchmark]:
        """The newest benchmarks, newest first."""
        found = []
        for row in self._db.execute_read(
            f"SELECT {COLUMNS} WHERE owner = ? ORDER BY created DESC, benchmarks.rowid DESC "
            "LIMIT ?",
            [self._owner, limit],
        ):
            with suppress(StorageError):
                found.append(_benchmark(row))
        return found

    def get(self, benchmark: str) -> Benchmark:
        """A benchmark; `StorageError` when this owner has none of that id."""
        rows = self._db.execute_read(
            f"SELECT {COLUMNS} WHERE benchmarks.id = ? AND owner = ?", [benchmark, self._owner]
        )
        if not rows:
            raise StorageError(
                f"There is no benchmark {benchmark!r}. Only the newest {self.KEPT} are kept: "
                "choose another."
            )
        return _benchmark(rows[0])

    def questions(self, benchmark: str) -> tuple[Question, ...]:
        """What it asks, in order."""
        rows = self._db.execute_read(
            "SELECT name, category, text FROM questions WHERE benchmark = ? ORDER BY position",
            [self.get(benchmark).id],
        )
        return tuple(Question(*map(str, row)) for row in rows)

    def results(self, benchmark: str) -> tuple[Result, ...]:
        """What there is of it by now, question by question."""
        rows = self._db.execute_read(
            "SELECT position, method, repeat, tokens, forwards, drafted, kept, prefill_seconds, "
            "first_seconds, decode_seconds, learning_seconds, disturbed, problem, answer "
            "FROM results WHERE benchmark = ? ORDER BY position, repeat, method",
            [self.get(benchmark).id],
        )
        return tuple(result for row in rows if (result := _result(row)) is not None)


def _benchmark(row: tuple[Any, ...]) -> Benchmark:
    plan = from_json(row[7])
    try:
        if not isinstance(plan, Mapping):
            raise TypeError(f"a plan that is {plan!r}")
        title, model, fingerprint, machine, version, asked = map(str, row[1:7])
        return Benchmark(
            str(row[0]),
            title,
            model,
            fingerprint,
            machine,
            version,
            asked,
            plan,
            int(row[8]),
            float(row[9]),
            int(row[10]),
        )
    except MISSHAPEN as error:
        raise StorageError(
            f"The benchmark {row[0]!r} is damaged in the database: it cannot be shown."
        ) from error


def _result(row: tuple[Any, ...]) -> Result | None:
    """A result; None for one that is damaged."""
    position, method, repeat, *counts = row[:7]
    try:
        place, turn, tokens, forwards, drafted, kept = map(int, (position, repeat, *counts))
        prefill, first, decode, learning = map(float, row[7:11])
        if min(place, turn, tokens, forwards, drafted, kept, prefill, first, decode, learning) < 0:
            return None
        return Result(
            place,
            str(method),
            turn,
            tokens,
            forwards,
            drafted,
            kept,
            prefill,
            first,
            decode,
            learning,
            bool(row[11]),
            str(row[12]),
            unpack_tokens(row[13]),
        )
    except (*MISSHAPEN, struct.error):
        return None
