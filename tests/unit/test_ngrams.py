"""The model tier's n-grams: document frequency, recency, pruning, owners and models apart."""

import random
import struct
import time
from pathlib import Path

import pytest

from engine.types import Gram
from storage.database import Database, pack_tokens
from storage.ngrams import ModelNgrams, Pruning

A, B, C, LONG = (1, 2, 3), (1, 2, 4), (9,), (2**32 - 1, 0, 1, 151_643, 5)


@pytest.fixture
def grams(db: Database) -> ModelNgrams:
    return ModelNgrams(db, "ada", "f")


def test_a_new_table_is_empty(grams: ModelNgrams) -> None:
    assert grams.load() == grams.top(5) == []
    assert grams.rows() == grams.size_bytes() == grams.prune(0) == 0


def test_an_answer_counts_once_per_gram(grams: ModelNgrams) -> None:
    assert grams.learn([A, B, A, A, LONG]) == 3
    assert sorted(grams.load()) == sorted([Gram(A, 1, 1), Gram(B, 1, 1), Gram(LONG, 1, 1)])
    assert grams.learn(iter([A, C])) == 2
    assert sorted(grams.load()) == sorted(
        [Gram(A, 2, 2), Gram(B, 1, 1), Gram(LONG, 1, 1), Gram(C, 1, 2)]
    )
    assert grams.rows() == 4


def test_an_empty_answer_is_not_counted(grams: ModelNgrams) -> None:
    assert grams.learn([]) == 0
    grams.learn([A])
    assert grams.load() == [Gram(A, 1, 1)]


def test_the_best_are_frequent_then_recent(grams: ModelNgrams) -> None:
    for answer in ([A, B], [B, C], [B], [LONG]):
        grams.learn(answer)
    best = [Gram(B, 3, 3), Gram(LONG, 1, 4), Gram(C, 1, 2), Gram(A, 1, 1)]
    assert grams.top(10) == best
    assert grams.top(2) == best[:2]
    assert grams.prune(10) == 0
    assert grams.prune(2) == 2
    assert grams.top(10) == best[:2]


def test_counting_goes_on_after_pruning(grams: ModelNgrams) -> None:
    grams.learn([A])
    grams.learn([B])
    assert grams.prune(0) == 2
    grams.learn([C])
    assert grams.load() == [Gram(C, 1, 3)]


def test_a_wipe_starts_anew(grams: ModelNgrams) -> None:
    grams.learn([A, B])
    grams.wipe()
    assert grams.rows() == 0
    grams.learn([C])
    assert grams.load() == [Gram(C, 1, 1)]


def test_owners_and_models_are_apart(db: Database, grams: ModelNgrams) -> None:
    others = [ModelNgrams(db, "bob", "f"), ModelNgrams(db, "ada", "g")]
    for number, table in enumerate([grams, *others]):
        for _ in range(number + 1):
            table.learn([A, (100 + number,)])
    assert grams.rows() == 2
    assert Gram(A, 1, 1) in grams.load() and Gram((101,), 2, 2) not in grams.load()
    grams.prune(1)
    assert [table.rows() for table in others] == [2, 2]
    grams.wipe()
    assert [sorted(table.load()) for table in others] == [
        [Gram(A, 2, 2), Gram((101,), 2, 2)],
        [Gram(A, 3, 3), Gram((102,), 3, 3)],
    ]


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        ModelNgrams(db, "ada", "f").learn([A])
    with Database(tmp_path / "strata.db") as db:
        grams = ModelNgrams(db, "ada", "f")
        grams.learn([A])
        assert grams.load() == [Gram(A, 2, 2)]


def test_a_failed_answer_is_not_half_learned(grams: ModelNgrams) -> None:
    grams.learn([A])
    with pytest.raises(struct.error):
        grams.learn([B, (-1,)])
    assert grams.load() == [Gram(A, 1, 1)]


@pytest.mark.parametrize(
    "change", ["tokens = x''", "tokens = x'000000'", "tokens = 'text'", "documents = 'many'"]
)
def test_a_damaged_row_is_passed_over(db: Database, grams: ModelNgrams, change: str) -> None:
    grams.learn([A, B])
    with db.write() as handle:
        handle.execute(f"UPDATE ngrams SET {change} WHERE tokens = ?", [pack_tokens(A)])
    assert grams.load() == grams.top(9) == [Gram(B, 1, 1)]


def test_learning_is_fast_and_the_size_is_about_right(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    draw = random.Random(0)
    answer = [tuple(draw.randrange(150_000) for _ in range(5)) for _ in range(20_000)]
    with Database(path) as db:
        grams = ModelNgrams(db, "ada", "f")
        start = time.perf_counter()
        grams.learn(answer)
        seconds = time.perf_counter() - start
        assert seconds < 2.0, "10,000 rows per second is a twentieth of what is measured"
        estimate = grams.size_bytes()
    with Database(tmp_path / "blank.db"):
        pass
    taken = path.stat().st_size - (tmp_path / "blank.db").stat().st_size
    assert 0.7 * estimate < taken < 1.3 * estimate


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
    for wanted, gone in cases:
        assert grams.pruned(wanted) == len(gone), wanted
        with pytest.raises(ZeroDivisionError), db.write():
            assert grams.drop(wanted) == len(gone)
            assert before - {gram.tokens for gram in grams.load()} == gone, wanted
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
    assert grams.after((7, 1, 2)) == [(3, 2)] and grams.after((1,)) == [(5, 1)]
    assert grams.after((9, 9)) == [] and grams.after((2,)) == [(3, 3), (1, 1), (4, 1)]
    with db.write() as handle:
        handle.execute("UPDATE ngrams SET tokens = 'text' WHERE length(tokens) = 8")
    assert grams.after((1, 2)) == [(3, 3), (4, 1)]
