"""What statistics files of a given size cost: the build, the file, the memory, the look-ups.

The text is made up, since no text of that size comes along: a random source of order 2 whose tokens
are distributed by Zipf's law. A token is drawn by the two before it with probability 0.6, by the
one before with 0.3, else from all tokens. What may follow a context is a list that a hash of the
context chooses from all tokens, and the place in it is drawn by Zipf's law again. It takes six to
seven tokens of such text to make one n-gram, and six of a real mix of chats and stories.

An n-gram is a stored (key, next token). Every file is built and then asked in a process of its own,
so that memory is that file's alone. Keys are the last one, two and three tokens at random places of
a text of the same source that was not counted, so some are unknown, as in use. "Cold" is a key that
is asked for the first time, from a file that the system may hold in memory; "warm" is the second
time, with the table's own cache.
"""

import argparse
import json
import multiprocessing
import platform
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.options import Record
from engine.errors import SettingError
from storage.statistics import CACHED, FOLLOWERS, KEY_SIZE, StatisticsTable
from storage.statistics_build import build

VOCABULARY = 32_000
DOCUMENT = 500
TOKENS_PER_NGRAM = 6.7
BY_TWO, BY_ONE = 0.6, 0.3
"""How often a token depends on the two tokens before it, and on the one before it."""
LIST_OF_TWO, LIST_OF_ONE = 8, 64
"""How many tokens may follow two tokens, and one."""
MILLION = 1_000_000
PERCENTILES = (50, 95, 99)

Words = NDArray[np.uint64]
Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench lookup`."""
    add = parser.add_argument
    add("--ngrams", default=f"{MILLION},{10 * MILLION}", help="sizes of the files, about")
    add("--keys", type=int, default=20_000, help="keys to ask for, of each length")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, help="where to keep the files meanwhile (default: the system's)")


class Source:
    """Random text of order 2 with Zipf's marginals; the same seed is the same language."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        weights = 1 / (np.arange(vocabulary) + 2.7)  # Mandelbrot's shift for words
        self.below = np.cumsum(weights) / weights.sum()
        self.seed, self.vocabulary = seed, vocabulary

    def tokens_at(self, places: NDArray[np.float64]) -> Words:
        """The tokens at places in [0, 1) of the distribution of all tokens."""
        found = np.searchsorted(self.below, places, side="right")
        return np.minimum(found, self.vocabulary - 1).astype(np.uint64)

    def documents(self, tokens: int, text: int) -> list[NDArray[np.uint32]]:
        """The text number `text`: about so many tokens, in documents of equal length."""
        draw = np.random.default_rng((self.seed, text))
        count = max(2, round(tokens / DOCUMENT))
        made = np.empty((count, DOCUMENT), dtype=np.uint32)
        before, last = self.tokens_at(draw.random((2, count)))
        for at in range(DOCUMENT):
            kind, place, anywhere = draw.random((3, count))
            two = kind < BY_TWO
            # Ranks whose logarithms are evenly distributed: rank r about as often as 1 / r.
            rank = np.where(two, LIST_OF_TWO**place, LIST_OF_ONE**place).astype(np.uint64)
            pair = (before + np.uint64(1)) * np.uint64(self.vocabulary)
            listed = self.scattered(np.where(two, pair, np.uint64(0)) + last, rank)
            place = np.where(kind < BY_TWO + BY_ONE, listed, anywhere)
            before, last = last, self.tokens_at(place)
            made[:, at] = last
        return list(made)

    def scattered(self, contexts: Words, ranks: Words) -> NDArray[np.float64]:
        """A fixed place in [0, 1) for every context and rank, as if drawn (splitmix64)."""
        mixed = (contexts << np.uint64(8) | ranks) + np.uint64(
            self.seed * 0x9E3779B97F4A7C15 % 2**64
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
        return ((mixed ^ mixed >> np.uint64(31)) >> np.uint64(11)) / 2**53


def memory(name: str) -> int | None:
    """The bytes of this process in memory: now (VmRSS) or at most (VmHWM); None if not told.

    The system's own record is read, as a child's `ru_maxrss` starts at what its parent had.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def growth(before: int | None, after: int | None) -> int | None:
    """How many bytes were added, if that is known."""
    return None if before is None or after is None else after - before


def built(path: Path, ngrams: int, seed: int) -> Record:
    """Build a file of about so many n-grams; returns what that took."""
    documents = Source(seed).documents(round(ngrams * TOKENS_PER_NGRAM), text=0)
    before = memory("VmRSS")
    clock = perf_counter()
    meta = build(documents, path, "none", VOCABULARY, "random text", budget=1 << 60)
    seconds = perf_counter() - clock
    return {
        "ngrams": int(meta["entries"]),
        "keys": int(meta["keys"]),
        "tokens": int(meta["tokens"]),
        "build_seconds": seconds,
        "ngrams_per_second": int(meta["entries"]) / seconds,
        "file_bytes": path.stat().st_size,
        "build_memory_bytes": growth(before, memory("VmHWM")),
    }


def keys_in_use(keys: int, seed: int) -> list[tuple[int, ...]]:
    """Up to `keys` different keys of each length, as a held-out text asks for them."""
    source, draw = Source(seed), np.random.default_rng((seed, 2))
    documents = source.documents(max(40 * keys, DOCUMENT), text=1)
    asked: list[set[tuple[int, ...]]] = [set() for _ in range(KEY_SIZE)]
    order = []
    for place in draw.permutation(len(documents) * (DOCUMENT - KEY_SIZE)):
        document, end = divmod(int(place), DOCUMENT - KEY_SIZE)
        window = tuple(documents[document][end : end + KEY_SIZE].tolist())
        for size, known in enumerate(asked, start=1):
            key = window[-size:]
            if len(known) < keys and key not in known:
                known.add(key)
                order.append(key)
        if all(len(known) == keys for known in asked):
            break
    return order


def look_ups(path: Path, keys: Sequence[tuple[int, ...]]) -> Record:
    """Ask an opened table for all keys, twice; returns times in microseconds, and the memory."""
    before = memory("VmRSS")
    table = StatisticsTable(path)
    try:
        found, cold = asked(table, keys)
        _, warm = asked(table, keys)
        grown = growth(before, memory("VmRSS"))
    finally:
        table.close()
    lengths = np.array([len(key) for key in keys])
    return {
        "table_memory_bytes": grown,
        "look_ups": {
            str(size or "all"): {
                "keys": int(chosen.sum()),
                "known": float(found[chosen].mean()),
                "cold_us": percentiles(cold[chosen]),
                "warm_us": percentiles(warm[chosen]),
            }
            for size in range(KEY_SIZE + 1)
            if (chosen := lengths == size if size else lengths > 0).any()
        },
    }


def asked(
    table: StatisticsTable, keys: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which of the keys are known, and how many microseconds each look-up took."""
    known, times = np.zeros(len(keys), dtype=bool), np.zeros(len(keys))
    for at, key in enumerate(keys):
        clock = perf_counter()
        followers = table.look_up(key)
        times[at] = 1e6 * (perf_counter() - clock)
        known[at] = followers is not None
    return known, times


def percentiles(times: NDArray[np.float64]) -> dict[str, float]:
    """The median and the slow end."""
    values = np.percentile(times, PERCENTILES)
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, values, strict=True)}


def alone(work: Callable[[], Result]) -> Result:
    """Do the work in a fresh process, whose memory nothing else has touched."""
    fresh = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(max_workers=1, mp_context=fresh) as pool:
            return pool.submit(work).result()
    except BrokenProcessPool as error:
        raise SettingError(
            "The measuring process was killed, perhaps for want of memory. Choose a smaller "
            "--ngrams; building takes some 450 bytes per n-gram."
        ) from error


def asked_alone(path: Path, keys: int, seed: int) -> Record:
    """The look-ups, with keys made on the spot."""
    return look_ups(path, keys_in_use(keys, seed))


def sizes_of(options: argparse.Namespace) -> list[int]:
    """The sizes to measure. Raises SettingError for options that cannot work."""
    try:
        sizes = [int(size) for size in options.ngrams.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or options.keys < 1 or options.seed < 0:
        raise SettingError(
            f"Give --ngrams as positive whole numbers with commas between (not "
            f"{options.ngrams!r}), at least one key and a seed of 0 or more."
        )
    if options.folder and not options.folder.is_dir():
        raise SettingError(f"There is no folder {str(options.folder)!r}. Choose another --folder.")
    return sizes


def run(options: argparse.Namespace) -> None:
    """Measure, print."""
    sizes = sizes_of(options)
    results = []
    for size in sizes:
        with TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "lookup.statistics.db"
            result = alone(partial(built, path, size, options.seed))
            result |= alone(partial(asked_alone, path, options.keys, options.seed))
        results.append(result)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "seed": options.seed,
        "vocabulary": VOCABULARY,
        "followers": FOLLOWERS,
        "cached_keys": CACHED,
        "files": results,
    }
    show(record)
    print(f"\n{json.dumps(record)}")


def show(record: Record) -> None:
    """Print the tables."""
    print(
        f"Random text, vocabulary {record['vocabulary']:,}, seed {record['seed']}, "
        f"{record['machine']}, Python {record['python']}, SQLite {record['sqlite']}, "
        f"{record['date'][:10]}"
    )
    print(
        f"\n{'n-grams':>12}{'keys':>12}{'tokens':>13}{'build s':>9}{'n-grams/s':>12}"
        f"{'file MB':>9}{'build MB':>10}{'table MB':>10}"
    )
    for f in record["files"]:
        print(
            f"{f['ngrams']:12,}{f['keys']:12,}{f['tokens']:13,}{f['build_seconds']:9.1f}"
            f"{f['ngrams_per_second']:12,.0f}{megabytes(f['file_bytes']):>9}"
            f"{megabytes(f['build_memory_bytes']):>10}{megabytes(f['table_memory_bytes']):>10}"
        )
    heads = "".join(f"{f'{kind} p{p}':>10}" for kind in ("cold", "warm") for p in PERCENTILES)
    print(f"\n{'look-ups, us':>12}{'length':>8}{'asked':>9}{'known':>8}{heads}")
    for f in record["files"]:
        for length, figures in f["look_ups"].items():
            times = [*figures["cold_us"].values(), *figures["warm_us"].values()]
            print(
                f"{f['ngrams']:12,}{length:>8}{figures['keys']:9,}{figures['known']:8.0%}"
                + "".join(f"{time:10.2f}" for time in times)
            )


def megabytes(count: int | None) -> str:
    """Bytes for people."""
    return "-" if count is None else f"{count / MILLION:,.1f}"
