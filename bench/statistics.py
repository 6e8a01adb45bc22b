"""What making statistics from much text costs: n-grams a second, and memory, in shards.

The text is made here: tokens that follow each other as words do, few of them often. Tokenizing is
not part of it. `--kills` ends the work that many times, spread evenly over the files that it makes,
and has it go on; the file must be the same. `--compare` makes the file in memory as well, and
compares the bytes.

`--files` with `--model` measures real texts instead: how fast one core reads, tokenizes and counts
them.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.options import print_record
from engine.errors import StrataError
from engine.local import document_text
from engine.models.loaders import tokenizer as load_tokenizer
from engine.types import Document
from storage.documents import documents
from storage.statistics_build import build
from storage.statistics_map import Job, count
from storage.statistics_shards import (
    COUNTED,
    STAGES,
    Plan,
    count_shard,
    reduce,
    shard_size,
)

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
    parser.add_argument("--files", nargs="+", type=Path, help="measure these texts, on one core")
    parser.add_argument("--model", help="whose tokenizer reads them")
    parser.add_argument("--megabytes", type=float, default=20.0, help="read of them at most")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """Make the file, measure, print. Raises StrataError where files differ."""
    if options.into:
        make(options, options.into)
        return
    if options.files:
        print_record(rates(options))
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
        record: dict[str, Any] = {"ngrams": made, "seconds": seconds, "peak_bytes": peak.most}
        if options.kills:
            again = folder / "killed.db"
            stages = killed(again, options.kills)
            same(folder / "one.db", again)
            where = ", ".join(f"{number} in {name}" for name, number in stages.items())
            print(f"ended at {sum(stages.values())} moments ({where}) and gone on: the same file")
            record["kills"] = stages
        if options.compare:
            whole = folder / "whole.db"
            begun = perf_counter()
            with Peak() as peak:
                documents = list(Made(options.millions, options.vocabulary, 1 << 22).all())
            build(documents, whole, "bench", options.vocabulary, "bench", BUDGET)
            seconds = perf_counter() - begun
            same(folder / "one.db", whole)
            print(f"in memory: {seconds:.1f} s and {peak.most / 1e9:.2f} GB for the same file")
            record |= {"memory_seconds": seconds, "memory_peak_bytes": peak.most}
    print_record(record)


def make(options: argparse.Namespace, path: Path) -> dict[str, str]:
    """Make the file in shards, in a work folder beside it."""
    memory = int(options.memory * (1 << 30))
    plan = Plan((f"{options.millions} M",), "bench", options.vocabulary, 2)
    work = folder_of(path)
    most = plan.claim(work, shard_size(memory, options.shards))
    made = Made(options.millions, options.vocabulary, most)
    count(Job(work, made, options.vocabulary, most), options.shards)
    return reduce(work, plan, path, "bench", BUDGET, memory)


def folder_of(path: Path) -> Path:
    """The work folder of a file."""
    return path.with_suffix(".work")


@dataclass(frozen=True, slots=True)
class Made:
    """Documents, each the same whenever it is made: a token is followed by few others, mostly."""

    millions: float
    vocabulary: int
    most: int

    @property
    def volumes(self) -> int:
        return 1

    def shards(self, volume: int, told: Callable[[float], None]) -> Iterator[range]:
        documents, each = int(self.millions * 1e6) // LENGTH, max(1, self.most // LENGTH)
        for start in range(0, documents, each):
            yield range(start, min(start + each, documents))

    def tokenized(self, shard: range) -> list[NDArray[np.uint32]]:
        vocabulary = self.vocabulary
        favourite = np.random.default_rng(0).integers(0, vocabulary, vocabulary)
        dice = np.array([np.random.default_rng([1, n]).random((2, LENGTH)) for n in shard])
        tokens = np.empty((LENGTH, len(shard)), dtype=np.uint32)
        before = np.zeros(len(shard), dtype=np.int64)
        for at in range(LENGTH):
            among = (40 * dice[:, 0, at] ** 2).astype(np.int64)
            usual = (favourite[before] + among * among) % vocabulary
            any_ = (vocabulary * dice[:, 1, at] ** 4).astype(np.int64)
            before = np.where(dice[:, 1, at] < 0.7, usual, any_)
            tokens[at] = before
        return list(np.ascontiguousarray(tokens.T))

    def all(self) -> Iterator[NDArray[np.uint32]]:
        """All documents."""
        for shard in self.shards(0, lambda share: None):
            yield from self.tokenized(shard)


def killed(path: Path, times: int) -> dict[str, int]:
    """Make the file in a process that is ended again and again, each time a few files later; how
    often it was, by what it did. Raises StrataError."""
    reached, _ = watched(path.with_name("counted.db"), sys.maxsize)
    stages = dict.fromkeys(STAGES, 0)
    for number in range(1, times + 1):
        before = moment(path)
        after, stage = watched(path, max(reached * number // (times + 1), before + 1))
        if path.exists():
            raise StrataError(
                f"It was done after {number - 1} of {times} times. Give more --millions or fewer "
                "--kills."
            )
        assert after > before
        stages[stage] += 1
    watched(path, sys.maxsize)
    return stages


def watched(path: Path, until: int) -> tuple[int, str]:
    """Make a file in a process, and end it at a moment; the one that was reached, and its stage."""
    reached, stage = 0, STAGES[0]
    command = [sys.executable, "-m", "bench", *sys.argv[1:], "--into", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            reached = max(reached, moment(path))
            if (folder_of(path) / COUNTED).exists():
                stage = STAGES[2] if partials(path) else STAGES[1]
            if reached >= until:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                return reached, stage
            sleep(LOOK_SECONDS / 10)
    if process.returncode:
        raise StrataError("The build failed: see above.")
    return reached, stage


def moment(path: Path) -> int:
    """How far the work is: how many files it has made."""
    work = folder_of(path)
    if not work.exists():
        return 0
    whole = [each for each in work.iterdir() if not each.name.startswith(".")]
    return len(whole) + len(partials(path))


def partials(path: Path) -> list[Path]:
    """The file itself while it is written."""
    return list(path.parent.glob(f"{path.name}.*.partial"))


def rates(options: argparse.Namespace) -> dict[str, float]:
    """Read, tokenize and count texts, and print how much of them a core does in a second."""
    if not options.model:
        raise StrataError("Give --model, too: the model whose tokenizer reads the files.")
    tokenizer = load_tokenizer(options.model)
    spent, texts, size = dict[str, float](), list[Document](), 0

    def timed(what: str, begun: float) -> None:
        spent[what] = process_time() - begun

    begun = process_time()
    for found in chain.from_iterable(map(documents, options.files)):
        texts.append(found)
        parts = [found] if isinstance(found, str) else [turn.content for turn in found]
        size += sum(len(part.encode()) for part in parts)
        if size >= options.megabytes * 1e6:
            break
    timed("read", begun)
    begun = process_time()
    tokens = [
        np.array(tokenizer.tokenize(document_text(text, tokenizer)), dtype=np.uint32)
        for text in texts
    ]
    timed("tokenize", begun)
    number = sum(map(len, tokens))
    with tempfile.TemporaryDirectory() as name:
        begun = process_time()
        count_shard(Path(name), "0", tokens, tokenizer.info.vocabulary_size)
        timed("count", begun)
        kept = sum(path.stat().st_size for path in Path(name).iterdir())
    print(f"{size / 1e6:.1f} MB, {number / 1e6:.2f} M tokens, {size / number:.2f} bytes a token")
    for what, seconds in spent.items():
        print(f"{what}: {size / 1e6 / seconds:.1f} MB/s of a core")
    print(f"all: {size / 1e6 / sum(spent.values()):.2f} MB/s of a core")
    print(f"shards on the disk: {kept / number:.1f} bytes a token")
    return {"bytes": size, "tokens": number, "kept": kept} | spent


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
