"""Diagnostics: all past runs, the charts of the chosen one, and what a step costs here."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from html import escape

import gradio as gr
import plotly.graph_objects as go

from app.service.session import Session
from app.web import charts
from app.web.metrics_panel import times
from app.web.plots import grid
from app.web.verdicts import title_of
from app.web.wiring import AT_ONCE, Memory, owner_of, told
from engine.metrics import summarise
from engine.types import NO_RUN, Prefill, Run
from storage.traces import Trace, Traces

HEADERS = ["When", "From", "Method", "Model", "Tokens", "Tokens/s", "Tokens/step", "Speedup*"]
SHOWN = 200
COSTS = -1
"""Where the cost curve stands among the charts: last, above the line that says what it is of."""


@dataclass(slots=True)
class Parts:
    """The tab's components. `again` is there for the owner of the machine only."""

    tab: gr.Tab
    table: gr.Dataframe
    ids: gr.State
    shown: gr.State
    title: gr.HTML
    plots: list[gr.Plot]
    costs: gr.HTML
    again: gr.Button | None


def build(tab: gr.Tab, session: Session) -> Parts:
    """The charts of a run above the table of runs."""
    title = gr.HTML(heading(None), apply_default_css=False)
    plots = grid(drawn(session, [], None))
    with gr.Row(elem_classes="costs"):
        costs = gr.HTML(measured(session), elem_id="costs", apply_default_css=False)
        again = None
        if not session.guests:
            again = gr.Button(
                "Measure again",
                size="sm",
                min_width=120,
                elem_id="measure",
                visible=session.costs.wanted,
            )
    table = gr.Dataframe(
        headers=HEADERS,
        datatype="str",
        interactive=False,
        elem_id="runs",
        max_height=360,
        label="Runs, newest first. Click one to see its charts.",
    )
    gr.HTML(
        "<p class='fine'>* Whole answers, compared with plain decoding of the same prompt. Known "
        "after Prove it or Compare; empty where no draft was accepted.</p>"
    )
    return Parts(tab, table, gr.State([]), gr.State(None), title, plots, costs, again)


def drawn(session: Session, runs: list[Trace], run: Run | None) -> list[go.Figure]:
    """The charts of one run, the history of all, and the costs by which drafts are sized."""
    return [*charts.of_run(run or NO_RUN), charts.history(runs), cost_figure(session, run)]


def cost_figure(session: Session, run: Run | None) -> go.Figure:
    """What a run drafted, and the curve that its budget followed if its model is the loaded one."""
    loaded = run is None or run.fingerprint == session.current.info.fingerprint
    return charts.cost_curve(session.costs.curve if loaded else None, run or NO_RUN)


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


def line(run: Trace) -> list[str]:
    """One row of the table."""
    speed = run.emitted_tokens / run.decode_seconds if run.decode_seconds else 0.0
    return [
        f"{datetime.fromtimestamp(run.created):%d %b %H:%M:%S}",
        run.kind,
        title_of(run.method),
        run.model,
        f"{run.emitted_tokens:,}",
        f"{speed:,.0f}",
        f"{run.emitted_tokens / run.forwards:.2f}" if run.forwards else "–",
        times(run.speedup),
    ]


def heading(run: Run | None) -> str:
    """What is drawn, in numbers and our own words."""
    if run is None:
        return '<div class="verdict">No run yet.</div>'
    figures, prompt = summarise(run), run.prefill or Prefill(0, 0)
    return (
        f'<div class="verdict">{escape(title_of(run.method))}: {figures.tokens:,} tokens '
        f"in {figures.forwards:,} steps. The prompt had {prompt.tokens:,} tokens, "
        f"{prompt.reused:,} of them from the cache.</div>"
    )


def wire(session: Session, parts: Parts, memory: gr.BrowserState) -> None:
    """Read the runs when the tab opens; draw one when it is clicked; measure again when asked."""

    def refresh(request: gr.Request, memory: Memory) -> tuple[object, ...]:
        with told():
            store = Traces(session.database, owner_of(session, memory, request))
            runs = store.history(SHOWN)
            rows, ids = [line(run) for run in runs], [run.id for run in runs]
            first = next((run for run in runs if run.method != "plain"), None)
            run = store.load(first.id) if first else None
            figures = drawn(session, runs, run)
            shown = first.id if first else None
            return rows, ids, measured(session), shown, heading(run), *figures
        return tuple(gr.skip() for _ in range(5 + len(parts.plots)))

    def choose(
        event: gr.SelectData, request: gr.Request, ids: list[str], memory: Memory
    ) -> tuple[object, ...]:
        at = event.index[0] if isinstance(event.index, list | tuple) else event.index
        with told():
            store = Traces(session.database, owner_of(session, memory, request))
            if 0 <= at < len(ids):
                run = store.load(ids[at])
                figures = drawn(session, store.history(SHOWN), run)
                return ids[at], heading(run), *figures
        return tuple(gr.skip() for _ in range(2 + len(parts.plots)))

    def again(
        request: gr.Request, shown: str | None, memory: Memory
    ) -> Iterator[tuple[object, object]]:
        yield measured(session, busy=True), gr.skip()
        with told():
            session.costs.measure()
        figure: object = gr.skip()
        with told():
            store = Traces(session.database, owner_of(session, memory, request))
            figure = cost_figure(session, store.load(shown) if shown else None)
        yield measured(session), figure

    outputs = [parts.shown, parts.title, *parts.plots]
    parts.tab.select(refresh, memory, [parts.table, parts.ids, parts.costs, *outputs], **AT_ONCE)
    parts.table.select(choose, [parts.ids, memory], outputs, **AT_ONCE)
    if parts.again is not None:
        changed = [parts.costs, parts.plots[COSTS]]
        parts.again.click(again, [parts.shown, memory], changed, **AT_ONCE)
