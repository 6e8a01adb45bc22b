"""Proofs in the background: true badges, given way at once, gone with what they are about."""

from dataclasses import replace
from math import log
from typing import Any

import pytest

from app.service.comparison import Proof
from app.service.preferences import Preferences
from app.service.proofs import MOST, TRIES, Background, stored_outcome
from app.service.session import Session
from engine.compare import Speedup
from engine.errors import EngineDied
from engine.methods import METHODS
from engine.runs import Verdict
from engine.settings import Generation, Sampling
from engine.types import Run, Step, Token
from storage.traces import Traces
from tests.support.inside import OWNER, SECONDS, Held, local, soon, swap
from tests.support.toy import ToyBackend


def preferences(check: bool = True, tokens: int = 40, rule: str = "match") -> Preferences:
    generation = Generation(Sampling(temperature=0.8, seed=3), max_tokens=tokens)
    drafting = replace(METHODS["hd"].drafting, rule=rule)  # type: ignore[arg-type]
    return Preferences(generation, "hd", drafting, fresh_seed=False, check=check)


def ask(session: Session, requested: Preferences | None = None, text: str = "hello there") -> str:
    conversation = session.chat.say(OWNER, None, text)
    begun = session.generations.start(OWNER, conversation, requested or preferences())
    assert soon(lambda: begun.over) and begun.error == ""
    return conversation


def proofs(session: Session, conversation: str, owner: str = OWNER) -> list[dict[str, Any]]:
    """What is stored of the proofs of a conversation, {} where nothing is."""
    worths = Traces(session.database, owner).worths(conversation)
    return [dict(worth.proof) for worth in worths.values()]


def proved(session: Session, conversation: str) -> dict[str, Any]:
    """The proof of its only answer, once everything is proved."""
    assert session.background.idle(SECONDS)
    (found,) = proofs(session, conversation)
    return found


def test_an_answer_gets_a_proof_only_where_that_is_wanted(session: Session) -> None:
    assert not Preferences().check, "it costs time, so it is off by default"
    found = proved(session, ask(session))
    assert (found["kind"], found["tokens"]) == ("same", 40)
    assert found["speedup"] is None or found["speedup"] > 0
    plain = ask(session, preferences(check=False))
    assert session.background.idle(SECONDS) and proofs(session, plain) == [{}]


def test_a_proof_gives_way_and_begins_again(session: Session, toy: Held) -> None:
    """Whoever asks does not wait for it: the run under way ends within a step."""
    conversation = ask(session)
    assert session.background.idle(SECONDS)
    toy.allow(10)
    ask_for_proof(session, conversation)
    assert soon(lambda: toy.allowed[0] == 0), "the proof is under way, and is held there"
    other = session.chat.say(OWNER, None, "me first")
    begun = session.generations.start(OWNER, other, preferences(check=False))
    queue = local(session).queue
    assert soon(lambda: len(queue.waiting) == 1 and not queue.waiting[0].background)
    assert queue.waiting[0].ahead == 0, "nobody is told to wait for a proof"
    toy.allow(1)
    assert soon(lambda: bool(queue.running) and not queue.running[0].background)
    toy.allow()
    assert soon(lambda: begun.over) and begun.error == "" and begun.tokens == 40
    assert begun.update is not None and begun.update.finish == "length"
    assert session.background.idle(SECONDS)
    assert proofs(session, conversation)[0]["kind"] == "same"


def ask_for_proof(session: Session, conversation: str) -> None:
    """Have the last answer of a conversation proved once more."""
    background = session.background
    background.add(OWNER, conversation, session.history.last[OWNER, conversation])
    assert soon(lambda: background.running is not None)


def test_a_proof_ends_with_its_conversation(session: Session, toy: Held) -> None:
    conversation, other = ask(session, preferences(check=False)), ask(session)
    assert session.background.idle(SECONDS)
    toy.allow(10)
    ask_for_proof(session, conversation)
    assert soon(lambda: toy.allowed[0] == 0)
    background = session.background
    background.add(OWNER, conversation, session.history.last[OWNER, conversation])
    background.add(OWNER, other, session.history.last[OWNER, other])
    session.chat.delete(OWNER, conversation)
    toy.allow()
    assert background.idle(SECONDS)
    assert proofs(session, other)[0]["kind"] == "same"
    assert proofs(session, conversation) in ([], [{}])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("another rule", "Same distribution"),
        ("several runs", "other settings"),
        ("another model", "Another model"),
    ],
)
def test_no_badge_is_given_where_a_proof_would_mean_nothing(
    session: Session, case: str, why: str
) -> None:
    rule = "rejection" if case == "another rule" else "match"
    conversation = ask(session, preferences(check=False, rule=rule))
    answered = session.history.last[OWNER, conversation]
    if case == "another model":
        swap(session, Another(), "other")
    session.background.add(OWNER, conversation, replace(answered, one=case != "several runs"))
    found = proved(session, conversation)
    assert found["kind"] == "skipped" and why in found["why"]


class Another(ToyBackend):
    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, name="another", fingerprint="another")


def test_what_was_not_stored_is_not_proved(session: Session) -> None:
    conversation = ask(session, preferences(check=False))
    answered = session.history.last[OWNER, conversation]
    session.background.add(OWNER, conversation, replace(answered, run_id=None))
    assert session.background.idle(0)
    session.background.add(OWNER, conversation, replace(answered, run_id="gone"))
    assert session.background.idle(SECONDS) and proofs(session, conversation) == [{}]


def test_an_answer_that_differs_says_where_and_by_how_little(session: Session) -> None:
    def run(*tokens: tuple[int, float]) -> Run:
        emitted = [Token(id, at, "target", probability=p) for at, (id, p) in enumerate(tokens)]
        return Run(steps=(Step(0, tuple(emitted)),))

    plain, shown = run((1, 0.9), (2, 0.401)), run((1, 0.9), (3, 0.4))
    verdict = Verdict(False, 1, 2, "<b>a</b>", "b")
    proof = Proof(2, "hd", verdict, Speedup(), plain, shown, shown)
    assert stored_outcome(proof) == {
        "kind": "differs", "at": 2, "plain": "<b>a</b>", "said": "b", "early": False,
        "gap": pytest.approx(log(0.401 / 0.4), abs=1e-6),
    }  # fmt: skip
    early = replace(proof, shown=run((1, 0.9)))
    assert stored_outcome(early)["gap"] is None


def test_an_engine_that_is_gone_ends_the_proofs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = ask(session, preferences(check=False))

    def dead(request: object) -> None:
        raise EngineDied("gone")

    monkeypatch.setattr(session.engine, "generate", dead)
    session.background.add(OWNER, conversation, session.history.last[OWNER, conversation])
    assert session.background.idle(SECONDS) and proofs(session, conversation) == [{}]


def test_who_is_never_let_through_gives_up_and_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, tried = ask(session, preferences(check=False)), 0

    def gives_way(job: object) -> None:
        nonlocal tried
        tried += 1

    monkeypatch.setattr(session.background, "outcome", gives_way)
    session.background.add(OWNER, conversation, session.history.last[OWNER, conversation])
    found = proved(session, conversation)
    assert tried == TRIES and found["kind"] == "skipped"


def test_of_too_many_answers_the_oldest_are_left_out(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    background = Background(session.proofs)
    for number in range(MOST + 3):
        background.add(OWNER, str(number), Kept(str(number)))  # type: ignore[arg-type]
    assert [check.task.about for check in background.checks] == [str(n) for n in range(3, MOST + 3)]


class Kept:
    """An answer of which only the run matters."""

    same_text = one = True

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
