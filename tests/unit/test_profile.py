"""Profiles: they come back from JSON, damage is told, and what was not measured is continued."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from engine.hsd.profile import ModelProfile, Outcome, Pair, Profile, Rounds


def mapping() -> dict[str, Any]:
    """A sound profile of two models, as JSON values."""
    models = (
        ModelProfile("small", "f0", 10, 40, {0: 0.5, 4: 0.75}, 0.1, Rounds((0.5, 0.25, 0.25), 1.0)),
        ModelProfile("large", "f1", 20, 80, {0: 1.0}),
    )
    pair = Pair(0.75, {"match": (0.5, 0.5), "rejection": (0.75,)})
    profile = Profile(models, {(0, 1): pair}, {"temperature": 0.7}, 640, 12.5, 30.5)
    profile = profile.learned("match small", Outcome(200, 1.5, 1.0, 2.0))
    found: dict[str, Any] = json.loads(json.dumps(profile.mapping()))
    return found


def test_a_sound_profile_is_read_and_knows_its_models() -> None:
    profile = Profile.from_mapping(mapping())
    assert json.loads(json.dumps(profile.mapping())) == mapping()
    assert profile.target == profile.models[profile.index("large")] == profile.models[-1]
    assert profile.models[0].costs == {0: 0.5, 4: 0.75}
    assert profile.models[0].databases == Rounds((0.5, 0.25, 0.25), 1.0)
    assert profile.pairs[0, 1].survival["rejection"] == (0.75,)
    with pytest.raises(KeyError):
        profile.index("mid")
    assert profile.length == 30.5 and profile.outcomes["match small"][0].tokens == 200
    added = ("outcomes", "length")
    old = {name: value for name, value in mapping().items() if name not in added}
    assert Profile.from_mapping(old) == replace(profile, outcomes={}, length=0.0)


Damage = Callable[[dict[str, Any]], Any]
DAMAGES: dict[str, Damage] = {
    "no models": lambda v: v["models"].clear(),
    "no list of models": lambda v: v.update(models=None),
    "models of another kind": lambda v: v.update(models="ab"),
    "a model twice": lambda v: v["models"][1].update(name="small"),
    "a model without a pair": lambda v: v["models"].append(v["models"][1] | {"name": "larger"}),
    "a pair without a model": lambda v: v["models"].pop(),
    "no pair": lambda v: v["pairs"].clear(),
    "a pair the wrong way": lambda v: v["pairs"][0].update(below=1, above=0),
    "a field that is missing": lambda v: v["models"][0].pop("memory_bytes"),
    "positions that are missing": lambda v: v.pop("positions"),
    "parameters without end": lambda v: v["models"][0].update(parameters=inf),
    "a sampler of another kind": lambda v: v.update(sampling=[1]),
    "a sampler of texts": lambda v: v.update(sampling={"temperature": "warm"}),
    "no costs": lambda v: v["models"][0]["costs"].clear(),
    "costs of another kind": lambda v: v["models"][0].update(costs=[1.0]),
    "no cost of a plain step": lambda v: v["models"][0]["costs"].pop("0"),
    "a cost of fewer than none": lambda v: v["models"][0]["costs"].update({"-1": 1.0}),
    "a cost of half a token": lambda v: v["models"][0]["costs"].update({"0.5": 1.0}),
    "a cost of nothing": lambda v: v["models"][0]["costs"].update({"0": 0.0}),
    "a cost that is no number": lambda v: v["models"][0]["costs"].update({"4": nan}),
    "a cost without end": lambda v: v["models"][0]["costs"].update({"4": inf}),
    "a choice before its time": lambda v: v["models"][0].update(choice=-0.1),
    "a choice that is no number": lambda v: v["models"][0].update(choice=nan),
    "a choice without end": lambda v: v["models"][0].update(choice=inf),
    "rounds of no time": lambda v: v["models"][0]["databases"].update(seconds=0.0),
    "rounds of another kind": lambda v: v["models"][0].update(databases=[0.5]),
    "rounds of nothing": lambda v: v["models"][0].update(databases={}),
    "a law of nothing": lambda v: v["models"][0]["databases"].update(law=[]),
    "a law of more than all": lambda v: v["models"][0]["databases"].update(law=[0.75, 0.5]),
    "a law of less than nothing": lambda v: v["models"][0]["databases"].update(law=[1.5, -0.5]),
    "a law that is no number": lambda v: v["models"][0]["databases"].update(law=[1.0, nan]),
    "an acceptance above one": lambda v: v["pairs"][0].update(acceptance=1.1),
    "an acceptance that is no number": lambda v: v["pairs"][0].update(acceptance=nan),
    "a rule that is missing": lambda v: v["pairs"][0]["survival"].pop("match"),
    "survival that rises": lambda v: v["pairs"][0]["survival"].update(match=[0.5, 0.75]),
    "survival above one": lambda v: v["pairs"][0]["survival"].update(match=[1.5]),
    "survival below nothing": lambda v: v["pairs"][0]["survival"].update(match=[0.5, -0.5]),
    "an outcome of no token": lambda v: v["outcomes"]["match small"][0].update(tokens=0),
    "an outcome of no time": lambda v: v["outcomes"]["match small"][0].update(seconds=0.0),
    "an outcome before its time": lambda v: v["outcomes"]["match small"][0].update(
        plain_seconds=-1.0
    ),
    "survival that is no number": lambda v: v["pairs"][0]["survival"].update(match=[nan]),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_a_profile_is_refused(damage: Damage) -> None:
    values = mapping()
    damage(values)
    with pytest.raises(ValueError):
        Profile.from_mapping(values)


def test_a_round_costs_what_the_next_larger_one_that_was_measured_does() -> None:
    model = ModelProfile("m", "f", 1, 1, {8: 3.0, 0: 1.0, 4: 2.0})
    found = [model.seconds(n) for n in (0, 1, 3, 4, 5, 8)]
    assert found == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]


def test_beyond_the_last_one_the_cost_rises_on_and_never_falls() -> None:
    rising = ModelProfile("m", "f", 1, 1, {0: 1.0, 4: 2.0, 8: 3.0})
    assert [rising.seconds(n) for n in (9, 12, 108)] == [3.25, 4.0, 28.0]
    falling = ModelProfile("m", "f", 1, 1, {0: 1.0, 4: 2.0, 8: 1.5})
    assert falling.seconds(99) == 1.5
    assert ModelProfile("m", "f", 1, 1, {0: 1.0}).seconds(99) == 1.0
