"""The race: both lanes are recorded, none is made up, and it can be stopped and run again."""

import pytest

from app.service.comparison import Progress
from app.service.race import ABOUT, TOKENS, Race
from app.service.session import Session
from engine.local import Local
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import OWNER, Held


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


def test_a_race_is_a_pair_of_runs_that_were_just_made(session: Session) -> None:
    *before, race = session.races.run(OWNER)
    assert isinstance(race, Race) and race.verdict.identical
    assert [race.plain.method, race.fast.method] == ["plain", "auto"]
    assert race.plain.prefill is not None and race.plain.prefill.reused == 0
    assert 1 <= len(race.plain.tokens) <= TOKENS
    assert [t.text for t in race.fast.tokens] == [t.text for t in race.plain.tokens]
    running = [
        item.running.method for item in before if isinstance(item, Progress) and item.running
    ]
    assert running[0] == "plain" and running[-1] == "auto"
    stored = Traces(session.database, OWNER).history()
    assert [(trace.kind, trace.conversation_id) for trace in stored] == [("compare", None)] * 2
    assert session.chat.conversations(OWNER).list() == []


def test_a_race_that_is_stopped_leaves_nothing_and_another_can_follow(
    session: Session, toy: Held
) -> None:
    toy.allow(20)
    items = session.races.run(OWNER)
    for item in items:
        if isinstance(item, Progress):
            break
    session.races.stop(OWNER)
    toy.allow()
    assert not any(isinstance(item, Race) for item in items)
    assert not session.tasks.busy(OWNER, ABOUT)
    assert Traces(session.database, OWNER).history() == []
    assert isinstance([*session.races.run(OWNER)][-1], Race)
