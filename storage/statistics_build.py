"""Makes a statistics file from tokenized documents: counts n-grams, ranks them, and selects the
best.

All windows of WINDOW tokens are sorted once; then every n-gram up to that length is a run of
neighbouring rows, and its count is the length of that run. A next token is kept under a key if it
followed the key often enough. Keys compete for the room in the file by how much better they predict
than the shorter key does. A key is never worth more than its suffix, so the suffixes of every key
that is kept are kept as well. Nothing appears under the final name before it is complete.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import StorageError, StrataError
from storage.statistics import (
    COUNTS,
    FOLLOWERS,
    FORMAT,
    HEAD,
    KEY_SIZE,
    LARGEST_VOCABULARY,
    SCHEMA,
    SHARES,
    WIDE,
    entry_format,
    key_bits,
)

WINDOW = KEY_SIZE + 1
FEWEST = 2
"""How often a next token must be seen to be kept. In a large text, one occurrence is chance; for a
small text use 1."""
LARGEST_COUNT = (1 << 32) - 1
DOUBT = 4.0
"""How much each distinct follower reduces the trust in a key; 2 and 8 measure the same."""
ROW_BYTES = 6
"""Bytes that SQLite adds to each row: lengths, types and the slot in the page."""

STAGES = ("sort", "count", "write")
"""The stages of a build in order, as passed to `progress`."""
END = (1 << 32) - 1
"""Ends each document where tokens are passed to `main`; no vocabulary has this token."""
POLITE = 10
"""The `nice` value of that process."""
MADE, FAILED = "made", "failed"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Progress = Callable[[str, float], None]


def sorted_windows(
    documents: Sequence[NDArray[np.uint32]], pad: int, bits: int
) -> tuple[list[NDArray[np.uint32]], Ints]:
    """The distinct windows of the documents in ascending order, as columns, with their counts.

    Windows that run over the end of a document are filled with `pad`.
    """
    ends = np.full(WINDOW - 1, pad, dtype=np.uint32)
    tokens = np.concatenate([part for document in documents for part in (document, ends)])
    length = len(tokens) - WINDOW + 1
    inside = tokens[:length] != pad
    per_word = min(WINDOW, 64 // bits)
    words = []
    for first in range(0, WINDOW, per_word):
        packed = np.zeros(length, dtype=np.uint64)
        for at in range(first, min(first + per_word, WINDOW)):
            packed <<= np.uint64(bits)
            packed |= tokens[at : at + length]
        words.append(packed[inside])
    if len(words) == 1:
        words[0].sort()
    else:
        order = np.lexsort(words[::-1])
        words = [word[order] for word in words]
    fresh = np.ones(len(words[0]), dtype=bool)
    fresh[1:] = np.logical_or.reduce([word[1:] != word[:-1] for word in words])
    starts = np.flatnonzero(fresh)
    columns = []
    for at in range(WINDOW):
        following = min(WINDOW, (at // per_word + 1) * per_word) - at - 1
        word = words[at // per_word][starts]
        columns.append(
            (word >> np.uint64(bits * following) & np.uint64((1 << bits) - 1)).astype("u4")
        )
    return columns, np.diff(np.append(starts, len(fresh)))


class Level(NamedTuple):
    """The n-grams of one length that end in a token of the vocabulary, in ascending order: all
    tokens but the last, packed; the last one; and how often each was seen."""

    keys: Ints
    tokens: NDArray[np.uint32]
    counts: Ints


class Grams:
    """All n-grams of some documents: those of each length are runs in one sorted list of windows.

    The end of a document is followed by `pad`, a token that no vocabulary has.
    """

    def __init__(self, documents: Sequence[NDArray[np.uint32]], vocabulary: int) -> None:
        self.pad, self.bits = vocabulary, key_bits(vocabulary)
        self.columns, self.counts = sorted_windows(documents, self.pad, self.bits)
        self.starts: list[Ints] = []
        changed = np.zeros(len(self.counts), dtype=bool)
        changed[0] = True
        for column in self.columns:
            changed[1:] |= column[1:] != column[:-1]
            self.starts.append(np.flatnonzero(changed))

    def level(self, size: int) -> Level:
        starts = self.starts[size]
        last = self.columns[size][starts]
        real = last != self.pad
        rows = starts[real]
        packed = np.zeros(len(rows), dtype=np.int64)
        for column in self.columns[:size]:
            packed = packed << self.bits | column[rows]
        return Level(packed, last[real], np.add.reduceat(self.counts, starts)[real])


class Chances(NamedTuple):
    """The probability of the last token of each frequent n-gram (packed, ascending), predicted by
    all shorter keys."""

    packed: Ints
    values: Floats


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one length that have frequent followers, in ascending order.

    `packed` are their primary keys. The followers of key i are the entries from `first[i]` to
    `first[i + 1]`, and `gains[i]` is what they are worth. `heads` and `entries` are the bytes of
    the blobs.
    """

    packed: Ints
    gains: Floats
    first: Ints
    heads: NDArray[np.uint8]
    entries: NDArray[np.void]

    def blobs(self, chosen: Ints) -> Iterator[tuple[int, bytes]]:
        heads, entries, width = self.heads.tobytes(), self.entries.tobytes(), self.entries.itemsize
        first = self.first * width
        columns = (self.packed[chosen], first[chosen], first[chosen + 1], chosen * HEAD)
        for key, start, end, head in zip(*(column.tolist() for column in columns), strict=True):
            yield key, heads[head : head + HEAD] + entries[start:end]

    def sizes(self) -> Ints:
        """The approximate bytes of each key in the file. SQLite stores 7 bits of a primary key per
        byte."""
        longest = int(self.packed[0]).bit_length() if len(self.packed) else 0
        own = HEAD + ROW_BYTES + (longest + 6) // 7
        return np.diff(self.first) * self.entries.itemsize + own


def chances_of_tokens(level: Level, total: int, fewest: int) -> Chances:
    often = level.counts >= fewest
    return Chances(level.tokens[often].astype(np.int64), level.counts[often] / total)


def keys_of(
    level: Level, size: int, shorter: Chances, vocabulary: int, fewest: int
) -> tuple[Keys, Chances]:
    """The keys of `size` tokens with their followers, best first; and the probabilities that they
    give.

    `level` holds all followers of each of its keys. A key adds to the prediction of the shorter
    one, with a weight that grows with its occurrences and falls with the number of its distinct
    next tokens. Its gain is the number of bits by which it makes the texts more likely.
    """
    bits = key_bits(vocabulary)
    owners = np.cumsum(np.diff(level.keys, prepend=level.keys[:1]) != 0)
    totals, distinct = np.bincount(owners, level.counts), np.bincount(owners)
    # The suffix of a frequent n-gram is at least as frequent, so `shorter` contains it.
    often = np.flatnonzero(level.counts >= fewest)
    keys, tokens, counts = level.keys[often], level.tokens[often], level.counts[often]
    owners = owners[often]
    shares = counts / totals[owners]
    trusts = totals[owners] / (totals[owners] + DOUBT * distinct[owners])
    suffixes = (keys & (1 << bits * (size - 1)) - 1) << bits | tokens
    expected = shorter.values[np.searchsorted(shorter.packed, suffixes)]
    chances = trusts * shares + (1 - trusts) * expected
    gains: Floats = counts * np.log2(chances / expected)

    # Rows are in the order of their owners already; within one, the most frequent come first.
    order = np.argsort(owners << 32 | LARGEST_COUNT - counts, kind="stable")
    order = order[ranks(owners) < FOLLOWERS]
    first = np.flatnonzero(ranks(owners[order]) == 0)
    which = owners[order[first]]
    token_type = "<u4" if entry_format(vocabulary) is WIDE else "<u2"
    entries = np.empty(len(order), dtype=[("share", "u1"), ("token", token_type)])
    entries["share"] = nearest(shares[order], SHARES)
    entries["token"] = tokens[order]
    found = Keys(
        keys[order[first]] | size << bits * size,
        np.add.reduceat(gains[order], first) if len(first) else gains,
        np.append(first, len(order)),
        np.stack([nearest(v[which], COUNTS) for v in (totals, distinct)], axis=1),
        entries,
    )
    if size == KEY_SIZE:  # no longer key exists, and four wide tokens would not fit an integer
        return found, shorter
    return found, Chances(keys << bits | tokens, chances)


def ranks(owners: Ints) -> Ints:
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    return np.arange(len(owners)) - np.repeat(starts, np.diff(np.append(starts, len(owners))))


def nearest(values: NDArray[Any], scale: Sequence[float]) -> NDArray[np.uint8]:
    """The bytes whose meanings on a rising or falling scale are nearest to the values."""
    levels = np.sort(np.array(scale))
    found = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
    return (found if scale[0] < scale[-1] else len(levels) - 1 - found).astype(np.uint8)


def rows(
    ranges: Callable[[int], Iterable[Keys]],
    packed: Mapping[int, Ints],
    worth: Mapping[int, Floats],
    bits: int,
    budget: int,
) -> Iterator[tuple[int, bytes]]:
    """(key, blob) of the keys that gain most per byte, within `budget` bytes, in key order.

    `ranges` gives the keys of a length in order, in any number of pieces, and `packed` has all of
    them. `worth` is filled with the gain per byte of each.
    """
    sizes = range(1, KEY_SIZE + 1)

    def placed(size: int) -> Iterator[tuple[slice, Keys]]:
        start = 0
        for keys in ranges(size):
            yield slice(start, start + len(keys.packed)), keys
            start += len(keys.packed)

    for size in sizes:
        for own, keys in placed(size):
            worth[size][own] = keys.gains / keys.sizes()
    for size in sizes[:0:-1]:
        shorter = packed[size - 1], worth[size - 1]
        for own, keys in placed(size):
            lift(*shorter, keys.packed, worth[size][own], size - 1, bits)
    best, first = Best(budget), 0
    for size in sizes:
        for own, keys in placed(size):
            best.offer(worth[size][own], keys.sizes(), first + own.start)
        first += len(packed[size])
    first = 0
    for size in sizes:
        for own, keys in placed(size):
            yield from keys.blobs(best.within(first + own.start, len(keys.packed)))
        first += len(packed[size])


def lift(
    shorter: Ints, worth: Floats, longer: Ints, longer_worth: Floats, size: int, bits: int
) -> None:
    """Make each key of `size` tokens worth at least as much as the longer keys that end with it.
    Among keys of equal worth the shorter comes first, so it is kept if a longer one is."""
    suffixes = longer & (1 << bits * size) - 1 | size << bits * size
    np.maximum.at(worth, np.searchsorted(shorter, suffixes), longer_worth)


class Best:
    """The most valuable keys within a budget of bytes; among equals the first.

    Keys are offered in order, in any number of pieces. Keys that no longer fit are dropped, except
    the first of them, which keeps smaller keys of less value from taking its place.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.worth, self.sizes = np.empty(0), np.empty(0, dtype=np.int64)
        self.numbers = np.empty(0, dtype=np.int64)

    def offer(self, worth: Floats, sizes: Ints, start: int) -> None:
        numbers = np.arange(start, start + len(worth))
        # Those that were kept come first, in order of worth; a stable sort keeps their order.
        worth, sizes = np.append(self.worth, worth), np.append(self.sizes, sizes)
        numbers = np.append(self.numbers, numbers)
        order = np.argsort(-worth, kind="stable")
        order = order[np.cumsum(sizes[order]) - sizes[order] <= self.budget]
        self.worth, self.sizes, self.numbers = worth[order], sizes[order], numbers[order]

    def within(self, start: int, count: int) -> Ints:
        """Which of the `count` keys from number `start` on were kept, in order and counted from
        `start`."""
        kept = self.numbers[np.cumsum(self.sizes) <= self.budget]
        return np.sort(kept[(kept >= start) & (kept < start + count)]) - start


def build(
    documents: Sequence[NDArray[np.uint32]],
    path: Path,
    tokenizer: str,
    vocabulary: int,
    title: str,
    budget: int,
    progress: Progress = lambda stage, done: None,
    fewest: int = FEWEST,
) -> dict[str, str]:
    """Write the statistics of tokenized `documents` to `path`; returns the file's meta data.

    `tokenizer` is its fingerprint, `budget` the approximate size of the file in bytes. A token must
    have followed a key `fewest` times to be kept. `progress` is called with a stage's name and the
    fraction done; an exception from it cancels the build, which leaves no file behind.
    Raises StorageError when there is nothing to count or the file cannot be written.
    """
    check(documents, vocabulary)
    total = sum(len(document) for document in documents)
    progress("sort", 0.0)
    grams = Grams(documents, vocabulary)
    progress("sort", 1.0)
    levels: dict[int, Keys] = {}
    chances = chances_of_tokens(grams.level(0), total, fewest)
    for size in range(1, KEY_SIZE + 1):
        levels[size], chances = keys_of(grams.level(size), size, chances, vocabulary, fewest)
        progress("count", size / KEY_SIZE)
    packed = {size: keys.packed for size, keys in levels.items()}
    worth = {size: np.empty(len(keys)) for size, keys in packed.items()}
    chosen = rows(lambda size: [levels[size]], packed, worth, grams.bits, budget)
    return save(path, chosen, tokenizer, vocabulary, total, len(documents), title, progress)


def save(
    path: Path,
    grams: Iterable[tuple[int, bytes]],
    tokenizer: str,
    vocabulary: int,
    tokens: int,
    documents: int,
    title: str,
    progress: Progress,
) -> dict[str, str]:
    """Write a complete file that replaces any file at `path`; returns its meta data.

    The new file is locked from its first byte until it is complete, so a program that starts in the
    meantime does not delete it.
    """
    meta = {
        "format": str(FORMAT),
        "tokenizer": tokenizer,
        "vocabulary": str(vocabulary),
        "tokens": str(tokens),
        "documents": str(documents),
        "title": title,
    }
    with replacing(path) as partial, closing(sqlite3.connect(partial)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO grams VALUES (?, ?)", grams)
        counted = "SELECT count(*), coalesce(sum(length(followers) - ?), 0) FROM grams"
        keys, followers = connection.execute(counted, (HEAD,)).fetchone()
        entries = followers // entry_format(vocabulary).size
        meta |= {"keys": str(keys), "entries": str(entries)}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", sorted(meta.items()))
        connection.commit()
        progress("write", 1.0)
    return meta


def check(documents: Sequence[NDArray[np.uint32]], vocabulary: int) -> None:
    if vocabulary > LARGEST_VOCABULARY or not any(len(document) > 1 for document in documents):
        raise StorageError(
            f"There is nothing to count in {len(documents)} documents for a vocabulary of "
            f"{vocabulary:,} tokens. Give texts, and a vocabulary of at most "
            f"{LARGEST_VOCABULARY:,}."
        )
    largest = max(int(document.max()) for document in documents if len(document))
    if largest >= vocabulary:
        raise StorageError(
            f"The texts hold token {largest:,}, which a vocabulary of {vocabulary:,} tokens does "
            "not have. Use the model's own tokenizer."
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write, which replaces `path` when it is complete. It is deleted if writing
    fails. Raises StorageError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        yield partial
        os.replace(partial, path)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"The statistics file {str(path)!r} could not be written: {error}. "
            "Choose a folder that can be written to and has room."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


# in a separate process


@dataclass(frozen=True, slots=True)
class Spec:
    """What to build, and where: see `build`."""

    path: str
    tokenizer: str
    vocabulary: int
    title: str
    budget: int
    fewest: int = FEWEST

    def command(self) -> str:
        return json.dumps(asdict(self))


def split(tokens: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    ends = np.flatnonzero(tokens == END)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [tokens[start:end] for start, end in pairs]


def main() -> None:
    """`python -m storage.statistics_build SPEC < TOKENS`: build a file in a separate process.
    This does not slow down answers, and the process can be ended at any moment.

    TOKENS are the documents' tokens as 32-bit integers, with `END` after each document. SPEC is the
    JSON of a `Spec`. Progress is printed line by line, as "stage share". The last line is "made"
    and the meta data as JSON, or "failed" and the reason.
    """
    with suppress(AttributeError, OSError):  # Windows has no `nice`.
        os.nice(POLITE)
    spec = Spec(**json.loads(sys.argv[1]))
    documents = split(np.fromfile(sys.stdin.buffer, dtype=np.uint32))
    report = partial(print, flush=True)
    try:
        meta = build(documents, progress=report, **{**asdict(spec), "path": Path(spec.path)})
    except (StrataError, MemoryError) as error:
        report(FAILED, str(error) or "There is not enough memory. Choose fewer files.")
    else:
        report(MADE, json.dumps(meta))


if __name__ == "__main__":
    main()
