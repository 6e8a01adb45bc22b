"""The steps of runs in the file: a row each, appended and never changed, but for the last one of an
answer that is gone on with.

They are the one place where an answer's tokens lie, with the text that each completes and the
source that it came from: charts and the token view read the same rows. The engine's values come
back equal to those that were stored, timings included.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import sqlite_utils

from engine.types import Finish, Step, Token
from storage.columns import as_text, from_json
from storage.database import Database


class Said(NamedTuple):
    """One token of a run: the step that emitted it, its number, its text."""

    step: int
    id: int
    text: str


def insert(handle: sqlite_utils.Database, run_id: str, steps: Iterable[Step]) -> None:
    """Store further steps of a run."""
    handle.conn.executemany(
        "INSERT INTO steps (run, position, tokens, proposed, accepted, by_depth, "
        "draft_seconds, verify_seconds, sample_seconds, other_seconds, plain_seconds, look_ups, "
        "levels, finish, tree) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((run_id, *_row(step)) for step in steps),
    )


def reopen(handle: sqlite_utils.Database, run_id: str, last: Step) -> None:
    """Have a run end with this step, so that others can follow it."""
    query = "DELETE FROM steps WHERE run = ? AND position >= ?"
    handle.execute(query, [run_id, last.index])
    insert(handle, run_id, [last])


def read(db: Database, run_id: str, start: int = 0, limit: int = -1) -> tuple[Step, ...]:
    """The steps of a run, in order; from number `start` on, where `limit` is not -1 at most so
    many. Raises whatever rows that were not stored here lead to."""
    rows = db.execute_read(
        "SELECT position, tokens, proposed, accepted, by_depth, draft_seconds, verify_seconds, "
        "sample_seconds, other_seconds, plain_seconds, look_ups, levels, finish, tree FROM steps "
        "WHERE run = ? ORDER BY position LIMIT ? OFFSET ?",
        [run_id, limit, start],
    )
    return tuple(map(_step, rows))


def said(db: Database, run_id: str) -> list[Said]:
    """The tokens of a run, in order. Raises whatever damaged rows lead to."""
    query = "SELECT position, tokens FROM steps WHERE run = ? ORDER BY position"
    found = parsed(db.execute_read(query, [run_id]))
    return [Said(step, int(id), str(text)) for step, (id, _, _, _, text, _) in found]


def tokens(db: Database, messages: str) -> dict[str, list[tuple[int, object]]]:
    """What the file holds of the tokens of messages' runs: by run, of each of its steps. The ids
    are a JSON list."""
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
    # As one text they are read five times as fast.
    steps = from_json(f"[{','.join(as_text(text) for _, text in stored)}]")
    for (index, _), rows in zip(stored, steps, strict=True):
        if not isinstance(rows, list):
            raise TypeError("no list of tokens")
        for row in rows:
            yield index, row


def _row(step: Step) -> tuple[Any, ...]:
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
        step.plain_seconds,
        json.dumps(dict(step.look_ups)),
        json.dumps(dict(step.levels)),
        step.finish,
        step.tree,
    )


def _step(row: tuple[Any, ...]) -> Step:
    index, tokens, proposed, accepted, by_depth, *rest, look_ups, levels, finish, tree = row
    *seconds, plain = rest
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
        plain_seconds=None if plain is None else float(plain),
        tree=tree if isinstance(tree, bytes) else None,
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


def _counts(text: str) -> dict[str, int]:
    return {name: int(count) for name, count in json.loads(text).items()}
