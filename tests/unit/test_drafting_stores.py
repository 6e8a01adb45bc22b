"""Token logs and calibrations (storage/drafting.py): what was stored comes back, owners and models
are apart, and damaged rows are passed over."""

from pathlib import Path
from typing import Any

import pytest

from engine.drafting.calibration import Calibration
from engine.errors import StorageError
from engine.types import CalibrationRow
from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import CalibrationStore, ContextStore, wipe

ROWS = [
    CalibrationRow("context", 8, 0, 12.5, 9.25),
    CalibrationRow("harvest", 1, 24, 0.1 + 0.2, 0.3),
    CalibrationRow("statistics", 3, 7, 2000.0, 0.0),
]


@pytest.fixture
def store(db: Database) -> ContextStore:
    return ContextStore(db, "ada")


@pytest.fixture
def talk(db: Database) -> str:
    return Conversations(db, "ada").create().id


@pytest.fixture
def calibrations(db: Database) -> CalibrationStore:
    return CalibrationStore(db, "ada", "f")


def chunks(db: Database) -> list[tuple[Any, ...]]:
    return db.execute_read("SELECT start, length(tokens) / 4 FROM contexts ORDER BY start")


def test_logs_are_apart(db: Database, store: ContextStore, talk: str) -> None:
    other = Conversations(db, "ada").create().id
    assert store.load(talk, "f") == [] and store.size(talk, "f") == 0
    for tokens in ([5, 0, 2**32 - 1], [], (7,)):
        store.append(talk, "f", tokens)
    store.append(talk, "g", [2])
    store.append(other, "f", [3])
    assert store.load(talk, "f") == [5, 0, 2**32 - 1, 7] and store.size(talk, "f") == 4
    assert store.load(talk, "g") == [2] and store.load(other, "f") == [3]
    store.clear(talk)
    assert store.size(talk, "f") == store.size(talk, "g") == 0
    assert store.load(other, "f") == [3]


def test_an_append_rewrites_nothing_and_a_long_one_is_cut_into_rows(
    db: Database, store: ContextStore, talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContextStore, "CHUNK", 4)
    for size in (3, 10, 1):
        store.append(talk, "f", range(size))
    assert chunks(db) == [(0, 3), (3, 4), (7, 4), (11, 2), (13, 1)]
    assert store.load(talk, "f") == [*range(3), *range(10), 0]


@pytest.mark.parametrize("step", [1, 3, 4, 7, 40])
def test_the_oldest_tokens_are_forgotten(
    db: Database, store: ContextStore, talk: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(ContextStore, "CAP", 10)
    monkeypatch.setattr(ContextStore, "CHUNK", 4)
    for start in range(0, 80, step):
        store.append(talk, "f", range(start, start + step))
        expected = list(range(start + step))[-10:]
        assert store.load(talk, "f") == expected
        assert store.size(talk, "f") == len(expected)
        assert sum(length for _, length in chunks(db)) <= 10 + 4


@pytest.mark.parametrize(
    "act",
    [
        lambda store, id: store.load(id, "f"),
        lambda store, id: store.append(id, "f", [9]),
        lambda store, id: store.size(id, "f"),
        lambda store, id: store.clear(id),
    ],
)
def test_another_owners_log_does_not_exist(
    db: Database, store: ContextStore, talk: str, act: Any
) -> None:
    store.append(talk, "f", [1, 2])
    for id in (talk, "unknown"):
        with pytest.raises(StorageError, match="There is no conversation"):
            act(ContextStore(db, "bob"), id)
    assert store.load(talk, "f") == [1, 2]


@pytest.mark.parametrize("damage", ["x'0102'", "'text'", "7"])
def test_a_damaged_chunk_is_passed_over(
    db: Database, store: ContextStore, talk: str, damage: str
) -> None:
    for token in (1, 2, 3):
        store.append(talk, "f", [token])
    with db.write() as handle:
        handle.execute(f"UPDATE contexts SET tokens = {damage} WHERE start = 1")
    assert store.load(talk, "f") == [1, 3]


# calibrations


def test_rows_come_back_equal_after_a_restart(tmp_path: Path) -> None:
    learned = Calibration(ROWS)
    with Database(tmp_path / "strata.db") as db:
        CalibrationStore(db, "ada", "f").save(iter(ROWS))
        CalibrationStore(db, "ada", "g").save(learned.rows())
    with Database(tmp_path / "strata.db") as db:
        assert sorted(CalibrationStore(db, "ada", "f").load()) == sorted(ROWS)
        again = Calibration(CalibrationStore(db, "ada", "g").load())
    for tier, lengths in learned.weights.items():
        for mine, other in zip(lengths, again.weights[tier], strict=True):
            assert mine.values == other.values


def test_saving_replaces_and_wiping_forgets(db: Database, calibrations: CalibrationStore) -> None:
    others = [CalibrationStore(db, "bob", "f"), CalibrationStore(db, "ada", "g")]
    for rows in (ROWS, ROWS[:1]):
        calibrations.save(rows)
        assert sorted(calibrations.load()) == sorted(rows)
    for number, each in enumerate(others, 1):
        each.save(ROWS[number : number + 1])
    with pytest.raises(Exception, match="UNIQUE"):
        calibrations.save([*ROWS[2:], *ROWS[2:]])
    assert calibrations.load() == ROWS[:1], "a save that fails keeps what was"
    wipe(db, "ada", "f")
    assert calibrations.load() == []
    assert [each.load() for each in others] == [ROWS[1:2], ROWS[2:3]]
    wipe(db, "ada")
    assert [each.load() for each in others] == [ROWS[1:2], []]


@pytest.mark.parametrize(
    "values",
    [
        ("context", 1, 0, -1.0, -1.0),
        ("context", 1, 0, float("inf"), 1.0),
        ("context", 1, 0, "many", 1.0),
        ("context", 1, 0, 1.0, b"\x00"),
        ("context", 1, -1, 1.0, 1.0),
        ("context", -1, 0, 1.0, 1.0),
        ("context", "long", 0, 1.0, 1.0),
        ("context", 1, 0.5, 1.0, 1.0),
        (b"context", 1, 0, 1.0, 1.0),
    ],
)
def test_an_impossible_row_is_passed_over(
    db: Database, calibrations: CalibrationStore, values: tuple[Any, ...]
) -> None:
    calibrations.save(ROWS[1:2])
    with db.write() as handle:
        handle.execute(
            "INSERT INTO calibrations SELECT owner, fingerprint, ?, ?, ?, ?, ? FROM calibrations",
            values,
        )
    assert calibrations.load() == ROWS[1:2]
