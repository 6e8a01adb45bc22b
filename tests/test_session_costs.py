"""What forwards cost: measured at first load, stored, corrected by answers, not by comparisons."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from app.preferences import Preferences
from app.session import Session
from engine import costs as engine_costs
from engine.backends.toy import ToyBackend
from engine.errors import StorageError
from engine.local import Local
from engine.methods import METHODS
from engine.settings import Drafting, Generation, Sampling
from storage.costs import CostStore, StoredCosts
from storage.database import Database

ME = "local"
GENERATION = Generation(Sampling(temperature=0.8, seed=3), max_tokens=60)
HIDDEN = ("plain", "hd-published", "rest", "lookup")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with few rounds: the toy needs no two seconds."""
    measure = partial(engine_costs.measure_costs, seconds=0.01)
    monkeypatch.setattr("app.costs.measure_costs", measure)


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


def stored(db: Database) -> StoredCosts | None:
    return CostStore(db, "toy", "toy", "cpu", "float32", 0).load()


def ask(session: Session, method: str = "hd", drafting: Drafting = METHODS["hd"].drafting) -> str:
    conversation = session.say(ME, None, "hello there")
    chosen = Preferences(GENERATION, method, drafting, fresh_seed=False)
    *_, last = session.answer(ME, conversation, chosen)
    return last.text


def test_costs_are_measured_once_and_loaded_from_then_on(session: Session, db: Database) -> None:
    shares: list[float] = []
    session.loaded.prepare(shares.append)
    assert shares == sorted(shares) and 0 < shares[-1] <= 1
    kept = stored(db)
    assert kept is not None and session.costs.curve is not None
    assert kept.points == session.costs.curve.points and kept.measured == session.costs.measured
    toy = ToyBackend()
    later = Session(Local(backend=toy), db)
    later.loaded.prepare(shares.clear)  # type: ignore[arg-type]
    assert toy.forwards == 0 and shares
    assert later.costs.curve is not None and later.costs.curve.points == kept.points
    assert later.costs.measured == kept.measured


@pytest.mark.parametrize(
    "points", ["rubbish", '{"0": 1}', '{"1": 1, "2": 2}', "{}", '{"0": 1, "9999": 2}']
)
def test_a_curve_that_cannot_be_used_is_measured_again(
    session: Session, db: Database, points: str
) -> None:
    session.loaded.prepare()
    with db.write() as handle:
        handle.execute("UPDATE costs SET points = ?", [points])
    toy = ToyBackend()
    later = Session(Local(backend=toy), db)
    later.loaded.prepare()
    assert toy.forwards > 0 and later.costs.curve is not None
    kept = stored(db)
    assert kept is not None and kept.points == later.costs.curve.points


def test_another_device_or_number_format_is_measured_for_itself(db: Database) -> None:
    Session(Local(backend=ToyBackend()), db).loaded.prepare()
    for change in ({"device": "cuda:0"}, {"dtype": "bfloat16"}, {"threads": 3}, {"kind": "other"}):
        toy = ToyBackend()
        toy.info = replace(toy.info, **change)
        Session(Local(backend=toy), db).loaded.prepare()
        assert toy.forwards > 0


def test_a_model_that_decodes_plainly_is_not_measured(db: Database, toy: ToyBackend) -> None:
    toy.info = replace(toy.info, can_tree=False)
    session = Session(Local(backend=toy), db)
    session.loaded.prepare()
    assert toy.forwards == 0 and session.costs.curve is None
    assert ask(session)


@pytest.mark.parametrize("method", ["load", "save"])
def test_a_store_that_fails_costs_memory_not_the_start(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*_: object) -> None:
        raise StorageError("The disk is full.")

    monkeypatch.setattr(CostStore, method, full)
    assert session.loaded.prepare() == ["The disk is full."]
    assert (session.costs.curve is None) == (method == "load")
    assert ask(session)


def test_a_model_that_fails_while_it_is_measured_can_still_be_asked(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for 64 rows")

    monkeypatch.setattr("app.costs.measure_costs", fail)
    (notice,) = session.loaded.prepare()
    assert "no room for 64 rows" in notice and "Tree nodes" in notice
    assert session.costs.curve is None and stored(db) is None and ask(session)


def test_an_answer_corrects_the_curve_and_stores_it_once(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.loaded.prepare()
    before, saves = stored(db), []
    save = CostStore.save

    def counted(*arguments: object) -> None:
        saves.append(arguments)
        save(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CostStore, "save", counted)
    ask(session)
    kept = stored(db)
    assert before is not None and kept is not None and len(saves) == 1
    assert kept.points != before.points and kept.other > 0
    assert kept.measured == before.measured, "a correction is no measurement"
    session.measure_costs()
    again = stored(db)
    assert again is not None and again.measured > before.measured and again.other == 0


@pytest.mark.parametrize("method", HIDDEN)
def test_methods_with_a_budget_of_their_own_leave_the_curve_alone(
    session: Session, db: Database, method: str
) -> None:
    session.loaded.prepare()
    before = stored(db)
    ask(session, method)
    assert stored(db) == before
    for drafting in (Drafting(budget="fixed"), Drafting(nodes=0), Drafting(tiers=())):
        ask(session, "hd", drafting)
    assert stored(db) == before


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.stack is None])
def test_a_comparison_leaves_the_curve_as_it_was(
    session: Session, db: Database, method: str
) -> None:
    session.loaded.prepare()
    assert session.costs.curve is not None
    before, points = stored(db), session.costs.curve.points
    if method != "plain":
        chosen = Preferences(GENERATION, method, fresh_seed=False)
        *_, last = session.compare(ME, "hello there", "", chosen, 2)
        answers = {tuple(t.id for t in timed.tokens) for pair in last.pairs for timed in pair}
        assert len(answers) == 1
    assert session.costs.curve.points == points and stored(db) == before


@pytest.mark.parametrize("price", [lambda n: 0.001, lambda n: 0.001 * (1 + n), lambda n: 1.0 + n])
def test_whatever_forwards_are_said_to_cost_the_text_stays(
    session: Session, price: Callable[[int], float]
) -> None:
    plain = ask(session, "plain")
    session.costs.curve = engine_costs.CostCurve({n: price(n) for n in (0, 7, 63)})
    assert ask(session) == plain
