"""Runs and steps: what is read equals what was saved, owners apart, the oldest dropped."""

import json
from collections import Counter
from dataclasses import astuple, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from engine.errors import StorageError
from engine.types import Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Run, Traces

STEPS = [
    Step(
        index=0,
        tokens=(
            Token(5, 100, "context", 8, "Hel", probability=0.1 + 0.2),
            Token(2**31, 101, "draft:<b>tiny</b>", 0, "<i>\x00\ud800", probability=1e-300),
            Token(7, 102, "target", 0, "", probability=1.0),
        ),
        proposed={"context": 3, "draft:<b>tiny</b>": 4},
        accepted={"context": 1, "draft:<b>tiny</b>": 1},
        by_depth=((3, 1), (4, 1)),
        draft_seconds=0.001,
        verify_seconds=0.1 + 0.7,
        sample_seconds=1e-9,
        other_seconds=0.0,
        look_ups={"context": 1e-5},
        levels={"draft:<b>tiny</b>": (4, 3, 2)},
        finish="length",
    ),
    Step(index=1, tokens=(Token(2, 103, "target"),), finish="eos"),
]


def save(traces: Traces, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "conversation_id": None,
        "model": "toy",
        "fingerprint": "f",
        "method": "hd",
        "settings": {"tiers": ["context"], "temperature": 0.0},
        "prompt_tokens": 12,
        "emitted_tokens": 4,
        "reused_tokens": 3,
        "ttft_seconds": 0.125,
        "decode_seconds": 1.5,
        "forwards": 2,
        "finish": "eos",
        "steps": STEPS,
    }
    return traces.save(**fields | changes)


@pytest.fixture
def traces(db: Database) -> Traces:
    return Traces(db, "ada")


def timings(steps: list[Step]) -> list[Any]:
    """What comparing steps leaves out."""
    return [astuple(step) for step in steps]


def test_a_run_comes_back_equal(traces: Traces) -> None:
    run = save(traces, speedup=2.5, decode_speedup=3.5, kind="compare")
    assert traces.get(run.id) == run
    assert (run.model, run.fingerprint, run.method, run.kind) == ("toy", "f", "hd", "compare")
    assert (run.prompt_tokens, run.emitted_tokens, run.reused_tokens) == (12, 4, 3)
    assert (run.ttft_seconds, run.decode_seconds, run.forwards) == (0.125, 1.5, 2)
    assert (run.finish, run.speedup, run.decode_speedup) == ("eos", 2.5, 3.5)
    plain = save(traces, finish=None, settings=MappingProxyType({"stop": ("a", "b")}))
    assert traces.get(plain.id) == plain
    assert plain.settings == {"stop": ["a", "b"]}
    assert (plain.kind, plain.finish, plain.speedup) == ("chat", None, None)


def test_what_a_run_was_worth_is_noted_later_by_its_owner_alone(
    db: Database, traces: Traces
) -> None:
    run, other = save(traces), save(traces)
    Traces(db, "bob").note(run.id, 9.0, 9.0)
    traces.note("gone", 9.0, 9.0)
    assert traces.get(run.id) == run
    traces.note(run.id, 1.5, None)
    assert traces.get(run.id) == replace(run, speedup=1.5)
    assert traces.get(other.id) == other


def test_steps_come_back_equal_timings_included(traces: Traces) -> None:
    run = save(traces)
    assert traces.steps(run.id) == STEPS
    assert timings(traces.steps(run.id)) == timings(STEPS)


def test_the_steps_above_fill_every_field() -> None:
    """So a field added to the engine's values cannot be left out of storage unnoticed."""
    blank = Step(index=-1, tokens=(Token(-1, -1, ""),), other_seconds=-1.0)
    for full, empty in ((STEPS[0], blank), (STEPS[0].tokens[0], blank.tokens[0])):
        for item in fields(full):
            if item.name == "plain_seconds":
                continue  # told while an answer grows, and not stored
            assert getattr(full, item.name) != getattr(empty, item.name), item.name


def test_any_mapping_may_count(traces: Traces) -> None:
    steps = [Step(0, (), Counter({"model": 2}), MappingProxyType({"model": 1}))]
    assert traces.steps(save(traces, steps=steps).id) == [Step(0, (), {"model": 2}, {"model": 1})]


def test_a_run_that_fails_to_save_leaves_nothing(db: Database, traces: Traces) -> None:
    with pytest.raises(Exception, match="UNIQUE|PRIMARY"):
        save(traces, steps=[STEPS[0], STEPS[0]])
    assert traces.history() == []
    assert db.execute_read("SELECT count(*) FROM steps") == [(0,)]


def test_history_is_newest_first(traces: Traces) -> None:
    runs = [save(traces, method=f"m{n}") for n in range(5)]
    assert traces.history() == runs[::-1]
    assert traces.history(2) == runs[:2:-1]
    assert traces.history(0) == traces.history(-1) == []


def test_the_oldest_runs_are_dropped_with_their_steps(
    db: Database, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traces, "KEPT", 3)
    theirs = save(Traces(db, "bob"))
    runs = [save(traces) for _ in range(5)]
    assert traces.history() == runs[:1:-1]
    assert Traces(db, "bob").history() == [theirs]
    assert db.execute_read("SELECT count(DISTINCT run) FROM steps") == [(4,)]
    with pytest.raises(StorageError, match="There is no run"):
        traces.get(runs[0].id)


def test_another_owners_run_does_not_exist(db: Database, traces: Traces) -> None:
    run, bob = save(traces), Traces(db, "bob")
    for id in (run.id, "unknown"):
        for act in (bob.get, bob.steps):
            with pytest.raises(StorageError, match="There is no run"):
                act(id)
    assert bob.history() == []


def test_a_run_belongs_to_a_conversation_of_its_owner(db: Database, traces: Traces) -> None:
    id = Conversations(db, "ada").create().id
    run = save(traces, conversation_id=id)
    assert traces.get(run.id).conversation_id == id
    for foreign in (Traces(db, "bob"), traces):
        with pytest.raises(StorageError, match="There is no conversation"):
            save(foreign, conversation_id=id if foreign is not traces else "unknown")
    Conversations(db, "ada").delete(id)
    assert traces.history() == []
    assert db.execute_read("SELECT count(*) FROM steps") == [(0,)]


def test_hostile_names_come_back_as_they_were(traces: Traces) -> None:
    name = "'; DROP TABLE runs; -- <img onerror=x> {{7*7}} \x00 名"
    run = save(traces, model=name, fingerprint=name, method=name, settings={name: name})
    assert traces.get(run.id) == run
    assert (run.model, run.fingerprint, run.method) == (name, name, name)


def test_a_turn_can_be_stored_as_one(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        conversations, traces = Conversations(db, "ada"), Traces(db, "ada")
        id = conversations.create().id
        with pytest.raises(ZeroDivisionError), db.write():
            run = save(traces, conversation_id=id)
            conversations.append(id, "assistant", "Hello", run.id)
            raise ZeroDivisionError
        assert (traces.history(), conversations.messages(id)) == ([], [])
        with db.write():
            run = save(traces, conversation_id=id)
            conversations.append(id, "assistant", "Hello", run.id)
        assert [message.run_id for message in conversations.messages(id)] == [run.id]
        assert json.dumps(conversations.export(id))


@pytest.mark.parametrize("column", ["settings", "prompt_tokens", "ttft_seconds", "created"])
@pytest.mark.parametrize("damage", ["'['", "x'00ff'", "'text'"])
def test_a_damaged_run_is_told_and_left_out(
    db: Database, traces: Traces, column: str, damage: str
) -> None:
    sound, damaged = save(traces), save(traces)
    with db.write() as handle:
        handle.execute(f"UPDATE runs SET {column} = {damage} WHERE id = ?", [damaged.id])
    with pytest.raises(StorageError, match="is damaged in the database"):
        traces.get(damaged.id)
    assert traces.history() == [sound]


@pytest.mark.parametrize(
    "column", ["tokens", "proposed", "accepted", "by_depth", "look_ups", "levels", "draft_seconds"]
)
@pytest.mark.parametrize("damage", ["'['", "'[7]'", "x'00ff'", '\'{"a":"b"}\'', f"'{'[' * 9999}'"])
def test_damaged_steps_are_told(db: Database, traces: Traces, column: str, damage: str) -> None:
    run = save(traces)
    with db.write() as handle:
        handle.execute(f"UPDATE steps SET {column} = {damage}")
    with pytest.raises(StorageError, match="is damaged in the database"):
        traces.steps(run.id)
