"""The ablation: which configurations it compares, and that its report is one of a real run."""

import json

import pytest

from bench.__main__ import main
from bench.ablation import GROUPS, variants
from engine.types import TIERS


def test_every_subset_and_every_order_of_the_tiers_is_there() -> None:
    found = [drafting.tiers for drafting in variants(list(GROUPS)).values()]
    assert {frozenset(tiers) for tiers in found} >= {
        frozenset(TIERS[i] for i in range(3) if mask & 1 << i) for mask in range(1, 8)
    }
    assert len({tiers for tiers in found if len(tiers) == 3}) == 6


def test_both_policies_both_budgets_and_the_harvest_are_compared() -> None:
    found = list(variants(["policy", "budget", "harvest"]).values())
    assert {drafting.policy for drafting in found} == {"merged", "hierarchical"}
    assert {drafting.budget for drafting in found} == {"adaptive", "fixed"}
    assert {drafting.harvest for drafting in found} == {False, True}


def test_titles_name_different_configurations() -> None:
    found = variants(["tiers", "policy", "budget", "harvest"])
    assert len(set(found.values())) == len(found)


@pytest.mark.model
def test_a_run_says_the_same_in_every_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--groups", "harvest", "--limit", "1", "--max-new-tokens", "8"]
    assert main(["ablation", *arguments]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "ablation" and any("harvest on" in row for row in table)
    assert all(figures["identical"] for figures in record["methods"].values())


@pytest.mark.parametrize("wrong", [["--groups", "colour"], ["--repeats", "0"], ["--limit", "-1"]])
def test_mistakes_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablation", *wrong]) == 2
    assert capsys.readouterr().err.strip()
