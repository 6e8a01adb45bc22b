"""Forwards by length: what is timed, and what was expected of it."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from engine.backends.toy import ToyBackend
from engine.drafting.costs import CostCurve
from tests.conftest import EMBEDDED
from tests.support.backends import save_model

RUN = ["curve", "--threads", "1", "--repeats", "1", "--sizes", "3,7"]


def options(sizes: list[int], repeats: int) -> argparse.Namespace:
    return argparse.Namespace(sizes=sizes, repeats=repeats)


def test_what_was_expected_is_told_at_the_pace_of_the_first_plain_step() -> None:
    from bench.curve import Timed

    way = Timed("toy", ToyBackend(), CostCurve({0: 1.0, 7: 2.0}, 0.0, 0.0, 1e-3, 1e-4))
    row = way.row(256, {0: 2.0, 7: 5.0})
    assert row["ms"] == {0: 2000.0, 7: 5000.0} and row["ratio"] == {0: 1.0, 7: 2.5}
    assert row["off"] == pytest.approx({0: 0.0, 7: -0.2})
    far = way.row(1256, {0: 4.0, 7: 8.0})["off"]
    assert far == pytest.approx({0: 0.0, 7: 2 * (2 + 1 + 0.7) / 8 - 1})
    way.curve = None
    assert way.row(256, {0: 2.0})["off"] is None


@pytest.mark.model
def test_a_model_is_timed_after_texts_of_several_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.backends.folded_attention import FOLDED

    tiny = save_model("llama-gqa", tmp_path / "tiny")
    run = [*RUN, "--model", str(tiny), "--dtype", "bfloat16", "--lengths", "60,100"]
    assert main(run) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    (model,) = record["models"].values()
    assert model["model"] == "tiny" and model["dtype"] == "bfloat16"
    cases = [(row["length"], row["attention"]) for row in record["rows"]]
    assert cases == [(length, FOLDED) for length in (60, 100)]
    for row in record["rows"]:
        assert list(row["ratio"]) == ["0", "3", "7"] and row["ratio"]["0"] == 1.0
        assert row["ratio"]["7"] == pytest.approx(row["ms"]["7"] / row["ms"]["0"])
        assert row["off"] is not None
    assert sum(FOLDED in row for row in table) == 2


# several models side by side


def test_models_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import curve

    slow, fast = ToyBackend(name="slow"), ToyBackend(name="fast")
    seen: list[tuple[str, int]] = []
    spent = {("slow", 0): 4.0, ("slow", 3): 6.0, ("fast", 0): 1.0, ("fast", 3): 5.0}

    def forward(backend: Any, prompt: list[int], nodes: int) -> float:
        assert len(prompt) in (9, 20)
        seen.append((backend.info.name, nodes))
        # One round in three is disturbed, and the first forward of each model.
        return spent[seen[-1]] * (9.0 if len(seen) <= 10 else 1.0)

    models = [curve.Timed(toy.info.name, toy, None) for toy in (slow, fast)]
    monkeypatch.setattr(curve, "forward_seconds", forward)
    found = curve.timed(models, 20, options([0, 3], 3))
    assert found == [{0: 4.0, 3: 6.0}, {0: 1.0, 3: 5.0}]
    rounds = [seen[at : at + 8] for at in (2, 10, 18)]
    assert [each[0][0] for each in rounds] == ["slow", "fast", "slow"], "they begin in turn"
    for each in rounds:
        assert each[::2] == each[1::2], "untimed, then timed"
        assert sorted(each[::2]) == sorted(spent)


def test_a_model_that_decodes_plainly_is_timed_plainly() -> None:
    from dataclasses import replace

    from bench.curve import Timed, timed

    toy = ToyBackend()
    toy.info = replace(toy.info, can_tree=False)
    way = Timed("toy", toy, None)
    (times,) = timed([way], 20, options([0, 3], 1))
    assert list(times) == [0]
    row = way.row(20, times)
    assert set(row["speedup"].values()) == {1.0} and set(row["nodes"].values()) == {0}


@pytest.mark.soak
@pytest.mark.model
def test_files_and_types_of_a_folder_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(EMBEDDED)
    names = ["embedded-gguf", f"{folder}@float32", f"{folder}@bfloat16"]
    run = ["curve", *names, "--repeats", "1", "--threads", "1", "--sizes", "0,1,3"]
    assert main([*run, "--lengths", "60"]) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert list(record["models"]) == names
    kinds = [model["dtype"] for model in record["models"].values()]
    assert kinds == ["Q8_0", "float32", "bfloat16"]
    assert list(dict.fromkeys(row["model"] for row in record["rows"])) == names
    for row in record["rows"]:
        assert list(row["ratio"]) == ["0", "1", "3"] and row["ratio"]["0"] == 1.0
        assert all(speedup >= 1.0 for speedup in row["speedup"].values())
