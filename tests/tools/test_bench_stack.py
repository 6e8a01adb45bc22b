"""The measurement of stacks: what it compares, and that its report is one of a real run."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.options import EMBEDDED

SHORT = ["--limit", "1", "--max-new-tokens", "12", "--profile-tokens", "6"]


@pytest.mark.model
def test_a_run_measures_what_was_planned_and_its_rivals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "stack.json"
    assert main(["stack", *SHORT, "--temperature", "0.7", "--save", str(file)]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert json.loads(file.read_text()) == record
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
    out_of_reach = [row for row in table if row.startswith("1.2x is not reachable")]
    assert bool(out_of_reach) == (record["reachable"] < 1.2)
    assert all(f"  {line}" in table for line in record["arithmetic"])
    assert len(record["arithmetic"]) == 1 + len(singles)
    assert f"planned again with what was measured: {record['planned_again']}" in table
    whole, alone = record["speedup_over_plain"], record["decode_speedup_over_plain"]
    assert whole["plain"] == alone["plain"] == 1.0 and set(whole) == set(alone) == set(measured)
    for name, forwards in record["tokens_per_forward"].items():
        assert forwards > 1 or (whole[name] or 0.0) <= 1 >= (alone[name] or 0.0)
    assert set(record["differing_answers"].values()) == {0}
    assert any(f"planned: {record['planned']}" in row for row in table)


@pytest.mark.model
def test_the_speed_command_knows_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["plain", "hsd", "single:small", "hsd:small@2/mid@3", "hd+hsd:mid"]
    assert main(["speed", *SHORT, "--methods", ",".join(methods)]) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert list(record["methods"]) == methods and record["drafts"] == ["small", "mid"]
    assert all(figures["identical"] for figures in record["methods"].values())


@pytest.mark.model
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--drafts", "a/small,b/small"], "whose last parts differ"),
        (["--model", str(EMBEDDED)], "with --drafts, whose last parts differ"),
        (["--drafts", "nowhere/small"], "nowhere/small"),
    ],
)
def test_draft_models_that_cannot_be_are_told(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stack", *SHORT, *wrong]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.model
def test_an_unknown_model_in_a_plan_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed", *SHORT, "--methods", "plain,hsd:huge@2"]) == 2
    assert "'huge'" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_leaves_so_many_levels_per_group(bits: int) -> None:
    import torch

    from bench.inflate import rounded

    model = torch.nn.Linear(64, 6, bias=False)
    before = model.weight.detach().clone()
    rounded(model, bits)
    after = model.weight.detach()
    for old, new in zip(before, after, strict=True):
        assert len(new.unique()) <= 2**bits
        step = float(old.abs().max()) / (2 ** (bits - 1) - 0.5)
        assert float((old - new).abs().max()) <= step / 2 + 1e-6


def test_only_so_many_bits_can_be_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--size", "0.1b", "--bits", "1", "--output", str(tmp_path / "model")]
    assert main(["inflate", *arguments]) == 2
    assert "1 bits" in capsys.readouterr().err
