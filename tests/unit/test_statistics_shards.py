"""Statistics counted in shards: the same file as the builder in memory makes, however it is cut."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import StorageError
from storage import statistics_shards
from storage.statistics_build import build
from storage.statistics_shards import COUNTED, Documents, Plan, count, count_shard, pieces, reduce
from tests.support.shards import Inline, Made, count_inline, job, plan, texts

BUDGET = 20_000


def sharded(
    folder: Path,
    shards: Sequence[Documents],
    wanted: Plan,
    budget: int = BUDGET,
    memory: int = 1 << 24,
    most: int = 1 << 20,
) -> bytes:
    """The file that is made of these shards."""
    wanted.claim(folder / "work", 1)
    for number, documents in enumerate(shards):
        count_shard(folder / "work", str(number), documents, wanted.vocabulary, most)
    (folder / "work" / COUNTED).write_text(json.dumps({"shards": len(shards)}))
    reduce(folder / "work", wanted, folder / "out.db", "a title", budget, memory)
    assert not (folder / "work").exists(), "nothing is left behind"
    return (folder / "out.db").read_bytes()


def in_memory(folder: Path, documents: Documents, wanted: Plan, budget: int = BUDGET) -> bytes:
    path = folder / "in_memory.db"
    build(documents, path, "tok", wanted.vocabulary, "a title", budget, fewest=wanted.fewest)
    return path.read_bytes()


@pytest.mark.grid(1)
@pytest.mark.parametrize(("vocabulary", "length"), [(300, 400), (70_000, 300), (1 << 19, 50)])
@pytest.mark.parametrize(
    ("cuts", "fewest", "budget"), [(1, 2, 1 << 30), (5, 1, BUDGET), (9, 2, 999)]
)
def test_it_is_the_file_of_the_builder_in_memory(
    tmp_path: Path, vocabulary: int, length: int, cuts: int, fewest: int, budget: int
) -> None:
    documents, wanted = texts(cuts, 60, length, vocabulary), plan(vocabulary, fewest)
    shards = [documents[at::cuts] for at in range(cuts)]
    assert sharded(tmp_path, shards, wanted, budget) == in_memory(
        tmp_path, documents, wanted, budget
    )


def test_a_shard_of_many_tokens_is_counted_in_pieces(tmp_path: Path) -> None:
    documents, wanted = texts(4, 30, 80, 50), plan(50)
    made = sharded(tmp_path, [documents[:25], documents[25:]], wanted, most=200)
    assert made == in_memory(tmp_path, documents, wanted)
    cut = [*pieces(documents, 200)]
    assert len(cut) > 5 and sum(map(len, cut)) == len(documents)
    assert all(len(piece) == 1 or sum(map(len, piece)) <= 200 for piece in cut)


def test_ranges_of_keys_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, wanted = texts(3, 40, 500, 90), plan(90)
    monkeypatch.setattr(statistics_shards, "SKETCH", 7)
    monkeypatch.setattr(statistics_shards, "ROW_BYTES", 20_000)
    ranges: list[int] = []
    rank = statistics_shards.Reduction.rank

    def counted(self: statistics_shards.Reduction, size: int, shorter: Any) -> Any:
        ranges.append(len(self.cuts[size]))
        return rank(self, size, shorter)

    monkeypatch.setattr(statistics_shards.Reduction, "rank", counted)
    made = sharded(tmp_path, [documents[:9], documents[9:], []], wanted)
    assert made == in_memory(tmp_path, documents, wanted)
    assert min(ranges) >= 1 and max(ranges) > 10


@pytest.fixture
def made(tmp_path: Path) -> Made:
    (tmp_path / "notes").mkdir()
    return Made(tmp_path / "notes")


def reduced(folder: Path) -> bytes:
    reduce(folder / "work", plan(50), folder / "out.db", "a title", BUDGET, 1 << 24)
    return (folder / "out.db").read_bytes()


class Gone(BaseException):
    """The process ended here."""


def test_who_is_interrupted_continues_at_any_file(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at every fourth file that is to get its name, of counting and of adding up, and at
    the last. Nothing is cleaned up, as in a process that is killed."""
    expected = in_memory(tmp_path, made.all(), plan(50))
    rename, ended = os.replace, list[str]()

    def moved(source: Path, target: Path) -> None:
        if (name := Path(target).name) not in ended:
            ended.append(name)
            if name == "out.db" or len(ended) % 4 == 0:
                raise Gone
        rename(source, target)

    monkeypatch.setattr("storage.statistics_shards.os.replace", moved)
    monkeypatch.setattr(statistics_shards, "ROW_BYTES", 30_000)
    monkeypatch.setattr(statistics_shards, "SKETCH", 7)
    unlink = Path.unlink

    def kept(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith("."):
            unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", kept)
    result = b""
    while not result:
        try:
            count_inline(job(tmp_path, made))
            result = reduced(tmp_path)
        except Gone:
            assert not (tmp_path / "out.db").exists(), "nothing appears before it is complete"
    assert result == expected
    counting = [name for name in ended if name.startswith(("shard", "volume", "counted"))]
    ranking = [name for name in ended if name.startswith(("ranked", "whole"))]
    assert len(counting) >= 20 and len(ranking) >= 20 and ended[-1] == "out.db"


def test_shards_are_counted_in_processes(tmp_path: Path, made: Made) -> None:
    wanted, told = job(tmp_path, made), dict[int, float]()
    wanted.count_shard("00001-00002", (1, 1))
    wanted.count_volume(0, Inline(), 1, lambda share: None)
    made.noted()
    count(wanted, 2, told.__setitem__)
    assert made.noted() == [
        "counted (1, 0)", "counted (2, 0)", "counted (2, 1)", "counted (2, 2)", "read 1", "read 2",
    ], "what is counted is neither counted nor read again"  # fmt: skip
    assert told == {0: 1.0, 1: 1.0, 2: 1.0}
    count(wanted, 2)
    assert made.noted() == []
    expected = in_memory(tmp_path, made.all(), plan(50))
    assert reduced(tmp_path) == expected


def test_parts_are_counted_apart_and_added_up_together(tmp_path: Path, made: Made) -> None:
    expected = in_memory(tmp_path, made.all(), plan(50))
    made.noted()
    for number, read in ((2, ["read 1"]), (1, ["read 0", "read 2"]), (1, [])):
        wanted = job(tmp_path, made)
        count(wanted, 1, part=(number, 2))
        assert [note for note in made.noted() if note.startswith("read")] == read
        assert not wanted.counted
    count(wanted, 1)
    assert made.noted() == [] and reduced(tmp_path) == expected


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="--memory"):
        sharded(tmp_path, [texts(1, 9, 9000, 900)], plan(900), memory=1 << 18)


def test_a_token_of_another_vocabulary_ends_it(tmp_path: Path, made: Made) -> None:
    wanted = job(tmp_path, replace(made, bad=70))
    with pytest.raises(StorageError, match="token 70"):
        count(wanted, 1)
    assert not wanted.counted


def test_a_work_folder_belongs_to_its_texts_and_settings(tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert plan(5).claim(work, 700) == 700
    assert plan(5).claim(work, 900) == 700, "cut as at the start"
    for other, words in (
        (plan(6), "vocabulary"),
        (plan(5, 1), "fewest"),
        (plan(5, 2, "b"), "texts"),
    ):
        with pytest.raises(StorageError, match=f"started with another {words}"):
            other.claim(work, 700)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear all")
    with pytest.raises(StorageError, match="something else"):
        plan(5).claim(tmp_path / "full", 700)
    (work / "plan.json").write_text("[")
    with pytest.raises(StorageError, match="cannot be used"):
        plan(5).claim(work, 700)


def test_without_duckdb_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(StorageError, match="pip install"):
        count_shard(tmp_path, "0", [np.array([1, 2, 3], dtype=np.uint32)], 9)
