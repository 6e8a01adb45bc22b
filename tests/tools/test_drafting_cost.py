"""`bench drafting`: both cores draft the same steps, and the report is one of a real run."""

import json
from collections.abc import Sequence

import pytest

from bench import drafting
from bench.__main__ import main
from bench.drafting import CORES, SIZES, Clocked, Found, figures, running_on
from engine import native
from engine.drafting.budget import Budget
from engine.drafting.compiled import CompiledHierarchy
from engine.drafting.context import ContextTier
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.ngrams import CompiledCounts, NgramCounts
from engine.tree import Tree
from engine.types import TIERS

RUN = ["drafting", "--limit", "2", "--max-new-tokens", "12", "--threads", "1", "--sequences", "5"]


def test_a_core_is_the_one_that_is_asked_for() -> None:
    there = native.core
    for core, kinds in zip(
        CORES, ((CompiledHierarchy, CompiledCounts), (Hierarchy, NgramCounts)), strict=True
    ):
        with running_on(core):
            (made,) = Databases().hierarchy(TIERS)
            assert (type(made), type(ContextTier().counts)) == kinds
        assert native.core is there


def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each core drafts in the run that follows, and all that it has learned by then."""
    found: dict[str, list[str]] = {core: [] for core in CORES}
    grow = Clocked.grow

    def noting(self: Clocked, tree: Tree, tokens: Sequence[int], budget: Budget) -> object:
        work, drafter = grow(self, tree, tokens, budget), self.drafter
        assert isinstance(drafter, Hierarchy)
        drafted = tree.tokens, tree.parents, tree.sources, tree.match_lengths, budget.expected
        core = CORES[type(drafter) is Hierarchy]
        found[core].append(repr((tokens, drafted, drafter.calibration.rows())))
        return work

    monkeypatch.setattr(Clocked, "grow", noting)
    return found


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_a_run_ends_in_one_json_line_and_both_cores_draft_and_learn_the_same(
    temperature: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = noted(monkeypatch)
    monkeypatch.setattr(drafting, "EVICTED", 1 << 16)
    assert main([*RUN, "--temperature", temperature]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "drafting" and record["prompts"] == 2 and record["sequences"] == 5
    assert list(record["steps"]) == list(CORES) == list(record["sequences_ms"])
    for nodes in map(str, SIZES):
        fast, slow = (record["steps"][core][nodes] for core in CORES)
        assert fast["tokens_per_step"] == slow["tokens_per_step"] >= 1
        assert fast["steps"] == slow["steps"] > 1
        assert 0 < fast["share"] < 1 and fast["draft_warm_us"] > 0
    compiled, python = (sorted(found[core]) for core in CORES)
    assert compiled == python and len(compiled) > 8
    wanted = [row for row in table if row.startswith("wanted")]
    assert len(wanted) == 4 and all(row.endswith(("yes", "NO")) for row in wanted)


def test_figures_are_medians_and_the_share_is_of_all_time() -> None:
    cold, warm = [(1e-3, 1e-3), (2e-3, 1e-3), (6e-3, 1e-3)], [(1e-3, 5e-4)] * 3
    found = figures(Found(cold, warm, seconds=0.6, emitted=6))
    assert found == {
        "steps": 3,
        "draft_cold_us": 2000.0,
        "learn_cold_us": 1000.0,
        "draft_warm_us": 1000.0,
        "learn_warm_us": 500.0,
        "step_ms": 200.0,
        "tokens_per_step": 2.0,
        "share": 0.02,
    }


def test_mistakes_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*RUN, "--sequences", "0"]) == 2
    assert "at least one sequence" in capsys.readouterr().err
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "missing", "nothing was built. Run `make native`")
    assert main(RUN) == 2
    assert "make native" in capsys.readouterr().err
