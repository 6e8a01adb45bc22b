"""Comparing any two ways to answer: methods, settings, models; and that the model that was loaded
before is back however a comparison of models ends."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import engine.loaded
from app.service.answering import Update
from app.service.comparison import LEFT, RIGHT, Progress, Proof, Race, Side
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.base import Backend
from engine.engine import Request
from engine.errors import Cancelled, EngineDied, ModelError, PromptError, SettingError
from engine.local import Local
from engine.methods import METHODS, PLAIN
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import verdict
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.types import Message, Run, Step, Token
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import (
    OWNER,
    Held,
    ask,
    first_pair,
    local,
    prove,
    soon,
    under_way,
    updates_of,
)
from tests.support.runs import run_of
from tests.support.shop import Shop, load_model
from tests.support.toy import deviating

GENERATION = Generation(Sampling(temperature=0.8, seed=3), max_tokens=60)
PLAINLY = Side(PLAIN, GENERATION)
HD = METHODS["hd"].using(Drafting(budget="fixed"))
CONTEXT = METHODS["context"].using(Drafting(budget="fixed"))


class Shelf(Shop):
    """Models that wait when they are told to, and the names of those that were loaded."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self.held)
        self.loaded: list[str] = []
        self.guesses: Any = None

    def held(self, name: str) -> Held:
        return Held(name=name, guesses=self.guesses)

    def load(self, source: str, runtime: Runtime) -> Backend:
        self.loaded.append(Path(source).stem)
        return super().load(source, runtime)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def session(db: Database, shelf: Shelf) -> Session:
    return shelf.session(db)


def sides(
    session: Session, left: Side, right: Side, repeats: int = 2, owner: str = OWNER
) -> Iterator[Progress | Waiting]:
    return session.proofs.compare_sides(owner, "hello there", "", (left, right), repeats)


def last_of(items: Iterator[Progress | Waiting]) -> Progress:
    return [item for item in items if isinstance(item, Progress)][-1]


def names(runs: Iterator[Run]) -> list[str]:
    return [run.model for run in runs]


def at_home(session: Session, shelf: Shelf) -> bool:
    """Whether the usual model is back, and nobody has to wait for it."""
    there = session.engine.state.source == shelf.source("one")
    return soon(
        lambda: there and not session.model_swap.closed and session.model_swap.slot.running is None
    )


def other_of(shelf: Shelf) -> Side:
    return Side(PLAIN, GENERATION, shelf.source("two"))


def test_two_methods_say_the_same_and_take_turns(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, warm, generate = list[str](), list[bool](), Local.generate

    def noted(engine: Local, request: Request) -> object:
        calls.append(request.method.name)
        warm.append(bool(request.measured and request.measured.warm))
        return generate(engine, request)

    monkeypatch.setattr(Local, "generate", noted)
    last = last_of(sides(session, Side(CONTEXT, GENERATION), Side(HD, GENERATION), 3))
    assert last.same_text and last.differs == "" and last.over
    assert calls == ["plain", "context", "hd", "hd", "context", "context", "hd"]
    assert warm == [True, *[False] * 6], "the machine is woken up once"
    for left, right in last.pairs:
        assert (left.method, right.method) == ("context", "hd")
        assert verdict(session.current.text, left, right).identical
    kinds = [run.method for run in Traces(session.database, OWNER).history()]
    assert sorted(kinds) == ["context"] * 3 + ["hd"] * 3, "looking at the prompt is no run"


def test_the_plain_speed_is_that_of_the_repeat_that_is_shown(session: Session) -> None:
    last = last_of(sides(session, PLAINLY, Side(HD, GENERATION), 3))
    plain, _ = last.pairs[last.middle]
    assert session.current.plain.tokens_per_second == summarise(plain).tokens_per_second


def test_no_side_knows_the_answer_that_was_just_given(session: Session) -> None:
    """The left one comes first, and its drafters are told before it begins."""
    ask(session, chosen=Preferences(GENERATION, "hd", HD.drafting, fresh_seed=False))
    model = Side(METHODS["model"], GENERATION)
    last = last_of(sides(session, model, Side(HD, GENERATION), 1))
    assert summarise(last.pairs[0][LEFT]).kept == 0
    assert summarise(last.pairs[0][RIGHT]).accepted.get("model", 0) == 0


def test_a_plain_side_tells_the_gain_on_whichever_side_it_stands(session: Session) -> None:
    last = last_of(sides(session, Side(HD, GENERATION), PLAINLY, 1))
    stored = {run.method: run.speedup for run in Traces(session.database, OWNER).history()}
    whole = last.speedup.whole
    assert whole and stored["plain"] is None
    assert stored["hd"] == pytest.approx(1 / whole)
    assert session.current.plain.when == "in the last comparison"


def test_other_settings_may_say_something_else(session: Session) -> None:
    hot = replace(GENERATION, sampling=Sampling(temperature=1.2, seed=3))
    last = last_of(sides(session, PLAINLY, Side(PLAIN, hot), 1))
    assert last.differs == "settings" and not last.same_text
    assert last.speedup.whole is not None, "two runs that are not the same may differ in speed"
    fewer = HD.using(Drafting(("context",), nodes=4))
    drafting = last_of(sides(session, Side(HD, GENERATION), Side(fewer, GENERATION), 1))
    assert drafting.same_text and drafting.differs == "", "how is drafted changes no text"
    apart = HD.using(Drafting(rule="rejection"))
    assert not last_of(sides(session, PLAINLY, Side(apart, GENERATION), 1)).same_text


def test_two_models_are_compared_and_the_first_one_is_back(session: Session, shelf: Shelf) -> None:
    session.stacks.load([shelf.source("draft")])
    session.stacks.spec = "draft@2"
    shelf.loaded.clear()
    other = Side(HD, GENERATION, shelf.source("two"))
    last = last_of(sides(session, PLAINLY, other, 3))
    assert last.over and last.differs == "model" and not last.same_text
    assert [names(iter(pair)) for pair in last.pairs] == [["one", "two"]] * 3
    assert last.by_character is not None and last.by_character > 0
    assert at_home(session, shelf)
    loads = [name for name in shelf.loaded if name != "draft"]
    assert loads == ["two", "one", "two", "one"], "one exchange between two runs at most"
    assert list(session.stacks.sources) == ["draft"] and session.stacks.spec == "draft@2"


def test_a_model_is_the_same_however_slow_its_head_was_found_this_time(
    session: Session, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured at each load is another figure each time."""
    shelf.guesses, times = deviating(0.5), count(1)
    monkeypatch.setattr(engine.loaded, "expensive", lambda *_: f"a guess takes {next(times)} ms")
    texts = [progress.text for progress in load_model(session, shelf.source("three"))]
    assert "Timing the head of three …" in texts
    conversation, _ = ask(session, chosen=Preferences(GENERATION))
    last = last_of(sides(session, PLAINLY, other_of(shelf), 3))
    assert last.over and len(last.pairs) == 3
    assert soon(lambda: session.engine.state.source == shelf.source("three"))
    assert soon(lambda: session.model_swap.slot.running is None) and next(times) > 4
    proof = prove(session, conversation)
    assert isinstance(proof, Proof) and proof.verdict is not None, "its answer can be proved still"


def test_two_methods_of_another_model_are_compared_by_it(session: Session, shelf: Shelf) -> None:
    left, right = (Side(method, GENERATION, shelf.source("two")) for method in (PLAIN, HD))
    last = last_of(sides(session, left, right, 1))
    assert last.same_text and last.foreign and last.differs == ""
    assert {run.model for run in last.pairs[0]} == {"two"}
    assert session.current.plain.when != "in the last comparison", "that was another model"
    assert at_home(session, shelf)


@pytest.mark.parametrize("end", ["stop", "closed", "broken"])
def test_however_it_ends_the_first_model_is_back(session: Session, shelf: Shelf, end: str) -> None:
    running = sides(session, PLAINLY, other_of(shelf), 5)
    first_pair(running)
    assert session.current.info.name == "two"
    if end == "stop":
        session.tasks.stop(OWNER, "")
        assert last_of(running).cancelled
    elif end == "closed":
        running.close()  # type: ignore[attr-defined]
    else:
        shelf.broken.add(shelf.source("two"))
        with pytest.raises(ModelError, match="damaged"):
            list(running)
    assert soon(lambda: session.engine.state.source == shelf.source("one"))
    assert at_home(session, shelf)
    _, answer = ask(session, "and now?", chosen=Preferences(GENERATION))
    assert Traces(session.database, OWNER).history()[0].model == "one"


def test_the_first_model_is_back_after_the_engine_ended_and_came_again(
    session: Session, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempts meet no engine, or another load that came first."""
    start, left = session.models.start, [EngineDied("It ended."), EngineDied("It ended.")]

    def dead(source: str, *more: Any) -> Any:
        if source == shelf.source("one") and left:
            raise left.pop()
        return start(source, *more)

    monkeypatch.setattr(session.models, "start", dead)
    last = last_of(sides(session, PLAINLY, other_of(shelf), 1))
    assert last.over and not left
    assert at_home(session, shelf)


def test_a_first_model_that_cannot_come_back_is_reported(session: Session, shelf: Shelf) -> None:
    shelf.broken.add(shelf.source("one"))
    last = last_of(sides(session, PLAINLY, other_of(shelf), 1))
    assert last.over
    assert soon(lambda: session.model_swap.slot.running is None) and not session.model_swap.closed
    (notice,) = session.notices.take(OWNER)
    assert "one was not loaded again" in notice and "damaged" in notice


def test_an_answer_waits_for_the_usual_model_and_does_not_wait_for_all_pairs(
    session: Session, shelf: Shelf
) -> None:
    running = sides(session, PLAINLY, other_of(shelf), 7)
    first_pair(running)
    conversation = session.chat.say(OWNER, None, "hello")
    answer = updates_of(session, OWNER, conversation, Preferences(GENERATION))
    assert next(answer) == Waiting(1, loading=True)
    assert session.current.info.name == "two"
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(list, answer)
        pairs = 0
        for item in running:
            pairs = max(pairs, len(item.pairs)) if isinstance(item, Progress) else pairs
            if not session.tasks.busy(OWNER, conversation):
                break
        ended.result(20)
    assert pairs < 7
    (run,) = [run for run in Traces(session.database, OWNER).history() if run.kind == "chat"]
    assert run.model == "one"
    session.tasks.stop(OWNER, "")
    list(running)
    assert at_home(session, shelf)


def test_a_title_waits_for_the_usual_model_too(session: Session, shelf: Shelf) -> None:
    conversation = session.chat.say(OWNER, None, "hello there")
    session.model_swap.closed = True
    with ThreadPoolExecutor() as pool:
        title = pool.submit(session.chat.suggest_title, OWNER, conversation)
        assert soon(lambda: bool(session.model_swap.waiting)) and not title.done()
        session.model_swap.closed = False
        with suppress(PromptError):  # What a toy proposes may be no title.
            title.result(20)


def test_an_answer_for_a_program_waits_for_the_usual_model_too(session: Session) -> None:
    session.model_swap.closed = True
    request = Request((Message("user", "hello there"),), generation=GENERATION)
    with session.programs.task_for("api:key") as task:
        events = session.programs.answer("api:key", request, task)
        assert next(events) == Waiting(1, loading=True)
        session.model_swap.closed = False
        assert any(isinstance(event, Step) for event in events)


def test_no_model_is_exchanged_under_an_answer(session: Session, shelf: Shelf) -> None:
    long = Preferences(replace(GENERATION, max_tokens=400), "plain", fresh_seed=False)
    toy = local(session).loaded.backend
    assert isinstance(toy, Held)
    _, answer = under_way(session, toy, "hello", long)
    running = sides(session, other_of(shelf), PLAINLY, 1)
    assert next(running) == Waiting(1)
    assert shelf.loaded == ["one"] and session.model_swap.closed
    toy.allow()
    *_, whole = answer
    assert isinstance(whole, Update) and whole.finish != "cancelled"
    assert last_of(running).over
    assert at_home(session, shelf)


def test_a_model_that_the_user_loads_meanwhile_stays(session: Session, shelf: Shelf) -> None:
    running = sides(session, PLAINLY, other_of(shelf), 5)
    first_pair(running)
    list(session.models.load(shelf.source("three")))
    with pytest.raises(ModelError, match="was replaced by another model"):
        list(running)
    assert soon(lambda: session.model_swap.slot.running is None)
    assert session.engine.state.source == shelf.source("three") and not session.model_swap.closed


def test_what_cannot_be_loaded_is_refused_before_anything_is_unloaded(
    session: Session, shelf: Shelf
) -> None:
    home = session.engine.state
    with pytest.raises(ModelError, match="not on this machine"):
        next(sides(session, PLAINLY, Side(PLAIN, GENERATION, "hub/else")))
    shelf.room = -20
    with pytest.raises(ModelError, match="Nothing was loaded"):
        next(sides(session, PLAINLY, other_of(shelf)))
    assert session.engine.state == home and session.model_swap.slot.running is None


def test_one_comparison_of_models_at_a_time(session: Session, shelf: Shelf) -> None:
    running = sides(session, other_of(shelf), PLAINLY, 2)
    next(running)
    with pytest.raises(ModelError, match="being compared already"):
        next(sides(session, other_of(shelf), PLAINLY, 2))
    assert last_of(running).over
    assert at_home(session, shelf)


def test_guests_compare_methods_of_the_loaded_model_alone(db: Database, shelf: Shelf) -> None:
    session = shelf.session(db, guests=True)
    with pytest.raises(SettingError, match="others share this app"):
        next(sides(session, PLAINLY, other_of(shelf), owner="guest:a"))
    same = Side(HD, GENERATION, shelf.source("one"))
    assert last_of(sides(session, PLAINLY, same, owner="guest:a")).same_text


def test_a_stop_while_others_have_the_model_ends_it(session: Session, shelf: Shelf) -> None:
    with session.tasks.begin("else", ""):
        running = sides(session, other_of(shelf), PLAINLY, 2)
        assert next(running) == Waiting(1)
        session.tasks.stop(OWNER, "")
        with pytest.raises(Cancelled):
            list(running)
    assert at_home(session, shelf) and shelf.loaded == ["one"]


def test_where_two_runs_part_the_gap_between_them_is_reported() -> None:
    """At T = 0 it is of the model's own scores; above that, the noise of the place counts in."""

    def run(token: int, probability: float, temperature: float) -> Run:
        step = Step(0, (Token(token, 5, "target", 0, "x", probability),))
        drawn = {"temperature": temperature, "seed": 7}
        return run_of([step], settings={"generation": {"sampling": drawn}})

    def gap(temperature: float) -> float:
        pair = run(97, 0.5, temperature), run(98, 0.25, temperature)
        found = verdict(lambda ids: str(ids), *pair).gap
        assert found is not None
        return found

    assert gap(0.0) == pytest.approx(0.6931, abs=1e-3)
    assert gap(1.0) != pytest.approx(gap(0.0)) and gap(1.0) >= 0
    assert verdict(str, run(97, 0.0, 0.0), run(98, 0.5, 0.0)).gap is None
    assert (
        verdict(
            str, run_of([Step(0, (Token(97, 5, "target", 0, "x", 0.5),))]), run(98, 0.5, 0.0)
        ).gap
        is None
    )


# A race: both sides at once.


def race(session: Session, left: Side, right: Side) -> Iterator[Race | Waiting]:
    return session.proofs.race(OWNER, "hello there", "", (left, right))


def ended(items: Iterator[Race | Waiting]) -> Race:
    *_, last = items
    assert isinstance(last, Race) and last.over
    return last


def test_a_race_says_who_was_first_and_keeps_nothing(session: Session) -> None:
    last = ended(race(session, PLAINLY, Side(HD, GENERATION)))
    assert last.same_text and last.differs == "" and not last.cancelled
    assert [run.method for run in last.runs] == ["plain", "hd"]
    assert verdict(session.current.text, *last.runs).identical
    assert last.first in (LEFT, RIGHT) and 0 <= last.behind <= len(last.runs[LEFT].tokens)
    assert not list(Traces(session.database, OWNER).history())
    assert session.current.plain.when != "in the last comparison"


def test_no_side_of_a_race_knows_the_answer_that_was_just_given(session: Session) -> None:
    ask(session, chosen=Preferences(GENERATION, "hd", HD.drafting, fresh_seed=False))
    model = Side(METHODS["model"].using(Drafting(budget="fixed")), GENERATION)
    last = ended(race(session, model, model))
    assert [summarise(run).kept for run in last.runs] == [0, 0]


def test_a_race_with_other_settings_is_no_fault(session: Session) -> None:
    hot = replace(GENERATION, sampling=Sampling(temperature=1.2, seed=3))
    last = ended(race(session, PLAINLY, Side(PLAIN, hot)))
    assert last.differs == "settings" and not last.same_text


def test_a_race_is_stopped(session: Session) -> None:
    held = local(session).loaded.backend
    assert isinstance(held, Held)
    held.allow(20)
    long = replace(GENERATION, max_tokens=400)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ended, race(session, Side(PLAIN, long), Side(HD, long)))
        assert soon(lambda: held.allowed[0] == 0)
        session.tasks.stop(OWNER, "")
        held.allow()
        last = running.result(20)
    assert last.cancelled and 0 < len(last.runs[LEFT].tokens) < 400


def test_both_sides_of_a_race_use_the_loaded_model(session: Session, shelf: Shelf) -> None:
    with pytest.raises(PromptError, match="Both sides of a race use the loaded model"):
        list(race(session, PLAINLY, other_of(shelf)))
    named = Side(PLAIN, GENERATION, shelf.source("one"))
    assert ended(race(session, named, PLAINLY)).same_text, "the loaded one by its name"
