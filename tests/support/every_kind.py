"""A database with every kind of content, as the version that runs this writes it.

    python -m tests.support.every_kind tests/fixtures/0010.db

writes the database and, beside it, what that version shows of it (0010.json). Both are kept, under
the name of the version's last migration: later versions have to open the one and show the other.
Ids, times and measured seconds are counted out, so the same version writes the same twice.
"""

import itertools
import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.backends.toy import ToyBackend
from engine.drafting.databases import Databases
from engine.drafting.tiers import ContextTier, ModelTier
from engine.hsd.profile import RULES, ModelProfile, Pair, Profile
from engine.methods import METHODS, PLAIN
from engine.runs import run as decoded
from engine.settings import Generation, Runtime, Sampling
from engine.types import CalibrationRow, Costs, Message, Part, Prefill, Run
from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import CalibrationStore, ContextStore
from storage.machine import CostStore, ProfileKey, ProfileStore, SourceStore
from storage.ngrams import ModelNgrams
from storage.traces import Traces

OWNERS = ("local", "guest:browser-1")
SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.0}
KEY = ProfileKey("toy", ("small", "mid"), SAMPLING, "cpu/float32/2")
COSTS = ("toy", "toy", "cpu", "float32", 2)
HOSTILE = (
    "</span><script>${alert(1)} {{7*7}}</script> zero\x00byte \u202eright to left 🦙 名前 שלום"
)
PIECES = [("Hel", "model", 3, 0, 7, 0.25), ("lo", "draft:small", 0, 1, 8, 1.0)]
SETTINGS = {"generation": {"max_tokens": 20, "sampling": {"seed": 3}}, "method": "hd"}


class Content:
    """Writes one owner's content."""

    def __init__(self, db: Database, owner: str) -> None:
        self.db, self.owner = db, owner
        self.conversations, self.traces = Conversations(db, owner), Traces(db, owner)
        self.toy = ToyBackend()
        self.databases = Databases(ContextTier(), ModelTier())

    def decoded(self, text: str, method: str = "hd", tokens: int = 24, seed: int = 3) -> Run:
        """A run of the toy model."""
        prompt = self.toy.tokenize(self.toy.render([Message("user", text)]))
        generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
        chosen = METHODS.get(method, PLAIN)
        drafters = chosen.drafters(self.databases, None, generation.sampling)
        return decoded(self.toy, prompt, chosen, drafters, generation)

    def ask(self, id: str, text: str, run: Run) -> str:
        """A question and the answer to it; the run's id."""
        self.conversations.append(id, "user", text)
        return self.answer(id, run)

    def answer(self, id: str, run: Run, after: str | None = None) -> str:
        """An answer that is stored in two parts, as one that grows."""
        half = len(run.steps) // 2 + 1
        first = replace(run, steps=run.steps[:half], learned=None)
        run_id = self.traces.save(first, id)
        message = self.conversations.append(id, "assistant", said(first), run_id, after=after)
        rest = replace(run, steps=run.steps[half:])
        self.conversations.extend(message.id, said(rest))
        self.traces.extend(run_id, rest.steps, run.learned)
        return run_id

    def talks(self) -> None:
        """Conversations of every kind."""
        make = self.conversations
        make.create("Empty")
        make.rename(make.create().id, "Renamed")
        settled = make.create("With settings").id
        make.set_system_prompt(settled, "Be brief.\nAnd kind. 名前")
        make.set_settings(settled, SETTINGS)
        run_id = self.ask(settled, "hello there", self.decoded("hello there"))
        self.traces.note(run_id, 1.5, 1.75)
        self.ask(settled, "and again", self.decoded("and again", "rejection"))
        make.append(make.create(HOSTILE[:40]).id, "user", HOSTILE)
        again = make.create("Regenerated").id
        self.ask(again, "hello", self.decoded("hello"))
        self.answer(again, self.decoded("hello", "plain"), make.messages(again)[0].id)
        self.ask(make.create("At the length limit").id, "long", self.decoded("long", tokens=3))
        stopped = self.decoded("a longer story", seed=11)
        last = replace(stopped.steps[2], finish="cancelled")
        cut = replace(stopped, steps=(*stopped.steps[:2], last))
        self.ask(make.create("Stopped").id, "a longer story", cut)
        self.went_on(cut, stopped)
        killed = replace(stopped, steps=stopped.steps[:4], learned=None)
        self.ask(make.create("Killed").id, "a longer story", killed)
        unanswered = make.create("Two questions, no answer").id
        make.append(unanswered, "user", "one")
        make.append(unanswered, "user", "two")
        for title, pieces in (("Imported", None), ("Imported with pieces", PIECES)):
            id = make.create(title).id
            make.append(id, "user", "Hi")
            make.append(id, "assistant", "Hello", None, pieces)
        other = make.create("Pieces that say something else").id
        make.append(other, "assistant", "x", self.traces.save(stopped, other), PIECES)
        lost = make.create("Damaged").id
        self.ask(lost, "hello", self.decoded("hello"))
        self.damage(lost)

    def went_on(self, cut: Run, whole: Run) -> None:
        """An answer that went on with another model, and what was deleted and is nowhere shown."""
        make, rest = self.conversations, whole.steps[len(cut.steps) :]
        id = make.create("Went on").id
        run_id = self.ask(id, "a longer story", cut)
        part = Part(rest[0].index, "plain", "other", "other", {}, Prefill(40, 3, 0.25, 0.125))
        self.traces.go_on(run_id, replace(cut.steps[-1], finish=None), part, range(40))
        self.traces.extend(run_id, rest, whole.learned)
        make.rewrite(make.messages(id)[-1].id, said(whole), run_id, None)
        make.delete_message(id, make.append(id, "user", "deleted").id)
        make.delete(make.create("Deleted").id)

    def damage(self, id: str) -> None:
        """What a disk that fails makes of rows."""
        run_id = self.traces.save(self.decoded("hello"), id)
        with self.db.write() as handle:
            handle.execute("UPDATE conversations SET settings = '{' WHERE id = ?", [id])
            handle.execute(
                "UPDATE steps SET tokens = '[7' WHERE run = ? AND position = 0", [run_id]
            )
            handle.execute(
                "UPDATE messages SET content = CAST(x'48ff69' AS TEXT) "
                "WHERE conversation = ? AND role = 'user'",
                [id],
            )

    def runs(self) -> None:
        """Compared runs, and one of a stack whose levels and plan are told."""
        plain, fast = self.decoded("compare", "plain"), self.decoded("compare")
        self.traces.save(plain, kind="compare")
        self.traces.note(self.traces.save(fast, kind="compare"), 1.25, None)
        level = {"draft:small": (3, 12, 7), "draft:mid": (1, 4, 2)}
        steps = tuple(replace(step, levels=level) for step in fast.steps)
        generation = {"stack": "small@4/mid@2", **fast.settings}
        self.traces.save(replace(fast, method="hd+hsd", settings=generation, steps=steps))

    def learned(self) -> None:
        """What drafting has learned."""
        log = ContextStore(self.db, self.owner)
        for conversation in self.conversations.list("With settings"):
            log.append(conversation.id, "bytes", list(range(300)))
            log.append(conversation.id, "bytes", [7, 8, 9])
        ngrams = ModelNgrams(self.db, self.owner, "toy")
        for grams in ([(1, 2, 3), (2, 3, 4)], [(1, 2, 3), (9, 9, 9, 9)]):
            ngrams.learn(grams)
        rows = [CalibrationRow("context", 3, 11, 40.5, 20.25), CalibrationRow("noise", 0, 1, 2, 3)]
        CalibrationStore(self.db, self.owner, "toy").save(rows)


def said(run: Run) -> str:
    """The text of a run."""
    return "".join(token.text for token in run.tokens)


def machine(db: Database) -> None:
    """What belongs to the machine."""
    costs = CostStore(db, *COSTS)
    costs.save(Costs({0: 0.1 + 0.2, 8: 0.5}, 1e-6, 2e-6, 1_700_000_000.25, 1e-9, 2e-9))
    measured = Profile(
        tuple(
            ModelProfile(name, name, 1000 * size, 4000 * size, {0: 0.1, 8: 0.2 * size}, 1e-6)
            for size, name in enumerate(("small", "mid", "toy"), 1)
        ),
        {pair: Pair(0.7, dict.fromkeys(RULES, (0.7, 1 / 3))) for pair in [(0, 1), (0, 2), (1, 2)]},
        SAMPLING,
        640,
        1234.5,
    )
    profiles, sources = ProfileStore(db), SourceStore(db)
    profiles.save(KEY, measured.mapping())
    profiles.choose("toy", ["/models/small", "names/mïd \udc80"], "small@8/mid@4")
    sources.add("/models/größe \udcff", asdict(Runtime(threads=2)))
    sources.add("names/model", asdict(Runtime()))
    sources.add("/models", {}, "folder")


def shown(db: Database) -> dict[str, Any]:
    """All of a database that a user can see, as JSON values."""
    profiles, sources = ProfileStore(db), SourceStore(db)
    found: dict[str, Any] = {
        "costs": CostStore(db, *COSTS).load(),
        "profile": profiles.load(KEY),
        "stack": profiles.chosen("toy"),
        "models": sources.models(),
        "folders": sources.folders(),
        **{owner: shown_to(db, owner) for owner in OWNERS},
    }
    return dict(json.loads(json.dumps(found)))


def shown_to(db: Database, owner: str) -> dict[str, Any]:
    """The part of one owner."""
    conversations, traces, log = (
        Conversations(db, owner),
        Traces(db, owner),
        ContextStore(db, owner),
    )
    history = traces.history()
    return {
        "room": conversations.room(),
        "conversations": [asdict(each) for each in conversations.list()],
        "searches": {
            words: [each.id for each in conversations.list(words)]
            for words in ("hello", "alert(1)", "Regen", "nothing like it")
        },
        "messages": {
            each.id: [
                [m.id, m.position, m.role, m.content, m.run_id, m.created, m.pieces]
                for m in conversations.messages(each.id)
            ]
            for each in conversations.list()
        },
        "exports": {each.id: conversations.export(each.id) for each in conversations.list()},
        "logs": {each.id: log.load(each.id, "bytes") for each in conversations.list()},
        "history": [asdict(trace) for trace in history],
        "runs": {trace.id: shown_run(traces, trace.id) for trace in history},
        "ngrams": ModelNgrams(db, owner, "toy").top(99),
        "calibration": CalibrationStore(db, owner, "toy").load(),
    }


def shown_run(traces: Traces, id: str) -> Any:
    """A run with its steps, or why it cannot be shown."""
    try:
        run = traces.load(id)
    except Exception as error:
        return str(error)
    steps = [[asdict(step)[name] for name in STEP] for step in run.steps]
    parts = [part and asdict(part) for part in (run.prefill, run.learned)]
    more = [asdict(part) for part in run.parts]
    return [run.method, run.model, run.fingerprint, run.settings, *parts, *more, steps]


STEP = (
    "index",
    "tokens",
    "proposed",
    "accepted",
    "by_depth",
    "draft_seconds",
    "verify_seconds",
    "sample_seconds",
    "other_seconds",
    "look_ups",
    "levels",
    "finish",
    "plain_seconds",
)


def build(path: Path) -> None:
    """Write the database and what is shown of it."""
    ids, seconds, ticks = itertools.count(1), itertools.count(1_700_000_000), itertools.count()
    with (
        patch("secrets.token_urlsafe", lambda size: f"{next(ids):016d}"),
        patch("time.time", lambda: float(next(seconds))),
        patch("engine.native.core", None),
        patch("engine.decode.perf_counter", lambda: next(ticks) / 1024),
        patch("engine.drafting.hierarchy.perf_counter", lambda: next(ticks) / 1024),
        Database(path) as db,
    ):
        mine, theirs = (Content(db, owner) for owner in OWNERS)
        mine.talks()
        mine.runs()
        mine.learned()
        theirs.ask(theirs.conversations.create("Theirs").id, "hello", theirs.decoded("hello"))
        theirs.learned()
        machine(db)
        found = shown(db)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("VACUUM")
    path.with_suffix(".json").write_text(json.dumps(found, ensure_ascii=True) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Build it at the place that is named."""
    (place,) = arguments
    build(Path(place))


if __name__ == "__main__":
    main(sys.argv[1:])
