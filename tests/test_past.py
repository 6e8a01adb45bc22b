"""What answers teach: kept per owner and model, wiped as one, never mixed up with a fresh start."""

import threading
from collections.abc import Iterator

import pytest

from app.past import Pasts
from app.preferences import Preferences
from app.session import Session
from engine.backends.toy import ToyBackend
from engine.errors import StorageError
from engine.local import Local
from engine.settings import Generation, Sampling
from engine.types import TrustRow
from storage.calibrations import CalibrationStore
from storage.database import Database
from storage.ngrams import ModelNgrams

ME = "local"
CHOSEN = Preferences(Generation(Sampling(temperature=0.8, seed=3), max_tokens=60), fresh_seed=False)


def stored(db: Database, owner: str = ME) -> list[TrustRow]:
    return CalibrationStore(db, owner, "toy").load()


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
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
    assert sorted(rows) == sorted(session.pasts.of(ME).calibration.rows())
    later = Session(Local(backend=ToyBackend()), db)
    assert sorted(later.pasts.of(ME).calibration.rows()) == sorted(rows)
    ask(later)
    assert sum(row.reached for row in stored(db)) > sum(row.reached for row in rows)


def test_every_conversation_of_an_owner_teaches_one_calibration(session: Session) -> None:
    rooms = [session.room(ME, ask(session)) for _ in range(2)]
    first, second = (room.databases for room in rooms)
    assert first.calibration is second.calibration is session.pasts.of(ME).calibration
    assert first.harvest is not second.harvest


def test_owners_teach_each_other_nothing(session: Session, db: Database) -> None:
    ask(session, "ann")
    assert stored(db, "ann") and not stored(db, "bob")
    assert session.pasts.of("bob").calibration.rows() == []
    assert session.pasts.of("bob").tier.size == 0
    before = stored(db, "ann")
    ask(session, "bob")
    assert stored(db, "ann") == before


def test_plain_answers_teach_nothing_about_the_evidence(session: Session, db: Database) -> None:
    ask(session, method="plain")
    assert stored(db) == []


def test_wiping_the_model_tier_wipes_the_trust(session: Session, db: Database) -> None:
    ask(session)
    session.wipe_model(ME)
    assert stored(db) == [] and ModelNgrams(db, ME, "toy").rows() == 0
    past = session.pasts.of(ME)
    assert past.calibration.rows() == [] and past.tier.size == 0


def test_an_answer_under_way_does_not_bring_back_what_was_wiped(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.session.UPDATE_SECONDS", 0.0)
    ask(session)
    conversation = session.say(ME, None, "something else")
    updates = session.answer(ME, conversation, CHOSEN)
    next(updates)
    session.wipe_model(ME)
    *_, last = updates
    assert last.finish and stored(db) == []
    assert ModelNgrams(db, ME, "toy").rows() == session.pasts.of(ME).tier.size == 0
    ask(session)
    assert stored(db) and ModelNgrams(db, ME, "toy").rows()


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


@pytest.fixture
def pasts(db: Database) -> Iterator[Pasts]:
    yield Pasts(db, "toy", lambda owner, write: write())


def test_one_past_per_owner_whoever_asks_first(pasts: Pasts) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(pasts.of(ME))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(past) for past in found}) == 1
