"""Diagnostics: every run of the past, and the charts of the one chosen."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import gradio as gr

from app import charts
from app.events import AT_ONCE, owner_of, told
from app.session import Session
from engine.methods import METHODS
from engine.types import Step
from storage.traces import Run, Traces

HEADERS = ["When", "From", "Method", "Model", "Tokens", "Tokens/s", "Per forward", "Speedup*"]
SHOWN = 200


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tab: gr.Tab
    table: gr.Dataframe
    ids: gr.State
    title: gr.HTML
    plots: list[gr.Plot]


def build(tab: gr.Tab) -> Parts:
    """The charts of a run above the table of runs."""
    title = gr.HTML('<div class="verdict">No run yet.</div>', apply_default_css=False)
    plots: list[gr.Plot] = []
    for _ in range(3):
        with gr.Row(elem_classes="plots"):
            plots += [
                gr.Plot(figure, show_label=False, container=False)
                for figure in drawn([], [])[len(plots) : len(plots) + 2]
            ]
    table = gr.Dataframe(
        headers=HEADERS,
        datatype="str",
        interactive=False,
        elem_id="runs",
        max_height=360,
        label="Runs, newest first; click one to see its charts",
    )
    gr.HTML(
        "<p class='fine'>* against the latest plain speed measured before the run; the Compare tab "
        "measures both on the same prompt.</p>"
    )
    return Parts(tab, table, gr.State([]), title, plots)


def drawn(runs: list[Run], steps: list[Step]) -> list[Any]:
    """Five charts of one run and one of all of them."""
    return [
        charts.tokens_over_time(steps),
        charts.accepted_lengths(steps),
        charts.share_by_tier(steps),
        charts.rate_by_depth(steps),
        charts.tier_rates(steps),
        charts.history(runs),
    ]


def line(run: Run) -> list[str]:
    """One row of the table."""
    speed = run.emitted_tokens / run.decode_seconds if run.decode_seconds else 0.0
    base = run.baseline_tokens_per_second
    method = METHODS.get(run.method)
    return [
        f"{datetime.fromtimestamp(run.created):%d %b %H:%M:%S}",
        run.kind,
        method.title if method else run.method,
        run.model,
        f"{run.emitted_tokens:,}",
        f"{speed:,.0f}",
        f"{run.emitted_tokens / run.forwards:.2f}" if run.forwards else "–",
        f"{speed / base:.2f}×" if base else "–",
    ]


def heading(run: Run) -> str:
    """What is drawn, in numbers and our own words."""
    method = METHODS.get(run.method)
    return (
        f'<div class="verdict">{method.title if method else "Run"}: {run.emitted_tokens:,} tokens '
        f"from {run.forwards:,} forwards, prompt of {run.prompt_tokens:,} tokens "
        f"({run.reused_tokens:,} already in the cache).</div>"
    )


def wire(session: Session, parts: Parts, memory: gr.BrowserState) -> None:
    """Read the runs when the tab opens; draw one when it is clicked."""

    def refresh(request: gr.Request, memory: dict[str, Any] | None) -> tuple[Any, ...]:
        store = Traces(session.database, owner_of(session, memory, request))
        with told():
            runs = store.history(SHOWN)
            rows, ids = [line(run) for run in runs], [run.id for run in runs]
            first = next((run for run in runs if run.method != "plain"), None)
            steps = store.steps(first.id) if first else []
            words = heading(first) if first else '<div class="verdict">No run yet.</div>'
            return rows, ids, words, *drawn(runs, steps)
        return tuple(gr.skip() for _ in range(3 + len(parts.plots)))

    def choose(
        event: gr.SelectData, request: gr.Request, ids: list[str], memory: dict[str, Any] | None
    ) -> tuple[Any, ...]:
        store = Traces(session.database, owner_of(session, memory, request))
        at = event.index[0] if isinstance(event.index, list | tuple) else event.index
        with told():
            if 0 <= at < len(ids):
                run = store.get(ids[at])
                return heading(run), *drawn(store.history(SHOWN), store.steps(run.id))
        return tuple(gr.skip() for _ in range(1 + len(parts.plots)))

    outputs = [parts.title, *parts.plots]
    parts.tab.select(refresh, memory, [parts.table, parts.ids, *outputs], **AT_ONCE)
    parts.table.select(choose, [parts.ids, memory], outputs, **AT_ONCE)
