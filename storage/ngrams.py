"""Stores the model tier: the n-grams of a model's past answers, and in how many each occurred; and
exchanges them as JSON files.

An answer counts once per n-gram, however often it repeats the n-gram: `documents` is a document
frequency. `seen` is the number of the latest answer with the n-gram, so that of two equally
frequent n-grams the more recent one is kept.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from engine.errors import StorageError
from engine.types import Gram
from storage.database import Database, pack_tokens, unpack_tokens

FORMAT, VERSION = "strata-past-answers", 1
MOST_BYTES = 64 << 20
MOST_GRAMS = 200_000
LONGEST = 16
"""The most tokens of an n-gram in a file."""
LARGEST = 1 << 40
"""The most answers that a file may count."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """Which n-grams to forget: all but the newest `keep`, those that none of the last `answers`
    answers contained, and those that fewer than `documents` answers contained. 0 means no limit."""

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
    """What a row takes in addition to its tokens: keys, counts, record header (measured)."""

    def __init__(self, db: Database, owner: str, fingerprint: str) -> None:
        self._db = db
        self._key = (db.key("owners", owner), db.key("fingerprints", fingerprint))

    def load(self) -> list[Gram]:
        query = "SELECT tokens, documents, seen FROM ngrams WHERE owner = ? AND fingerprint = ?"
        return _grams(self._db.execute_read(query, self._key))

    def top(self, limit: int) -> list[Gram]:
        return _grams(
            self._db.execute_read(
                "SELECT tokens, documents, seen FROM ngrams WHERE owner = ? AND fingerprint = ? "
                "ORDER BY documents DESC, seen DESC, tokens LIMIT ?",
                (*self._key, limit),
            )
        )

    def follows(self, key: Sequence[int], token: int) -> tuple[int, int]:
        """How often `token` followed these last tokens, and how often any token did. Each answer
        counts once for every n-gram that ends so."""
        counts = {each.token: each.documents for each in self.after(key)}
        return counts.get(token, 0), sum(counts.values())

    def learn(self, grams: Iterable[tuple[int, ...]]) -> int:
        """Count each distinct n-gram of one answer once, in one transaction. Returns their number.

        Sorted rows are inserted at neighbouring places, which makes this fast.
        """
        blobs = sorted({pack_tokens(gram) for gram in grams})
        if not blobs:
            return 0
        owner, fingerprint = self._key
        with self._db.write() as handle:
            (answer,) = handle.execute(
                "INSERT INTO answers (owner, fingerprint, learned) VALUES (?, ?, 1) "
                "ON CONFLICT (owner, fingerprint) DO UPDATE SET learned = learned + 1 "
                "RETURNING learned",
                self._key,
            ).fetchone()
            handle.conn.executemany(
                "INSERT INTO ngrams (owner, fingerprint, tokens, documents, seen) "
                "VALUES (?, ?, ?, 1, ?) ON CONFLICT (owner, fingerprint, tokens) "
                "DO UPDATE SET documents = documents + 1, seen = excluded.seen",
                ((owner, fingerprint, blob, answer) for blob in blobs),
            )
        return len(blobs)

    def prune(self, limit: int) -> int:
        return self._db.execute_write(
            "DELETE FROM ngrams WHERE owner = :owner AND fingerprint = :fingerprint "
            "AND tokens IN (SELECT tokens FROM ngrams "
            "WHERE owner = :owner AND fingerprint = :fingerprint "
            "ORDER BY documents DESC, seen DESC, tokens LIMIT -1 OFFSET :limit)",
            {"owner": self._key[0], "fingerprint": self._key[1], "limit": max(0, limit)},
        )

    def pruned(self, pruning: Pruning) -> int:
        query = f"SELECT count(*) FROM ngrams WHERE {PRUNED}"
        return int(self._db.execute_read(query, self._parameters(pruning))[0][0]) if pruning else 0

    def drop(self, pruning: Pruning) -> int:
        if not pruning:
            return 0
        query = f"DELETE FROM ngrams WHERE {PRUNED}"
        return self._db.execute_write(query, self._parameters(pruning))

    def _parameters(self, pruning: Pruning) -> dict[str, int]:
        return {**asdict(pruning), "owner": self._key[0], "fingerprint": self._key[1]}

    def learned(self) -> int:
        query = "SELECT learned FROM answers WHERE owner = ? AND fingerprint = ?"
        rows = self._db.execute_read(query, self._key)
        return int(rows[0][0]) if rows else 0

    def merge(self, learned: int, grams: Iterable[Gram]) -> None:
        """Add n-grams of `learned` other answers. For an n-gram that is already known, the larger
        of both counts is kept, so adding the same file twice changes nothing."""
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
        blob = pack_tokens(key)
        rows = self._db.execute_read(
            "SELECT substr(tokens, -4) AS next, sum(documents) AS met FROM ngrams "
            "WHERE owner = ? AND fingerprint = ? AND typeof(tokens) = 'blob' "
            "AND length(tokens) % 4 = 0 AND length(tokens) > ? AND substr(tokens, ?, ?) = ? "
            "GROUP BY next ORDER BY met DESC, next",
            (*self._key, len(blob), -len(blob) - 4, len(blob), blob),
        )
        return [Next(unpack_tokens(next)[0], int(met)) for next, met in rows]

    def rows(self) -> int:
        return self._sizes()[0]

    def size_bytes(self) -> int:
        rows, token_bytes = self._sizes()
        return token_bytes + rows * self.ROW_BYTES

    def _sizes(self) -> tuple[int, int]:
        rows, token_bytes = self._db.execute_read(
            "SELECT count(*), coalesce(sum(length(tokens)), 0) FROM ngrams "
            "WHERE owner = ? AND fingerprint = ?",
            self._key,
        )[0]
        return int(rows), int(token_bytes)


def _grams(rows: Sequence[tuple[Any, ...]]) -> list[Gram]:
    """The n-grams of all usable rows. A damaged row costs its draft, not the whole tier."""
    return [
        Gram(unpack_tokens(blob), documents, seen)
        for blob, documents, seen in rows
        if isinstance(blob, bytes) and blob and len(blob) % 4 == 0
        if isinstance(documents, int) and documents > 0
    ]


class NgramFile(NamedTuple):
    """The content of a file: n-grams of `learned` answers."""

    learned: int
    grams: Sequence[Gram]


def to_file(model: str, tokenizer: str, held: NgramFile) -> str:
    """The text of a file. Everybody who has the model can turn its token ids back into text, so it
    is as private as the answers."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "tokenizer": tokenizer,
        "answers": held.learned,
    }
    grams = [[list(gram.tokens), gram.documents, gram.seen] for gram in held.grams]
    return json.dumps({**head, "ngrams": grams}, separators=(",", ":"))


def from_file(content: bytes, tokenizer: str, vocabulary: int) -> NgramFile:
    """The content of a file. Raises `StorageError` if it cannot be used with this tokenizer.

    A file may come from anywhere, so its size, its tokenizer and its numbers are checked before
    anything is stored. Its content can make drafts better or worse, but never changes an answer.
    """
    if len(content) > MOST_BYTES:
        raise StorageError(
            f"The file has {len(content) >> 20:,} MiB, and at most {MOST_BYTES >> 20} are read. "
            "Prune the past answers before you save them."
        )
    try:
        found = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise StorageError(
            f"The file is no readable JSON ({str(error)[:80]}). Choose one that was saved here."
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StorageError("The file holds no past answers. Choose one that was saved here.")
    if found.get("version") != VERSION:
        raise StorageError(
            f"The file has version {str(found.get('version'))[:20]}, this program reads {VERSION}."
        )
    if found.get("tokenizer") != tokenizer:
        raise StorageError(
            f"The file is of {str(found.get('model'))[:80]!r}, which has another tokenizer than "
            "the loaded model. Load a model with the same tokenizer first."
        )
    grams, learned = found.get("ngrams"), found.get("answers", -1)
    if not isinstance(grams, list) or len(grams) > MOST_GRAMS:
        raise StorageError(f"The file must hold a list of at most {MOST_GRAMS:,} n-grams.")
    if not _is_number(learned, 0, LARGEST):
        raise StorageError(f"Its number of answers is {str(learned)[:20]}, which cannot be.")
    for number, row in enumerate(grams, 1):
        if not _is_gram(row, vocabulary, learned):
            raise StorageError(f"N-gram {number:,} of the file cannot be: {str(row)[:80]}.")
    return NgramFile(learned, [Gram(tuple(tokens), met, seen) for tokens, met, seen in grams])


def _is_gram(row: Any, vocabulary: int, learned: int) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    tokens, documents, seen = row
    return (
        isinstance(tokens, list)
        and 1 < len(tokens) <= LONGEST
        and all(_is_number(token, 0, vocabulary - 1) for token in tokens)
        and _is_number(documents, 1, max(1, learned))
        and _is_number(seen, 0, learned)
    )


def _is_number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
