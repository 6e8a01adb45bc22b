"""Makes the same statistics file from more text than memory holds.

Documents are counted shard by shard: the sorted n-grams of each length are written to Parquet
files. DuckDB adds them up, one range of keys after the other. They are then ranked and selected by
the code of the builder in memory (storage/statistics_build.py), on the same numbers in the same
order, so the resulting file is the same, byte for byte. Several hosts that share the work folder
can each count a part of the volumes.

Every file is written under a temporary name and renamed when it is complete, and a file that exists
is not made again. An interrupted command can therefore be run again, and continues. The invariant:
the content of a work folder belongs to the texts and settings of its plan.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from engine.errors import StorageError
from storage.documents import connection, quoted
from storage.statistics import KEY_SIZE, key_bits
from storage.statistics_build import (
    Chances,
    Grams,
    Keys,
    Level,
    Progress,
    chances_of_tokens,
    check,
    keys_of,
    rows,
    save,
)

LEVELS = KEY_SIZE + 1
"""The lengths of n-grams that are counted."""
PLAN, COUNTED = "plan.json", "counted.json"
SKETCH = 1024
"""Every SKETCH-th key of a shard is recorded, to decide where ranges are cut."""
WINDOW_BYTES = 120
"""Bytes of memory per token of a shard while it is counted, as measured."""
ROW_BYTES = 200
"""Bytes of memory per row of a range while it is ranked, as measured."""
SHARE = 0.5
"""The part of the memory that is for rows; the rest is DuckDB's and the program's own."""
LARGEST_SHARD = 1 << 24
KEYS = ("packed", "gains", "first", "heads", "entries")
"""The columns of ranked keys."""
STAGES = ("count", "rank", "write")
"""The stages of a build in order, as passed to `progress`."""

Documents = Sequence[NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The texts and settings that a work folder belongs to. Others need another folder."""

    texts: tuple[str, ...]
    tokenizer: str
    vocabulary: int
    fewest: int

    def claim(self, folder: Path, shard: int) -> int:
        """Make a folder the work folder of this plan. Returns the number of characters per shard:
        `shard` for a new folder, otherwise the number with which the folder was started.

        Raises StorageError if the folder belongs to another plan.
        """
        own = json.loads(json.dumps(asdict(self)))
        path = folder / PLAN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = [each.name for each in folder.iterdir()]
            if PLAN not in names:
                if any(not name.startswith(".") for name in names):
                    raise StorageError(
                        f"The work folder {str(folder)!r} holds something else. Give a new one."
                    )
                with moved(path) as partial:
                    text = json.dumps(own | {"shard": shard}, indent=1)
                    partial.write_text(text, encoding="utf-8")
            found = json.loads(path.read_text("utf-8"))
            other = [name for name in own if found.get(name) != own[name]]
            stored = int(found["shard"])
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise StorageError(
                f"The work folder {str(folder)!r} cannot be used: {error}. Give a new one."
            ) from error
        if other:
            raise StorageError(
                f"The work folder {str(folder)!r} was started with another {' and '.join(other)}. "
                "Give a new one, or delete this one."
            )
        return stored


@contextmanager
def moved(path: Path) -> Iterator[Path]:
    """A file to write that gets its final name when it is complete. Raises StorageError."""
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
    """DuckDB, which swaps to the folder when it needs more than `memory` bytes. Errors of DuckDB in
    the block become a StorageError."""
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
    return folder / f"shard-{name}.json"


def pieces(documents: Documents, most: int) -> Iterator[Documents]:
    """The documents in order, in pieces of at most `most` tokens; a longer document is a piece."""
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
    """Count one shard into files of the folder, at most `most` tokens at a time. Raises
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
    return min(LARGEST_SHARD, int(memory * SHARE) // processes // WINDOW_BYTES)


class Texts(Protocol):
    """The texts to count. Every process receives this value.

    The texts are in volumes, each of which is read by one process, and these in shards, each of
    which is counted by one process; the boundaries are always the same.
    """

    @property
    def volumes(self) -> int:
        """The number of volumes."""

    def shards(self, volume: int, report: Callable[[float], None]) -> Iterator[Any]:
        """The shards of a volume; `report` is called with the share of the volume that was read.
        Raises StorageError."""

    def tokenized(self, shard: Any) -> Documents:
        """The tokens of the documents of a shard. Raises StrataError."""


@dataclass(frozen=True, slots=True)
class Job:
    """Counting some texts into a work folder, in pieces of at most `most` tokens."""

    folder: Path
    texts: Texts
    vocabulary: int
    most: int

    def count_shard(self, name: str, shard: Any) -> None:
        count_shard(self.folder, name, self.texts.tokenized(shard), self.vocabulary, self.most)

    def count_volume(
        self, volume: int, crew: Executor, at_once: int, report: Callable[[float], None]
    ) -> None:
        """Read a volume, and let the executor count its shards, `at_once` at a time. Shards that
        are already counted are skipped. Raises StrataError."""
        path = self.folder / f"volume-{volume:05}.json"
        if path.exists():
            return
        number, running = 0, set[Future[None]]()

        def settle(most: int) -> None:
            nonlocal running
            while len(running) > most:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()

        try:
            for number, shard in enumerate(self.texts.shards(volume, report), 1):
                name = f"{volume:05}-{number:05}"
                if not shard_file(self.folder, name).exists():
                    settle(at_once - 1)
                    running.add(crew.submit(self.count_shard, name, shard))
            settle(0)
        finally:
            for future in running:
                future.cancel()
        with moved(path) as made:
            made.write_text(json.dumps({"shards": number}), encoding="utf-8")

    @property
    def counted(self) -> bool:
        return (self.folder / COUNTED).exists()

    def finish(self) -> None:
        found = sorted(self.folder.glob("volume-*.json"))
        assert len(found) == self.texts.volumes
        total = sum(json.loads(path.read_text("utf-8"))["shards"] for path in found)
        with moved(self.folder / COUNTED) as made:
            made.write_text(json.dumps({"shards": total}), encoding="utf-8")


def count(
    job: Job,
    processes: int,
    report: Callable[[int, float], None] = lambda volume, share: None,
    part: tuple[int, int] | None = None,
) -> None:
    """Count everything, in that number of processes, or only `part` K of N: every N-th volume.
    `report` is called with a volume and the share of it that was read. Raises StrataError."""
    if job.counted:
        return
    number, parts = part or (1, 1)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for volume in range(number - 1, job.texts.volumes, parts):
                job.count_volume(volume, pool, processes, partial(report, volume))
                report(volume, 1.0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if part is None:
        job.finish()


# all shards


class Reduction:
    """Adds up the shards of a work folder and ranks their n-grams, one range of keys at a time."""

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
        """Where the ranges of a level begin. Each range has about as many rows as fit in memory."""
        total = sum(shard["rows"][size] for shard in self.shards)
        sketch = np.sort(np.concatenate([shard["sketch"][size] for shard in self.shards]))
        parts = -(-total * ROW_BYTES // int(self.memory * SHARE))
        places = np.arange(1, parts) * len(sketch) // max(1, parts)
        return [0, *np.unique(sketch[places]).astype(int).tolist()]

    def level(self, duck: Any, size: int, part: int) -> Level:
        start, *end = self.cuts[size][part : part + 2]
        until = f"AND keys < {end[0]}" if end else ""
        found = duck.execute(
            "SELECT keys, tokens, sum(counts)::BIGINT AS counts "
            f"FROM read_parquet('{quoted(self.folder)}/shard-*.{size}.parquet') "
            f"WHERE keys >= {start} {until} GROUP BY keys, tokens ORDER BY keys, tokens"
        ).fetchnumpy()
        return Level(*(np.asarray(found[name]) for name in Level._fields))

    def ranked(self, size: int, part: int) -> Path:
        return self.folder / f"ranked-{size}-{part:05}.npz"

    def keys(self, size: int) -> Iterator[Keys]:
        for part in range(len(self.cuts[size])):
            with np.load(self.ranked(size, part)) as found:
                yield Keys(*(found[name] for name in KEYS))

    def whole(self, size: int, name: str) -> NDArray[Any]:
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
        """Rank the followers of the keys of `size` tokens. Returns the probabilities that these
        keys give."""
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
        with counting(self.folder, int(self.memory * (1 - SHARE))) as duck:
            self.cuts[0] = [0]
            chances = chances_of_tokens(self.level(duck, 0, 0), self.tokens, self.plan.fewest)
        for size in range(1, LEVELS):
            chances = self.rank(size, chances)

    def rows(self, budget: int) -> Iterator[tuple[int, bytes]]:
        packed = {size: self.whole(size, "packed") for size in range(1, LEVELS)}
        worth = {
            size: np.lib.format.open_memmap(
                self.folder / f"worth-{size}.npy", "w+", float, keys.shape
            )
            for size, keys in packed.items()
        }
        return rows(self.keys, packed, worth, self.bits, budget)


def reduce(
    folder: Path,
    plan: Plan,
    path: Path,
    title: str,
    budget: int,
    memory: int,
    progress: Progress = lambda stage, done: None,
) -> dict[str, str]:
    """Write the statistics of the counted shards to `path`, then delete the work folder. Returns
    the file's meta data, as `build` does."""
    reduction = Reduction(folder, plan, memory, progress)
    if not any(any(shard["rows"][1:]) for shard in reduction.shards):
        check([], plan.vocabulary)
    reduction.rank_all()
    progress("write", 0.0)
    chosen, found = reduction.rows(budget), (reduction.tokens, reduction.documents)
    meta = save(path, chosen, plan.tokenizer, plan.vocabulary, *found, title, progress)
    shutil.rmtree(folder)
    return meta
