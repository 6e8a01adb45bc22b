"""An answer that ended early goes on as if it had not, to the token, whatever ended it."""

from collections.abc import Sequence

import pytest

from app.service.preferences import Preferences
from app.service.recorder import Update
from app.service.session import Session
from engine.backends.toy import ToyBackend
from engine.local import Local
from engine.methods import METHODS
from engine.settings import Generation, Sampling
from engine.types import Run
from storage.conversations import StoredMessage, text_of
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import OWNER, Held

LONG = 70
"""Tokens of the whole answers: the toy does not end them earlier with SEED."""
SEED = 5
QUESTION = "tell me a story"
EXACT = [
    name
    for name, method in METHODS.items()
    if method.stack is None and method.drafting.rule == "match"
]


@pytest.fixture
def toy() -> Held:
    return Held()


@pytest.fixture
def session(db: Database, toy: Held) -> Session:
    return Session(Local(backend=toy), db)


def wanted(
    tokens: int = LONG,
    method: str = "hd",
    temperature: float = 0.8,
    stop: Sequence[str] = (),
    seed: int = SEED,
) -> Preferences:
    generation = Generation(Sampling(temperature, seed=seed), max_tokens=tokens, stop=tuple(stop))
    return Preferences(generation, method, METHODS[method].drafting, fresh_seed=False)


def answer(session: Session, conversation: str, how: Preferences) -> Update:
    *_, last = session.answering.answer(OWNER, conversation, how)
    assert isinstance(last, Update)
    return last


def ask(session: Session, how: Preferences) -> tuple[str, Update]:
    conversation = session.chat.say(OWNER, None, QUESTION)
    return conversation, answer(session, conversation, how)


def go_on(session: Session, conversation: str, how: Preferences) -> Update:
    session.chat.go_on(OWNER, conversation)
    return answer(session, conversation, how)


def stored(session: Session, conversation: str) -> tuple[StoredMessage, Run]:
    """The last answer, and its run."""
    message = session.chat.conversations(OWNER).messages(conversation)[-1]
    return message, Traces(session.database, OWNER).load(message.run_id or "")


def in_one(how: Preferences) -> tuple[StoredMessage, Run]:
    """What one run says that nothing interrupts."""
    with Database() as db:
        session = Session(Local(backend=ToyBackend()), db)
        return stored(session, ask(session, how)[0])


def same(session: Session, conversation: str, how: Preferences) -> Run:
    """Demand that an answer in parts is the one that no interruption cut."""
    message, run = stored(session, conversation)
    expected, whole = in_one(how)
    ids = [(token.id, token.position, token.text) for token in run.tokens]
    assert ids == [(token.id, token.position, token.text) for token in whole.tokens]
    assert message.content == expected.content == text_of(message.pieces or ())
    assert [step.index for step in run.steps] == list(range(len(run.steps)))
    assert run.finish == whole.finish and [s.finish for s in run.steps[:-1] if s.finish] == []
    assert [piece.step for piece in message.pieces or ()] == [
        step.index for step in run.steps for _ in step.tokens
    ]
    return run


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_an_answer_in_parts_is_the_one_that_nothing_interrupts(
    session: Session, method: str, temperature: float
) -> None:
    cuts = [1, 7, 9, 3, 20]
    conversation, _ = ask(session, wanted(cuts[0], method, temperature))
    for at, cut in enumerate(cuts[1:], 1):
        if stored(session, conversation)[1].finish == "eos":
            break
        go_on(session, conversation, wanted(cut, method, temperature))
        same(session, conversation, wanted(sum(cuts[: at + 1]), method, temperature))
    assert len(session.chat.conversations(OWNER).messages(conversation)) == 2


@pytest.mark.parametrize("cut", range(1, LONG, 3))
def test_it_may_be_cut_anywhere_in_characters_and_stop_strings(session: Session, cut: int) -> None:
    """At T = 1.5 the toy says halves of characters; one of its own words is the stop string."""
    _, free = in_one(wanted(temperature=1.5))
    text = "".join(token.text for token in free.tokens)
    stop = [text[40:46], text[5:9] + "never"]
    whole = in_one(wanted(temperature=1.5, stop=stop))[1]
    assert whole.finish == "stop" and len(whole.tokens) > 20
    if cut >= len(whole.tokens):
        return
    conversation, first = ask(session, wanted(cut, temperature=1.5, stop=stop))
    assert first.finish == "length"
    go_on(session, conversation, wanted(LONG, temperature=1.5, stop=stop))
    same(session, conversation, wanted(temperature=1.5, stop=stop))
