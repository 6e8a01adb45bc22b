"""An answer that ended early goes on as if it had not, to the token, whatever ended it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.service.answering import Update
from app.service.comparison import Proof
from app.service.preferences import Preferences
from app.service.session import Session
from engine.engine import Load
from engine.errors import Cancelled, EngineDied, ModelError, PromptError
from engine.local import Local
from engine.methods import METHODS
from engine.metrics import summarise
from engine.models.loaders import ModelLoaders
from engine.queue import Waiting
from engine.settings import MOST_TOKENS, Generation, Sampling
from engine.types import Run
from storage import imports
from storage.conversations import Piece, StoredMessage, text_of
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import OWNER, Held, answer, on_toy, prove, updates_of
from tests.support.toy import ToyBackend, deviating

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
    return Held(guesses=deviating(0.5))


def wanted(
    tokens: int = LONG,
    method: str = "hd",
    temperature: float = 0.8,
    stop: Sequence[str] = (),
    seed: int = SEED,
) -> Preferences:
    generation = Generation(Sampling(temperature, seed=seed), max_tokens=tokens, stop=tuple(stop))
    return Preferences(generation, method, METHODS[method].drafting, fresh_seed=False)


def ask(session: Session, how: Preferences) -> tuple[str, Update]:
    conversation = session.chat.say(OWNER, None, QUESTION)
    return conversation, answer(session, conversation, how)


def go_on(session: Session, conversation: str, how: Preferences) -> Update:
    session.chat.continue_answer(OWNER, conversation)
    return answer(session, conversation, how)


def stored(session: Session, conversation: str) -> tuple[StoredMessage, Run]:
    """The last answer, and its run."""
    message = session.chat.conversations(OWNER).messages(conversation)[-1]
    return message, Traces(session.database, OWNER).load(message.run_id or "")


def in_one(how: Preferences) -> tuple[StoredMessage, Run]:
    """What one run says that nothing interrupts."""
    with Database() as db:
        session = Session(Local(backend=ToyBackend(guesses=deviating(0.5))), db)
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


@pytest.mark.soak(stay=5)
@pytest.mark.grid(1)
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


STOPS = 1.5
"""The temperature at which the toy says halves of characters."""


def test_it_may_be_cut_anywhere_in_characters_and_stop_strings(session: Session) -> None:
    """Some of its own words are the stop strings: one comes true, the other only begins."""
    free = in_one(wanted(temperature=STOPS))[1]
    text = "".join(token.text for token in free.tokens)
    stop = [text[40:46], text[5:9] + "never"]
    whole = in_one(wanted(temperature=STOPS, stop=stop))[1]
    assert whole.finish == "stop" and "\ufffd" in text and len(whole.tokens) > 40
    for cut in range(1, len(whole.tokens) - 1, 2):
        conversation, first = ask(session, wanted(cut, temperature=STOPS, stop=stop))
        assert first.finish == "length"
        go_on(session, conversation, wanted(LONG, temperature=STOPS, stop=stop))
        same(session, conversation, wanted(temperature=STOPS, stop=stop))


def stopped(session: Session, toy: Held, forwards: int, how: Preferences) -> str:
    """A conversation whose answer was stopped after so many forwards."""
    conversation = session.chat.say(OWNER, None, QUESTION)
    toy.allow(forwards)
    updates = updates_of(session, OWNER, conversation, how)
    for update in updates:
        if isinstance(update, Update) and update.forwards == forwards:
            session.tasks.stop(OWNER, conversation)
            toy.allow()
    return conversation


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("again", [False, True])
def test_a_stopped_answer_continues_also_after_a_restart(
    session: Session, db: Database, toy: Held, again: bool
) -> None:
    how = wanted(method="plain", temperature=STOPS)
    conversation = stopped(session, toy, 8, how)
    before = stored(session, conversation)
    assert before[1].finish == "cancelled" and before[0].content.endswith("\ufffd")
    later = on_toy(db) if again else session
    later.chat.continue_answer(OWNER, conversation)
    updates = list(updates_of(later, OWNER, conversation, wanted(61, "plain", STOPS)))
    run = same(later, conversation, how)
    shown = [update for update in updates if isinstance(update, Update)]
    assert all(update.tokens >= 9 for update in shown), "its beginning is shown at once"
    assert [update.text for update in shown][-1] == stored(later, conversation)[0].content
    assert len(run.parts) == 1 and run.parts[0].step == len(before[1].steps)


def test_the_pause_counts_for_nothing(session: Session) -> None:
    conversation, _ = ask(session, wanted(20))
    go_on(session, conversation, wanted(30))
    run = stored(session, conversation)[1]
    figures, trace = summarise(run), Traces(session.database, OWNER).history()[0]
    (part,) = run.parts
    assert figures.resumed_seconds == part.prefill.seconds > 0
    assert part.prefill.tokens == (run.prefill.tokens if run.prefill else 0) + 20
    assert figures.tokens == trace.emitted_tokens == 50
    assert figures.forwards == trace.forwards == len(run.steps)
    assert figures.decode_seconds == pytest.approx(sum(step.seconds for step in run.steps))
    assert trace.decode_seconds == pytest.approx(figures.decode_seconds)
    assert run.prefill is not None and figures.prefill_seconds == run.prefill.seconds
    first = figures.prefill_seconds + run.steps[0].seconds
    assert figures.ttft_seconds == pytest.approx(first)
    live = session.history.last[OWNER, conversation].run
    assert live.steps == run.steps and summarise(live) == figures
    seconds = figures.prefill_seconds + figures.decode_seconds + figures.learning_seconds
    assert figures.seconds == pytest.approx(seconds)
    assert len(Traces(session.database, OWNER).history()) == 1, "it is one run"


def test_all_of_it_can_be_proved(session: Session) -> None:
    conversation, _ = ask(session, wanted(20))
    go_on(session, conversation, wanted(30))
    proof = prove(session, conversation)
    assert isinstance(proof, Proof) and proof.verdict is not None
    assert proof.verdict.identical and proof.verdict.tokens == 50 and proof.same_text


def test_it_continues_with_the_largest_limit(session: Session) -> None:
    conversation, first = ask(session, wanted(20))
    more = go_on(session, conversation, wanted(MOST_TOKENS, stop=["e", "a", " "]))
    assert more.text.startswith(first.text) and session.history.last[OWNER, conversation]


def test_a_seed_that_nobody_chose_stays(session: Session) -> None:
    conversation, _ = ask(session, wanted(20))
    seen = go_on(session, conversation, replace(wanted(30, seed=99), fresh_seed=True)).seed
    assert seen == SEED
    same(session, conversation, wanted(50))


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"seed": 99}, {"stop": ["never said"]}])
def test_other_settings_are_reported_and_leave_nothing_to_prove(
    session: Session, change: dict[str, object]
) -> None:
    conversation, first = ask(session, wanted(20))
    go_on(session, conversation, wanted(30, **change))  # type: ignore[arg-type]
    message, run = stored(session, conversation)
    assert message.content.startswith(first.text) and len(run.tokens) == 50
    ((part,), made) = run.parts, run.settings["generation"]
    differ = {
        name
        for name in ("temperature", "seed")
        if part.settings["generation"]["sampling"][name] != made["sampling"][name]
    }
    differ |= {"stop"} if part.settings["generation"]["stop"] != made["stop"] else set()
    assert differ == {*change}
    with pytest.raises(PromptError, match="no single run can prove it"):
        list(session.proofs.prove(OWNER, conversation))
    session.chat.again(OWNER, conversation)
    answer(session, conversation, wanted(20))
    proof = prove(session, conversation)
    assert proof.verdict and proof.verdict.identical


def other(session: Session, name: str = "other") -> None:
    list(session.engine.load(Load(name)))


@pytest.fixture
def swapping(db: Database, toy: Held) -> Session:
    """A session whose other models are like the toy, but say something else."""
    loaders = ModelLoaders(
        load=lambda source, runtime: (
            toy if source == "toy" else ToyBackend(name=source, logits=deviating(2.0))
        )
    )
    return on_toy(db, toy, loaders=loaders)


def test_another_model_continues_from_the_text_and_then_to_the_token(swapping: Session) -> None:
    conversation, first = ask(swapping, wanted(20, temperature=STOPS))
    other(swapping)
    copy = swapping.chat.conversations(OWNER).copy(
        conversation, stored(swapping, conversation)[0].id
    )
    go_on(swapping, copy, wanted(30, temperature=STOPS))
    expected, whole = stored(swapping, copy)
    assert expected.content.startswith(first.text) and len(whole.tokens) == 50
    for tokens in (11, 19):
        go_on(swapping, conversation, wanted(tokens, temperature=STOPS))
    message, run = stored(swapping, conversation)
    assert message.content == expected.content == text_of(message.pieces or ())
    assert [part.fingerprint for part in run.parts] == ["other", "other"]
    assert [part.step for part in run.parts] == sorted(part.step for part in run.parts)
    with pytest.raises(PromptError, match="no single run can prove it"):
        list(swapping.proofs.prove(OWNER, conversation))
    other(swapping, "toy")
    go_on(swapping, conversation, wanted(5, temperature=STOPS))
    message, run = stored(swapping, conversation)
    assert message.content.startswith(expected.content) and len(run.tokens) == 55
    assert text_of(message.pieces or ()) == message.content


def test_another_model_that_comes_meanwhile_reads_no_tokens_of_the_first(
    swapping: Session, toy: Held
) -> None:
    conversation, _ = ask(swapping, wanted(20))
    before = stored(swapping, conversation)
    toy.allow(1)
    waits = swapping.chat.say(OWNER, None, "something else")
    first = updates_of(swapping, OWNER, waits, wanted())
    assert isinstance(next(first), Update)
    swapping.chat.continue_answer(OWNER, conversation)
    second = updates_of(swapping, OWNER, conversation, wanted())
    assert next(second) == Waiting(1)
    loading = swapping.engine.load(Load("other"))
    toy.allow()
    list(first)
    list(loading)
    with pytest.raises(ModelError, match="Another model was loaded meanwhile"):
        list(second)
    assert stored(swapping, conversation) == before


def test_an_imported_answer_continues_from_its_text(session: Session) -> None:
    pieces = [["Once", "model", 2, 0, 7, 0.5], [" upon", "target", 0, 1, 8, 1.0]]
    for own in (None, pieces):
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "Once upon", "pieces": own},
        ]
        export = imports.read(
            {"format": "strata-conversation", "version": 1, "title": "t", "messages": messages}
        )
        (conversation,) = session.chat.conversations(OWNER).import_([export])
        first = go_on(session, conversation, wanted(12))
        message, run = stored(session, conversation)
        assert message.content == first.text and len(run.tokens) == 12
        assert message.content == "Once upon" + "".join(token.text for token in run.tokens)
        head = [Piece(*row) for row in own or [("Once upon", "target", 0, 0, 0, 0.0)]]
        assert list(message.pieces or ())[: len(head)] == head
        assert text_of(message.pieces or ()) == message.content
        go_on(session, conversation, wanted(18))
        parts = stored(session, conversation)
        assert [t.id for t in parts[1].tokens] == [t.id for t in in_one_import(own).tokens]
        data = session.chat.conversations(OWNER).export(conversation)
        (copy,) = session.chat.conversations(OWNER).import_([imports.read(data)])
        assert session.chat.conversations(OWNER).messages(copy)[-1].pieces == parts[0].pieces


def in_one_import(own: object) -> Run:
    """What one run says behind the imported beginning."""
    with Database() as db:
        session = on_toy(db)
        store = session.chat.conversations(OWNER)
        conversation = store.create().id
        store.append(conversation, "user", QUESTION)
        store.append(conversation, "assistant", "Once upon")
        go_on(session, conversation, wanted(30))
        return stored(session, conversation)[1]


def test_a_branch_continues_without_its_original(session: Session) -> None:
    conversation, _ = ask(session, wanted(20))
    before = stored(session, conversation)
    copy = session.chat.conversations(OWNER).copy(conversation, before[0].id)
    go_on(session, copy, wanted(30))
    same(session, copy, wanted(50))
    assert stored(session, conversation) == before
    go_on(session, conversation, wanted(10))
    same(session, conversation, wanted(30))
    same(session, copy, wanted(50))


@pytest.mark.parametrize("lost", ["prompt", "steps"])
def test_what_is_lost_of_it_costs_the_exactness_only(
    session: Session, db: Database, lost: str
) -> None:
    conversation, first = ask(session, wanted(20))
    damage = {
        "prompt": "DELETE FROM prompts",
        "steps": "UPDATE steps SET tokens = '[7' WHERE position = 0",
    }
    with db.write() as handle:
        handle.execute(damage[lost])
    go_on(session, conversation, wanted(30))
    message = session.chat.conversations(OWNER).messages(conversation)[-1]
    assert message.content.startswith(first.text) and len(message.content) > len(first.text)
    assert text_of(message.pieces or ()) == message.content
    with pytest.raises(PromptError, match="no single run can prove it"):
        list(session.proofs.prove(OWNER, conversation))
    if lost == "prompt":  # The toy's prompt is the same however it came about.
        same(session, conversation, wanted(50))
    go_on(session, conversation, wanted(5))
    assert len(stored(session, conversation)[1].parts) == (2 if lost == "prompt" else 1)


def test_only_the_newest_prompts_are_kept(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traces, "PROMPTS", 3)
    for _ in range(5):
        conversation, _ = ask(session, wanted(4))
    theirs = session.chat.say("guest:x", None, QUESTION)
    *_, _ = updates_of(session, "guest:x", theirs, wanted(4))
    rows = db.execute_read("SELECT run, position, length(tokens) / 4 FROM prompts")
    message, run = stored(session, conversation)
    assert len(rows) == 4 and run.prefill is not None
    assert (message.run_id, 0, run.prefill.tokens) in rows


def test_what_cannot_go_on_is_refused_and_left_as_it_is(session: Session, db: Database) -> None:
    store = session.chat.conversations(OWNER)
    with pytest.raises(PromptError, match="no message to answer yet"):
        session.chat.continue_answer(OWNER, store.create().id)
    ended = session.chat.say(OWNER, None, "hello")
    assert answer(session, ended, wanted(4000, temperature=STOPS)).finish == "eos"
    with pytest.raises(PromptError, match="The model ended this answer"):
        session.chat.continue_answer(OWNER, ended)
    small = on_toy(db, ToyBackend(context_length=64))
    conversation, full = ask(small, wanted(4000, temperature=0.0))
    assert full.finish == "context"
    before = stored(small, conversation)
    with pytest.raises(PromptError, match="The answer cannot be continued: .* reads at most 64"):
        go_on(small, conversation, wanted())
    assert stored(small, conversation) == before
    with db.write() as handle:
        handle.execute("UPDATE runs SET fingerprint = (SELECT max(id) FROM fingerprints)")
    with pytest.raises(PromptError, match="The answer cannot be continued: .* reads at most 64"):
        go_on(small, conversation, wanted())


@pytest.mark.usefixtures("each_step")
def test_one_that_is_stopped_before_more_of_it_comes_is_left_as_it_is(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = wanted(method="plain", temperature=STOPS)
    conversation = stopped(session, toy, 8, how)
    before = stored(session, conversation)
    proof = session.history.last[OWNER, conversation]
    session.chat.continue_answer(OWNER, conversation)
    session.tasks.stop(OWNER, conversation)
    with pytest.raises(Cancelled):
        answer(session, conversation, how)
    score = Held.score

    def cancelled(self: Held, *arguments: object, **named: object) -> object:
        raise EngineDied("The engine ended.")

    monkeypatch.setattr("app.service.revival.PATIENCE", 0.0)
    monkeypatch.setattr(Held, "score", cancelled)
    session.chat.continue_answer(OWNER, conversation)
    with pytest.raises(EngineDied):
        answer(session, conversation, how)
    assert stored(session, conversation) == before
    assert session.history.last[OWNER, conversation] is proof
    monkeypatch.setattr(Held, "score", score)
    go_on(session, conversation, wanted(61, "plain", STOPS))
    same(session, conversation, how)


def test_what_another_cut_leaves_continues_as_well(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends in the second part, after some of it was said."""
    monkeypatch.setattr("app.service.revival.PATIENCE", 0.0)
    conversation, _ = ask(session, wanted(20, "plain"))
    score, left = Held.score, [15]

    def dying(self: Held, *arguments: object, **named: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise EngineDied("The engine ended.")
        return score(self, *arguments, **named)

    monkeypatch.setattr(Held, "score", dying)
    session.chat.continue_answer(OWNER, conversation)
    with pytest.raises(EngineDied):
        answer(session, conversation, wanted(50, "plain"))
    monkeypatch.setattr(Held, "score", score)
    run = stored(session, conversation)[1]
    assert run.finish is None and len(run.tokens) == 34 and len(run.parts) == 1
    go_on(session, conversation, wanted(36, "plain"))
    assert len(same(session, conversation, wanted(70, "plain")).parts) == 2


def test_a_question_without_an_answer_is_answered(session: Session) -> None:
    conversation = session.chat.say(OWNER, None, QUESTION)
    go_on(session, conversation, wanted(20))
    same(session, conversation, wanted(20))
