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
from tests.support.every_kind import build, shown

FIXTURES = sorted((ROOT / "tests" / "fixtures").glob("*.db"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_all_of_an_earlier_version_is_there_and_shown_as_it_was(
    fixture: Path, tmp_path: Path
) -> None:
    copy = shutil.copy(fixture, tmp_path / "strata.db")
    wanted: dict[str, Any] = json.loads(fixture.with_suffix(".json").read_text())
    for _ in range(2):
        with Database(copy) as db:
            assert db.notices == []
            found = shown(db)
            assert found.keys() == wanted.keys()
            for part, value in wanted.items():
                assert found[part] == value, part
            assert db.execute_read("PRAGMA foreign_key_check") == []


def test_this_version_writes_the_same_twice_and_shows_it(tmp_path: Path) -> None:
    """So what it writes is a fixture for those that follow."""
    first, second = tmp_path / "a.db", tmp_path / "b.db"
    build(first)
    build(second)
    assert first.read_bytes() == second.read_bytes()
    with Database(first) as db:
        assert shown(db) == json.loads(first.with_suffix(".json").read_text())


def test_a_fixture_is_named_after_the_last_migration_of_its_version() -> None:
    names = [name for name, _ in migrations.MIGRATIONS]
    for fixture in FIXTURES:
        with closing(sqlite3.connect(f"file:{fixture}?mode=ro", uri=True)) as connection:
            applied = [name for (name,) in connection.execute("SELECT name FROM migrations")]
        assert applied == names[: len(applied)] and applied[-1].startswith(fixture.stem)
