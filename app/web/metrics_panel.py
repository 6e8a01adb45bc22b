"""The live figures of the chat, as values for a fixed template.

Numbers and names travel as data. assets/panel.js writes each into its place as text, so that
nothing here becomes markup. An update is kept small, because it is sent twice a second while an
answer grows, and more often while the answer is short. Its keys are:

    k   microseconds until the model had the first token; distinguishes runs
    h   tokens per second, speedup, tokens per step, speedup of decoding alone; if the speedup is an
        estimate, also the tokens per second of plain decoding on which it is based
    n   the basis of the speedup, in words
    s   a row per source, those of the palette first, then those of `d`: % of the output, accepted,
        drafted, and, if it was searched, the microseconds per step
    d   title, colour and CSS class of each source outside the palette, such as draft models
    l   a row per draft model: index in `d`, its steps, accepted, drafted for it
    g   microseconds of each stage of a step
    r   the ribbon: index of the first step, then a letter per token, "a" for the first row of `s`;
        a capital letter begins a step
    e   the state of the answer, or how it ended
    v   what the server that answers drafted and accepted, in a sentence; left out without a server
    w   what guessing gained, in a sentence, once the answer is over
    p   the speed of plain decoding in words, for the page's header, while an answer grows or after
        it was proved

The key of an unknown value is left out, and the page shows a dash.
"""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from app.service.why import sentence, worth_of
from app.web import markup, render
from app.web.colors import INKS, STAGES, css_class, ink, others
from app.web.kit import html
from app.web.markup import DASH, times
from assets import read
from engine.compare import Speedup, live
from engine.metrics import Metrics
from engine.runs import PlainSpeed
from engine.types import TARGET, UNKNOWN, Step

NO_GAIN = "no draft was accepted, so there is no gain"
"""Why a measured speedup is not shown (engine/compare.py)."""
NO_DIFFERENCE = "no measurable difference"
MEASURE_ELSEWHERE = "Compare measures it"
RIBBON = 64
"""How many of the latest steps the ribbon shows."""
EXPLAINED = {
    "share": "share of the answer's tokens",
    "accepted": "accepted tokens / drafted tokens",
    "search": "time per step to search for drafts",
    "steps": "passes of this draft model",
}
"""Tooltips of the column titles."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def panel(**more: Any) -> gr.HTML:
    """The component. Its template is fixed, and values reach it as data only. `more` are further
    arguments of Gradio's component."""
    return html(
        value=panel_values(None), html_template=template(), js_on_load=read("panel.js"), **more
    )


def template() -> str:
    return markup.template("panel.html", explained=EXPLAINED)


def panel_values(
    metrics: Metrics | None,
    steps: Sequence[Step] = (),
    speedup: Speedup | None = None,
    ended: str = "",
    server: str | None = None,
) -> render.Data:
    """The panel's values for a run; the module's docstring explains them.

    `steps` are the steps for the ribbon: all steps of a run, or those since the page's last update.
    `speedup` was measured against a plain run of the same prompt; without it, the run's own
    estimate is shown. `ended` says how the answer ended. `server` describes what the counters of a
    server report about the run; it is None for a run on this machine.
    """
    if metrics is None:
        return {}
    over = bool(steps) and steps[-1].finish is not None
    gained = live(metrics) if speedup is None else speedup
    basis = note(metrics, gained, over) if server is None else MEASURE_ELSEWHERE
    values: render.Data = {"h": headline(metrics, gained), "n": basis}
    seen = {token.source for step in steps for token in step.tokens}
    drafts = others({*metrics.share, *metrics.proposed, *metrics.levels, *seen})
    if metrics.forwards:
        sources = [*INKS, *drafts]
        values["k"] = micro(metrics.ttft_seconds)
        values["s"] = [row(metrics, source) for source in sources]
        if server is None:
            values["g"] = stages(metrics)
        values["r"] = ribbon(steps, sources)
    looks = [[ink(source).title, ink(source).colour, css_class(source)] for source in drafts]
    gain = sentence(worth_of(metrics)) if over else ""
    more = {"d": looks, "l": levels(metrics, drafts), "w": gain, "e": ended}
    if server is not None:
        values["v"] = server
    return {**values, **{key: value for key, value in more.items() if value}}


def headline(metrics: Metrics, speedup: Speedup) -> list[str]:
    speed = metrics.tokens_per_second
    found = [
        f"{speed:,.0f}" if speed else DASH,
        times(speedup.whole),
        f"{metrics.mean_acceptance_length:.2f}" if steps_known(metrics) else DASH,
        times(speedup.decoding),
    ]
    estimated = speedup.plain_steps is not None and speedup.decoding is not None
    return [*found, f"{metrics.plain_tokens_per_second:,.0f}"] if estimated else found


def pace(plain: PlainSpeed | None) -> str:
    """The speed of plain decoding in words, "" if it is not known."""
    if plain is None or not plain.tokens_per_second:
        return ""
    return f"plain decoding {plain.tokens_per_second:,.0f} tokens/s ({plain.when})"


def with_pace(values: render.Data, plain: PlainSpeed | None) -> render.Data:
    return {**values, "p": pace(plain)} if pace(plain) else values


def steps_known(metrics: Metrics) -> bool:
    """Whether it is known which tokens came from one forward. A server need not report it."""
    return bool(metrics.forwards) and UNKNOWN not in metrics.share


def note(metrics: Metrics, speedup: Speedup, over: bool) -> str:
    """The basis of the speedup, or how to measure one. `over` means that no more tokens come."""
    if speedup.plain_steps is None:
        between = f" ({range_of(speedup)})" if speedup.low != speedup.high else ""
        if speedup.whole is None:
            return NO_DIFFERENCE + between if between else NO_GAIN
        return f"of the whole answer{between}; decoding alone {times(speedup.decoding)}"
    if speedup.whole is None:
        measuring = not metrics.forwards or metrics.plain_seconds is not None
        return "measuring" if measuring and not over else "press Prove it to measure"
    count = speedup.plain_steps
    if metrics.beside:
        answers = f"{metrics.answers_at_once:.1f}".removesuffix(".0")
        return f"of the whole answer, against plain decoding of {answers} answers at once"
    if not count:
        return "of the whole answer, estimated from the measured cost of a plain step"
    steps = "step" if count == 1 else "steps"
    return f"of the whole answer, estimated from {count:,} plain {steps}"


def range_of(speedup: Speedup) -> str:
    return f"{times(speedup.low)} to {times(speedup.high)}"


def row(metrics: Metrics, source: str) -> list[int]:
    share = int(100 * metrics.share.get(source, 0.0) + 0.5)  # The page's legend rounds like this.
    if source == TARGET:
        return [share]
    found = [share, metrics.accepted.get(source, 0), metrics.proposed.get(source, 0)]
    spent = metrics.look_up_seconds.get(source)
    return found if spent is None else [*found, micro(spent / metrics.forwards)]


def levels(metrics: Metrics, drafts: Sequence[str]) -> list[list[int]]:
    found = ((source, metrics.levels[source]) for source in others(metrics.levels))
    return [
        [drafts.index(source), forwards, accepted, drafted]
        for source, (forwards, drafted, accepted) in found
    ]


def stages(metrics: Metrics) -> list[int]:
    return [micro(getattr(metrics, f"{name}_seconds") / metrics.forwards) for name in STAGES]


def micro(seconds: float) -> int:
    return round(1e6 * seconds)


def ribbon(steps: Sequence[Step], sources: Sequence[str]) -> list[int | str]:
    """The latest steps for the ribbon: the index of the first, and a letter per token."""
    latest = [step for step in steps if step.tokens][-RIBBON:]
    letter = dict(zip(sources, LETTERS + LETTERS[-1] * len(sources), strict=False))
    columns = ("".join(letter[t.source] for t in step.tokens) for step in latest)
    letters = "".join(column[0].upper() + column[1:] for column in columns)
    return [latest[0].index if latest else 0, letters]
