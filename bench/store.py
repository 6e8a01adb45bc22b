"""What a full database costs: the list, a search, opening a conversation, the history of runs.

The file is made with the program's own code: conversations whose every other message is an answer
with a run of its own, so many steps each. Then each question is asked several times as the page
asks it, from a database that was just opened. `--file` keeps the file, to be measured again.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.options import print_record
from engine.types import CONTEXT, MODEL, STATISTICS, TARGET, Learned, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Filter, Traces

OWNER = "local"
SOURCES = (TARGET, CONTEXT, MODEL, STATISTICS)
LISTED = 300
"""Conversations that a page lists (app/web/tabs/conversations.py)."""
WORDS = tuple(
    f"{a}{b}" for a in ("sa", "tor", "lin", "mer", "ko") for b in ("re", "van", "da", "s")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench store`."""
    parser.add_argument("--conversations", type=int, default=1_000)
    parser.add_argument("--messages", type=int, default=100_000, help="in all conversations")
    parser.add_argument("--steps", type=int, default=1_000_000, help="in all runs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--file", type=Path, help="keep the database here, or measure this one")


def run(options: argparse.Namespace) -> None:
    """Make the file, measure, print."""
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "strata.db"
        if not file.exists():
            begun = perf_counter()
            fill(file, options.conversations, options.messages, options.steps)
            print(f"{file.stat().st_size / 1e6:,.0f} MB made in {perf_counter() - begun:.0f} s")
        with Database(file) as db:
            found = {
                name: [timed(ask, number) for number in range(options.repeats)]
                for name, ask in questions(db).items()
            }
    for name, seconds in found.items():
        print(f"{name:<42} {1000 * median(seconds):8.1f} ms, at most {1000 * max(seconds):.1f}")
    print_record({name: median(seconds) for name, seconds in found.items()})


def timed(ask: Callable[[int], object], number: int) -> float:
    """Seconds that a question takes."""
    begun = perf_counter()
    ask(number)
    return perf_counter() - begun


def questions(db: Database) -> Mapping[str, Callable[[int], object]]:
    """What pages ask, each with the number of the repeat."""
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


def fill(file: Path, conversations: int, messages: int, steps: int) -> None:
    """Make the file."""
    chance = random.Random(1)
    answers = max(1, messages // 2)
    each, length = max(1, answers // conversations), max(1, steps // answers)
    with Database(file) as db:
        store, traces = Conversations(db, OWNER), Traces(db, OWNER)
        for number in range(conversations):
            with db.write():
                id = store.create(f"Conversation {number}").id
                for _ in range(each):
                    store.append(id, "user", said(chance, 40))
                    made = answer(chance, length)
                    text = "".join(token.text for token in made.tokens)
                    store.append(id, "assistant", text, traces.save(made, id))


def said(chance: random.Random, words: int) -> str:
    """Some words."""
    return " ".join(chance.choices(WORDS, k=words))


def answer(chance: random.Random, length: int) -> Run:
    """A run of so many steps, of two tokens each."""
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
    """A token: a word and a space."""
    text, source = f"{chance.choice(WORDS)} ", chance.choice(SOURCES)
    return Token(chance.randrange(6000), position, source, 2, text, 0.5)
