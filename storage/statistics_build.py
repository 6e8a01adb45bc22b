"""Makes a statistics file from tokenized documents: count, prune, pack, move into place.

All windows of WINDOW tokens are sorted once; then every n-gram up to that length is a run of
neighbouring rows, and its count the length of the run. A path is kept under a key when it followed
the key often enough; keys compete for the room in the file by how many tokens they would have
predicted. Nothing appears under the final name before it is complete.
"""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import StorageError
from storage.statistics import FORMAT, KEY_SIZE, NODES, ROOT, TOKEN_BITS, pack_count

WINDOW = 8
PER_WORD = 3
PAD = (1 << TOKEN_BITS) - 1
"""Stands behind the end of a document; no tokenizer has this id."""
SMALLEST_SHARE = 0.008
FEWEST = 2
"""A path seen once is chance, not statistics."""
ROW_BYTES = 14
"""What SQLite adds to a row: its key, lengths and slot."""

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of the keys of one length. Nodes are sorted by key, parents before children."""

    keys: Ints
    counts: Ints
    gains: NDArray[np.float64]
    owners: Ints
    nodes: NDArray[np.void]


def sorted_windows(documents: Sequence[NDArray[np.uint32]]) -> tuple[list[Words], Ints]:
    """Every window of the documents, padded at their ends: three sorted words and run counts."""
    pad = np.full(WINDOW - 1, PAD, dtype=np.uint64)
    parts = [part for document in documents for part in (document.astype(np.uint64), pad)]
    tokens = np.concatenate(parts)
    ends = len(tokens) - WINDOW + 1
    words = []
    for word in range(0, WINDOW, PER_WORD):
        packed = np.zeros(ends, dtype=np.uint64)
        for at in range(word, word + PER_WORD):
            packed <<= np.uint64(TOKEN_BITS)
            packed |= tokens[at : at + ends] if at < WINDOW else np.uint64(PAD)
        words.append(packed[tokens[:ends] != PAD])
    order = np.lexsort(words[::-1])
    words = [word[order] for word in words]
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = np.logical_or.reduce([word[1:] != word[:-1] for word in words])
    starts = np.flatnonzero(fresh)
    counts = np.diff(np.append(starts, len(order)))
    return [word[starts] for word in words], counts


def column(words: Sequence[Words], at: int) -> Ints:
    """The token at one place of every window."""
    shift = np.uint64(TOKEN_BITS * (PER_WORD - 1 - at % PER_WORD))
    return (words[at // PER_WORD] >> shift & np.uint64(PAD)).astype(np.int64)


class Grams:
    """The n-grams in sorted windows: for each length, where its runs start, and their counts."""

    def __init__(self, words: Sequence[Words], counts: Ints) -> None:
        self.tokens = [column(words, at) for at in range(WINDOW)]
        self.starts: list[Ints] = [np.zeros(1, dtype=np.int64)]
        self.counts: list[Ints] = [np.array([counts.sum()])]
        changed = np.zeros(len(counts), dtype=bool)
        changed[0] = True
        for at in range(WINDOW):
            changed[1:] |= self.tokens[at][1:] != self.tokens[at][:-1]
            self.starts.append(np.flatnonzero(changed))
            self.counts.append(np.add.reduceat(counts, self.starts[-1]))

    def parent(self, size: int, shorter: int) -> Ints:
        """For every n-gram of `size` tokens, the index of the one of `shorter` it begins with."""
        return np.searchsorted(self.starts[shorter], self.starts[size], side="right") - 1

    def packed(self, size: int, first: int, last: int) -> Ints:
        """Tokens `first` to `last` - 1 of every n-gram of `size`, packed like a key."""
        packed = np.full(len(self.starts[size]), last - first, dtype=np.int64)
        for at in range(first, last):
            packed = packed << TOKEN_BITS | self.tokens[at][self.starts[size]]
        return packed

    def count_of(self, packed: Ints, size: int) -> Ints:
        """The counts of packed n-grams of `size` tokens; of no use where they do not occur."""
        found = np.searchsorted(self.packed(size, 0, size), packed)
        return self.counts[size][np.minimum(found, len(self.counts[size]) - 1)]

    def gains(self, size: int) -> NDArray[np.float64]:
        """Per key of `size` tokens: how many next tokens it predicts beyond the shorter key.

        That is the sum of count(key, x) - count(key) p(x | key without its first token), where
        positive; a key that says what its suffix says already is worth nothing.
        """
        owner, counts = self.parent(size + 1, size), self.counts[size + 1]
        expected = np.zeros(len(owner))
        if size > 1:
            # Only a gram that runs into the padding has a suffix that does not occur.
            longer = self.count_of(self.packed(size + 1, 1, size + 1), size)
            shorter = self.count_of(self.packed(size + 1, 1, size), size - 1)
            expected = self.counts[size][owner] * longer / shorter
        real = (self.tokens[size][self.starts[size + 1]] != PAD) & (counts >= FEWEST)
        gained = np.maximum(counts - expected, 0.0) * real
        return np.bincount(owner, gained, len(self.starts[size])).astype(np.float64)

    def trees(self, size: int, wide: bool) -> Trees:
        """The trees of all keys of `size` tokens that are worth anything."""
        totals, gains = self.counts[size], self.gains(size)
        above = np.where(gains > 0, -1, -2)  # the node an n-gram belongs to: -1 root, -2 none
        parts: list[tuple[Ints, Ints, NDArray[np.float64], Ints]] = []
        made = 0
        for n in range(size + 1, WINDOW + 1):
            owner, above = self.parent(n, size), above[self.parent(n, n - 1)]
            token, share = self.tokens[n - 1][self.starts[n]], self.counts[n] / totals[owner]
            keep = (above > -2) & (self.counts[n] >= FEWEST) & (token != PAD)
            keep &= share >= SMALLEST_SHARE
            parts.append((owner[keep], above[keep], share[keep], token[keep]))
            above = np.where(keep, made + np.cumsum(keep) - 1, -2)
            made += int(keep.sum())
        columns = [np.concatenate(part) for part in zip(*parts, strict=True)]
        owners, nodes = ranked(columns[0], columns[1], columns[2], columns[3], wide)
        return Trees(self.packed(size, 0, size), totals, gains, owners, nodes)


def ranked(
    owners: Ints, parents: Ints, shares: NDArray[np.float64], tokens: Ints, wide: bool
) -> tuple[Ints, NDArray[np.void]]:
    """Nodes sorted by owner and share, each owner's best NODES, ready to be written as bytes.

    A parent's share is at least its child's and sorting is stable, so parents come first and no
    kept node loses its parent.
    """
    order = np.lexsort((-shares, owners))
    sorted_owners = owners[order]
    rank = np.arange(len(order)) - np.searchsorted(sorted_owners, sorted_owners, side="left")
    rank_of = np.empty(len(order), dtype=np.int64)
    rank_of[order] = rank
    keep = rank < NODES
    order = order[keep]
    kind = [("parent", "u1"), ("share", "u1"), ("token", "<u4" if wide else "<u2")]
    nodes = np.empty(len(order), dtype=kind)
    parent = parents[order]
    nodes["parent"] = np.where(parent < 0, ROOT, rank_of[np.maximum(parent, 0)])
    nodes["share"] = np.round(255 * shares[order])
    nodes["token"] = tokens[order]
    return sorted_owners[keep], nodes


def rows(trees: Sequence[Trees], budget: int) -> Iterator[tuple[int, bytes]]:
    """(key, blob) of the keys that predict most per byte, within `budget` bytes, in key order."""
    keys, gains, blobs = [], [], []
    for tree in trees:
        width = tree.nodes.dtype.itemsize
        starts = np.flatnonzero(np.diff(tree.owners, prepend=-1))
        ends = np.append(starts, len(tree.owners))[1:]
        data = tree.nodes.tobytes()
        keys.append(tree.keys[tree.owners[starts]])
        gains.append(tree.gains[tree.owners[starts]])
        counts = [bytes([pack_count(count)]) for count in tree.counts[tree.owners[starts]]]
        blobs += [
            count + data[start * width : end * width]
            for count, start, end in zip(counts, starts, ends, strict=True)
        ]
    all_keys, all_gains = np.concatenate(keys), np.concatenate(gains)
    sizes = np.array([len(blob) for blob in blobs]) + ROW_BYTES
    best = np.argsort(-all_gains / sizes, kind="stable")
    best = best[np.cumsum(sizes[best]) <= budget]
    for at in best[np.argsort(all_keys[best])]:
        yield int(all_keys[at]), blobs[at]


def build(
    documents: Sequence[NDArray[np.uint32]],
    path: Path,
    tokenizer: str,
    vocabulary: int,
    title: str,
    budget: int,
    progress: Progress = lambda stage, done: None,
) -> dict[str, str]:
    """Write the statistics of tokenized `documents` to `path`; returns the file's meta data.

    `tokenizer` is its fingerprint, `budget` the size of the file in bytes, about. `progress` is
    called with a stage's name and the fraction done; what it raises cancels the build and leaves
    neither a new file nor a trace. Raises StorageError when there is nothing to count or the file
    cannot be written.
    """
    if vocabulary > PAD or not any(len(document) > 1 for document in documents):
        raise StorageError(
            f"There is nothing to count in {len(documents)} documents for a vocabulary of "
            f"{vocabulary:,} tokens. Give texts, and a vocabulary below {PAD:,}."
        )
    progress("sort", 0.0)
    grams = Grams(*sorted_windows(documents))
    progress("sort", 1.0)
    trees = []
    for size in range(1, KEY_SIZE + 1):
        trees.append(grams.trees(size, vocabulary > 1 << 16))
        progress("count", size / KEY_SIZE)
    meta = {
        "format": str(FORMAT),
        "tokenizer": tokenizer,
        "vocabulary": str(vocabulary),
        "tokens": str(sum(len(document) for document in documents)),
        "documents": str(len(documents)),
        "title": title,
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        write(partial, rows(trees, budget), meta)
        progress("write", 1.0)
        os.replace(partial, path)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"The statistics file {str(path)!r} could not be written: {error}. "
            "Choose a folder that can be written to and has room."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return meta


def write(path: Path, grams: Iterable[tuple[int, bytes]], meta: dict[str, str]) -> None:
    """Write a complete file; the number of keys is added to `meta`."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        connection.execute("CREATE TABLE grams (key INTEGER PRIMARY KEY, tree BLOB NOT NULL)")
        connection.executemany("INSERT INTO grams VALUES (?, ?)", grams)
        meta["keys"] = str(connection.execute("SELECT count(*) FROM grams").fetchone()[0])
        connection.executemany("INSERT INTO meta VALUES (?, ?)", sorted(meta.items()))
        connection.commit()
        connection.execute("VACUUM")
    finally:
        connection.close()
