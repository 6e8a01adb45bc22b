"""The calibration's store: rows come back, owners and models are apart, damaged rows are left."""

from pathlib import Path
from typing import Any

import pytest

from engine.drafting.calibration import Calibration
from engine.types import CalibrationRow
from storage.calibrations import CalibrationStore
from storage.database import Database

ROWS = [
    CalibrationRow("context", 8, 0, 12.5, 9.25),
    CalibrationRow("harvest", 1, 24, 0.1 + 0.2, 0.3),
    CalibrationRow("statistics", 3, 7, 2000.0, 0.0),
]


@pytest.fixture
def store(db: Database) -> CalibrationStore:
    return CalibrationStore(db, "ada", "f")


def test_rows_come_back_equal_after_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        CalibrationStore(db, "ada", "f").save(iter(ROWS))
    with Database(tmp_path / "strata.db") as db:
        assert sorted(CalibrationStore(db, "ada", "f").load()) == sorted(ROWS)


def test_what_was_learned_is_trusted_the_same_afterwards(store: CalibrationStore) -> None:
    learned = Calibration(ROWS)
    store.save(learned.rows())
    again = Calibration(store.load())
    assert sorted(again.rows()) == sorted(learned.rows())
    for tier, lengths in learned.weights.items():
        for mine, other in zip(lengths, again.weights[tier], strict=True):
            assert mine.values == other.values


def test_saving_replaces_and_wiping_forgets(store: CalibrationStore) -> None:
    assert store.load() == []
    store.save(ROWS)
    store.save(ROWS[:1])
    assert store.load() == ROWS[:1]
    store.wipe()
    assert store.load() == []


def test_owners_and_models_are_apart(db: Database, store: CalibrationStore) -> None:
    others = [CalibrationStore(db, "bob", "f"), CalibrationStore(db, "ada", "g")]
    for number, each in enumerate([store, *others]):
        each.save(ROWS[number : number + 1])
    store.wipe()
    assert store.load() == []
    assert [each.load() for each in others] == [ROWS[1:2], ROWS[2:3]]


def test_a_save_that_fails_keeps_what_was(store: CalibrationStore) -> None:
    store.save(ROWS)
    with pytest.raises(Exception, match="UNIQUE"):
        store.save([*ROWS[:1], *ROWS[:1]])
    assert sorted(store.load()) == sorted(ROWS)


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
def test_a_row_that_cannot_be_is_passed_over(
    db: Database, store: CalibrationStore, values: tuple[Any, ...]
) -> None:
    store.save(ROWS[1:2])
    with db.write() as handle:
        handle.execute(
            "INSERT INTO calibrations SELECT owner, fingerprint, ?, ?, ?, ?, ? FROM calibrations",
            values,
        )
    assert store.load() == ROWS[1:2]


def test_rows_of_another_version_do_no_harm(store: CalibrationStore) -> None:
    """Tiers, lengths and strengths that this version does not know count as nothing learned."""
    store.save([CalibrationRow("oracle", 1, 0, 1, 1), CalibrationRow("context", 99, 0, 1, 1)])
    store.save([*store.load(), CalibrationRow("context", 1, 10**9, 1.0, 1.0)])
    assert len(store.load()) == 3 and Calibration(store.load()).rows() == []
