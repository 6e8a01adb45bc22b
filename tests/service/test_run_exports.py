"""Runs and steps as CSV and JSON: exact, and no cell that a spreadsheet would run."""

import csv
import io
import json
from dataclasses import replace

from app.service.run_exports import run_json, runs_csv, steps_csv
from engine.recorded import NODE
from engine.types import Run, Step, Token
from storage.traces import Trace

EVIL = '=HYPERLINK("http://evil.example","a,b")'
TRACE = Trace("r1", "c1", "chat", "toy", "f", "hd", 7, 0.1 + 0.2, 3, 1.5, 1.25, None)
STEPS = (
    Step(
        0,
        (Token(1, 0, "context", 2, 'a "b"\n', 0.5), Token(2, 1, "target", 0, "c", 0.25)),
        {"context": 3, "draft:small": 2},
        {"context": 1},
        ((3, 1), (2, 0)),
        0.1 + 0.2,
        0.5,
        0.0,
        1e-9,
        plain_seconds=0.25,
    ),
    Step(1, (Token(3, 2, "target", text=EVIL),), verify_seconds=0.5, finish="eos"),
)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_runs_are_written_exactly() -> None:
    assert runs_csv([TRACE]) == (
        "run,created,kind,conversation,model,method,tokens,steps,decode_seconds,speedup,"
        "decode_speedup\r\n"
        "r1,1970-01-01T00:00:01.500+00:00,chat,c1,toy,hd,7,3,0.30000000000000004,1.25,\r\n"
    )
    (row,) = read(runs_csv([replace(TRACE, id="-id", conversation_id="-c")]))
    assert (row["run"], row["conversation"]) == ("-id", "-c"), "ids can be looked up again"
    assert runs_csv([]).count("\r\n") == 1


def test_steps_are_written_exactly() -> None:
    first, last = read(steps_csv(STEPS))
    assert first == {
        "step": "0", "tokens": "2", "text": 'a "b"\nc', "depth": "2",
        "draft_seconds": "0.30000000000000004", "verify_seconds": "0.5", "sample_seconds": "0.0",
        "other_seconds": "1e-09", "plain_seconds": "0.25", "finish": "",
        "drafted context": "3", "accepted context": "1",
        "drafted model": "0", "accepted model": "0",
        "drafted statistics": "0", "accepted statistics": "0",
        "drafted draft:small": "2", "accepted draft:small": "0",
    }  # fmt: skip
    assert (last["finish"], last["drafted context"], last["plain_seconds"]) == ("eos", "0", "")


def test_no_cell_is_a_formula() -> None:
    assert read(steps_csv(STEPS))[1]["text"] == "'" + EVIL
    for start in ("=", "+", "-", "@", "\t", "\r"):
        name = f"{start}cmd"
        (row,) = read(runs_csv([replace(TRACE, model=name, method=name)]))
        assert row["model"] == row["method"] == "'" + name
    drafted = replace(STEPS[0], proposed={EVIL: 1})
    assert f"drafted {EVIL}" in read(steps_csv([drafted]))[0]
    assert read(runs_csv([replace(TRACE, decode_seconds=-1.0)]))[0]["decode_seconds"] == "-1.0"


def test_json_holds_a_run_as_it_is() -> None:
    found = json.loads(run_json(TRACE, Run("hd", EVIL, steps=STEPS)))
    assert (found["id"], found["model"], found["speedup"]) == ("r1", EVIL, 1.25)
    assert found["steps"][1]["tokens"][0]["text"] == EVIL
    assert found["steps"][0]["proposed"] == {"context": 3, "draft:small": 2}


def test_json_names_what_was_guessed() -> None:
    said = (Token(5, 9, "context", 3, " a", 0.5),)
    tree = NODE.pack(5, 0, 0, 3, 50) + NODE.pack(6, 0, 0, 2, 4)
    steps = Step(0, said, {"context": 2}, {"context": 1}, tree=tree), Step(1, said)
    drafted, old = json.loads(run_json(TRACE, Run("hd", "m", steps=steps)))["steps"]
    assert old["tree"] is None and [node["token"] for node in drafted["tree"]] == [5, 6]
    assert [node["accepted"] for node in drafted["tree"]] == [True, False]
