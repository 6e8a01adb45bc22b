"""Presets: what they mean for the loaded model, what an owner does with them, and files of them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.service.preferences import PRESETS, Preferences, Presets
from app.service.session import Session
from engine.errors import SettingError, StorageError, StrataError
from engine.local import Local
from engine.settings import Drafting, Generation, Sampling
from storage.database import Database
from storage.presets import StoredPreset
from tests.support.inside import swap
from tests.support.toy import ToyBackend

OWNER = "local"
EVIL = "<img src=x onerror=alert(1)>{{7*7}}"
CHOSEN = Preferences(Generation(Sampling(0.3, seed=4), 99, ("END",), False), "plain")


@pytest.fixture
def session(db: Database) -> Session:
    toy = ToyBackend()
    toy.info = replace(toy.info, sampling=Sampling(0.6, 20, 0.95))
    return Session(Local(backend=toy), db)


@pytest.fixture
def presets(session: Session) -> Presets:
    return session.presets


def names(presets: Presets, owner: str = OWNER) -> list[str]:
    return [preset.name for preset in presets.list(owner)[len(PRESETS) :]]


def test_those_that_come_along_can_all_be_followed(presets: Presets) -> None:
    assert len({preset.id for preset in PRESETS}) == len({p.name for p in PRESETS}) >= 5
    for preset in PRESETS:
        found, problem = presets.preferences(preset)
        assert problem == "" and preset.system_prompt.endswith((".", "?"))
        assert found.method == "auto" and found.fresh_seed


def test_what_a_preset_leaves_out_is_as_the_makers_want_it(
    presets: Presets, session: Session
) -> None:
    cool = StoredPreset("x", "x", "", {"generation": {"sampling": {"temperature": 0.1}}})
    assert presets.preferences(cool)[0].generation.sampling == Sampling(0.1, 20, 0.95)
    assert presets.makers.generation.sampling == Sampling(0.6, 20, 0.95)
    other = ToyBackend(context_length=100)
    swap(session, other, "other")
    assert presets.preferences(cool)[0].generation.sampling == Sampling(0.1)
    assert presets.makers.generation.max_tokens == 100


def test_saved_settings_come_back_whole(presets: Presets) -> None:
    made = presets.save(OWNER, EVIL, "Be kind.", CHOSEN)
    assert names(presets) == [EVIL]
    assert presets.preferences(presets.get(OWNER, made.id)) == (CHOSEN, "")
    changed = replace(CHOSEN, method="hd")
    presets.update(OWNER, made.id, "Be short.", changed)
    presets.rename(OWNER, made.id, "short")
    again = presets.get(OWNER, made.id)
    assert (again.name, again.system_prompt) == ("short", "Be short.")
    assert presets.preferences(again) == (changed, "")
    assert presets.list("ann") == list(PRESETS)


@pytest.mark.parametrize(
    ("settings", "damaged"),
    [
        ({"generation": {"sampling": {"temperature": 99}}}, False),
        ({"colour": "red"}, False),
        ({"method": "hsd:gone@4"}, False),
        ({"generation": 7}, False),
        ({}, True),
    ],
)
def test_what_cannot_be_followed_is_reported_and_the_rest_is_used(
    presets: Presets, settings: dict[str, Any], damaged: bool
) -> None:
    found, problem = presets.preferences(StoredPreset("x", EVIL, "", settings, damaged))
    assert problem.startswith(f"The preset {EVIL!r} is used in part.")
    assert found == presets.makers and ("damaged" in problem) is damaged


def test_those_that_come_along_stay_and_can_be_copied(presets: Presets) -> None:
    first = PRESETS[0]
    for act in (
        lambda: presets.rename(OWNER, first.id, "mine"),
        lambda: presets.update(OWNER, first.id, "", CHOSEN),
        lambda: presets.delete(OWNER, first.id),
    ):
        with pytest.raises(StorageError, match="Duplicate it"):
            act()
    copies = [presets.duplicate(OWNER, first.id) for _ in range(2)]
    assert names(presets) == [f"{first.name} 2", f"{first.name} 3"]
    assert copies[0].system_prompt == first.system_prompt


def test_a_deletion_is_taken_back_with_what_it_was_chosen_for(presets: Presets) -> None:
    made = presets.save(OWNER, "one", "Be kind.", CHOSEN)
    presets.choose(OWNER, "m", made.id)
    token = presets.delete(OWNER, made.id)
    assert names(presets) == [] and presets.first(OWNER, "m") is None
    with pytest.raises(StorageError, match="any more"):
        presets.undo("ann", token)
    presets.save(OWNER, "one", "", CHOSEN)
    assert presets.undo(OWNER, token).name == "one 2"
    first = presets.first(OWNER, "m")
    assert first is not None and first.system_prompt == "Be kind."
    with pytest.raises(StorageError, match="any more"):
        presets.undo(OWNER, token)


def test_a_model_begins_with_what_was_chosen_for_it(presets: Presets) -> None:
    presets.choose(OWNER, "m", PRESETS[1].id)
    assert presets.first(OWNER, "m") == PRESETS[1]
    for owner, source in (("ann", "m"), (OWNER, "n"), (OWNER, "")):
        assert presets.first(owner, source) is None
    presets.choose(OWNER, "m", None)
    assert presets.first(OWNER, "m") is None
    for source, id in (("", PRESETS[0].id), ("m", "gone")):
        with pytest.raises(StorageError):
            presets.choose(OWNER, source, id)


def test_an_exported_file_is_read_by_anybody(presets: Presets) -> None:
    with pytest.raises(StorageError, match="no preset of yours"):
        presets.export(OWNER)
    presets.save(OWNER, EVIL, "Be kind.", CHOSEN)
    file = json.dumps(presets.export(OWNER)).encode()
    for _ in range(2):
        presets.import_("ann", file)
    assert names(presets, "ann") == [EVIL, f"{EVIL} 2"]
    assert presets.preferences(presets.list("ann")[-1]) == (CHOSEN, "")


def wrapped(*entries: object) -> bytes:
    return json.dumps({"format": "strata-presets", "version": 1, "presets": entries}).encode()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (b"rubbish", "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b"[]", "holds no presets"),
        (b'{"format": "other", "presets": [{"name": "x"}]}', "format cannot be 'other'."),
        (wrapped(), "Give a list of presets with names,"),
        (
            wrapped({"name": "good"}, 7),
            "presets[1] cannot be 7. Give a list of presets with names,",
        ),
        (
            wrapped({"name": "good"}, {"system_prompt": "x"}),
            "presets[1].name is missing. Give a list of presets with names, system prompts"
            " and settings. Nothing was imported.",
        ),
        (wrapped({"name": "good"}, {"name": 7}), "presets[1].name cannot be 7."),
        (
            wrapped({"name": "good"}, {"name": "x", "system_prompt": None}),
            "presets[1].system_prompt cannot be None.",
        ),
        (
            wrapped({"name": "good"}, {"name": "x", "settings": []}),
            "presets[1].settings cannot be [].",
        ),
        (
            wrapped({"name": "good"}, {"name": "x", "settings": {"method": "boundless"}}),
            "boundless",
        ),
        (wrapped({"name": "good"}, {"name": " "}), "no name"),
        (
            wrapped(*({"name": f"preset {number}"} for number in range(300))),
            "200 presets, the most",
        ),
        (b" " * (5 << 20), "the most for presets"),
    ],
)
def test_of_a_file_that_is_wrong_nothing_is_kept(
    presets: Presets, file: bytes, expected: str
) -> None:
    with pytest.raises(StrataError) as caught:
        presets.import_(OWNER, file)
    assert expected in str(caught.value) and names(presets) == []


def test_preferences_survive_storage() -> None:
    usual = Preferences()
    for chosen in (usual, CHOSEN, Preferences(drafting=Drafting(nodes=9, budget="fixed"))):
        assert Preferences.from_mapping(chosen.mapping()) == chosen
    assert Preferences.from_mapping({}) == usual and not usual.check
    kept = usual.mapping()
    del kept["drafting"]["rule"]
    assert Preferences.from_mapping(kept) == usual and usual.drafting.rule == "match"


def test_preferences_of_earlier_versions_take_up_the_measured_budget() -> None:
    """Their limits fitted one machine; what drafts, and in which order, stays as it was chosen."""
    drafting = {"tiers": ["model"], "policy": "hierarchical", "nodes": 7, "threshold": 0.01}
    kept = Preferences.from_mapping({"method": "hd", "drafting": drafting}).drafting
    assert kept == Drafting(("model",))
    assert (kept.budget, kept.nodes) == ("adaptive", Drafting().nodes)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"generation": {"max_tokens": -1}}, "-1"),
        ({"drafting": {"budget": "magic"}}, "magic"),
        *(({"check": value}, "background") for value in (1, "yes", None, [True])),
    ],
)
def test_preferences_that_cannot_be_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        Preferences.from_mapping(values)
