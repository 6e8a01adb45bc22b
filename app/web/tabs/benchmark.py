"""Benchmark: many questions, answered by several methods, and what became of earlier runs.

It belongs to the owner of the machine: it keeps the model busy for minutes or hours. The work is
done by app/service/benchmark.py and needs no page. Pages look at it a few times a second.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service.benchmark import MOST_REPEATS, bundled
from app.service.benchmark_export import as_csv, as_json
from app.service.benchmark_report import Plan, Report
from app.service.session import Session
from app.web import benchmark_charts, benchmark_html
from app.web.metrics_panel import times
from app.web.saving import SAVE_FILE, saved
from app.web.stack_html import fine
from app.web.tabs.settings import Controls, methods, number
from app.web.verdicts import title_of
from app.web.wiring import (
    AFTER,
    AT_ONCE,
    LATEST,
    Asked,
    Memory,
    Updates,
    newest,
    owner_of,
    pass_on,
    told,
    unasked,
)
from engine.backends.base import BackendInfo
from engine.errors import PromptError, StorageError
from engine.methods import PLAIN, method_named, no_head, offered
from engine.questions import in_turn, read, typed
from engine.settings import Generation, Sampling
from engine.types import Question
from storage.benchmarks import Benchmark

SAMPLE, FILE, OWN = "sample", "file", "own"
MOST, TOKENS = 13, 128
"""One question of each category of the sample, and the length of an answer, unless it is chosen."""
LOOK_SECONDS, DRAW_EVERY = 0.4, 10
"""How often a page looks how far it is, and every so many looks draws what there is: that takes
time which the runs would like to have."""
TOLD = 8
"""The newest benchmarks, whose best speedup is told in the history."""
HEADERS = ["When", "Questions", "Model", "Version", "Runs", "Best speedup", "Methods"]
NOTHING = fine("No benchmark yet. Choose questions and methods, then press Run.")

Set = tuple[str, list[Question]]
"""Questions with the name of their file."""


@dataclass(slots=True)
class Parts:
    """The tab's components. `read` holds the questions of the file that was given, `ids` those of
    the history's lines, `shown` the benchmark on the page."""

    tab: gr.Tab
    source: gr.Radio
    files: gr.Column
    path: gr.Textbox
    upload: gr.UploadButton
    read: gr.State
    text: gr.Textbox
    asked: gr.HTML
    most: gr.Number
    methods: gr.Dropdown
    tokens: gr.Number
    repeats: gr.Slider
    temperature: gr.Number
    seed: gr.Number
    known: gr.Checkbox
    run: gr.Button
    stop: gr.Button
    resume: gr.Button
    status: gr.HTML
    result: gr.HTML
    detail: gr.HTML
    chart: gr.Plot
    tools: gr.Row
    beside: gr.Dropdown
    csv: gr.Button
    json: gr.Button
    history: gr.Dataframe
    ids: gr.State
    shown: gr.State
    outgoing: gr.Textbox


def build(tab: gr.Tab, session: Session) -> Parts:
    """What is asked and how; how far it is; what came of it; what came of others."""
    made: dict[str, Any] = {"tab": tab}
    with gr.Row(elem_classes="cards"):
        with gr.Column(elem_classes="card", scale=1):
            made |= build_questions()
        with gr.Column(elem_classes="card", scale=1):
            made |= build_answers(session)
    made["status"] = gr.HTML(elem_id="benchmark-status", apply_default_css=False)
    made["result"] = gr.HTML(NOTHING, elem_id="benchmark-result", apply_default_css=False)
    made["chart"] = gr.Plot(
        None, show_label=False, container=False, visible=False, elem_id="benchmark-chart"
    )
    made["detail"] = gr.HTML(elem_id="benchmark-detail", apply_default_css=False)
    with gr.Row(visible=False, elem_classes="ask tools-of-results") as made["tools"]:
        made["beside"] = gr.Dropdown(
            [("None", "")],
            value="",
            label="Set another benchmark beside it",
            scale=4,
            min_width=260,
            elem_id="benchmark-beside",
        )
        made["csv"] = gr.Button("Save as CSV", size="sm", min_width=110, elem_id="benchmark-csv")
        made["json"] = gr.Button("Save as JSON", size="sm", min_width=110, elem_id="benchmark-json")
    made["history"] = gr.Dataframe(
        headers=HEADERS,
        datatype="str",
        interactive=False,
        elem_id="benchmarks",
        max_height=300,
        label="Earlier benchmarks, newest first. Click one to see it.",
    )
    made |= {"ids": gr.State([]), "shown": gr.State(None), "read": gr.State(None)}
    made["outgoing"] = gr.Textbox(visible="hidden")
    return Parts(**{item.name: made[item.name] for item in fields(Parts)})


def build_questions() -> dict[str, Block]:
    """Where the questions come from, and how many of them are asked."""
    gr.HTML("<h3>Questions</h3>")
    made: dict[str, Any] = {}
    made["source"] = gr.Radio(
        [("Bundled sample", SAMPLE), ("Spec-Bench file", FILE), ("Own prompts", OWN)],
        value=SAMPLE,
        label="From",
        elem_id="benchmark-source",
    )
    with gr.Column(visible=False) as made["files"]:
        made["path"] = gr.Textbox(
            label="Path of a file with a JSON object per line",
            placeholder="/home/me/Spec-Bench/question.jsonl",
            max_lines=1,
            elem_id="benchmark-path",
        )
        made["upload"] = gr.UploadButton(
            "Choose a file instead", size="sm", file_types=[".jsonl", ".json"], type="filepath"
        )
    made["text"] = gr.Textbox(
        label="Prompts",
        info="One per line, or a JSON object per line.",
        lines=5,
        max_lines=14,
        visible=False,
        elem_id="benchmark-text",
    )
    made["asked"] = gr.HTML(counted(bundled()), elem_id="benchmark-asked", apply_default_css=False)
    made["most"] = gr.Number(
        MOST,
        label="Most questions",
        info="Taken from all categories in turn; 0: all. Of several turns the first is asked.",
        precision=0,
        elem_id="benchmark-most",
    )
    return made


def usual(info: BackendInfo) -> list[str]:
    """The methods that are measured unless others are chosen."""
    if info.server is not None:
        return [method.name for method in offered(info)]
    return [PLAIN.name, "hd", *(["hd+head"] if not no_head(info) else [])]


def build_answers(session: Session) -> dict[str, Block]:
    """By which methods, how often and with which settings they are answered."""
    gr.HTML("<h3>Answers</h3>")
    made: dict[str, Any] = {}
    made["methods"] = gr.Dropdown(
        methods(session),
        value=usual(session.current.info),
        multiselect=True,
        label="Methods",
        info="Each answers every question; their order rotates. What the databases may draft is as "
        "in Settings, under Advanced.",
        elem_id="benchmark-methods",
    )
    with gr.Row(elem_classes="pair"):
        made["tokens"] = gr.Number(
            TOKENS,
            label="Most tokens of an answer",
            precision=0,
            min_width=150,
            elem_id="benchmark-tokens",
        )
        made["repeats"] = gr.Slider(
            1, MOST_REPEATS, value=1, step=1, label="Repeats of each question", min_width=230
        )
    with gr.Row(elem_classes="pair"):
        made["temperature"] = gr.Number(0.0, label="Temperature for all", min_width=150)
        made["seed"] = gr.Number(0, label="Seed for all", precision=0, min_width=150)
    made["known"] = gr.Checkbox(
        False,
        label="Past answers may draft",
        info="Off: every run begins as on the first day, so that results can be compared.",
    )
    with gr.Row(elem_classes="presets"):
        made["run"] = gr.Button("Run", variant="primary", size="sm", elem_id="benchmark-run")
        made["stop"] = gr.Button(
            "Stop", variant="stop", size="sm", visible=False, elem_id="benchmark-stop"
        )
        made["resume"] = gr.Button("Resume", size="sm", visible=False, elem_id="benchmark-resume")
    return made


def counted(questions: Sequence[Question]) -> str:
    """How many questions there are, and of what."""
    kinds = Counter(question.category for question in questions)
    names = ", ".join(list(kinds)[:13]) + (" …" if len(kinds) > 13 else "")
    many = f"{len(kinds)} categories ({names})" if len(kinds) > 1 else names
    return fine(f"{len(questions):,} question{'s' * (len(questions) != 1)}: {many}.")


def line(stored: Benchmark, best: str) -> list[str]:
    """One row of the history, with the best speedup."""
    named = stored.plan.get("methods")
    names = [str(each.get("name")) for each in named if isinstance(each, dict)] if named else []
    return [
        benchmark_html.when(stored.created),
        stored.title,
        stored.model,
        stored.version,
        f"{stored.done:,} of {stored.runs:,}",
        best,
        ", ".join(title_of(name) for name in names),
    ]


def best_of(report: Report) -> str:
    """The largest speedup of a benchmark."""
    told = [one.speedup.whole for one in report.figures if one.speedup.whole]
    return times(max(told, default=None))


class Handlers:
    """What the tab's events do."""

    def __init__(self, session: Session, parts: Parts, controls: Controls) -> None:
        self.session, self.parts, self.controls = session, parts, controls
        self.runs = session.benchmarks
        self.best: dict[tuple[str, int], str] = {}
        """The best speedup of a benchmark with so many runs: reading these takes long."""

    # the questions

    def choose(self, source: str, path: str | None, text: str | None, given: Set | None) -> Updates:
        """Show what belongs to a source of questions."""
        parts = self.parts
        return {
            parts.files: gr.update(visible=source == FILE),
            parts.text: gr.update(visible=source == OWN),
            parts.asked: self.said(source, path or "", text or "", given),
        }

    def said(self, source: str, path: str, text: str, given: Set | None) -> str:
        """How many questions there are to be asked; "" where there is nothing yet."""
        if source == FILE and not (path.strip() or given) or source == OWN and not text.strip():
            return ""
        with told():
            return counted(self.questions(source, path, text, given)[1])
        return ""

    def questions(self, source: str, path: str, text: str, given: Set | None) -> Set:
        """The questions and what their set is called. Raises PromptError."""
        if source == OWN:
            return "Own prompts", typed(text)
        if source == SAMPLE:
            return "Bundled sample", bundled()
        if path.strip():
            place = Path(path.strip()).expanduser()
            return place.name, read(place)
        if given is None:
            raise PromptError("No file is chosen. Give the path of one, or choose a file.")
        return given

    def upload(self, file: str | None) -> Updates:
        """Read a file that a browser sent, which is not kept."""
        with told():
            try:
                found = read(Path(file or ""))
                shown: Updates = {
                    self.parts.read: (Path(file or "").name, found),
                    self.parts.path: "",
                }
                return {**shown, self.parts.asked: counted(found)}
            finally:
                with suppress(OSError):
                    Path(file or "").unlink()
        return {self.parts.asked: gr.skip()}

    # begin, go on, end

    def plan(self, values: Sequence[object]) -> Plan:
        """The plan on the page. Raises PromptError and SettingError."""
        asked: Any = values[:4]
        chosen: Any = values[4:11]
        rest = values[11:]
        most, names, tokens, repeats, heat, seed, known = chosen
        source, path, text, given = asked
        title, questions = self.questions(source, path or "", text or "", given)
        _, preferences = self.controls.read(rest)
        sampling = Sampling(temperature=number(0.0, heat), seed=number(0, seed))
        return Plan(
            title,
            tuple(in_turn(questions, lambda each: each.category, max(0, int(most or 0)))),
            tuple(method_named(str(name), preferences.drafting) for name in names or ()),
            Generation(sampling, number(0, tokens)),
            int(repeats),
            bool(known),
        )

    async def run(
        self, request: gr.Request, memory: Memory, *values: object
    ) -> AsyncIterator[Updates]:
        """Begin a benchmark, and show how it goes."""
        owner, begun = owner_of(self.session, memory, request), None
        with told():
            begun = self.runs.start(owner, self.plan(values))
        if begun is not None:
            async for shown in self.follow(owner, begun):
                yield shown
        yield self.buttons(None if begun is None else self.stored(owner, begun))

    async def resume(
        self, request: gr.Request, memory: Memory, chosen: str | None
    ) -> AsyncIterator[Updates]:
        """Go on with the benchmark on the page, and show how it goes."""
        owner, begun = owner_of(self.session, memory, request), False
        with told():
            self.runs.resume(owner, chosen or "")
            begun = True
        if begun:
            async for shown in self.follow(owner, chosen or ""):
                yield shown
        yield self.buttons(self.stored(owner, chosen or ""))

    async def follow(self, owner: str, chosen: str) -> AsyncIterator[Updates]:
        """How the benchmark under way goes, until it is over."""
        looks, drawn = 0, -1
        while (standing := self.runs.standing) is not None:
            shown = {**self.buttons(None), self.parts.status: benchmark_html.status(standing)}
            if looks % DRAW_EVERY == 0 and standing.done != drawn:
                drawn = standing.done
                shown |= await asyncio.to_thread(self.screen, owner, chosen, "", True)
            yield shown
            looks += 1
            await asyncio.sleep(LOOK_SECONDS)
        ended: Updates = {self.parts.status: benchmark_html.status(None, self.runs.problem)}
        pass_on(self.session, owner)
        yield {**ended, **await asyncio.to_thread(self.all, owner, chosen)}

    def stop(self, request: gr.Request, memory: Memory) -> None:
        """End it; what is done stays."""
        self.runs.stop(owner_of(self.session, memory, request))

    # what is shown

    def stored(self, owner: str, chosen: str) -> Benchmark | None:
        """A benchmark, None where there is none of that id."""
        with suppress(StorageError):
            return self.runs.store(owner).get(chosen)
        return None

    def buttons(self, stored: Benchmark | None) -> Updates:
        """What can be done now; `stored` is the benchmark on the page."""
        busy = self.runs.standing is not None
        left = stored is not None and stored.done < stored.runs
        return {
            self.parts.run: gr.update(interactive=not busy),
            self.parts.stop: gr.update(visible=busy),
            self.parts.resume: gr.update(visible=left and not busy),
        }

    def screen(self, owner: str, chosen: str | None, other: str, growing: bool = False) -> Updates:
        """A benchmark with its tables and its chart, another one beside it if so chosen. One that
        is `growing` is not compared with the last one yet."""
        parts = self.parts
        with told():
            if not chosen:
                hidden = gr.update(visible=False)
                return {parts.result: NOTHING, parts.detail: "", parts.chart: hidden}
            report = self.runs.report(owner, chosen)
            before, drops = (None, []) if growing else self.runs.lost(owner, report)
            words = benchmark_html.heading(report) + benchmark_html.notes(report, before, drops)
            words += benchmark_html.figures(report)
            if other and other != chosen:
                words += benchmark_html.beside(report, self.runs.report(owner, other))
            drawn = benchmark_charts.by_category(report)
            there = bool(report.figures)
            return {
                parts.result: words,
                parts.detail: benchmark_html.categories(report),
                parts.chart: gr.update(value=drawn, visible=there),
                parts.tools: gr.update(visible=report.benchmark.done > 0),
            }
        return {parts.result: gr.skip()}

    def all(self, owner: str, chosen: str | None) -> Updates:
        """Everything: a benchmark, the newest one where none is chosen, and the history."""
        with told():
            found = self.runs.store(owner).list()
            names = [stored.id for stored in found]
            shown = chosen if chosen in names else next(iter(names), None)
            rows = [
                line(stored, self.gained(owner, stored) if at < TOLD else "")
                for at, stored in enumerate(found)
            ]
            there = next((stored for stored in found if stored.id == shown), None)
            return {
                **self.buttons(there),
                **self.others(found, shown),
                **self.screen(owner, shown, ""),
                self.parts.history: rows,
                self.parts.ids: names,
                self.parts.shown: shown,
            }
        return {self.parts.history: gr.skip()}

    def others(self, found: Sequence[Benchmark], shown: str | None) -> Updates:
        """What can be set beside the benchmark on the page."""
        choices = [(benchmark_html.title(each), each.id) for each in found if each.id != shown]
        offered = gr.update(choices=[("None", ""), *choices], value="")
        return {self.parts.beside: offered}

    def gained(self, owner: str, stored: Benchmark) -> str:
        """The best speedup of a benchmark."""
        key = stored.id, stored.done
        if key not in self.best:
            self.best[key] = ""
            with suppress(StorageError):
                self.best[key] = best_of(self.runs.report(owner, stored.id))
        return self.best[key]

    async def refresh(
        self, request: gr.Request, memory: Memory, chosen: str | None
    ) -> AsyncIterator[Updates]:
        """Show how things are when the tab opens, a benchmark under way included."""
        owner, standing = owner_of(self.session, memory, request), self.runs.standing
        offered: Updates = {self.parts.methods: gr.update(choices=methods(self.session))}
        shown = await asyncio.to_thread(self.all, owner, standing.benchmark if standing else chosen)
        yield {**offered, **shown}
        if standing is not None:
            async for later in self.follow(owner, standing.benchmark):
                yield later

    def pick(
        self, event: gr.SelectData, request: gr.Request, memory: Memory, ids: list[str]
    ) -> Updates:
        """Show a benchmark of the history."""
        at = event.index[0] if isinstance(event.index, list | tuple) else event.index
        owner = owner_of(self.session, memory, request)
        if not 0 <= at < len(ids):
            return {self.parts.result: gr.skip()}
        with told():
            stored, found = self.stored(owner, ids[at]), self.runs.store(owner).list()
            return {
                **self.buttons(stored),
                **self.others(found, ids[at]),
                **self.screen(owner, ids[at], ""),
                self.parts.shown: ids[at],
            }
        return {self.parts.result: gr.skip()}

    def set_beside(
        self, request: gr.Request, memory: Memory, chosen: str | None, other: str | None
    ) -> Updates:
        """Show another benchmark beside the one on the page."""
        return self.screen(owner_of(self.session, memory, request), chosen, other or "")

    # files

    def as_csv(self, request: gr.Request, memory: Memory, chosen: str | None) -> str:
        """The answers of the benchmark on the page as a table."""
        return self.file(request, memory, chosen, "csv")

    def as_json(self, request: gr.Request, memory: Memory, chosen: str | None) -> str:
        """The benchmark on the page with everything."""
        return self.file(request, memory, chosen, "json")

    def file(self, request: gr.Request, memory: Memory, chosen: str | None, kind: str) -> str:
        """A file's name, type and text, which the browser saves."""
        owner = owner_of(self.session, memory, request)
        with told():
            report = self.runs.report(owner, chosen or "")
            results = self.runs.store(owner).results(chosen or "")
            if kind == "csv":
                text, said = as_csv(report, results), "text/csv"
            else:
                text, said = json.dumps(as_json(report, results), indent=1), "application/json"
            return saved(f"benchmark.{kind}", said, text)
        return ""


def wire(session: Session, parts: Parts, controls: Controls, memory: gr.BrowserState) -> None:
    """Connect the tab."""
    on = Handlers(session, parts, controls)
    asked = [parts.source, parts.path, parts.text, parts.read]
    fields_of = [parts.most, parts.methods, parts.tokens, parts.repeats, parts.temperature]
    fields_of += [parts.seed, parts.known]
    buttons: list[Block] = [parts.run, parts.stop, parts.resume]
    screen: list[Block] = [parts.result, parts.detail, parts.chart, parts.tools]
    whole = [*buttons, *screen, parts.status, parts.beside, parts.history, parts.ids, parts.shown]
    choosing = [parts.source.input, parts.path.submit, parts.path.blur, parts.text.blur]
    # Who leaves a box by a click on another source means both.
    gr.on(
        choosing,
        on.choose,
        asked,
        [parts.files, parts.text, parts.asked],
        **LATEST,
    )
    parts.upload.upload(on.upload, parts.upload, [parts.read, parts.path, parts.asked], **AT_ONCE)
    # A benchmark that goes on draws nothing over the one that is picked meanwhile.
    last = gr.State(Asked())
    picked = [parts.resume, *screen, parts.beside, parts.shown]
    questions = [*asked, *fields_of, *controls.inputs]
    parts.run.click(newest(on.run, picked), [last, memory, *questions], whole, **AT_ONCE)
    parts.resume.click(newest(on.resume, picked), [last, memory, parts.shown], whole, **AT_ONCE)
    parts.stop.click(on.stop, memory, None, **AT_ONCE)
    seen = [parts.methods, *whole]
    parts.tab.select(unasked(on.refresh), [last, memory, parts.shown], seen, **AT_ONCE)
    parts.history.select(
        newest(on.pick, picked),
        [last, memory, parts.ids],
        [parts.run, parts.stop, *picked],
        trigger_mode="multiple",
        **AT_ONCE,
    )
    parts.beside.input(
        newest(on.set_beside, screen),
        [last, memory, parts.shown, parts.beside],
        screen,
        **LATEST,
    )
    for button, file in ((parts.csv, on.as_csv), (parts.json, on.as_json)):
        button.click(file, [memory, parts.shown], parts.outgoing, **AT_ONCE).then(
            None, parts.outgoing, None, js=SAVE_FILE, **AFTER
        )
