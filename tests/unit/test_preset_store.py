"""The presets' store: each owner's own, with names of their own, and damage costs settings only."""

import pytest

from engine.errors import StorageError
from storage.database import Database
from storage.presets import MAX_PROMPT, PresetStore, StoredPreset


@pytest.fixture
def store(db: Database) -> PresetStore:
    return PresetStore(db, "ada")


def preset(name: str, system_prompt: str = "Be kind.", id: str = "") -> StoredPreset:
    return StoredPreset(id, name, system_prompt, {"method": "plain"})


def test_nobody_sees_or_changes_those_of_another(store: PresetStore, db: Database) -> None:
    mine, theirs = store.add(preset("one")), PresetStore(db, "bob")
    assert theirs.list() == []
    for act in (theirs.get, theirs.delete):
        with pytest.raises(StorageError, match="no preset"):
            act(mine.id)
    with pytest.raises(StorageError, match="no preset"):
        theirs.update(mine)
    assert theirs.add(preset("one")).id != mine.id
    theirs.choose("m", mine.id)
    assert store.chosen("m") is None


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (preset(" \n"), "no name"),
        (preset("x" * 81), "81 characters"),
        (preset("one"), "already"),
        (preset("ＯNE"), "already"),
        (preset("new", "x" * (MAX_PROMPT + 1)), "system prompt"),
        (StoredPreset("", "new", "", {"a": "x" * 70_000}), "settings"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    store: PresetStore, wrong: StoredPreset, expected: str
) -> None:
    store.add(preset("one"))
    with pytest.raises(StorageError, match=expected):
        store.add(wrong)
    assert [known.name for known in store.list()] == ["one"]


def test_a_model_begins_with_the_one_that_was_chosen_for_it(store: PresetStore) -> None:
    made, path = store.add(preset("one")), "/models/\udc80.gguf"
    for source in (path, "owner/name"):
        store.choose(source, made.id)
    store.choose("owner/name", None)
    assert (store.chosen(path), store.chosen("owner/name")) == (made.id, None)
    assert store.delete(made.id) == (made, [path])
    assert store.chosen(path) is None and store.list() == []


@pytest.mark.parametrize("damage", ["rubbish", "[1]", b"\xff", 7, "[" * 100_000])
def test_damaged_settings_hide_no_preset(store: PresetStore, db: Database, damage: object) -> None:
    for name in ("one", "two"):
        store.add(preset(name))
    with db.write() as handle:
        handle.execute("UPDATE presets SET settings = ? WHERE name = 'one'", [damage])
    one, two = store.list()
    assert (one.name, one.settings, one.damaged) == ("one", {}, True)
    assert two.settings == {"method": "plain"} and not two.damaged
