"""What each source brought to a model's latest answers, summed up where their steps are stored.

What a database saved in seconds cannot be told: its drafts are verified together with those of the
others. What all of them saved can. A step knows how long plain decoding would have taken for its
tokens at that moment (`plain_seconds`), and how long it took. Their difference is summed up over
the steps that know it.
"""

import sqlite3
from collections import Counter
from dataclasses import dataclass

from engine.errors import StorageError
from storage.database import Database

MOST_RUNS, MOST_STEPS = 500, 20_000
"""The latest answers: at most so many, with so many steps together. The last one always counts."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Sums over `runs` answers: tokens by source; tokens drafted and accepted, and seconds of
    looking for drafts, by source. Of `timed` tokens it is known that decoding took `spent` seconds
    and would have taken `plain` without drafts."""

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
RUNS = f"{RECENT} SELECT count(*) FROM recent"
TOKENS = f"""{RECENT} SELECT json_extract(value, '$[2]') AS source, count(*)
    FROM steps, json_each(tokens) WHERE run IN recent GROUP BY source"""
COUNTS = f"""{RECENT} SELECT key, sum(value) FROM steps, json_each({{column}})
    WHERE run IN recent GROUP BY key"""
SECONDS = f"""{RECENT} SELECT coalesce(sum(json_array_length(tokens)), 0),
    coalesce(sum(draft_seconds + verify_seconds + sample_seconds + other_seconds), 0.0),
    coalesce(sum(plain_seconds), 0.0) FROM steps
    WHERE run IN recent AND plain_seconds IS NOT NULL AND json_array_length(tokens) > 0"""


def brought(db: Database, owner: str, fingerprint: str) -> Brought:
    """What each source brought. Raises `StorageError` where the steps are damaged."""
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
            ((runs,),) = db.execute_read(RUNS, values)
        seconds = {str(source): float(each) for source, each in look_ups}
        return Brought(
            int(runs), tokens, drafted, accepted, seconds, int(timed), float(spent), float(plain)
        )
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise StorageError(
            "An answer is damaged in the database: what each source brought cannot be told."
        ) from error
