"""Settings: ranges, types, names, and the words a person reads when one is wrong."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from engine.errors import SettingError
from engine.settings import BUDGETS, Drafting, Generation, Sampling
from engine.types import CONTEXT, MODEL, RULES, STATISTICS, TIERS

NUMBERS = [
    (kind, item)
    for kind in (Sampling, Generation, Drafting)
    for item in fields(kind)
    if item.metadata
]
IDS = [item.name for _, item in NUMBERS]


@pytest.mark.parametrize(("kind", "item"), NUMBERS, ids=IDS)
def test_the_ends_of_a_range_are_allowed(kind: Any, item: Any) -> None:
    for value in (item.metadata["low"], item.metadata["high"], item.default):
        assert getattr(kind(**{item.name: value}), item.name) == value


@pytest.mark.parametrize(("kind", "item"), NUMBERS, ids=IDS)
@pytest.mark.parametrize(
    "value", [True, False, None, "1", math.nan, math.inf, -math.inf, -1, 2**64, 1 + 2j, [1], b"1"]
)
def test_anything_else_is_refused_with_the_value_and_the_range(
    kind: Any, item: Any, value: Any
) -> None:
    with pytest.raises(SettingError) as caught:
        kind(**{item.name: value})
    text = str(caught.value)
    assert item.metadata["label"] in text and repr(value) in text
    assert f"{item.metadata['low']:.12g} to {item.metadata['high']:.12g}" in text


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_whole_numbers_stay_whole(name: str) -> None:
    """A form may say 7.0; what is stored is 7, and 7.5 is refused."""
    value = getattr(Sampling(**{name: 7.0}), name)
    assert value == 7 and isinstance(value, int)
    with pytest.raises(SettingError, match="whole number"):
        Sampling(**{name: 7.5})


def test_a_float_node_limit_decodes_like_a_whole_one() -> None:
    assert isinstance(Drafting(nodes=7.0).nodes, int)
    assert Drafting(nodes=7.0) == Drafting(nodes=7)
    assert isinstance(Sampling(temperature=1).temperature, float)


def test_a_rounded_seed_beyond_the_range_is_refused() -> None:
    assert Sampling(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(SettingError):
        Sampling(seed=float(2**63 - 1))


@pytest.mark.parametrize(("kind", "item"), NUMBERS, ids=IDS)
def test_every_number_has_words_and_a_default_within_its_range(kind: Any, item: Any) -> None:
    assert item.metadata["label"] and item.metadata["help"].endswith(".")
    assert item.metadata["low"] <= item.default <= item.metadata["high"]
    assert item.metadata["step"] > 0


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(SettingError, match="'temprature'.*temperature, top_k"):
        Sampling.from_mapping({"temprature": 1})


def test_a_mapping_is_read_strictly() -> None:
    values = {"temperature": 1, "top_k": 3}
    assert Sampling.from_mapping(values) == Sampling(temperature=1.0, top_k=3)
    assert Sampling.from_mapping({}) == Sampling()
    with pytest.raises(SettingError, match="Top-k"):
        Sampling.from_mapping({"top_k": "3"})


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Sampling().seed = 3  # type: ignore[misc]
    assert hash(Generation(stop=("a",))) == hash(Generation(stop=("a",)))


@pytest.mark.parametrize("budget", ["", "Adaptive", "measured", None, 64])
def test_unknown_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(SettingError, match="adaptive, fixed"):
        Drafting(budget=budget)


@pytest.mark.parametrize("rule", ["", "Match", "equal", None, 1])
def test_unknown_rules_of_verification_are_refused(rule: Any) -> None:
    with pytest.raises(SettingError, match="match, rejection"):
        Drafting(rule=rule)


def test_the_rule_that_keeps_the_seeds_text_is_the_default() -> None:
    assert [Drafting(rule=rule).rule for rule in RULES] == ["match", "rejection"]
    assert Drafting().rule == RULES[0] == "match"
    assert Drafting.from_mapping({"rule": "rejection"}) == Drafting(rule="rejection") != Drafting()


@pytest.mark.parametrize(
    "stored",
    [
        {"policy": "hierarchical", "harvest": True, "nodes": 9},
        {"policy": ["no", "policy"], "harvest": None, "nodes": 9},
    ],
)
def test_what_was_stored_with_settings_of_earlier_versions_still_opens(
    stored: dict[str, Any],
) -> None:
    assert Drafting.from_mapping(stored) == Drafting(nodes=9)
    with pytest.raises(SettingError, match="'policies'"):
        Drafting.from_mapping({**stored, "policies": "merged"})
    with pytest.raises(SettingError, match="'policy'"):
        Sampling.from_mapping({"policy": "merged"})


def test_known_budgets_are_taken_and_the_first_is_the_default() -> None:
    assert [Drafting(budget=budget).budget for budget in BUDGETS] == list(BUDGETS)
    assert Drafting().budget == BUDGETS[0] == "adaptive"


def test_known_tiers_are_taken() -> None:
    assert Drafting(tiers=(STATISTICS, CONTEXT)).tiers == (STATISTICS, CONTEXT)
    assert Drafting(tiers=()).tiers == ()
    assert Drafting().tiers == TIERS


@pytest.mark.parametrize(
    "tiers", [("contexts",), (MODEL, MODEL), "context", ("target",), (1,), None]
)
def test_unusable_tiers_are_refused(tiers: Any) -> None:
    with pytest.raises(SettingError):
        Drafting(tiers=tiers)


@pytest.mark.parametrize("stop", ["END", None, (1,), ("a", b"b")])
def test_stop_strings_must_be_a_tuple_of_texts(stop: Any) -> None:
    """A bare string would stop at any of its characters."""
    with pytest.raises(SettingError, match="[Ss]top"):
        Generation(stop=stop)


def test_lists_from_stored_json_become_tuples() -> None:
    assert Generation(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert Drafting(tiers=[MODEL]) == Drafting(tiers=(MODEL,))  # type: ignore[arg-type]


def test_a_sampler_that_is_not_one_is_refused() -> None:
    with pytest.raises(SettingError, match="Sampling"):
        Generation(sampling={"temperature": 1.0})  # type: ignore[arg-type]


def test_thinking_is_on_off_or_left_to_the_model() -> None:
    assert Generation().thinking is None
    assert Generation.from_mapping({"thinking": False}).thinking is False
    with pytest.raises(SettingError, match="Thinking cannot be 'yes'"):
        Generation.from_mapping({"thinking": "yes"})
