"""Diagnostics: past runs, filtered; the charts, prompt and text of the chosen one; each step of it.

One way down: a chart or the list of runs opens a run, its charts or the list of its steps open a
step. Lists are read by the page and charts are summed up where the runs are stored, so that a page
gets as much of a million steps as of a hundred.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from html import escape

import gradio as gr
import plotly.graph_objects as go
from gradio.blocks import Block

from app.service import run_exports
from app.service.session import Session
from app.web import charts, render, run_html
from app.web.plots import grid
from app.web.saving import SAVE_FILE, saved
from app.web.tabs import replay
from app.web.token_view import token_view
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
    sent,
    told,
    unasked,
)
from assets import ASSETS
from engine.errors import StorageError, StrataError
from storage.conversations import Piece
from storage.digests import NOTHING, Digest
from storage.traces import Filter, Kind, Mark, Trace, Traces

HEADERS = ["When", "From", "Method", "Model", "Tokens", "Tokens/s", "Tokens/step", "Speedup*"]
STEP_HEADERS = ["Step", "Text", "From", "Accepted", "Depth", "Time"]
ROWS = 25
"""Runs, and steps, of one page of their lists."""
MOST_CONVERSATIONS = 300
"""So many conversations can be chosen: those used last."""
MOST_TOKENS = 4_000
"""Of a longer answer the first tokens are shown in colour."""
ALL = ""
PERIODS = [("All", ALL), ("Last hour", "3600"), ("Last day", "86400"), ("Last week", "604800")]
COSTS = -1
"""Where the cost curve stands among a run's charts: last, above the line that says what it is of.
"""


@dataclass(slots=True)
class Parts:
    """The tab's components. `again` is there for the owner of the machine only."""

    tab: gr.Tab
    filters: list[gr.Dropdown]
    trends: list[gr.Plot]
    table: gr.Dataframe
    ids: gr.State
    start: gr.State
    range: gr.HTML
    newer: gr.Button
    older: gr.Button
    runs_csv: gr.Button
    shown: gr.State
    title: gr.HTML
    asked: gr.HTML
    said: gr.HTML
    plots: list[gr.Plot]
    step: gr.Slider
    card: gr.HTML
    steps: gr.Dataframe
    steps_csv: gr.Button
    run_json: gr.Button
    picks: gr.HTML
    outgoing: gr.Textbox
    costs: gr.HTML
    again: gr.Button | None
    replay: replay.Parts


def build(tab: gr.Tab, session: Session) -> Parts:
    """Filters, what all their runs say, the list of them; then one run, and one of its steps."""
    filters = build_filters()
    trends = grid(history([]))
    table = gr.Dataframe(
        headers=HEADERS,
        datatype="str",
        interactive=False,
        elem_id="runs",
        max_height=420,
        label="Runs, newest first. Click one to open it.",
    )
    with gr.Row(elem_classes="pager"):
        newer = gr.Button("Newer", size="sm", min_width=80, interactive=False)
        older = gr.Button("Older", size="sm", min_width=80, interactive=False, elem_id="older")
        range_ = gr.HTML(elem_id="range", apply_default_css=False)
        runs_csv = gr.Button("Save as CSV", size="sm", min_width=110, elem_id="runs-csv")
    gr.HTML(
        "<p class='fine'>* Whole answers, compared with plain decoding of the same prompt. Known "
        "after Prove it or Compare; empty where no draft was accepted.</p>"
    )
    title = gr.HTML(run_html.NO_RUN_YET, elem_id="run-title", apply_default_css=False)
    with gr.Row(elem_classes="sides"):
        with gr.Column(min_width=300):
            gr.HTML("<h3>What it read</h3>", elem_classes="side-head")
            asked = gr.HTML(elem_id="run-prompt", apply_default_css=False)
        with gr.Column(min_width=300):
            gr.HTML("<h3>What it said</h3>", elem_classes="side-head")
            said = token_view(elem_classes="transcript side", elem_id="run-text")
    plots = grid([*of_run(NOTHING), cost_figure(session, NOTHING)])
    costs, again = build_costs(session)
    with gr.Row(elem_classes="sides"):
        with gr.Column(min_width=300):
            step = gr.Slider(1, 2, 1, step=1, label="Step", elem_id="step")
            card = gr.HTML(elem_id="step-card", apply_default_css=False)
        with gr.Column(min_width=300):
            steps = gr.Dataframe(
                headers=STEP_HEADERS,
                datatype="str",
                interactive=False,
                elem_id="steps",
                max_height=360,
                wrap=True,
                column_widths=["58px", "180px", "170px", "92px", "70px", "92px"],
                label="The steps around it. Click one to see it.",
            )
            with gr.Row(elem_classes="pager"):
                steps_csv = gr.Button("Save steps as CSV", size="sm", elem_id="steps-csv")
                run_json = gr.Button("Save run as JSON", size="sm", elem_id="run-json")
    played = replay.build()
    picks = gr.HTML(
        html_template="<span></span>",
        js_on_load=(ASSETS / "picks.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )
    return Parts(
        tab,
        filters,
        trends,
        table,
        gr.State([]),
        gr.State(0),
        range_,
        newer,
        older,
        runs_csv,
        gr.State(None),
        title,
        asked,
        said,
        plots,
        step,
        card,
        steps,
        steps_csv,
        run_json,
        picks,
        gr.Textbox(visible="hidden"),
        costs,
        again,
        played,
    )


def build_filters() -> list[gr.Dropdown]:
    """Which runs are listed: model, method, conversation, kind, time."""
    with gr.Row(elem_classes="filters", elem_id="run-filters"):
        filters = [
            gr.Dropdown([("All", ALL)], value=ALL, label=label, min_width=150, filterable=True)
            for label in ("Model", "Method", "Conversation", "From")
        ]
        filters.append(gr.Dropdown(PERIODS, value=ALL, label="Time", min_width=150))
    return filters


def build_costs(session: Session) -> tuple[gr.HTML, gr.Button | None]:
    """What the cost curve was measured on, and a button that measures it anew."""
    again = None
    with gr.Row(elem_classes="costs"):
        costs = gr.HTML(measured(session), elem_id="costs", apply_default_css=False)
        if not session.guests:
            again = gr.Button(
                "Measure again",
                size="sm",
                min_width=120,
                elem_id="measure",
                visible=session.costs.wanted,
            )
    return costs, again


def history(marks: list[Mark]) -> list[go.Figure]:
    """The charts of all listed runs."""
    return [charts.speed_of_runs(marks), charts.speedup_of_runs(marks)]


def of_run(run: Digest) -> list[go.Figure]:
    """The charts of one run, but for the costs."""
    return [*charts.of_digest(run), charts.step_times(run)]


def cost_figure(session: Session, run: Digest) -> go.Figure:
    """What a run drafted, and the curve that its budget followed if its model is the loaded one."""
    loaded = run is NOTHING or run.fingerprint == session.current.info.fingerprint
    return charts.cost_curve(session.costs.curve if loaded else None, run)


def measured(session: Session, busy: bool = False) -> str:
    """When the cost curve was measured, and on what."""
    info, costs = session.current.info, session.costs
    if busy:
        words = "Measuring what a step costs …"
    elif costs.curve is None:
        words = "The cost of a step was not measured."
    else:
        threads = f", {info.threads} threads" if info.threads > 1 else ""
        words = (
            f"Cost of a step: measured {datetime.fromtimestamp(costs.measured):%d %b %H:%M} on "
            f"{info.device}, {info.dtype}{threads}. Every answer since has refined it."
        )
    return f"<p class='fine'>{escape(words)}</p>"


def filter_of(model: str, method: str, conversation: str, kind: str, seconds: str) -> Filter:
    """What the dropdowns say."""
    since = time.time() - int(seconds) if seconds else 0.0
    known: Kind | None = kind or None  # type: ignore[assignment]
    return Filter(model or None, method or None, conversation or None, known, since)


class Handlers:
    """What the tab's events do."""

    def __init__(self, session: Session, parts: Parts) -> None:
        self.session, self.parts = session, parts

    def store(self, memory: Memory, request: gr.Request) -> Traces:
        """The runs of whoever asks."""
        return Traces(self.session.database, owner_of(self.session, memory, request))

    def choices(self, store: Traces, chosen: Sequence[str]) -> tuple[Updates, list[str]]:
        """What can be chosen now, and what of the choice stays: where there still are runs."""
        offered = [
            [(name, name) for name in store.names("model")],
            [(title_of(name), name) for name in store.names("method")],
            [(title, id) for id, title in store.conversations(MOST_CONVERSATIONS)],
            [(run_html.KINDS.get(name, name), name) for name in store.names("kind")],
        ]
        updates, kept = Updates(), list[str]()
        for part, each, value in zip(self.parts.filters, offered, chosen, strict=False):
            kept.append(value if value in [name for _, name in each] else ALL)
            updates[part] = gr.update(choices=[("All", ALL), *each], value=kept[-1])
        return updates, [*kept, *chosen[len(kept) :]]

    def listed(self, store: Traces, chosen: Filter, start: int) -> Updates:
        """A page of the list."""
        parts, count = self.parts, store.count(chosen)
        start = max(0, min(start, count - 1)) // ROWS * ROWS
        runs = store.page(chosen, start, ROWS)
        return {
            parts.table: [run_html.line(run) for run in runs],
            parts.ids: [run.id for run in runs],
            parts.start: start,
            parts.range: run_html.range_of(start, runs, count),
            parts.newer: gr.update(interactive=start > 0),
            parts.older: gr.update(interactive=start + ROWS < count),
        }

    def trends(self, store: Traces, chosen: Filter) -> Updates:
        """The charts of all listed runs."""
        return dict(zip(self.parts.trends, history(store.trend(chosen)), strict=True))

    def opened(self, store: Traces, run_id: str | None) -> Updates:
        """Everything that shows a run, with its first step."""
        parts = self.parts
        if run_id is None:
            return {parts.shown: None, parts.title: run_html.NO_RUN_YET}
        trace, run, sums = store.get(run_id), store.load(run_id, steps=False), store.digest(run_id)
        figures = [*of_run(sums), cost_figure(self.session, sums)]
        return {
            parts.shown: run_id,
            parts.title: run_html.heading(trace, run),
            parts.asked: run_html.prompt(store.asked(run_id), self.exact(store, trace)),
            parts.said: said(store, run_id),
            **dict(zip(parts.plots, figures, strict=True)),
            **self.at_step(store, run_id, 1),
        }

    def exact(self, store: Traces, run: Trace) -> str | None:
        """The prompt of a run as text, where its tokens are kept and its model is loaded."""
        if run.fingerprint != self.session.current.info.fingerprint:
            return None
        begun = store.prompt(run.id)
        if begun is None or begun[0]:
            return None
        with suppress(StrataError):
            return self.session.engine.texts([begun[1]])[0]
        return None

    def at_step(self, store: Traces, run_id: str, number: int) -> Updates:
        """One step of a run, and its neighbours."""
        parts, count = self.parts, store.step_count(run_id)
        number = max(1, min(number, count))
        start = (number - 1) // ROWS * ROWS
        steps = store.steps(run_id, start, ROWS)
        place = number - 1 - start
        return {
            parts.step: gr.update(maximum=max(2, count), value=number, interactive=count > 1),
            parts.steps: [run_html.step_line(step) for step in steps],
            parts.card: run_html.step_card(steps[place], count) if place < len(steps) else "",
        }

    # events

    def show(
        self, request: gr.Request, memory: Memory, shown: str | None, start: int, *chosen: str
    ) -> Updates:
        """The tab was opened: what was open stays open, else the newest run with drafts is."""
        parts = self.parts
        with told():
            store = self.store(memory, request)
            offered, kept = self.choices(store, chosen)
            wanted = filter_of(*kept)
            updates = {**offered, **self.listed(store, wanted, start), **self.trends(store, wanted)}
            updates[parts.costs] = measured(self.session)
            return {**updates, **self.first(store, wanted, shown)}
        return {parts.shown: gr.skip()}

    def first(self, store: Traces, chosen: Filter, shown: str | None) -> Updates:
        """The run to show: the one that is open, or the newest one, with drafts where there is."""
        if shown is not None:
            with told():
                return self.opened(store, shown)
        runs = store.page(chosen, 0, ROWS)
        drafted = next((run for run in runs if run.method != "plain"), runs[0] if runs else None)
        return self.opened(store, drafted.id if drafted else None)

    def filter(
        self, request: gr.Request, memory: Memory, shown: str | None, *chosen: str
    ) -> Updates:
        """Other filters: their first page, their charts, their newest run."""
        with told():
            store, wanted = self.store(memory, request), filter_of(*chosen)
            updates = {**self.listed(store, wanted, 0), **self.trends(store, wanted)}
            return {**updates, **self.first(store, wanted, None)}
        return {self.parts.shown: gr.skip()}

    def turn(
        self, pages: int, request: gr.Request, memory: Memory, start: int, *chosen: str
    ) -> Updates:
        """Another page of the list."""
        with told():
            store, wanted = self.store(memory, request), filter_of(*chosen)
            return self.listed(store, wanted, start + pages * ROWS)
        return {self.parts.start: gr.skip()}

    def older(self, request: gr.Request, memory: Memory, start: int, *chosen: str) -> Updates:
        """The next page."""
        return self.turn(1, request, memory, start, *chosen)

    def newer(self, request: gr.Request, memory: Memory, start: int, *chosen: str) -> Updates:
        """The page before."""
        return self.turn(-1, request, memory, start, *chosen)

    def choose(
        self, event: gr.SelectData, request: gr.Request, ids: list[str], memory: Memory
    ) -> Updates:
        """A row of the list of runs was clicked."""
        at = row_of(event)
        with told():
            if 0 <= at < len(ids):
                return self.opened(self.store(memory, request), ids[at])
        return {self.parts.shown: gr.skip()}

    def pick_run(self, event: gr.EventData, request: gr.Request, memory: Memory) -> Updates:
        """The point of a run was clicked in a chart."""
        value = sent(event).get("value")
        with told():
            if isinstance(value, str):
                return self.opened(self.store(memory, request), value)
        return {self.parts.shown: gr.skip()}

    def pick_step(
        self, event: gr.EventData, request: gr.Request, shown: str | None, memory: Memory
    ) -> Updates:
        """The point of a step was clicked in a chart."""
        value = sent(event).get("value")
        with told():
            if isinstance(value, int) and shown:
                return self.at_step(self.store(memory, request), shown, value + 1)
        return {self.parts.card: gr.skip()}

    def slide(
        self, number: float | None, request: gr.Request, shown: str | None, memory: Memory
    ) -> Updates:
        """The slider stands at another step."""
        with told():
            if shown and number:
                updates = self.at_step(self.store(memory, request), shown, int(number))
                # What is being dragged is left alone.
                return {part: each for part, each in updates.items() if part is not self.parts.step}
        return {self.parts.card: gr.skip()}

    def choose_step(
        self,
        event: gr.SelectData,
        request: gr.Request,
        shown: str | None,
        number: float | None,
        memory: Memory,
    ) -> Updates:
        """A row of the list of steps was clicked."""
        with told():
            if shown:
                start = (int(number or 1) - 1) // ROWS * ROWS
                wanted = start + row_of(event) + 1
                return self.at_step(self.store(memory, request), shown, wanted)
        return {self.parts.card: gr.skip()}

    # files

    def save_runs(self, request: gr.Request, memory: Memory, *chosen: str) -> str:
        """All runs of the filters as CSV."""
        with told():
            runs = self.store(memory, request).page(filter_of(*chosen))
            return saved("runs.csv", "text/csv", run_exports.runs_csv(runs))
        return ""

    def save_steps(self, request: gr.Request, shown: str | None, memory: Memory) -> str:
        """The steps of the open run as CSV."""
        with told():
            steps = self.store(memory, request).steps(needed(shown))
            return saved("steps.csv", "text/csv", run_exports.steps_csv(steps))
        return ""

    def save_run(self, request: gr.Request, shown: str | None, memory: Memory) -> str:
        """The open run as JSON."""
        with told():
            store, run_id = self.store(memory, request), needed(shown)
            text = run_exports.run_json(store.get(run_id), store.load(run_id))
            return saved("run.json", "application/json", text)
        return ""

    # costs

    def again(self) -> Iterator[str]:
        """Measure what a step costs."""
        yield measured(self.session, busy=True)
        with told():
            self.session.costs.measure()
        yield measured(self.session)

    def curve(self, request: gr.Request, shown: str | None, memory: Memory) -> Updates:
        """Draw what was measured, beside the run that is open by now."""
        with told():
            run = self.store(memory, request).digest(shown) if shown else NOTHING
            return {self.parts.plots[COSTS]: cost_figure(self.session, run)}
        return {self.parts.plots[COSTS]: gr.skip()}


def needed(shown: str | None) -> str:
    """The open run. Raises `StorageError` where none is."""
    if shown is None:
        raise StorageError("No run is open. Click one in the list first.")
    return shown


def row_of(event: gr.SelectData) -> int:
    """The row that was clicked."""
    at = event.index
    return int(at[0] if isinstance(at, list | tuple) else at)


def said(store: Traces, run_id: str) -> render.Data:
    """What a run said, for the token view."""
    pieces = list[Piece]()
    for step in store.steps(run_id, 0, MOST_TOKENS):
        pieces += [Piece.of(token, step.index) for token in step.tokens]
        if len(pieces) >= MOST_TOKENS:
            break
    return render.side_by_side(run_id, pieces[:MOST_TOKENS])


def wire(session: Session, parts: Parts, memory: gr.BrowserState) -> None:
    """Connect the tab."""
    replay.wire(session, parts.replay, parts.shown, memory)
    on = Handlers(session, parts)
    list_ = [parts.table, parts.ids, parts.start, parts.range, parts.newer, parts.older]
    step: list[Block] = [parts.step, parts.steps, parts.card]
    run: list[Block] = [parts.shown, parts.title, parts.asked, parts.said, *parts.plots, *step]
    all_: list[Block] = [*parts.filters, *parts.trends, *list_, *run, parts.costs]
    chosen = parts.filters
    # What was asked last is what is seen, however long the answers take.
    asked = gr.State(Asked())
    parts.tab.select(
        unasked(on.show), [asked, memory, parts.shown, parts.start, *chosen], all_, **AT_ONCE
    )
    filtered = [*parts.trends, *list_, *run]
    for each in parts.filters:
        each.input(
            newest(on.filter, [each, *filtered]),
            [asked, memory, parts.shown, *chosen],
            filtered,
            **LATEST,
        )
    for button, turn in ((parts.newer, on.newer), (parts.older, on.older)):
        button.click(newest(turn, list_), [asked, memory, parts.start, *chosen], list_, **AT_ONCE)
    parts.table.select(
        newest(on.choose, run), [asked, parts.ids, memory], run, trigger_mode="multiple", **AT_ONCE
    )
    parts.picks.run(
        newest(on.pick_run, run), [asked, memory], run, trigger_mode="multiple", **AT_ONCE
    )

    def at_step(handler: Callable[..., Updates]) -> Callable[..., Updates]:
        return newest(handler, step, of=[parts.shown])

    parts.picks.step(
        at_step(on.pick_step),
        [asked, parts.shown, memory],
        step,
        trigger_mode="multiple",
        **AT_ONCE,
    )
    parts.step.input(
        at_step(on.slide),
        [asked, parts.step, parts.shown, memory],
        step,
        **LATEST,
    )
    parts.steps.select(
        at_step(on.choose_step),
        [asked, parts.shown, parts.step, memory],
        step,
        trigger_mode="multiple",
        **AT_ONCE,
    )
    for button, save, inputs in (
        (parts.runs_csv, on.save_runs, [memory, *chosen]),
        (parts.steps_csv, on.save_steps, [parts.shown, memory]),
        (parts.run_json, on.save_run, [parts.shown, memory]),
    ):
        button.click(save, inputs, parts.outgoing, **AT_ONCE).then(
            None, parts.outgoing, None, js=SAVE_FILE, **AFTER
        )
    if parts.again is not None:
        parts.again.click(on.again, None, parts.costs, **AT_ONCE).then(
            unasked(on.curve), [asked, parts.shown, memory], parts.plots[COSTS], **AFTER
        )
