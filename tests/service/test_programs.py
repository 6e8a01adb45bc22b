"""Answers for other programs: one queue, sessions that are found again, owners kept apart."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.service.programs import MOST_EACH, Programs, Sessions, common_prefix
from app.service.programs import text_of as request_text
from app.service.session import Session
from engine.engine import Request
from engine.errors import Busy, Cancelled, PromptError
from engine.methods import METHODS, PLAIN
from engine.settings import Generation, Sampling
from engine.types import Message, Prefill, Step
from storage.database import Database
from storage.drafting import CalibrationStore
from storage.ngrams import ModelNgrams
from tests.support import inside
from tests.support.inside import local, on_toy, soon
from tests.support.toy import ToyBackend

PROGRAM, OTHER = "api-1", "api-2"


class Counting(ToyBackend):
    """Counts the tokens of prompts that it reads, of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def prefill(self, tokens: Any, cancelled: Any) -> Any:
        filled = super().prefill(tokens, cancelled)
        self.read.append(len(tokens) - 1 - filled.reused)
        return filled


@pytest.fixture
def model() -> Counting:
    return Counting()


@pytest.fixture
def session(db: Database, model: Counting) -> Iterator[Session]:
    made = on_toy(db, model)
    yield made
    made.engine.close()


def asking(*texts: str, seed: int = 3, tokens: int = 60, method: str = "hd") -> Request:
    """The user's texts and the assistant's in turn; the last one is the user's."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[n % 2], text) for n, text in enumerate(texts))
    generation = Generation(Sampling(0.8, seed=seed), max_tokens=tokens)
    return Request(messages, (), generation, METHODS[method])


def ask(session: Session, request: Request, owner: str = PROGRAM) -> list[Any]:
    programs = session.programs
    with programs.place(owner), programs.task_for(owner) as task:
        return list(programs.answer(owner, request, task))


def text_of(events: list[Any]) -> str:
    return "".join(t.text for event in events if isinstance(event, Step) for t in event.tokens)


def reused(events: list[Any]) -> tuple[int, int]:
    """Tokens of the prompt, and how many were in the cache."""
    (prefill,) = (event for event in events if isinstance(event, Prefill))
    return prefill.tokens, prefill.reused


def test_what_continues_reads_its_new_words_alone(session: Session, model: Counting) -> None:
    first = asking("tell me of the sea")
    answer = text_of(ask(session, first))
    tokens, known = reused(ask(session, first))
    assert known == tokens - 1 and model.read == [known, 0], "the same again reads nothing"
    model.read.clear()
    second = asking("tell me of the sea", answer, "and then?")
    tokens, known = reused(ask(session, second))
    assert model.read == [tokens - 1 - known] and known >= len(answer)
    assert tokens - known < 3 * len("and then?") + 10, "the new message and its frame"
    model.read.clear()
    assert reused(ask(session, second)) == (tokens, tokens - 1) and model.read == [0]


def test_two_conversations_at_a_time_stay_in_the_cache(session: Session) -> None:
    system = "be brief. "
    opened = [asking(f"{system} {topic}: " + topic * 9) for topic in ("cats", "dogs")]
    answers = [text_of(ask(session, request)) for request in opened]
    for request, answer in zip(opened, answers, strict=True):
        longer = asking(request.messages[0].content, answer, "more?")
        tokens, known = reused(ask(session, longer))
        assert tokens - known < 40


def test_an_answer_that_continues_reads_nothing_again(session: Session) -> None:
    whole = text_of(ask(session, asking("hello there", seed=7, tokens=40)))
    begun = replace(asking("hello there", seed=7, tokens=20), prefix=whole[:20])
    events = ask(session, begun)
    tokens, known = reused(events)
    assert text_of(events) == whole[20:] and known == tokens - 1
    further = replace(begun, prefix=whole)
    assert reused(ask(session, further))[1] >= tokens


def test_questions_after_one_long_text_share_its_cache(session: Session) -> None:
    text = "the same long text again. " * 20
    ask(session, asking(text + "first?"))
    tokens, known = reused(ask(session, asking(text + "another question?")))
    assert known > len(text) and tokens > known


def test_texts_go_on_with_one_another_too(session: Session) -> None:
    generation = Generation(Sampling(0.0), max_tokens=20)
    first = ask(session, Request(generation=generation, method=PLAIN, text="once upon"))
    longer = "once upon" + text_of(first)
    tokens, known = reused(ask(session, Request(generation=generation, method=PLAIN, text=longer)))
    assert (tokens, known) == (len(longer), len(longer) - 1)


def test_what_it_teaches_is_stored_for_its_owner_alone(session: Session, db: Database) -> None:
    ask(session, asking("hello there"))
    fingerprint = session.current.info.fingerprint
    for owner, knows in ((PROGRAM, True), (OTHER, False), ("local", False)):
        assert bool(ModelNgrams(db, owner, fingerprint).rows()) is knows
        assert bool(CalibrationStore(db, owner, fingerprint).load()) is knows
    assert session.notices.take(PROGRAM) == []
    for table in ("conversations", "messages", "runs", "steps", "contexts"):
        assert db.execute_read(f"SELECT count(*) FROM {table}") == [(0,)], "no word is kept"


def test_what_was_learned_drafts_for_this_owner_and_no_other(session: Session) -> None:
    def drafted(owner: str, method: str = "model") -> int:
        events = ask(session, asking("hello there", method=method), owner)
        steps = [event for event in events if isinstance(event, Step)]
        return sum(step.accepted.get("model", 0) for step in steps)

    ask(session, asking("hello there"))
    assert drafted(PROGRAM) > 10 and drafted(OTHER) == 0


def test_messages_that_do_not_fit_are_refused_not_left_out(session: Session) -> None:
    long = asking(*["x" * 900, "y" * 900] * 3, "and?")
    with pytest.raises(PromptError, match="at most 4,096 tokens") as refused:
        ask(session, long)
    assert "oldest messages" in str(refused.value)
    with pytest.raises(PromptError, match="Shorten it"):
        ask(session, asking("x" * 9000))
    assert session.programs.sessions.known == {}, "and are not remembered"
    assert text_of(ask(session, asking("hello"))), "and the next one is answered"


class Held(Counting):
    """Waits in its first forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()
        self.prompts: list[str] = []

    def prefill(self, tokens: Any, cancelled: Any) -> Any:
        self.prompts.append(self.detokenize(tokens))
        return super().prefill(tokens, cancelled)

    def score(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.go.wait(20)
        return super().score(*arguments)


def background(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Work on a thread of its own, and what came of it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_the_page_and_every_key_take_turns(db: Database) -> None:
    """A key with many requests does not keep the page waiting for all of them."""
    model = Held()
    session = on_toy(db, model)

    def one(owner: str) -> Any:
        return background(lambda: ask(session, asking(f"I am {owner}.", tokens=3), owner))

    first = one(PROGRAM)
    assert model.entered.wait(20)
    others = []
    for owner in [PROGRAM] * 3 + [OTHER, "local"]:
        before = len(local(session).queue.waiting)
        others.append(one(owner))
        assert soon(lambda before=before: len(local(session).queue.waiting) > before)
    model.go.set()
    for thread, _ in [first, *others]:
        thread.join(20)
    turns = [re.findall(r"I am (.*?)\.", prompt)[0] for prompt in model.prompts]
    assert turns == [PROGRAM, OTHER, "local", PROGRAM, PROGRAM, PROGRAM]
    session.engine.close()


def test_an_owner_may_not_ask_without_end(db: Database) -> None:
    model = Held()
    session = on_toy(db, model)
    threads = [
        background(lambda: ask(session, asking("hello", tokens=2))) for _ in range(MOST_EACH)
    ]
    assert soon(lambda: session.programs.asking[PROGRAM] == MOST_EACH)
    with pytest.raises(Busy, match="8 of your requests"):
        ask(session, asking("hello"))
    model.go.set()
    assert text_of(ask(session, asking("hello"), OTHER)), "another owner has room"
    for thread, outcome in threads:
        thread.join(20)
        assert isinstance(outcome[0], list)
    assert not session.programs.asking
    session.engine.close()


def test_requests_that_continue_one_session_are_answered_at_once(db: Database) -> None:
    """Also if sessions of earlier requests match all of them, which arrive together."""
    model = inside.Held()
    session = on_toy(db, model)
    engine, programs = local(session), session.programs
    engine.use(replace(engine.loaded, runtime=replace(engine.loaded.runtime, parallel=4)))
    for number in range(3):
        held = threading.Event()
        engine.queue.thread.submit(held.wait)
        asked = [asking("one long text. " * 9 + f"{number}, {n}?", tokens=9) for n in range(4)]
        answers = [background(lambda one=one: ask(session, one)) for one in asked]
        assert soon(lambda: len(engine.queue.waiting) == 4)
        model.allow(0)
        held.set()
        assert soon(lambda: len(engine.queue.running) == 4)
        model.allow()
        for thread, outcome in answers:
            thread.join(20)
            assert text_of(outcome[0])
        assert len(programs.sessions.known) == 4 and not programs.sessions.using
    session.engine.close()


@pytest.mark.parametrize("under_way", [True, False])
def test_stop_ends_it_and_what_was_said_is_learned(db: Database, under_way: bool) -> None:
    model, programs = Counting(), list[Programs]()
    session = on_toy(db, model)
    programs.append(session.programs)
    events, held = list[Any](), threading.Event()
    blocker = local(session).queue.thread.submit(held.wait)
    with session.programs.place(PROGRAM), session.programs.task_for(PROGRAM) as task:
        items = session.programs.answer(PROGRAM, asking("hello", tokens=4000), task)
        if under_way:
            held.set()
            for item in items:
                events.append(item)
                if len([e for e in events if isinstance(e, Step)]) == 5:
                    session.programs.stop(task)
            assert isinstance(events[-2], Step) and events[-2].finish == "cancelled"
        else:
            session.programs.stop(task)
            with pytest.raises(Cancelled):
                list(items)
            held.set()
    blocker.result(20)
    stored = ModelNgrams(db, PROGRAM, session.current.info.fingerprint).rows()
    assert bool(stored) is under_way
    assert not session.tasks.known and text_of(ask(session, asking("hello again")))
    session.engine.close()


def test_who_gives_up_listening_ends_it(session: Session, db: Database) -> None:
    with session.programs.place(PROGRAM), session.programs.task_for(PROGRAM) as task:
        items = session.programs.answer(PROGRAM, asking("hello", tokens=4000), task)
        for item in items:
            if isinstance(item, Step):
                break
        items.close()
    assert soon(lambda: not local(session).queue.running)
    assert ModelNgrams(db, PROGRAM, session.current.info.fingerprint).rows()


# sessions


def entered(sessions: Sessions, owner: str, text: str) -> str:
    """The session of a request whose turn comes at once."""
    with sessions.reserved(owner, text) as name:
        sessions.enter(owner, name, text)
    return name


def test_sessions_are_found_by_what_was_said() -> None:
    gone: list[tuple[str, str]] = []
    sessions = Sessions(lambda owner, name: gone.append((owner, name)))
    one = entered(sessions, "a", "x" * 100)
    sessions.grow("a", one, "y" * 900)
    assert entered(sessions, "a", "x" * 100 + "y" * 900 + "z") == one
    assert entered(sessions, "a", "x" * 30) != one, "a beginning alone is another conversation"
    assert entered(sessions, "b", "x" * 100) not in (one, *[name for _, name in gone])
    assert gone == []


def test_a_reserved_session_is_free_again_whatever_happens() -> None:
    sessions = Sessions(lambda owner, name: None)
    one = entered(sessions, "a", "x" * 100)
    with pytest.raises(Busy), sessions.reserved("a", "x" * 100, at_once=True) as name:
        assert name == one
        with sessions.reserved("a", "x" * 100, at_once=True) as other:
            assert other != one
        with sessions.reserved("a", "x" * 100) as same:
            assert same == one
        with sessions.reserved("a", "x" * 100, at_once=True) as other:
            assert other != one, "the first request still has it"
        raise Busy("full")
    with sessions.reserved("a", "x" * 100, at_once=True) as name:
        assert name == one


def test_old_sessions_are_forgotten_by_the_engine_too() -> None:
    gone: list[tuple[str, str]] = []
    sessions = Sessions(lambda owner, name: gone.append((owner, name)))
    names = [entered(sessions, "a", chr(97 + n) * 50) for n in range(26)]
    names += [entered(sessions, "b", chr(97 + n) * 50) for n in range(26)]
    assert len(sessions.known) == Sessions.KEPT
    assert gone == [("a", name) for name in names[: 52 - Sessions.KEPT]]
    sessions.grow("a", names[0], "nothing comes of it")


def test_long_sessions_are_forgotten_before_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sessions, "CHARACTERS", 1000)
    gone: list[tuple[str, str]] = []
    sessions = Sessions(lambda owner, name: gone.append((owner, name)))
    names = [entered(sessions, "a", letter * 400) for letter in "abc"]
    assert gone == [("a", names[0])]
    longest = entered(sessions, "a", "d" * 5000)
    assert list(sessions.known) == [("a", longest)], "the last one is always remembered"


def test_what_waits_is_not_remembered(db: Database) -> None:
    """Nor what is left of it once it was stopped: only its place in the queue."""
    session = on_toy(db, Counting())
    ask(session, asking("tell me of the sea"))
    known, held = dict(session.programs.sessions.known), threading.Event()
    blocker = local(session).queue.thread.submit(held.wait)
    for text in ("tell me of the sea and more", "another"):
        with session.programs.place(PROGRAM), session.programs.task_for(PROGRAM) as task:
            thread, outcome = background(
                lambda text=text, task=task: list(
                    session.programs.answer(PROGRAM, asking(text), task)
                )
            )
            assert soon(lambda: bool(local(session).queue.waiting))
            assert session.programs.sessions.known == known
            session.programs.stop(task)
            thread.join(20)
            assert isinstance(outcome[0], Cancelled)
    assert session.programs.sessions.known == known
    held.set()
    blocker.result(20)
    session.engine.close()


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("x" * 999, "x" * 500, 500)],
)
def test_beginnings_are_counted(left: str, right: str, alike: int) -> None:
    assert common_prefix(left, right) == common_prefix(right, left) == alike


def test_requests_of_all_kinds_say_something_of_their_own() -> None:
    texts = {
        request_text(Request((Message("user", "a"),))),
        request_text(Request((Message("user", "a"), Message("assistant", "b")))),
        request_text(Request(text="a")),
        request_text(Request(prompt=(97,))),
    }
    assert len(texts) == 4


def test_a_key_that_is_revoked_is_forgotten_everywhere(session: Session, db: Database) -> None:
    key, _ = session.programs.keys.make("one")
    ask(session, asking("hello there"), key.owner)
    fingerprint, answers = session.current.info.fingerprint, session.programs.answers
    answers.keep(key.owner, "id", (Message("user", "hello there"),))
    assert ModelNgrams(db, key.owner, fingerprint).rows() and answers.find(key.owner, "id")
    assert session.programs.revoke(key.id) == key
    assert not ModelNgrams(db, key.owner, fingerprint).rows()
    assert answers.find(key.owner, "id") is None
    events = ask(session, asking("hello there", method="model"), key.owner)
    steps = [event for event in events if isinstance(event, Step)]
    assert not any(step.proposed.get("model") for step in steps), "nor does the engine know it"
