"""What answers teach: kept per owner and model, wiped as one, never mixed up with a fresh start."""

from typing import Any

import pytest

from app.service.preferences import Preferences
from app.service.recorder import Update
from app.service.session import Session
from engine.backends.toy import ToyBackend
from engine.engine import PastRecord, WantedPast
from engine.errors import StorageError
from engine.local import Local
from engine.settings import Generation, Sampling
from engine.types import TrustRow
from storage.calibrations import CalibrationStore
from storage.database import Database
from storage.ngrams import ModelNgrams
from tests.support.inside import ME, Held, knowledge, local, past, room

CHOSEN = Preferences(Generation(Sampling(temperature=0.8, seed=3), max_tokens=60), fresh_seed=False)


def stored(db: Database, owner: str = ME) -> list[TrustRow]:
    return CalibrationStore(db, owner, "toy").load()


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


def ask(session: Session, owner: str = ME, method: str = "hd") -> str:
    conversation = session.say(owner, None, "hello there")
    list(session.answer(owner, conversation, CHOSEN.with_method(method)))
    return conversation


def test_trust_is_stored_after_an_answer_and_there_after_a_restart(
    session: Session, db: Database
) -> None:
    ask(session)
    rows = stored(db)
    assert "context" in {row.tier for row in rows}
    assert sorted(rows) == sorted(past(session).calibration.rows())
    later = Session(Local(backend=ToyBackend()), db)
    conversation = ask(later)
    assert sorted(later.answered[ME, conversation].trusted) == sorted(rows)
    assert sum(row.reached for row in stored(db)) > sum(row.reached for row in rows)


def test_every_conversation_of_an_owner_teaches_one_calibration(session: Session) -> None:
    rooms = [room(session, ask(session)) for _ in range(2)]
    first, second = (room.databases for room in rooms)
    assert first.calibration is second.calibration is past(session).calibration
    assert first.harvest is not second.harvest


def test_owners_teach_each_other_nothing(session: Session, db: Database) -> None:
    ask(session, "ann")
    assert stored(db, "ann") and not stored(db, "bob")
    before, known = stored(db, "ann"), past(session, "ann").tier.size
    conversation = ask(session, "bob")
    assert session.answered["bob", conversation].trusted == ()
    assert stored(db, "ann") == before
    assert past(session, "ann").tier.size == known
    assert past(session, "bob").tier.size == ModelNgrams(db, "bob", "toy").rows()


def test_plain_answers_teach_nothing_about_the_evidence(session: Session, db: Database) -> None:
    ask(session, method="plain")
    assert stored(db) == []


def test_wiping_the_model_tier_wipes_the_trust(session: Session, db: Database) -> None:
    ask(session)
    session.wipe_model(ME)
    assert stored(db) == [] and ModelNgrams(db, ME, "toy").rows() == 0
    assert not knowledge(session).pasts and not knowledge(session).rooms
    conversation = ask(session)
    answer = session.answered[ME, conversation]
    assert answer.trusted == () and not answer.run.metrics.accepted.get("model")
    assert past(session).tier.size == ModelNgrams(db, ME, "toy").rows()


def wiped(session: Session, db: Database) -> bool:
    """Whether nothing of the owner's is left, stored or in memory."""
    rows = ModelNgrams(db, ME, "toy").rows()
    return not (stored(db) or rows or knowledge(session).pasts or knowledge(session).rooms)


def test_an_answer_under_way_does_not_bring_back_what_was_wiped(
    session: Session, db: Database, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.session.UPDATE_SECONDS", 0.0)
    ask(session)
    conversation = session.say(ME, None, "something else")
    updates = session.answer(ME, conversation, CHOSEN)
    toy.allow(1)
    next(updates)
    session.wipe_model(ME)
    toy.allow()
    *_, last = updates
    assert isinstance(last, Update) and last.finish and wiped(session, db)
    ask(session)
    assert stored(db) and ModelNgrams(db, ME, "toy").rows()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_wipe_while_the_past_is_read_leaves_nothing_of_it(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The engine has asked for it, and not had it yet."""
    ask(session)
    later = Session(Local(backend=ToyBackend()), db)
    recall = later.recall

    def wiping(wanted: Any, *whose: str) -> Any:
        if not isinstance(wanted, WantedPast):
            return recall(wanted, *whose)
        if moment == "before":
            later.wipe_model(ME)
        found = recall(wanted, *whose)
        if moment == "after":
            later.wipe_model(ME)
        assert (found == PastRecord()) is (moment == "before")
        return found

    monkeypatch.setattr(later, "recall", wiping)
    ask(later)
    assert wiped(later, db)


def test_an_answer_that_waited_through_a_wipe_is_learned(
    session: Session, db: Database, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins after it, from nothing."""
    monkeypatch.setattr("app.service.session.UPDATE_SECONDS", 0.0)
    ask(session)
    first, second = (session.say(ME, None, text) for text in ("one", "two"))
    updates = session.answer(ME, first, CHOSEN)
    toy.allow(1)
    next(updates)
    waiting = session.answer(ME, second, CHOSEN)
    next(waiting)
    session.wipe_model(ME)
    toy.allow()
    list(updates)
    assert stored(db) == []
    list(waiting)
    assert session.answered[ME, second].trusted == ()
    rows = ModelNgrams(db, ME, "toy").rows()
    assert stored(db) and rows == past(session).tier.size > 0


def test_only_the_models_thread_touches_what_is_in_memory(session: Session, toy: Held) -> None:
    """What another thread forgets stays for the run that uses it."""
    conversation = session.say(ME, None, "hello there")
    updates = session.answer(ME, conversation, CHOSEN)
    toy.allow(2)
    next(updates)
    used = local(session).loaded.knowledge
    rooms, pasts = dict(used.rooms), dict(used.pasts)
    session.wipe_context(ME, conversation)
    session.wipe_model(ME)
    assert rooms and pasts and (used.rooms, used.pasts) == (rooms, pasts)
    toy.allow()
    list(updates)
    assert not knowledge(session).rooms and not knowledge(session).pasts


def test_trust_that_could_not_be_read_is_not_overwritten(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(session)
    rows = stored(db)

    def locked(*_: object) -> None:
        raise StorageError("strata.db is locked by another program.")

    later = Session(Local(backend=ToyBackend()), db)
    with monkeypatch.context() as patch:
        patch.setattr(CalibrationStore, "load", locked)
        ask(later)
    assert later.take_notices(ME) == ["strata.db is locked by another program."]
    assert stored(db) == rows


def test_damaged_rows_do_not_keep_an_owner_from_chatting(session: Session, db: Database) -> None:
    ask(session)
    with db.write() as handle:
        handle.execute("UPDATE calibrations SET reached = 'many', trusted = -1")
    later = Session(Local(backend=ToyBackend()), db)
    ask(later)
    assert later.take_notices(ME) == [] and stored(db)
