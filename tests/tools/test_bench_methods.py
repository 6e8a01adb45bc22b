"""The commands that compare methods: what they compare, and a report of a real run each."""

import json

import pytest

from bench import truth
from bench.speed import ablation, tier_after_tier
from engine.drafting.databases import Databases
from engine.types import TIERS
from tests.conftest import EMBEDDED
from tests.support.toy import ToyBackend, deviating
from tests.tools.conftest import Program


def test_the_ablation_compares_every_subset_and_order_of_the_tiers() -> None:
    plain, *found = ablation().values()
    assert plain.name == "plain"
    tiers = [method.drafting.tiers for method in found]
    assert {frozenset(each) for each in tiers} >= {
        frozenset(TIERS[i] for i in range(3) if mask & 1 << i) for mask in range(1, 8)
    }
    assert len({each for each in tiers if len(each) == 3}) == 6
    assert {method.databases for method in found} == {Databases.hierarchy, tier_after_tier}
    assert {method.drafting.budget for method in found} == {"adaptive", "fixed"}
    titles, values = zip(*((m.title, (m.drafting, m.databases)) for m in found), strict=True)
    assert len(set(titles)) == len(set(values)) == len(found)


@pytest.mark.soak
@pytest.mark.model
def test_every_configuration_of_the_ablation_gives_the_same_text(bench: Program) -> None:
    *table, line = bench("speed", "--methods", "ablation", "--limit", "1", "--max-new-tokens", "8")
    record = json.loads(line)
    assert list(record["methods"]) == list(ablation())
    assert any(row.startswith("| hierarchical, fixed 7 nodes") for row in table)
    assert all(figures["identical"] for figures in record["methods"].values())


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_the_speed_command_knows_heads(
    monkeypatch: pytest.MonkeyPatch, temperature: str, bench: Program
) -> None:
    toy, plain = ToyBackend(guesses=deviating(1.0)), ToyBackend()
    monkeypatch.setattr("bench.harness.load_model", lambda name, options: toy)
    names = ["plain", "hd", "head@1", "head@2", "head", "hd+head"]
    run = ["speed", "--methods", ",".join(names), "--limit", "3", "--max-new-tokens", "24"]
    *table, line = bench(*run, "--temperature", temperature)
    found = json.loads(line)["methods"]
    assert list(found) == names and all(figures["identical"] for figures in found.values())
    calls = {name: figures.get("head_calls_per_step") for name, figures in found.items()}
    assert calls["plain"] is calls["hd"] is None
    assert 0.8 < calls["head@1"] <= 1 < calls["head@2"] <= 2
    assert any("head calls" in row for row in table)
    monkeypatch.setattr("bench.harness.load_model", lambda name, options: plain)
    assert "brings no head" in bench.refusal(*run)


SMALL = EMBEDDED.with_name("small")


def row(live: float | None, proof: float | None, compare: float | None) -> truth.Record:
    return {
        "live": live, "proof": proof, "compare": compare, "category": "math", "tokens": 9,
        "tokens_per_forward": 1.0, "identical": True,
    }  # fmt: skip


def test_what_the_page_says_is_compared_with_compare(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(1.08, 1.5, 1.0), row(None, 1.0, 2.0), row(0.96, 1.02, None)]
    found = truth.differences(rows)
    assert found["live_off"] == pytest.approx([0.08, None, -0.04])
    assert found["proof_off"] == pytest.approx([0.5, -0.5, 0.02]), "without a speedup it is 1"
    truth.Truth().show({"rows": rows, **found})
    shown = capsys.readouterr().out
    assert "live: 2 of 2 within 10% of Compare, median 6.0%, worst 8.0%" in shown
    assert "1.00 tokens per forward: 1 of 2 live speedups" in shown


@pytest.mark.soak
@pytest.mark.model
def test_answers_of_the_app_are_proved_and_compared(bench: Program) -> None:
    options = ["--limit", "2", "--max-new-tokens", "12", "--repeats", "1", "--hopeless", "1"]
    record = bench.record("truth", "--model", str(SMALL), *options)
    assert record["bench"] == "truth" and record["model"] == "small"
    assert [each["hopeless"] for each in record["rows"]] == [False, True]
    for each in record["rows"]:
        assert each["identical"] and each["tokens"] > 0
    assert len(record["proof_off"]) == 2


STACK = ["--limit", "1", "--max-new-tokens", "12", "--profile-tokens", "6"]


@pytest.mark.soak
@pytest.mark.model
def test_a_run_measures_what_was_planned_and_its_rivals(bench: Program) -> None:
    *table, line = bench("stack", *STACK, "--temperature", "0.7")
    record = json.loads(line)
    measured, predicted = record["measured_ms_per_token"], record["predicted_ms_per_token"]
    assert {"plain", "hd", "hd+hsd"} <= set(measured)
    kinds = [name.partition(":") for name in measured]
    assert {kind for kind, colon, _ in kinds if colon} == {"single", "hsd"}
    assert any("/" in plan for _, colon, plan in kinds if colon)
    assert all(value > 0 for value in [*measured.values(), *predicted.values()])
    assert set(measured) - set(predicted) == {"hd+hsd"}
    singles = [name for name in measured if name.startswith("single:")]
    assert f"single:{record['best_single']}" == min(singles, key=lambda name: measured[name])
    best = measured[f"single:{record['best_single']}"]
    named = {plan: name for name, plan in record["plans"].items()}
    planned, fastest = (measured[named[record[key]]] for key in ("planned", "fastest"))
    assert predicted[named[record["planned"]]] == min(predicted.values())
    assert fastest == min(measured[name] for name in record["plans"])
    assert record["behind_fastest"] == pytest.approx(planned / fastest - 1, abs=1e-3)
    decoding = record["decode_speedup_over_best_single"]
    assert decoding == pytest.approx(best / planned, rel=1e-3)
    assert record["speedup_over_best_single"] > 0
    least = min(predicted[name] for name in singles)
    assert record["reachable"] == pytest.approx(least / min(predicted.values()), rel=1e-3)
    whole, alone = record["speedup_over_plain"], record["decode_speedup_over_plain"]
    assert whole["plain"] == alone["plain"] == 1.0 and set(whole) == set(alone) == set(measured)
    for name, forwards in record["tokens_per_forward"].items():
        assert forwards > 1 or (whole[name] or 0.0) <= 1 >= (alone[name] or 0.0)
    assert set(record["differing_answers"].values()) == {0}
    assert any(f"planned: {record['planned']}" in row for row in table)
