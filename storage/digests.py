"""What charts show of a run, however long it is: sums over its steps, and at most POINTS points.

A stored run is summed up by SQLite, so that its steps need not be read into the program: of a run
of thousands of steps a page gets as much as of one of four hundred. `digest` makes the same of a
run in memory, and both agree. A step without tokens was cancelled and does not count, as in
engine/metrics.py.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from engine.errors import StorageError
from engine.types import TARGET, Run, Step
from storage.database import Database

K = TypeVar("K", int, str)

POINTS = 400
"""The most points of a line. Of a longer run neighbouring steps share one."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run after one or some more of its steps: seconds and tokens since it began.

    `step` is the last of these steps, `source` that of most of their drafted tokens, the target's
    where none was. The four times are means per step.
    """

    step: int
    seconds: float
    tokens: int
    source: str
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Digest:
    """See the module's docstring. `steps` counts what emitted tokens; `share` counts tokens by
    source, `lengths` steps by their tokens, `drafted` steps by the tokens drafted; `by_depth` holds
    (proposed, accepted) for depth 1, 2, ..."""

    method: str = "plain"
    model: str = ""
    fingerprint: str = ""
    steps: int = 0
    tokens: int = 0
    line: tuple[Point, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    drafted: tuple[tuple[int, int], ...] = ()
    share: tuple[tuple[str, int], ...] = ()
    proposed: tuple[tuple[str, int], ...] = ()
    accepted: tuple[tuple[str, int], ...] = ()
    by_depth: tuple[tuple[int, int], ...] = ()


NOTHING = Digest()
"""Of a run of which nothing is known."""


def digest(run: Run) -> Digest:
    """The digest of a run in memory."""
    steps = [step for step in run.steps if step.tokens]
    proposed, accepted = Counter[str](), Counter[str]()
    depths: list[tuple[int, int]] = []
    for step in steps:
        proposed.update(step.proposed)
        accepted.update(step.accepted)
        for at, (drafted, kept) in enumerate(step.by_depth):
            before = depths.pop(at) if at < len(depths) else (0, 0)
            depths.insert(at, (before[0] + drafted, before[1] + kept))
    groups: dict[int, list[Step]] = {}
    for i, step in enumerate(steps):
        groups.setdefault(group(i, len(steps)), []).append(step)
    return Digest(
        run.method,
        run.model,
        run.fingerprint,
        len(steps),
        sum(len(step.tokens) for step in steps),
        tuple(_line([_summed(group) for group in groups.values()])),
        _sorted(Counter(len(step.tokens) for step in steps)),
        _sorted(Counter(sum(step.proposed.values()) for step in steps)),
        _sorted(Counter(token.source for step in steps for token in step.tokens)),
        _sorted(proposed),
        _sorted(accepted),
        tuple(depths),
    )


def group(number: int, count: int) -> int:
    """The point that a step belongs to, of a run of so many."""
    return number if count <= POINTS else number * POINTS // count


Group = tuple[int, int, int, Sequence[float], Counter[str]]
"""Steps that share a point: the last one, how many, their tokens, the sums of the four times, and
the drafted tokens by source."""


def _summed(steps: Sequence[Step]) -> Group:
    times = zip(
        *((s.draft_seconds, s.verify_seconds, s.sample_seconds, s.other_seconds) for s in steps),
        strict=True,
    )
    tokens = [token for step in steps for token in step.tokens]
    drafted = Counter(token.source for token in tokens if token.source != TARGET)
    return steps[-1].index, len(steps), len(tokens), [*map(sum, times)], drafted


def _line(groups: Sequence[Group]) -> Iterable[Point]:
    """The points of the groups, in their order."""
    seconds = accumulate(sum(times) for _, _, _, times, _ in groups)
    tokens = accumulate(count for _, _, count, _, _ in groups)
    for (step, count, _, times, drafted), after, said in zip(groups, seconds, tokens, strict=True):
        most = min(drafted, key=lambda source: (-drafted[source], source), default=TARGET)
        yield Point(step, after, said, most, *(each / count for each in times))


def _sorted(counts: Counter[K]) -> tuple[tuple[K, int], ...]:
    return tuple(sorted(counts.items()))


NUMBERED = """WITH numbered AS (
    SELECT position, tokens, proposed, accepted, by_depth, draft_seconds, verify_seconds,
    sample_seconds, other_seconds, json_array_length(tokens) AS emitted,
    row_number() OVER (ORDER BY position) - 1 AS number, count(*) OVER () AS count
    FROM steps WHERE run = :run AND json_array_length(tokens) > 0
), placed AS (
    SELECT *, CASE WHEN count <= :points THEN number ELSE number * :points / count END AS point
    FROM numbered
)"""
LINE = f"""{NUMBERED} SELECT point, max(position), count(*), sum(emitted), sum(draft_seconds),
    sum(verify_seconds), sum(sample_seconds), sum(other_seconds) FROM placed GROUP BY point"""
SOURCES = f"""{NUMBERED} SELECT point, json_extract(value, '$[2]') AS source, count(*)
    FROM placed, json_each(tokens) GROUP BY point, source"""
DRAFTED = """SELECT (SELECT coalesce(sum(value), 0) FROM json_each(proposed)) AS drafted, count(*)
    FROM steps WHERE run = :run AND json_array_length(tokens) > 0 GROUP BY drafted"""
LENGTHS = """SELECT json_array_length(tokens) AS emitted, count(*) FROM steps
    WHERE run = :run AND emitted > 0 GROUP BY emitted"""
COUNTS = """SELECT key, sum(value) FROM steps, json_each({column})
    WHERE run = :run AND json_array_length(tokens) > 0 GROUP BY key ORDER BY key"""
DEPTHS = """SELECT sum(json_extract(value, '$[0]')), sum(json_extract(value, '$[1]'))
    FROM steps, json_each(by_depth)
    WHERE run = :run AND json_array_length(tokens) > 0 GROUP BY key ORDER BY key"""


def summed(db: Database, run_id: str, method: str, model: str, fingerprint: str) -> Digest:
    """The digest of the steps that are stored of a run. Raises `StorageError` where they are
    damaged."""
    values = {"run": run_id, "points": POINTS}
    try:
        said, drafted = Counter[str](), dict[int, Counter[str]]()
        for point, source, count in db.execute_read(SOURCES, values):
            said[str(source)] += count
            if source != TARGET:
                drafted.setdefault(point, Counter())[str(source)] = count
        groups: list[Group] = [
            (last, count, emitted, times, drafted.get(point, Counter()))
            for point, last, count, emitted, *times in db.execute_read(LINE, values)
        ]
        proposed, accepted = (
            tuple(
                (str(key), int(count))
                for key, count in db.execute_read(COUNTS.format(column=column), values)
            )
            for column in ("proposed", "accepted")
        )
        return Digest(
            method,
            model,
            fingerprint,
            sum(count for _, count, *_ in groups),
            sum(emitted for _, _, emitted, *_ in groups),
            tuple(_line(groups)),
            tuple(db.execute_read(LENGTHS, values)),
            tuple((int(n), count) for n, count in db.execute_read(DRAFTED, values)),
            _sorted(said),
            proposed,
            accepted,
            tuple((int(a), int(b)) for a, b in db.execute_read(DEPTHS, values)),
        )
    except (sqlite3.Error, TypeError, ValueError, ArithmeticError) as error:
        raise StorageError(
            f"The run {run_id!r} is damaged in the database: its figures cannot be shown."
        ) from error
