"""What a database of an earlier version holds is there after the migrations, and once."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.metrics import summarise
from engine.types import Prefill, Run, Step, Token
from storage import migrations
from storage.conversations import Conversations, Piece
from storage.costs import CostStore
from storage.database import Database
from storage.traces import Traces
from tests.unit.test_conversations import HOSTILE

BEFORE = [name for name, _ in migrations.MIGRATIONS].index("0009-one-run")
TEXTS = ("Hel", "lo", " wörld", " \U0001f999", 'say "hi"\n', "", *HOSTILE)
STEPS = tuple(
    Step(
        index,
        tuple(
            Token(7 + index, 12 + 2 * index + n, ("context", "target")[n], 3 - 3 * n, text, share)
            for n, (text, share) in enumerate(((text, 0.1 + 0.2), ("", 1.0)))
        ),
        {"context": 3},
        {"context": 1},
        ((3, 1),),
        0.001 * index,
        0.1 + 0.7,
        1e-9,
        0.25,
        {"context": 1e-5},
        {"draft:a": (1, 2, 3)},
        "eos" if index == len(TEXTS) - 1 else None,
    )
    for index, text in enumerate(TEXTS)
)
PIECES = tuple(Piece.of(token, step.index) for step in STEPS for token in step.tokens)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A database as the version before wrote it, with one owner's conversation."""
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:BEFORE])
        Database(tmp_path / "strata.db").close()
    with closing(sqlite3.connect(tmp_path / "strata.db", isolation_level=None)) as connection:
        connection.execute("INSERT INTO owners VALUES (1, 'ada')")
        connection.execute("INSERT INTO fingerprints VALUES (1, 'f')")
        connection.execute("INSERT INTO conversations VALUES ('c', 1, 't', '', '{}', 1.0, 1.0)")
        yield connection


def add_run(old: sqlite3.Connection, id: str, steps: Sequence[Step], kind: str = "chat") -> None:
    """A run as the version before stored it."""
    seconds = sum(step.seconds for step in steps)
    tokens = sum(len(step.tokens) for step in steps)
    conversation = "c" if kind == "chat" else None
    old.execute(
        "INSERT INTO runs (id, owner, conversation, kind, model, fingerprint, method, settings, "
        "prompt_tokens, emitted_tokens, reused_tokens, ttft_seconds, decode_seconds, forwards, "
        "finish, created, speedup, decode_speedup) VALUES (?, 1, ?, ?, 'toy', 1, 'hd', "
        "'{\"seed\": 3}', 12, ?, 4, ?, ?, ?, 'eos', 5.0, 1.5, NULL)",
        [id, conversation, kind, tokens, 0.5 + steps[0].seconds, seconds, len(steps)],
    )
    for step in steps:
        old.execute(
            "INSERT INTO steps (run, position, tokens, proposed, accepted, by_depth, look_ups, "
            "draft_seconds, verify_seconds, sample_seconds, other_seconds, finish, levels) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                id,
                step.index,
                json.dumps(
                    [
                        [t.id, t.position, t.source, t.match_length, t.text, t.probability]
                        for t in step.tokens
                    ]
                ),
                json.dumps(step.proposed),
                json.dumps(step.accepted),
                json.dumps(step.by_depth),
                json.dumps(step.look_ups),
                step.draft_seconds,
                step.verify_seconds,
                step.sample_seconds,
                step.other_seconds,
                step.finish,
                json.dumps(step.levels),
            ],
        )


def add_message(
    old: sqlite3.Connection, content: str, run: str | None = None, pieces: Any = None
) -> None:
    """A message as the version before stored it; `pieces` as JSON, or as values."""
    if not isinstance(pieces, str | bytes | None):
        pieces = json.dumps(pieces, ensure_ascii=False, separators=(",", ":"))
    old.execute(
        "INSERT INTO messages SELECT 'm' || count(*), 'c', count(*), 'assistant', ?, ?, 2.0, ? "
        "FROM messages",
        [content, run, pieces],
    )


def stored_pieces(db: Database) -> list[bool]:
    """Of which messages pieces are stored."""
    rows = db.execute_read("SELECT pieces IS NOT NULL FROM messages ORDER BY position")
    return [bool(kept) for (kept,) in rows]


def test_runs_and_answers_are_there_after_the_migration(
    old: sqlite3.Connection, tmp_path: Path
) -> None:
    text = "".join(TEXTS)
    add_run(old, "answer", STEPS)
    add_run(old, "compared", STEPS[::-1], "compare")
    add_message(old, "hello")
    add_message(old, text, "answer", PIECES)
    with Database(tmp_path / "strata.db") as db:
        said, answer = Conversations(db, "ada").messages("c")
        assert (said.content, said.pieces, said.run_id) == ("hello", None, None)
        assert (answer.content, answer.pieces, answer.run_id) == (text, PIECES, "answer")
        assert stored_pieces(db) == [False, False]
        traces = Traces(db, "ada")
        run = traces.load("answer")
        first = STEPS[0].seconds
        assert run == Run("hd", "toy", "f", {"seed": 3}, Prefill(12, 4), STEPS)
        assert run.prefill is not None and run.prefill.seconds == pytest.approx(0.5)
        assert summarise(run).ttft_seconds == pytest.approx(0.5 + first)
        assert run.finish == "eos" and summarise(run).plain_seconds is None
        assert [(trace.id, trace.speedup) for trace in traces.history()] == [
            ("compared", 1.5),
            ("answer", 1.5),
        ]
        assert traces.load("compared").tokens == traces.load("answer").tokens
        assert db.execute_read("PRAGMA foreign_key_check") == []


@pytest.mark.parametrize(
    "change",
    [
        {"text": "Bye"},
        {"source": "model"},
        {"match_length": 9},
        {"step": 3},
        {"position": 99},
        None,
    ],
)
def test_pieces_that_say_something_else_are_kept(
    old: sqlite3.Connection, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    pieces = PIECES[:-1] if change is None else (*PIECES[:-1], PIECES[-1]._replace(**change))
    add_run(old, "answer", STEPS)
    add_message(old, "x", "answer", pieces)
    with Database(tmp_path / "strata.db") as db:
        (message,) = Conversations(db, "ada").messages("c")
        assert message.pieces == pieces and stored_pieces(db) == [True]


def test_pieces_without_a_run_are_kept(old: sqlite3.Connection, tmp_path: Path) -> None:
    """Of imported answers, and of those whose runs were dropped."""
    add_message(old, "x", None, PIECES)
    with Database(tmp_path / "strata.db") as db:
        (message,) = Conversations(db, "ada").messages("c")
        assert message.pieces == PIECES


@pytest.mark.parametrize(
    "damage", ["[", "[7]", b"\x00\xff", '{"a":"b"}', '["[["]', "[" * 9999, "7"]
)
def test_damaged_rows_hinder_no_migration(
    old: sqlite3.Connection, tmp_path: Path, damage: str | bytes
) -> None:
    for id in ("sound", "damaged", "broken"):
        add_run(old, id, STEPS)
    old.execute("UPDATE steps SET tokens = ? WHERE run = 'damaged' AND position = 1", [damage])
    add_message(old, "x", "sound", PIECES)
    add_message(old, "y", "damaged", PIECES)
    add_message(old, "z", "broken", damage)
    with Database(tmp_path / "strata.db") as db:
        first, second, third = Conversations(db, "ada").messages("c")
        assert first.pieces == second.pieces == PIECES, "what the run has lost the message has"
        assert (third.content, third.pieces) == ("z", None)
        assert stored_pieces(db) == [False, True, True]


def test_a_run_without_steps_hinders_no_migration(old: sqlite3.Connection, tmp_path: Path) -> None:
    add_run(old, "answer", STEPS[:1])
    old.execute("DELETE FROM steps")
    add_message(old, "x", "answer", [])
    with Database(tmp_path / "strata.db") as db:
        (message,) = Conversations(db, "ada").messages("c")
        assert message.content == "x" and not message.pieces
        assert Traces(db, "ada").load("answer").prefill == Prefill(12, 4)


def test_what_was_guessed_is_counted_in_old_runs_and_not_invented(
    old: sqlite3.Connection, tmp_path: Path
) -> None:
    """Their sums follow from their steps; what nobody recorded stays unknown."""
    ended = Step(len(STEPS), (), {"context": 9}, {"context": 9}, finish="cancelled")
    add_run(old, "whole", [*STEPS, ended])
    add_run(old, "damaged", STEPS)
    damage = ("'[oops'", "x'00ff'", '\'{"context": "many", "model": 2}\'', "'{\"a\": 9e99}'")
    for at, value in enumerate(damage):
        query = f"UPDATE steps SET accepted = {value} WHERE run = 'damaged' AND position = {at}"
        old.execute(query)
    with Database(tmp_path / "strata.db") as db:
        traces = Traces(db, "ada")
        worth = traces.worths("c")
        assert worth["whole"].guessed == len(STEPS) and worth["whole"].plain_seconds is None
        assert worth["damaged"].guessed == len(STEPS) - len(damage) + 2
        assert worth["whole"].proof == {} and worth["whole"].tokens == 2 * len(STEPS)
        assert [step.tree for step in traces.steps("whole")] == [None] * (len(STEPS) + 1)


def test_a_run_of_the_version_before_knows_its_plain_seconds(tmp_path: Path) -> None:
    """Where each of its steps knew them."""
    with Database(tmp_path / "strata.db") as db:
        traces, conversation = Traces(db, "ada"), Conversations(db, "ada").create()
        runs = {
            traces.save(Run(prefill=Prefill(3, 0, 0.5, 0.25), steps=steps), conversation.id): steps
            for steps in (timed(1.0, 2.0), timed(1.0, None), ())
        }
        told = traces.worths(conversation.id)
        with db.write() as handle:
            handle.execute("UPDATE runs SET accepted_tokens = NULL, plain_seconds = NULL")
            script = dict(migrations.MIGRATIONS)["0015-why"]
            handle.execute(script[script.index("UPDATE") :].rstrip().rstrip(";"))
        again = traces.worths(conversation.id)
        whole, unknown, empty = runs
        assert again[whole] == told[whole] and told[whole].plain_seconds == 3.25
        assert again[unknown] == told[unknown] and told[unknown].plain_seconds is None
        assert again[empty].tokens == told[empty].tokens == 0


def timed(*plain: float | None) -> tuple[Step, ...]:
    """Steps that would have taken so long plainly."""
    return tuple(
        Step(at, (Token(1, at, "target"),), plain_seconds=seconds)
        for at, seconds in enumerate(plain)
    )


def test_costs_of_the_version_before_are_measured_again(tmp_path: Path) -> None:
    """Their plain forwards were taken for slower than they are; nothing else is lost."""
    with Database(tmp_path / "strata.db") as db:
        conversation = Conversations(db, "ada").create()
        store = CostStore(db, "model", "llama.cpp", "cpu", "F16", 2)
        store.save({0: 0.5, 1: 0.4}, 0.0, 0.0, 1.0)
        assert store.load() is not None
        with db.write() as handle:
            handle.execute(dict(migrations.MIGRATIONS)["0017-costs-measured-again"])
        assert store.load() is None and Conversations(db, "ada").get(conversation.id)
