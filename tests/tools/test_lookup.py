"""`bench lookup`: the made-up text, the keys, what is measured and what is left behind."""

import json
import os
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench.lookup import (
    DOCUMENT,
    VOCABULARY,
    Source,
    alone,
    built,
    keys_in_use,
    look_ups,
    percentiles,
)
from engine.errors import SettingError
from storage.statistics import KEY_SIZE, StatisticsTable


def test_the_same_seed_is_the_same_language_and_text() -> None:
    text = np.concatenate(Source(3).documents(5_000, text=0))
    assert text.dtype == np.uint32 and len(text) == 5_000 and text.max() < VOCABULARY
    assert np.array_equal(text, np.concatenate(Source(3).documents(5_000, text=0)))
    assert not np.array_equal(text, np.concatenate(Source(3).documents(5_000, text=1)))
    assert not np.array_equal(text, np.concatenate(Source(4).documents(5_000, text=0)))


def pairs_of(source: Source, text: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(document[at : at + 3].tolist())
        for document in source.documents(100_000, text)
        for at in range(DOCUMENT - 2)
    )


def test_texts_of_one_language_share_n_grams_and_others_do_not() -> None:
    one, same, other = (pairs_of(Source(seed), text) for seed, text in ((0, 0), (0, 1), (1, 1)))
    frequent = {gram for gram, count in one.items() if count > 4}
    assert len(frequent) > 100
    assert len(frequent & set(same)) > 0.9 * len(frequent)
    assert len(frequent & set(other)) < 0.1 * len(frequent)


def test_tokens_follow_zipfs_law() -> None:
    counts = np.bincount(np.concatenate(Source(0).documents(400_000, text=0)))
    # Between ranks 10 and 1,000 a straight line of slope -1 in logarithms, about.
    ranked = np.sort(counts)[::-1]
    slope = np.log(ranked[999] / ranked[9]) / np.log(1_000 / 10)
    assert slope == pytest.approx(-1, abs=0.15)


def test_keys_are_different_and_of_every_length() -> None:
    keys = keys_in_use(60, seed=0)
    assert len(set(keys)) == len(keys) == 60 * KEY_SIZE
    assert Counter(map(len, keys)) == {1: 60, 2: 60, 3: 60}
    assert keys == keys_in_use(60, seed=0) != keys_in_use(60, seed=1)
    assert all(type(token) is int for key in keys for token in key)


def test_what_is_built_is_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    result = built(path, 3_000, seed=0)
    table = StatisticsTable(path)
    stored = table.connection.execute("SELECT count(*) FROM grams").fetchone()[0]
    assert result["keys"] == stored and result["file_bytes"] == table.size_bytes
    assert 1_000 < result["ngrams"] == int(table.meta["entries"]) < 9_000
    assert result["ngrams_per_second"] == pytest.approx(result["ngrams"] / result["build_seconds"])
    table.close()


def test_look_ups_are_told_by_length(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    built(path, 3_000, seed=0)
    keys = keys_in_use(50, seed=0)
    figures = look_ups(path, keys)["look_ups"]
    assert list(figures) == ["all", "1", "2", "3"]
    assert [figures[length]["keys"] for length in figures] == [150, 50, 50, 50]
    table = StatisticsTable(path)
    for size in (1, 2, 3):
        known = [table.look_up(key) is not None for key in keys if len(key) == size]
        assert figures[str(size)]["known"] == pytest.approx(sum(known) / len(known))
    assert 0 < figures["all"]["known"] < 1
    table.close()


def test_percentiles() -> None:
    assert percentiles(np.arange(101.0)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_every_measurement_has_a_process_of_its_own() -> None:
    ids = [alone(os.getpid) for _ in range(2)]
    assert len({*ids, os.getpid()}) == 3


def test_a_killed_measurement_is_explained() -> None:
    with pytest.raises(SettingError, match="Choose a smaller --ngrams"):
        alone(partial(os._exit, 9))


def test_the_command_prints_tables_then_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lookup", "--ngrams", "800,2000", "--keys", "40", "--folder", str(tmp_path)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    record = json.loads(output.splitlines()[-1])
    assert len(record["files"]) == 2 and output.count("{") == output.splitlines()[-1].count("{")
    small, large = record["files"]
    assert small["ngrams"] < large["ngrams"] and small["file_bytes"] <= large["file_bytes"]
    for figures in (small, large):
        assert f"{figures['ngrams']:,}" in output
        for length in figures["look_ups"].values():
            assert 0 < length["warm_us"]["p50"] <= length["warm_us"]["p99"]
            assert 0 < length["cold_us"]["p50"] <= length["cold_us"]["p99"]
        if Path("/proc/self/status").exists():
            assert figures["build_memory_bytes"] >= 0
    assert str(tmp_path) not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ngrams", "many"],
        ["--ngrams", ""],
        ["--ngrams", "0"],
        ["--ngrams", "5,-5"],
        ["--keys", "0"],
        ["--seed", "-1"],
        ["--folder", "/no/such/folder"],
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lookup", *arguments]) == 2
    errors = capsys.readouterr().err
    assert "Give" in errors or "Choose" in errors
