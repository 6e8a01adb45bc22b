"""The stacks' store: profiles and choices come back, for exactly their models; damage is none."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StorageError
from engine.hsd.profile import RULES, ModelProfile, Pair, Profile
from storage import migrations
from storage.database import Database
from storage.profiles import Choice, ProfileKey, ProfileStore

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}
KEY = ProfileKey("f-target", ("f-small", "f-mid"), SAMPLING, "cpu/float32/2")
MEASURED = Profile(
    tuple(
        ModelProfile(name, f"f-{name}", 1000 * size, 4000 * size, {0: 0.1 + 0.2, 8: size}, 1e-6)
        for size, name in enumerate(("small", "mid", "target"), 1)
    ),
    {pair: Pair(0.7, dict.fromkeys(RULES, (0.7, 1 / 3))) for pair in [(0, 1), (0, 2), (1, 2)]},
    SAMPLING,
    640,
    1234.5,
)
PROFILE = json.loads(json.dumps(MEASURED.mapping()))
OTHERS = [
    KEY._replace(target="g-target"),
    KEY._replace(drafts=("f-small", "g-mid")),
    KEY._replace(drafts=("f-mid", "f-small")),
    KEY._replace(drafts=("f-small",)),
    KEY._replace(sampling=SAMPLING | {"temperature": 0.0}),
    KEY._replace(machine="cpu/bfloat16/2"),
]
CHOICE = Choice(("/models/small", "names/mïd \udc80"), "small@8/mid@4")


@pytest.fixture
def store(db: Database) -> ProfileStore:
    return ProfileStore(db)


def test_a_profile_comes_back_equal_after_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        assert ProfileStore(db).load(KEY) is None
        ProfileStore(db).save(KEY, {"models": []})
        ProfileStore(db).save(KEY, MEASURED.mapping())
    with Database(tmp_path / "strata.db") as db:
        assert ProfileStore(db).load(KEY) == PROFILE
        assert Profile.from_mapping(ProfileStore(db).load(KEY)) == MEASURED


@pytest.mark.parametrize("other", OTHERS)
def test_a_profile_is_served_for_its_own_key_only(store: ProfileStore, other: ProfileKey) -> None:
    store.save(KEY, PROFILE)
    assert store.load(other) is None
    store.save(other, {"positions": 1})
    assert store.load(KEY) == PROFILE and store.load(other) == {"positions": 1}
    store.forget(other)
    assert store.load(KEY) == PROFILE and store.load(other) is None
    store.forget(other)


def test_equal_samplers_are_one(store: ProfileStore) -> None:
    store.save(KEY, PROFILE)
    sampling = {"min_p": 0, "top_p": 0.8, "top_k": 20.0, "temperature": 0.7}
    assert store.load(KEY._replace(sampling=sampling)) == PROFILE


def test_the_oldest_profiles_of_a_target_are_pruned(store: ProfileStore) -> None:
    most = store.MOST_PROFILES
    keys = [KEY._replace(machine=f"cpu/float32/{threads}") for threads in range(most + 2)]
    store.save(OTHERS[0], PROFILE)
    for key in (*keys[:most], keys[0], *keys[most:]):
        store.save(key, PROFILE)
    lost = [key for key in keys if store.load(key) is None]
    assert lost == keys[1:3]
    assert store.load(OTHERS[0]) == PROFILE


@pytest.mark.parametrize(
    "value",
    [
        "not JSON",
        "",
        "[1, 2]",
        "3",
        "null",
        b"\xff",
        b"\xff\xfe{",
        7,
        0.5,
        '{"models": ' + "[" * 100_000,
        f'{{"models": {"1" * 10_000}}}',
        f'{{"models": "{"x" * ProfileStore.MOST_PROFILE_BYTES}"}}',
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_damaged_profile_counts_as_none(db: Database, store: ProfileStore, value: Any) -> None:
    store.save(KEY, PROFILE)
    with db.write() as handle:
        handle.execute("UPDATE profiles SET profile = ?", [value])
    assert store.load(KEY) is None
    store.save(KEY, PROFILE)
    assert store.load(KEY) == PROFILE


def test_text_that_is_none_counts_as_none(db: Database, store: ProfileStore) -> None:
    store.save(KEY, PROFILE)
    store.choose("f-target", *CHOICE)
    with db.write() as handle:
        handle.execute("UPDATE profiles SET profile = CAST(x'7bff' AS TEXT)")
        handle.execute("UPDATE stacks SET spec = CAST(x'22ff22' AS TEXT)")
    assert store.load(KEY) is None and store.chosen("f-target") is None


@pytest.mark.parametrize("drafts", [b"\xff", "[", "", 3])
def test_a_damaged_key_is_in_nobodys_way(db: Database, store: ProfileStore, drafts: Any) -> None:
    store.save(KEY, PROFILE)
    with db.write() as handle:
        handle.execute("UPDATE profiles SET drafts = ?", [drafts])
    store.save(OTHERS[3], PROFILE)
    assert store.load(KEY) is None and store.load(OTHERS[3]) == PROFILE


def test_what_is_too_large_is_refused_and_changes_nothing(store: ProfileStore) -> None:
    store.save(KEY, PROFILE)
    store.choose("f-target", *CHOICE)
    with pytest.raises(StorageError, match="too large to keep"):
        store.save(KEY, {"models": "x" * store.MOST_PROFILE_BYTES})
    for sources, spec in ((["x" * store.MOST_CHOICE_BYTES], ""), ([], "x" * 2**16)):
        with pytest.raises(StorageError, match="At most 65,536 bytes"):
            store.choose("f-target", sources, spec)
    assert store.load(KEY) == PROFILE and store.chosen("f-target") == CHOICE


def test_a_choice_comes_back_equal_after_a_restart(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        store = ProfileStore(db)
        assert store.chosen("f-target") is None
        store.choose("f-target", ["other"], "other@2")
        store.choose("f-target", *CHOICE)
        store.choose("g-target", [], "")
    with Database(tmp_path / "strata.db") as db:
        store = ProfileStore(db)
        assert store.chosen("f-target") == CHOICE
        store.unchoose("f-target")
        store.unchoose("f-target")
        assert store.chosen("f-target") is None
        assert store.chosen("g-target") == Choice((), "")


@pytest.mark.parametrize(
    "values",
    [
        {"sources": "not JSON"},
        {"sources": '"small"'},
        {"sources": '{"small": 1}'},
        {"sources": '["small", 3]'},
        {"sources": "[null]"},
        {"sources": b"\xff"},
        {"sources": "[" * 100_000},
        {"sources": "[" * 50_000},
        {"sources": f'["{"x" * ProfileStore.MOST_CHOICE_BYTES}"]'},
        {"spec": "small@8"},
        {"spec": "8"},
        {"spec": "null"},
        {"spec": b"\xff"},
        {"spec": f'"{"x" * ProfileStore.MOST_CHOICE_BYTES}"'},
    ],
    ids=lambda values: repr(values)[:30],
)
def test_a_damaged_choice_counts_as_none(
    db: Database, store: ProfileStore, values: dict[str, Any]
) -> None:
    store.choose("f-target", *CHOICE)
    ((name, value),) = values.items()
    with db.write() as handle:
        handle.execute(f"UPDATE stacks SET {name} = ?", [value])
    assert store.chosen("f-target") is None
    store.choose("f-target", *CHOICE)
    assert store.chosen("f-target") == CHOICE


def test_a_file_from_before_the_stacks_keeps_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "strata.db"
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:5])
        with Database(path) as db, db.write() as handle:
            handle["fingerprints"].insert({"name": "f-target"})
    with Database(path) as db:
        assert db.execute_read("SELECT name FROM fingerprints") == [("f-target",)]
        ProfileStore(db).save(KEY, PROFILE)
        assert ProfileStore(db).load(KEY) == PROFILE
