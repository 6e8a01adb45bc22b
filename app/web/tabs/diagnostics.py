"""The Diagnostics tab: past runs with filters; the charts, prompt and text of a run; and its steps.

A chart or the list of runs opens a run, whose steps are read once for all that is shown of it. Its
charts or the list of its steps open a step. Lists are sent in pages. The database sums up what the
charts of all runs show, and `steps.digest` what those of one run show, so a page receives as much
data for a million steps as for a hundred.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from html import escape
from typing import Any

import gradio as gr
import plotly.graph_objects as go
from gradio.blocks import Block

from app.service import exports
from app.service.pages import Download
from app.service.session import Session
from app.web import charts, render, run_html
from app.web.kit import (
    REFRESH,
    Payload,
    Tab,
    Updates,
    clicked_row,
    grid,
    html,
    newest,
    notify_errors,
    small_button,
    text_file,
    text_table,
)
from app.web.run_html import title_of
from app.web.token_view import token_view
from assets import read
from engine.errors import StorageError, StrataError
from engine.types import Step
from storage.steps import NOTHING, Digest, digest
from storage.traces import Filter, Kind, Mark, Trace, Traces

HEADERS = ["When", "From", "Method", "Model", "Tokens", "Tokens/s", "Tokens/step", "Speedup*"]
STEP_HEADERS = ["Step", "Text", "From", "Accepted", "Depth", "Time"]
ROWS = 25
"""The rows on one page of the lists of runs and of steps."""
MOST_CONVERSATIONS = 300
"""How many conversations can be chosen as a filter, those used last."""
MOST_TOKENS = 4_000
"""The most tokens of an answer that are shown, from its beginning."""
ALL = ""
PERIODS = [("All", ALL), ("Last hour", "3600"), ("Last day", "86400"), ("Last week", "604800")]
COSTS = -1
"""The index of the cost curve among a run's charts. It is last, above the line that says when and
on what it was measured."""


def history(marks: list[Mark]) -> list[go.Figure]:
    return [charts.speed_of_runs(marks), charts.speedup_of_runs(marks)]


def figures_of(session: Session, run: Digest) -> list[go.Figure]:
    """The charts of a run; the last one is the cost curve (COSTS)."""
    return [*charts.of_run(run), charts.step_times(run), cost_figure(session, run)]


def cost_figure(session: Session, run: Digest) -> go.Figure:
    loaded = run is NOTHING or run.fingerprint == session.current.info.fingerprint
    return charts.cost_curve(session.costs.curve if loaded else None, run)


def measured(session: Session, busy: bool = False) -> str:
    info, costs = session.current.info, session.costs
    if busy:
        text = "Measuring what a step costs …"
    elif costs.curve is None:
        text = "The cost of a step was not measured."
    else:
        threads = f", {info.threads} threads" if info.threads > 1 else ""
        text = (
            f"Cost of a step: measured {datetime.fromtimestamp(costs.measured):%d %b %H:%M} on "
            f"{info.device}, {info.dtype}{threads}. Every answer since has refined it."
        )
    return f"<p class='fine'>{escape(text)}</p>"


def filter_of(model: str, method: str, conversation: str, kind: str, seconds: str) -> Filter:
    since = time.time() - int(seconds) if seconds else 0.0
    known: Kind | None = kind or None  # type: ignore[assignment]
    return Filter(model or None, method or None, conversation or None, known, since)


def open_run(shown: str | None) -> str:
    if shown is None:
        raise StorageError("No run is open. Click one in the list first.")
    return shown


class Diagnostics(Tab):
    """Filters, the charts and the list of all matching runs; then one run, and one of its steps.

    `ids` are the ids of the runs on the current page of the list, `start` is the index of its first
    row, and `shown` is the id of the open run.
    """

    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.tab = tab
        self.ids, self.start, self.shown = gr.State([]), gr.State(0), gr.State(None)
        self.filters = self.build_filters()
        self.trends = grid(history([]))
        self.table = text_table(
            headers=HEADERS,
            elem_id="runs",
            max_height=420,
            label="Runs, newest first. Click one to open it.",
        )
        with gr.Row(elem_classes="pager"):
            self.newer_button = small_button("Newer", min_width=80, interactive=False)
            self.older_button = small_button(
                "Older", min_width=80, interactive=False, elem_id="older"
            )
            self.range = html(elem_id="range")
            self.runs_csv = small_button("Save as CSV", min_width=110, elem_id="runs-csv")
        gr.HTML(
            "<p class='fine'>* Whole answers, compared with plain decoding of the same prompt. "
            "Known after Prove it or Compare; empty where no draft was accepted.</p>"
        )
        self.title = html(run_html.NO_RUN_YET, elem_id="run-title")
        with gr.Row(elem_classes="sides"):
            with gr.Column(min_width=300):
                gr.HTML("<h3>What it read</h3>", elem_classes="side-head")
                self.read_prompt = html(elem_id="run-prompt")
            with gr.Column(min_width=300):
                gr.HTML("<h3>What it said</h3>", elem_classes="side-head")
                self.answer = token_view(elem_classes="transcript side", elem_id="run-text")
        self.plots = grid(figures_of(session, NOTHING))
        self.build_costs()
        with gr.Row(elem_classes="sides"):
            with gr.Column(min_width=300):
                self.step = gr.Slider(1, 2, 1, step=1, label="Step", elem_id="step")
                self.card = html(elem_id="step-card")
            with gr.Column(min_width=300):
                self.steps = text_table(
                    headers=STEP_HEADERS,
                    elem_id="steps",
                    max_height=360,
                    wrap=True,
                    column_widths=["58px", "180px", "170px", "92px", "70px", "92px"],
                    label="The steps around this one. Click one to open it.",
                )
                with gr.Row(elem_classes="pager"):
                    self.steps_csv = small_button("Save steps as CSV", elem_id="steps-csv")
                    self.run_json = small_button("Save run as JSON", elem_id="run-json")
        self.replay = small_button("Replay its steps", min_width=120, elem_id="open-replay")
        self.picks = html(html_template="<span></span>", js_on_load=read("picks.js"))

    def build_filters(self) -> list[gr.Dropdown]:
        with gr.Row(elem_classes="filters", elem_id="run-filters"):
            filters = [
                gr.Dropdown([("All", ALL)], value=ALL, label=label, min_width=150, filterable=True)
                for label in ("Model", "Method", "Conversation", "From")
            ]
            filters.append(gr.Dropdown(PERIODS, value=ALL, label="Time", min_width=150))
        return filters

    def build_costs(self) -> None:
        self.again_button: gr.Button | None = None
        with gr.Row(elem_classes="costs"):
            self.costs = html(measured(self.session), elem_id="costs")
            if not self.session.guests:
                self.again_button = small_button(
                    "Measure again",
                    min_width=120,
                    elem_id="measure",
                    visible=self.session.engine.state.info.can_tree,
                )

    def wire(self) -> None:
        """Connect the tab. The answer to the newest request is shown, even if older ones arrive
        later."""
        list_: list[Block] = [self.table, self.ids, self.start, self.range]
        list_ += [self.newer_button, self.older_button]
        step: list[Block] = [self.step, self.steps, self.card]
        run: list[Block] = [self.shown, self.title, self.read_prompt, self.answer]
        run += [*self.plots, *step]
        filtered: list[Block] = [*self.trends, *list_]
        chosen, at_step = self.filters, newest(step, of=[self.shown])
        seen = [*chosen, *filtered, *run, self.costs]
        before = [self.shown, self.start, *chosen]
        self.on(self.tab.select, self.show, before, seen, guard=REFRESH)
        for each in chosen:
            guard = newest([each, *filtered])
            listed = self.on(
                each.input, self.filter, chosen, filtered, mode="always_last", guard=guard
            )
            # This gives way to a run that is opened meanwhile. A dropdown triggers its event twice
            # for one choice, and the second may come later than that.
            self.then(listed, self.refit, [self.shown, *chosen], run, guard=REFRESH)
        for button, pages in ((self.newer_button, -1), (self.older_button, 1)):
            turn = partial(self.turn, pages)
            self.on(button.click, turn, [self.start, *chosen], list_, guard=newest(list_))
        picks: Any = self.picks
        for trigger, pick, inputs, shown, guard in (
            (self.table.select, self.choose, [self.ids], run, newest(run)),
            (picks.run, self.pick_run, [], run, newest(run)),
            (picks.step, self.pick_step, [self.shown], step, at_step),
            (self.steps.select, self.choose_step, [self.shown, self.step], step, at_step),
        ):
            self.on(trigger, pick, inputs, shown, mode="multiple", guard=guard)
        sliding = [self.step, self.shown]
        self.on(self.step.input, self.slide, sliding, step, mode="always_last", guard=at_step)
        self.on_save(self.runs_csv.click, self.save_runs, chosen)
        self.on_save(self.steps_csv.click, self.save_steps, self.shown)
        self.on_save(self.run_json.click, self.save_run, self.shown)
        if self.again_button is not None:
            measured = self.on(self.again_button.click, self.again, (), self.costs)
            self.then(measured, self.curve, self.shown, self.plots[COSTS], guard=REFRESH)

    def store(self, owner: str) -> Traces:
        return Traces(self.session.database, owner)

    def choices(self, store: Traces, chosen: Sequence[str]) -> tuple[Updates, list[str]]:
        """The available choices of the filters, and the chosen values that still have runs."""
        offered = [
            [(name, name) for name in store.names("model")],
            [(title_of(name), name) for name in store.names("method")],
            [(title, id) for id, title in store.conversations(MOST_CONVERSATIONS)],
            [(run_html.KINDS.get(name, name), name) for name in store.names("kind")],
        ]
        updates, kept = Updates(), list[str]()
        for part, each, value in zip(self.filters, offered, chosen, strict=False):
            kept.append(value if value in [name for _, name in each] else ALL)
            updates[part] = gr.update(choices=[("All", ALL), *each], value=kept[-1])
        return updates, [*kept, *chosen[len(kept) :]]

    def listed(self, store: Traces, chosen: Filter, start: int) -> Updates:
        count = store.count(chosen)
        start = max(0, min(start, count - 1)) // ROWS * ROWS
        runs = store.page(chosen, start, ROWS)
        return {
            self.table: [run_html.run_row(run) for run in runs],
            self.ids: [run.id for run in runs],
            self.start: start,
            self.range: run_html.rows_shown(start, runs, count),
            self.newer_button: gr.update(interactive=start > 0),
            self.older_button: gr.update(interactive=start + ROWS < count),
        }

    def all_runs(self, store: Traces, chosen: Filter) -> Updates:
        return dict(zip(self.trends, history(store.trend(chosen)), strict=True))

    def opened(self, store: Traces, run_id: str | None) -> Updates:
        if run_id is None:
            costs = cost_figure(self.session, NOTHING)
            return {self.shown: None, self.title: run_html.NO_RUN_YET, self.plots[COSTS]: costs}
        trace, run = store.get(run_id), store.load(run_id)
        exact, steps = self.exact(store, trace), run.steps[:MOST_TOKENS]
        return {
            self.shown: run_id,
            self.title: run_html.heading(trace, run),
            self.read_prompt: run_html.prompt(store.stored_prompt(run_id), exact),
            self.answer: render.side_by_side(run_id, steps, MOST_TOKENS),
            **dict(zip(self.plots, figures_of(self.session, digest(run)), strict=True)),
            **self.page_of_steps(run.steps[:ROWS], 1, len(run.steps)),
        }

    def exact(self, store: Traces, run: Trace) -> str | None:
        """The exact prompt, if it is kept and belongs to the loaded model."""
        stored = store.prompt(run.id)
        known = run.fingerprint == self.session.current.info.fingerprint
        if known and stored is not None and not stored[0]:
            with suppress(StrataError):
                return self.session.engine.texts([stored[1]])[0]
        return None

    def at_step(self, store: Traces, run_id: str, number: int) -> Updates:
        count = store.step_count(run_id)
        number = max(1, min(number, count))
        steps = store.steps(run_id, (number - 1) // ROWS * ROWS, ROWS)
        return self.page_of_steps(steps, number, count)

    def page_of_steps(self, steps: Sequence[Step], number: int, count: int) -> Updates:
        """The page of the list that has step `number` of a run of `count` steps, and its card."""
        place = (number - 1) % ROWS
        return {
            self.step: gr.update(maximum=max(2, count), value=number, interactive=count > 1),
            self.steps: [run_html.step_row(step) for step in steps],
            self.card: run_html.step_card(steps[place], count) if place < len(steps) else "",
        }

    def show(self, owner: str, shown: str | None, start: int, *chosen: str) -> Updates:
        """Show the tab. The open run stays open; without one, the newest run with drafts opens."""
        store = self.store(owner)
        offered, kept = self.choices(store, chosen)
        filters = filter_of(*kept)
        updates = {**offered, **self.listed(store, filters, start), **self.all_runs(store, filters)}
        updates[self.costs] = measured(self.session)
        return {**updates, **self.open_or_newest(store, filters, shown)}

    def open_or_newest(self, store: Traces, chosen: Filter, shown: str | None) -> Updates:
        """Show the open run, or the newest one, with drafts if possible."""
        if shown is not None:
            with notify_errors():
                return self.opened(store, shown)
        runs = store.page(chosen, 0, ROWS)
        drafted = next((run for run in runs if run.method != "plain"), runs[0] if runs else None)
        return self.opened(store, drafted.id if drafted else None)

    def filter(self, owner: str, *chosen: str) -> Updates:
        store, filters = self.store(owner), filter_of(*chosen)
        return {**self.listed(store, filters, 0), **self.all_runs(store, filters)}

    def refit(self, owner: str, shown: str | None, *chosen: str) -> Updates:
        """Show the newest run of the filters, unless the open one is among theirs."""
        store, filters = self.store(owner), filter_of(*chosen)
        if shown is not None and store.matches(shown, filters):
            return {}
        return self.open_or_newest(store, filters, None)

    def turn(self, pages: int, owner: str, start: int, *chosen: str) -> Updates:
        store, filters = self.store(owner), filter_of(*chosen)
        return self.listed(store, filters, start + pages * ROWS)

    def choose(self, owner: str, data: gr.SelectData, ids: list[str]) -> Updates:
        at = clicked_row(data)
        return self.opened(self.store(owner), ids[at]) if 0 <= at < len(ids) else {}

    def pick_run(self, owner: str, data: gr.EventData) -> Updates:
        run_id = Payload(data).text("value")
        return self.opened(self.store(owner), run_id) if run_id else {}

    def pick_step(self, owner: str, data: gr.EventData, shown: str | None) -> Updates:
        step = Payload(data).integer("value")
        return self.at_step(self.store(owner), shown, step + 1) if shown and step >= 0 else {}

    def slide(self, owner: str, number: float | None, shown: str | None) -> Updates:
        if not shown or not number:
            return {}
        updates = self.at_step(self.store(owner), shown, int(number))
        del updates[self.step]  # The slider is being dragged.
        return updates

    def choose_step(
        self, owner: str, data: gr.SelectData, shown: str | None, number: float | None
    ) -> Updates:
        if not shown:
            return {}
        start = (int(number or 1) - 1) // ROWS * ROWS
        return self.at_step(self.store(owner), shown, start + clicked_row(data) + 1)

    def save_runs(self, owner: str, *chosen: str) -> Download:
        runs = self.store(owner).page(filter_of(*chosen))
        return text_file("runs.csv", "text/csv", exports.runs_csv(runs))

    def save_steps(self, owner: str, shown: str | None) -> Download:
        steps = self.store(owner).steps(open_run(shown))
        return text_file("steps.csv", "text/csv", exports.steps_csv(steps))

    def save_run(self, owner: str, shown: str | None) -> Download:
        store, run_id = self.store(owner), open_run(shown)
        text = exports.run_json(store.get(run_id), store.load(run_id))
        return text_file("run.json", "application/json", text)

    def again(self) -> Iterator[str]:
        yield measured(self.session, busy=True)
        with notify_errors():
            self.session.costs.measure()
        yield measured(self.session)

    def curve(self, owner: str, shown: str | None) -> Updates:
        sums = digest(self.store(owner).load(shown)) if shown else NOTHING
        return {self.plots[COSTS]: cost_figure(self.session, sums)}
