"""The live speedup held against the measured one: a real run's report."""

import json

import pytest

from bench.__main__ import main

pytestmark = pytest.mark.model
SHORT = ["--limit", "3", "--max-new-tokens", "24", "--repeats", "1", "--threads", "1"]


@pytest.mark.parametrize("extra", [[], ["--method", "single:small", "--profile-tokens", "6"]])
def test_every_prompt_has_a_live_and_a_measured_speedup(
    capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    assert main(["live", *SHORT, "--hot", "1", *extra]) == 0
    *table, line = capsys.readouterr().out.strip().splitlines()
    record = json.loads(line)
    assert record["bench"] == "live" and record["hot"] == 1 and len(record["rows"]) == 3
    for row in record["rows"]:
        assert 0.1 < row["live"] < 20 and 0.1 < row["measured"] < 20
        assert row["tokens"] >= row["tokens_per_forward"] >= 1
        if row["tokens_per_forward"] == 1:
            assert row["live"] < 1.0, "nothing was accepted, so looking for drafts was lost"
    assert "in the median" in table[-2] and record["method"] == (extra or ["", "hd"])[1]


@pytest.mark.parametrize(
    ("wrong", "words"), [(["--repeats", "0"], "at least one repeat"), (["--hot", "-1"], "negative")]
)
def test_what_cannot_be_measured_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], wrong: list[str], words: str
) -> None:
    assert main(["live", *wrong]) == 2
    assert words in capsys.readouterr().err
