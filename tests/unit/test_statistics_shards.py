"""Statistics counted in shards: the same file as the builder in memory makes, however it is cut."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import StorageError
from storage import statistics_shards
from storage.statistics_build import build
from storage.statistics_shards import COUNTED, Plan, count, count_shard, reduce, shard_file

Documents = Sequence[np.ndarray[Any, np.dtype[np.uint32]]]
BUDGET = 20_000


def texts(seed: int, documents: int, length: int, vocabulary: int) -> list[Any]:
    """Documents in which few tokens are frequent, some of them empty."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(0, 2 * length, documents)
    return [(vocabulary * dice.random(size) ** 4).astype(np.uint32) for size in lengths]


def plan(vocabulary: int, fewest: int = 2, text: str = "a text") -> Plan:
    return Plan((text,), "tok", vocabulary, fewest)


def sharded(
    folder: Path,
    shards: Sequence[Documents],
    wanted: Plan,
    budget: int = BUDGET,
    memory: int = 1 << 24,
) -> bytes:
    """The file that is made of these shards."""
    wanted.claim(folder / "work", 1)
    for number, documents in enumerate(shards):
        count_shard(folder / "work", number, documents, wanted.vocabulary)
    (folder / "work" / COUNTED).write_text(json.dumps({"shards": len(shards)}))
    reduce(folder / "work", wanted, folder / "out.db", "a title", budget, memory)
    assert not (folder / "work").exists(), "nothing is left behind"
    return (folder / "out.db").read_bytes()


def in_memory(folder: Path, documents: Documents, wanted: Plan, budget: int = BUDGET) -> bytes:
    path = folder / "in_memory.db"
    build(documents, path, "tok", wanted.vocabulary, "a title", budget, fewest=wanted.fewest)
    return path.read_bytes()


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


@settings(deadline=None, derandomize=True, max_examples=10)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 4), max_size=9), max_size=3), min_size=1, max_size=3)
)
def test_any_small_texts(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    cut = [[np.array(text, dtype=np.uint32) for text in shard] for shard in shards]
    whole = [text for shard in cut for text in shard]
    if any(len(text) > 1 for text in whole):
        assert sharded(folder, cut, plan(5, 1)) == in_memory(folder, whole, plan(5, 1))
    else:
        with pytest.raises(StorageError, match="nothing to count"):
            sharded(folder, cut, plan(5, 1))


class Gone(BaseException):
    """The process ended here."""


def test_who_is_interrupted_goes_on_at_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cleaned up, as in a process that is killed."""
    documents, wanted = texts(5, 20, 200, 50), plan(50)
    expected = in_memory(tmp_path, documents, wanted)
    shards = [documents[:10], documents[10:]]
    replace, left = os.replace, 0

    def moved(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Gone
        replace(source, target)

    monkeypatch.setattr("storage.statistics_shards.os.replace", moved)
    unlink = Path.unlink

    def kept(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith("."):
            unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", kept)
    moments, made = 0, b""
    while not made:
        moments += 1
        left = moments  # each time it comes one file further
        try:
            work = tmp_path / "work"
            wanted.claim(work, 1)
            for number, part in enumerate(shards):
                if not shard_file(work, number).exists():
                    count_shard(work, number, part, 50)
            if not (work / COUNTED).exists():
                (work / COUNTED).write_text('{"shards": 2}')
            reduce(work, wanted, tmp_path / "out.db", "a title", BUDGET, 1 << 24)
            made = (tmp_path / "out.db").read_bytes()
        except Gone:
            assert not (tmp_path / "out.db").exists(), "nothing appears before it is complete"
    assert made == expected and moments > 7


def test_shards_are_counted_in_processes(tmp_path: Path) -> None:
    documents, wanted = texts(6, 30, 100, 40), plan(40)
    numbers: list[list[int]] = [list(range(at, at + 10)) for at in (0, 10, 20)]
    asked: list[Sequence[int]] = []
    told: list[int] = []

    def tokenized(some: Sequence[int]) -> Documents:
        asked.append(some)
        return [documents[number] for number in some]

    work = tmp_path / "work"
    wanted.claim(work, 1)
    count_shard(work, 1, [documents[number] for number in numbers[1]], 40)
    count(work, numbers, tokenized, 40, 2, told.append)
    assert asked == [numbers[0], numbers[2]], "what is counted is not read again"
    assert sorted(told) == [0, 1, 2]
    count(work, [], tokenized, 40, 2)
    reduce(work, wanted, tmp_path / "out.db", "a title", BUDGET, 1 << 24)
    assert (tmp_path / "out.db").read_bytes() == in_memory(tmp_path, documents, wanted)


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="--memory"):
        sharded(tmp_path, [texts(1, 9, 9000, 900)], plan(900), memory=1 << 18)


def test_a_token_of_another_vocabulary_ends_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    plan(5).claim(work, 1)
    with pytest.raises(StorageError, match="token 7"):
        count(work, [[[1, 2, 7]]], lambda some: [np.array(t, dtype=np.uint32) for t in some], 5, 1)
    assert not (work / COUNTED).exists()


def test_a_work_folder_belongs_to_its_texts_and_settings(tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert plan(5).claim(work, 700) == 700
    assert plan(5).claim(work, 900) == 700, "cut as it was begun"
    for other, words in (
        (plan(6), "vocabulary"),
        (plan(5, 1), "fewest"),
        (plan(5, 2, "b"), "texts"),
    ):
        with pytest.raises(StorageError, match=f"begun with another {words}"):
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
        count_shard(tmp_path, 0, [np.array([1, 2, 3], dtype=np.uint32)], 9)
