"""Long copies from other conversations: they are drafted, also after a restart, and never from what
was deleted, wiped or is being measured."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from app.service.comparison import Progress
from app.service.jobs import Task
from app.service.preferences import Preferences
from app.service.session import Session
from engine.drafting.tiers import ModelTier
from engine.settings import Generation, Sampling
from engine.types import MODEL, Run
from storage.database import Database
from storage.drafting import ContextStore, TextStore
from tests.support.inside import OWNER, on_toy, past_answers
from tests.support.inside import ask as answered

CHOSEN = Preferences(Generation(Sampling(temperature=0.8, seed=3), max_tokens=80), fresh_seed=False)
OTHER = replace(CHOSEN, generation=Generation(Sampling(temperature=0.8, seed=4), max_tokens=80))


def ask(session: Session, owner: str = OWNER, chosen: Preferences = CHOSEN) -> str:
    text = "tell me a story of a boat" if chosen is CHOSEN else "bread is dear this year"
    return answered(session, text, chosen=chosen, owner=owner)[0]


def copied(run: Run) -> int:
    """How many tokens were drafted from long matches in other conversations."""
    return sum(token.source == MODEL and token.match_length >= 8 for token in run.tokens)


def answer(session: Session, owner: str = OWNER) -> Run:
    return session.history.last[owner, ask(session, owner)].run


def test_another_conversation_is_copied(session: Session, db: Database) -> None:
    assert not copied(answer(session))
    again = answer(session)
    assert copied(again) > 40 and {16, 32, 64} <= {token.match_length for token in again.tokens}
    later = on_toy(db)
    assert copied(answer(later)) > 40, "after a restart"
    assert not copied(answer(later, "bob")), "nobody else's"


def delete(session: Session, conversation: str) -> None:
    session.chat.delete(OWNER, conversation)


def wipe(session: Session, conversation: str) -> None:
    session.past_answers.wipe(OWNER, session.current.info.fingerprint)


def clear(session: Session, conversation: str) -> None:
    session.chat.wipe_context(OWNER, conversation)


@pytest.mark.parametrize("how", [delete, wipe, clear])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_gone_is_never_copied_again(
    session: Session, db: Database, how: Callable[[Session, str], None], restarted: bool
) -> None:
    how(session, ask(session))
    if restarted:
        session = on_toy(db)
    assert not copied(answer(session))
    assert copied(answer(session)), "but what was said since"


def test_a_measured_tier_knows_what_did_not_answer_the_same() -> None:
    tier, asked, answer, other = ModelTier(), range(100, 140), range(40), range(200, 260)
    for name, tokens in (("a", [*asked, *answer]), ("b", other), ("c", [*other[:9], *answer])):
        tier.texts.read(name, tokens)
    answered, later = tuple(answer)[:30], tuple(other)[:30]
    assert len(tier.without((), 0).matches(answered)) == len(tier.matches(answered)) == 9
    measured = tier.without((), 0, "", asked)
    assert len(measured.matches(later)) == 9, "another text"
    assert len(measured.matches(answered)) == 9, "an answer to something else"
    assert not tier.without((), 0, "c", asked).matches(answered)
    assert len(tier.without((), 0, "c", asked).matches(later)) == 9


def test_a_proof_does_not_know_the_conversation(session: Session) -> None:
    def rerun() -> Run:
        answered = session.history.last[OWNER, conversation]
        reruns = session.proofs.reruns(OWNER, answered, Task(OWNER))
        found = (item.pairs for item in reruns if isinstance(item, Progress) and item.pairs)
        return next(found)[-1][1]

    conversation = ask(session)
    assert not copied(rerun())
    ask(session)
    assert not copied(rerun()), "nor another one that answered the same"


def test_the_texts_of_an_owner_are_stored_once(session: Session, db: Database) -> None:
    one, two = ask(session), ask(session, chosen=OTHER)
    texts = TextStore(db, OWNER, "bytes").load()
    log = ContextStore(db, OWNER)
    assert [name for name, _ in texts] == [one, two]
    assert [list(tokens) for _, tokens in texts] == [log.load(one, "bytes"), log.load(two, "bytes")]
    held = past_answers(session).tier.texts
    assert {
        name: sum(end - start for start, end in parts) for name, parts in held.parts.items()
    } == {name: len(tokens) for name, tokens in texts}


def test_a_place_is_found_where_it_is(db: Database, session: Session) -> None:
    one, two = ask(session), ask(session, chosen=OTHER)
    tokens = ContextStore(db, OWNER).load(two, "bytes")
    texts = TextStore(db, OWNER, "bytes")
    assert texts.place(tokens[-30:], one) == (two, session.chat.conversations(OWNER).get(two).title)
    assert texts.place(tokens[-30:], two) is None
    assert texts.place([*tokens[-30:], 999], one) is None
    assert TextStore(db, "bob", "bytes").place(tokens[-30:], one) is None
    assert TextStore(db, OWNER, "other").place(tokens[-30:], one) is None


def test_the_oldest_texts_are_neither_loaded_nor_searched(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [ask(session, chosen=chosen) for chosen in (OTHER, CHOSEN, CHOSEN, CHOSEN)]
    texts = TextStore(db, OWNER, "bytes")
    oldest = ContextStore(db, OWNER).load(names[0], "bytes")[-30:]
    assert texts.place(oldest, "")
    monkeypatch.setattr(TextStore, "CAP", 1)
    assert [name for name, _ in texts.load()] == names[-1:]
    assert texts.place(oldest, "") is None
