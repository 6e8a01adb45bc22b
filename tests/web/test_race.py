"""What the page is sent of a race: what was recorded, and an outcome as it is."""

import json

import pytest

from app.service.race import Race
from app.service.session import Session
from app.web.tabs.race import lane, outcome, told
from engine.backends.toy import ToyBackend
from engine.compare import Speedup
from engine.local import Local
from engine.metrics import summarise
from engine.runs import Verdict
from engine.types import Learned, Prefill, Run, Step, Token
from storage.database import Database
from tests.support.inside import OWNER


@pytest.fixture
def session(db: Database) -> Session:
    return Session(Local(backend=ToyBackend()), db)


def test_the_lanes_hold_what_was_measured(session: Session) -> None:
    *_, race = session.races.run(OWNER)
    assert isinstance(race, Race)
    data = told(race)
    assert data["state"] == "over" and json.loads(json.dumps(data)) == data
    for run in (race.plain, race.fast):
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


def test_the_outcome_is_told_as_it_is() -> None:
    assert outcome(race_of(1.75, 0.75, 2.0)) == (
        "Recorded just now on this machine: plain 2.00 s, with guessing 1.00 s, 2.00× as fast. "
        "Both say the same, all 9 tokens."
    )
    slower = outcome(race_of(1.0, 1.5, 0.71))
    assert "cost more than it saved (0.71×)" in slower and "as fast" not in slower
    unknown = outcome(race_of(1.0, 0.9, None))
    assert "×" not in unknown
    assert "part at token 4" in outcome(race_of(1.0, 0.5, 1.5, identical=False))
