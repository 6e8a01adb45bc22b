"""Files that leave the program: exact, and no cell that a spreadsheet would run."""

import csv
import io
import json
from dataclasses import replace

import pytest

from app.service.exports import closed, harmless, markdown, run_json, runs_csv, steps_csv
from engine.recorded import NODE
from engine.types import Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Trace


def test_who_said_what(db: Database) -> None:
    store = Conversations(db, "local")
    made = store.create("Two\nlines")
    store.set_system_prompt(made.id, "Be brief.")
    for role, text in (
        ("user", "  Hi *there*\n"),
        ("assistant", "# Hello\n\n- one"),
        ("tool", "look {}\n````\n![x](http://evil.example/x)"),
    ):
        store.append(made.id, role, text)
    assert markdown(store.get(made.id), store.messages(made.id)) == (
        "# Two lines\n\n## Instructions\n\nBe brief.\n\n## You\n\nHi *there*\n\n"
        "## Answer\n\n# Hello\n\n- one\n\n"
        "## Tool\n\n`````\nlook {}\n````\n![x](http://evil.example/x)\n`````\n"
    )


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("plain", ""),
        ("```py\nx", "\n```"),
        ("```py\nx\n```", ""),
        ("````\n```\nx", "\n````"),
        ("~~~\n```", "\n~~~"),
        ("```\nx\n``` no end", "\n```"),
        ("``` `in line` ```", ""),
        ("    ```\nindented", ""),
        ("```\na\n```\n```", "\n```"),
    ],
)
def test_a_block_of_code_that_was_cut_off_ends_with_its_message(text: str, added: str) -> None:
    assert closed(text) == text + added


EVIL = '=HYPERLINK("http://evil.example","a,b")'
TRACE = Trace("r1", "c1", "chat", "toy", "f", "hd", 7, 0.1 + 0.2, 3, 1.5, 1.25, None, "GGUF, F16")
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
        "decode_speedup,weights\r\n"
        'r1,1970-01-01T00:00:01.500+00:00,chat,c1,toy,hd,7,3,0.30000000000000004,1.25,,"GGUF, F16"'
        "\r\n"
    )
    (row,) = read(runs_csv([replace(TRACE, id="-id", conversation_id="-c")]))
    assert (row["run"], row["conversation"]) == ("-id", "-c"), "ids can be looked up again"
    assert runs_csv([]).count("\r\n") == 1


def test_steps_are_written_exactly() -> None:
    first, last = read(steps_csv(STEPS))
    assert first == {
        "step": "0", "tokens": "2", "text": 'a "b"\nc', "depth": "2",
        "draft_seconds": "0.30000000000000004", "verify_seconds": "0.5", "sample_seconds": "0.0",
        "other_seconds": "1e-09", "plain_seconds": "0.25", "beside": "0", "finish": "",
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
    tokens = (Token(5, 9, "context", 3, " a", 0.5),)
    tree = NODE.pack(5, 0, 0, 3, 50) + NODE.pack(6, 0, 0, 2, 4)
    steps = Step(0, tokens, {"context": 2}, {"context": 1}, tree=tree), Step(1, tokens)
    drafted, old = json.loads(run_json(TRACE, Run("hd", "m", steps=steps)))["steps"]
    assert old["tree"] is None and [node["token"] for node in drafted["tree"]] == [5, 6]
    assert [node["accepted"] for node in drafted["tree"]] == [True, False]


FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1", "\uff0b1", "\uff0d1", "\uff201", EVIL)
BEFORE = ("", " ", "\n", "\r\n", "\t", "\n\n ", "\ufeff", "\u200b", '"', "\x00", "\xa0", "\u3000")
SPLITS = (";", "\t", "\n", "\r", "\u2028")


def cells(line: str) -> list[str]:
    """What a spreadsheet may make of a text that splits it wherever any of them does, and leaves
    out what one cannot see, and quotes."""
    found = [line]
    for split in SPLITS:
        found = [cell for part in found for cell in part.split(split)]
    unseen = "".join(BEFORE) + '"'
    return [cell.strip().strip(unseen).strip() for cell in found]


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_cell_is_a_formula_however_a_line_is_split(formula: str) -> None:
    first = tuple(each[0] for each in FORMULAS)
    for before in BEFORE:
        texts = [before + formula, *(f"a word{split}{before}{formula}" for split in SPLITS)]
        for text in texts:
            assert not [cell for cell in cells(harmless(text)) if cell.startswith(first)], text
            assert harmless(text).replace("'", "") == text.replace("'", ""), "nothing else changes"


def test_a_line_of_the_file_is_split_at_semicolons_without_harm() -> None:
    step = replace(STEPS[0], tokens=(replace(STEPS[0].tokens[0], text='x;=1+1\n@a;"";\uff1d2'),))
    for line in steps_csv([step]).split("\r\n"):
        assert not [cell for cell in cells(line) if cell.startswith(("=", "@", "\uff1d"))], line
    assert "x;'=1+1" in read(steps_csv([step]))[0]["text"]


@pytest.mark.parametrize("text", ["", "a-b", "2 + 2 = 4", "a, -b", "it is; so -", "me@home", "'=1"])
def test_a_text_that_is_no_formula_stays(text: str) -> None:
    assert harmless(text) == text
