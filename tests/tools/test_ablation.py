"""The ablation: which configurations it compares, and that its report is one of a real run."""

import json

import pytest

from bench.__main__ import main
from bench.ablation import GROUPS, tier_after_tier, variants
from engine.decode import draft
from engine.drafting.budget import Budget
from engine.drafting.context import ContextTier
from engine.drafting.databases import Databases
from engine.methods import hierarchy
from engine.settings import Drafting
from engine.types import CONTEXT, MODEL, TIERS


def test_every_subset_and_every_order_of_the_tiers_is_there() -> None:
    found = [method.drafting.tiers for method in variants(GROUPS)]
    assert {frozenset(tiers) for tiers in found} >= {
        frozenset(TIERS[i] for i in range(3) if mask & 1 << i) for mask in range(1, 8)
    }
    assert len({tiers for tiers in found if len(tiers) == 3}) == 6


def test_both_ways_of_access_and_both_budgets_are_compared() -> None:
    found = variants(["access", "budget"])
    assert {method.databases for method in found} == {hierarchy, tier_after_tier}
    assert {method.drafting.budget for method in found} == {"adaptive", "fixed"}


def test_titles_name_different_configurations() -> None:
    found = variants(GROUPS)
    titles, values = zip(*((m.title, (m.drafting, m.databases)) for m in found), strict=True)
    assert len(set(titles)) == len(set(values)) == len(found)


def test_tier_after_tier_asks_a_lower_tier_only_for_the_nodes_that_are_left() -> None:
    log, said = [1, *range(2, 9), 1], [1, 50, 60, 70]
    databases = Databases(ContextTier(log))
    databases.learned.finish(said, 3)
    drafters = tier_after_tier(databases, Drafting(tiers=(CONTEXT, MODEL)))
    for nodes, sources in ((4, {CONTEXT}), (64, {CONTEXT, MODEL})):
        drafting = Drafting(nodes=nodes, budget="fixed", threshold=0.0)
        tree, _ = draft(drafters, log, Budget(drafting, 7, 100))
        assert set(tree.sources[1:]) == sources
    assert tier_after_tier(databases, Drafting(tiers=())) == []


@pytest.mark.model
def test_a_run_says_the_same_in_every_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--groups", "access", "--limit", "1", "--max-new-tokens", "8"]
    assert main(["ablation", *arguments]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "ablation" and any("hierarchical" in row for row in table)
    assert all(figures["identical"] for figures in record["methods"].values())


@pytest.mark.parametrize("wrong", [["--groups", "colour"], ["--repeats", "0"], ["--limit", "-1"]])
def test_mistakes_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablation", *wrong]) == 2
    assert capsys.readouterr().err.strip()
