"""Past answers as a file: the n-grams of a model's answers, as JSON.

A file may come from anywhere. It is checked as a whole before anything of it is stored: its
tokenizer, its numbers, its size. What it says can make drafts worse or better and never changes an
answer. It holds token ids, which everybody who has the model can turn back into text: it is as
private as the answers are.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import StorageError
from engine.types import Gram

FORMAT, VERSION = "strata-past-answers", 1
MOST_BYTES = 64 << 20
MOST_GRAMS = 200_000
LONGEST = 16
"""The most tokens of an n-gram."""
LARGEST = 1 << 40
"""The most answers that a number may count."""


class Held(NamedTuple):
    """What a file holds: n-grams of `learned` answers."""

    learned: int
    grams: Sequence[Gram]


def write(model: str, tokenizer: str, held: Held) -> str:
    """The file's text."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "tokenizer": tokenizer,
        "answers": held.learned,
    }
    grams = [[list(gram.tokens), gram.documents, gram.seen] for gram in held.grams]
    return json.dumps({**head, "ngrams": grams}, separators=(",", ":"))


def read(content: bytes, tokenizer: str, vocabulary: int) -> Held:
    """What a file holds. Raises `StorageError` for one that cannot be used with this tokenizer."""
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
    return Held(learned, [Gram(tuple(tokens), met, seen) for tokens, met, seen in grams])


def _is_gram(row: Any, vocabulary: int, learned: int) -> bool:
    """Whether a row is what `write` writes."""
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
