"""The statistics file: what is counted is what a slow count says, and damage costs speed only."""

import math
import random
import shutil
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native
from engine.errors import StorageError
from engine.types import Followers
from storage.statistics import (
    COUNTS,
    EXACT,
    FOLLOWERS,
    FORMAT,
    FREQUENT,
    KEY_SIZE,
    LARGEST_VOCABULARY,
    META,
    NARROW,
    SCHEMA,
    SHARES,
    SUFFIX,
    WIDE,
    Likeliest,
    StatisticsTable,
    entry_format,
    find_table,
    pack_key,
    unpack,
)
from storage.statistics_build import DOUBT, FEWEST, STAGES, build, nearest
from tests.conftest import ROOT

BIG = 1 << 30
COUNT_ERROR = 2 ** (1 / 16) - 1 + 1e-3
SHARE_ERROR = 2 ** (1 / 32) - 1 + 1e-3
"""Half a step of each scale."""

Key = tuple[int, ...]


def made(
    path: Path, texts: Sequence[Sequence[int]], vocabulary: int = 100, budget: int = BIG
) -> StatisticsTable:
    documents = [np.array(text, dtype=np.uint32) for text in texts]
    build(documents, path, "tok", vocabulary, "a title", budget)
    return StatisticsTable(path)


def reference(texts: Sequence[Sequence[int]]) -> dict[Key, Counter[int]]:
    """What followed every key that has a frequent follower, by dictionaries alone."""
    table: dict[Key, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for at in range(1, len(text)):
            for size in range(1, min(KEY_SIZE, at) + 1):
                table[tuple(text[at - size : at])][text[at]] += 1
    return {key: found for key, found in table.items() if max(found.values()) >= FEWEST}


def keys_of(table: StatisticsTable) -> list[int]:
    return [key for (key,) in table.connection.execute("SELECT key FROM grams")]


def unpack_key(packed: int, bits: int) -> Key:
    size = next(n for n in (3, 2, 1) if packed >> bits * n == n)
    return tuple(packed >> bits * at & (1 << bits) - 1 for at in reversed(range(size)))


def assert_counted(table: StatisticsTable, texts: Sequence[Sequence[int]]) -> int:
    wanted = reference(texts)
    packed = keys_of(table)
    assert packed == sorted(packed)
    assert set(packed) == {pack_key(key, table.bits) for key in wanted}
    entries = 0
    for key, counts in wanted.items():
        found = table.look_up(key)
        assert found is not None
        total = sum(counts.values())
        assert found.total == pytest.approx(total, rel=COUNT_ERROR)
        assert found.distinct == pytest.approx(len(counts), rel=COUNT_ERROR)
        shares = {token: count / found.total for token, count in found.counts.items()}
        assert shares == pytest.approx({t: counts[t] / total for t in shares}, rel=SHARE_ERROR)
        # The most frequent are kept, best first.
        ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        often = [(token, count) for token, count in ranked if count >= FEWEST]
        assert list(found.counts) == [token for token, _ in often[:FOLLOWERS]]
        entries += len(found.counts)
    assert table.meta["entries"] == str(entries)
    return len(wanted)


def babble(seed: int, documents: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    words = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 6))] for _ in range(12)]
    return [
        [token for _ in range(length) for token in draw.choice(words)] for _ in range(documents)
    ]


def noise(seed: int, length: int, vocabulary: int) -> list[int]:
    """A text with many followers per key, the low tokens far more frequent."""
    draw = random.Random(seed)
    return [int(vocabulary * draw.random() ** 3) for _ in range(length)]


@pytest.mark.parametrize(("length", "vocabulary"), [(40, 5), (4_000, 60), (20_000, 2_000)])
def test_a_build_is_what_a_slow_count_says(tmp_path: Path, length: int, vocabulary: int) -> None:
    """Many followers are ranked and cut."""
    texts = [noise(seed, length, vocabulary) for seed in range(2)]
    if vocabulary < 99:
        texts += babble(vocabulary, 6, 20, vocabulary)
    table = made(tmp_path / "a.db", texts, vocabulary)
    assert assert_counted(table, texts) > 10
    lengths = {len(found.counts) for a in range(5) if (found := table.look_up((a,)))}
    assert max(lengths) == min(FOLLOWERS, vocabulary)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), max_size=30), min_size=1, max_size=5))
def test_any_small_texts(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.db"
    if any(len(text) > 1 for text in texts):
        assert_counted(made(path, texts, vocabulary=5), texts)
    else:
        with pytest.raises(StorageError, match="nothing to count"):
            made(path, texts)


@pytest.mark.parametrize(
    ("vocabulary", "size"),
    [(65_535, 3), (65_536, 3), (65_537, 5), (1_000_001, 5), (LARGEST_VOCABULARY, 5)],
)
def test_every_width_of_vocabulary(tmp_path: Path, vocabulary: int, size: int) -> None:
    last = vocabulary - 1
    texts = [[last, last - 1, 3] * 5, [last] * 7, noise(3, 300, 9), [last - 1, 0, last]]
    table = made(tmp_path / "a.db", texts, vocabulary)
    assert table.entry.size == size == entry_format(vocabulary).size
    assert assert_counted(table, texts) > 50
    found = table.look_up((last - 1, 3, last))
    assert found is not None and list(found.counts) == [last - 1]


@pytest.mark.parametrize(
    ("token", "vocabulary", "words"),
    [
        (1, 1 << 20, "vocabulary"),
        (9, 9, "token 9.*own tokenizer"),
        (1 << 30, 9, "token 1,073,741,824.*own tokenizer"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, token: int, vocabulary: int, words: str
) -> None:
    with pytest.raises(StorageError, match=words):
        made(tmp_path / "a.db", [[1, 2] * 9, [], [token]], vocabulary=vocabulary)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("budget", [0, 300, 1_000, 3_000, 10_000])
def test_a_budget_keeps_suffixes_with_their_keys(tmp_path: Path, budget: int) -> None:
    texts = [*babble(7, 20, 60, 60), noise(7, 3_000, 60)]
    whole = made(tmp_path / "whole.db", texts)
    small = made(tmp_path / "small.db", texts, budget=budget)
    kept, packed = set(keys_of(small)), set(keys_of(whole))
    assert kept < packed and bool(kept) == (budget > 0)
    for key in (unpack_key(key, small.bits) for key in kept):
        assert all(small.look_up(key[at:]) is not None for at in range(len(key)))
    for key in kept:
        assert described(small.read(key)) == described(whole.read(key))
    rows = small.connection.execute("SELECT sum(length(followers) + 8) FROM grams").fetchone()[0]
    assert (rows or 0) <= budget + 200 and (budget == 0 or rows > budget * 0.8 - 100)


def worths(texts: Sequence[Sequence[int]], bits: int) -> dict[Key, float]:
    """What keys gain per byte, by the definition; a suffix as much as the longer key at least."""
    table = reference(texts)
    tokens = Counter(token for text in texts for token in text)
    everything = sum(tokens.values())

    def chance(key: Key, token: int) -> float:
        if not key:
            return tokens[token] / everything
        total, distinct = sum(table[key].values()), len(table[key])
        trust = total / (total + DOUBT * distinct)
        return trust * table[key][token] / total + (1 - trust) * chance(key[1:], token)

    worth: dict[Key, float] = {}
    for key in sorted(table, key=len, reverse=True):
        best = [pair for pair in table[key].most_common() if pair[1] >= FEWEST]
        best = sorted(best, key=lambda pair: (-pair[1], pair[0]))[:FOLLOWERS]
        ratios = ((n, chance(key, token) / chance(key[1:], token)) for token, n in best)
        size = 3 * len(best) + 2 + 6 + -(-(len(key) << bits * len(key)).bit_length() // 7)
        gained = sum(n * math.log2(ratio) for n, ratio in ratios) / size
        worth[key] = max(gained, worth.get(key, -math.inf))
        if len(key) > 1:
            worth[key[1:]] = max(worth[key], worth.get(key[1:], -math.inf))
    return worth


@pytest.mark.parametrize("budget", [500, 1_500, 4_000])
def test_the_keys_that_are_kept_gain_most(tmp_path: Path, budget: int) -> None:
    texts = [*babble(8, 12, 40, 40), noise(8, 1_500, 40)]
    table = made(tmp_path / "a.db", texts, budget=budget)
    worth = worths(texts, table.bits)
    kept = {unpack_key(key, table.bits) for key in keys_of(table)}
    assert 10 < len(kept) < len(worth)
    least, most = min(worth[key] for key in kept), max(worth[key] for key in worth.keys() - kept)
    assert least >= most - 1e-9


def described(found: Followers | None) -> object:
    return found and (found.total, found.distinct, list(found.counts.items()))


def test_counts_are_exact_while_small_and_near_when_large() -> None:
    assert len(COUNTS) == 256 and list(COUNTS[:EXACT]) == list(range(1, EXACT + 1))
    assert list(COUNTS) == sorted(COUNTS) and COUNTS[-1] > 2**32
    counts = [*range(1, 2_000), *(2**power + 1 for power in range(11, 33))]
    read = [COUNTS[byte] for byte in nearest(np.array(counts), COUNTS)]
    assert read == pytest.approx(counts, rel=COUNT_ERROR)
    assert read[:EXACT] == counts[:EXACT]


@given(st.floats(2**-15.9, 1.0))
@settings(deadline=None, derandomize=True)
def test_shares_are_as_precise_when_small(share: float) -> None:
    assert len(SHARES) == 256 and SHARES[0] == 1.0 and SHARES[16] == 0.5
    byte, *extremes = nearest(np.array([share, 1.0, 0.5, 0.25, 1e-9]), SHARES)
    assert SHARES[byte] == pytest.approx(share, rel=SHARE_ERROR)
    assert extremes == [0, 16, 32, 255]


def test_unpacking_keeps_the_order() -> None:
    found = unpack(bytes([9, 4, 16, 5, 0, 48, 7, 1, 64, 6, 0]), NARROW)
    assert (found.total, found.distinct) == (10, 5)
    assert list(found.counts.items()) == [(5, 5.0), (263, 1.25), (6, 0.625)]
    wide = unpack(bytes([0, 0, 0, 1, 2, 3, 0]), WIDE)
    assert (wide.total, wide.distinct, wide.counts) == (1, 1, {0x30201: 1.0})


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.binary(max_size=100), st.sampled_from([NARROW, WIDE]))
def test_unpacking_anything_works_or_says_so(blob: bytes, entry: object) -> None:
    assert entry is NARROW or entry is WIDE
    try:
        found = unpack(blob, entry)
    except StorageError as error:
        assert "damaged" in str(error)
    else:
        assert 0 < len(found.counts) <= (len(blob) - 2) // entry.size <= FOLLOWERS
        assert all(0 < count <= found.total for count in found.counts.values())


def test_the_documentation_shows_the_schema(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    shown = page.split("<!-- statistics -->")[1].split("<!-- /statistics -->")[0]
    assert shown.strip() == f"```sql\n{SCHEMA}```"
    assert f"format {FORMAT}, made" in page and f"up to {FOLLOWERS} entries" in page
    assert all(f"`{name}`" in page for name in META)
    table = made(tmp_path / "a.db", [[1, 2] * 5])
    tables = table.connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
    assert [sql for (sql,) in tables] == SCHEMA.replace(";", "").splitlines()


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
}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
POISONS: dict[str, Sequence[str]] = {
    "foreign": ("DROP TABLE meta",),
    "no grams": ("DROP TABLE grams",),
    "other columns": ("ALTER TABLE grams ADD COLUMN more",),
    "newer": ("UPDATE meta SET value = '3' WHERE name = 'format'",),
    "huge": ("UPDATE meta SET value = '1048576' WHERE name = 'vocabulary'",),
    "none": ("UPDATE meta SET value = '0' WHERE name = 'vocabulary'",),
    "lacks": ("DELETE FROM meta WHERE name = 'tokens'",),
    "vocabulary": ("UPDATE meta SET value = 'many' WHERE name = 'vocabulary'",),
    "endless grams": (
        "DROP TABLE grams",
        f"CREATE VIEW grams(key, followers) AS {ENDLESS} SELECT i, x'0000' FROM n WHERE i < 0",
    ),
    "endless meta": (
        "ALTER TABLE meta RENAME TO other",
        f"CREATE VIEW meta(name, value) AS {ENDLESS} SELECT 'format', 2 FROM n WHERE i < 0",
    ),
    "a view beside": ("CREATE VIEW more AS SELECT * FROM grams",),
    "a trigger": ("CREATE TRIGGER t AFTER INSERT ON grams BEGIN DELETE FROM meta; END",),
    "a virtual table": ("CREATE VIRTUAL TABLE more USING rtree(id, a, b)",),
    "an index": ("CREATE INDEX more ON grams (hex(followers))",),
    "another table": ("CREATE TABLE more (x)",),
    "computed meta": (
        "ALTER TABLE meta RENAME TO other",
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT AS (hex(zeroblob(1000))))",
        "INSERT INTO meta (name) SELECT name FROM other",
        "DROP TABLE other",
    ),
    "computed grams": (
        "DROP TABLE grams",
        "CREATE TABLE grams (key INTEGER PRIMARY KEY, followers BLOB AS (zeroblob(key)))",
    ),
    "a long title": (f"UPDATE meta SET value = '{'x' * 20_000}' WHERE name = 'title'",),
    "a blob for a number": ("UPDATE meta SET value = x'ff00' WHERE name = 'tokens'",),
    **{
        f"{name} {value[:3]} of {len(value)}": (
            f"UPDATE meta SET value = '{value}' WHERE name = '{name}'",
        )
        for name in ("tokens", "documents", "keys", "entries")
        for value in ("-1", "9" * 9_000)
    },
}


@pytest.mark.parametrize("fault", [*BREAKAGES, *POISONS])
def test_a_poisoned_file_is_refused_at_once(path: Path, fault: str) -> None:
    """And one that is none: each by its name."""
    if fault in BREAKAGES:
        BREAKAGES[fault](path)
    else:
        edited(path, *POISONS[fault])
    with pytest.raises(StorageError) as caught:
        StatisticsTable(path)
    assert repr(str(path)) in str(caught.value) and "Build it again" in str(caught.value)


def test_opening_takes_seconds_at_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(path, "BEGIN", *(f"CREATE TABLE more{number} (x)" for number in range(2_000)), "COMMIT")
    monkeypatch.setattr("storage.statistics.OPEN_SECONDS", -1.0)
    with pytest.raises(StorageError, match="interrupted"):
        StatisticsTable(path)


def test_a_file_is_opened_read_only_and_is_not_trusted(tmp_path: Path, path: Path) -> None:
    odd = tmp_path / "odd" / "a?b #c%41é.db"
    odd.parent.mkdir()
    shutil.copy(path, odd)
    table = StatisticsTable(odd)
    assert table.meta["title"] == "a title"
    assert table.connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        table.connection.execute("DELETE FROM grams")
    table.close()
    assert odd.read_bytes() == path.read_bytes() and [*odd.parent.iterdir()] == [odd]


def test_tables_are_found_by_the_tokenizer_they_are_for(tmp_path: Path, path: Path) -> None:
    other, problems = tmp_path / "other", list[str]()
    other.mkdir()
    assert find_table("tok", other) is find_table("tok", tmp_path / "nowhere") is None
    shutil.copy(path, other / f"foreign{SUFFIX}")
    assert find_table("foreign", other) is None, "the name alone does not make it fit"
    found = find_table("tok", other, tmp_path, report=problems.append)
    assert found is not None and found.path == path and problems == []
    (other / path.name).write_bytes(b"not a database")
    found = find_table("tok", other, tmp_path, report=problems.append)
    assert found is not None and found.path == path
    assert len(problems) == 1 and str(other / path.name) in problems[0]


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_never_raise_while_decoding(path: Path, seed: int) -> None:
    """A damaged file that still opens finds something or nothing, as does its copy in native
    memory; it does not end an answer."""
    draw = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(40):
        data[draw.randrange(4096, len(data))] = draw.randrange(256)
    path.write_bytes(data)
    try:
        table = StatisticsTable(path)
    except StorageError:
        return
    memory = table.in_memory(60)
    if table.reader is not None:
        source = native.core.Statistics(table.look_up, table.unigrams, memory, KEY_SIZE, 9)
    for a in range(30):
        for key in ((a,), (a, a), (a, 3), (a, 1, 2)):
            found = table.look_up(key)
            assert found is None or len(found.counts) <= FOLLOWERS
            assert table.reader is None or len(source.matches(key)) <= KEY_SIZE
    assert len(list(table.top(10))) <= 10


POISONED = ["x''", "x'00'", "x'0801'", "x'08000102'", "x'080105FFFFFF'", "'words'", "7",
     "zeroblob(53)", "zeroblob(100000)",
     "x'FF00000500'",  # more occurrences than there were tokens
     "x'0003000500'",  # more next tokens than occurrences
     "x'0800050500100600'",  # fewer next tokens than it has entries
     "x'0801000500000600'",  # shares beyond one
     "x'0801200500100600'",  # the likeliest not first
     "x'0800006400'",  # a token that the vocabulary does not have
     ]  # fmt: skip
"""What a blob may be that is none of an entry."""


@pytest.mark.parametrize("blob", POISONED)
def test_poisoned_entries_are_like_missing_ones(path: Path, blob: str) -> None:
    edited(path, f"UPDATE grams SET followers = {blob}")
    table = StatisticsTable(path)
    keys = keys_of(table)
    assert len(keys) > 10 and [table.read(packed) for packed in keys] == [None] * len(keys)
    assert list(table.top(3)) == []
    # Of a token that is often said, one byte says how often.
    assert (table.unigrams() is None) == (blob in ("x''", "'words'", "7", "zeroblob(100000)"))


def test_keys_that_cannot_be_are_unknown(path: Path) -> None:
    table = StatisticsTable(path)
    assert table.look_up((1 << 40, 1 << 40, 1 << 40)) is None
    assert table.look_up(()) is None and table.look_up((1, 2, 3, 4)) is None


@pytest.mark.grid(1)
@pytest.mark.parametrize("blob", ["FFFF00FFFF006000", "0800006100", "0801106200106100"])
@pytest.mark.parametrize("name", ["hd", "statistics", "rest"])
def test_poisoned_tokens_do_not_change_an_answer(path: Path, name: str, blob: str) -> None:
    from engine.decode import decode
    from engine.drafting.databases import Databases
    from engine.methods import METHODS
    from engine.settings import Generation, Sampling
    from engine.types import Step
    from tests.support.toy import ToyBackend

    bits = StatisticsTable(path).bits
    keys = ", ".join(f"({pack_key((a,), bits)}, x'{blob}')" for a in range(100))
    edited(path, "DELETE FROM grams", f"INSERT INTO grams VALUES {keys}")
    generation = Generation(Sampling(0.8, seed=2), max_tokens=40)
    databases, method = Databases(statistics=StatisticsTable(path)), METHODS[name]
    runs = []
    for drafters in ([], method.drafters(databases)):
        events = decode(ToyBackend(), [1, 2, 29], drafters, generation, method.drafting)
        steps = [event for event in events if isinstance(event, Step)]
        runs.append([token.id for step in steps for token in step.tokens])
    assert len(runs[0]) > 0 and runs[0] == runs[1]


def test_top_lists_the_likeliest_next_tokens(tmp_path: Path) -> None:
    table = made(tmp_path / "a.db", [[1, 2, 1, 2, 1, 2, 1, 3, 4, 4, 4, 5, 4, 4]])
    top = list(table.top(3))
    assert top[0] == Likeliest(2, 1, 1.0)
    assert [found.key for found in top] == [2, 1, 4]
    assert [found.share for found in top] == pytest.approx([1, 3 / 4, 3 / 4], rel=SHARE_ERROR)
    assert list(table.top(0)) == []


def test_what_is_often_said_is_counted_by_token(tmp_path: Path) -> None:
    texts = [noise(seed, 60_000, 3_000) for seed in range(2)]
    often = made(tmp_path / "a.db", texts, 3_000).unigrams()
    # A key is a token that something follows: the last one of a text is none.
    wanted = Counter(token for text in texts for token in text[:-1])
    assert often is not None and len(often.counts) == FREQUENT < len(wanted)
    for token, count in often.counts.items():
        assert count == pytest.approx(wanted[token], rel=0.05)
    # A token whose next tokens were all seen once is no key.
    assert {token for token, _ in wanted.most_common(300)} <= set(often.counts)
    assert 0.8 * 120_000 < often.total < 1.05 * 120_000
    assert made(tmp_path / "b.db", [[1, 2, 3, 4]]).unigrams() is None


def test_many_threads_may_ask_at_once(path: Path) -> None:
    table, alone = StatisticsTable(path), StatisticsTable(path)
    wanted = {(a, b): described(alone.look_up((a, b))) for a in range(30) for b in range(30)}
    wrong: list[object] = []

    def ask(seed: int) -> None:
        keys = list(wanted)
        random.Random(seed).shuffle(keys)
        for key in keys:
            try:
                if described(table.look_up(key)) != wanted[key]:
                    wrong.append(key)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


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


def test_a_build_goes_through_all_stages_and_replaces_the_old_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "a" / "b.db", list[tuple[str, float]]()
    made(path, [[8, 9] * 5]).close()
    documents = [np.array([1, 2] * 50, dtype=np.uint32), np.array([3], dtype=np.uint32)]
    meta = build(documents, path, "tok", 9, "second", BIG, lambda *at: seen.append(at))
    order = [(STAGES.index(stage), done) for stage, done in seen]
    assert order == sorted(order) and {stage for stage, _ in seen} == set(STAGES)
    assert seen[-1] == ("write", 1.0)
    table = StatisticsTable(path)
    assert table.meta == meta and set(meta) == set(META)
    assert (meta["tokens"], meta["documents"], meta["title"]) == ("101", "2", "second")
    assert meta["tokenizer"] == "tok" and int(meta["keys"]) == len(keys_of(table))
    assert table.size_bytes == path.stat().st_size


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.db").mkdir()
    for target in (tmp_path / "file" / "a.db", tmp_path / "folder.db"):
        with pytest.raises(StorageError, match="could not be written"):
            made(target, [[1, 2] * 5])
    assert sorted(child.name for child in tmp_path.iterdir()) == ["file", "folder.db"]
