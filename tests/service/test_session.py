"""The session: what it stores, whose it is, and that no helper can change an answer."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import Any, cast

import pytest

from app.service.answering import Update
from app.service.comparison import Progress, Proof
from app.service.history import FinishedAnswer
from app.service.preferences import Preferences
from app.service.proofs import FEWEST_PROOFS, NARROW, PROOFS, agreed
from app.service.session import Session
from engine.compare import FEWEST, Reruns, Speedup, live
from engine.decode import Turns
from engine.drafting.base import FailSafeDrafter
from engine.drafting.budget import Budget
from engine.drafting.tiers import ContextTier
from engine.engine import Load, Request
from engine.errors import Busy, Cancelled, PromptError, StorageError
from engine.local import Local
from engine.metrics import summarise
from engine.queue import Waiting
from engine.settings import Drafting
from engine.tree import Tree
from engine.types import Finish, Followers, Run, Work
from storage.conversations import Conversations
from storage.database import Database
from storage.drafting import MODEL_GRAMS, CalibrationStore, ContextStore
from storage.ngrams import ModelNgrams
from storage.traces import Traces
from tests.support.inside import (
    FULL,
    OWNER,
    TOYS,
    Held,
    answer,
    ask,
    compare,
    failing,
    first_pair,
    local,
    memory,
    messages,
    on_toy,
    open_conversation,
    past_answers,
    preferences,
    prove,
    proven,
    run,
    soon,
    texts,
    under_way,
    updates_of,
)
from tests.support.thinking import SHUT, Thinking
from tests.support.toy import END


def known(session: Session) -> set[tuple[int, ...]]:
    """The n-grams in the model tier."""
    return {gram for gram, _ in past_answers(session).tier.grams()}


def test_an_answer_is_stored_with_its_tokens_and_its_run(session: Session) -> None:
    conversation, update = ask(session)
    message, answered = messages(session, conversation)
    assert (message.role, message.content) == ("user", "hello there")
    assert answered.content == update.text and update.finish in ("eos", "length")
    assert answered.pieces == tuple(update.pieces)
    own = session.database.execute_read("SELECT pieces FROM messages")
    assert own == [(None,), (None,)], "its tokens are stored once, with the steps of its run"
    store = Traces(session.database, OWNER)
    (stored,) = store.history()
    assert answered.run_id == stored.id
    figures = update.metrics
    assert (stored.emitted_tokens, stored.forwards) == (figures.tokens, figures.forwards)
    assert stored.decode_seconds == pytest.approx(figures.decode_seconds)
    run, proved = store.load(stored.id), session.history.last[OWNER, conversation].run
    # Where a token starts in the text is not stored: the text says it.
    steps = [
        replace(step, tokens=tuple(replace(token, start=0) for token in step.tokens))
        for step in proved.steps
    ]
    bare = replace(proved, settings={}, steps=type(proved.steps)(steps))
    assert astuple(replace(run, settings={})) == astuple(bare)
    assert run.settings == json.loads(json.dumps(proved.settings)) and run.learned is not None
    assert summarise(run) == figures and live(figures).whole == live(summarise(run)).whole


def test_the_first_message_names_the_conversation(session: Session) -> None:
    store = session.chat.conversations(OWNER)
    long = " what\n is   this, and why does it go on for so long?"
    conversation, named = session.chat.say(OWNER, None, long), store.create("Mine").id
    session.chat.say(OWNER, named, "something else")
    titles = [store.get(each).title for each in (conversation, named)]
    assert titles == ["what is this, and why does it go on for so long?", "Mine"]


@pytest.mark.parametrize("text", ["", "   \n", "x" * 5000])
def test_a_message_that_cannot_be_answered_stores_nothing(session: Session, text: str) -> None:
    with pytest.raises(PromptError):
        session.chat.say(OWNER, None, text)
    assert session.chat.conversations(OWNER).list() == []


def test_a_failing_model_keeps_the_message_and_frees_the_model(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = session.chat.say(OWNER, None, "hello")
    with monkeypatch.context() as patched:
        patched.setattr(Held, "score", failing(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError):
            answer(session, conversation)
    assert texts(session, conversation) == ["hello"]
    assert answer(session, conversation).text


@pytest.mark.usefixtures("each_step")
def test_what_was_shown_is_stored_though_no_step_follows(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.answering.FLUSH_SECONDS", 0.01)
    conversation = session.chat.say(OWNER, None, "hello")
    updates = updates_of(session, OWNER, conversation, preferences())

    def stored() -> list[Any]:
        return [m.pieces for m in messages(session, conversation)[1:]]

    for _ in range(3):
        toy.allow(1)
        shown = tuple(next(updates).pieces)
        assert soon(lambda shown=shown: stored() == [shown])
    toy.allow()
    run(updates)


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("meanwhile", ["edited", "answered"])
def test_an_answer_does_not_hide_what_was_said_meanwhile(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    monkeypatch.setattr("app.service.answering.FLUSH_SECONDS", 1000.0)
    conversation, updates = under_way(session, toy, "hello", preferences())
    store = session.chat.conversations(OWNER)
    question, *_ = store.messages(conversation)
    if meanwhile == "edited":
        session.chat.edit(OWNER, conversation, question.id, "something else")
    else:
        store.append(conversation, "assistant", "something else")
    expected = texts(session, conversation)
    toy.allow()
    last = run(updates)
    assert texts(session, conversation) == expected
    answered_ = store.messages(conversation, to=store.following(conversation, question.id)[-1])
    assert [message.content for message in answered_] == ["hello", last.text]


@pytest.mark.usefixtures("each_step")
def test_a_write_that_failed_is_tried_again(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.answering.FLUSH_SECONDS", 0.01)
    append, tries = Conversations.append, list[int]()

    def busy(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise StorageError("The disk is full.")
        return append(*arguments)

    conversation = session.chat.say(OWNER, None, "hello")
    monkeypatch.setattr(Conversations, "append", busy)
    updates = updates_of(session, OWNER, conversation, preferences())
    toy.allow(1)
    shown = next(updates)
    assert isinstance(shown, Update)
    assert soon(lambda: texts(session, conversation)[1:] == [shown.text])
    assert session.notices.take(OWNER) == ["The disk is full."]
    toy.allow()
    run(updates)


@pytest.mark.usefixtures("each_step")
def test_closing_the_page_keeps_what_was_said(session: Session, toy: Held) -> None:
    conversation = session.chat.say(OWNER, None, "hello")
    updates = updates_of(session, OWNER, conversation, preferences())
    toy.allow(2)
    shown = [next(updates), next(updates)][1]
    assert isinstance(shown, Update)
    updates.close()
    toy.allow()
    assert soon(lambda: (OWNER, conversation) in session.history.last)
    text, answered = texts(session, conversation)
    assert text == "hello" and answered.startswith(shown.text)
    run_of = session.history.last[OWNER, conversation].run
    assert len(run_of.steps) <= 3 and "".join(t.text for t in run_of.tokens) == answered
    assert len(Traces(session.database, OWNER).history()) == 1
    assert {gram.tokens for gram in ModelNgrams(session.database, OWNER, "toy").load()}
    assert ask(session)[1].text


@pytest.mark.usefixtures("each_step")
def test_the_thread_that_the_answer_needs_may_be_the_one_that_closes_it(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterator that nobody has any more is closed by whichever thread finds that out."""
    conversation, updates = under_way(session, toy, "hello", preferences("plain"))
    score = Held.score

    def closing(*arguments: Any, **named: Any) -> Any:
        updates.close()
        return score(*arguments, **named)

    monkeypatch.setattr(Held, "score", closing)
    toy.allow()
    assert soon(lambda: (OWNER, conversation) in session.history.last)
    assert len(texts(session, conversation)) == 2


def test_stop_before_the_first_step_leaves_no_empty_answer(session: Session) -> None:
    conversation = session.chat.say(OWNER, None, "hello")
    session.tasks.stop(OWNER, conversation)
    with pytest.raises(Cancelled, match="before it began"):
        answer(session, conversation)
    assert texts(session, conversation) == ["hello"] and not local(session).queue.running
    session.chat.again(OWNER, conversation)
    assert answer(session, conversation).text


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("later", ["say", "edit", "drop", "prove"])
def test_no_later_request_takes_a_stop_back(session: Session, toy: Held, later: str) -> None:
    """The answer under way ends, whatever is asked of the same conversation meanwhile."""
    conversation, _ = ask(session)
    message = messages(session, conversation)[0].id
    session.chat.say(OWNER, conversation, "more")
    updates = updates_of(session, OWNER, conversation, preferences("plain", tokens=500))
    toy.allow(1)
    next(updates)
    session.tasks.stop(OWNER, conversation)
    requests = {
        "say": lambda: session.chat.say(OWNER, conversation, "and more"),
        "edit": lambda: session.chat.edit(OWNER, conversation, message, "other"),
        "drop": lambda: session.chat.again(OWNER, conversation),
        "prove": lambda: next(iter(session.proofs.prove(OWNER, conversation))),
    }
    requests[later]()
    toy.allow()
    last = run(updates)
    assert last.finish == "cancelled" and last.metrics.tokens < 10
    if later == "drop":
        session.chat.again(OWNER, conversation)
    if later != "prove":
        assert answer(session, conversation).finish != "cancelled"


@pytest.mark.usefixtures("each_step")
def test_a_waiting_answer_says_so_and_can_leave_the_queue(session: Session, toy: Held) -> None:
    first, updates = under_way(session, toy, "hello", preferences("plain", tokens=50))
    second = session.chat.say(OWNER, None, "there")
    waiting = updates_of(session, OWNER, second, preferences())
    assert next(waiting) == Waiting(1) and session.tasks.busy(OWNER, second)
    session.tasks.stop(OWNER, second)
    with pytest.raises(Cancelled):
        list(waiting)
    assert not session.tasks.busy(OWNER, second) and session.tasks.busy(OWNER, first)
    toy.allow()
    assert run(updates).finish != "cancelled" and texts(session, second) == ["there"]
    session.chat.again(OWNER, second)
    assert answer(session, second, preferences()).text


@pytest.mark.usefixtures("each_step")
def test_a_guest_may_have_one_request_waiting(db: Database, toy: Held) -> None:
    session = on_toy(db, toy, each=1, guests=True)
    conversations = [session.chat.say("guest:a", None, text) for text in ("one", "two")]
    running, waiting = (
        updates_of(session, "guest:a", c, preferences("plain")) for c in conversations
    )
    toy.allow(1)
    next(running)
    assert next(waiting) == Waiting(1)
    (message,) = session.chat.conversations("guest:a").messages(conversations[1])
    for refused in (
        lambda: session.chat.say("guest:a", conversations[0], "three"),
        lambda: session.chat.edit("guest:a", conversations[1], message.id, "three"),
        lambda: session.chat.again("guest:a", conversations[1]),
        lambda: next(compare(session, "guest:a", "three", preferences(), 1)),
    ):
        with pytest.raises(Busy, match="waits for the model already"):
            refused()
    assert texts(session, conversations[1], "guest:a") == ["two"]
    assert texts(session, session.chat.say("guest:b", None, "b"), "guest:b") == ["b"]
    toy.allow()
    run(running)
    assert run(waiting).text


def test_a_guest_does_not_wait_for_all_comparisons_of_another(
    db: Database, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison of many pairs lets others in after each of its runs, and goes on."""
    session, owners = on_toy(db, toy, each=1, guests=True), list[str]()
    answer = Local.answer

    def noted(engine: Local, request: Request, *given: Any) -> Turns:
        owners.append(request.owner)
        return answer(engine, request, *given)

    monkeypatch.setattr(Local, "answer", noted)
    pairs = compare(session, "guest:a", "tell me", preferences("hd", tokens=20), 5)
    toy.allow(8)
    next(pairs)
    conversation = session.chat.say("guest:b", None, "hello")
    answers = updates_of(session, "guest:b", conversation, preferences())
    assert next(answers) == Waiting(1)
    toy.allow()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(run, answers)
        *_, last = pairs
        assert other.result().text
    assert owners == ["guest:a", "guest:b", *["guest:a"] * 9]
    assert isinstance(last, Progress) and len(last.pairs) == 5 and not last.cancelled


@pytest.mark.usefixtures("each_step")
def test_a_comparison_that_is_stopped_while_others_use_the_model_keeps_its_pairs(
    db: Database, toy: Held
) -> None:
    session = on_toy(db, toy, each=1, guests=True)
    pairs = compare(session, "guest:a", "tell me", preferences("hd", tokens=20), 5)
    first_pair(pairs)
    conversation = session.chat.say("guest:b", None, "hello")
    answer = updates_of(session, "guest:b", conversation, preferences("plain", tokens=500))
    toy.allow(1)
    next(answer)
    assert next(pairs) == Waiting(1)
    session.tasks.stop("guest:a", "")
    *_, last = pairs
    assert isinstance(last, Progress) and last.cancelled and len(last.pairs) == 1
    runs = Traces(db, "guest:a").history(10)
    assert len(runs) == 2, "the pair that was measured is stored"
    session.tasks.stop("guest:b", conversation)
    toy.allow()
    assert run(answer).finish == "cancelled"


def test_a_comparison_that_another_model_ends_keeps_no_half_of_a_pair(
    db: Database, toy: Held
) -> None:
    """What was broken off says nothing of a speed, whoever ended it."""
    session = on_toy(db, toy, loaders=TOYS)
    pairs = compare(session, OWNER, "tell me", preferences("plain", tokens=60), 5)
    first_pair(pairs)
    toy.allow(2)
    next(pairs)
    loading = session.engine.load(Load("other"))
    toy.allow()
    *_, last = pairs
    assert isinstance(last, Progress) and last.cancelled and len(last.pairs) == 1
    list(loading)
    assert len(Traces(db, OWNER).history(10)) == 2


def test_an_answer_of_another_model_cannot_be_proved(db: Database, toy: Held) -> None:
    session = on_toy(db, toy, loaders=TOYS)
    conversation, _ = ask(session)
    list(session.engine.load(Load("other")))
    with pytest.raises(PromptError, match="no answer to prove"):
        list(session.proofs.prove(OWNER, conversation))


def test_draft_models_do_not_take_back_what_plain_decoding_was_measured_to_be(
    db: Database, toy: Held
) -> None:
    session = on_toy(db, toy, loaders=TOYS)
    list(session.engine.load(Load("other")))
    assert session.current.plain.when == "after loading"
    conversation, _ = ask(session)
    list(session.proofs.prove(OWNER, conversation))
    proved = session.current.plain
    assert proved.when == "by the last proof"
    list(session.engine.load_drafts([("small", "small")]))
    assert session.engine.state.drafts and session.current.plain == proved
    list(session.engine.load(Load("third")))
    assert session.current.plain.when == "after loading"


def test_an_answer_tells_the_plain_speed_unless_it_is_a_few_tokens(session: Session) -> None:
    _, update = ask(session, method="plain")
    plain = session.current.plain
    assert plain.when == "by the last answer"
    assert plain.tokens_per_second == update.metrics.plain_tokens_per_second > 0
    _, short = ask(session, chosen=preferences("plain", tokens=FEWEST - 1))
    assert short.metrics.tokens < FEWEST and session.current.plain == plain


def test_another_answer_is_kept_next_to_the_first(session: Session) -> None:
    conversation, first = ask(session)
    store = session.chat.conversations(OWNER)
    session.chat.again(OWNER, conversation)
    assert len(texts(session, conversation)) == 2, "the one before is there until another is"
    again = answer(session, conversation)
    assert again.text == first.text, "the same seed gives the same answer"
    session.chat.again(OWNER, conversation, store.messages(conversation)[1].id)
    other = answer(session, conversation, preferences(seed=9))
    assert other.text != first.text
    message, shown = store.messages(conversation)
    assert shown.content == other.text and shown.versions[-1] == shown.id
    assert len(shown.versions) == 3 and message.versions == (message.id,)
    store.show(conversation, shown.versions[0])
    session.chat.say(OWNER, conversation, "more")
    answer(session, conversation)
    before = texts(session, conversation)
    assert before[1] == first.text and len(before) == 4
    session.chat.again(OWNER, conversation, shown.versions[0])
    answer(session, conversation, preferences(seed=9))
    assert texts(session, conversation) == ["hello there", other.text], "another branch"
    store.show(conversation, shown.versions[0])
    assert texts(session, conversation) == before
    with pytest.raises(PromptError, match="no message"):
        session.chat.again(OWNER, store.create().id)


def test_an_edited_message_is_kept_next_to_the_first(session: Session) -> None:
    conversation, _ = ask(session)
    store = session.chat.conversations(OWNER)
    session.chat.say(OWNER, conversation, "more")
    answer(session, conversation)
    before, (question, first, *_) = texts(session, conversation), store.messages(conversation)
    other = session.chat.edit(OWNER, conversation, question.id, "something else")
    assert texts(session, conversation) == ["something else"]
    for to, branch in ((other, ["something else"]), (first.id, before[:2])):
        read = session.chat.prompt(OWNER, conversation, to)
        assert [message.content for message in read] == branch, "the branch that is answered"
    answer(session, conversation)
    with pytest.raises(PromptError):
        session.chat.edit(OWNER, conversation, other, " ")
    shown, answered_ = store.messages(conversation)
    assert shown.id == other and shown.versions == (question.id, other)
    with pytest.raises(PromptError, match="Only your own messages"):
        session.chat.edit(OWNER, conversation, answered_.id, "no")
    store.show(conversation, question.id)
    assert texts(session, conversation) == before
    store.show(conversation, other)
    assert texts(session, conversation) == [shown.content, answered_.content]
    hidden = store.messages(conversation, to=store.following(conversation, question.id)[0])[-1]
    later = store.following(conversation, hidden.id)[0]
    session.chat.edit(OWNER, conversation, later, "from another branch")
    assert texts(session, conversation) == [*before[:2], "from another branch"]


def test_a_fresh_seed_is_drawn_and_reported(session: Session) -> None:
    requested = replace(preferences(), fresh_seed=True)
    seeds = {ask(session, chosen=requested)[1].seed for _ in range(3)}
    assert len(seeds) == 3 and 3 not in seeds


def test_owners_cannot_reach_each_other(session: Session) -> None:
    conversation, _ = ask(session)
    other = session.owner("guest", "another-browser")
    assert other != session.owner("guest", "one-browser") != OWNER
    assert session.chat.conversations(other).list() == []
    message = messages(session, conversation)[0]
    for reach in (
        lambda: session.chat.say(other, conversation, "hi"),
        lambda: session.chat.edit(other, conversation, message.id, "hi"),
        lambda: session.chat.again(other, conversation),
        lambda: session.chat.again(other, conversation, message.id),
        lambda: session.chat.continue_answer(other, conversation),
        lambda: session.chat.delete(other, conversation),
        lambda: session.chat.delete_message(other, conversation, message.id),
        lambda: session.chat.conversations(other).copy(conversation, message.id),
        lambda: session.chat.revision(other, conversation),
        lambda: run(updates_of(session, other, conversation, preferences())),
        lambda: session.chat.wipe_context(other, conversation),
    ):
        with pytest.raises(StorageError):
            reach()
    with pytest.raises(PromptError):
        run(session.proofs.prove(other, conversation))  # type: ignore[arg-type]
    assert session.past_answers.ngrams(other, "toy").rows() == 0
    assert set(memory(session).past_answers) == {OWNER}
    assert Traces(session.database, other).history() == []
    assert len(texts(session, conversation)) == 2


def test_the_context_tier_is_warm_when_a_conversation_is_opened_again(
    session: Session, db: Database, toy: Held
) -> None:
    conversation, _ = ask(session)
    logged = ContextStore(db, OWNER).load(conversation, toy.info.tokenizer_fingerprint)
    later = on_toy(db)
    later.chat.again(OWNER, conversation)
    again = answer(later, conversation, preferences("context"))
    assert again.metrics.accepted.get("context", 0) > 0
    assert (
        open_conversation(later, conversation).databases.context.log[: len(logged)] == logged != []
    )
    grown = ContextStore(db, OWNER).load(conversation, toy.info.tokenizer_fingerprint)
    assert grown[: len(logged)] == logged
    assert len(grown) - len(logged) < len(logged) + again.metrics.tokens


def test_a_conversation_that_is_opened_again_is_logged_without_a_gap_and_once(
    session: Session, db: Database, toy: Held
) -> None:
    conversation, first = ask(session, "one first word")
    assert first.finish == "eos"
    later = on_toy(db, toy)
    later.chat.say(OWNER, conversation, "some other words")
    answer(later, conversation)
    opened = open_conversation(later, conversation)
    assert opened.databases.context.log == opened.tokens


def test_the_model_tier_learns_and_is_there_after_a_restart(
    session: Session, db: Database, toy: Held
) -> None:
    ask(session)
    stored = {g.tokens for g in ModelNgrams(db, OWNER, toy.info.fingerprint).load()}
    assert stored == known(session) != set()
    later = on_toy(db)
    _, update = ask(later, "hello there", "model")
    assert update.metrics.accepted.get("model", 0) > 0
    later.past_answers.wipe(OWNER, later.current.info.fingerprint)
    assert not memory(later).past_answers and not memory(later).conversations
    assert ModelNgrams(db, OWNER, toy.info.fingerprint).rows() == 0


def test_the_model_tier_is_pruned(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.drafting.MODEL_GRAMS", 5)
    ask(session)
    assert session.past_answers.ngrams(OWNER, "toy").rows() == 5 < MODEL_GRAMS
    assert not memory(session).past_answers, "they are read again"


def count(db: Database, table: str) -> int:
    return int(db.execute_read(f"SELECT count(*) FROM {table}")[0][0])


def test_deleting_forgets_everything_of_a_conversation(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, _ = ask(session)
    token = session.chat.delete(OWNER, conversation)
    assert session.chat.conversations(OWNER).list() == []
    assert not memory(session).conversations and not session.history.last
    assert Traces(db, OWNER).history() == []
    monkeypatch.setattr("storage.deletions.SECONDS", 0.0)
    session.chat.trash.sweep()
    assert [count(db, table) for table in ("contexts", "messages", "runs", "steps")] == [0] * 4
    assert not session.chat.trash.proofs
    with pytest.raises(StorageError, match="cannot be undone"):
        session.chat.undo(OWNER, token)


def test_a_deleted_conversation_comes_back_whole(session: Session, db: Database) -> None:
    conversation, _ = ask(session)
    store, traces, log = (
        session.chat.conversations(OWNER),
        Traces(db, OWNER),
        ContextStore(db, OWNER),
    )
    before = store.export(conversation), traces.history(), log.load(conversation, "bytes")
    token = session.chat.delete(OWNER, conversation)
    for other in ("guest:x", "(deleted)"):
        with pytest.raises(StorageError, match="cannot be undone"):
            session.chat.undo(other, token)
    assert session.chat.undo(OWNER, token) == conversation
    assert (store.export(conversation), traces.history(), log.load(conversation, "bytes")) == before
    proven(session, conversation)
    with pytest.raises(StorageError, match="cannot be undone"):
        session.chat.undo(OWNER, token)


@pytest.mark.parametrize("what", ["message", "conversation"])
def test_deleting_ends_the_answer_and_undo_brings_all_of_it_back(
    session: Session, toy: Held, what: str
) -> None:
    conversation = session.chat.say(OWNER, None, "hello")
    store = session.chat.conversations(OWNER)
    (message,) = store.messages(conversation)
    toy.allow(3)
    growing = session.generations.start(OWNER, conversation, preferences("plain", tokens=500))
    assert soon(lambda: toy.allowed[0] == 0)
    (task,) = session.tasks.known[OWNER, conversation]
    threading.Thread(target=lambda: task.stop.event.wait(20) and toy.allow()).start()
    if what == "message":
        token = session.chat.delete_message(OWNER, conversation, message.id)
        assert texts(session, conversation) == []
    else:
        token = session.chat.delete(OWNER, conversation)
        assert store.list() == []
    assert soon(lambda: growing.over) and growing.update is not None
    assert growing.update.finish == "cancelled" and session.notices.take(OWNER) == []
    session.chat.undo(OWNER, token)
    assert texts(session, conversation) == ["hello", growing.update.text]


class Broken(ContextTier):
    """A source of drafts that can be made to say nonsense and to fail in every way it has."""

    def __init__(self, faults: set[str]) -> None:
        super().__init__()
        self.faults, self.calls = faults, 0

    def matches(self, suffix: tuple[int, ...]) -> Sequence[Followers]:
        self.calls += 1
        if self.calls > 5 and "matches" in self.faults:
            raise ValueError("damaged")
        wrong = {10**6: 3.0, **({-1: 9.0} if self.calls > 3 and "token" in self.faults else {})}
        return [Followers(20, 2, {97: 2.0, **wrong})] * 2

    def observe(self, tokens: Sequence[int], new: int) -> None:
        if self.calls > 3 and "observe" in self.faults:
            raise OSError("disk gone")

    def finish(self, tokens: Sequence[int], new: int) -> None:
        if "finish" in self.faults:
            raise OSError("disk gone")


@pytest.mark.parametrize("fault", ["matches", "token", "observe", "finish", "all"])
def test_a_broken_drafter_cannot_change_or_end_an_answer(session: Session, fault: str) -> None:
    conversation, plain = ask(session, method="plain")
    faults = {"matches", "token", "observe", "finish"} if fault == "all" else {fault}
    open_conversation(session, conversation).databases.context = Broken(faults)
    session.chat.again(OWNER, conversation)
    update = answer(session, conversation, preferences("context"))
    assert update.text == plain.text
    (notice,) = session.notices.take(OWNER)
    assert "from the databases failed" in notice and "not affected" in notice
    assert session.notices.take(OWNER) == []


class Wild:
    """A drafter that may take out what others drafted, and then fails, or drafts what cannot be."""

    name = "context"

    def __init__(self, token: int, replaces: bool) -> None:
        self.token, self.replaces = token, replaces

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> dict[str, Work]:
        if self.replaces:
            tree.cut(0)
        tree.add(tree.add(0, 97, self.name), self.token, self.name)
        if self.token == 98:
            raise ValueError("damaged")
        return {self.name: Work(0.0)}


@pytest.mark.parametrize(
    ("token", "replaces", "left"),
    [
        (-1, False, [1, 5, 6, 7]),
        (98, False, [1, 5, 6, 7]),
        (260, False, [1, 5, 6, 7]),
        (97, True, [1, 97, 97]),
        (-1, True, [1]),
        (98, True, [1]),
    ],
)
def test_what_a_faulty_drafter_added_is_taken_back(
    token: int, replaces: bool, left: list[int]
) -> None:
    notices: list[str] = []
    guarded = FailSafeDrafter(Wild(token, replaces), notices.append)  # type: ignore[arg-type]
    tree, budget = Tree(1), Budget(Drafting(), 9, 260)
    tree.add(tree.add(tree.add(0, 5, "model"), 6, "model"), 7, "model")
    found = guarded.grow(tree, [1], budget)
    assert tree.tokens == left and len(tree.children) == len(left)
    if token != 97:
        assert found == guarded.grow(tree, [1], budget) == {}, "it is not asked again"
        assert len(notices) == 1 and "context failed" in notices[0]


def test_a_store_that_fails_costs_memory_not_the_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (ContextStore, ModelNgrams):
        for name in ("append", "learn", "save"):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, failing(FULL))
    conversation, update = ask(session)
    assert update.text and texts(session, conversation)[1] == update.text
    assert session.notices.take(OWNER) == ["The disk is full."]


@pytest.mark.parametrize(
    ("place", "name"), [(Traces, "save"), (Traces, "extend"), (Conversations, "append")]
)
def test_an_answer_that_cannot_be_stored_is_reported_and_half_of_it_is_not_stored(
    session: Session, monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    monkeypatch.setattr(place, name, failing(FULL))
    update = answer(session, conversation)
    assert update.text and update.finish and texts(session, conversation) == ["hello there"]
    assert Traces(session.database, OWNER).history() == []
    assert session.database.execute_read("SELECT count(*) FROM steps") == [(0,)]
    assert session.notices.take(OWNER) == ["The disk is full."]
    proven(session, conversation)


def test_proving_reruns_plainly_and_with_drafts_with_the_same_seed(session: Session) -> None:
    conversation, update = ask(session, "a first question")
    proof = proven(session, conversation)
    assert proof.tokens == update.metrics.tokens
    assert proof.plain is not None and summarise(proof.plain).mean_acceptance_length == 1
    assert proof.accelerated is not None and summarise(proof.accelerated).kept > 0
    assert proof.shown is not None and summarise(proof.shown) == update.metrics
    shown = [[t.id for t in run.tokens] for run in (proof.plain, proof.accelerated, proof.shown)]
    assert shown[0] == shown[1] == shown[2]
    assert proof.reruns is not None and proof.reruns.plain_seconds > 0 < proof.reruns.seconds
    assert len(texts(session, conversation)) == 2


def reached(session: Session, conversation: str) -> tuple[int, list[list[str]]]:
    """How many pairs a proof made, and the methods of each in their order."""
    order: list[list[str]] = []
    for proof in session.proofs.prove(OWNER, conversation):
        if isinstance(proof, Proof) and proof.verdict is None:
            order += [[] for _ in range(proof.pair - len(order))]
            if order[-1][-1:] != [proof.running]:
                order[-1].append(proof.running)
    assert isinstance(proof, Proof) and proof.reruns is not None
    return proof.reruns.pairs, order


@pytest.mark.parametrize(
    ("low", "high", "seconds", "pairs"),
    [
        (1.5, 1.5 + 1.5 * NARROW, 1e9, FEWEST_PROOFS),
        (1.5, 1.6, 1e9, PROOFS),
        (0.9, 1.6, 1e9, PROOFS),
        (0.9, 1.6, 0.0, 1),
    ],
)
def test_an_answer_is_decoded_again_until_its_reruns_agree_or_took_long(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    low: float,
    high: float,
    seconds: float,
    pairs: int,
) -> None:
    def found(answered: FinishedAnswer, pairs: Sequence[tuple[Run, Run]]) -> Reruns:
        return Reruns(len(pairs), 0, 2.0, 1.0, (low, high), Speedup(1.5, 1.5, None, low, high))

    monkeypatch.setattr("app.service.proofs.reruns_of", found)
    monkeypatch.setattr("app.service.proofs.ENOUGH", seconds)
    conversation, _ = ask(session)
    count, order = reached(session, conversation)
    assert count == len(order) == pairs
    for number, methods in enumerate(order):
        swapped = ["hd", "plain"] if number % 2 else ["plain", "hd"]
        assert methods == swapped, "neither comes first more often"


@pytest.mark.parametrize(("seconds", "pairs"), [(3.0, 3), (4.5, 3), (9.0, 1), (6.0, 3), (10.0, 1)])
def test_a_long_proof_has_a_pair_in_the_middle(
    seconds: float, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a pair takes so long that another one would be too much."""
    monkeypatch.setattr("app.service.proofs.ENOUGH", 8.0)
    enough, run = agreed(cast(FinishedAnswer, None)), cast(Run, None)
    done = next(count for count in range(1, 99) if enough([(run, run)] * count, count * seconds))
    assert done == pairs


def test_where_nothing_was_accepted_there_is_nothing_to_measure_for_long(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.proofs.ENOUGH", 1e9)
    conversation, update = ask(session, method="model")
    assert update.metrics.kept == 0
    assert reached(session, conversation)[0] == FEWEST_PROOFS
    proof = prove(session, conversation)
    assert proof.speedup == Speedup(), "no ratio at all"


@pytest.mark.parametrize("finish", ["length", "eos", "stop"])
def test_a_proof_notices_an_answer_that_ended_too_early(session: Session, finish: Finish) -> None:
    conversation, update = ask(session)
    last = session.history.last[OWNER, conversation]
    steps = list(last.run.steps)
    cut = [*steps[: len(steps) // 2], replace(steps[len(steps) // 2], finish=finish)]
    if finish == "eos":
        ended = replace(cut[-1].tokens[-1], id=END)
        cut[-1] = replace(cut[-1], tokens=(*cut[-1].tokens[:-1], ended))
    short = replace(last.run, steps=tuple(cut))
    session.history.last[OWNER, conversation] = replace(last, run=short)
    proof = prove(session, conversation)
    assert proof.plain is not None and len(proof.plain.tokens) == update.metrics.tokens
    found = proof.verdict
    assert found is not None and not found.identical and found.ended_early
    assert found.position == len(short.tokens) + (finish != "eos")


def test_an_answer_proved_has_not_been_learned_by_what_drafts_in_the_proof(
    session: Session,
) -> None:
    first, update = ask(session, method="model")
    assert update.metrics.kept == 0, "nothing was known before the first answer"
    proof = prove(session, first)
    assert proof.accelerated is not None and summarise(proof.accelerated).kept == 0
    assert proof.speedup.whole is None or proof.speedup.whole <= 1
    known_then = known(session)
    again, second = ask(session, method="model")
    assert second.metrics.kept > 0
    proof = prove(session, again)
    assert proof.accelerated is not None
    assert summarise(proof.accelerated).accepted == second.metrics.accepted
    assert known(session) == known_then, "a proof teaches nothing"


def test_a_speedup_is_stored_once_a_plain_run_of_the_same_prompt_was_measured(
    session: Session,
) -> None:
    local(session).loaded.measure_plain()
    conversation, _ = ask(session)
    store = Traces(session.database, OWNER)
    (run_before,) = store.history()
    assert run_before.speedup is None and run_before.decode_speedup is None
    proof = prove(session, conversation)
    (run_after,) = store.history()
    assert (run_after.speedup, run_after.decode_speedup) == (
        proof.speedup.whole,
        proof.speedup.decoding,
    )
    *_, last = compare(session, OWNER, "hello there", preferences(), 1)
    fast, plain, _ = store.history()
    assert plain.method == "plain" and plain.speedup is None
    assert fast.speedup == last.speedup.whole is not None


@pytest.mark.usefixtures("each_step")
def test_a_stopped_answer_can_be_proved_too(session: Session, toy: Held) -> None:
    conversation, updates = under_way(session, toy, "hello", preferences(tokens=500))
    session.tasks.stop(OWNER, conversation)
    toy.allow()
    update = run(updates)
    assert update.finish == "cancelled" and 0 < update.metrics.tokens < 60
    assert texts(session, conversation)[1] == update.text, "what it said is kept"
    proof = proven(session, conversation)
    assert proof.verdict and proof.verdict.tokens == update.metrics.tokens
    assert proof.shown is not None and proof.shown.broken_off
    whole, _ = ask(session)
    proof = prove(session, whole)
    assert proof.shown is not None and not proof.shown.broken_off


@pytest.mark.parametrize("method", ["hd", "hd-published", "lookup"])
def test_a_comparison_is_identical_and_leaves_no_trace(session: Session, method: str) -> None:
    ask(session)
    before, trusted = known(session), past_answers(session).calibration.rows()
    stored = CalibrationStore(session.database, OWNER, "toy").load()
    chosen = replace(preferences(), method=method)
    *_, last = compare(session, OWNER, "hello there", chosen, 3)
    assert len(last.pairs) == 3 == len(last.speedups)
    kept = {summarise(fast).kept > 0 for _, fast in last.pairs}
    assert kept == {True} or all(s.whole is None or s.whole <= 1 for s in last.speedups)
    answers = {tuple(t.id for t in timed.tokens) for pair in last.pairs for timed in pair}
    assert len(answers) == 1
    drafted = [summarise(fast).accepted for _, fast in last.pairs]
    assert drafted[0] == drafted[1] == drafted[2], "no repeat may draft an earlier one's answer"
    assert known(session) == before
    assert past_answers(session).calibration.rows() == trusted
    assert CalibrationStore(session.database, OWNER, "toy").load() == stored != []
    assert len(session.chat.conversations(OWNER).list()) == 1
    kinds = [r.kind for r in Traces(session.database, OWNER).history()]
    assert kinds.count("compare") == 6


@pytest.mark.parametrize("thinking", [None, True, False])
def test_an_answer_thinks_first_or_not_as_it_was_chosen(
    db: Database, thinking: bool | None
) -> None:
    session, chosen = Session(Local(backend=Thinking()), db), preferences(tokens=4)
    chosen = replace(chosen, generation=replace(chosen.generation, thinking=thinking))
    conversation = session.chat.say(OWNER, None, "why")
    run(updates_of(session, OWNER, conversation, Preferences.from_mapping(chosen.mapping())))
    prompt = session.current.text(session.history.last[OWNER, conversation].prompt)
    assert prompt.endswith("<|assistant|>" + (SHUT if thinking is False else ""))
