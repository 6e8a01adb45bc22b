"""The steps of runs, one row each, and sums over them. Rows are appended and never changed, except
for the last step of an answer that is continued. Steps are the only place where an answer's tokens
are stored, with the text that each completes and its source.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import sqlite_utils

from engine.errors import StorageError
from engine.types import TARGET, Finish, Run, Step, Token
from storage.database import Database, as_text, from_json

COLUMNS = """position, tokens, proposed, accepted, by_depth, draft_seconds, verify_seconds,
    sample_seconds, other_seconds, plain_seconds, look_ups, levels, finish, tree, beside"""


class RunToken(NamedTuple):
    step: int
    id: int
    text: str


def insert(handle: sqlite_utils.Database, run_id: str, steps: Iterable[Step]) -> None:
    handle.conn.executemany(
        f"INSERT INTO steps (run, {COLUMNS}) VALUES ({', '.join('?' * 16)})",
        ((run_id, *_row(step)) for step in steps),
    )


def reopen(handle: sqlite_utils.Database, run_id: str, last: Step) -> None:
    query = "DELETE FROM steps WHERE run = ? AND position >= ?"
    handle.execute(query, [run_id, last.index])
    insert(handle, run_id, [last])


def read(db: Database, run_id: str, start: int = 0, limit: int = -1) -> tuple[Step, ...]:
    """The steps of a run, in order, from number `start` on, and at most `limit` of them unless it
    is -1. Damaged rows raise the exceptions of their conversion."""
    rows = db.execute_read(
        f"SELECT {COLUMNS} FROM steps WHERE run = ? ORDER BY position LIMIT ? OFFSET ?",
        [run_id, limit, start],
    )
    return tuple(map(_step, rows))


def run_tokens(db: Database, run_id: str) -> list[RunToken]:
    query = "SELECT position, tokens FROM steps WHERE run = ? ORDER BY position"
    found = parsed(db.execute_read(query, [run_id]))
    return [RunToken(step, int(id), str(text)) for step, (id, _, _, _, text, _) in found]


def tokens(db: Database, messages: str) -> dict[str, list[tuple[int, object]]]:
    """The stored tokens of the runs of messages, by run, as (step, JSON text). `messages` is a JSON
    list of message ids."""
    rows = db.execute_read(
        "SELECT run, position, tokens FROM steps WHERE run IN (SELECT run FROM messages "
        "WHERE id IN (SELECT value FROM json_each(?))) "
        "ORDER BY run, position",
        [messages],
    )
    found: dict[str, list[tuple[int, object]]] = {}
    for run_id, index, text in rows:
        found.setdefault(run_id, []).append((index, text))
    return found


def parsed(stored: Sequence[tuple[int, object]]) -> Iterator[tuple[int, list[Any]]]:
    """The tokens of a run, each with its step: id, position, source, match length, text and
    probability. Raises TypeError or ValueError for damaged ones."""
    # Parsing one joined text is five times as fast.
    steps = from_json(f"[{','.join(as_text(text) for _, text in stored)}]")
    for (index, _), rows in zip(stored, steps, strict=True):
        if not isinstance(rows, list):
            raise TypeError("no list of tokens")
        for row in rows:
            yield index, row


def _row(step: Step) -> tuple[Any, ...]:
    tokens = [
        [t.id, t.position, t.source, t.match_length, t.text, t.probability] for t in step.tokens
    ]
    counts = tokens, dict(step.proposed), dict(step.accepted), step.by_depth
    seconds = step.draft_seconds, step.verify_seconds, step.sample_seconds, step.other_seconds
    texts = [json.dumps(each) for each in (*counts, dict(step.look_ups), dict(step.levels))]
    times = *seconds, step.plain_seconds
    return (step.index, *texts[:4], *times, *texts[4:], step.finish, step.tree, step.beside)


def _step(row: tuple[Any, ...]) -> Step:
    index, tokens, proposed, accepted, by_depth, *rest, look_ups, levels, finish, tree, beside = row
    *seconds, plain = rest
    draft, verify, sample, other = map(float, seconds)
    return Step(
        index=int(index),
        tokens=tuple(
            Token(int(id), int(position), str(source), int(length), str(text), float(probability))
            for id, position, source, length, text, probability in json.loads(tokens)
        ),
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
        plain_seconds=None if plain is None else float(plain),
        tree=tree if isinstance(tree, bytes) else None,
        beside=int(beside),
    )


def _counts(text: str) -> dict[str, int]:
    return {name: int(count) for name, count in json.loads(text).items()}


# what charts show of a run

K = TypeVar("K", int, str)
POINTS = 400
"""The most points of a line. In a longer run, neighbouring steps share a point."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a run's line, which stands for one or several steps: seconds and tokens since the
    run began.

    `step` is the last of these steps. `source` is that of most of their drafted tokens, or the
    target if no token was drafted. The four times are means per step.
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
    """A run summarised for charts, of bounded size: sums over its steps, and a line of at most
    POINTS points.

    `steps` counts the steps that emitted tokens; `share` counts tokens by source, `lengths` steps
    by their tokens, `drafted` steps by the tokens drafted; `by_depth` holds (proposed, accepted)
    for depth 1, 2, ...
    """

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
"""The digest of an unknown run."""


def digest(run: Run) -> Digest:
    """The digest of a run. A step without tokens was cancelled and does not count, as in
    engine/metrics.py."""
    steps = [step for step in run.steps if step.tokens]
    proposed, accepted = Counter[str](), Counter[str]()
    proposed_at, accepted_at = Counter[int](), Counter[int]()
    for step in steps:
        proposed.update(step.proposed)
        accepted.update(step.accepted)
        for depth, (drafted, kept) in enumerate(step.by_depth):
            proposed_at[depth] += drafted
            accepted_at[depth] += kept
    return Digest(
        run.method,
        run.model,
        run.fingerprint,
        len(steps),
        sum(len(step.tokens) for step in steps),
        tuple(_line(steps)),
        _sorted(Counter(len(step.tokens) for step in steps)),
        _sorted(Counter(sum(step.proposed.values()) for step in steps)),
        _sorted(Counter(token.source for step in steps for token in step.tokens)),
        _sorted(proposed),
        _sorted(accepted),
        tuple((proposed_at[depth], accepted_at[depth]) for depth in range(len(proposed_at))),
    )


def _line(steps: Sequence[Step]) -> Iterator[Point]:
    shared: dict[int, list[Step]] = {}
    for number, step in enumerate(steps):
        point = number if len(steps) <= POINTS else number * POINTS // len(steps)
        shared.setdefault(point, []).append(step)
    seconds, tokens = 0.0, 0
    for group in shared.values():
        parts = ("draft_seconds", "verify_seconds", "sample_seconds", "other_seconds")
        times = [sum(getattr(step, part) for step in group) for part in parts]
        sources = [token.source for step in group for token in step.tokens]
        seconds, tokens = seconds + sum(times), tokens + len(sources)
        drafted = Counter(source for source in sources if source != TARGET)
        most = min(drafted, key=lambda source: (-drafted[source], source), default=TARGET)
        yield Point(group[-1].index, seconds, tokens, most, *(time / len(group) for time in times))


def _sorted(counts: Counter[K]) -> tuple[tuple[K, int], ...]:
    return tuple(sorted(counts.items()))


# what each source contributed

MOST_RUNS, MOST_STEPS = 500, 20_000
"""The number of latest answers, and of their steps together. The last answer always counts."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """What each source contributed to the latest `runs` answers of a model: tokens by source;
    tokens drafted and accepted, and seconds of look-ups, by source.

    The time that a single database saved is unknown, because its drafts are verified together with
    those of the others. The time that all of them saved is known: a step stores how long it took,
    and how long plain decoding would have taken for its tokens at that moment. For the `timed`
    tokens of the steps that have both, these sums are `spent` and `plain`.
    """

    runs: int
    tokens: Counter[str]
    drafted: Counter[str]
    accepted: Counter[str]
    look_ups: dict[str, float]
    timed: int
    spent: float
    plain: float


RECENT = """WITH recent AS (
    SELECT id FROM (
        SELECT id, forwards, sum(forwards) OVER (ORDER BY created DESC, rowid DESC) AS so_far
        FROM (
            SELECT rowid, id, forwards, created FROM runs
            WHERE owner = :owner AND fingerprint = :fingerprint AND kind = 'chat'
            AND method != 'plain' AND emitted_tokens > 0
            ORDER BY created DESC, rowid DESC LIMIT :runs
        )
    ) WHERE so_far <= :steps OR so_far = forwards
)"""
ANSWERS = f"{RECENT} SELECT count(*) FROM recent"
TOKENS = f"""{RECENT} SELECT json_extract(value, '$[2]') AS source, count(*)
    FROM steps, json_each(tokens) WHERE run IN recent GROUP BY source"""
COUNTS = f"""{RECENT} SELECT key, sum(value) FROM steps, json_each({{column}})
    WHERE run IN recent GROUP BY key"""
SECONDS = f"""{RECENT} SELECT coalesce(sum(json_array_length(tokens)), 0),
    coalesce(sum(draft_seconds + verify_seconds + sample_seconds + other_seconds), 0.0),
    coalesce(sum(plain_seconds), 0.0) FROM steps
    WHERE run IN recent AND plain_seconds IS NOT NULL AND json_array_length(tokens) > 0"""


def contributions(db: Database, owner: str, fingerprint: str) -> Contributions:
    """What each source contributed, added up by SQLite. Raises `StorageError` if the steps are
    damaged."""
    values = {
        "owner": db.key("owners", owner),
        "fingerprint": db.key("fingerprints", fingerprint),
        "runs": MOST_RUNS,
        "steps": MOST_STEPS,
    }
    try:
        with db.read():
            tokens = Counter({str(s): int(n) for s, n in db.execute_read(TOKENS, values)})
            drafted, accepted = (
                Counter({str(s): int(n) for s, n in db.execute_read(query, values)})
                for query in (COUNTS.format(column=name) for name in ("proposed", "accepted"))
            )
            look_ups = db.execute_read(COUNTS.format(column="look_ups"), values)
            ((timed, spent, plain),) = db.execute_read(SECONDS, values)
            ((runs,),) = db.execute_read(ANSWERS, values)
        seconds = {str(source): float(each) for source, each in look_ups}
        return Contributions(
            int(runs), tokens, drafted, accepted, seconds, int(timed), float(spent), float(plain)
        )
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise StorageError(
            "An answer is damaged in the database: the sources' contributions cannot be shown."
        ) from error
