"""Settings: ranges, types, names, and the words a person reads when one is wrong."""

import math
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest

from engine.errors import SettingError
from engine.settings import BUDGETS, AnswerFormat, Drafting, Generation, Runtime, Sampling
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
    low, high = item.metadata["low"], item.metadata["high"]
    whole = isinstance(item.default, int)
    assert (f"{low:,} to {high:,}" if whole else f"{low:.12g} to {high:.12g}") in text


def test_a_form_may_say_a_whole_number_with_a_point_and_no_fraction_of_one() -> None:
    assert isinstance(Drafting(nodes=7.0).nodes, int)
    assert Drafting(nodes=7.0) == Drafting(nodes=7)
    with pytest.raises(SettingError, match="whole number"):
        Sampling(top_k=7.5)  # type: ignore[arg-type]
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


def test_a_mapping_is_read_strictly() -> None:
    values = {"temperature": 1, "top_k": 3}
    assert Sampling.from_mapping(values) == Sampling(temperature=1.0, top_k=3)
    assert Sampling.from_mapping({}) == Sampling()
    with pytest.raises(SettingError, match="Top-k"):
        Sampling.from_mapping({"top_k": "3"})
    with pytest.raises(SettingError, match="'temprature'.*temperature, top_k"):
        Sampling.from_mapping({"temprature": 1})


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Sampling().seed = 3  # type: ignore[misc]
    assert hash(Generation(stop=("a",))) == hash(Generation(stop=("a",)))


@pytest.mark.parametrize(
    ("kind", "name", "values", "words"),
    [
        (Drafting, "budget", ["", "Adaptive", None, 64], "adaptive, fixed"),
        (Drafting, "rule", ["", "Match", "equal", None, 1], "match, rejection"),
        (
            Drafting,
            "tiers",
            [("contexts",), (MODEL, MODEL), "context", ("target",), (1,), None],
            "list of strings|at most once",
        ),
        # A bare string would stop at any of its characters.
        (Generation, "stop", ["END", None, (1,), ("a", b"b")], "[Ss]top"),
        (Generation, "sampling", [{"temperature": 1.0}], "Sampling"),
        (Generation, "thinking", ["yes"], "Thinking cannot be 'yes'"),
    ],
)
def test_what_is_no_value_of_a_setting_is_refused(
    kind: Any, name: str, values: list[Any], words: str
) -> None:
    for value in values:
        with pytest.raises(SettingError, match=words):
            kind(**{name: value})


def test_what_is_a_value_is_taken_and_lists_from_json_become_tuples() -> None:
    assert [Drafting(rule=rule).rule for rule in RULES] == ["match", "rejection"]
    assert [Drafting(budget=budget).budget for budget in BUDGETS] == ["adaptive", "fixed"]
    usual = Drafting()
    assert (usual.rule, usual.budget, usual.tiers) == (RULES[0], BUDGETS[0], TIERS)
    assert Drafting(tiers=[STATISTICS, CONTEXT]).tiers == (STATISTICS, CONTEXT)  # type: ignore[arg-type]
    assert Generation(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert Generation().thinking is None
    assert Generation.from_mapping({"thinking": False}).thinking is False
    assert Generation.from_mapping({"thinking": "low"}).thinking == "low"


def test_what_was_stored_with_settings_of_earlier_versions_still_opens() -> None:
    stored = {"policy": ["no", "policy"], "harvest": None, "nodes": 9}
    assert Drafting.from_mapping(stored) == Drafting(nodes=9)
    stored_runtime = {"context_length": 2048, "tensor_parallel": 4, "threads": 2}
    assert Runtime.from_mapping(stored_runtime) == Runtime(context_length=2048, threads=2)
    with pytest.raises(SettingError, match="'policies'"):
        Drafting.from_mapping({**stored, "policies": "merged"})
    with pytest.raises(SettingError, match="'policy'"):
        Sampling.from_mapping({"policy": "merged"})


@pytest.mark.parametrize(
    "changes",
    [
        {"context_length": 63},
        {"context_length": (1 << 20) + 1},
        {"threads": -1},
        {"threads": 513},
        {"gpu_layers": -2},
        {"batch_size": 31},
        {"batch_size": 1 << 14},
        {"batch_size": 33.5},
        {"flash_attention": "maybe"},
        {"cache_type": "f64"},
        {"cache_type": None},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        Runtime(**changes)
    assert repr(next(iter(changes.values()))) in str(caught.value)


def test_a_format_is_read_back_from_what_is_stored() -> None:
    wanted = Generation(format=AnswerFormat("regex", "a+"))
    assert Generation.from_mapping(asdict(wanted) | {"sampling": Sampling()}) == wanted
    assert Generation.from_mapping({"format": None}) == Generation()


@pytest.mark.parametrize(
    ("format", "told"),
    [
        ({"kind": "xml", "text": ""}, "'xml'. Choose from: json_schema, regex"),
        ({"kind": "regex", "text": 5}, "regular expression cannot be 5"),
        ({"kind": "regex", "text": "a" * (1 << 19)}, "at most 262,144 characters"),
        ({"kind": "regex", "text": "a", "more": 1}, "'more'"),
        ("regex", "'regex'. Give an AnswerFormat"),
    ],
    ids=str,
)
def test_what_is_no_format_is_refused(format: Any, told: str) -> None:
    with pytest.raises(SettingError) as caught:
        Generation(format=format)
    assert told in str(caught.value) and len(str(caught.value)) < 300
