"""What a database of an earlier version holds is still there after the migrations. The scripts
themselves never change: tests/unit/test_database.py holds their digests."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from engine.types import Learned, Prefill, Question, Run, Step, Token
from storage import migrations
from storage.api_keys import ApiKeys
from storage.benchmarks import Benchmarks, Result
from storage.conversations import Conversations, Piece, text_of
from storage.database import Database
from storage.machine import CostStore, ProfileKey, ProfileStore, SourceStore
from storage.presets import PresetStore
from storage.traces import Traces
from tests.conftest import ROOT
from tests.support.every_kind import shown

STEPS = tuple(
    Step(
        index,
        (Token(7, 12 + index, "context", 3, text, 0.1 + 0.2), Token(8, 13, "target")),
        {"context": 3},
        {"context": 1},
        ((3, 1),),
        *(0.001 * index, 0.1 + 0.7, 1e-9, 0.25),
        {"context": 1e-5},
        {"draft:a": (1, 2, 3)},
        "eos" if index else None,
    )
    for index, text in enumerate(("Hel", "wörld \U0001f999\x00"))
)
PIECES = tuple(Piece.of(token, step.index) for step in STEPS for token in step.tokens)


def insert_run(old: sqlite3.Connection, id: str, *damage: object) -> None:
    """A run as versions before 0009 stored it; `damage` stands in place of its steps' tokens."""
    old.execute(
        "INSERT INTO runs VALUES (?, 1, 'c', 'chat', 'toy', 1, 'hd', '{\"seed\": 3}', 12, 4, 4, ?, "
        "2.0, 2, 'eos', 5.0, 1.5, NULL)",
        [id, 0.5 + STEPS[0].seconds],
    )
    for step in STEPS:
        tokens = [
            [t.id, t.position, t.source, t.match_length, t.text, t.probability] for t in step.tokens
        ]
        values = [tokens, step.proposed, step.accepted, step.by_depth, step.look_ups]
        texts = [json.dumps(value) for value in values]
        times = [step.draft_seconds, step.verify_seconds, step.sample_seconds, step.other_seconds]
        row = [
            id,
            step.index,
            *(damage or texts[:1]),
            *texts[1:],
            *times,
            step.finish,
            json.dumps(step.levels),
        ]
        old.execute(f"INSERT INTO steps VALUES ({', '.join('?' * len(row))})", row)


@pytest.mark.parametrize(
    "damage", ["[", "[7]", b"\x00\xff", '{"a":"b"}', '["[["]', "[" * 9999, "7"]
)
def test_runs_and_answers_from_before_0009_are_there_whatever_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | bytes
) -> None:
    path = tmp_path / "strata.db"
    with monkeypatch.context() as patch:
        names = [name for name, _ in migrations.MIGRATIONS]
        before = migrations.MIGRATIONS[: names.index("0009-one-run")]
        patch.setattr(migrations, "MIGRATIONS", before)
        Database(path).close()
    changed = (*PIECES[:-1], PIECES[-1]._replace(text="other"))
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("INSERT INTO owners VALUES (1, 'ada')")
        old.execute("INSERT INTO fingerprints VALUES (1, 'f')")
        old.execute("INSERT INTO conversations VALUES ('c', 1, 't', '', '{}', 1.0, 1.0)")
        insert_run(old, "sound")
        insert_run(old, "damaged", damage)
        for at, (run, pieces) in enumerate(
            [
                ("sound", json.dumps(PIECES)),
                ("sound", json.dumps(changed)),
                ("damaged", json.dumps(PIECES)),
                (None, json.dumps(PIECES)),
                ("sound", damage),
            ]
        ):
            row = (f"m{at}", "c", at, "assistant", f"text {at}", run, 2.0, pieces)
            old.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    with Database(path) as db:
        messages = Conversations(db, "ada").messages("c")
        assert [m.content for m in messages] == [f"text {at}" for at in range(5)]
        assert [m.pieces for m in messages] == [PIECES, changed, PIECES, PIECES, None]
        stored = db.execute_read("SELECT pieces IS NOT NULL FROM messages ORDER BY position")
        assert stored == [(0,), (1,), (1,), (1,), (1,)], "a run that says the same holds them"
        run = Traces(db, "ada").load("sound")
        assert run == Run("hd", "toy", "f", {"seed": 3}, Prefill(12, 4), STEPS)
        assert run.prefill is not None and run.prefill.seconds == pytest.approx(0.5)
        worth = Traces(db, "ada").worths("c")["sound"]
        assert worth.guessed == 2 and worth.plain_seconds is None and worth.proof == {}
        assert db.execute_read("PRAGMA foreign_key_check") == []


def test_a_database_with_a_row_in_every_table_opens_and_reads_back(tmp_path: Path) -> None:
    """The SQL was written by the version whose last migration is 0018."""
    path = tmp_path / "strata.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((ROOT / "tests/fixtures/0018.sql").read_text(encoding="utf-8"))
        tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
        for (table,) in connection.execute(tables).fetchall():
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0], table
    model = "/models/größe \udcff"
    first = Token(0, 12, "context", 3, "Hel", 0.5)
    with Database(path) as db:
        assert db.notices == [] and db.execute_read("PRAGMA foreign_key_check") == []
        store, traces = Conversations(db, "local"), Traces(db, "local")
        imported, talk = (store.get(id) for id in ("id17", "id01"))
        assert [each.id for each in store.list()] == [talk.id, imported.id]
        assert (talk.pinned, talk.folder, talk.settings) == (True, "Folder", {"method": "hd"})
        asked, answer = store.messages(talk.id)
        assert [len(each.versions) for each in (asked, answer)] == [2, 2]
        assert answer.content == "Hello wörld 🦙!" == text_of(answer.pieces or ())
        assert store.messages(imported.id)[0].pieces == (Piece("Hey", "model", 2, 0, 0, 0.5),)
        assert store.get(store.undo("id16")).title == "Deleted"

        run, continued = traces.load("id03"), traces.load("id08")
        assert run.tokens[0] == first and run.steps[1].finish == "eos" and run.steps[0].tree
        assert (run.prefill, run.learned) == (Prefill(12, 4, 0.1, 0.09), Learned(0.002))
        assert [(part.step, part.model, part.method) for part in continued.parts] == [
            (2, "other", "plain")
        ]
        assert traces.prompt("id08") == (2, (0, 1, 2, 3, 4))
        assert traces.worths(talk.id)["id03"].proof == {"identical": True}
        assert [trace.kind for trace in traces.history()] == ["compare", "chat", "chat"]
        assert traces.get("id03").decode_speedup == 1.75

        learned = shown(db)["local"]
        assert learned["logs"][talk.id] == [1, 2, 3, 70000]
        assert [gram[0] for gram in learned["ngrams"]] == [[1, 2, 3], [2, 3]]
        assert learned["calibration"] == [["context", 3, 11, 40.5, 20.25]]
        costs = CostStore(db, "toy", "toy", "cpu", "float32", 2).load()
        assert costs == ({0: 0.25, 8: 0.5}, 1e-6, 2e-6, 1_700_000_000.25, 1e-9, 2e-9)

        (benchmark,) = Benchmarks(db, "local").list()
        assert (benchmark.title, benchmark.label, benchmark.done) == ("Twelve", "toy (float32)", 1)
        assert Benchmarks(db, "local").questions(benchmark.id) == (Question("q1", "math", "1+1?"),)
        (result,) = Benchmarks(db, "local").results(benchmark.id)
        figures = (3, 2, 5, 1, 0.1, 0.12, 0.05, 0.002)
        assert result == Result(0, "hd", 0, *figures, True, "", (5, 6, 70000))
        (preset,) = PresetStore(db, "local").list()
        assert (preset.name, preset.settings) == ("Poet", {"temperature": 1.0})
        assert PresetStore(db, "local").chosen(model) == preset.id
        key = ApiKeys(db).find("sk-strata-id26")
        assert key is not None and key.name == "editor" and key.used and ApiKeys(db).on
        assert SourceStore(db).models() == [(model, {"threads": 2})]
        assert SourceStore(db).folders() == ["/models"]
        profiles, sampling = ProfileStore(db), {"temperature": 0.7}
        key_of_profile = ProfileKey("toy", ("small",), sampling, "cpu/float32/2")
        assert profiles.load(key_of_profile) == {"positions": 640}
        assert profiles.chosen("toy") == (("/models/small",), "small@8")
