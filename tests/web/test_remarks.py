"""What stands below an answer: badges say what was proved, whatever the file holds."""

from typing import Any

import pytest

from app.web.remarks import LONGEST, badge, remark, remarks
from engine.types import Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces, Worth


@pytest.mark.parametrize(
    ("proof", "text", "kind"),
    [
        ({"kind": "same", "tokens": 9, "speedup": 1.8}, "proved: same text, 1.80×", "good"),
        ({"kind": "same", "tokens": 9, "speedup": None}, "proved: same text", "good"),
        ({"kind": "same", "speedup": "fast"}, "proved: same text", "good"),
        ({"kind": "same", "speedup": True}, "proved: same text", "good"),
        ({"kind": "differs", "at": 12}, "differs at token 12", "bad"),
        ({"kind": "skipped", "why": "<b>why</b>"}, "not proved", ""),
    ],
)
def test_a_badge_says_what_a_proof_found(proof: dict[str, Any], text: str, kind: str) -> None:
    found = badge(proof)
    assert (found["text"], found["kind"]) == (text, kind) and found["title"]


@pytest.mark.parametrize("proof", [{}, {"kind": "best"}, {"kind": ["same"]}, {"speedup": 2.0}])
def test_without_a_proof_there_is_no_badge(proof: dict[str, Any]) -> None:
    assert badge(proof) == {} and "badge" not in remark(Worth(0, 0, 0.0, None, proof))


def test_a_difference_names_both_tokens_and_how_close_they_were() -> None:
    proof = {"kind": "differs", "at": 3, "plain": " a", "said": "<b>" * 99, "gap": 0.00123}
    title = badge(proof)["title"]
    assert "' a'" in title and "0.0012 apart" in title and len(title) < 200 + 2 * LONGEST
    assert "apart" not in badge({**proof, "gap": "small"})["title"]
    early = badge({**proof, "early": True})["title"]
    assert "ended there" in early and "goes on with ' a'" in early


def test_each_answer_of_a_conversation_has_its_sentence(db: Database) -> None:
    talk = Conversations(db, "ada").create().id
    said = tuple(Token(1, at, "context") for at in range(20))
    step = Step(0, said, {"context": 25}, {"context": 19}, verify_seconds=1.0, plain_seconds=4.0)
    run_id = Traces(db, "ada").save(Run(prefill=Prefill(1, 0, 0.0), steps=(step,)), talk)
    found = remarks(db, "ada", talk)
    assert found == {run_id: {"note": "19 of 20 tokens were guessed, which saved about 3.0 s."}}
    assert remarks(db, "bob", talk) == {} == remarks(db, "ada", None)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"thinks": True}, {"thinking": True}), ({"thinks": False}, {}), ({"generation": {}}, {})],
)
def test_an_answer_that_began_within_thinking_is_known_to(
    db: Database, settings: dict[str, Any], told: dict[str, Any]
) -> None:
    """Only the page that watched it grow has heard it from the answer itself."""
    talk = Conversations(db, "ada").create().id
    step = Step(0, (Token(1, 0, "context"),), finish="cancelled", verify_seconds=1.0)
    run = Run(settings=settings, prefill=Prefill(1, 0, 0.0), steps=(step,))
    run_id = Traces(db, "ada").save(run, talk)
    assert remarks(db, "ada", talk)[run_id].items() >= told.items()
    assert ("thinking" in remarks(db, "ada", talk)[run_id]) == bool(told)
    with db.write() as handle:
        handle.execute("UPDATE runs SET settings = '{' WHERE id = ?", [run_id])
    assert "thinking" not in remarks(db, "ada", talk)[run_id], "a damaged file breaks nothing"
