"""The live figures beside the chat: values for a fixed template.

Numbers and names travel as data, and assets/panel.js puts each into its place as text: nothing here
becomes markup. One update is small, as it is sent twice a second while an answer grows:

    k   microseconds until the model had the first token; tells one run from another
    h   tokens per second, speedup, tokens per step, speedup of decoding alone
    n   what the speedup is of
    s   a row per source, those of the palette first, then those of `d`: % of the output, accepted,
        drafted, and if it was asked the microseconds that this took per step
    d   title and colour of every draft model, and of what is not known with a class
    l   a row per draft model: place in `d`, its steps, accepted, drafted for it
    g   microseconds of each stage of a step
    r   the ribbon: index of the first step, then a letter per token, "a" for the first row of `s`;
        a capital begins a step
    e   how the answer goes or went
    v   what the server that answers drafted and accepted, in a sentence; left out without one
    w   what guessing came to, in a sentence, once the answer is over

Where nothing is known, the key is left out and the page shows a dash.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from typing import Any

import gradio as gr

from app.service.sentence import sentence, worth_of
from app.web import render
from app.web.colors import INKS, STAGES, Ink, ink, others
from assets import ASSETS
from engine.compare import Speedup, live
from engine.metrics import Metrics
from engine.types import TARGET, UNKNOWN, Step

NO_GAIN = "no draft was accepted, so there is no gain"
"""Why a speedup that was measured is not told (engine/compare.py)."""
MEASURE_THERE = "Compare measures it"
RIBBON = 64
"""The latest steps, which the ribbon shows."""
EXPLAINED = {
    "share": "share of the answer's tokens",
    "accepted": "accepted tokens / drafted tokens",
    "look-up": "time per step to look for drafts",
    "steps": "forwards of this draft model",
}
"""Tooltips of the tables' titles."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DASH = "–"


def panel(**more: Any) -> gr.HTML:
    """The component. Its template is fixed text: values reach it as data only. `more` are arguments
    of Gradio's component."""
    return gr.HTML(
        value=panel_values(None),
        html_template=template(),
        js_on_load=script(),
        apply_default_css=False,
        **more,
    )


@cache
def script() -> str:
    """The panel's script."""
    return (ASSETS / "panel.js").read_text(encoding="utf-8")


def template() -> str:
    """The empty panel: slots that hold a dash, in our own words."""
    figures = (
        figure("speed", "Speed", "tokens per second")
        + figure("speedup", "Speedup", "", " lead")
        + figure("acceptance", "Tokens per step", "plain decoding: 1.00")
        + figure("first", "First token", "")
    )
    shares = "".join(f'<i style="--k:var(--s-{source})"></i>' for source in INKS)
    times = "".join(f'<i style="--k:var(--t-{name})"></i>' for name in STAGES)
    words = "".join(
        f'<span><i style="--k:var(--t-{name})"></i>{name} <b>{DASH}</b></span>' for name in STAGES
    )
    return (
        f'<div class="panel"><div class="figures">{figures}</div>'
        "<section><h4>Where the tokens came from</h4>"
        f'<div class="bar shares" aria-hidden="true">{shares}</div>'
        + table("sources", ("source", "share", "accepted", "look-up"), rows())
        + "</section><section hidden><h4>Draft models</h4>"
        + table("levels", ("model", "steps", "accepted"), "")
        + '</section><section><h4>Time per step</h4><div class="bar times" aria-hidden="true">'
        f'{times}</div><div class="stages">{words}</div></section>'
        '<section><h4>Latest steps</h4><div class="ribbon" role="img" aria-label="One column per '
        'step, one cell per token, in the colour of its source."></div></section>'
        '<p class="served" hidden> </p><p class="saved" hidden> </p>'
        '<p class="ended" hidden> </p></div>'
    )


def figure(slot: str, title: str, note: str, kind: str = "") -> str:
    """One of the figures that matter most."""
    return (
        f'<div class="figure{kind}" data-slot="{slot}"><span>{title}</span>'
        f"<b>{DASH}</b><small>{note or ' '}</small></div>"
    )


def table(kind: str, titles: Sequence[str], body: str) -> str:
    """A table with a line of titles."""
    head = "".join(
        f'<th scope="col" title="{EXPLAINED.get(title, "")}">{title}</th>' for title in titles
    )
    return (
        f'<table class="tiers {kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )


def rows() -> str:
    """A line per source of the palette."""
    return "".join(
        f'<tr><td><span class="tok k-{source}" title="{escape(look.meaning)}">'
        f"{escape(look.title)}</span></td>"
        f"<td><span>{DASH}</span></td><td><span>{DASH}</span><em> </em></td>"
        f"<td><span>{DASH}</span></td></tr>"
        for source, look in INKS.items()
    )


def panel_values(
    figures: Metrics | None,
    steps: Sequence[Step] = (),
    speedup: Speedup | None = None,
    ended: str = "",
    server: str | None = None,
) -> render.Data:
    """What the panel shows of a run: see the module's docstring.

    `server` is what the counters of the server say that it came from, None for one of this machine.

    `steps` are those for the ribbon: all of a run, or those that came since the last update of a
    page that was told of the others. `speedup` is the one that was measured against a plain run of
    the same prompt; until there is one the run tells its own.
    """
    if figures is None:
        return {}
    over = bool(steps) and steps[-1].finish is not None
    gained = live(figures) if speedup is None else speedup
    told = note(figures, gained, over) if server is None else MEASURE_THERE
    values: render.Data = {"h": headline(figures, gained), "n": told}
    said = {token.source for step in steps for token in step.tokens}
    drafts = others({*figures.share, *figures.proposed, *figures.levels, *said})
    if figures.forwards:
        sources = [*INKS, *drafts]
        values["k"] = micro(figures.ttft_seconds)
        values["s"] = [row(figures, source) for source in sources]
        if server is None:
            values["g"] = stages(figures)
        values["r"] = ribbon(steps, sources)
    if drafts:
        values["d"] = [drafted(ink(source)) for source in drafts]
    if found := levels(figures, drafts):
        values["l"] = found
    if over and (words := sentence(worth_of(figures))):
        values["w"] = words
    if server is not None:
        values["v"] = server
    if ended:
        values["e"] = ended
    return values


def drafted(look: Ink) -> list[str]:
    """Title and colour of a source beside the palette; without an underline its class as well."""
    return [look.title, look.colour, *([] if look.underline else ["k-target"])]


def headline(figures: Metrics, speedup: Speedup) -> list[str]:
    """The figures that matter most."""
    speed = figures.tokens_per_second
    return [
        f"{speed:,.0f}" if speed else DASH,
        times(speedup.whole),
        f"{figures.mean_acceptance_length:.2f}" if steps_known(figures) else DASH,
        times(speedup.decoding),
    ]


def steps_known(figures: Metrics) -> bool:
    """Whether it is known which tokens came from one forward: a server need not tell."""
    return bool(figures.forwards) and UNKNOWN not in figures.share


def note(figures: Metrics, speedup: Speedup, over: bool) -> str:
    """What the speedup is of, and how to get one. `over`: no more tokens come."""
    if speedup.plain_steps is None:
        if speedup.whole is None:
            return NO_GAIN
        return f"of the whole answer; decoding alone {times(speedup.decoding)}"
    if speedup.whole is None:
        coming = not figures.forwards or figures.plain_seconds is not None
        return "measuring" if coming and not over else "press Prove it to measure"
    count = speedup.plain_steps
    return f"estimated from {count:,} plain {'step' if count == 1 else 'steps'}"


def times(ratio: float | None) -> str:
    """A speedup."""
    return DASH if ratio is None else f"{ratio:.2f}×"


def milliseconds(seconds: float) -> str:
    """A duration at a sensible precision."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def row(figures: Metrics, source: str) -> list[int]:
    """One source in numbers."""
    share = round(100 * figures.share.get(source, 0.0))
    if source == TARGET:
        return [share]
    found = [share, figures.accepted.get(source, 0), figures.proposed.get(source, 0)]
    spent = figures.look_up_seconds.get(source)
    return found if spent is None else [*found, micro(spent / figures.forwards)]


def levels(figures: Metrics, drafts: Sequence[str]) -> list[list[int]]:
    """What each draft model of a stack did."""
    found = ((source, figures.levels[source]) for source in others(figures.levels))
    return [
        [drafts.index(source), forwards, accepted, drafted]
        for source, (forwards, drafted, accepted) in found
    ]


def stages(figures: Metrics) -> list[int]:
    """Mean time of a step, split into its stages."""
    return [micro(getattr(figures, f"{name}_seconds") / figures.forwards) for name in STAGES]


def micro(seconds: float) -> int:
    """Whole microseconds."""
    return round(1e6 * seconds)


def ribbon(steps: Sequence[Step], sources: Sequence[str]) -> list[int | str]:
    """The latest of the steps, a letter per token."""
    latest = [step for step in steps if step.tokens][-RIBBON:]
    letter = dict(zip(sources, LETTERS + LETTERS[-1] * len(sources), strict=False))
    columns = ("".join(letter[t.source] for t in step.tokens) for step in latest)
    words = "".join(column[0].upper() + column[1:] for column in columns)
    return [latest[0].index if latest else 0, words]
