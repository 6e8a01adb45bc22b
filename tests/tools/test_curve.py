"""Forwards by length: what is timed, and what was expected of it."""

import json
from pathlib import Path

import pytest

from bench.curve import Timed
from engine.backends.folded_attention import FOLDED
from engine.drafting.costs import CostCurve
from tests.conftest import EMBEDDED
from tests.support.backends import save_model
from tests.support.toy import ToyBackend
from tests.tools.conftest import Program

RUN = ["curve", "--threads", "1", "--repeats", "1", "--sizes", "3,7"]


def test_what_was_expected_is_told_at_the_pace_of_the_first_plain_step() -> None:
    way = Timed("toy", ToyBackend(), CostCurve({0: 1.0, 7: 2.0}, 0.0, 0.0, 1e-3, 1e-4))
    row = way.row(256, {0: 2.0, 7: 5.0})
    assert row["ms"] == {0: 2000.0, 7: 5000.0} and row["ratio"] == {0: 1.0, 7: 2.5}
    assert row["off"] == pytest.approx({0: 0.0, 7: -0.2})
    far = way.row(1256, {0: 4.0, 7: 8.0})["off"]
    assert far == pytest.approx({0: 0.0, 7: 2 * (2 + 1 + 0.7) / 8 - 1})
    way.curve = None
    assert way.row(256, {0: 2.0})["off"] is None


@pytest.mark.soak
@pytest.mark.model
def test_a_model_is_timed_after_texts_of_several_lengths(tmp_path: Path, bench: Program) -> None:
    tiny = save_model("llama-gqa", tmp_path / "tiny")
    run = [*RUN, "--model", str(tiny), "--dtype", "bfloat16", "--lengths", "60,100"]
    *table, line = bench(*run)
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


@pytest.mark.soak
@pytest.mark.model
def test_files_and_types_of_a_folder_side_by_side(bench: Program) -> None:
    folder = str(EMBEDDED)
    names = ["embedded-gguf", f"{folder}@float32", f"{folder}@bfloat16"]
    run = ["curve", *names, "--repeats", "1", "--threads", "1", "--sizes", "0,1,3"]
    record = bench.record(*run, "--lengths", "60")
    assert list(record["models"]) == names
    kinds = [model["dtype"] for model in record["models"].values()]
    assert kinds == ["Q8_0", "float32", "bfloat16"]
    assert list(dict.fromkeys(row["model"] for row in record["rows"])) == names
    for row in record["rows"]:
        assert list(row["ratio"]) == ["0", "1", "3"] and row["ratio"]["0"] == 1.0
        assert all(speedup >= 1.0 for speedup in row["speedup"].values())
