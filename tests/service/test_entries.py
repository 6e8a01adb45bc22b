"""What the databases hold for some words, and what each brought; what was learned as a file."""

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from app.service.databases import Hit
from app.service.session import Session
from engine.errors import StorageError
from engine.local import Local
from engine.metrics import summarise
from engine.types import CONTEXT, MODEL, STATISTICS
from storage import steps
from storage.database import Database
from storage.drafting import ContextStore, DraftingStore
from storage.ngrams import Pruning
from storage.statistics import SUFFIX, open_table
from storage.statistics_build import build
from storage.traces import Traces
from tests.support.inside import OWNER, ask, forgotten, past_answers, swap
from tests.support.toy import ToyBackend


@pytest.fixture
def session(db: Database, tmp_path: Path) -> Session:
    general = np.frombuffer(b"the cat and the cat and the dog and the dog" * 4, dtype=np.uint8)
    path = tmp_path / f"bytes{SUFFIX}"
    build([general.astype(np.uint32)], path, "bytes", 260, "toy", 1 << 20)
    opened = partial(open_table, [tmp_path])
    engine = Local(opened, store=DraftingStore(db))
    session = Session(engine, db, folders=[tmp_path])
    swap(session, ToyBackend(), "/m/toy")
    return session


def learn(session: Session, *texts: bytes, owner: str = OWNER) -> None:
    store = session.past_answers.ngrams(owner, "toy")
    for text in texts:
        store.learn([tuple(text[at : at + 5]) for at in range(len(text) - 4)])


def test_words_are_found_by_their_longest_known_end(session: Session, db: Database) -> None:
    conversation = session.chat.conversations(OWNER).create().id
    ContextStore(db, OWNER).append(conversation, "bytes", tuple(b"see the cow, see the cot"))
    learn(session, b"in the car", b"on the cap", b"by the car")
    learn(session, b"of the cab", owner="somebody else")
    found = session.entries.find(OWNER, conversation, "See the c")
    context, model, statistics = (found[name] for name in (CONTEXT, MODEL, STATISTICS))
    assert (context.matched, context.key) == (8, "ee the c")
    assert [(e.text, e.count, e.share) for e in context.entries] == [("o", 2, 1.0)]
    assert (model.matched, model.key) == (4, "he c")
    assert [(e.text, e.count) for e in model.entries] == [("a", 3)]
    assert (statistics.matched, statistics.entries[0].text) == (3, "a")
    assert 0.9 < statistics.entries[0].share <= 1


def test_a_word_is_found_after_a_space_as_well(session: Session) -> None:
    learn(session, b"so: cats")
    assert session.entries.find(OWNER, None, "cat")[MODEL].key == " cat"
    assert session.entries.find(OWNER, None, "zzz") == {
        CONTEXT: Hit(), MODEL: Hit(), STATISTICS: Hit(),
    }  # fmt: skip
    with pytest.raises(StorageError, match="nothing to look up"):
        session.entries.find(OWNER, None, "  ")


def test_hostile_words_are_words(session: Session) -> None:
    evil = "'; DROP TABLE ngrams; -- <img src=x onerror=alert(1)>"
    learn(session, evil.encode())
    found = session.entries.find(OWNER, None, evil[:-1])[MODEL]
    assert (found.key, [e.text for e in found.entries]) == ("t(1)", [">"])


def test_what_each_contributed_is_the_sum_over_the_latest_answers(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("one", "two", "three"):
        ask(session, text)
    ask(session, "plainly", "plain")
    store = Traces(db, OWNER)
    runs = [store.load(trace.id) for trace in store.page() if trace.method != "plain"]
    found, sums = session.entries.contributions(OWNER), [summarise(run) for run in runs]
    assert found.runs == 3 and found.tokens == Counter(
        token.source for run in runs for token in run.tokens
    )
    assert +found.drafted == sum((Counter(each.proposed) for each in sums), Counter())
    assert +found.accepted == sum((Counter(each.accepted) for each in sums), Counter())
    known = [s for run in runs for s in run.steps if s.tokens and s.plain_seconds is not None]
    assert found.timed == sum(len(step.tokens) for step in known)
    assert found.plain == pytest.approx(sum(step.plain_seconds or 0 for step in known))
    assert found.spent == pytest.approx(sum(step.seconds for step in known))
    monkeypatch.setattr(steps, "MOST_STEPS", 1)
    assert session.entries.contributions(OWNER).runs == 1, "the last answer always counts"
    nobody = session.entries.contributions("somebody else")
    assert (nobody.runs, nobody.tokens, nobody.timed) == (0, Counter(), 0)


def test_past_answers_go_into_a_file_and_come_back(session: Session) -> None:
    info = session.current.info
    ask(session, "hello there")
    before = sorted(session.past_answers.ngrams(OWNER, "toy").load())
    saved = session.past_answers.saved(OWNER, info).encode()
    session.past_answers.wipe(OWNER, "toy")
    assert session.past_answers.ngrams(OWNER, "toy").rows() == 0
    assert session.past_answers.take_in(OWNER, info, saved) == len(before)
    assert sorted(session.past_answers.ngrams(OWNER, "toy").load()) == before
    ask(session, "hello there")
    assert past_answers(session).tier.size >= len(before), "and the next answer drafts from it"
    with pytest.raises(StorageError, match="no readable JSON"):
        session.past_answers.take_in(OWNER, info, saved[:-9])
    assert session.past_answers.ngrams("somebody else", "toy").rows() == 0


def test_pruned_n_grams_are_forgotten_by_the_engine_as_well(session: Session) -> None:
    ask(session, "hello there")
    known = past_answers(session).tier.size
    assert session.past_answers.drop(OWNER, "toy", Pruning(documents=2)) == known > 0
    forgotten(session)
    assert session.past_answers.ngrams(OWNER, "toy").rows() == 0
