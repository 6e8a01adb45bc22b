"""What answers teach: kept per owner and model, wiped as one, never mixed up with a fresh start."""

from dataclasses import replace

import pytest

from app.service.answering import Update
from app.service.preferences import Preferences
from app.service.session import Session
from engine.metrics import summarise
from engine.settings import Generation, Sampling
from engine.types import CalibrationRow, Past
from storage.database import Database
from storage.drafting import CalibrationStore, DraftingStore
from storage.ngrams import ModelNgrams
from tests.support.inside import (
    FULL,
    OWNER,
    Held,
    failing,
    local,
    memory,
    on_toy,
    past_answers,
    under_way,
    updates_of,
)
from tests.support.inside import ask as answered

CHOSEN = Preferences(Generation(Sampling(temperature=0.8, seed=3), max_tokens=60), fresh_seed=False)


def stored(db: Database, owner: str = OWNER) -> list[CalibrationRow]:
    return CalibrationStore(db, owner, "toy").load()


def ask(session: Session, owner: str = OWNER, method: str = "hd") -> str:
    return answered(session, chosen=replace(CHOSEN, method=method), owner=owner)[0]


def test_trust_is_stored_after_an_answer_and_there_after_a_restart(
    session: Session, db: Database
) -> None:
    ask(session)
    rows = stored(db)
    assert "context" in {row.tier for row in rows}
    assert sorted(rows) == sorted(past_answers(session).calibration.rows())
    later = on_toy(db)
    conversation = ask(later)
    assert sorted(later.history.last[OWNER, conversation].calibration) == sorted(rows)
    assert sum(row.reached for row in stored(db)) > sum(row.reached for row in rows)


def test_owners_teach_each_other_nothing(session: Session, db: Database) -> None:
    ask(session, "ann")
    assert stored(db, "ann") and not stored(db, "bob")
    before, known = stored(db, "ann"), past_answers(session, "ann").tier.size
    conversation = ask(session, "bob")
    assert session.history.last["bob", conversation].calibration == ()
    assert stored(db, "ann") == before
    assert past_answers(session, "ann").tier.size == known
    assert past_answers(session, "bob").tier.size == ModelNgrams(db, "bob", "toy").rows()


def test_plain_answers_teach_nothing_about_the_evidence(session: Session, db: Database) -> None:
    ask(session, method="plain")
    assert stored(db) == []


def test_wiping_the_model_tier_wipes_the_trust(session: Session, db: Database) -> None:
    ask(session)
    session.past_answers.wipe(OWNER, session.current.info.fingerprint)
    assert stored(db) == [] and ModelNgrams(db, OWNER, "toy").rows() == 0
    assert not memory(session).past_answers and not memory(session).conversations
    conversation = ask(session)
    answer = session.history.last[OWNER, conversation]
    assert answer.calibration == () and not summarise(answer.run).accepted.get("model")
    assert past_answers(session).tier.size == ModelNgrams(db, OWNER, "toy").rows()


def wiped(session: Session, db: Database) -> bool:
    """Whether nothing of the owner's is left, stored or in memory."""
    rows = ModelNgrams(db, OWNER, "toy").rows()
    return not (stored(db) or rows or memory(session).past_answers or memory(session).conversations)


def test_a_wipe_just_after_the_past_was_read_leaves_nothing_of_it(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(session)
    later = on_toy(db)
    past = DraftingStore.past

    def wiping(store: DraftingStore, owner: str, fingerprint: str) -> Past:
        found = past(store, owner, fingerprint)
        later.past_answers.wipe(OWNER, later.current.info.fingerprint)
        assert found.grams and found.rows
        return found

    monkeypatch.setattr(DraftingStore, "past", wiping)
    ask(later)
    assert wiped(later, db)


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("imports", [False, True])
def test_an_answer_under_way_adds_nothing_after_a_wipe(
    session: Session, db: Database, toy: Held, imports: bool
) -> None:
    """Nor to what is imported then."""
    ask(session)
    info, store = session.current.info, session.past_answers
    file, known = store.saved(OWNER, info), ModelNgrams(db, OWNER, "toy").load()
    conversation, updates = under_way(session, toy, "something else", CHOSEN)
    store.wipe(OWNER, info.fingerprint)
    if imports:
        store.take_in(OWNER, info, file.encode())
    toy.allow()
    *_, last = updates
    assert isinstance(last, Update) and last.finish
    assert ModelNgrams(db, OWNER, "toy").load() == (known if imports else []) and known
    assert not (stored(db) or memory(session).past_answers)
    assert imports or not memory(session).conversations
    ask(session)
    assert stored(db) and past_answers(session).tier.size > 0


@pytest.mark.usefixtures("each_step")
def test_an_answer_adds_to_what_is_imported_meanwhile(
    session: Session, db: Database, toy: Held
) -> None:
    ask(session, "ann")
    info, store = session.current.info, session.past_answers
    file = store.saved("ann", info).encode()
    conversation, updates = under_way(session, toy, "something else", CHOSEN)
    store.take_in(OWNER, info, file)
    toy.allow()
    list(updates)
    told = {gram.tokens for gram in ModelNgrams(db, OWNER, "toy").load()}
    assert told > {gram.tokens for gram in ModelNgrams(db, "ann", "toy").load()}
    assert stored(db) and OWNER not in memory(session).past_answers, "all of it is read again"


def test_a_conversation_that_is_deleted_meanwhile_leaves_no_log(
    session: Session, db: Database, toy: Held
) -> None:
    conversation, updates = under_way(session, toy, "hello there", CHOSEN, 2)
    session.chat.conversations(OWNER).delete(conversation)
    toy.allow()
    list(updates)
    assert not db.execute_read("SELECT * FROM contexts")
    assert ModelNgrams(db, OWNER, "toy").rows()


@pytest.mark.usefixtures("each_step")
def test_an_answer_that_waited_through_a_wipe_is_learned(
    session: Session, db: Database, toy: Held
) -> None:
    """It begins after it, from nothing."""
    ask(session)
    _, updates = under_way(session, toy, "one", CHOSEN)
    second = session.chat.say(OWNER, None, "two")
    waiting = updates_of(session, OWNER, second, CHOSEN)
    next(waiting)
    session.past_answers.wipe(OWNER, session.current.info.fingerprint)
    toy.allow()
    list(updates)
    list(waiting)
    assert session.history.last[OWNER, second].calibration == ()
    rows = ModelNgrams(db, OWNER, "toy").rows()
    assert stored(db) and rows == past_answers(session).tier.size > 0


def test_only_the_models_thread_touches_what_is_in_memory(session: Session, toy: Held) -> None:
    """What another thread forgets stays for the run that uses it."""
    conversation, updates = under_way(session, toy, "hello there", CHOSEN, 2)
    used = local(session).loaded.memory
    rooms, pasts = dict(used.conversations), dict(used.past_answers)
    session.chat.wipe_context(OWNER, conversation)
    session.past_answers.wipe(OWNER, session.current.info.fingerprint)
    assert rooms and pasts and (used.conversations, used.past_answers) == (rooms, pasts)
    toy.allow()
    list(updates)
    assert not memory(session).conversations and not memory(session).past_answers


def test_trust_that_could_not_be_read_is_not_overwritten(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(session)
    rows = stored(db)
    later = on_toy(db)
    with monkeypatch.context() as patch:
        patch.setattr(CalibrationStore, "load", failing(FULL))
        ask(later)
    assert later.notices.take(OWNER) == [str(FULL)]
    assert stored(db) == rows
