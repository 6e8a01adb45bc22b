"""Benchmarks: their questions, their methods and their results.

Each result is stored at once, so a benchmark that was cancelled, or whose program ended, continues
where it stopped.

Stored rows may be damaged. Reading a damaged benchmark raises `StorageError`, and it is left out of
the list; a damaged result counts as not measured yet.
"""

import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from engine.errors import StorageError
from engine.text import well_formed
from engine.types import Question
from storage.database import Database, from_json, pack_tokens, to_json, unpack_tokens
from storage.traces import MISSHAPEN

COLUMNS = """title, model, fingerprints.name, machine, version, asked, plan, runs, benchmarks.id,
    created, (SELECT count(*) FROM results WHERE benchmark = benchmarks.id)
    FROM benchmarks JOIN fingerprints ON fingerprints.id = fingerprint"""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark as a line of the list.

    `asked` identifies its set of questions (`engine.questions.digest`), `plan` holds the methods
    and settings as JSON values. `done` of its `runs` are finished. `created` is in seconds since
    1970, UTC.
    """

    title: str
    model: str
    fingerprint: str
    machine: str
    version: str
    asked: str
    plan: Mapping[str, Any]
    runs: int
    id: str = ""
    created: float = 0.0
    done: int = 0

    @property
    def label(self) -> str:
        weights = self.plan.get("weights")
        return f"{self.model} ({weights})" if isinstance(weights, str) and weights else self.model


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the question at `position`, by a method, for the `repeat`-th time from 0.

    `first_seconds` is the time until the model had its first token. `disturbed`: other work ran at
    the same time. `problem` says why there is no answer, "" if there is one.
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


RESULT_COLUMNS = ", ".join(each.name for each in fields(Result))


class Benchmarks:
    KEPT = 100
    """The number of benchmarks kept. Older ones are deleted with their results."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._owner = db.key("owners", owner)

    def create(self, new: Benchmark, questions: Sequence[Question]) -> str:
        """Store a benchmark without results, under an id and a time of its own; returns the id."""
        made, row = secrets.token_urlsafe(12), asdict(new)
        del row["done"]
        row |= {"id": made, "owner": self._owner, "created": time.time()}
        row |= {"title": well_formed(new.title), "model": well_formed(new.model)}
        with self._db.write() as handle:
            key = self._db.key("fingerprints", new.fingerprint)
            row |= {"fingerprint": key, "plan": to_json(new.plan)}
            handle.table("benchmarks").insert(row)
            handle.conn.executemany(
                "INSERT INTO questions (benchmark, position, name, category, text) "
                "VALUES (?, ?, ?, ?, ?)",
                (
                    (made, at, *map(well_formed, (each.id, each.category, each.text)))
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
        """Store a result, replacing a damaged one."""
        self.get(benchmark)
        with self._db.write() as handle:
            handle.table("results").insert(
                {
                    "benchmark": benchmark,
                    **asdict(result),
                    "method": well_formed(result.method),
                    "problem": well_formed(result.problem),
                    "answer": pack_tokens(result.answer),
                },
                replace=True,
            )

    def list(self, limit: int = KEPT) -> Sequence[Benchmark]:
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
        rows = self._db.execute_read(
            "SELECT name, category, text FROM questions WHERE benchmark = ? ORDER BY position",
            [self.get(benchmark).id],
        )
        return tuple(Question(*map(str, row)) for row in rows)

    def results(self, benchmark: str) -> tuple[Result, ...]:
        rows = self._db.execute_read(
            f"SELECT {RESULT_COLUMNS} FROM results WHERE benchmark = ? "
            "ORDER BY position, repeat, method",
            [self.get(benchmark).id],
        )
        return tuple(result for row in rows if (result := _result(row)) is not None)


def _benchmark(row: tuple[Any, ...]) -> Benchmark:
    *texts, plan, runs, id, created, done = row
    found = from_json(plan)
    try:
        if not isinstance(found, Mapping):
            raise TypeError(f"a plan that is {found!r}")
        numbers = int(runs), str(id), float(created), int(done)
        values: list[Any] = [*map(str, texts), found, *numbers]
        return Benchmark(*values)
    except MISSHAPEN as error:
        raise StorageError(
            f"The benchmark {id!r} is damaged in the database: it cannot be shown."
        ) from error


def _result(row: tuple[Any, ...]) -> Result | None:
    position, method, repeat, *numbers, disturbed, problem, answer = row
    try:
        counts = [int(count) for count in (position, repeat, *numbers[:4])]
        seconds = [float(number) for number in numbers[4:]]
        if min(*counts, *seconds) < 0:
            return None
        values: list[Any] = [
            *(counts[0], str(method), *counts[1:], *seconds),
            *(bool(disturbed), str(problem), unpack_tokens(answer)),
        ]
        return Result(*values)
    except (*MISSHAPEN, struct.error):
        return None
