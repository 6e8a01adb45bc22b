"""The measurement of heads: what it compares, its bars, and why it cannot run where it cannot."""

import json
from pathlib import Path

import pytest

from bench import heads
from bench.__main__ import main
from bench.measure import Result
from bench.peer import Reply
from engine.backends.toy import ToyBackend, deviating
from engine.heads.base import LogitGuess
from engine.sampling import choose, probabilities
from engine.settings import Sampling
from tests.unit.test_heads import logits

SHORT = ["--limit", "3", "--max-new-tokens", "24", "--depths", "1,2,9", "--peers", ""]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyBackend:
    toy = ToyBackend(guesses=deviating(1.0))
    monkeypatch.setattr(heads, "load_model", lambda name, options: toy)
    return toy


def test_a_run_measures_each_alone_and_both_together(
    toy: ToyBackend, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "heads.json"
    assert main(["heads", *SHORT, "--save", str(file)]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert json.loads(file.read_text()) == record
    assert record["head"]["name"] == "toy head" and set(record["runs"]) == {"0", "0.7"}
    for found in record["runs"].values():
        names = ["plain", "hd", "head@1", "head@2", "head", "hd+head", "shuffled"]
        assert list(found["methods"]) == names, "nine is deeper than the head guesses"
        assert all(figures["identical"] for figures in found["methods"].values())
        assert found["best_fixed"] in names and len(found["bars"]) == 5
        one = found["methods"]["head@1"]
        assert one["head_asked"] > 0.8 and 0 < one["kept_of_reached"][0] <= 1
        assert one["head_drafted"] >= one["head_accepted"] > 0
        assert "head_asked" not in found["methods"]["hd"]
        assert found["methods"]["shuffled"].get("head_accepted", 0) <= 3
        for bar in found["bars"].values():
            assert bar["reached"] == (bar["measured"] >= bar["least"])
    assert any("NOT reached" in row or ": reached" in row for row in table)


def test_a_model_without_a_head_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heads, "load_model", lambda name, options: ToyBackend())
    assert main(["heads", *SHORT]) == 2
    assert "brings no head" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--depths", "x"], ["--temperatures", "-1"], ["--peers", "fast"], ["--depths", ""]],
    ids=str,
)
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heads", *SHORT, *wrong]) == 2
    assert capsys.readouterr().err.strip()


def result(category: str, tokens: int, seconds: float) -> Result:
    made = Result(category)
    made.note(Reply(list(range(tokens)), seconds, seconds, tokens))
    return made


def test_the_bars_are_of_speeds() -> None:
    results = {
        "plain": [result("a", 10, 1.0), result("b", 10, 1.0)],
        "hd": [result("a", 10, 0.5), result("b", 10, 0.5)],
        "head@2": [result("a", 10, 0.8), result("b", 10, 0.8)],
        "hd+head": [result("a", 10, 0.4), result("b", 10, 0.4)],
        "shuffled": [result("a", 10, 0.52), result("b", 10, 0.52)],
    }
    found = dict(heads.bars(results, {"a": {}, "b": {}}, "head@2"))
    measured = [round(bar["measured"], 2) for bar in found.values()]
    assert measured == [1.25, 2.0, 2.5, 1.92, 0.96]
    assert [bar["reached"] for bar in found.values()] == [True, True, True, True, False]


def test_a_shuffled_guess_is_as_sure_of_other_tokens() -> None:
    row = logits()
    real, sampling = LogitGuess(row), Sampling(temperature=0.7, seed=1)
    bad = heads.ShuffledGuess(real, 50)
    assert [p for _, p in bad.likeliest(5)] == [p for _, p in real.likeliest(5)]
    assert {t for t, _ in bad.likeliest(5)} == {(t + 25) % 50 for t, _ in real.likeliest(5)}
    assert bad.probability(3) == pytest.approx(float(probabilities(row)[28]))
    assert bad.draw(4, sampling) == (choose(row, sampling, 4) + 25) % 50
