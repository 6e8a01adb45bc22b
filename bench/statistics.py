"""What making statistics from much text costs: n-grams a second, and memory, in shards.

The text is made here: tokens that follow each other as words do, few of them often. Tokenizing is
not part of it. `--kills` ends the work that many times, at random moments, and has it go on; the
file must be the same. `--compare` makes the file in memory as well, and compares the bytes.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.options import print_record
from engine.errors import StrataError
from storage.statistics_build import build
from storage.statistics_shards import Plan, count, reduce, shard_size

LENGTH = 2_000
"""Tokens of a document."""
BUDGET = 64 << 20
LOOK_SECONDS = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench statistics`."""
    parser.add_argument("--millions", type=float, default=10.0, help="of n-grams")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--memory", type=float, default=2.0, help="gigabytes")
    parser.add_argument("--shards", type=int, default=2, help="counted at the same time")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="with the builder in memory")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Make the file, measure, print. Raises StrataError where files differ."""
    if options.into:
        make(options, options.into)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Peak() as peak:
            begun = perf_counter()
            meta = make(options, folder / "one.db")
            seconds = perf_counter() - begun
        made = int(meta["tokens"])
        print(f"{made:,} n-grams in {seconds:.1f} s: {made / seconds / 1e6:.2f} M a second")
        print(f"at most {peak.most / 1e9:.2f} GB of memory, in all processes")
        print(f"{int(meta['keys']):,} keys and {int(meta['entries']):,} entries")
        record = {"ngrams": made, "seconds": seconds, "peak_bytes": peak.most}
        if options.kills:
            again = folder / "killed.db"
            kills = killed(again, seconds, options.kills)
            same(folder / "one.db", again)
            print(f"ended {kills} times and gone on with: the same file")
            record["kills"] = kills
        if options.compare:
            whole = folder / "whole.db"
            begun = perf_counter()
            with Peak() as peak:
                build(texts(options), whole, "bench", options.vocabulary, "bench", BUDGET)
            seconds = perf_counter() - begun
            same(folder / "one.db", whole)
            print(f"in memory: {seconds:.1f} s and {peak.most / 1e9:.2f} GB for the same file")
            record |= {"memory_seconds": seconds, "memory_peak_bytes": peak.most}
    print_record(record)


def make(options: argparse.Namespace, path: Path) -> dict[str, str]:
    """Make the file in shards, in a work folder beside it."""
    memory = int(options.memory * (1 << 30))
    plan = Plan((f"{options.millions} M",), "bench", options.vocabulary, 2)
    work = path.with_suffix(".work")
    size = plan.claim(work, shard_size(memory, options.shards))
    numbers = cut(options, size)
    count(work, numbers, partial(some, options), options.vocabulary, options.shards)
    return reduce(work, plan, path, "bench", BUDGET, memory)


def cut(options: argparse.Namespace, size: int) -> Iterator[Sequence[int]]:
    """The numbers of the documents of each shard of so many tokens."""
    documents = int(options.millions * 1e6) // LENGTH
    each = max(1, size // LENGTH)
    for start in range(0, documents, each):
        yield range(start, min(start + each, documents))


def some(options: argparse.Namespace, numbers: Sequence[int]) -> list[NDArray[np.uint32]]:
    """Documents, each the same whenever it is made: a token is followed by few others, mostly."""
    vocabulary = options.vocabulary
    favourite = np.random.default_rng(0).integers(0, vocabulary, vocabulary)
    dice = np.array([np.random.default_rng([1, n]).random((2, LENGTH)) for n in numbers])
    tokens = np.empty((LENGTH, len(numbers)), dtype=np.uint32)
    before = np.zeros(len(numbers), dtype=np.int64)
    for at in range(LENGTH):
        among = (40 * dice[:, 0, at] ** 2).astype(np.int64)
        usual = (favourite[before] + among * among) % vocabulary
        any_ = (vocabulary * dice[:, 1, at] ** 4).astype(np.int64)
        before = np.where(dice[:, 1, at] < 0.7, usual, any_)
        tokens[at] = before
    return list(np.ascontiguousarray(tokens.T))


def texts(options: argparse.Namespace) -> list[NDArray[np.uint32]]:
    """All documents."""
    return [each for numbers in cut(options, 1 << 22) for each in some(options, numbers)]


def killed(path: Path, seconds: float, times: int) -> int:
    """Make the file in a process that is ended again and again, at random moments of the time that
    it takes in one piece; how often it was."""
    command = [sys.executable, "-m", "bench", *sys.argv[1:], "--into", str(path)]
    dice, ended = random.Random(7), 0
    while not path.exists():
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            moment = 2 * seconds / times * dice.random() + 1 if ended < times else None
            try:
                if process.wait(moment):
                    raise StrataError("The build failed: see above.")
            except subprocess.TimeoutExpired:
                ended += 1
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
    return ended


def same(one: Path, other: Path) -> None:
    """Raise StrataError unless the files hold the same bytes."""
    if one.read_bytes() != other.read_bytes():
        raise StrataError(f"{one.name} and {other.name} differ.")


class Peak:
    """The most memory that this process and those that it started take together, while entered."""

    def __init__(self) -> None:
        self.most = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self) -> "Peak":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def look(self) -> None:
        """Look again and again. What processes share is counted for each of them."""
        own = psutil.Process()
        while not self.over.is_set():
            taken = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    taken += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.most = max(self.most, taken)
            sleep(LOOK_SECONDS)
