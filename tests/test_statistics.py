"""The statistics file: what is counted is what a slow count says, and damage costs speed only."""

import random
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import StorageError
from engine.types import Continuation, Followers
from storage.statistics import (
    LARGEST_BLOB,
    META,
    NODES,
    SUFFIX,
    StatisticsTable,
    find_table,
    pack_count,
    pack_key,
    unpack,
)
from storage.statistics_build import FEWEST, SMALLEST_SHARE, WINDOW, build

BIG = 1 << 30


def made(
    path: Path, texts: Sequence[Sequence[int]], vocabulary: int = 100, budget: int = BIG
) -> StatisticsTable:
    documents = [np.array(text, dtype=np.uint32) for text in texts]
    build(documents, path, "tok", vocabulary, "a title", budget)
    return StatisticsTable(path)


def counted(texts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for at in range(len(text)):
            for size in range(1, WINDOW + 1):
                if at + size <= len(text):
                    counts[tuple(text[at : at + size])] += 1
    return counts


def reference(
    texts: Sequence[Sequence[int]],
) -> dict[tuple[int, ...], dict[tuple[int, ...], float]]:
    """Every key's paths and shares, by dictionaries alone: all of them, before the node limit."""
    counts = counted(texts)
    table = {}
    for key in [gram for gram in counts if len(gram) <= 3]:
        gain = 0.0
        nexts = [gram for gram in counts if len(gram) == len(key) + 1 and gram[:-1] == key]
        for gram in nexts:
            expected = 0.0
            if len(key) > 1:
                expected = counts[key] * counts[gram[1:]] / counts[key[1:]]
            if counts[gram] >= FEWEST:
                gain += max(0.0, counts[gram] - expected)
        if gain <= 0:
            continue
        paths: dict[tuple[int, ...], float] = {}
        for gram in sorted((g for g in counts if g[: len(key)] == key != g), key=len):
            path, share = gram[len(key) :], counts[gram] / counts[key]
            kept = len(path) == 1 or path[:-1] in paths
            if kept and counts[gram] >= FEWEST and share >= SMALLEST_SHARE:
                paths[path] = share
        if paths:
            table[key] = paths
    return table


def keys_of(table: StatisticsTable) -> list[int]:
    return [key for (key,) in table.connection.execute("SELECT key FROM grams")]


def assert_counted(table: StatisticsTable, texts: Sequence[Sequence[int]]) -> int:
    wanted, counts = reference(texts), counted(texts)
    packed = keys_of(table)
    assert packed == sorted(packed) and set(packed) == {pack_key(key) for key in wanted}
    for key, paths in wanted.items():
        found = table.look_up(key)
        assert found is not None
        assert found.total == pytest.approx(counts[key], rel=0.05)
        kept = dict(found.paths)
        assert len(found.paths) == len(kept) == min(NODES, len(paths))
        assert all(
            share == pytest.approx(paths[path], abs=0.6 / 255) for path, share in kept.items()
        )
        assert sorted(kept.values(), reverse=True) == [share for _, share in found.paths]
        listed = [path for path, _ in found.paths]
        assert all(path[:-1] in [(), *listed[:i]] for i, path in enumerate(listed))
        # The likeliest are kept: nothing that was left out is likelier than what was kept.
        left_out = [share for path, share in paths.items() if path not in kept]
        assert not left_out or max(left_out) <= min(paths[path] for path in kept) + 1e-9
    return len(wanted)


def babble(seed: int, documents: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    words = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 6))] for _ in range(12)]
    return [
        [token for _ in range(length) for token in draw.choice(words)] for _ in range(documents)
    ]


@pytest.mark.parametrize(
    ("seed", "documents", "length", "vocabulary"),
    [(0, 1, 40, 5), (1, 6, 20, 30), (2, 20, 3, 9), (3, 3, 60, 3)],
)
def test_a_build_is_what_a_slow_count_says(
    tmp_path: Path, seed: int, documents: int, length: int, vocabulary: int
) -> None:
    texts = babble(seed, documents, length, vocabulary)
    assert assert_counted(made(tmp_path / "a.db", texts), texts) > 10


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), max_size=30), min_size=1, max_size=5))
def test_any_small_texts(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.db"
    if any(len(text) > 1 for text in texts):
        assert_counted(made(path, texts), texts)
    else:
        with pytest.raises(StorageError, match="nothing to count"):
            made(path, texts)


def test_a_text_without_repetition_makes_an_empty_file(tmp_path: Path) -> None:
    table = made(tmp_path / "a.db", [[1, 2, 3, 4]])
    assert keys_of(table) == [] and table.meta["keys"] == "0"
    assert table.look_up((1,)) is None and list(table.top(5)) == []


def test_documents_do_not_run_into_each_other(tmp_path: Path) -> None:
    table = made(tmp_path / "a.db", [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2], [3, 4]])
    assert table.look_up((2,)) is None and table.look_up((2, 3)) is None
    assert table.look_up((1,)) == Followers(pytest.approx(3, rel=0.05), (Continuation((2,), 1.0),))


def test_wide_vocabularies(tmp_path: Path) -> None:
    texts = [[70_000, 1_000_000, 3] * 5]
    table = made(tmp_path / "a.db", texts, vocabulary=1_000_001)
    assert table.wide and assert_counted(table, texts) > 2
    found = table.look_up((70_000,))
    assert found is not None and found.paths[0].path == (1_000_000,)


@pytest.mark.parametrize("vocabulary", [1 << 20, 1 << 24])
def test_a_vocabulary_that_does_not_fit_a_key_is_refused(tmp_path: Path, vocabulary: int) -> None:
    with pytest.raises(StorageError, match="vocabulary"):
        made(tmp_path / "a.db", [[1, 2] * 9], vocabulary=vocabulary)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_keeps_the_keys_that_predict_most(tmp_path: Path) -> None:
    texts = babble(7, 20, 60, 60)
    whole = made(tmp_path / "whole.db", texts)
    small = made(tmp_path / "small.db", texts, budget=3_000)
    kept, packed = set(keys_of(small)), set(keys_of(whole))
    assert kept < packed and len(kept) > 0
    blobs = small.connection.execute("SELECT sum(length(tree) + 14) FROM grams").fetchone()[0]
    assert 2_000 < blobs <= 3_000
    assert all(small.read(key) == whole.read(key) for key in kept)
    assert keys_of(made(tmp_path / "none.db", texts, budget=0)) == []


def test_the_meta_data_is_complete(tmp_path: Path) -> None:
    table = made(tmp_path / "a.db", [[1, 2] * 5, [3]])
    assert set(table.meta) == set(META)
    assert (table.meta["tokens"], table.meta["documents"]) == ("11", "2")
    assert (table.meta["title"], table.meta["tokenizer"]) == ("a title", "tok")
    assert int(table.meta["keys"]) == len(keys_of(table))
    assert table.size_bytes == (tmp_path / "a.db").stat().st_size


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=3))
@settings(deadline=None, derandomize=True)
def test_keys_fit_and_differ(key: list[int]) -> None:
    packed = pack_key(key)
    assert 0 < packed < 2**62
    size = next(n for n in (3, 2, 1) if packed >> 20 * n)
    tokens = [packed >> 20 * at & 0xFFFFF for at in reversed(range(size))]
    assert tokens == key and packed >> 20 * size == size


@given(st.floats(0, 1e12))
@settings(deadline=None, derandomize=True)
def test_a_count_is_kept_within_five_percent(count: float) -> None:
    byte = pack_count(count)
    assert 0 <= byte <= 255
    if 1 <= count <= 2**31:
        assert 2 ** (byte / 8) == pytest.approx(count, rel=0.05)


def test_unpacking_follows_parents() -> None:
    blob = bytes([8, 255, 200, 5, 0, 0, 100, 6, 0, 1, 50, 7, 1, 255, 40, 9, 0])
    assert unpack(blob, wide=False) == Followers(
        2.0,
        (
            Continuation((5,), 200 / 255),
            Continuation((5, 6), 100 / 255),
            Continuation((5, 6, 263), 50 / 255),
            Continuation((9,), 40 / 255),
        ),
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.binary(max_size=80), st.booleans())
def test_unpacking_anything_works_or_says_so(blob: bytes, wide: bool) -> None:
    try:
        found = unpack(blob, wide)
    except StorageError as error:
        assert "damaged" in str(error)
    else:
        assert len(found.paths) == (len(blob) - 1) // (6 if wide else 4)


# Files that are not what they should be.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / f"tok{SUFFIX}"
    made(target, babble(1, 6, 20, 30)).close()
    return target


def edited(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"not a database at all" * 400),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "foreign": lambda path: edited(path, "DROP TABLE meta"),
    "no grams": lambda path: edited(path, "DROP TABLE grams"),
    "other columns": lambda path: edited(path, "ALTER TABLE grams ADD COLUMN more"),
    "newer": lambda path: edited(path, "UPDATE meta SET value = '2' WHERE name = 'format'"),
    "lacks": lambda path: edited(path, "DELETE FROM meta WHERE name = 'tokens'"),
    "vocabulary": lambda path: edited(
        path, "UPDATE meta SET value = 'many' WHERE name = 'vocabulary'"
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_file_that_is_none_is_refused_by_name(path: Path, breakage: str) -> None:
    BREAKAGES[breakage](path)
    with pytest.raises(StorageError) as caught:
        StatisticsTable(path)
    assert repr(str(path)) in str(caught.value) and "Build it again" in str(caught.value)


def test_names_with_odd_characters_open(tmp_path: Path, path: Path) -> None:
    odd = tmp_path / "a?b #c%41é.db"
    shutil.copy(path, odd)
    assert StatisticsTable(odd).meta["title"] == "a title"


def test_tables_are_found_by_the_tokenizer_they_are_for(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert find_table("tok", other) is None
    found = find_table("tok", other, tmp_path)
    assert found is not None and found.path == path
    shutil.copy(path, other / f"foreign{SUFFIX}")
    assert find_table("foreign", other) is None, "the name alone does not make it fit"
    assert find_table("tok", tmp_path / "nowhere") is None


def test_a_damaged_table_is_reported_and_passed_over(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / path.name).write_bytes(b"not a database")
    problems: list[str] = []
    found = find_table("tok", other, tmp_path, report=problems.append)
    assert found is not None and found.path == path
    assert len(problems) == 1 and str(other / path.name) in problems[0]


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bytes_never_raise_while_decoding(path: Path, seed: int) -> None:
    """A damaged file that still opens finds something or nothing; it does not end an answer."""
    draw = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(40):
        data[draw.randrange(4096, len(data))] = draw.randrange(256)
    path.write_bytes(data)
    try:
        table = StatisticsTable(path)
    except StorageError:
        return
    for a in range(30):
        for key in ((a,), (a, a), (a, 3), (a, 1, 2)):
            found = table.look_up(key)
            assert found is None or len(found.paths) <= NODES
    assert len(list(table.top(10))) <= 10


@pytest.mark.parametrize(
    "blob",
    ["x''", "x'00'", "x'0801'", "x'08000102'", "x'0805FFFFFF'", "'words'", "7", "zeroblob(100000)"],
)
def test_poisoned_entries_are_like_missing_ones(path: Path, blob: str) -> None:
    edited(path, f"UPDATE grams SET tree = {blob}")
    table = StatisticsTable(path)
    for (packed,) in table.connection.execute("SELECT key FROM grams").fetchall():
        found = table.read(packed)
        assert found is None or found.paths == ()
    assert list(table.top(3)) == []
    assert LARGEST_BLOB < 100_000


def test_poisoned_tokens_do_not_change_an_answer(path: Path) -> None:
    from engine.backends.toy import ToyBackend
    from engine.decode import decode
    from engine.drafters.published import PublishedStatistics
    from engine.drafters.statistics import StatisticsDrafter
    from engine.settings import Drafting, Generation, Sampling
    from engine.types import Step

    keys = ", ".join(f"({pack_key((a,))}, x'FFFFFFFFFFFFFFFFFF')" for a in range(256))
    edited(path, "DELETE FROM grams", f"INSERT INTO grams VALUES {keys}")
    generation = Generation(Sampling(0.8, seed=2), max_tokens=40)
    runs = []
    for drafters in ([], [StatisticsDrafter(StatisticsTable(path))], [
        PublishedStatistics(StatisticsTable(path))
    ]):  # fmt: skip
        events = decode(ToyBackend(), list(b"hello"), drafters, generation, Drafting())
        runs.append([t for event in events if isinstance(event, Step) for t in event.tokens])
    assert runs[0] == runs[1] == runs[2]


def test_top_lists_the_likeliest_continuations(tmp_path: Path) -> None:
    table = made(tmp_path / "a.db", [[1, 2, 1, 2, 1, 2, 1, 3, 4, 4, 4, 5, 4, 4]])
    top = list(table.top(3))
    assert top[0] == (2, Continuation((1,), 1.0))
    shares = [found.share for _, found in top]
    assert shares == sorted(shares, reverse=True)
    assert list(table.top(0)) == []


def test_many_threads_may_ask_at_once(path: Path) -> None:
    table, alone = StatisticsTable(path), StatisticsTable(path)
    wanted = {(a, b): alone.look_up((a, b)) for a in range(30) for b in range(30)}
    wrong: list[object] = []

    def ask(seed: int) -> None:
        keys = list(wanted)
        random.Random(seed).shuffle(keys)
        for key in keys:
            try:
                if table.look_up(key) != wanted[key]:
                    wrong.append(key)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_file_is_opened_read_only(path: Path) -> None:
    before = path.read_bytes()
    table = StatisticsTable(path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        table.connection.execute("DELETE FROM grams")
    table.close()
    assert path.read_bytes() == before
    assert [child.name for child in path.parent.iterdir()] == [path.name]


# Building, interrupted.


@pytest.mark.parametrize("moment", [("sort", 0.0), ("sort", 1.0), ("count", 1.0), ("write", 1.0)])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_a_cancelled_build_changes_nothing(
    path: Path, moment: tuple[str, float], stop: type[BaseException]
) -> None:
    before = path.read_bytes()

    def progress(stage: str, done: float) -> None:
        if (stage, done) == moment:
            raise stop

    documents = [np.array([1, 2] * 50, dtype=np.uint32)]
    for target in (path, path.with_name("new.db")):
        with pytest.raises(stop):
            build(documents, target, "tok", 100, "new", BIG, progress)
    assert path.read_bytes() == before
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_progress_goes_forward_through_all_stages(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    documents = [np.array([1, 2] * 50, dtype=np.uint32)]
    build(documents, tmp_path / "a.db", "t", 9, "", BIG, lambda *at: seen.append(at))
    stages = ["sort", "count", "write"]
    order = [(stages.index(stage), done) for stage, done in seen]
    assert order == sorted(order) and {stage for stage, _ in seen} == set(stages)
    assert seen[-1] == ("write", 1.0)


def test_a_build_replaces_the_old_file_and_makes_its_folder(tmp_path: Path, path: Path) -> None:
    build([np.array([8, 9] * 5, dtype=np.uint32)], path, "tok", 10, "second", BIG)
    assert StatisticsTable(path).meta["title"] == "second"
    deep = tmp_path / "a" / "b" / "c.db"
    assert made(deep, [[1, 2] * 5]).look_up((1,)) is not None


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.db").mkdir()
    for target in (tmp_path / "file" / "a.db", tmp_path / "folder.db"):
        with pytest.raises(StorageError, match="could not be written"):
            made(target, [[1, 2] * 5])
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "folder.db"]
