"""A database that an earlier version wrote is opened, and shows what that version showed of it."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage import migrations
from storage.database import Database
from tests.conftest import ROOT
from tests.support.every_kind import shown

FIXTURES = sorted((ROOT / "tests" / "fixtures").glob("*.db"))


def as_exported_now(shown: Any) -> Any:
    """What a version showed, with its exports in the format of today."""
    if not isinstance(shown, dict) or "exports" not in shown:
        return shown
    exports = {id: in_a_row(export) for id, export in shown["exports"].items()}
    return {**shown, "exports": exports}


def in_a_row(export: dict[str, Any]) -> dict[str, Any]:
    """An export of version 1, whose messages follow each other, as one of version 2."""
    if export["version"] != 1:
        return export
    places = [{"parent": n - 1 if n else None, "chosen": 0} for n in range(len(export["messages"]))]
    messages = [{**m, **place} for m, place in zip(export["messages"], places, strict=True)]
    return {**export, "version": 2, "messages": messages}


def as_known_then(found: Any, requested: Any) -> Any:
    """What is shown now without the parts that no earlier version knew."""
    if isinstance(found, dict) and isinstance(requested, dict):
        return {
            name: as_known_then(found[name], requested[name]) for name in requested if name in found
        }
    if isinstance(found, list) and isinstance(requested, list) and len(found) == len(requested):
        return [as_known_then(*pair) for pair in zip(found, requested, strict=True)]
    return found


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_all_of_an_earlier_version_is_there_and_shown_as_it_was(
    fixture: Path, tmp_path: Path
) -> None:
    copy = shutil.copy(fixture, tmp_path / "strata.db")
    expected: dict[str, Any] = json.loads(fixture.with_suffix(".json").read_text())
    if fixture.stem < "0017":
        expected["costs"] = None  # They are measured again: see the migration 0017.
    for _ in range(2):
        with Database(copy) as db:
            assert db.notices == []
            found = shown(db)
            assert found.keys() == expected.keys()
            for part, value in expected.items():
                value = as_exported_now(value)
                assert as_known_then(found[part], value) == value, part
            assert db.execute_read("PRAGMA foreign_key_check") == []


def test_a_fixture_is_named_after_the_last_migration_of_its_version() -> None:
    names = [name for name, _ in migrations.MIGRATIONS]
    for fixture in FIXTURES:
        with closing(sqlite3.connect(f"file:{fixture}?mode=ro", uri=True)) as connection:
            applied = [name for (name,) in connection.execute("SELECT name FROM migrations")]
        assert applied == names[: len(applied)] and applied[-1].startswith(fixture.stem)
