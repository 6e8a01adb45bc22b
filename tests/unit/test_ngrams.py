"""The model tier's n-grams: document frequency, recency, pruning, owners and models apart; and as a
file, which comes back as it was or is refused whole."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StorageError
from engine.types import Gram
from storage import ngrams
from storage.database import Database, pack_tokens
from storage.drafting import wipe
from storage.ngrams import ModelNgrams, NgramFile, Pruning, from_file, to_file

A, B, C, LONG = (1, 2, 3), (1, 2, 4), (9,), (2**32 - 1, 0, 1, 151_643, 5)
HELD = NgramFile(3, [Gram((1, 2, 99), 2, 3), Gram((5, 6), 1, 1)])


@pytest.fixture
def grams(db: Database) -> ModelNgrams:
    return ModelNgrams(db, "ada", "f")


def test_an_answer_counts_once_per_gram(grams: ModelNgrams) -> None:
    assert grams.load() == grams.top(5) == []
    assert grams.rows() == grams.size_bytes() == grams.prune(0) == grams.learn([]) == 0
    assert grams.learn([A, B, A, A, LONG]) == 3
    assert sorted(grams.load()) == sorted([Gram(A, 1, 1), Gram(B, 1, 1), Gram(LONG, 1, 1)])
    assert grams.learn(iter([A, C])) == 2
    assert sorted(grams.load()) == sorted(
        [Gram(A, 2, 2), Gram(B, 1, 1), Gram(LONG, 1, 1), Gram(C, 1, 2)]
    )
    assert grams.rows() == 4
    with pytest.raises(struct.error):
        grams.learn([B, (-1,)])
    assert Gram(B, 1, 1) in grams.load(), "a failed answer is not half learned"


def test_the_best_are_frequent_then_recent(grams: ModelNgrams, db: Database) -> None:
    for answer in ([A, B], [B, C], [B], [LONG]):
        grams.learn(answer)
    best = [Gram(B, 3, 3), Gram(LONG, 1, 4), Gram(C, 1, 2), Gram(A, 1, 1)]
    assert grams.top(10) == best
    assert grams.top(2) == best[:2]
    assert grams.prune(10) == 0
    assert grams.prune(2) == 2
    assert grams.top(10) == best[:2]
    assert grams.prune(0) == 2
    grams.learn([C])
    assert grams.load() == [Gram(C, 1, 5)], "counting goes on after pruning"
    wipe(db, "ada", "f")
    assert grams.rows() == 0
    grams.learn([C])
    assert grams.load() == [Gram(C, 1, 1)], "a wipe forgets the count of answers as well"


def test_owners_and_models_are_apart(tmp_path: Path) -> None:
    def tables(db: Database) -> list[ModelNgrams]:
        return [ModelNgrams(db, *key) for key in (("ada", "f"), ("bob", "f"), ("ada", "g"))]

    with Database(tmp_path / "strata.db") as db:
        for number, table in enumerate(tables(db)):
            for _ in range(number + 1):
                table.learn([A, (100 + number,)])
    with Database(tmp_path / "strata.db") as db:
        grams, *others = tables(db)
        assert sorted(grams.load()) == [Gram(A, 1, 1), Gram((100,), 1, 1)]
        grams.prune(1)
        assert [table.rows() for table in others] == [2, 2]
        wipe(db, "ada", "f")
        assert [sorted(table.load()) for table in others] == [
            [Gram(A, 2, 2), Gram((101,), 2, 2)],
            [Gram(A, 3, 3), Gram((102,), 3, 3)],
        ]


@pytest.mark.parametrize(
    "change", ["tokens = x''", "tokens = x'000000'", "tokens = 'text'", "documents = 'many'"]
)
def test_a_damaged_row_is_passed_over(db: Database, grams: ModelNgrams, change: str) -> None:
    grams.learn([A, B])
    with db.write() as handle:
        handle.execute(f"UPDATE ngrams SET {change} WHERE tokens = ?", [pack_tokens(A)])
    assert grams.load() == grams.top(9) == [Gram(B, 1, 1)]


def test_the_size_that_is_shown_is_about_right(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    draw = random.Random(0)
    answer = [tuple(draw.randrange(150_000) for _ in range(5)) for _ in range(20_000)]
    with Database(path):
        pass
    blank = path.stat().st_size
    with Database(path) as db:
        grams = ModelNgrams(db, "ada", "f")
        grams.learn(answer)
        estimate = grams.size_bytes()
    assert 0.7 * estimate < path.stat().st_size - blank < 1.3 * estimate


def test_pruning_takes_what_it_says_and_tells_before(grams: ModelNgrams, db: Database) -> None:
    other = ModelNgrams(db, "bob", "f")
    other.learn([A, B])
    for answer in ([A, B, C], [A, B], [A], [LONG]):
        grams.learn(answer)
    # documents: A 3, B 2, C 1, LONG 1; last seen: A 3, B 2, C 1, LONG 4
    cases = [
        (Pruning(), set()),
        (Pruning(documents=2), {C, LONG}),
        (Pruning(answers=1), {A, B, C}),
        (Pruning(answers=2), {B, C}),
        (Pruning(answers=9), set()),
        (Pruning(keep=2), {B, C}),
        (Pruning(keep=9), set()),
        (Pruning(keep=3, documents=2), {C, LONG}),
        (Pruning(2, 2, 3), {B, C, LONG}),
    ]
    before = {gram.tokens for gram in grams.load()}
    for pruning, gone in cases:
        assert grams.pruned(pruning) == len(gone), pruning
        with pytest.raises(ZeroDivisionError), db.write():
            assert grams.drop(pruning) == len(gone)
            assert before - {gram.tokens for gram in grams.load()} == gone, pruning
            raise ZeroDivisionError
    assert grams.drop(Pruning(documents=3)) == 3 and other.rows() == 2
    assert [gram.tokens for gram in grams.load()] == [A]


def test_merging_twice_is_merging_once(grams: ModelNgrams) -> None:
    grams.learn([A, B])
    taken = [Gram(A, 5, 7), Gram(C, 2, 3)]
    for _ in range(2):
        grams.merge(7, taken)
        assert sorted(grams.load()) == sorted([Gram(A, 5, 7), Gram(B, 1, 1), Gram(C, 2, 3)])
        assert grams.learned() == 7
    grams.learn([B])
    assert Gram(B, 2, 8) in grams.load(), "the next answer is newer than all of them"


def test_what_followed_a_key_is_counted_over_all_longer_ones(
    grams: ModelNgrams, db: Database
) -> None:
    ModelNgrams(db, "bob", "f").learn([(1, 2, 9)])
    grams.learn([(7, 1, 2, 3), (8, 1, 2, 4), (1, 2, 3), (2, 1), (256, 1, 5)])
    grams.learn([(7, 1, 2, 3)])
    assert grams.after((1, 2)) == [(3, 3), (4, 1)]
    assert grams.follows((1, 2), 3) == (3, 4) and grams.follows((1, 2), 5) == (0, 4)
    assert grams.after((7, 1, 2)) == [(3, 2)] and grams.after((1,)) == [(5, 1)]
    assert grams.after((9, 9)) == [] and grams.after((2,)) == [(3, 3), (1, 1), (4, 1)]
    with db.write() as handle:
        handle.execute("UPDATE ngrams SET tokens = 'text' WHERE length(tokens) = 8")
    assert grams.after((1, 2)) == [(3, 3), (4, 1)]


# as a file


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(to_file("m", "tok", HELD)), **values}).encode()


def test_a_file_comes_back_as_it_was() -> None:
    for held in (HELD, NgramFile(0, [])):
        assert from_file(to_file("m", "tok", held).encode(), "tok", 100) == held


@pytest.mark.parametrize(
    ("content", "expected"),
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
def test_an_unusable_file_is_refused(content: bytes, expected: str) -> None:
    with pytest.raises(StorageError, match=expected):
        from_file(content, "tok", 100)


def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "MOST_GRAMS", 1)
    with pytest.raises(StorageError, match="at most 1 n-grams"):
        from_file(changed(), "tok", 100)
    monkeypatch.setattr(ngrams, "MOST_BYTES", 50)
    with pytest.raises(StorageError, match="MiB"):
        from_file(changed(), "tok", 100)
