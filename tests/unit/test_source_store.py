"""The models' store: newest first, never too many, and damage costs an entry."""

from pathlib import Path

import pytest

from storage.database import Database
from storage.sources import Known, SourceStore


@pytest.fixture
def store(db: Database) -> SourceStore:
    return SourceStore(db)


def test_the_newest_comes_first_and_each_is_there_once(store: SourceStore) -> None:
    for source, threads in (("a", 1), ("b", 2), ("a", 3)):
        store.add(source, {"threads": threads})
    assert store.models() == [Known("a", {"threads": 3}), Known("b", {"threads": 2})]
    store.add_folder("a")
    store.add_folder("b")
    assert store.folders() == ["b", "a"] and len(store.models()) == 2


def test_as_many_are_kept_as_can_be_shown(store: SourceStore) -> None:
    for number in range(25):
        store.add(str(number), {})
        store.add_folder(str(number))
    newest = [str(number) for number in range(24, 4, -1)]
    assert [known.source for known in store.models()] == newest == store.folders()


def test_a_path_that_is_no_text_is_kept_as_it_is(store: SourceStore) -> None:
    store.add("/models/\udc80.gguf", {})
    assert store.models() == [Known("/models/\udc80.gguf", {})]


@pytest.mark.parametrize("damage", ["rubbish", "[1]", "", "[" * 100_000, b"\xff"])
def test_a_damaged_entry_hides_no_other(store: SourceStore, db: Database, damage: object) -> None:
    for source in ("a", "b"):
        store.add(source, {})
    with db.write() as handle:
        handle.execute("UPDATE sources SET runtime = ? WHERE name = ?", (damage, b"b"))
    assert store.models() == [Known("a", {})]


def test_another_session_finds_what_was_stored(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        SourceStore(db).add("a", {"threads": 1})
    with Database(tmp_path / "strata.db") as db:
        assert SourceStore(db).models() == [Known("a", {"threads": 1})]
