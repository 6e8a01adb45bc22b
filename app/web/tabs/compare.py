"""Compare: one prompt decoded plainly and with drafts, with the same seed and settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import gradio as gr
import plotly.graph_objects as go

from app.service.comparison import Pace, Progress
from app.service.session import Session
from app.web import charts, render
from app.web.metrics_panel import milliseconds
from app.web.plots import grid
from app.web.tabs.settings import Controls, methods
from app.web.token_view import token_view
from app.web.verdicts import another_text, difference, gained, title_of, waiting_line
from app.web.wiring import AT_ONCE, Memory, Updates, owner_of, pass_on, warn
from engine.errors import Cancelled, StrataError
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import verdict
from engine.types import NO_RUN, Run
from storage.conversations import Piece

PROMPT = "Write a short story about a fox who learns to read, then tell it again in other words."
MOST_REPEATS = 7
UPDATES_PER_SECOND = 5


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    prompt: gr.Textbox
    method: gr.Dropdown
    repeats: gr.Slider
    run: gr.Button
    stop: gr.Button
    verdict: gr.HTML
    heads: tuple[gr.HTML, gr.HTML]
    views: tuple[gr.HTML, gr.HTML]
    charts: gr.Column
    plots: list[gr.Plot]


def build(session: Session) -> Parts:
    """Question, verdict, both answers side by side, charts."""
    with gr.Row(elem_classes="ask"):
        prompt = gr.Textbox(
            PROMPT,
            label="Prompt",
            lines=2,
            max_lines=8,
            scale=5,
            elem_id="compare-prompt",
            info="Sampling, seed and system prompt come from the Settings tab.",
        )
        with gr.Column(scale=3, min_width=280):
            method = gr.Dropdown(
                choices(session),
                value="hd",
                label="Compare plain decoding with",
                allow_custom_value=True,
                elem_id="compare-method",
            )
            repeats = gr.Slider(1, MOST_REPEATS, value=3, step=1, label="Repeats")
        with gr.Column(scale=1, min_width=110, elem_classes="go"):
            run = gr.Button("Compare", variant="primary", elem_id="compare")
            stop = gr.Button("Stop", variant="stop", visible=False)
    result = gr.HTML(idle(session), elem_id="verdict", apply_default_css=False)
    with gr.Row(elem_classes="sides"):
        with gr.Column(min_width=320):
            plain_head = gr.HTML(head("Plain decoding", None), apply_default_css=False)
            plain = token_view(elem_classes="transcript side")
        with gr.Column(min_width=320):
            fast_head = gr.HTML(head("With drafts", None), apply_default_css=False)
            fast = token_view(elem_classes="transcript side", elem_id="compare-fast")
    with gr.Column(visible=False) as charted:
        plots = grid(drawn(None))
    heads, views = (plain_head, fast_head), (plain, fast)
    return Parts(prompt, method, repeats, run, stop, result, heads, views, charted, plots)


def choices(session: Session) -> list[tuple[str, str]]:
    """What plain decoding can be compared with."""
    return [(title, name) for title, name in methods(session) if name != "plain"]


def idle(session: Session) -> str:
    """What the banner says before the first run."""
    info = session.current.info
    words = (
        f"{info.note} Both runs will be plain."
        if not info.can_tree
        else "Both runs start fresh, and neither learns from the other. Their order is swapped "
        "from repeat to repeat."
    )
    return f'<div class="verdict">{escape(words)}</div>'


def head(title: str, run: Run | None) -> str:
    """The figures above one side."""
    if run is None or not run.steps:
        return f'<div class="side-head"><h3>{escape(title)}</h3></div>'
    figures = summarise(run)
    cells = (
        (f"{figures.tokens_per_second:,.0f}", "tokens/s"),
        (milliseconds(figures.ttft_seconds), "first token"),
        (milliseconds(figures.decode_seconds), "decoding"),
        (milliseconds(figures.seconds), "whole answer"),
        (f"{figures.mean_acceptance_length:.2f}", "tokens/step"),
    )
    words = "".join(f"<span><b>{value}</b> {name}</span>" for value, name in cells)
    return f'<div class="side-head"><h3>{escape(title)}</h3>{words}</div>'


def banner(session: Session, progress: Progress, repeats: int) -> str:
    """The verdict over all finished repeats; token texts are escaped."""
    if progress.cancelled and not progress.pairs:
        return '<div class="verdict">Stopped before both runs were finished.</div>'
    verdicts = [verdict(session.current.text, plain, fast) for plain, fast in progress.pairs]
    for number, found in enumerate(verdicts, start=1):
        if not found.identical and progress.same_text:
            return difference(found, f" in repeat {number}")
    if len(progress.pairs) < repeats and not progress.cancelled:
        name = title_of(progress.running.method) if progress.running else "Next"
        so_far = f"; identical in {len(progress.pairs)} so far" if progress.pairs else ""
        so_far = so_far if progress.same_text else ""
        at = f"repeat {progress.repeat + 1} of {repeats}{so_far}"
        return f'<div class="verdict running">{escape(name)}, {at} …</div>'
    found_ratios = [pair.whole for pair in progress.speedups if pair.whole is not None]
    count = len(progress.pairs[-1][0].tokens)
    spread = ""
    if len(found_ratios) > 1 and progress.speedup.whole is not None:
        spread = f"; repeats {min(found_ratios):.2f}–{max(found_ratios):.2f}×"
    ended = "stopped early, " if progress.cancelled else ""
    speed = f"{ended}{gained(progress.speedup, 'median speedup')}{spread}"
    other = next((found for found in verdicts if not found.identical), None)
    if other is not None:
        return another_text(other, speed)
    return (
        f'<div class="verdict same"><b>Identical</b>: all {count:,} tokens in '
        f"{len(progress.pairs)} of {repeats} repeats ({speed}).</div>"
    )


def drawn(progress: Progress | None) -> list[go.Figure]:
    """The six charts of the latest pair."""
    plain, fast = progress.pairs[-1] if progress and progress.pairs else (NO_RUN, NO_RUN)
    repeats = [pair.whole for pair in progress.speedups] if progress else []
    whole = progress.speedup.whole if progress else None
    return [charts.speedups(repeats, whole), *charts.of_run(fast, plain)]


def side(name: str, run: Run) -> render.Data:
    """One run's tokens for its view."""
    pieces = [Piece.of(token, step.index) for step in run.steps for token in step.tokens]
    return render.side_by_side(name, pieces)


def wire(session: Session, parts: Parts, controls: Controls, memory: gr.BrowserState) -> None:
    """Connect the run and its end."""

    def updates(progress: Progress, repeats: int) -> Updates:
        shown: Updates = {parts.verdict: banner(session, progress, repeats)}
        running = progress.running
        if running is not None:
            at = 0 if running.method == "plain" else 1
            shown[parts.heads[at]] = head(title_of(running.method), running)
            shown[parts.views[at]] = side(f"{running.method}-{progress.repeat}", running)
        return shown

    def run(
        request: gr.Request,
        text: str,
        method: str,
        repeats: float,
        memory: Memory,
        *values: object,
    ) -> Iterator[Updates]:
        owner, pace = owner_of(session, memory, request), Pace(1 / UPDATES_PER_SECOND)
        yield {parts.run: gr.update(visible=False), parts.stop: gr.update(visible=True)}
        try:
            system, preferences = controls.read(values)
            chosen = preferences.with_method(method)
            for progress in session.proofs.compare(owner, text, system, chosen, int(repeats)):
                if isinstance(progress, Waiting):
                    yield {parts.verdict: waiting_line(progress)}
                    continue
                finished = progress.running is None
                last = progress.running is not None and progress.running.finish
                if finished or last or pace.due():
                    shown = updates(progress, int(repeats))
                    if finished and progress.pairs:
                        shown |= dict(zip(parts.plots, drawn(progress), strict=True))
                        shown[parts.charts] = gr.update(visible=True)
                    yield shown
        except Cancelled:
            yield {parts.verdict: idle(session)}
        except StrataError as error:
            warn(str(error))
        pass_on(session, owner)
        yield {parts.run: gr.update(visible=True), parts.stop: gr.update(visible=False)}

    def stop(request: gr.Request, memory: Memory) -> None:
        session.tasks.stop(owner_of(session, memory, request), "")

    shown_by_run = [parts.verdict, *parts.heads, *parts.views, parts.charts, *parts.plots]
    outputs = [parts.run, parts.stop, *shown_by_run]
    inputs = [parts.prompt, parts.method, parts.repeats, memory, *controls.inputs]
    parts.run.click(run, inputs, outputs, **AT_ONCE)
    parts.stop.click(stop, memory, None, **AT_ONCE)
