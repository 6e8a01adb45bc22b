"""The Benchmark tab: many questions, answered by several methods, and the results of earlier runs.

Only the owner of the machine has it, because a benchmark keeps the model busy for minutes or hours.
app/service/benchmark.py does the work, which needs no open page. Pages read its progress a few
times a second.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service.benchmark import MOST_REPEATS, Measuring, bundled
from app.service.benchmark_report import Plan, Report, as_csv, as_json
from app.service.pages import Download
from app.service.session import Session
from app.web import benchmark_html, charts
from app.web.kit import (
    REFRESH,
    Tab,
    Updates,
    clicked_row,
    hide,
    html,
    newest,
    notify_errors,
    show_notices,
    small_button,
    text_file,
    text_table,
    upload_button,
    uploaded,
    watched,
)
from app.web.markup import fine_print, times
from app.web.run_html import title_of
from app.web.tabs.settings import Settings, methods, number
from engine.backends.base import BackendInfo
from engine.errors import PromptError, StorageError
from engine.methods import PLAIN, method_named, no_head, offered
from engine.questions import in_turn, read, typed
from engine.settings import Generation, Sampling
from engine.types import Question
from storage.benchmarks import Benchmark, Result

SAMPLE, FILE, OWN = "sample", "file", "own"
MOST, TOKENS = 13, 128
"""The default number of questions (one of each category of the sample) and length of an answer."""
DRAW_EVERY = 12
"""A page draws the results only with every twelfth progress update, because drawing takes time from
the runs."""
NEWEST = 8
"""The history shows the best speedup of this many of the newest benchmarks."""
HEADERS = ["When", "Questions", "Model", "Version", "Runs", "Best speedup", "Methods"]
NOTHING = fine_print("No benchmark yet. Choose questions and methods, then press Run.")

Set = tuple[str, list[Question]]
"""The title of a set of questions, and the questions."""


def usual(info: BackendInfo) -> list[str]:
    if info.server is not None:
        return [method.name for method in offered(info)]
    return [PLAIN.name, "hd", *(["hd+head"] if not no_head(info) else [])]


def counted(questions: Sequence[Question]) -> str:
    kinds = dict.fromkeys(question.category for question in questions)
    names = ", ".join(map(charts.category_name, list(kinds)[:13])) + " …" * (len(kinds) > 13)
    many = f"{len(kinds)} categories ({names})" if len(kinds) > 1 else names
    return fine_print(f"{len(questions):,} question{'s' * (len(questions) != 1)}: {many}.")


def history_row(stored: Benchmark, best: str) -> list[str]:
    named = stored.plan.get("methods")
    names = [str(each.get("name")) for each in named if isinstance(each, dict)] if named else []
    return [
        benchmark_html.when(stored.created),
        stored.title,
        stored.label,
        stored.version,
        f"{stored.done:,} of {stored.runs:,}",
        best,
        ", ".join(title_of(name) for name in names),
    ]


class BenchmarkTab(Tab):
    """Questions and methods, progress, results, and the history.

    `given` holds the questions of the uploaded file, `ids` the ids of the rows of the history, and
    `shown` the id of the benchmark on the page.
    """

    controls: Settings

    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.tab, self.runs = tab, session.benchmarks
        self.best: dict[tuple[str, int], str] = {}
        """The best speedup by benchmark and number of runs, because reading the runs takes long."""
        self.ids, self.shown, self.given = gr.State([]), gr.State(None), gr.State(None)
        with gr.Row(elem_classes="cards"):
            with gr.Column(elem_classes="card", scale=1):
                self.build_questions()
            with gr.Column(elem_classes="card", scale=1):
                self.build_answers()
        self.status = html(elem_id="benchmark-status")
        self.result = html(NOTHING, elem_id="benchmark-result")
        self.chart = gr.Plot(
            None, show_label=False, container=False, visible=False, elem_id="benchmark-chart"
        )
        self.detail = html(elem_id="benchmark-detail")
        with gr.Row(visible=False, elem_classes="ask tools-of-results") as self.tools:
            self.compared_with = gr.Dropdown(
                [("None", "")],
                value="",
                label="Compare with another benchmark",
                scale=4,
                min_width=260,
                elem_id="benchmark-beside",
            )
            self.csv_button = small_button("Save as CSV", min_width=110, elem_id="benchmark-csv")
            self.json_button = small_button("Save as JSON", min_width=110, elem_id="benchmark-json")
        self.history = text_table(
            headers=HEADERS,
            elem_id="benchmarks",
            max_height=300,
            label="Earlier benchmarks, newest first. Click one to see it.",
        )

    def build_questions(self) -> None:
        gr.HTML("<h3>Questions</h3>")
        self.source = gr.Radio(
            [("Bundled sample", SAMPLE), ("Spec-Bench file", FILE), ("Own prompts", OWN)],
            value=SAMPLE,
            label="From",
            elem_id="benchmark-source",
        )
        with gr.Column(visible=False) as self.files:
            self.path = gr.Textbox(
                label="Path of a file with one JSON object per line",
                placeholder="/home/me/Spec-Bench/question.jsonl",
                max_lines=1,
                elem_id="benchmark-path",
            )
            self.upload_button = upload_button(
                "Choose a file instead", file_types=[".jsonl", ".json"]
            )
        self.text = gr.Textbox(
            label="Prompts",
            info="One per line, or a JSON object per line.",
            lines=5,
            max_lines=14,
            visible=False,
            elem_id="benchmark-text",
        )
        self.question_count = html(counted(bundled()), elem_id="benchmark-count")
        self.most = gr.Number(
            MOST,
            label="How many questions",
            info=(
                "Taken from each category in turn; 0 asks all of them. Of a question with several "
                "turns, only the first is asked."
            ),
            precision=0,
            elem_id="benchmark-most",
        )

    def build_answers(self) -> None:
        gr.HTML("<h3>Answers</h3>")
        self.methods = gr.Dropdown(
            methods(self.session),
            value=usual(self.session.current.info),
            multiselect=True,
            label="Methods",
            info="Each method answers every question, in an order that rotates. The databases "
            "draft as chosen in Settings, under Advanced.",
            elem_id="benchmark-methods",
        )
        with gr.Row(elem_classes="pair"):
            self.tokens = gr.Number(
                TOKENS,
                label="Max tokens per answer",
                precision=0,
                min_width=150,
                elem_id="benchmark-tokens",
            )
            self.repeats = gr.Slider(
                1, MOST_REPEATS, value=1, step=1, label="Repeats of each question", min_width=230
            )
        with gr.Row(elem_classes="pair"):
            self.temperature = gr.Number(0.0, label="Temperature", min_width=150)
            self.seed = gr.Number(0, label="Seed", precision=0, min_width=150)
        self.known = gr.Checkbox(
            False,
            label="Draft from past answers too",
            info="Off: every run starts with empty databases, so that results can be compared.",
        )
        with gr.Row(elem_classes="presets"):
            self.run_button = small_button("Run", variant="primary", elem_id="benchmark-run")
            self.stop_button = small_button(
                "Stop", variant="stop", visible=False, elem_id="benchmark-stop"
            )
            self.resume_button = small_button("Resume", visible=False, elem_id="benchmark-resume")

    def wire(self, controls: Settings) -> None:
        self.controls = controls
        question_inputs = [self.source, self.path, self.text, self.given]
        plan = [*question_inputs, self.most, self.methods, self.tokens, self.repeats]
        plan += [self.temperature, self.seed, self.known, *controls.inputs]
        screen: list[Block] = [self.result, self.detail, self.chart, self.tools]
        picked = [self.resume_button, *screen, self.compared_with, self.shown]
        buttons = [self.run_button, self.stop_button]
        whole = [*buttons, *picked, self.status, self.history, self.ids]
        # A running benchmark does not overwrite another one that is picked meanwhile.
        guard = newest(picked)
        # A click on another source also leaves a box; the last of the two events is handled.
        choosing = [self.source.input, self.path.submit, self.path.blur, self.text.blur]
        shown = [self.files, self.text, self.question_count]
        self.on(choosing, self.choose, question_inputs, shown, mode="always_last")
        read = [self.given, self.path, self.question_count]
        self.on(self.upload_button.upload, self.upload, self.upload_button, read)
        self.on(self.run_button.click, self.run, plan, whole, guard=guard)
        self.on(self.resume_button.click, self.resume, self.shown, whole, guard=guard)
        self.on(self.stop_button.click, self.runs.stop)
        seen = [self.methods, *whole]
        self.on(self.tab.select, self.refresh, self.shown, seen, guard=REFRESH)
        select, pair = self.history.select, [self.shown, self.compared_with]
        self.on(select, self.pick, self.ids, [*buttons, *picked], mode="multiple", guard=guard)
        compare, alone = self.compared_with.input, newest(screen)
        self.on(compare, self.compare_with, pair, screen, mode="always_last", guard=alone)
        self.on_save(self.csv_button.click, self.as_csv, self.shown)
        self.on_save(self.json_button.click, self.as_json, self.shown)

    def choose(self, source: str, path: str | None, text: str | None, given: Set | None) -> Updates:
        return {
            self.files: gr.update(visible=source == FILE),
            self.text: gr.update(visible=source == OWN),
            self.question_count: self.question_count_text(source, path or "", text or "", given),
        }

    def question_count_text(self, source: str, path: str, text: str, given: Set | None) -> str:
        if source == FILE and not (path.strip() or given) or source == OWN and not text.strip():
            return ""
        with notify_errors():
            return counted(self.questions(source, path, text, given)[1])
        return ""

    def questions(self, source: str, path: str, text: str, given: Set | None) -> Set:
        if source == OWN:
            return "Own prompts", typed(text)
        if source == SAMPLE:
            return "Bundled sample", bundled()
        if path.strip():
            place = Path(os.path.expanduser(path.strip()))
            return place.name, read(place)
        if given is None:
            raise PromptError("No file is chosen. Give the path of one, or choose a file.")
        return given

    def upload(self, file: str | None) -> Updates:
        with uploaded(file) as path:
            found = read(path)
        return {self.given: (path.name, found), self.path: "", self.question_count: counted(found)}

    def plan(self, values: Sequence[object]) -> Plan:
        chosen: Any = values[:11]
        source, path, text, given, most, names, tokens, repeats, heat, seed, known = chosen
        title, questions = self.questions(source, path or "", text or "", given)
        _, preferences = self.controls.read(values[11:])
        sampling = Sampling(temperature=number(0.0, heat), seed=number(0, seed))
        return Plan(
            title,
            tuple(in_turn(questions, lambda each: each.category, max(0, int(most or 0)))),
            tuple(method_named(str(name), preferences.drafting) for name in names or ()),
            Generation(sampling, number(0, tokens)),
            int(repeats),
            bool(known),
        )

    async def run(self, owner: str, *values: object) -> AsyncIterator[Updates]:
        job: Measuring | None = None
        with notify_errors():
            job = self.runs.start(owner, self.plan(values))
        async for shown in self.follow(owner, job):
            yield shown

    async def resume(self, owner: str, chosen: str | None) -> AsyncIterator[Updates]:
        job: Measuring | None = None
        with notify_errors():
            job = self.runs.resume(owner, chosen or "")
        async for shown in self.follow(owner, job, chosen or ""):
            yield shown

    async def follow(
        self, owner: str, job: Measuring | None, chosen: str = ""
    ) -> AsyncIterator[Updates]:
        """Follow a benchmark, if one has begun. `chosen` is the benchmark on the page."""
        if job is None:
            yield self.buttons(self.stored(owner, chosen))
            return
        looks, drawn, chosen = 0, -1, job.progress.benchmark
        async for progress in watched(job):
            shown = {**self.buttons(None), self.status: benchmark_html.status(progress)}
            if looks % DRAW_EVERY == 0 and progress.done != drawn:
                drawn = progress.done
                shown |= await asyncio.to_thread(self.screen, owner, chosen, "", True)
            yield shown
            looks += 1
        ended = self.buttons(self.stored(owner, chosen))
        ended[self.status] = benchmark_html.status(None, job.problem)
        show_notices(self.session, owner)
        yield {**ended, **await asyncio.to_thread(self.all, owner, chosen)}

    def stored(self, owner: str, chosen: str) -> Benchmark | None:
        with suppress(StorageError):
            return self.runs.store(owner).get(chosen)
        return None

    def buttons(self, stored: Benchmark | None) -> Updates:
        busy = self.runs.status is not None
        left = stored is not None and stored.done < stored.runs
        return {
            self.run_button: gr.update(interactive=not busy),
            self.stop_button: gr.update(visible=busy),
            self.resume_button: gr.update(visible=left and not busy),
        }

    def screen(self, owner: str, chosen: str | None, other: str, growing: bool = False) -> Updates:
        """Show a benchmark with its tables and chart, and the comparison with the benchmark `other`
        if that is chosen. A running benchmark (`growing`) is not compared with the previous one."""
        with notify_errors():
            if not chosen:
                return {self.result: NOTHING, self.detail: "", self.chart: hide()}
            report = self.runs.report(owner, chosen)
            before, drops = (None, []) if growing else self.runs.lost(owner, report)
            text = benchmark_html.summary(report, before, drops) + benchmark_html.tables(report)
            if other and other != chosen:
                text += benchmark_html.comparison(report, self.runs.report(owner, other))
            drawn, visible = charts.by_category(report), bool(report.metrics)
            return {
                self.result: text,
                self.detail: benchmark_html.categories(report),
                self.chart: gr.update(value=drawn, visible=visible),
                self.tools: gr.update(visible=report.benchmark.done > 0),
            }
        return {self.result: gr.skip()}

    def all(self, owner: str, chosen: str | None) -> Updates:
        with notify_errors():
            found = self.runs.store(owner).list()
            names = [stored.id for stored in found]
            shown = chosen if chosen in names else next(iter(names), None)
            rows = [
                history_row(stored, self.gained(owner, stored) if at < NEWEST else "")
                for at, stored in enumerate(found)
            ]
            on_page = next((stored for stored in found if stored.id == shown), None)
            return {
                **self.buttons(on_page),
                **self.others(found, shown),
                **self.screen(owner, shown, ""),
                self.history: rows,
                self.ids: names,
                self.shown: shown,
            }
        return {self.history: gr.skip()}

    def others(self, found: Sequence[Benchmark], shown: str | None) -> Updates:
        choices = [(benchmark_html.title(each), each.id) for each in found if each.id != shown]
        offered = gr.update(choices=[("None", ""), *choices], value="")
        return {self.compared_with: offered}

    def gained(self, owner: str, stored: Benchmark) -> str:
        key = stored.id, stored.done
        if key not in self.best:
            self.best[key] = ""
            with suppress(StorageError):
                metrics = self.runs.report(owner, stored.id).metrics
                speedups = [one.speedup.whole for one in metrics if one.speedup.whole]
                self.best[key] = times(max(speedups, default=None))
        return self.best[key]

    async def refresh(self, owner: str, chosen: str | None) -> AsyncIterator[Updates]:
        job = self.runs.slot.running
        offered: Updates = {self.methods: gr.update(choices=methods(self.session))}
        shown = await asyncio.to_thread(self.all, owner, job.progress.benchmark if job else chosen)
        yield {**offered, **shown}
        if job is not None:
            async for later in self.follow(owner, job):
                yield later

    def pick(self, owner: str, data: gr.SelectData, ids: list[str]) -> Updates:
        at = clicked_row(data)
        if not 0 <= at < len(ids):
            return {}
        stored, found = self.stored(owner, ids[at]), self.runs.store(owner).list()
        return {
            **self.buttons(stored),
            **self.others(found, ids[at]),
            **self.screen(owner, ids[at], ""),
            self.shown: ids[at],
        }

    def compare_with(self, owner: str, chosen: str | None, other: str | None) -> Updates:
        return self.screen(owner, chosen, other or "")

    def as_csv(self, owner: str, chosen: str | None) -> Download:
        return text_file("benchmark.csv", "text/csv", as_csv(*self.results(owner, chosen)))

    def as_json(self, owner: str, chosen: str | None) -> Download:
        text = json.dumps(as_json(*self.results(owner, chosen)), indent=1)
        return text_file("benchmark.json", "application/json", text)

    def results(self, owner: str, chosen: str | None) -> tuple[Report, Sequence[Result]]:
        report = self.runs.report(owner, chosen or "")
        return report, self.runs.store(owner).results(chosen or "")
