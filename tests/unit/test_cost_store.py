"""The cost curves' store: a curve comes back, each way of running has its own, damage is none."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlite_utils

from engine.drafting.costs import LARGEST
from storage.costs import CostStore, StoredCosts
from storage.database import Database
from storage.migrations import MIGRATIONS

POINTS = {0: 0.004, 7: 0.1 + 0.2, 63: 1e-6}


def store_in(db: Database, *changed: Any) -> CostStore:
    key: list[Any] = ["f", "transformers", "cpu", "float32", 2]
    key[: len(changed)] = changed
    return CostStore(db, *key)


def test_a_curve_comes_back_equal_after_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        assert store_in(db).load() is None
        store_in(db).save(POINTS, 1e-5, 0.0, 1234.5)
        store_in(db).save(POINTS, 2e-5, 0.5, 1234.5, 3e-6, 4e-7)
    with Database(tmp_path / "strata.db") as db:
        assert store_in(db).load() == StoredCosts(POINTS, 2e-5, 0.5, 1234.5, 3e-6, 4e-7)


def test_a_curve_of_before_cached_tokens_were_counted_is_read(tmp_path: Path) -> None:
    """What these cost is not known then: zeros, from which it is learned."""
    older = [entry for entry in MIGRATIONS if not entry[0].endswith("costs-of-cached-tokens")]
    assert len(older) == len(MIGRATIONS) - 1
    handle = sqlite_utils.Database(tmp_path / "strata.db")
    handle.execute("CREATE TABLE migrations (name TEXT PRIMARY KEY)")
    for entry, script in older:
        handle.executescript(script)
        handle.execute("INSERT INTO migrations (name) VALUES (?)", [entry])
    handle.execute("INSERT INTO fingerprints (id, name) VALUES (1, 'f')")
    handle.execute(
        "INSERT INTO costs VALUES (1, 'transformers', 'cpu', 'float32', 2, ?, 1e-5, 0.5, 7.0)",
        [json.dumps(POINTS)],
    )
    handle.conn.commit()
    handle.close()
    with Database(tmp_path / "strata.db") as db:
        assert store_in(db).load() == StoredCosts(POINTS, 1e-5, 0.5, 7.0, 0.0, 0.0)


def test_every_way_of_running_a_model_has_a_curve_of_its_own(db: Database) -> None:
    store_in(db).save(POINTS, 0.0, 0.0, 1.0)
    for key in (
        ["g"],
        ["f", "llama.cpp"],
        ["f", "transformers", "cuda:0"],
        ["f", "transformers", "cpu", "bfloat16"],
        ["f", "transformers", "cpu", "float32", 4],
    ):
        assert store_in(db, *key).load() is None
    assert store_in(db).load() is not None


@pytest.mark.parametrize(
    "values",
    [
        {"points": "not JSON"},
        {"points": b"\xff"},
        {"points": "[1, 2]"},
        {"points": "3"},
        {"points": "[" * 100_000},
        {"points": '{"0": 1, "many": 2}'},
        {"points": '{"0": 1, "-3": 2}'},
        {"points": '{"0": 1, "1000000000": 2}'},
        {"points": '{"0": 0, "3": 1}'},
        {"points": '{"0": -1, "3": 1}'},
        {"points": '{"0": NaN, "3": 1}'},
        {"points": '{"0": 1e999, "3": 1}'},
        {"points": f'{{"0": 1{"0" * 400}, "3": 1}}'},
        {"points": '{"0": [], "3": 1}'},
        {"points": '{"0": 1e-300, "3": 1}'},
        {"node": "much"},
        {"node": -1.0},
        {"node": float("inf")},
        {"other": b""},
        {"other": 1e300},
        {"token": -1e-9},
        {"token": "much"},
        {"row": float("inf")},
        {"measured": 1e300},
        {"measured": -1},
    ],
)
def test_a_damaged_curve_counts_as_none(db: Database, values: dict[str, Any]) -> None:
    store_in(db).save(POINTS, 0.0, 0.0, 1.0)
    ((name, value),) = values.items()
    with db.write() as handle:
        handle.execute(f"UPDATE costs SET {name} = ?", [value])
    assert store_in(db).load() is None
    store_in(db).save(POINTS, 0.0, 0.0, 1.0)
    assert store_in(db).load() is not None


def test_no_point_lies_beyond_what_the_engine_tabulates() -> None:
    assert CostStore.MOST_NODES == LARGEST
