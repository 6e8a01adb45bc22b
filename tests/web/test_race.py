"""What the page is sent of a race: what was recorded, and an outcome as it is."""

import json
from dataclasses import replace
from pathlib import Path

import gradio as gr
import pytest

from app.service.jobs import Progress
from app.service.race import NoGain, Race
from app.service.session import Session
from app.web.tabs import welcome
from app.web.tabs.welcome import lane, outcome, race_value
from engine.compare import Speedup
from engine.local import Local
from engine.metrics import summarise
from engine.runs import Verdict
from engine.types import Learned, Prefill, Run, Step, Token
from storage.database import Database
from tests.support.inside import OWNER
from tests.support.toy import ToyBackend


def test_the_lanes_hold_what_was_measured(session: Session) -> None:
    *_, made = session.races.run(OWNER, anyway=True)
    assert isinstance(made, Race)
    data = race_value(replace(made, speedup=Speedup(2.0, 2.0)))
    assert data["state"] == "over" and json.loads(json.dumps(data)) == data
    for run in (made.plain, made.fast):
        found = lane(run)
        steps = found["steps"]
        assert isinstance(steps, list) and len(steps) == sum(bool(s.tokens) for s in run.steps)
        assert "".join(t for _, texts, _ in steps for t in texts) == "".join(
            token.text for token in run.tokens
        )
        assert [s for _, _, sources in steps for s in sources] == [t.source for t in run.tokens]
        times = [each[0] for each in steps]
        assert times == sorted(times)
        figures = summarise(run)
        assert found["seconds"] == pytest.approx(figures.seconds)
        assert times[0] == pytest.approx(1e3 * figures.ttft_seconds, abs=0.01)


def race_of(plain: float, fast: float, whole: float | None, identical: bool = True) -> Race:
    def run(method: str, seconds: float) -> Run:
        step = Step(0, (Token(1, 0, "target"),), verify_seconds=seconds)
        return Run(method, prefill=Prefill(1, 0, 0.25), steps=(step,), learned=Learned(0.0))

    found = Verdict(identical, 9, 0 if identical else 4)
    return Race(run("plain", plain), run("hd", fast), found, Speedup(whole, whole))


def test_what_gains_nothing_is_not_played() -> None:
    assert race_value(race_of(1.75, 0.75, 2.0))["state"] == "over"
    for whole in (0.84, 1.0, 1.04, None):
        data = race_value(race_of(0.53, 0.63, whole))
        assert data["state"] == "none" and "lanes" not in data
        assert "no gain to show" in str(data["outcome"])
    why = "checking one guess takes 2.9 times as long as computing a token"
    data = race_value(NoGain(why))
    assert data["state"] == "none" and data["outcome"] == (
        f"With this model, guessing is not expected to gain anything on this machine: {why}."
    )


def test_the_progress_of_the_padded_model_is_shown() -> None:
    data = race_value(Progress(0.42, "Making tiny-chat, padded to 0.5 B"))
    assert data == {"state": "making", "text": "Making tiny-chat, padded to 0.5 B … 42 %"}
    assert race_value(Progress(None, "Making it …"))["text"] == "Making it …"


def test_the_page_offers_the_pace_of_a_real_model_only_where_it_can_be_had(
    db: Database, tmp_path: Path
) -> None:
    def offered(database: Database, guests: bool) -> str:
        session = Session(Local(backend=ToyBackend()), database, guests)
        return str(welcome.RaceView(session, gr.BrowserState({})).view.props["pace"])

    assert offered(db, guests=False) == ""
    with Database(tmp_path / "strata.db") as stored:
        text = "padded to the cost of 0.5\u00a0B parameters"
        assert text in offered(stored, guests=False) and text not in offered(stored, guests=True)


def test_the_outcome_is_shown_as_it_is() -> None:
    assert outcome(race_of(1.75, 0.75, 2.0)) == (
        "Recorded just now on this machine: plain 2.00 s, with guessing 1.00 s, 2.00× as fast. "
        "Both say the same, all 9 tokens."
    )
    slower = outcome(race_of(1.0, 1.5, 0.71))
    assert "(0.71×). That is no gain to show" in slower and "as fast" not in slower
    unknown = outcome(race_of(1.0, 0.9, None))
    assert "×" not in unknown
    assert "diverge at token 4" in outcome(race_of(1.0, 0.5, 1.5, identical=False))
