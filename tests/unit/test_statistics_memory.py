"""The statistics in native memory: the answers of the file, or none, and never a crash."""

import gc
import random
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native
from engine.drafting.compiled import source_of
from engine.drafting.databases import DraftingMemory
from engine.drafting.tiers import STATISTICS_KEY as KEY
from engine.drafting.tiers import StatisticsTier
from engine.errors import StorageError
from engine.types import Followers
from storage import statistics
from storage.statistics import (
    FOLLOWERS,
    HEAD,
    NARROW,
    ROUNDED,
    StatisticsTable,
    entry_format,
    pack_key,
    unpack,
)
from tests.conftest import ROOT
from tests.unit.test_statistics import POISONED, edited, keys_of, made, noise, unpack_key

SHIPPED = sorted((ROOT / "assets" / "statistics").glob(f"*{statistics.SUFFIX}"))
Key = tuple[int, ...]


def read(table: StatisticsTable) -> Any:
    """The copy in native memory, once it was read or was given up."""
    memory = table.in_memory(60)
    assert table.reader is not None and not table.reader.is_alive()
    return memory


def as_tuple(found: Followers | None) -> tuple[object, ...] | None:
    return found and (found.total, found.distinct, list(found.counts.items()))


class Source:
    """What drafting asks, and how often it had to ask the file."""

    def __init__(self, table: StatisticsTable, memory: Any) -> None:
        self.asked: list[Key] = []

        def look_up(key: Sequence[int]) -> Followers | None:
            self.asked.append(tuple(key))
            return table.look_up(key)

        self.source = native.core.Statistics(look_up, table.unigrams, memory, KEY, 1 << 14)

    def matches(self, suffix: Key) -> list[tuple[object, ...] | None]:
        return [as_tuple(Followers(*each)) for each in self.source.matches(suffix)]


def matches(look_up: Callable[[Key], Followers | None], suffix: Key) -> list[object]:
    """The same by looking up one key after the other."""
    found: list[object] = []
    for size in range(1, min(len(suffix), KEY) + 1):
        followers = look_up(suffix[-size:])
        if followers is None:
            break
        found.append(as_tuple(followers))
    return found


def some_keys(table: StatisticsTable, count: int, seed: int = 0) -> list[Key]:
    """Known keys, keys that differ from one in a token, and any keys."""
    draw = random.Random(seed)
    known = [unpack_key(key, table.bits) for key in draw.sample(keys_of(table), count)]
    token = lambda: draw.randrange(table.vocabulary + 2)  # noqa: E731
    near = [(*key[:-1], token()) for key in known] + [(token(), *key[1:]) for key in known]
    return [*known, *near, *((token(), token(), token()) for _ in range(count)), (), (1 << 31,) * 3]


@pytest.fixture
def table(tmp_path: Path) -> StatisticsTable:
    return made(tmp_path / "a.db", [noise(0, 20_000, 400)], 400)


def test_entries_of_the_shipped_table_are_what_the_file_says() -> None:
    assert len(SHIPPED) == 1
    table = StatisticsTable(SHIPPED[0])
    memory = read(table)
    rows = table.connection.execute("SELECT key, followers FROM grams").fetchall()
    assert memory.ready and not memory.too_large and len(memory) == len(rows) > 600_000
    source = Source(table, memory)
    whole = 0
    for packed, blob in rows[::37]:
        key = unpack_key(packed, table.bits)
        found = source.source.matches(key)
        assert len(found) == len(key)
        wanted = unpack(blob, table.entry)
        assert found[-1] == (wanted.total, wanted.distinct, wanted.counts)
        assert list(found[-1][2]) == list(wanted.counts)
        whole += len(key) == KEY
    assert whole > 8_000 and source.asked == []
    for key in some_keys(table, 1000):
        assert source.matches(key) == matches(table.look_up, key)
    table.close()


@pytest.mark.parametrize("vocabulary", [400, 70_000, statistics.LARGEST_VOCABULARY])
def test_every_width_of_tokens(tmp_path: Path, vocabulary: int) -> None:
    high = vocabulary - 1
    texts = [[high, 1, high, 2, high, 1] * 20, [high, high - 1] * 20]
    table = made(tmp_path / "a.db", texts, vocabulary)
    source = Source(table, read(table))
    keys = [(high,), (1, high), (2, high, 1), (high - 1,), (high, high, high), (vocabulary,) * 3]
    for key in [*keys, ((1 << 32) - 1,) * 3]:
        assert source.matches(key) == matches(table.look_up, key)
    assert source.matches((2, high, 1)) != [] and source.asked == []


BLOBS = st.binary(max_size=HEAD + FOLLOWERS * NARROW.size + 3)
ENTRIES = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 120)), min_size=1, max_size=17)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.one_of(BLOBS, st.tuples(st.integers(0, 255), st.integers(0, 60), ENTRIES)), st.booleans())
def test_an_entry_counts_as_much_as_in_python(
    given: bytes | tuple[int, int, list[tuple[int, int]]], ranked: bool
) -> None:
    vocabulary, tokens = 100, 3000
    if isinstance(given, bytes):
        blob = given
    else:
        total, distinct, entries = given
        packed = [NARROW.pack(step, token) for step, token in sorted(entries)]
        blob = bytes((total, distinct)) + b"".join(packed if ranked else packed[::-1])
    memory = native.core.Table(
        counts=statistics.COUNTS, shares=statistics.SHARES, rounded=ROUNDED, tokens=tokens,
        vocabulary=vocabulary, bits=7, widest=FOLLOWERS, wide=False, limit=1 << 20, expected=1,
    )  # fmt: skip
    memory.read(f"{pack_key((5,), 7)} {blob.hex().upper()}")
    memory.seal()
    try:
        wanted: Followers | None = unpack(blob, entry_format(vocabulary))
        assert wanted is not None
        if max(wanted.counts) >= vocabulary or wanted.total > tokens * ROUNDED:
            wanted = None
    except StorageError:
        wanted = None
    found = native.core.Statistics(lambda key: None, lambda: None, memory, KEY, 9).matches((5,))
    assert [as_tuple(Followers(*each)) for each in found] == ([as_tuple(wanted)] if wanted else [])


@pytest.mark.parametrize("blob", POISONED)
def test_poisoned_entries_are_left_out(table: StatisticsTable, blob: str) -> None:
    table.close()
    edited(table.path, f"UPDATE grams SET followers = {blob} WHERE key % 2")
    again = StatisticsTable(table.path)
    memory = read(again)
    known = [key for key in keys_of(again) if again.read(key)]
    assert len(memory) == len(known) > 10
    source = Source(again, memory)
    for key in some_keys(again, 200):
        assert source.matches(key) == matches(again.look_up, key)


@pytest.mark.parametrize("share", [0.6, 0.95])
def test_a_file_that_lost_its_end_is_asked_for_what_is_left(
    table: StatisticsTable, share: float
) -> None:
    data, asked = table.path.read_bytes(), some_keys(table, 200)
    table.close()
    kept = int(share * len(data)) // 4096 * 4096
    table.path.write_bytes(data[:kept] + bytes(len(data) - kept))
    again = StatisticsTable(table.path)
    memory = read(again)
    assert not memory.ready
    source = Source(again, memory)
    for key in asked:
        assert source.matches(key) == matches(again.look_up, key)
    assert source.asked


def test_a_file_that_changes_under_the_reader_ends_nothing(
    table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = statistics.connected

    def late(path: Path, longest: int) -> sqlite3.Connection:
        connection = connected(path, longest)
        path.write_bytes(path.read_bytes()[:8192])
        return connection

    monkeypatch.setattr(statistics, "connected", late)
    memory = read(table)
    assert not memory.ready and Source(table, memory).matches((1, 2, 3)) is not None


def test_a_table_is_read_for_a_minute_at_most_and_no_further_once_closed(
    table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StatisticsTable(table.path)
    table.close()
    assert not read(table).ready
    monkeypatch.setattr(statistics, "READ_SECONDS", -1.0)
    monkeypatch.setattr(statistics, "STEPS", 1)
    assert not read(other).ready
    other.close()


def test_the_reader_does_not_keep_the_table_and_stops_with_it(table: StatisticsTable) -> None:
    other = StatisticsTable(table.path)
    memory, gone, closed = read(other), weakref.ref(other), other.closed
    other.connection.close()
    assert memory.ready and not closed.is_set()
    del other
    gc.collect()
    assert gone() is None and closed.is_set()


def test_until_it_is_read_the_file_is_asked_once_per_key(table: StatisticsTable) -> None:
    unread = native.core.Table(
        counts=statistics.COUNTS, shares=statistics.SHARES, rounded=ROUNDED, tokens=table.tokens,
        vocabulary=table.vocabulary, bits=table.bits, widest=FOLLOWERS, wide=False,
        limit=1 << 20, expected=1,
    )  # fmt: skip
    source = Source(table, unread)
    keys = some_keys(table, 100)
    for _ in range(2):
        for key in keys:
            assert source.matches(key) == matches(table.look_up, key)
    assert len(source.asked) == len(set(source.asked)) > 100


def test_of_a_large_table_only_a_filter_is_kept(
    table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "IN_MEMORY", 4096)
    memory = read(table)
    keys = keys_of(table)
    assert memory.ready and memory.too_large and memory.bytes < 3 * len(keys) + 256
    assert all(memory.may_hold(key) for key in keys)
    draw = random.Random(1)
    others = {draw.randrange(1 << 40) for _ in range(5000)} - set(keys)
    assert sum(memory.may_hold(key) for key in others) < 0.05 * len(others)
    source = Source(table, memory)
    for key in some_keys(table, 300):
        assert source.matches(key) == matches(table.look_up, key)
    unknown = sum(table.look_up(key) is None for key in source.asked)
    assert unknown < 0.1 * len(source.asked)


def test_a_model_is_measured_once_its_statistics_are_in_memory(
    table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them takes time from the forwards that are measured, and from the first answer."""
    read_all, done = statistics.read_all, list[bool]()

    def slow(*how: Any) -> None:
        sleep(0.1)
        read_all(*how)
        done.append(True)

    monkeypatch.setattr(statistics, "read_all", slow)
    DraftingMemory(table)
    assert done == [True]


def test_what_it_takes_in_memory_is_counted(table: StatisticsTable) -> None:
    assert table.cached_bytes == 0
    drafting = DraftingMemory(table)
    assert table.reader is not None
    memory = read(table)
    assert drafting.bytes == table.cached_bytes == memory.bytes
    assert 20 * len(memory) < memory.bytes < 60 * len(memory)
    table.look_up((1,))
    assert table.cached_bytes == memory.bytes + statistics.CACHED_BYTES
    table.forget_look_ups()
    assert table.cached_bytes == memory.bytes, "a copy remembers no look-ups"


def test_without_the_core_nothing_is_copied(
    table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "core", None)
    assert table.in_memory() is None and table.reader is None
    assert DraftingMemory(table).bytes == 0


def test_the_tier_is_asked_in_memory(table: StatisticsTable) -> None:
    source, (known, *_) = source_of(StatisticsTier(table)), some_keys(table, 9)
    read(table)
    table.connection.close()
    assert isinstance(source, native.core.Statistics) and len(source.matches(known)) == len(known)
