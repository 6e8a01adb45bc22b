"""What the program's database costs when it is full.

It is filled with the program's own code, and then asked what the page asks.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.harness import Add, Measurement
from bench.report import Record, table
from engine.types import CONTEXT, MODEL, STATISTICS, TARGET, Learned, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.steps import digest
from storage.traces import Filter, Traces

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
    several times, of a database that was just opened.
    """

    def add_options(self, add: Add) -> None:
        add("--conversations", type=int, default=1_000)
        add("--messages", type=int, default=100_000, help="in all conversations")
        add("--steps", type=int, default=1_000_000, help="in all runs")
        add("--repeats", type=int, default=7)

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "strata.db")
        fill(file, options)
        print(f"{file.stat().st_size / 1e6:,.0f} MB")
        db = stack.enter_context(Database(file))
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
        "charts of one run": lambda n: digest(traces.load(runs[n % len(runs)])),
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
    steps = [
        Step(
            index=index,
            tokens=tuple(token(chance, 2 * index + n) for n in range(2)),
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
        for index in range(length)
    ]
    return Run("hd", "bench", "bench", {}, Prefill(40, 0, 0.1, None), tuple(steps), Learned(0.001))


def token(chance: random.Random, position: int) -> Token:
    text, source = f"{chance.choice(WORDS)} ", chance.choice(SOURCES)
    return Token(chance.randrange(6000), position, source, 2, text, 0.5)
