"""The Benchmark tab without a browser: what it asks for, what it says, and to whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.benchmark import BenchmarkRuns, Standing
from app.service.benchmark_report import Drop, Plan, Report, report
from app.service.session import Session
from app.web import benchmark_charts, benchmark_html
from app.web.colors import INKS
from app.web.tabs import benchmark, settings
from app.web.wiring import Updates
from engine.backends.toy import ToyBackend
from engine.errors import PromptError, SettingError
from engine.local import Local
from engine.methods import METHODS, PLAIN
from engine.settings import Drafting, Generation, Sampling
from engine.types import Question
from storage.benchmarks import Benchmark, Result
from storage.database import Database
from tests.support.inside import OWNER, soon
from tests.web.test_tabs import EVIL, labels, made

REQUEST: Any = SimpleNamespace(username=None, session_hash="page")
HD = METHODS["hd"]


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def on(session: Session) -> benchmark.Handlers:
    def build() -> benchmark.Handlers:
        with gr.Blocks(), gr.Tab("Benchmark") as tab:
            parts = benchmark.build(tab, session)
            return benchmark.Handlers(session, parts, settings.build(session))

    return made(build)


def values(on: benchmark.Handlers, **chosen: object) -> list[object]:
    """What the page sends for a small benchmark."""
    given: dict[str, object] = {
        "source": benchmark.OWN,
        "path": None,
        "text": "who is it?\nwho was it?",
        "read": None,
        "most": 0,
        "methods": ["plain", "context"],
        "tokens": 12.0,
        "repeats": 1,
        "temperature": 0,
        "seed": 5,
        "known": False,
        **chosen,
    }
    return [*given.values(), *(getattr(part, "value", None) for part in on.controls.inputs)]


def all_of(updates: AsyncIterator[Updates]) -> list[Updates]:
    async def gather() -> list[Updates]:
        return [each async for each in updates]

    return asyncio.run(gather())


def over(runs: BenchmarkRuns) -> bool:
    return soon(lambda: not runs.busy.locked())


def test_guests_have_no_benchmark(db: Database, toy: ToyBackend) -> None:
    from app.web import layout

    mine, theirs = (
        labels(made(lambda guests=guests: layout.build(Session(Local(backend=toy), db, guests))))
        for guests in (False, True)
    )
    assert "Benchmark" in mine and "Benchmark" not in theirs


def test_the_page_makes_a_plan(on: benchmark.Handlers, tmp_path: Path) -> None:
    found = on.plan(values(on, most=1))
    assert found.questions == (Question("1", "own prompts", "who is it?"),)
    assert [method.name for method in found.methods] == ["plain", "context"]
    assert found.generation == Generation(Sampling(0.0, seed=5), 12) and not found.known
    sample = on.plan(values(on, source=benchmark.SAMPLE, most=13))
    assert len({question.category for question in sample.questions}) == 13
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["Who?"]}')
    told = on.plan(values(on, source=benchmark.FILE, path=f" {file} "))
    assert (told.title, len(told.questions)) == ("question.jsonl", 1)
    given = "sent.jsonl", list(told.questions)
    assert on.plan(values(on, source=benchmark.FILE, read=given)).title == "sent.jsonl"
    refused: list[tuple[dict[str, object], type[Exception]]] = [
        ({"source": benchmark.FILE}, PromptError),
        ({"text": "  "}, PromptError),
        ({"methods": ["magic"]}, SettingError),
        ({"tokens": None}, SettingError),
        ({"temperature": "hot"}, SettingError),
        ({"seed": -1}, SettingError),
    ]
    for wrong, kind in refused:
        with pytest.raises(kind):
            on.plan(values(on, **wrong))


def test_a_file_that_was_sent_is_read_and_not_kept(on: benchmark.Handlers, tmp_path: Path) -> None:
    file = tmp_path / "sent.jsonl"
    file.write_text('{"category": "<b>", "turns": ["Who?"]}')
    shown = on.upload(str(file))
    assert not file.exists() and "1 question: &lt;b&gt;." in str(shown[on.parts.asked])
    assert shown[on.parts.read] == ("sent.jsonl", [Question("1", "<b>", "Who?")])


@pytest.mark.parametrize(("path", "text"), [(None, None), ("", "")])
def test_a_source_shows_what_belongs_to_it(
    on: benchmark.Handlers, path: str | None, text: str | None
) -> None:
    """A box in which nothing was typed yet sends nothing at all."""
    parts = on.parts
    for source, files, typed in ((benchmark.FILE, True, False), (benchmark.OWN, False, True)):
        shown = on.choose(source, path, text, None)
        assert shown[parts.files] == gr.update(visible=files)
        assert shown[parts.text] == gr.update(visible=typed) and shown[parts.asked] == ""
    assert "26 questions" in str(on.choose(benchmark.SAMPLE, path, text, None)[parts.asked])


def test_a_benchmark_from_the_page_and_again_beside_itself(on: benchmark.Handlers) -> None:
    parts, shown = on.parts, all_of(on.run(REQUEST, {}, *values(on)))
    (stored,) = on.runs.store(OWNER).list()
    assert stored.done == 4 == stored.runs and shown[0][parts.stop] == gr.update(visible=True)
    ended = on.all(OWNER, None)
    assert ended[parts.shown] == stored.id and ended[parts.ids] == [stored.id]
    assert "Figures are of all 2 questions" in str(ended[parts.result])
    assert "2 of 2" in str(ended[parts.result]) and "own prompts" in str(ended[parts.detail])
    assert ended[parts.resume] == gr.update(visible=False)
    all_of(on.run(REQUEST, {}, *values(on)))
    newest, oldest = (each.id for each in on.runs.store(OWNER).list())
    assert oldest == stored.id
    beside = str(on.set_beside(REQUEST, {}, newest, oldest)[parts.result])
    assert "Beside" in beside and "Not the same" not in beside
    (row, _) = on.all(OWNER, newest)[parts.history]  # type: ignore[misc]
    assert row[4] == "4 of 4" and row[-1].startswith("Plain decoding, This chat only")
    event: Any = SimpleNamespace(index=[1, 0])
    assert on.pick(event, REQUEST, {}, [newest, oldest])[parts.shown] == oldest
    for kind, read in (("csv", on.as_csv), ("json", on.as_json)):
        file = json.loads(read(REQUEST, {}, newest))
        assert file["name"] == f"benchmark.{kind}" and "who is it" not in file["text"]
        assert "context" in file["text"]


def test_one_that_was_stopped_can_go_on(on: benchmark.Handlers) -> None:
    plan = on.plan(values(on))
    info = on.session.current.info
    store, questions = on.runs.store(OWNER), plan.questions
    from app.service.benchmark import __version__, machine

    name = store.create(
        "Two",
        info.name,
        info.fingerprint,
        machine(info),
        __version__,
        "x",
        plan.mapping(),
        questions,
        4,
    )
    store.add(name, Result(0, "plain", 0, 12, 12, decode_seconds=1.0, answer=(1,)))
    shown = on.all(OWNER, None)
    assert shown[on.parts.resume] == gr.update(visible=True)
    assert "1 of 4 runs are done. Figures begin" in str(shown[on.parts.result])
    assert shown[on.parts.chart]["visible"] is False  # type: ignore[index]
    *_, last = all_of(on.resume(REQUEST, {}, name))
    assert last[on.parts.resume] == gr.update(visible=False)
    assert store.get(name).done == 4


def test_a_page_that_opens_meanwhile_follows(
    on: benchmark.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "LOOK_SECONDS", 0.0)
    on.runs.start(OWNER, on.plan(values(on, repeats=5)))
    *_, last = all_of(on.refresh(REQUEST, {}, None))
    assert over(on.runs) and last[on.parts.stop] == gr.update(visible=False)
    assert last[on.parts.status] == ""


def of(plan: Plan, **more: Any) -> Report:
    results = [
        Result(at, method.name, 0, 10, 5, 8, 5, decode_seconds=seconds, answer=(1,))
        for at in range(len(plan.questions))
        for method, seconds in zip(plan.methods, (4.0, 2.0, 1.0), strict=False)
    ]
    stored = Benchmark(
        "id", plan.title, EVIL, "print", "<b>here</b>", "0.1.0", "asked", plan.mapping(), 8, 9.0, 8
    )
    return report(replace(stored, **more), plan, results)


def evil(methods: tuple[Any, ...] = (PLAIN, HD)) -> Plan:
    questions = tuple(Question(f"{EVIL}{n}", EVIL, EVIL) for n in range(4))
    return Plan(EVIL, questions, methods, Generation(Sampling(0.0), 10))


def test_names_from_files_are_inert_wherever_they_are_shown() -> None:
    found = of(evil())
    other = replace(found, benchmark=replace(found.benchmark, asked="else", title=EVIL))
    parts = [
        replace(each, differing=tuple(q.id for q in found.plan.questions)) for each in found.figures
    ]
    words = [
        benchmark_html.heading(found),
        benchmark_html.figures(replace(found, figures=tuple(parts))),
        benchmark_html.categories(found),
        benchmark_html.beside(found, other),
        benchmark_html.notes(replace(found, failed=((EVIL, EVIL),)), None, ()),
        benchmark_html.status(Standing("id", 1, 2, 0, EVIL)),
        benchmark_html.status(None, EVIL),
        benchmark.counted(found.plan.questions),
    ]
    assert all("<img" not in said and "<b>here" not in said for said in words)
    figure = json.dumps(benchmark_charts.by_category(found).to_plotly_json(), default=str)
    assert "<img" not in figure and "&lt;img" in figure


def test_a_drop_says_whether_the_machine_was_slower() -> None:
    found = of(evil())
    words = {
        lost: benchmark_html.notes(found, found, [Drop("hd", "speed", 40.0, 30.0, lost)])
        for lost in (0.24, 0.02, None)
    }
    assert all(
        "25 % slower" in said and "30.0 tokens/s after 40.0" in said for said in words.values()
    )
    assert "Plain decoding lost 24 % too: the machine was slower." in words[0.24]
    assert "as fast as before" in words[0.02] and "Plain" not in words[None]
    gain = benchmark_html.notes(found, found, [Drop("hd", "speedup", 2.0, 1.5)])
    assert "25 % less speedup" in gain and "1.50× after 2.00×" in gain
    assert "No method lost more than 10 %" in benchmark_html.notes(found, found, [])
    assert benchmark_html.notes(found, None, []) == ""


def test_what_two_benchmarks_do_not_share_is_named() -> None:
    one = of(evil())
    other = of(evil(), asked="else", machine="there")
    assert "They differ in: machine, questions." in benchmark_html.beside(one, other)
    assert "Not the same" not in benchmark_html.beside(one, one)
    less = of(evil((PLAIN, HD.using(Drafting(nodes=4)))))
    said = benchmark_html.beside(one, less)
    assert "Databases" not in said and "Plain decoding" in said, "that drafts otherwise"


def test_progress_tells_what_is_known() -> None:
    first = benchmark_html.status(Standing("id", 0, 40, 0, "hd"))
    assert "0 of 40 runs" in first and "left" not in first and "question 1, Databases" in first
    later = benchmark_html.status(Standing("id", 10, 40, 3, "hd", seconds_left=240.0))
    assert "width:25.00%" in later and "about 4 min left" in later
    waiting = benchmark_html.status(Standing("id", 10, 40, 3, "hd", waiting=True))
    assert "waiting for others" in waiting
    assert [benchmark_html.left(s) for s in (1, 42, 89, 95, 7200)] == [
        *("about 5 s", "about 40 s", "about 90 s", "about 2 min", "about 2 h"),
    ]


def test_the_chart_tells_speedups_and_speeds_where_nothing_was_plain() -> None:
    found = of(evil((PLAIN, HD, METHODS["context"])))
    figure = benchmark_charts.by_category(found)
    assert [bar.name for bar in figure.data] == [
        "Databases (hierarchy drafting)",
        "This chat only (context tier)",
    ]
    assert list(figure.data[0].y) == [2.0, 2.0] and list(figure.data[1].y) == [4.0, 4.0]
    assert figure.data[1].marker.color == INKS["context"].colour
    alone = benchmark_charts.by_category(of(evil((HD,))))
    assert list(alone.data[0].y) == [2.5, 2.5] and "Speed, by" in alone.layout.title.text
    assert not benchmark_charts.by_category(None).data
