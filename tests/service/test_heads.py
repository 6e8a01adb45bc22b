"""A head in the program: answers, what is stored of them, what is offered, and why not."""

import pytest

from app.arguments import parse
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.toy import ToyBackend, deviating
from engine.drafting.calibration import WITH_HEAD
from engine.errors import SettingError
from engine.local import Local
from engine.methods import METHODS
from engine.metrics import summarise
from engine.settings import Generation, Sampling
from engine.types import HEAD
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.service.test_session import run
from tests.support.inside import OWNER, local, past_answers


def session_with(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def session(db: Database) -> Session:
    return session_with(db, ToyBackend(guesses=deviating(0.5)))


def preferences(method: str = "auto", seed: int = 3) -> Preferences:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=60)
    return Preferences(generation, method, METHODS["hd"].drafting, fresh_seed=False)


@pytest.mark.parametrize("method", ["auto", "hd+head", "head", "head@2"])
def test_an_answer_with_a_head_is_the_plain_one_and_is_stored_with_its_source(
    session: Session, method: str
) -> None:
    asked = session.chat.say(OWNER, None, "hello there")
    plain = run(session.answering.answer(OWNER, asked, preferences("plain")))
    asked = session.chat.say(OWNER, None, "hello there")
    update = run(session.answering.answer(OWNER, asked, preferences(method)))
    assert update.text == plain.text
    assert update.metrics is not None and update.metrics.accepted[HEAD] > 0
    traces = Traces(session.database, OWNER)
    answer = Conversations(session.database, OWNER).messages(asked)[-1]
    assert answer.run_id
    kept = traces.steps(answer.run_id, 0, 100)
    assert sum(step.accepted.get(HEAD, 0) for step in kept) == update.metrics.accepted[HEAD]
    assert any(HEAD in step.levels for step in kept)
    assert {token.source for step in kept for token in step.tokens} >= {HEAD}
    assert all(not t.match_length for step in kept for t in step.tokens if t.source == HEAD)


def test_a_comparison_with_a_head_is_identical(session: Session) -> None:
    *_, last = session.proofs.compare(OWNER, "hello there", "", preferences("hd+head"), 2)
    said = {tuple(token.id for token in one.tokens) for pair in last.pairs for one in pair}
    assert len(said) == 1
    assert any(summarise(fast).accepted.get(HEAD) for _, fast in last.pairs)


def test_what_is_learned_beside_a_head_is_stored_for_the_owner(session: Session) -> None:
    asked = session.chat.say(OWNER, None, "hello there")
    run(session.answering.answer(OWNER, asked, preferences()))
    rows = past_answers(session).calibration.rows()
    assert any(row.tier == WITH_HEAD + HEAD for row in rows)


def test_a_method_that_needs_a_head_is_refused_with_the_reason(db: Database) -> None:
    session = session_with(db, ToyBackend())
    with pytest.raises(SettingError, match="'hd\\+head' cannot be used. toy brings no head"):
        session.stacks.check(METHODS["hd+head"], Sampling())
    session.stacks.check(METHODS["auto"], Sampling())


@pytest.mark.parametrize(
    ("given", "found"), [("auto", ()), ("", ()), ("a, auto,b ", ("a", "b"))], ids=str
)
def test_drafts_of_auto_are_those_that_were_chosen(given: str, found: tuple[str, ...]) -> None:
    assert parse(["--drafts", given]).drafts == found


def test_a_head_that_backs_off_is_left_out_of_whole_answers(session: Session) -> None:
    """It costs a little to listen, and to look for what a guess could bring."""
    loaded = local(session).loaded
    loaded.measure_costs()
    assert loaded.curve is not None
    gain = loaded.curve.gate.gains[HEAD]
    gain.backoff = 10_000
    asked = session.chat.say(OWNER, None, "hello there")
    update = run(session.answering.answer(OWNER, asked, preferences("auto")))
    assert update.metrics is not None and HEAD not in update.metrics.proposed
    assert gain.backoff == 10_000 - update.metrics.forwards
    again = session.chat.say(OWNER, None, "hello there")
    wanted = run(session.answering.answer(OWNER, again, preferences("hd+head")))
    assert wanted.text == update.text and gain.backoff < 10_000 - update.metrics.forwards
    gain.backoff = 1
    last = session.chat.say(OWNER, None, "hello there")
    run(session.answering.answer(OWNER, last, preferences("auto")))
    assert gain.backoff == 0 and loaded.suited(METHODS["auto"]) is METHODS["auto"]
