"""Makes the same statistics file from more text than memory holds.

Documents are counted shard by shard: the n-grams of each length, sorted, go to Parquet files.
DuckDB adds them up, for one range of keys after the other, so that all followers of a key meet in
memory. What then ranks and chooses them is that of the builder in memory
(storage/statistics_build.py), on the same numbers in the same order: so the file is the same, byte
for byte.

Every file is written under another name and moved into place when it is complete, and a file that
is there is not made again. So who is interrupted goes on where they were, with the same command.
The invariant: what a work folder holds belongs to the texts and settings of its plan.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from engine.errors import StorageError
from storage.duck import connection, quoted
from storage.statistics import FORMAT, KEY_SIZE, key_bits
from storage.statistics_build import (
    Best,
    Chances,
    Floats,
    Grams,
    Ints,
    Keys,
    Level,
    Progress,
    chances_of_tokens,
    check,
    entry_type,
    keys_of,
    lift,
    replacing,
    write,
)

LEVELS = KEY_SIZE + 1
"""The lengths of n-grams that are counted."""
PLAN, COUNTED = "plan.json", "counted.json"
SKETCH = 1024
"""One in so many keys of a shard is remembered: they tell where to cut."""
WINDOW_BYTES = 120
"""What a token of a shard takes in memory while it is counted, as measured."""
ROW_BYTES = 200
"""What a row of a range takes in memory while it is ranked, as measured."""
SHARE = 0.5
"""The part of the memory that is for rows; the rest is DuckDB's and the program's own."""
LARGEST_SHARD = 1 << 24
KEYS = ("packed", "gains", "first", "heads", "entries")
"""The columns of ranked keys."""
STAGES = ("count", "rank", "write")
"""What a build does, in this order, as `progress` is told."""

Documents = Sequence[NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a work folder is for. Other texts or settings need another folder."""

    texts: tuple[str, ...]
    tokenizer: str
    vocabulary: int
    fewest: int

    def claim(self, folder: Path, shard: int) -> int:
        """Make a folder the work folder of this plan, with shards of about so many characters; or
        those it was begun with. Raises StorageError where it is another's."""
        wanted = json.loads(json.dumps(asdict(self)))
        path = folder / PLAN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(not each.name.startswith(".") for each in folder.iterdir()):
                    raise StorageError(
                        f"The work folder {str(folder)!r} holds something else. Give a new one."
                    )
                with moved(path) as partial:
                    text = json.dumps(wanted | {"shard": shard}, indent=1)
                    partial.write_text(text, encoding="utf-8")
            found = json.loads(path.read_text("utf-8"))
            other = [name for name in wanted if found.get(name) != wanted[name]]
            begun = int(found["shard"])
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StorageError(
                f"The work folder {str(folder)!r} cannot be used: {error}. Give a new one."
            ) from error
        if other:
            raise StorageError(
                f"The work folder {str(folder)!r} was begun with another {' and '.join(other)}. "
                "Give a new one, or delete this one."
            )
        return begun


@contextmanager
def moved(path: Path) -> Iterator[Path]:
    """A file to write that gets its name when it is complete. Raises StorageError."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")  # processes of other hosts, too
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(f"{str(path)!r} could not be written: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def counting(folder: Path, memory: int = 0, threads: int = 0) -> Iterator[Any]:
    """DuckDB, which swaps to the folder where it takes more than so many bytes of memory. Raises
    StorageError, also for what goes wrong while it is used."""
    with connection(
        "Counting more text than memory holds",
        lambda why: (
            f"DuckDB stopped in {str(folder)!r}: {why} Give more --memory, or a --work-dir with "
            "more room."
        ),
    ) as made:
        if memory:
            made.execute(f"SET memory_limit = '{memory}B'")
        made.execute("SET temp_directory = ?", [str(folder)])
        made.execute("SET preserve_insertion_order = false")
        if threads:
            made.execute(f"SET threads = {threads}")
        yield made


# a shard


def shard_file(folder: Path, name: str) -> Path:
    """What says that a shard is counted, and what it held."""
    return folder / f"shard-{name}.json"


def pieces(documents: Documents, most: int) -> Iterator[Documents]:
    """The documents in order, at most so many tokens together: texts have more or fewer."""
    start = size = 0
    for at, document in enumerate(documents):
        if size and size + len(document) > most:
            yield documents[start:at]
            start, size = at, 0
        size += len(document)
    if size:
        yield documents[start:]


def count_shard(
    folder: Path, name: str, documents: Documents, vocabulary: int, most: int = LARGEST_SHARD
) -> None:
    """Count one shard into files of the folder, at most so many tokens at a time. Raises
    StorageError."""
    tokens = sum(len(document) for document in documents)
    meta: dict[str, Any] = {"tokens": tokens, "documents": len(documents)}
    meta |= {"rows": [0] * LEVELS, "sketch": [[] for _ in range(LEVELS)]}
    if any(len(document) > 1 for document in documents):
        check(documents, vocabulary)
    for number, piece in enumerate(pieces(documents, most)):
        grams = Grams(piece, vocabulary)
        with counting(folder, threads=1) as duck:
            for size in range(LEVELS):
                level = grams.level(size)
                # DuckDB reads the arrays where they are.
                duck.register("level", level._asdict())
                with moved(folder / f"shard-{name}.{number}.{size}.parquet") as partial:
                    duck.execute(f"COPY (FROM level) TO '{quoted(partial)}' (FORMAT parquet)")
                meta["rows"][size] += len(level.keys)
                meta["sketch"][size] += level.keys[::SKETCH].tolist()
    with moved(shard_file(folder, name)) as partial:
        partial.write_text(json.dumps(meta), encoding="utf-8")


def shard_size(memory: int, processes: int) -> int:
    """How many tokens may be counted at a time by each of so many processes."""
    return min(LARGEST_SHARD, int(memory * SHARE) // processes // WINDOW_BYTES)


# all shards


class Reduction:
    """Adds up the shards of a work folder, and ranks what they hold, a range of keys at a time."""

    def __init__(self, folder: Path, plan: Plan, memory: int, progress: Progress) -> None:
        self.folder, self.plan, self.memory, self.progress = folder, plan, memory, progress
        self.bits = key_bits(plan.vocabulary)
        paths = sorted(folder.glob("shard-*.json"))
        assert len(paths) == json.loads((folder / COUNTED).read_text("utf-8"))["shards"]
        self.shards = [json.loads(path.read_text("utf-8")) for path in paths]
        self.tokens = sum(shard["tokens"] for shard in self.shards)
        self.documents = sum(shard["documents"] for shard in self.shards)
        self.cuts = [self.cut(size) for size in range(LEVELS)]

    def cut(self, size: int) -> list[int]:
        """Where the ranges of a level begin: each has about as many rows as fit the memory."""
        total = sum(shard["rows"][size] for shard in self.shards)
        sketch = np.sort(np.concatenate([shard["sketch"][size] for shard in self.shards]))
        parts = -(-total * ROW_BYTES // int(self.memory * SHARE))
        places = np.arange(1, parts) * len(sketch) // max(1, parts)
        return [0, *np.unique(sketch[places]).astype(int).tolist()]

    def level(self, duck: Any, size: int, part: int) -> Level:
        """The n-grams of a range, added up."""
        start, *end = self.cuts[size][part : part + 2]
        until = f"AND keys < {end[0]}" if end else ""
        found = duck.execute(
            "SELECT keys, tokens, sum(counts)::BIGINT AS counts "
            f"FROM read_parquet('{quoted(self.folder)}/shard-*.{size}.parquet') "
            f"WHERE keys >= {start} {until} GROUP BY keys, tokens ORDER BY keys, tokens"
        ).fetchnumpy()
        return Level(*(np.asarray(found[name]) for name in Level._fields))

    def ranked(self, size: int, part: int) -> Path:
        """The file of a ranked range."""
        return self.folder / f"ranked-{size}-{part:05}.npz"

    def keys(self, size: int) -> Iterator[Keys]:
        """The keys of a level, range by range."""
        for part in range(len(self.cuts[size])):
            with np.load(self.ranked(size, part)) as found:
                yield Keys(*(found[name] for name in KEYS))

    def whole(self, size: int, name: str) -> NDArray[Any]:
        """A column of all ranges of a level, on the disk."""
        path = self.folder / f"whole-{size}-{name}.npy"
        if not path.exists():
            pieces = []
            for part in range(len(self.cuts[size])):
                with np.load(self.ranked(size, part)) as found:
                    pieces.append((len(found[name]), found[name].dtype))
            with moved(path) as partial:
                length = sum(count for count, _ in pieces)
                array = np.lib.format.open_memmap(partial, "w+", pieces[0][1], (length,))
                start = 0
                for part, (size_of_part, _) in enumerate(pieces):
                    with np.load(self.ranked(size, part)) as found:
                        array[start : start + size_of_part] = found[name]
                    start += size_of_part
                array.flush()
        return np.load(path, mmap_mode="r") if path.stat().st_size else np.empty(0)

    def rank(self, size: int, shorter: Chances) -> Chances:
        """Rank what follows the keys of `size` tokens; gives what they make likely."""
        plan, parts = self.plan, len(self.cuts[size])
        with counting(self.folder, int(self.memory * (1 - SHARE))) as duck:
            for part in range(parts):
                if not self.ranked(size, part).exists():
                    level = self.level(duck, size, part)
                    keys, chances = keys_of(level, size, shorter, plan.vocabulary, plan.fewest)
                    columns = {name: getattr(keys, name) for name in KEYS}
                    if size < KEY_SIZE:
                        columns |= {"grams": chances.packed, "values": chances.values}
                    with moved(self.ranked(size, part)) as partial, partial.open("wb") as file:
                        np.savez(file, **columns)
                self.progress("rank", (size - 1 + (part + 1) / parts) / KEY_SIZE)
        if size == KEY_SIZE:
            return shorter
        return Chances(self.whole(size, "grams"), self.whole(size, "values"))

    def rank_all(self) -> None:
        """Rank the keys of every length."""
        with counting(self.folder, int(self.memory * (1 - SHARE))) as duck:
            self.cuts[0] = [0]
            chances = chances_of_tokens(self.level(duck, 0, 0), self.tokens, self.plan.fewest)
        for size in range(1, LEVELS):
            chances = self.rank(size, chances)

    def rows(self, budget: int) -> Iterator[tuple[int, bytes]]:
        """(key, blob) of the keys that gain most per byte, within `budget` bytes, in key order."""
        packed: dict[int, Ints] = {n: self.whole(n, "packed") for n in range(1, LEVELS)}
        worth: dict[int, Floats] = {}
        for size in range(1, LEVELS):
            path = self.folder / f"worth-{size}.npy"
            worth[size] = np.lib.format.open_memmap(path, "w+", float, packed[size].shape)
            start = 0
            for keys in self.keys(size):
                worth[size][start : start + len(keys.packed)] = keys.gains / keys.sizes()
                start += len(keys.packed)
        for size in range(KEY_SIZE, 1, -1):
            start = 0
            for keys in self.keys(size):
                own = worth[size][start : start + len(keys.packed)]
                lift(packed[size - 1], worth[size - 1], keys.packed, own, size - 1, self.bits)
                start += len(keys.packed)
        best = Best(budget)
        first = 0
        for size in range(1, LEVELS):
            start = 0
            for keys in self.keys(size):
                own = worth[size][start : start + len(keys.packed)]
                best.offer(own, keys.sizes(), first + start)
                start += len(keys.packed)
            first += start
        start = 0
        for size in range(1, LEVELS):
            for keys in self.keys(size):
                yield from keys.blobs(best.within(start, len(keys.packed)))
                start += len(keys.packed)


def reduce(
    folder: Path,
    plan: Plan,
    path: Path,
    title: str,
    budget: int,
    memory: int,
    progress: Progress = lambda stage, done: None,
) -> dict[str, str]:
    """Write the statistics of the counted shards to `path`; returns the file's meta data, as
    `build` does. The work folder is deleted once that is done."""
    reduction = Reduction(folder, plan, memory, progress)
    if not any(any(shard["rows"][1:]) for shard in reduction.shards):
        check([], plan.vocabulary)
    reduction.rank_all()
    meta = {
        "format": str(FORMAT),
        "tokenizer": plan.tokenizer,
        "vocabulary": str(plan.vocabulary),
        "tokens": str(reduction.tokens),
        "documents": str(reduction.documents),
        "title": title,
    }
    progress("write", 0.0)
    with replacing(path) as partial:
        entry = entry_type(plan.vocabulary).itemsize
        write(partial, reduction.rows(budget), meta, entry, lambda: progress("write", 1.0))
    shutil.rmtree(folder)
    return meta
