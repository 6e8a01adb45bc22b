"""The Benchmark tab without a browser: what it asks for, what it says, and to whom."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.benchmark import BenchmarkStatus, bundled
from app.service.benchmark_report import Drop, Plan, Report, report
from app.service.session import Session
from app.web import benchmark_html, charts, kit
from app.web.colors import INKS
from app.web.kit import Updates
from app.web.tabs import benchmark
from engine.errors import PromptError, SettingError
from engine.methods import METHODS, PLAIN
from engine.settings import Drafting, Generation, Sampling
from engine.types import Question
from storage.benchmarks import Benchmark, Result
from tests.support.blocks import EVIL, content, tab_of
from tests.support.inside import OWNER, Held

HD = METHODS["hd"]


@pytest.fixture
def on(session: Session) -> benchmark.BenchmarkTab:
    return tab_of(benchmark.BenchmarkTab, session)


def values(on: benchmark.BenchmarkTab, **chosen: object) -> list[object]:
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


def all_of(
    updates: AsyncIterator[Updates], seen: Callable[[], None] = lambda: None
) -> list[Updates]:
    """All updates; `seen` is called after each."""

    async def gather() -> list[Updates]:
        found = list[Updates]()
        async for each in updates:
            found.append(each)
            seen()
        return found

    return asyncio.run(gather())


def test_the_page_makes_a_plan(on: benchmark.BenchmarkTab, tmp_path: Path) -> None:
    found = on.plan(values(on, most=1))
    assert found.questions == (Question("1", "own prompts", "who is it?"),)
    assert [method.name for method in found.methods] == ["plain", "context"]
    assert found.generation == Generation(Sampling(0.0, seed=5), 12) and not found.known
    sample = on.plan(values(on, source=benchmark.SAMPLE, most=13))
    assert len({question.category for question in sample.questions}) == 13
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["Who?"]}')
    shown = on.plan(values(on, source=benchmark.FILE, path=f" {file} "))
    assert (shown.title, len(shown.questions)) == ("question.jsonl", 1)
    given = "sent.jsonl", list(shown.questions)
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


def test_categories_have_names_that_people_read() -> None:
    """Files keep the names that Spec-Bench gives; "qa" and "rag" say nothing to a reader."""
    shown = benchmark.counted(bundled())
    assert "question answering" in shown and "answers from documents" in shown
    assert not {"qa", "rag", "stem", "math_reasoning"} & set(re.findall(r"\w+", shown))
    own = benchmark.counted([Question("1", "my own kind", "?"), Question("2", "qa", "?")])
    assert "my own kind" in own


def test_a_file_that_was_sent_is_read_and_not_kept(
    on: benchmark.BenchmarkTab, tmp_path: Path
) -> None:
    file = tmp_path / "sent.jsonl"
    file.write_text('{"category": "<b>", "turns": ["Who?"]}')
    shown = on.upload(str(file))
    assert not file.exists() and "1 question: &lt;b&gt;." in str(shown[on.question_count])
    assert shown[on.given] == ("sent.jsonl", [Question("1", "<b>", "Who?")])


def test_a_benchmark_from_the_page_and_compared_with_itself(
    on: benchmark.BenchmarkTab, toy: Held
) -> None:
    toy.allow(0)
    shown = all_of(on.run(OWNER, *values(on)), toy.allow)
    (stored,) = on.runs.store(OWNER).list()
    assert stored.done == 4 == stored.runs and shown[0][on.stop_button] == gr.update(visible=True)
    ended = on.all(OWNER, None)
    assert ended[on.shown] == stored.id and ended[on.ids] == [stored.id]
    assert "Figures cover all 2 questions" in str(ended[on.result])
    assert "2 of 2" in str(ended[on.result]) and "own prompts" in str(ended[on.detail])
    assert ended[on.resume_button] == gr.update(visible=False)
    all_of(on.run(OWNER, *values(on)))
    newest, oldest = (each.id for each in on.runs.store(OWNER).list())
    assert oldest == stored.id
    beside = str(on.compare_with(OWNER, newest, oldest)[on.result])
    assert "Compared with" in beside and "Not the same" not in beside
    (row, _) = on.all(OWNER, newest)[on.history]  # type: ignore[misc]
    assert row[4] == "4 of 4" and row[-1].startswith("Plain decoding, This chat only")
    event: Any = SimpleNamespace(index=[1, 0])
    assert on.pick(OWNER, event, [newest, oldest])[on.shown] == oldest
    for kind, read in (("csv", on.as_csv), ("json", on.as_json)):
        file = read(OWNER, newest)
        assert file.name == f"benchmark.{kind}" and "who is it" not in content(file)
        assert "context" in content(file)


def test_a_page_that_opens_meanwhile_follows(
    on: benchmark.BenchmarkTab, toy: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "LOOK_SECONDS", 0.0)
    toy.allow(0)
    on.runs.start(OWNER, on.plan(values(on, repeats=5)))
    *_, last = all_of(on.refresh(OWNER, None), toy.allow)
    assert on.runs.status is None and last[on.stop_button] == gr.update(visible=False)
    assert last[on.status] == ""


def of(plan: Plan, **more: Any) -> Report:
    results = [
        Result(at, method.name, 0, 10, 5, 8, 5, decode_seconds=seconds, answer=(1,))
        for at in range(len(plan.questions))
        for method, seconds in zip(plan.methods, (4.0, 2.0, 1.0), strict=False)
    ]
    stored = Benchmark(
        plan.title, EVIL, "print", "<b>here</b>", "0.1.0", "asked", plan.mapping(), 8, "id", 9.0, 8
    )
    return report(replace(stored, **more), plan, results)


def evil(methods: tuple[Any, ...] = (PLAIN, HD)) -> Plan:
    questions = tuple(Question(f"{EVIL}{n}", EVIL, EVIL) for n in range(4))
    return Plan(EVIL, questions, methods, Generation(Sampling(0.0), 10))


def test_names_from_files_are_inert_wherever_they_are_shown() -> None:
    found = of(evil())
    other = replace(found, benchmark=replace(found.benchmark, asked="else", title=EVIL))
    parts = [
        replace(each, differing=tuple(q.id for q in found.plan.questions)) for each in found.metrics
    ]
    texts = [
        benchmark_html.tables(replace(found, metrics=tuple(parts))),
        benchmark_html.categories(found),
        benchmark_html.comparison(found, other),
        benchmark_html.summary(replace(found, failed=((EVIL, EVIL),)), None, ()),
        benchmark_html.status(BenchmarkStatus("id", 1, 2, 0, EVIL)),
        benchmark_html.status(None, EVIL),
        benchmark.counted(found.plan.questions),
    ]
    assert all("<img" not in shown and "<b>here" not in shown for shown in texts)
    figure = json.dumps(charts.by_category(found).to_plotly_json(), default=str)
    assert "<img" not in figure and "&lt;img" in figure


def test_a_drop_says_whether_the_machine_was_slower() -> None:
    found = of(evil())
    texts = {
        lost: benchmark_html.summary(found, found, [Drop("hd", "speed", 40.0, 30.0, lost)])
        for lost in (0.24, 0.02, None)
    }
    assert all(
        "25 % slower" in shown and "30.0 tokens/s, down from 40.0" in shown
        for shown in texts.values()
    )
    assert "Plain decoding lost 24 % too: the machine was slower." in texts[0.24]
    assert "as fast as before" in texts[0.02] and "Plain" not in texts[None]
    gain = benchmark_html.summary(found, found, [Drop("hd", "speedup", 2.0, 1.5)])
    assert "25 % less speedup" in gain and "1.50×, down from 2.00×" in gain
    assert "No method lost more than 10 %" in benchmark_html.summary(found, found, [])
    assert "verdict" not in benchmark_html.summary(found, None, [])


def test_what_two_benchmarks_do_not_share_is_named() -> None:
    one = of(evil())
    other = of(evil(), asked="else", machine="there")
    assert "The two differ in: machine, questions." in benchmark_html.comparison(one, other)
    assert "Not the same" not in benchmark_html.comparison(one, one)
    less = of(evil((PLAIN, HD.using(Drafting(nodes=4)))))
    shown = benchmark_html.comparison(one, less)
    assert "Databases" not in shown and "Plain decoding" in shown, "that drafts otherwise"


def test_the_chart_tells_speedups_and_speeds_where_nothing_was_plain() -> None:
    found = of(evil((PLAIN, HD, METHODS["context"])))
    figure = charts.by_category(found)
    assert [bar.name for bar in figure.data] == [
        "Databases (hierarchy drafting)",
        "This chat only",
    ]
    assert list(figure.data[0].y) == [2.0, 2.0] and list(figure.data[1].y) == [4.0, 4.0]
    assert figure.data[1].marker.color == INKS["context"].colour
    alone = charts.by_category(of(evil((HD,))))
    assert list(alone.data[0].y) == [2.5, 2.5] and "Speed, by" in alone.layout.title.text
    assert not charts.by_category(None).data
