"""A rewrite is drafted from the text that is rewritten, and is an answer like any other."""

from dataclasses import replace

import pytest

from app.service.answering import Update
from app.service.attachments import Attachment, join
from app.service.comparison import Proof
from app.service.preferences import Preferences
from app.service.session import Session
from engine.errors import StorageError
from engine.settings import Generation, Sampling
from engine.types import PREDICTION
from storage.conversations import Conversations
from storage.database import Database
from tests.support.inside import OWNER, prove, run, updates_of

EXACT = Preferences(Generation(Sampling(temperature=0.0), max_tokens=60), fresh_seed=False)


def answer(session: Session, conversation: str, chosen: Preferences = EXACT) -> Update:
    return run(updates_of(session, OWNER, conversation, chosen))


def rewrites(session: Session, text: str) -> str:
    """A new conversation that asks to rewrite a text."""
    message = join([Attachment("answer.md", text, rewrite=True)], "Say it again.")
    return session.chat.say(OWNER, None, message)


def repeated(session: Session) -> str:
    """What the toy answers to everything."""
    return answer(session, session.chat.say(OWNER, None, "Say it.")).text


def test_a_rewrite_is_drafted_from_the_text_and_is_the_text_of_plain_decoding(
    session: Session,
) -> None:
    text = repeated(session)
    conversation = rewrites(session, text)
    fast = answer(session, conversation)
    assert fast.metrics.accepted[PREDICTION] > 20
    session.chat.again(OWNER, conversation)
    plain = answer(session, conversation, replace(EXACT, method="plain"))
    assert plain.text == fast.text and not plain.metrics.accepted[PREDICTION]
    session.chat.again(OWNER, conversation)
    assert answer(session, conversation).metrics.accepted[PREDICTION], "another version as well"


def test_a_proof_of_a_rewrite_drafts_from_the_text_as_well(session: Session) -> None:
    conversation = rewrites(session, repeated(session))
    answer(session, conversation)
    proof = prove(session, conversation)
    assert isinstance(proof, Proof) and proof.accelerated
    assert proof.verdict and proof.verdict.identical
    assert PREDICTION in {token.source for token in proof.accelerated.tokens}


def test_a_rewrite_may_be_as_long_as_the_text_and_the_limit_together(session: Session) -> None:
    conversation = rewrites(session, "once more " * 20)
    long = replace(EXACT, generation=replace(EXACT.generation, max_tokens=5))
    assert answer(session, conversation, long).metrics.tokens == 105
    assert answer(session, session.chat.say(OWNER, None, "hi"), long).metrics.tokens == 5


def test_a_rewritten_answer_becomes_a_version_of_the_other(session: Session, db: Database) -> None:
    store = session.chat.conversations(OWNER)
    conversation = session.chat.say(OWNER, None, "Say it.")
    original = answer(session, conversation)
    message = join([Attachment("answer.md", original.text, rewrite=True)], "Say it again.")
    session.chat.say(OWNER, conversation, message)
    answer(session, conversation)
    *_, first, _, new = store.messages(conversation)
    store.copy_as_version(conversation, new.id, first.id)
    question, shown = store.messages(conversation)
    assert shown.versions == (first.id, shown.id) and shown.parent == question.id
    assert (shown.content, shown.pieces, shown.run_id) == (new.content, new.pieces, new.run_id)
    store.show(conversation, new.id)
    assert [m.id for m in store.messages(conversation)][1::2] == [first.id, new.id]
    assert session.chat.undo(OWNER, session.chat.delete_message(OWNER, conversation, new.id))
    store.show(conversation, shown.id)
    assert store.messages(conversation)[-1].pieces == new.pieces, "their run is still there"
    with pytest.raises(StorageError, match="no message"):
        store.copy_as_version(conversation, new.id, "another")
    with pytest.raises(StorageError, match="no conversation"):
        Conversations(db, "bob").copy_as_version(conversation, new.id, first.id)
