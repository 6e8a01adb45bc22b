"""Benchmarks: their order, what is kept when they end early, and what their figures say."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.service import benchmark
from app.service.benchmark import Cell, cells
from app.service.benchmark_report import Plan, Report, as_csv, as_json, drops, report
from app.service.preferences import Preferences
from app.service.session import Session
from engine.compare import Speedup
from engine.decode import Turns
from engine.engine import Load, Request
from engine.errors import Cancelled, EngineDied, ModelError, PromptError, SettingError, StorageError
from engine.local import Local
from engine.methods import METHODS, PLAIN
from engine.models.loaders import ModelLoaders
from engine.settings import Drafting, Generation, Sampling
from engine.types import Question
from storage.benchmarks import Benchmark, Benchmarks, Result
from storage.database import Database
from storage.drafting import BENCHMARK
from tests.support.inside import OWNER, TOYS, Held, ask, local, memory, on_toy, soon, updates_of

HD, CONTEXT, MODEL = (
    METHODS[name].using(Drafting(budget="fixed")) for name in ("hd", "context", "model")
)
QUESTIONS = tuple(
    Question(str(n), kind, text)
    for n, (kind, text) in enumerate(
        (("qa", "who is it?"), ("math", "1 and 1?"), ("qa", "who was it?"), ("math", "2 and 2?"))
    )
)
GENERATION = Generation(Sampling(0.8, seed=3), 24)


def plan(
    methods: tuple[Any, ...] = (PLAIN, HD),
    repeats: int = 1,
    questions: Any = QUESTIONS,
    **more: Any,
) -> Plan:
    return Plan("Four", tuple(questions), methods, GENERATION, repeats, **more)


@pytest.fixture
def session(db: Database, toy: Held, each_step: None) -> Session:
    return on_toy(db, toy, loaders=TOYS)


def made(session: Session, requested: Plan) -> Report:
    """A benchmark from its beginning to its end."""
    return session.benchmarks.report(OWNER, session.benchmarks.start(OWNER, requested).result())


def stored(session: Session, name: str) -> tuple[Result, ...]:
    return session.benchmarks.store(OWNER).results(name)


def test_every_method_comes_first_equally_often() -> None:
    methods = PLAIN, HD, CONTEXT
    order = list(cells(plan(methods, repeats=2, questions=QUESTIONS[:3])))
    turns = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert [turn[0].method.name for turn in turns] == [
        *("plain", "hd", "hd", "context", "context", "plain"),
    ]
    assert all({cell.method for cell in turn} == set(methods) for turn in turns)
    assert [(turn[0].position, turn[0].repeat) for turn in turns] == [
        (at, repeat) for at in range(3) for repeat in range(2)
    ]
    done = Result(0, "hd", 1, 3)
    left = list(cells(plan(methods, repeats=2, questions=QUESTIONS[:3]), [done]))
    assert len(left) == 17 and Cell(0, 1, HD) not in left


def test_the_figures_of_a_benchmark(session: Session) -> None:
    found = made(session, plan((PLAIN, HD, CONTEXT), repeats=2))
    assert found.complete == 4 and found.benchmark.done == 24 == found.benchmark.runs
    assert {name: len(own) for name, own in found.categories.items()} == {"qa": 3, "math": 3}
    plain, fast, _ = found.metrics
    assert plain.speedup == Speedup() and plain.quartiles is None and plain.compared == 0
    assert plain.tokens_per_step == 1.0 and plain.accepted is None
    assert (fast.identical, fast.compared, fast.differing) == (4, 4, ())
    assert fast.quartiles is not None and fast.quartiles[0] <= fast.quartiles[2]
    assert fast.tokens == plain.tokens and fast.tokens_per_step > 1
    assert found.unsteady == 0 and found.disturbed == 0 and found.failed == ()
    assert session.benchmarks.status is None


def test_no_run_teaches_another_and_none_is_a_trace(session: Session, db: Database) -> None:
    """Whatever the order, a method drafts for a question what it would draft alone."""
    both = made(session, plan((PLAIN, HD, MODEL), repeats=3))
    alone = made(session, plan((HD,), repeats=1))
    drafted = [
        [
            (r.position, r.drafted, r.kept)
            for r in stored(session, each.benchmark.id)
            if (r.method, r.repeat) == ("hd", repeat)
        ]
        for each, repeat in ((both, 0), (both, 2), (alone, 0))
    ]
    assert drafted[0] == drafted[1] == drafted[2]
    model = both.metrics[2]
    assert model.tokens_per_step == 1.0, "nothing was said before"
    assert db.execute_read("SELECT count(*) FROM runs") == [(0,)]
    assert db.execute_read("SELECT count(*) FROM ngrams") == [(0,)]
    assert BENCHMARK not in memory(session).past_answers


def test_what_was_said_before_is_known_where_that_is_wanted(session: Session) -> None:
    requested = Preferences(GENERATION, "hd", HD.drafting, fresh_seed=False)
    ask(session, QUESTIONS[0].text, chosen=requested)
    questions = QUESTIONS[:1]
    fresh, known = (
        made(session, plan((PLAIN, MODEL), questions=questions, known=known))
        for known in (False, True)
    )
    assert fresh.metrics[1].tokens_per_step == 1.0 < known.metrics[1].tokens_per_step
    assert session.past_answers.ngrams(BENCHMARK, "toy").rows() == 0, "the copy is gone"
    assert session.past_answers.ngrams(OWNER, "toy").rows() > 0
    assert session.benchmarks.before(OWNER, known.benchmark) is None, "that is another thing"


def test_a_stop_keeps_what_is_done_and_it_continues_from_there(
    session: Session, toy: Held, db: Database
) -> None:
    runs = session.benchmarks
    toy.allow(200)
    job = runs.start(OWNER, plan())
    assert soon(lambda: toy.allowed[0] == 0)
    standing = runs.status
    assert standing is not None and 0 < standing.done < 8 == standing.runs
    with pytest.raises(ModelError, match="under way already"):
        runs.start(OWNER, plan())
    runs.stop("someone else")
    assert not job.stop.is_set()
    runs.stop(OWNER)
    toy.allow()
    with pytest.raises(Cancelled):
        job.result()
    assert job.problem == "", "who stops it knows why"
    name = standing.benchmark
    kept = stored(session, name)
    assert len(kept) == standing.done
    again = Session(local(session), db)  # as after a restart of the program
    assert again.benchmarks.resume(OWNER, name).result() == name
    results = stored(again, name)
    assert len(results) == 8 and results[: len(kept)] == kept, "nothing is measured twice"
    assert again.benchmarks.report(OWNER, name).complete == 4


def test_figures_are_of_questions_that_all_methods_have_answered() -> None:
    requested = plan()
    results = [
        Result(0, "plain", 0, 10, 10, decode_seconds=2.0, answer=(1,)),
        Result(0, "hd", 0, 10, 5, kept=5, drafted=8, decode_seconds=1.0, answer=(1,)),
        Result(1, "plain", 0, 10, 10, decode_seconds=99.0, answer=(2,)),
    ]
    found = report(line(), requested, results)
    assert found.complete == 1 and found.metrics[1].speedup.whole == 2.0
    assert found.metrics[0].tokens_per_second == 5.0 and set(found.categories) == {"qa"}
    assert report(line(), requested, results[:1]).metrics == ()


def line(**more: Any) -> Benchmark:
    made = Benchmark(
        "Four", "toy", "print", "here", "0.1.0", "asked", plan().mapping(), 8, "id", 100.0, 8
    )
    return replace(made, **more)


def test_a_speedup_is_all_time_over_all_time_and_a_repeat_counts_with_its_median() -> None:
    def results(method: str, times: dict[int, list[float]], answer: int = 1) -> Iterator[Result]:
        for position, seconds in times.items():
            for repeat, each in enumerate(seconds):
                yield Result(
                    position, method, repeat, 10, 5, 8, 5, decode_seconds=each, answer=(answer,)
                )

    plain = results("plain", {0: [4.0, 90.0, 4.0], 1: [40.0, 40.0, 1.0]})
    fast = results("hd", {0: [2.0, 2.0, 50.0], 1: [10.0, 10.0, 10.0]})
    found = report(line(), plan(repeats=3), [*plain, *fast])
    assert found.metrics[1].speedup.whole == pytest.approx(44.0 / 12.0)
    assert found.metrics[1].quartiles is None, "two questions have no quartiles"
    noise = [replace(r, kept=0, drafted=0) for r in results("hd", {0: [2.0]})]
    base = list(results("plain", {0: [4.0]}))
    assert report(line(), plan(), [*base, *noise]).metrics[1].speedup.whole is None
    other = list(results("hd", {0: [2.0]}, answer=2))
    metrics = report(line(), plan(), [*base, *other]).metrics[1]
    assert (metrics.identical, metrics.compared, metrics.differing) == (0, 1, ("0",))


@pytest.mark.parametrize(("lost", "warned"), [(0.11, True), (0.09, False)])
def test_a_drop_of_more_than_a_tenth_is_reported(lost: float, warned: bool) -> None:
    def of(created: float, seconds: float, base: float = 2.0) -> Report:
        results = [
            Result(at, name, 0, 10, 5, 8, 5, decode_seconds=each, answer=(1,))
            for at in range(4)
            for name, each in (("plain", base), ("hd", seconds))
        ]
        return report(line(created=created), plan(), results)

    before, now = of(1.0, 1.0), of(2.0, 1.0 / (1 - lost))
    found = drops(now, before)
    assert [(drop.method, drop.what) for drop in found] == (
        [("hd", "speed"), ("hd", "speedup")] if warned else []
    )
    for drop in found:
        assert drop.share == pytest.approx(lost) and drop.plain == pytest.approx(0.0)
    slower = drops(of(2.0, 1.0 / (1 - lost), 2.0 / (1 - lost)), before)
    assert [drop.what for drop in slower] == (["speed", "speed"] if warned else [])
    assert all(drop.plain == pytest.approx(lost) for drop in slower), "the machine was slower"
    assert drops(before, now) == [], "a gain is no drop"


def test_only_the_same_is_compared_with_the_last_run(session: Session) -> None:
    first = made(session, plan())
    second = made(session, plan((PLAIN, HD, CONTEXT)))
    before, _ = session.benchmarks.lost(OWNER, second)
    assert before is not None and before.benchmark.id == first.benchmark.id
    assert session.benchmarks.before(OWNER, first.benchmark) is None
    for other in (
        plan(questions=QUESTIONS[:2]),
        replace(plan(), generation=Generation(Sampling(0.8, seed=4), 24)),
        plan(known=True),
    ):
        assert session.benchmarks.before(OWNER, made(session, other).benchmark) is None
    less = plan((PLAIN, METHODS["hd"].using(Drafting(nodes=4, budget="fixed"))))
    found = made(session, less)
    assert {drop.method for drop in session.benchmarks.lost(OWNER, found)[1]} <= {"plain"}


@pytest.mark.usefixtures("each_step")
def test_who_chats_comes_first_and_the_run_is_made_again(
    session: Session, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, answer = list[tuple[str, str]](), Local.answer

    def noted(engine: Local, request: Request, *given: Any) -> Turns:
        calls.append((request.owner, request.method.name))
        return answer(engine, request, *given)

    monkeypatch.setattr(Local, "answer", noted)
    toy.allow(30)
    job = session.benchmarks.start(OWNER, plan(questions=QUESTIONS[:1]))
    assert soon(lambda: toy.allowed[0] == 0)
    given_up = calls[-1]
    conversation = session.chat.say(OWNER, None, "hello")
    waiting = updates_of(session, OWNER, conversation, Preferences(GENERATION))
    next(waiting)
    before = len(calls)
    toy.allow()
    list(waiting)
    name = job.result()
    assert given_up[0] == BENCHMARK and calls[before][0] == OWNER, "the answer comes next"
    assert given_up in calls[before + 1 :], "and then the run once more"
    results = stored(session, name)
    assert len(results) == 2 and not any(result.disturbed for result in results)


def test_a_run_that_is_never_left_alone_is_marked(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "QUIET", 0.0)
    with session.tasks.begin("else", ""):
        found = made(session, plan(questions=QUESTIONS[:1]))
    assert found.disturbed == 2 and found.complete == 1


def test_a_question_that_cannot_be_answered_is_reported_and_the_others_are(
    session: Session,
) -> None:
    questions = (*QUESTIONS[:2], Question("long", "qa", "x" * 9_000))
    found = made(session, plan(questions=questions))
    assert found.complete == 2 and found.benchmark.done == 6
    ((name, why),) = found.failed
    assert name == "long" and "Shorten" in why


def test_another_model_ends_it_and_that_one_can_go_on(session: Session) -> None:
    local(session).loaders = ModelLoaders(load=lambda source, runtime: Held(name=source))
    list(session.engine.load(Load("one")))
    one = local(session).loaded.backend
    assert isinstance(one, Held)
    one.allow(120)
    runs, first = session.benchmarks, Local.answer
    job = runs.start(OWNER, plan(repeats=5))
    name = job.progress.benchmark
    assert soon(lambda: one.allowed[0] == 0)
    loading = session.engine.load(Load("two"))
    one.allow()
    list(loading)
    with pytest.raises(ModelError, match="one was replaced by"):
        job.result()
    assert "one was replaced by" in job.problem
    kept = stored(session, name)
    assert 0 < len(kept) < 40 and all(result.tokens for result in kept)
    with pytest.raises(ModelError, match="This benchmark is of one"):
        runs.resume(OWNER, name)
    list(session.engine.load(Load("one")))
    runs.resume(OWNER, name).result()
    assert runs.report(OWNER, name).benchmark.done == 40
    assert first is Local.answer


def test_an_engine_that_dies_is_waited_for(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, left = Local.generate, [2]

    def dying(engine: Local, request: Request) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise EngineDied("The engine ended.")
        return generate(engine, request)

    monkeypatch.setattr(Local, "generate", dying)
    assert made(session, plan(questions=QUESTIONS[:1])).complete == 1
    monkeypatch.setattr(Local, "generate", lambda *_: (_ for _ in ()).throw(EngineDied("Again.")))
    with pytest.raises(EngineDied, match=r"Again\."):
        session.benchmarks.start(OWNER, plan()).result()


def test_what_cannot_be_measured_is_refused(session: Session, db: Database) -> None:
    refused: list[tuple[Plan, type[Exception], str]] = [
        (plan(()), SettingError, "at least one method"),
        (plan((HD, HD)), SettingError, "each of them once"),
        (plan(repeats=0), SettingError, "from 1 to 5"),
        (plan(questions=()), PromptError, "no question"),
        (plan((PLAIN, METHODS["hsd"])), SettingError, "needs draft models"),
    ]
    for requested, kind, expected in refused:
        with pytest.raises(kind, match=expected):
            session.benchmarks.start(OWNER, requested)
    with pytest.raises(SettingError, match="others share this app"):
        Session(local(session), db, guests=True).benchmarks.start("guest:a", plan())
    assert session.benchmarks.store(OWNER).list() == [] and session.benchmarks.status is None


def test_a_benchmark_of_another_version_does_not_go_on(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(session, plan())
    monkeypatch.setattr(benchmark, "__version__", "0.2.0")
    with pytest.raises(SettingError, match="started with version"):
        session.benchmarks.resume(OWNER, found.benchmark.id)


def test_a_benchmark_belongs_to_its_owner(session: Session) -> None:
    found = made(session, plan(questions=QUESTIONS[:1]))
    name = found.benchmark.id
    other = session.benchmarks.store("other")
    assert other.list() == []
    for reach in (other.get, other.questions, other.results):
        with pytest.raises(StorageError, match="no benchmark"):
            reach(name)
    with pytest.raises(StorageError, match="no benchmark"):
        other.add(name, Result(0, "hd", 0))


def test_damaged_rows_hide_no_others(session: Session, db: Database) -> None:
    found, other = made(session, plan()), made(session, plan(questions=QUESTIONS[:1]))
    name = found.benchmark.id
    with db.write() as handle:
        handle.execute(
            "UPDATE results SET answer = x'01', tokens = 'many' WHERE position = 1 "
            "AND method = 'hd' AND benchmark = ?",
            [name],
        )
        handle.execute("UPDATE benchmarks SET plan = '[' WHERE id = ?", [other.benchmark.id])
    assert [each.id for each in session.benchmarks.store(OWNER).list()] == [name]
    assert len(stored(session, name)) == 7
    session.benchmarks.resume(OWNER, name).result()
    assert session.benchmarks.report(OWNER, name).complete == 4
    with db.write() as handle:
        handle.execute("UPDATE benchmarks SET plan = '{\"methods\": 3}' WHERE id = ?", [name])
    with pytest.raises(StorageError, match="damaged in the database, or of another version"):
        session.benchmarks.report(OWNER, name)


def test_the_oldest_benchmarks_are_dropped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Benchmarks, "KEPT", 2)
    names = [made(session, plan((PLAIN,), questions=QUESTIONS[:1])).benchmark.id for _ in range(3)]
    assert [each.id for each in session.benchmarks.store(OWNER).list()] == names[:0:-1]
    for table in ("questions", "results"):
        rows = session.database.execute_read(f"SELECT DISTINCT benchmark FROM {table}")
        assert {name for (name,) in rows} == set(names[1:])


def test_exports_hold_every_answer_and_no_formula(session: Session) -> None:
    questions = (Question("=1+1", "@sum", "who?"), *QUESTIONS[1:3])
    found = made(session, plan(questions=questions, repeats=2))
    results = stored(session, found.benchmark.id)
    table = list(csv.DictReader(io.StringIO(as_csv(found, results))))
    assert len(table) == 12
    first = next(row for row in table if row["method"] == "hd")
    assert (first["question_id"], first["category"]) == ("'=1+1", "'@sum")
    assert first["same_text"] == "True" and float(first["tokens_per_second"]) > 0
    exported = json.loads(json.dumps(as_json(found, results)))
    assert (
        exported["model"] == "toy"
        and exported["machine"]
        and exported["version"]
        and exported["done"] == 12
    )
    assert [each["method"] for each in exported["all"]] == ["plain", "hd"]
    assert exported["all"][1]["identical"] == 3 and len(exported["results"]) == 12
    assert exported["categories"].keys() == {"@sum", "math", "qa"}
    assert exported["plan"]["generation"]["max_tokens"] == 24
