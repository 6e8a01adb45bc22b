"""A head in the program: answers, what is stored of them, what is offered, and why not."""

import pytest

from app.service.current import drafters, line
from app.service.session import Session
from engine.drafting.calibration import WITH_HEAD
from engine.drafting.head_record import HeadRecord
from engine.errors import SettingError
from engine.methods import METHODS
from engine.settings import Sampling
from engine.types import HEAD
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import (
    OWNER,
    Held,
    local,
    on_toy,
    past_answers,
    preferences,
    run,
    updates_of,
)
from tests.support.toy import deviating


@pytest.fixture
def toy() -> Held:
    return Held(guesses=deviating(0.5))


@pytest.mark.parametrize("method", ["auto", "head@2"])
def test_an_answer_with_a_head_is_the_plain_one_and_is_stored_with_its_source(
    session: Session, method: str
) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    plain = run(updates_of(session, OWNER, conversation, preferences("plain")))
    conversation = session.chat.say(OWNER, None, "hello there")
    update = run(updates_of(session, OWNER, conversation, preferences(method)))
    assert update.text == plain.text
    assert update.metrics is not None and update.metrics.accepted[HEAD] > 0
    traces = Traces(session.database, OWNER)
    answer = Conversations(session.database, OWNER).messages(conversation)[-1]
    assert answer.run_id
    kept = traces.steps(answer.run_id, 0, 100)
    assert sum(step.accepted.get(HEAD, 0) for step in kept) == update.metrics.accepted[HEAD]
    assert any(HEAD in step.levels for step in kept)
    assert {token.source for step in kept for token in step.tokens} >= {HEAD}
    assert all(not t.match_length for step in kept for t in step.tokens if t.source == HEAD)


def test_what_is_learned_with_a_head_is_stored_for_the_owner(session: Session) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    run(updates_of(session, OWNER, conversation, preferences("auto")))
    rows = past_answers(session).calibration.rows()
    assert any(row.tier == WITH_HEAD + HEAD for row in rows)


def test_a_method_that_needs_a_head_is_refused_with_the_reason(db: Database) -> None:
    session = on_toy(db)
    with pytest.raises(SettingError, match="'hd\\+head' cannot be used. toy brings no head"):
        session.stacks.check(METHODS["hd+head"], Sampling())
    session.stacks.check(METHODS["auto"], Sampling())


def test_a_head_that_backs_off_is_left_out_of_whole_answers(session: Session) -> None:
    """It costs a little to listen, and to look for what a guess could bring."""
    loaded = local(session).loaded
    loaded.measure_costs()
    assert loaded.curve is not None
    gain = loaded.curve.gate.gains[HEAD]
    gain.backoff = 10_000
    conversation = session.chat.say(OWNER, None, "hello there")
    update = run(updates_of(session, OWNER, conversation, preferences("auto")))
    assert update.metrics is not None and HEAD not in update.metrics.proposed
    assert gain.backoff == 10_000 - update.metrics.forwards
    again = session.chat.say(OWNER, None, "hello there")
    expected = run(updates_of(session, OWNER, again, preferences("hd+head")))
    assert expected.text == update.text and gain.backoff < 10_000 - update.metrics.forwards
    gain.backoff = 1
    last = session.chat.say(OWNER, None, "hello there")
    run(updates_of(session, OWNER, last, preferences("auto")))
    assert gain.backoff == 0 and loaded.suited(METHODS["auto"]) is METHODS["auto"]


def test_a_broken_head_is_named_once_and_not_used_any_more(session: Session) -> None:
    loaded = local(session).loaded
    loaded.measure_costs()
    assert loaded.curve is not None

    def answer() -> list[str]:
        conversation = session.chat.say(OWNER, None, "hello there")
        update = run(updates_of(session, OWNER, conversation, preferences("auto")))
        assert update.metrics is not None
        used.append(HEAD in update.metrics.proposed)
        return session.notices.take(OWNER)

    used: list[bool] = []
    said: list[str] = []
    session.notices.say = said.append
    assert answer() == [] and used == [True]
    loaded.curve.gate.head.record = HeadRecord(412, 2, 150.0)
    [notice] = answer()
    assert notice.startswith("The toy head head of toy is not used: 2 of its 412 guesses held")
    assert "where it expected 150" in notice and "--head off" in notice
    assert answer() == [] and said == [notice] and used[2:] == [False]
    info = session.current.info
    assert [d.problem for d in drafters(info) if d.name == "built-in head"] == [
        notice.removeprefix("The toy head head of toy is ").removesuffix(".")
    ]
    assert line(info) == "Guesses come from: databases (several guesses per token)."
