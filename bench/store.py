"""What statistics files and the program's own database cost: `statistics` and `store`.

Statistics are made in shards, from made-up text: tokens that follow each other as words do, few of
them often. The database is filled with the program's own code, and then asked what the page asks.
"""

import argparse
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.harness import Add, Measurement, Record, table
from engine.errors import StrataError
from engine.local import document_text
from engine.models.loaders import tokenizer as load_tokenizer
from engine.types import (
    CONTEXT,
    MODEL,
    STATISTICS,
    TARGET,
    Document,
    Learned,
    Prefill,
    Run,
    Step,
    Token,
)
from storage.conversations import Conversations
from storage.database import Database
from storage.documents import documents
from storage.statistics import KEY_SIZE, StatisticsTable
from storage.statistics_build import build
from storage.statistics_shards import Job, Plan, count, count_shard, reduce, shard_size
from storage.traces import Filter, Traces

LENGTH = 2_000
"""Tokens of a document."""
BUDGET = 64 << 20
HELD_OUT, PERCENTILES = 10, (50, 95, 99)
LOOK_SECONDS = 0.02
PARTS = ("read", "tokenize", "count")
"""What is timed where real texts are measured."""


class Statistics(Measurement):
    """What making statistics from much text costs: n-grams a second, and memory, in shards.

    Tokenizing is not part of it. With `--compare` the file is made in memory as well, and the bytes
    are compared. Then keys of text that was not counted are looked up in the file, each twice:
    the second time the table has them cached. `--files` with `--model` measures real texts instead:
    how fast one core reads, tokenizes and counts them.
    """

    def add_options(self, add: Add) -> None:
        add("--millions", type=float, default=10.0, help="of n-grams")
        add("--vocabulary", type=int, default=32_000)
        add("--memory", type=float, default=2.0, help="gigabytes")
        add("--shards", type=int, default=2, help="counted at the same time")
        add("--compare", action="store_true", help="with the builder in memory")
        add("--files", nargs="+", type=Path, help="measure these texts, on one core")
        add("--model", help="whose tokenizer reads them")
        add("--megabytes", type=float, default=20.0, help="read of them at most")

    def record(self, options: argparse.Namespace) -> Record:
        """Raises StrataError if the two files differ."""
        if options.files:
            return rates(options)
        made = Made(options.millions, options.vocabulary, 1 << 22)
        with tempfile.TemporaryDirectory() as name:
            one = Path(name, "one.db")
            with Peak() as peak:
                begun = perf_counter()
                meta = make(options, one)
                seconds = perf_counter() - begun
            record: Record = {"ngrams": int(meta["tokens"]), "seconds": seconds}
            record |= {"keys": int(meta["keys"]), "entries": int(meta["entries"])}
            record |= {"peak_bytes": peak.most, "file_bytes": one.stat().st_size}
            record |= {"look_ups": look_ups(one, made.held_out())}
            if options.compare:
                begun = perf_counter()
                with Peak() as peak:
                    documents = list(made.all())
                whole = one.with_name("whole.db")
                build(documents, whole, "bench", options.vocabulary, "bench", BUDGET)
                record["memory_seconds"] = perf_counter() - begun
                record["memory_peak_bytes"] = peak.most
                if one.read_bytes() != whole.read_bytes():
                    raise StrataError(f"{one.name} and {whole.name} differ.")
        return record

    def show(self, record: Record) -> None:
        if "read" in record:
            show_rates(record)
            return
        made, seconds = record["ngrams"], record["seconds"]
        print(f"{made:,} n-grams in {seconds:.1f} s: {made / seconds / 1e6:.2f} M a second")
        print(f"at most {record['peak_bytes'] / 1e9:.2f} GB of memory, in all processes")
        size = f"{record['file_bytes'] / 1e6:.1f} MB"
        print(f"{record['keys']:,} keys and {record['entries']:,} entries, {size}")
        for which, found in record["look_ups"].items():
            shown = " / ".join(f"{us:.2f}" for us in found)
            print(f"a key asked for {which}: {shown} us (p50 / p95 / p99)")
        if "memory_seconds" in record:
            seconds, peak = record["memory_seconds"], record["memory_peak_bytes"]
            print(f"in memory: {seconds:.1f} s and {peak / 1e9:.2f} GB for the same file")


def make(options: argparse.Namespace, path: Path) -> dict[str, str]:
    memory = int(options.memory * (1 << 30))
    plan = Plan((f"{options.millions} M",), "bench", options.vocabulary, 2)
    work = path.with_suffix(".work")
    most = plan.claim(work, shard_size(memory, options.shards))
    made = Made(options.millions, options.vocabulary, most)
    count(Job(work, made, options.vocabulary, most), options.shards)
    return reduce(work, plan, path, "bench", BUDGET, memory)


@dataclass(frozen=True, slots=True)
class Made:
    """Documents made from a fixed seed, in which most tokens are followed by one of a few."""

    millions: float
    vocabulary: int
    most: int

    @property
    def volumes(self) -> int:
        return 1

    def shards(self, volume: int, report: Callable[[float], None]) -> Iterator[range]:
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
        for shard in self.shards(0, lambda share: None):
            yield from self.tokenized(shard)

    def held_out(self) -> list[NDArray[np.uint32]]:
        """Documents of the same kind that are not counted."""
        last = int(self.millions * 1e6) // LENGTH
        return self.tokenized(range(last, last + HELD_OUT))


def look_ups(path: Path, documents: Sequence[NDArray[np.uint32]]) -> dict[str, list[float]]:
    """PERCENTILES of the microseconds of a look-up, over all keys of the texts, each twice."""
    windows = [tuple(d[at : at + KEY_SIZE].tolist()) for d in documents for at in range(len(d))]
    keys = [*dict.fromkeys(key[-size:] for key in windows for size in range(1, KEY_SIZE + 1))]
    found, table = {}, StatisticsTable(path)
    for which in ("the first time", "again"):
        times = []
        for key in keys:
            clock = perf_counter()
            table.look_up(key)
            times.append(1e6 * (perf_counter() - clock))
        found[which] = [round(float(us), 2) for us in np.percentile(times, PERCENTILES)]
    table.close()
    return found


def rates(options: argparse.Namespace) -> Record:
    if not options.model:
        raise StrataError("Give --model, too: the model whose tokenizer reads the files.")
    tokenizer = load_tokenizer(options.model)
    texts, size, clock = list[Document](), 0, [process_time()]
    for found in chain.from_iterable(map(documents, options.files)):
        texts.append(found)
        parts = [found] if isinstance(found, str) else [turn.content for turn in found]
        size += sum(len(part.encode()) for part in parts)
        if size >= options.megabytes * 1e6:
            break
    clock.append(process_time())
    tokens = [
        np.array(tokenizer.tokenize(document_text(text, tokenizer)), dtype=np.uint32)
        for text in texts
    ]
    clock.append(process_time())
    with tempfile.TemporaryDirectory() as name:
        count_shard(Path(name), "0", tokens, tokenizer.info.vocabulary_size)
        clock.append(process_time())
        kept = sum(path.stat().st_size for path in Path(name).iterdir())
    spent = {
        name: after - before for name, (before, after) in zip(PARTS, pairwise(clock), strict=True)
    }
    return {"bytes": size, "tokens": sum(map(len, tokens)), "kept": kept} | spent


def show_rates(record: Record) -> None:
    size, number = record["bytes"], record["tokens"]
    print(f"{size / 1e6:.1f} MB, {number / 1e6:.2f} M tokens, {size / number:.2f} bytes a token")
    for what in PARTS:
        print(f"{what}: {size / 1e6 / record[what]:.1f} MB/s of a core")
    print(f"all: {size / 1e6 / sum(record[what] for what in PARTS):.2f} MB/s of a core")
    print(f"shards on the disk: {record['kept'] / number:.1f} bytes a token")


class Peak:
    """The peak memory of this process and its children while it is entered.

    Memory that processes share is counted for each of them.
    """

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


# a full database


OWNER = "local"
SOURCES = (TARGET, CONTEXT, MODEL, STATISTICS)
LISTED = 300
"""Conversations that a page lists (app/web/tabs/conversations.py)."""
WORDS = tuple(
    f"{a}{b}" for a in ("sa", "tor", "lin", "mer", "ko") for b in ("re", "van", "da", "s")
)


class Store(Measurement):
    """What a full database costs: the list, a search, opening a conversation, the runs.

    Every other message of a conversation is an answer with a run of its own. Each question is asked
    several times, of a database that was just opened. `--file` keeps the file, or measures it.
    """

    def add_options(self, add: Add) -> None:
        add("--conversations", type=int, default=1_000)
        add("--messages", type=int, default=100_000, help="in all conversations")
        add("--steps", type=int, default=1_000_000, help="in all runs")
        add("--repeats", type=int, default=7)
        add("--file", type=Path, help="keep the database here, or measure this one")

    def record(self, options: argparse.Namespace) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            file = options.file or Path(folder) / "strata.db"
            if not file.exists():
                seconds = timed(lambda: fill(file, options))
                print(f"{file.stat().st_size / 1e6:,.0f} MB made in {seconds:.0f} s")
            with Database(file) as db:
                return {
                    name: [timed(partial(ask, number)) for number in range(options.repeats)]
                    for name, ask in questions(db).items()
                }

    def show(self, record: Record) -> None:
        table(
            ("question", "ms", "at most"),
            (
                (name, f"{1000 * median(seconds):.1f}", f"{1000 * max(seconds):.1f}")
                for name, seconds in record.items()
            ),
        )


def timed(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def questions(db: Database) -> Mapping[str, Callable[[int], object]]:
    store, traces = Conversations(db, OWNER), Traces(db, OWNER)
    ids = [each.id for each in store.list()]
    runs = [trace.id for trace in traces.history(LISTED)]
    return {
        "list of conversations": lambda n: store.list(most=LISTED),
        "search, words in every conversation": lambda n: store.list(WORDS[n % len(WORDS)], LISTED),
        "search, words in none": lambda n: store.list("nowhere to be found", LISTED),
        "open a conversation, with its tokens": lambda n: store.messages(ids[n * 7 % len(ids)]),
        "history of the last runs": lambda n: traces.history(LISTED),
        "a page of the runs by one method": lambda n: traces.page(Filter(method="hd"), 100 * n, 50),
        "speed and speedup over all runs": lambda n: traces.trend(),
        "charts of one run": lambda n: traces.digest(runs[n % len(runs)]),
        "an answer is stored": lambda n: traces.save(answer(random.Random(n), 20)),
    }


def fill(file: Path, options: argparse.Namespace) -> None:
    chance = random.Random(1)
    answers = max(1, options.messages // 2)
    each, length = max(1, answers // options.conversations), max(1, options.steps // answers)
    with Database(file) as db:
        store, traces = Conversations(db, OWNER), Traces(db, OWNER)
        for number in range(options.conversations):
            with db.write():
                id = store.create(f"Conversation {number}").id
                for _ in range(each):
                    store.append(id, "user", " ".join(chance.choices(WORDS, k=40)))
                    made = answer(chance, length)
                    text = "".join(token.text for token in made.tokens)
                    store.append(id, "assistant", text, traces.save(made, id))


def answer(chance: random.Random, length: int) -> Run:
    made: list[Step] = []
    for index in range(length):
        tokens = tuple(token(chance, 2 * index + n) for n in range(2))
        made.append(
            Step(
                index=index,
                tokens=tokens,
                proposed={CONTEXT: 3, STATISTICS: 4},
                accepted={CONTEXT: 1},
                by_depth=((2, 1), (2, 0)),
                draft_seconds=0.0001,
                verify_seconds=0.004,
                sample_seconds=0.0001,
                other_seconds=0.0001,
                finish="eos" if index == length - 1 else None,
                plain_seconds=0.003,
            )
        )
    return Run("hd", "bench", "bench", {}, Prefill(40, 0, 0.1, None), tuple(made), Learned(0.001))


def token(chance: random.Random, position: int) -> Token:
    text, source = f"{chance.choice(WORDS)} ", chance.choice(SOURCES)
    return Token(chance.randrange(6000), position, source, 2, text, 0.5)
