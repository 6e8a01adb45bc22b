"""What is known of the loaded model: what drafts for it, and what its forwards cost."""

from dataclasses import replace
from typing import Any

import pytest

from app.service.current import NO_HEAD, NO_MODELS, drafters, line
from app.service.jobs import Job, Progress
from app.service.models import Loading
from app.service.preferences import Preferences
from app.service.session import Session
from engine.backends.base import Backend, BackendInfo
from engine.drafting import costs as engine_costs
from engine.engine import Load
from engine.heads.base import HeadInfo
from engine.local import Local
from engine.methods import METHODS
from engine.models.loaders import ModelLoaders
from engine.settings import Drafting, Generation, Sampling
from engine.types import DATABASES, Costs
from storage.database import Database
from storage.drafting import DraftingStore
from storage.machine import CostStore
from tests.support.inside import FULL, OWNER, compare, failing, local
from tests.support.inside import ask as answered
from tests.support.toy import ToyBackend, deviating

INFO = ToyBackend().info
MTP = HeadInfo("MTP", 8, branches=False)


def info(**changes: object) -> BackendInfo:
    return replace(INFO, head=None, **changes)


@pytest.mark.parametrize(
    ("leaves", "depth", "expected"),
    [
        (None, None, "several guesses per token"),
        (8, None, "several guesses per token, up to 8 branches"),
        (128, None, "several guesses per token"),
        (8, 5, "several guesses per token, up to 8 branches, up to 5 tokens ahead"),
        (1, None, "one guess per token"),
        (1, 8, "one guess per token, up to 8 tokens ahead"),
        (1, 1, "one guess per token, up to 1 token ahead"),
    ],
)
def test_the_form_of_what_the_databases_draft(
    leaves: int | None, depth: int | None, expected: str
) -> None:
    databases, head, models = drafters(info(leaves=leaves, depth=depth))
    assert (databases.name, databases.how, databases.problem) == ("databases", expected, "")
    assert (head.how, head.problem) == ("", NO_HEAD)
    assert (models.how, models.problem) == ("", NO_MODELS)


def test_a_head_is_reported_with_its_depth_or_why_it_does_not_draft() -> None:
    _, head, _ = drafters(replace(INFO, head=MTP))
    assert head.how == "MTP, up to 8 tokens ahead, where it pays" and not head.problem
    broken = replace(MTP, depth=0, note="The head of m cannot be used: it has another vocabulary.")
    _, head, _ = drafters(replace(INFO, head=broken))
    assert not head.how and head.text == broken.note


def test_a_model_that_decodes_plainly_is_drafted_for_by_nothing_and_says_so() -> None:
    plain = replace(INFO, can_tree=False, head=MTP)
    for each in drafters(plain, ["small"]):
        assert not each.how and "decodes plainly" in each.text
    assert drafters(info(can_tree=False))[1].text == NO_HEAD
    assert line(plain, ["small"]) == "Guesses come from: nothing, as it decodes plainly."


def test_the_line_names_what_drafts_alone() -> None:
    assert line(info()) == "Guesses come from: databases (several guesses per token)."
    chain = replace(INFO, leaves=1, depth=8, head=MTP)
    assert line(chain, ["small"]) == (
        "Guesses come from: databases (one guess per token, up to 8 tokens ahead), built-in head "
        "(MTP, up to 8 tokens ahead, where it pays), draft models (small, if the chosen method "
        "uses them)."
    )


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
    loaders = ModelLoaders(load=lambda source, runtime: toy)
    session = Session(Local(loaders=loaders, store=DraftingStore(db)), db)

    def report(progress: Progress) -> None:
        if shares is not None and progress.share is not None:
            shares.append(progress.share)

    job: Loading = Job(lambda job: session.models.exchange(Load("toy"), job), Progress(None, ""))
    job.report = report  # type: ignore[method-assign]
    job.start("loader").result()
    assert session.engine.state.is_loaded
    return session


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return load(db, toy)


def stored(db: Database) -> Costs | None:
    return CostStore(db, "toy", "toy", "cpu", "float32", 0).load()


def ask(session: Session, method: str = "hd", drafting: Drafting = METHODS["hd"].drafting) -> str:
    chosen = Preferences(GENERATION, method, drafting, fresh_seed=False)
    return answered(session, chosen=chosen)[1].text


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


@pytest.mark.parametrize("points", ["rubbish", '{"1": 1, "2": 2}'])
def test_a_curve_that_cannot_be_used_is_measured_again(
    session: Session, db: Database, measured: list[str], points: str
) -> None:
    with db.write() as handle:
        handle.execute("UPDATE costs SET points = ?", [points])
    later = load(db, ToyBackend())
    assert measured == ["toy", "toy"] and later.costs.curve is not None
    kept = stored(db)
    assert kept is not None and kept.points == later.costs.curve.points


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
    monkeypatch.setattr(CostStore, method, failing(FULL))
    session = load(db, toy)
    assert session.models.notices == ["The disk is full."]
    assert session.costs.curve is not None and local(session).loaded.curve is not None
    assert ask(session)


def test_a_model_that_fails_while_it_is_measured_can_still_be_asked(
    db: Database, toy: ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loaded.measure_costs", failing(MemoryError("no room for 64 rows")))
    session = load(db, toy)
    (notice,) = session.models.notices
    assert "no room for 64 rows" in notice and "Max drafted tokens" in notice
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


@pytest.mark.parametrize("method", ["hd", "hd+head", "lookup"])
def test_a_comparison_leaves_the_curve_as_it_was(db: Database, method: str) -> None:
    session = load(db, ToyBackend(guesses=deviating(0.5)))
    used = local(session).loaded.curve
    assert used is not None
    before, points = stored(db), dict(used.points)
    chosen = Preferences(GENERATION, method, fresh_seed=False)
    *_, last = compare(session, OWNER, "hello there", chosen, 2)
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
