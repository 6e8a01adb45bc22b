"""What belongs to the machine (storage/machine.py) comes back, for exactly its models; a damaged
row counts as none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.drafting.costs import LARGEST
from engine.errors import StorageError
from engine.hsd.profile import RULES, ModelProfile, Pair, Profile
from engine.types import Costs
from storage.database import Database
from storage.machine import (
    MOST_NODES,
    Choice,
    CostStore,
    KnownModel,
    ProfileKey,
    ProfileStore,
    SourceStore,
)

POINTS = {0: 0.004, 7: 0.1 + 0.2, 63: 1e-6}
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
CHOICE = Choice(("/models/small", "names/mïd \udc80"), "small@8/mid@4")
SOURCE = KnownModel("/models/\udc80.gguf", {"threads": 1})


def costs_in(db: Database, *changed: Any) -> CostStore:
    key: list[Any] = ["f", "transformers", "cpu", "float32", 2]
    key[: len(changed)] = changed
    return CostStore(db, *key)


def damage(db: Database, table: str, column: str, value: Any) -> None:
    with db.write() as handle:
        handle.execute(f"UPDATE {table} SET {column} = ?", [value])


def test_everything_comes_back_equal_after_a_restart(tmp_path: Path) -> None:
    costs = Costs(POINTS, 2e-5, 0.5, 1234.5, 3e-6, 4e-7)
    with Database(tmp_path / "strata.db") as db:
        stacks = ProfileStore(db)
        assert costs_in(db).load() is stacks.load(KEY) is stacks.chosen("f-target") is None
        for points in ({0: 1.0}, POINTS):
            costs_in(db).save(costs._replace(points=points))
        for profile in ({"models": []}, MEASURED.mapping()):
            stacks.save(KEY, profile)
        for choice in (Choice(("other",), "other@2"), CHOICE):
            stacks.choose("f-target", *choice)
        stacks.choose("g-target", [], "")
        SourceStore(db).add(*SOURCE)
    with Database(tmp_path / "strata.db") as db:
        stacks = ProfileStore(db)
        assert costs_in(db).load() == costs
        assert stacks.load(KEY) == PROFILE and Profile.from_mapping(stacks.load(KEY)) == MEASURED
        assert stacks.chosen("f-target") == CHOICE and stacks.chosen("g-target") == Choice((), "")
        assert SourceStore(db).models() == [SOURCE]


# costs


def test_every_way_of_running_a_model_has_a_curve_of_its_own(db: Database) -> None:
    costs_in(db).save(Costs(POINTS, 0.0, 0.0, 1.0))
    for key in (
        ["g"],
        ["f", "llama.cpp"],
        ["f", "transformers", "cuda:0"],
        ["f", "transformers", "cpu", "bfloat16"],
        ["f", "transformers", "cpu", "float32", 4],
    ):
        assert costs_in(db, *key).load() is None
    assert costs_in(db).load() is not None


def test_no_point_lies_beyond_what_the_engine_tabulates() -> None:
    assert MOST_NODES == LARGEST


# profiles and chosen stacks


@pytest.mark.parametrize(
    "change",
    [
        {"target": "g-target"},
        {"drafts": ("f-small", "g-mid")},
        {"drafts": ("f-mid", "f-small")},
        {"drafts": ("f-small",)},
        {"sampling": SAMPLING | {"temperature": 0.0}},
        {"machine": "cpu/bfloat16/2"},
    ],
)
def test_a_profile_is_served_for_its_own_key_only(db: Database, change: dict[str, Any]) -> None:
    store, other = ProfileStore(db), KEY._replace(**change)
    store.save(KEY, PROFILE)
    assert store.load(other) is None
    store.save(other, {"positions": 1})
    assert store.load(KEY) == PROFILE and store.load(other) == {"positions": 1}
    same = {"min_p": 0, "top_p": 0.8, "top_k": 20.0, "temperature": 0.7}
    assert store.load(KEY._replace(sampling=same)) == PROFILE, "equal samplers are one"


def test_the_oldest_profiles_of_a_target_are_pruned(db: Database) -> None:
    store = ProfileStore(db)
    other, most = KEY._replace(target="g-target"), store.MOST_PROFILES
    keys = [KEY._replace(machine=f"cpu/float32/{threads}") for threads in range(most + 2)]
    store.save(other, PROFILE)
    for key in (*keys[:most], keys[0], *keys[most:]):
        store.save(key, PROFILE)
    lost = [key for key in keys if store.load(key) is None]
    assert lost == keys[1:3]
    assert store.load(other) == PROFILE


def test_what_is_too_large_is_refused_and_changes_nothing(db: Database) -> None:
    store = ProfileStore(db)
    store.save(KEY, PROFILE)
    store.choose("f-target", *CHOICE)
    with pytest.raises(StorageError, match="too large to keep"):
        store.save(KEY, {"models": "x" * store.MOST_PROFILE_BYTES})
    for sources, spec in ((["x" * store.MOST_CHOICE_BYTES], ""), ([], "x" * 2**16)):
        with pytest.raises(StorageError, match="At most 65,536 bytes"):
            store.choose("f-target", sources, spec)
    assert store.load(KEY) == PROFILE and store.chosen("f-target") == CHOICE
    for _ in range(2):
        store.unchoose("f-target")
        assert store.chosen("f-target") is None


KEPT: dict[str, tuple[Callable[[Database], object], Callable[[Database], object]]] = {
    "costs": (
        lambda db: costs_in(db).save(Costs(POINTS, 0.0, 0.0, 1.0)),
        lambda db: costs_in(db).load(),
    ),
    "profiles": (
        lambda db: ProfileStore(db).save(KEY, PROFILE),
        lambda db: ProfileStore(db).load(KEY),
    ),
    "stacks": (
        lambda db: ProfileStore(db).choose("f-target", *CHOICE),
        lambda db: ProfileStore(db).chosen("f-target"),
    ),
}
"""How a row of a table is stored and read."""
DAMAGES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("costs", "points"): (
        "not JSON",
        b"\xff",
        "[" * 100_000,
        '{"0": 1, "many": 2}',
        '{"0": 1, "-3": 2}',
        '{"0": 1, "1000000000": 2}',
        '{"0": 0, "3": 1}',
        '{"0": NaN, "3": 1}',
        '{"0": 1e999, "3": 1}',
        f'{{"0": 1{"0" * 400}, "3": 1}}',
        '{"0": 1e-300, "3": 1}',
    ),
    ("costs", "node"): ("much", float("inf")),
    ("costs", "other"): (1e300,),
    ("costs", "token"): (-1e-9,),
    ("costs", "row"): (float("inf"),),
    ("costs", "measured"): (1e300,),
    ("profiles", "profile"): (
        "not JSON",
        "[1, 2]",
        b"\xff",
        7,
        '{"models": ' + "[" * 100_000,
        f'{{"models": {"1" * 10_000}}}',
        f'{{"models": "{"x" * ProfileStore.MOST_PROFILE_BYTES}"}}',
    ),
    ("profiles", "drafts"): (b"\xff", "[", "", 3),
    ("stacks", "sources"): (
        "not JSON",
        '"small"',
        '["small", 3]',
        "[" * 100_000,
        f'["{"x" * ProfileStore.MOST_CHOICE_BYTES}"]',
    ),
    ("stacks", "spec"): ("null", b"\xff"),
}


@pytest.mark.parametrize(("table", "column"), DAMAGES)
def test_a_damaged_row_counts_as_none(table: str, column: str) -> None:
    save, load = KEPT[table]
    for value in DAMAGES[table, column]:
        with Database() as db:
            save(db)
            sound = load(db)
            damage(db, table, column, value)
            assert load(db) is None, repr(value)[:40]
            save(db)
            assert load(db) == sound is not None


# sources


def test_the_newest_comes_first_and_each_is_there_once(db: Database) -> None:
    store = SourceStore(db)
    for source, threads in (("a", 1), ("b", 2), ("a", 3)):
        store.add(source, {"threads": threads})
    assert store.models() == [KnownModel("a", {"threads": 3}), KnownModel("b", {"threads": 2})]
    for number in range(25):
        store.add(str(number), {})
        store.add(str(number), {}, "folder")
    newest = [str(number) for number in range(24, 4, -1)]
    assert [known.source for known in store.models()] == newest == store.folders()
    store.forget("24")
    store.forget("23", "folder")
    assert len(store.models()) == len(store.folders()) == store.MOST - 1


@pytest.mark.parametrize("value", ["rubbish", "[1]", "", "[" * 100_000, b"\xff"])
def test_a_damaged_source_hides_no_other(db: Database, value: object) -> None:
    store = SourceStore(db)
    store.add("b", {})
    damage(db, "sources", "runtime", value)
    store.add("a", {})
    assert store.models() == [KnownModel("a", {})]
