"""What forwards cost: measured at first load, stored, corrected by answers, not by comparisons."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.service.models import Progress
from app.service.preferences import Preferences
from app.service.session import Session
from app.service.tasks import Task
from engine.backends.base import Backend
from engine.backends.toy import ToyBackend, deviating
from engine.drafting import costs as engine_costs
from engine.engine import Load
from engine.errors import StorageError
from engine.local import Local
from engine.methods import METHODS
from engine.models.loaders import ModelLoaders
from engine.settings import Drafting, Generation, Sampling
from engine.types import DATABASES
from storage.costs import CostStore, StoredCosts
from storage.database import Database
from tests.support.inside import OWNER, local

GENERATION = Generation(Sampling(temperature=0.8, seed=3), max_tokens=60)
HIDDEN = ("plain", "hd-published", "rest", "lookup")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure with few rounds: the toy needs no two seconds. Says which models were."""
    found: list[str] = []

    def measure(backend: Backend, **named: Any) -> engine_costs.CostCurve:
        found.append(backend.info.name)
        return engine_costs.measure_costs(backend, seconds=0.01, **named)

    monkeypatch.setattr("engine.loaded.measure_costs", measure)
    return found


def load(db: Database, toy: ToyBackend, shares: list[float] | None = None) -> Session:
    """A session whose engine has just loaded the toy."""
    session = Session(Local(loaders=ModelLoaders(load=lambda source, runtime: toy)), db)

    def report(progress: Progress) -> None:
        if shares is not None and progress.share is not None:
            shares.append(progress.share)

    session.models.notices = []
    session.models.exchange(Load("toy"), report, Task(OWNER))
    assert session.engine.state.there
    return session


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return load(db, toy)


def stored(db: Database) -> StoredCosts | None:
    return CostStore(db, "toy", "toy", "cpu", "float32", 0).load()


def ask(session: Session, method: str = "hd", drafting: Drafting = METHODS["hd"].drafting) -> str:
    conversation = session.chat.say(OWNER, None, "hello there")
    chosen = Preferences(GENERATION, method, drafting, fresh_seed=False)
    *_, last = session.answering.answer(OWNER, conversation, chosen)
    return last.text


def test_costs_are_measured_once_and_loaded_from_then_on(db: Database, measured: list[str]) -> None:
    shares: list[float] = []
    session = load(db, ToyBackend(), shares)
    assert shares == sorted(shares) and 0 < shares[-1] <= 1
    kept = stored(db)
    assert kept is not None and session.costs.curve is not None
    assert kept.points == session.costs.curve.points and kept.measured == session.costs.measured
    shares.clear()
    later = load(db, ToyBackend(), shares)
    assert measured == ["toy"] and not shares
    assert later.costs.curve is not None and later.costs.curve.points == kept.points
    assert later.costs.measured == kept.measured
    used = local(later).loaded.curve
    assert used is not None and used.points == kept.points and stored(db) == kept


def test_what_cached_tokens_cost_is_kept_with_the_curve(session: Session, db: Database) -> None:
    with db.write() as handle:
        handle.execute("UPDATE costs SET token = 1e-7, row = 2e-8")
    later = load(db, ToyBackend())
    assert later.costs.curve is not None
    for curve in (later.costs.curve, local(later).loaded.curve):
        assert curve is not None and (curve.growth.token, curve.growth.row) == (1e-7, 2e-8)
    used = local(later).loaded.curve
    assert ask(later) and used is not None
    kept = stored(db)
    assert kept is not None and (kept.token, kept.row) == (used.growth.token, used.growth.row)


@pytest.mark.parametrize(
    "points", ["rubbish", '{"0": 1}', '{"1": 1, "2": 2}', "{}", '{"0": 1, "9999": 2}']
)
def test_a_curve_that_cannot_be_used_is_measured_again(
    session: Session, db: Database, measured: list[str], points: str
) -> None:
    with db.write() as handle:
        handle.execute("UPDATE costs SET points = ?", [points])
    later = load(db, ToyBackend())
    assert measured == ["toy", "toy"] and later.costs.curve is not None
    kept = stored(db)
    assert kept is not None and kept.points == later.costs.curve.points


def test_another_device_or_number_format_is_measured_for_itself(
    session: Session, db: Database, measured: list[str]
) -> None:
    changes: list[dict[str, Any]] = [
        {"device": "cuda:0"}, {"dtype": "bfloat16"}, {"threads": 3}, {"kind": "other"},
        {"ranks": 2}, {"ranks": 4},
    ]  # fmt: skip
    for change in changes:
        toy = ToyBackend()
        toy.info = replace(toy.info, **change)
        measured.clear()
        load(db, toy)
        assert measured == ["toy"]


def test_a_model_that_decodes_plainly_is_not_measured(
    db: Database, toy: ToyBackend, measured: list[str]
) -> None:
    toy.info = replace(toy.info, can_tree=False)
    session = load(db, toy)
    assert not measured and session.costs.curve is None
    assert ask(session)


@pytest.mark.parametrize("method", ["load", "save"])
def test_a_store_that_fails_costs_memory_not_the_start(
    db: Database, toy: ToyBackend, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*_: object) -> None:
        raise StorageError("The disk is full.")

    monkeypatch.setattr(CostStore, method, full)
    session = load(db, toy)
    assert session.models.notices == ["The disk is full."]
    assert session.costs.curve is not None and local(session).loaded.curve is not None
    assert ask(session)


def test_a_model_that_fails_while_it_is_measured_can_still_be_asked(
    db: Database, toy: ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for 64 rows")

    monkeypatch.setattr("engine.loaded.measure_costs", fail)
    session = load(db, toy)
    (notice,) = session.models.notices
    assert "no room for 64 rows" in notice and "Most drafted tokens" in notice
    assert session.costs.curve is None and stored(db) is None and ask(session)


def test_an_answer_corrects_the_curve_and_stores_it_once(
    session: Session, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    session.costs.measure()
    again = stored(db)
    assert again is not None and again.measured > before.measured and again.other == 0


@pytest.mark.parametrize("method", HIDDEN)
def test_methods_with_a_budget_of_their_own_leave_the_curve_alone(
    session: Session, db: Database, method: str
) -> None:
    before = stored(db)
    ask(session, method)
    assert stored(db) == before
    for drafting in (Drafting(budget="fixed"), Drafting(nodes=0), Drafting(tiers=())):
        ask(session, "hd", drafting)
    assert stored(db) == before


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if m.stack is None])
def test_a_comparison_leaves_the_curve_as_it_was(db: Database, method: str) -> None:
    session = load(db, ToyBackend(guesses=deviating(0.5)))
    used = local(session).loaded.curve
    assert used is not None
    before, points = stored(db), dict(used.points)
    if method != "plain":
        chosen = Preferences(GENERATION, method, fresh_seed=False)
        *_, last = session.proofs.compare(OWNER, "hello there", "", chosen, 2)
        answers = {tuple(t.id for t in timed.tokens) for pair in last.pairs for timed in pair}
        assert len(answers) == 1
    assert used.points == points and used.other == 0 and stored(db) == before


def test_a_measured_run_starts_from_what_drafting_was_worth(session: Session) -> None:
    """Else the page's answer and its proof would draft differently."""
    loaded = local(session).loaded
    assert loaded.curve is not None
    gain = loaded.curve.gate.gains[DATABASES]
    gain.backoff = gain.length = 512
    copy = loaded.copy_of(METHODS["hd"])
    assert copy is not None and copy.gate == loaded.curve.gate
    assert copy.table == loaded.curve.table
    copy.gate.gains[DATABASES].backoff = 0
    assert gain.backoff == 512 and loaded.copy_of(METHODS["plain"]) is None


@pytest.mark.parametrize("price", [lambda n: 0.001, lambda n: 0.001 * (1 + n), lambda n: 1.0 + n])
def test_whatever_forwards_are_said_to_cost_the_text_stays(
    session: Session, price: Callable[[int], float]
) -> None:
    plain = ask(session, "plain")
    local(session).loaded.curve = engine_costs.CostCurve({n: price(n) for n in (0, 7, 63)})
    assert ask(session) == plain
