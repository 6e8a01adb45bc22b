"""How fast models are here: the last measurement counts, and only what can be believed."""

import pytest

from storage.database import Database
from storage.speeds import SpeedStore


@pytest.fixture
def store(db: Database) -> SpeedStore:
    return SpeedStore(db)


def test_the_last_measurement_with_that_library_counts(store: SpeedStore) -> None:
    assert store.load("m", "1.0") is None
    for speed in (10.0, 12.5):
        store.save("m", "1.0", speed)
    found = store.load("m", "1.0")
    assert found is not None and found.tokens_per_second == 12.5 and found.measured > 0
    assert store.load("m", "1.1") is None and store.load("n", "1.0") is None
    store.save("m", "1.1", 0.0)
    assert store.load("m", "1.0") is None


@pytest.mark.parametrize("damage", ["fast", -1.0, 1e12, b"\xff"])
def test_what_cannot_be_is_not_believed(store: SpeedStore, db: Database, damage: object) -> None:
    store.save("m", "1.0", 10.0)
    with db.write() as handle:
        handle.execute("UPDATE speeds SET tokens_per_second = ?", [damage])
    assert store.load("m", "1.0") is None


def test_a_choice_is_kept_until_it_is_forgotten(store: SpeedStore) -> None:
    assert store.chosen("format") == ""
    for value in ("a", "b"):
        store.choose("format", value)
    assert store.chosen("format") == "b"
    store.choose("format", "")
    assert store.chosen("format") == ""
