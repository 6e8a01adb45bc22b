"""Why an answer was fast: what is told of its guesses is what was guessed, to its owner alone."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.service.preferences import Preferences
from app.service.session import Session
from app.service.why import PAGE, Data
from engine.errors import EngineDied, StorageError
from engine.methods import METHODS
from engine.recorded import NODE, nodes
from engine.settings import Generation, Sampling
from engine.types import CONTEXT, MODEL, Run
from storage.traces import Traces
from tests.support.inside import OWNER, answer, swap
from tests.support.toy import ToyBackend


def preferences(tokens: int = 200, seed: int = 3) -> Preferences:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
    drafting = replace(METHODS["hd"].drafting, budget="fixed", nodes=16)
    return Preferences(generation, "hd", drafting, fresh_seed=False)


def ask(session: Session, text: str, conversation: str | None = None, seed: int = 3) -> str:
    conversation = session.chat.say(OWNER, conversation, text)
    answer(session, conversation, preferences(seed=seed))
    return conversation


def last_run(session: Session, conversation: str) -> tuple[str, Run]:
    run_id = session.chat.conversations(OWNER).messages(conversation)[-1].run_id
    assert run_id is not None
    return run_id, Traces(session.database, OWNER).load(run_id)


def explained(session: Session, run_id: str, run: Run) -> list[Data]:
    """What is told of every token."""
    steps = [step.index for step in run.steps for _ in step.tokens]
    return [session.why.explain(OWNER, run_id, step, at) for at, step in enumerate(steps)]


def test_every_guess_of_an_answer_is_returned_once(session: Session) -> None:
    """Accepted in the place of its token, rejected beside what was said; the rest is counted."""
    run_id, run = last_run(session, ask(session, "once upon a time once upon"))
    shown = explained(session, run_id, run)
    assert all(each["recorded"] for each in shown) and len(shown) == len(run.tokens) > 100
    accepted = [guess for each in shown for guess in each.get("accepted", ())]
    rejected = [guess for each in shown for guess in each.get("rejected", ())]
    found = [node for step in run.steps for node in nodes(step) or ()]
    drafted = [token for token in run.tokens if token.source != "target"]
    assert [guess["id"] for guess in accepted] == [token.id for token in drafted]
    assert [guess["source"] for guess in accepted] == [token.source for token in drafted]
    assert len(accepted) == sum(node.accepted for node in found) > 10
    # What was guessed behind the end of an answer was reached, and has no token beside it.
    reached = sum(node.reached and not node.accepted for node in found)
    assert reached - 5 <= len(rejected) <= reached and len(rejected) > 10
    for guess in rejected:
        assert guess["percent"] > 0 and isinstance(guess["text"], str)
    for step in run.steps:
        unseen = sum(not node.reached for node in nodes(step) or ())
        assert {each["unseen"] for each in shown if each["step"] == step.index} == {unseen}
    assert json.loads(json.dumps(shown)) == shown


def test_the_place_that_is_shown_holds_what_was_copied(session: Session) -> None:
    conversation = ask(session, "tell me a story of a boat")
    ask(session, "tell me a story of a boat", conversation)
    messages = session.chat.conversations(OWNER).messages(conversation)
    texts = {message.id: message.content for message in messages}
    run_id, run = last_run(session, conversation)
    places = 0
    for at, shown in enumerate(explained(session, run_id, run)):
        for guess in shown.get("accepted", ()):
            place = guess.get("place")
            if guess["source"] != CONTEXT or place is None:
                continue
            places += 1
            assert texts[place["key"]][place["start"] : place["end"]] == place["copied"]
            assert place["copied"].endswith(run.tokens[at].text)
            if place["key"] == messages[-1].id:
                assert 0 <= place["first"] <= place["last"] < at
                ids = [token.id for token in run.tokens[place["first"] : place["last"] + 1]]
                size = min(guess["match"], at)
                assert ids == [token.id for token in run.tokens[at - size : at + 1]]
    assert places > 5


def test_past_answers_tell_how_often_or_where(session: Session) -> None:
    asked = "tell me a story of a boat"
    first = ask(session, asked)
    run_id, run = last_run(session, ask(session, asked))
    told = [
        guess
        for each in explained(session, run_id, run)
        for guess in each.get("accepted", ())
        if guess["source"] == MODEL
    ]
    counted = [guess for guess in told if "times" in guess]
    assert all(0 < guess["times"] <= guess["of"] for guess in counted)
    copied = [guess for guess in told if guess["match"] >= 8 and "title" in guess]
    assert copied and {guess["conversation"] for guess in copied} == {first}, [
        (g["match"], g.get("times")) for g in told
    ]


def test_nobody_else_is_notified(session: Session) -> None:
    run_id, _ = last_run(session, ask(session, "hello"))
    with pytest.raises(StorageError, match="no run"):
        session.why.explain("bob", run_id, 0, 0)
    with pytest.raises(StorageError, match="no run"):
        session.why.page("bob", run_id, 0)


@pytest.mark.parametrize(("step", "token"), [(0, -1), (-1, 0), (0, 10**9), (10**9, 0), (5, 0)])
def test_what_does_not_exist_is_not_reported(session: Session, step: int, token: int) -> None:
    run_id, _ = last_run(session, ask(session, "hello"))
    shown = session.why.explain(OWNER, run_id, step, token)
    assert shown == {"run": run_id, "step": step, "token": token, "recorded": False}


def test_an_old_run_is_reported_to_be_not_recorded(session: Session) -> None:
    run_id, run = last_run(session, ask(session, "hello"))
    with session.database.write() as handle:
        handle.execute("UPDATE steps SET tree = NULL")
    assert not session.why.explain(OWNER, run_id, 0, 0)["recorded"]
    assert {step["guesses"] for step in session.why.page(OWNER, run_id, 0)["steps"]} == {None}
    with session.database.write() as handle:
        handle.execute("UPDATE steps SET tree = x'00'")
    assert not session.why.explain(OWNER, run_id, 0, 0)["recorded"], "damaged, so as if not"


def test_a_token_that_no_model_has_reaches_none(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be damaged, and a native library may not survive such a number."""
    run_id, run = last_run(session, ask(session, "once upon a time once upon"))
    step = next(step for step in run.steps if step.tree)
    evil = NODE.pack(0xFFFF, 0xFF, 0, 0, 0) * sum(step.proposed.values())
    with session.database.write() as handle:
        handle.execute("UPDATE steps SET tree = ? WHERE position = ?", [evil, step.index])
    calls: list[int] = []
    texts = session.engine.texts

    def heard(tokens: Sequence[Sequence[int]]) -> list[str]:
        calls.extend(token for each in tokens for token in each)
        return texts(tokens)

    monkeypatch.setattr(session.engine, "texts", heard)
    page = session.why.page(OWNER, run_id, step.index)
    shown = next(each for each in page["steps"] if each["step"] == step.index)
    assert {guess[0] for guess in shown["guesses"]} == {0xFFFFFF}
    assert calls and max(calls) < session.current.info.vocabulary_size


def pages_of(session: Session, run_id: str) -> list[Data]:
    pages = [session.why.page(OWNER, run_id, 0)]
    while pages[-1]["first"] + PAGE < pages[-1]["total"]:
        pages.append(session.why.page(OWNER, run_id, pages[-1]["first"] + PAGE))
    return pages


def test_the_pages_of_a_replay_hold_the_whole_run(session: Session) -> None:
    run_id, run = last_run(session, ask(session, "once upon a time once upon"))
    pages = pages_of(session, run_id)
    assert len(pages) > 1 and json.loads(json.dumps(pages)) == pages
    steps = [step for page in pages for step in page["steps"]]
    assert [step["step"] for step in steps] == [step.index for step in run.steps if step.tokens]
    text = ""
    for page in pages:
        assert text.endswith(page["lead"]) and page["cut"] == (len(text) > len(page["lead"]))
        text += "".join(said[0] for step in page["steps"] for said in step["tokens"])
    assert text == "".join(token.text for token in run.tokens)
    for shown, step in zip(steps, run.steps, strict=False):
        found = nodes(step) or ()
        assert [(g[1], g[2], bool(g[5])) for g in shown["guesses"]] == [
            (node.parent, node.source, node.accepted) for node in found
        ]
        assert all(isinstance(guess[0], str) for guess in shown["guesses"])
    assert session.why.page(OWNER, run_id, 10**9)["steps"] == []
    assert session.why.page(OWNER, run_id, -5)["first"] == 0


def test_without_its_model_a_run_tells_the_texts_that_it_holds(session: Session) -> None:
    """And the numbers of the others."""
    run_id, run = last_run(session, ask(session, "once upon a time once upon"))
    before = [step["guesses"] for page in pages_of(session, run_id) for step in page["steps"]]
    swap(session, Other(), "other")
    after = [step["guesses"] for page in pages_of(session, run_id) for step in page["steps"]]
    known = {token.text for token in run.tokens}
    numbers = 0
    for old, new in zip(flat(before), flat(after), strict=True):
        assert new[1:] == old[1:]
        assert new[0] == old[0] or isinstance(new[0], int)
        assert (old[0] in known) == isinstance(new[0], str) or "\ufffd" in str(old[0])
        numbers += isinstance(new[0], int)
    assert numbers < len(flat(after)) / 2


class Other(ToyBackend):
    """Another model, whose tokens mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, fingerprint="another")

    def detokenize(self, tokens: Sequence[int]) -> str:
        raise AssertionError("these are not its tokens")


def flat(guesses: list[list[list[object]]]) -> list[list[object]]:
    return [guess for each in guesses for guess in each]


def test_a_dead_engine_leaves_what_is_stored(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = last_run(session, ask(session, "once upon a time once upon"))

    def dead(tokens: object) -> list[str]:
        raise EngineDied("gone")

    monkeypatch.setattr(session.engine, "texts", dead)
    assert session.why.page(OWNER, run_id, 0)["steps"]
    assert session.why.explain(OWNER, run_id, 0, 0)["recorded"]
