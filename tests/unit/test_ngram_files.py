"""Past answers as a file: it comes back as it was, and what cannot be is refused whole."""

import json
from typing import Any

import pytest

from engine.errors import StorageError
from engine.types import Gram
from storage import ngram_files
from storage.ngram_files import Held, read, write

HELD = Held(3, [Gram((1, 2, 99), 2, 3), Gram((5, 6), 1, 1)])


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(write("m", "tok", HELD)), **values}).encode()


def test_a_file_comes_back_as_it_was() -> None:
    assert read(write("m", "tok", HELD).encode(), "tok", 100) == HELD
    assert read(write("m", "tok", Held(0, [])).encode(), "tok", 100) == Held(0, [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no readable JSON"),
        (b"\xff\xfe", "no readable JSON"),
        (b"[" * 100_000, "no readable JSON"),
        (b"[]", "no past answers"),
        (changed(format="x"), "no past answers"),
        (changed(version=2), "version 2"),
        (changed(tokenizer="other"), "another tokenizer"),
        (changed(tokenizer=None), "another tokenizer"),
        (changed(answers="3; DROP TABLE ngrams"), "cannot be"),
        (changed(answers=-1), "cannot be"),
        (changed(answers=True), "cannot be"),
        (changed(answers=1 << 60), "cannot be"),
        (changed(ngrams={}), "a list of at most"),
        *(
            (changed(ngrams=[[[1, 2], 1, 1], row]), "N-gram 2 ")
            for row in (
                7, [], [[1, 2], 1], ["12", 1, 1], [[1], 1, 1], [[1] * 17, 1, 1], [[1, 100], 1, 1],
                [[1, -1], 1, 1], [[1, 2.0], 1, 1], [[1, True], 1, 1], [[1, 2], 0, 1],
                [[1, 2], 4, 1], [[1, 2], 1, 4], [[1, 2], 1, "1"], [[1, None], 1, 1],
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(StorageError, match=words):
        read(content, "tok", 100)


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_files, "MOST_GRAMS", 1)
    with pytest.raises(StorageError, match="at most 1 n-grams"):
        read(changed(), "tok", 100)
    monkeypatch.setattr(ngram_files, "MOST_BYTES", 50)
    with pytest.raises(StorageError, match="MiB"):
        read(changed(), "tok", 100)
