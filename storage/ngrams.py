"""The model tier's store: the n-grams of a model's past answers, and in how many each occurred.

An answer counts once per n-gram however often it repeats it: `documents` is a document frequency.
`seen` numbers the answers, so that of two equally frequent n-grams the recent one is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import sqlite_utils

from engine.types import Gram
from storage.database import Database, pack_tokens, unpack_tokens


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which n-grams are to go: all but the newest `keep`, those that none of the last `answers`
    answers held, those that fewer than `documents` answers held. 0 is no such wish."""

    keep: int = 0
    answers: int = 0
    documents: int = 0

    def __bool__(self) -> bool:
        return bool(self.keep or self.answers or self.documents)


class Next(NamedTuple):
    """For display: a token that followed a key, and in how many answers it did so. Each n-gram
    counts the answers that held it, so one answer may count several times."""

    token: int
    documents: int


PRUNED = """owner = :owner AND fingerprint = :fingerprint AND (
    documents < :documents
    OR (:answers > 0 AND seen <= (SELECT learned FROM answers
        WHERE owner = :owner AND fingerprint = :fingerprint) - :answers)
    OR (:keep > 0 AND tokens NOT IN (SELECT tokens FROM ngrams
        WHERE owner = :owner AND fingerprint = :fingerprint
        ORDER BY seen DESC, documents DESC, tokens LIMIT :keep))
)"""


class ModelNgrams:
    """The n-grams of one owner's answers from one model; lengths may be mixed."""

    ROW_BYTES = 12
    """What a row takes beside its tokens: keys, counts, record header (measured)."""

    def __init__(self, db: Database, owner: str, fingerprint: str) -> None:
        self._db = db
        self._key = (db.key("owners", owner), db.key("fingerprints", fingerprint))

    def load(self) -> list[Gram]:
        """All n-grams, in no useful order."""
        return _grams(
            self._db.execute_read(
                "SELECT tokens, documents, seen FROM ngrams WHERE owner = ? AND fingerprint = ?",
                self._key,
            )
        )

    def top(self, limit: int) -> list[Gram]:
        """The `limit` best n-grams: most answers first, then the most recent."""
        return _grams(
            self._db.execute_read(
                "SELECT tokens, documents, seen FROM ngrams WHERE owner = ? AND fingerprint = ? "
                "ORDER BY documents DESC, seen DESC, tokens LIMIT ?",
                (*self._key, limit),
            )
        )

    def follows(self, key: Sequence[int], token: int) -> tuple[int, int]:
        """How often `token` followed these last tokens, and how often anything did: each answer
        counts once for every n-gram of it that ends so."""
        tail, size = pack_tokens(key), 4 * (len(key) + 1)
        rows = self._db.execute_read(
            "SELECT coalesce(sum(CASE WHEN substr(tokens, -4) = ? THEN documents END), 0), "
            "coalesce(sum(documents), 0) FROM ngrams WHERE owner = ? AND fingerprint = ? "
            "AND length(tokens) >= ? AND substr(tokens, -?, ?) = ?",
            [pack_tokens([token]), *self._key, size, size, size - 4, tail],
        )
        return int(rows[0][0]), int(rows[0][1])

    def learn(self, grams: Iterable[tuple[int, ...]]) -> int:
        """Count one answer's n-grams, each once; the number of distinct ones.

        One transaction. Sorted rows go in at neighbouring places, which is what makes it fast.
        """
        blobs = sorted({pack_tokens(gram) for gram in grams})
        if not blobs:
            return 0
        owner, fingerprint = self._key
        with self._db.write() as handle:
            answer = self._next_answer(handle)
            handle.conn.executemany(
                "INSERT INTO ngrams (owner, fingerprint, tokens, documents, seen) "
                "VALUES (?, ?, ?, 1, ?) ON CONFLICT (owner, fingerprint, tokens) "
                "DO UPDATE SET documents = documents + 1, seen = excluded.seen",
                ((owner, fingerprint, blob, answer) for blob in blobs),
            )
        return len(blobs)

    def prune(self, limit: int) -> int:
        """Keep the `limit` best n-grams, in the order of `top`; the number dropped."""
        with self._db.write() as handle:
            return handle.execute(
                "DELETE FROM ngrams WHERE owner = :owner AND fingerprint = :fingerprint "
                "AND tokens IN (SELECT tokens FROM ngrams "
                "WHERE owner = :owner AND fingerprint = :fingerprint "
                "ORDER BY documents DESC, seen DESC, tokens LIMIT -1 OFFSET :limit)",
                {"owner": self._key[0], "fingerprint": self._key[1], "limit": max(0, limit)},
            ).rowcount

    def pruned(self, wanted: Pruning) -> int:
        """How many n-grams would go."""
        query = f"SELECT count(*) FROM ngrams WHERE {PRUNED}"
        return int(self._db.execute_read(query, self._wanted(wanted))[0][0]) if wanted else 0

    def drop(self, wanted: Pruning) -> int:
        """Forget the n-grams that are to go; how many they were."""
        if not wanted:
            return 0
        with self._db.write() as handle:
            query = f"DELETE FROM ngrams WHERE {PRUNED}"
            return handle.execute(query, self._wanted(wanted)).rowcount

    def _wanted(self, wanted: Pruning) -> dict[str, int]:
        return {**asdict(wanted), "owner": self._key[0], "fingerprint": self._key[1]}

    def learned(self) -> int:
        """How many answers were counted."""
        query = "SELECT learned FROM answers WHERE owner = ? AND fingerprint = ?"
        rows = self._db.execute_read(query, self._key)
        return int(rows[0][0]) if rows else 0

    def merge(self, learned: int, grams: Iterable[Gram]) -> None:
        """Take in n-grams of `learned` other answers. What is known already is counted as often as
        the side says that met it oftener, so that taking the same in twice changes nothing."""
        owner, fingerprint = self._key
        with self._db.write() as handle:
            handle.execute(
                "INSERT INTO answers (owner, fingerprint, learned) VALUES (?, ?, ?) "
                "ON CONFLICT (owner, fingerprint) "
                "DO UPDATE SET learned = max(learned, excluded.learned)",
                (owner, fingerprint, learned),
            )
            handle.conn.executemany(
                "INSERT INTO ngrams (owner, fingerprint, tokens, documents, seen) "
                "VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner, fingerprint, tokens) "
                "DO UPDATE SET documents = max(documents, excluded.documents), "
                "seen = max(seen, excluded.seen)",
                sorted(
                    (owner, fingerprint, pack_tokens(gram.tokens), gram.documents, gram.seen)
                    for gram in grams
                ),
            )

    def after(self, key: Sequence[int]) -> list[Next]:
        """What followed these tokens, oftenest first."""
        blob = pack_tokens(key)
        rows = self._db.execute_read(
            "SELECT substr(tokens, -4) AS next, sum(documents) AS met FROM ngrams "
            "WHERE owner = ? AND fingerprint = ? AND typeof(tokens) = 'blob' "
            "AND length(tokens) % 4 = 0 AND length(tokens) > ? AND substr(tokens, ?, ?) = ? "
            "GROUP BY next ORDER BY met DESC, next",
            (*self._key, len(blob), -len(blob) - 4, len(blob), blob),
        )
        return [Next(unpack_tokens(next)[0], int(met)) for next, met in rows]

    def wipe(self) -> None:
        """Forget every n-gram and the count of answers."""
        with self._db.write() as handle:
            handle.execute("DELETE FROM answers WHERE owner = ? AND fingerprint = ?", self._key)

    def rows(self) -> int:
        """The number of n-grams."""
        return self._sizes()[0]

    def size_bytes(self) -> int:
        """About what the n-grams take on disk."""
        rows, token_bytes = self._sizes()
        return token_bytes + rows * self.ROW_BYTES

    def _sizes(self) -> tuple[int, int]:
        rows, token_bytes = self._db.execute_read(
            "SELECT count(*), coalesce(sum(length(tokens)), 0) FROM ngrams "
            "WHERE owner = ? AND fingerprint = ?",
            self._key,
        )[0]
        return int(rows), int(token_bytes)

    def _next_answer(self, handle: sqlite_utils.Database) -> int:
        """Count the answer being learned; its number, from 1."""
        handle.execute(
            "INSERT INTO answers (owner, fingerprint, learned) VALUES (?, ?, 1) "
            "ON CONFLICT (owner, fingerprint) DO UPDATE SET learned = learned + 1",
            self._key,
        )
        query = "SELECT learned FROM answers WHERE owner = ? AND fingerprint = ?"
        return int(handle.execute(query, self._key).fetchone()[0])


def _grams(rows: Sequence[tuple[Any, ...]]) -> list[Gram]:
    """The rows that can be n-grams: a damaged one costs its draft, not the whole tier."""
    return [
        Gram(unpack_tokens(blob), documents, seen)
        for blob, documents, seen in rows
        if isinstance(blob, bytes) and blob and len(blob) % 4 == 0
        if isinstance(documents, int) and documents > 0
    ]
