"""Charts of runs and benchmarks: pure functions from summed figures to charts, in one palette.

Backgrounds are transparent and text is mid-grey, so that a figure fits light and dark mode. The
number of points is bounded (storage/steps.py), because a figure travels to the browser as a whole.
A title states the finding. A chart without data has no axes, and says what it will show. In some
charts a click on a point opens a run or a step: the point's `customdata` then begins with "run" or
"step" and its id or number (assets/picks.js).
"""

from collections.abc import Sequence
from html import escape
from operator import mul
from statistics import median
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from app.service.benchmark_report import Report
from app.web.colors import DRAFT_SHADES, GRID, INK, INKS, PLAIN, SERIES, STAGES, ink, others
from app.web.run_html import title_of
from engine import methods
from engine.drafting.calibration import Calibration
from engine.drafting.costs import CostCurve
from engine.types import HEAD, TARGET, TIERS, UNKNOWN
from storage.steps import NOTHING, Digest
from storage.traces import Mark

HEIGHT = 290
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
LEGEND_LINE = 20
"""The height of a line in a legend with one entry per line."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon")
MODELS = len(SYMBOLS)
OTHERS = "other models"
"""The most models that a chart shows separately, and the name of all others together."""
SPEEDS, SPEEDUPS = "Median speed by model (hollow: plain)", "Median speedup by model"
TEXT_COLOUR = "#7c8aa5"
"""The colour of Plotly's own text, readable in light and dark mode."""

LINE_LENGTH = 44
"""The most characters in a line of the text of an empty chart, so that it fits on a phone."""
UNDRAFTED = "Nothing was drafted in this run."
LABELLED = {"textposition": "outside", "cliponaxis": False}
"""Bars with their values at their ends, in the `texttemplate`."""
NEUTRAL = {"color": PLAIN, "dash": "dot", "width": 1.5}
"""The line of plain decoding."""
AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}


def framed(title: str, x: str, y: str, legend: bool = False) -> go.Figure:
    """An empty figure in the style of all charts, with an optional legend below the title. The
    whole layout is given at once, because Plotly takes ten times as long to change a figure."""
    return go.Figure(
        layout={
            "template": "none",
            "title": {
                "text": title,
                "font": {"size": 14},
                "x": 0.01,
                "xanchor": "left",
                "y": 1,
                "yanchor": "top",
                "pad": {"t": 14},
            },
            "font": {"family": FONT, "size": 12, "color": TEXT_COLOUR},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "height": HEIGHT,
            "margin": {"l": 48, "r": 16, "t": 70 if legend else 44, "b": 44},
            "showlegend": None if legend else False,
            "legend": {
                "orientation": "h",
                "y": 1.01,
                "yanchor": "bottom",
                "x": 0,
                "xanchor": "left",
            },
            "hoverlabel": {"font": {"family": FONT}},
            "bargap": 0.25,
            "xaxis": {"title": {"text": x}, **AXIS},
            "yaxis": {"title": {"text": y}, "rangemode": "tozero", **AXIS},
        }
    )


def inert(name: str, longest: int | None = None) -> str:
    """A name, shortened, and escaped because the charting library reads it as markup."""
    short = name if longest is None or len(name) <= longest else name[: longest - 1] + "…"
    return escape(short, quote=False)


def name_of(source: str) -> str:
    return inert(ink(source).title)


def of_run(run: Digest, plain: Digest = NOTHING) -> list[go.Figure]:
    """The five charts of a run, compared with the plain run if it is known."""
    return [
        tokens_over_time(run, plain),
        accepted_lengths(run),
        share_by_tier(run),
        rate_by_depth(run),
        tier_rates(run),
    ]


def tokens_over_time(run: Digest, plain: Digest = NOTHING) -> go.Figure:
    """Emitted tokens over decoding time. Each step with drafts has the colour of its main
    source."""
    title = "Tokens over time"
    if run.line:
        tokens = f"{run.tokens:,} token{'s' * (run.tokens != 1)}"
        title = f"{tokens} in {run.line[-1].seconds:.2f} s"
    figure = framed(title, "seconds of decoding", "tokens", True)
    if not run.line and not plain.line:
        return without_axes(figure, "This chart will show how fast the tokens of an answer come.")
    for name, each in (("plain", plain), ("with drafts", run)):
        if not each.line:
            continue
        fast = name == "with drafts"
        figure.add_scatter(
            x=[0.0, *(point.seconds for point in each.line)],
            y=[0, *(point.tokens for point in each.line)],
            name=name if plain.line or run.method != "plain" else "plain",
            mode="lines+markers" if fast else "lines",
            line={"color": INK if fast else PLAIN, "dash": "solid" if fast else "dot", "width": 2},
            marker={"size": 5, "color": [PLAIN, *(ink(p.source).colour for p in each.line)]},
            customdata=[["step", 0], *(["step", point.step] for point in each.line)],
            hovertemplate="%{y} tokens after %{x:.2f} s",
        )
    return figure


def accepted_lengths(run: Digest) -> go.Figure:
    title = f"{run.tokens / run.steps:.2f} tokens per step" if run.steps else "Tokens per step"
    figure = framed(title, "tokens from one step", "steps")
    lengths = dict(run.lengths)
    if not lengths:
        return without_axes(figure, "This chart will show how many tokens each step gives.")
    longest = max(lengths)
    x = list(range(1, longest + 1))
    figure.add_bar(
        x=x,
        y=[lengths.get(n, 0) for n in x],
        marker={"color": [PLAIN if n == 1 else INK for n in x]},
        hovertemplate="%{y} steps gave %{x}<extra></extra>",
    )
    figure.update_xaxes(dtick=1 if longest <= 16 else None)
    return figure


def share_by_tier(run: Digest) -> go.Figure:
    share = {source: count / run.tokens for source, count in run.share}
    guessed = 1 - share.get(TARGET, 0.0)
    title = f"{100 * guessed:.0f} % of the tokens were guessed"
    known = share and UNKNOWN not in share
    figure = framed(title if known else "Where the tokens came from", "", "% of tokens")
    if not share:
        return without_axes(figure, "This chart will show which source each token comes from.")
    sources = [*INKS, *others(share)]
    figure.add_bar(
        x=[name_of(source) for source in sources],
        y=[round(100 * share.get(source, 0.0), 2) for source in sources],
        marker={"color": [ink(source).colour for source in sources]},
        texttemplate="%{y:.0f} %",
        **LABELLED,
        hovertemplate="%{x}: %{y} %<extra></extra>",
    )
    return figure


def rate_by_depth(run: Digest) -> go.Figure:
    rows = [(depth, *pair) for depth, pair in enumerate(run.by_depth, start=1) if pair[0]]
    first = f"{100 * rows[0][2] / rows[0][1]:.0f} % of the first guesses were right" if rows else ""
    title = first if rows and rows[0][0] == 1 else "Accepted drafts by position"
    figure = framed(title, "position in the draft", "% accepted")
    if not rows:
        coming = "This chart will show how often the guess at each position is right."
        return without_axes(figure, UNDRAFTED if run.steps else coming)
    figure.add_scatter(
        x=[depth for depth, _, _ in rows],
        y=[round(100 * accepted / proposed, 2) for _, proposed, accepted in rows],
        customdata=[[accepted, proposed] for _, proposed, accepted in rows],
        mode="lines+markers",
        line={"color": INK, "width": 2},
        hovertemplate="position %{x}: %{customdata[0]} of %{customdata[1]}<extra></extra>",
    )
    figure.update_xaxes(dtick=1 if len(rows) <= 16 else None)
    return figure


def tier_rates(run: Digest) -> go.Figure:
    proposed, accepted = dict(run.proposed), dict(run.accepted)
    drafted, kept = sum(proposed.values()), sum(accepted.values())
    title = f"{kept:,} of {drafted:,} guessed tokens were right"
    figure = framed(title if drafted else "Drafted and accepted by source", "", "tokens")
    if not drafted:
        coming = "This chart will show how many guesses of each source are right."
        return without_axes(figure, UNDRAFTED if run.steps else coming)
    sources = [source for source in INKS if source != TARGET] + others(proposed)
    titles = [name_of(source) for source in sources]
    colours = [ink(source).colour for source in sources]
    for name, counts in (("drafted", proposed), ("accepted", accepted)):
        figure.add_bar(
            x=titles,
            y=[counts.get(source, 0) for source in sources],
            name=name,
            marker={"color": colours, "opacity": 0.35 if name == "drafted" else 1.0},
            hovertemplate="%{x}: %{y} " + name + "<extra></extra>",
        )
    figure.update_layout(barmode="group")
    return figure


def step_times(run: Digest) -> go.Figure:
    totals = {name: sum(getattr(point, name) for point in run.line) for name in STAGES}
    whole = sum(totals.values())
    verify = totals["verify"]  # 0 for a server, whose stages are not known.
    title = f"Verifying takes {100 * verify / whole:.0f} % of a step" if verify else ""
    figure = framed(title or "What a step takes", "step", "ms per step", True)
    if not run.line:
        return without_axes(figure, "This chart will show what each step spends its time on.")
    for name, colour in STAGES.items():
        figure.add_scatter(
            x=[point.step + 1 for point in run.line],
            y=[round(1e3 * getattr(point, name), 4) for point in run.line],
            name=name,
            mode="lines",
            stackgroup="stages",
            line={"color": colour, "width": 0.5},
            fillcolor=colour,
            customdata=[["step", point.step] for point in run.line],
            hovertemplate="%{y:.2f} ms",
        )
    return figure


def speed_of_runs(marks: Sequence[Mark]) -> go.Figure:
    models = by_model(marks)
    alone = len(models) == 1
    fast = [mark.speed for mark in marks if not mark.plain]
    title = "Speed of past runs"
    if fast:
        middle = f"{median(fast):,.0f} tokens/s (median)"
        title = f"With drafts: {middle}" if alone else SPEEDS
    figure = framed(title, "run", "tokens per second", True)
    if not marks:
        return without_axes(figure, "No run yet. Ask something in the Chat tab.")
    for number, (label, own) in enumerate(models.items()):
        for plain in (False, True):
            points = [mark for mark in own if mark.plain == plain]
            if not points:
                continue
            speed = f"{median(mark.speed for mark in points):,.0f} tokens/s"
            kind = "plain" if plain else "with drafts"
            add_runs(
                figure,
                points,
                [round(mark.speed, 3) for mark in points],
                "%{y:.0f} tokens/s",
                "" if alone else label,
                name=kind if alone else f"{inert(label)}: {speed}",
                showlegend=alone or not plain or all(mark.plain for mark in own),
                marker=look_of_runs(number, plain, alone),
            )
    return with_room(figure, marks, len(models))


def speedup_of_runs(marks: Sequence[Mark]) -> go.Figure:
    known = [mark for mark in marks if mark.speedup is not None]
    models = by_model(known)
    title = "No speedup is known yet"
    if known:
        middle = f"{median(mark.speedup or 0.0 for mark in known):.2f}× (median)"
        title = f"Measured speedup: {middle}" if len(models) == 1 else SPEEDUPS
    figure = framed(title, "run", "times as fast as plain", len(models) > 1)
    if not known:
        return without_axes(figure, "Press Prove it below an answer, or Compare.")
    for number, (label, own) in enumerate(models.items()):
        middle = f"{median(mark.speedup or 0.0 for mark in own):.2f}×"
        add_runs(
            figure,
            own,
            [round(mark.speedup or 0.0, 3) for mark in own],
            "%{y:.2f}×",
            "" if len(models) == 1 else label,
            name=f"{inert(label)}: {middle}",
            marker=look_of_runs(number, plain=False, alone=len(models) == 1),
        )
    figure.add_hline(y=1.0, line=NEUTRAL)
    return with_room(figure, marks, len(models))


def add_runs(
    figure: go.Figure,
    runs: Sequence[Mark],
    values: Sequence[float],
    value: str,
    model: str,
    **look: Any,
) -> None:
    """Add a point for each run, which a click opens. `value` is Plotly's template of a value."""
    means = (f" (mean of {mark.runs:,} runs)" if mark.runs > 1 else "" for mark in runs)
    figure.add_scatter(
        x=[mark.number + 1 for mark in runs],
        y=values,
        mode="markers",
        customdata=[["run", mark.id, mean] for mark, mean in zip(runs, means, strict=True)],
        hovertemplate=f"{value}%{{customdata[2]}}<extra>{inert(model)}</extra>",
        **look,
    )


def by_model(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """The points of each model, by its label. Models beyond MODELS are put together."""
    labels = dict.fromkeys(mark.label for mark in marks)
    separate = list(labels) if len(labels) <= MODELS else list(labels)[: MODELS - 1]
    found: dict[str, list[Mark]] = {}
    for mark in marks:
        found.setdefault(mark.label if mark.label in separate else OTHERS, []).append(mark)
    return found


def look_of_runs(number: int, plain: bool, alone: bool) -> dict[str, str | int]:
    """The marker of a model's runs. If there are several models, plain runs are hollow."""
    if alone:
        symbol = "x-thin-open" if plain else "circle"
        return {"color": PLAIN if plain else INK, "size": 7, "symbol": symbol}
    symbol = SYMBOLS[number] + ("-open" if plain else "")
    return {"color": SERIES[number], "size": 8, "symbol": symbol}


def with_room(figure: go.Figure, marks: Sequence[Mark], models: int) -> go.Figure:
    """The chart of past runs with a legend of one line per model, and few marks on its axis."""
    figure.update_xaxes(dtick=1 if marks[-1].number < 16 else None)
    if models > 1:
        lines = models * LEGEND_LINE
        figure.update_layout(
            height=HEIGHT + lines, margin={"t": 44 + lines}, legend={"orientation": "v"}
        )
    return figure


def without_axes(figure: go.Figure, text: str) -> go.Figure:
    figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False})
    lines = "<br>".join(wrap(text, LINE_LENGTH))
    figure.add_annotation(text=lines, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure


def speedups(values: Sequence[float | None], whole: float | None = None) -> go.Figure:
    """The speedup of each repeat (None if it is not known), with a line at `whole`, the speedup of
    all repeats. Plain decoding is 1."""
    figure = framed("Speedup over plain decoding", "repeat", "times as fast")
    if whole is None and not any(values):
        coming = "This chart will show the speedup of each repeat."
        unknown = "No draft was accepted or an answer is empty, so no speedup is known."
        return without_axes(figure, unknown if values else coming)
    known = {str(i): value for i, value in enumerate(values, 1) if value is not None}
    if known:
        figure.add_bar(
            x=list(known),
            y=[round(value, 4) for value in known.values()],
            marker={"color": INK},
            texttemplate="%{y:.2f}×",
            **LABELLED,
            name="repeat",
        )
        figure.update_xaxes(type="category")
    if whole is not None:
        figure.add_hline(y=whole, line={"color": INK, "width": 1.5})
    figure.add_hline(y=1.0, line=NEUTRAL)
    return figure


def cost_curve(curve: CostCurve | None, run: Digest = NOTHING) -> go.Figure:
    """The time of a step by the number of tokens that it verifies, and how many tokens the steps of
    a run drafted."""
    figure = framed("What a step costs, and how much was drafted", "drafted tokens", "steps", True)
    if curve is None and not run.drafted:
        return without_axes(figure, "This chart will show what it costs to check more drafts.")
    figure.update_layout(
        yaxis={"side": "right", "showgrid": False, "visible": bool(run.drafted)},
        yaxis2={"title": "ms per step", "overlaying": "y", "rangemode": "tozero", **AXIS},
    )
    drafted = dict(run.drafted)
    sizes = sorted(drafted)
    figure.add_bar(
        x=sizes,
        y=[drafted[size] for size in sizes],
        name="steps of this run",
        width=0.8,
        marker={"color": PLAIN, "opacity": 0.4},
        customdata=["plain steps" if not size else f"steps drafted {size}" for size in sizes],
        hovertemplate="%{y} %{customdata}<extra></extra>",
    )
    points = curve.points if curve else {}
    between = range(max([*points, *sizes], default=0) + 1)
    seconds = [curve.seconds(nodes) for nodes in between] if curve else []
    figure.add_scatter(
        x=list(between) if curve else [],
        y=[round(1e3 * value, 4) for value in seconds],
        yaxis="y2",
        name="cost of a step",
        mode="lines",
        line={"color": INK, "width": 2},
        customdata=[round(value / seconds[0], 3) for value in seconds],
        hovertemplate="%{x} drafted: %{y:.2f} ms, %{customdata:.2f}× a plain step<extra></extra>",
    )
    figure.add_scatter(
        x=list(points),
        y=[round(1e3 * value, 4) for value in points.values()],
        yaxis="y2",
        mode="markers",
        marker={"color": INK, "size": 6},
        showlegend=False,
        hoverinfo="skip",
    )
    return figure


def worth_of_evidence(calibration: Calibration) -> go.Figure:
    """The learned trust in each database, by the number of tokens that matched.

    A point is the mean over all strengths of such a match, weighted by how often each occurred.
    Matches that compete with a head have their own calibration; of the two, the one with more
    occurrences is shown. The head itself matches no tokens.
    """
    figure = framed("How much a match is trusted", "tokens matched", "% trusted", True)
    with_head = calibration.headed or calibration
    for tier, own in calibration.weights.items():
        if tier == HEAD:
            continue
        pairs = zip(own, with_head.weights[tier], strict=True)
        lengths = [max(pair, key=lambda t: sum(t.reached)) for pair in pairs]
        met = {length: sum(t.reached) for length, t in enumerate(lengths, start=1)}
        shown = [length for length in met if met[length] >= 1]
        trusted = {n: sum(map(mul, t.reached, t.values)) for n, t in enumerate(lengths, start=1)}
        look = ink(tier)
        figure.add_scatter(
            x=shown,
            y=[round(100 * trusted[length] / met[length], 2) for length in shown],
            name=look.title,
            mode="lines+markers",
            line={"color": look.colour, "width": 2},
            customdata=[round(met[length]) for length in shown],
            hovertemplate="%{y:.0f} %, learned from %{customdata:,} tokens",
        )
    if not any(line.x for line in figure.data):
        figure.data = []
        return without_axes(figure, "This chart will show how often longer matches are right.")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 100])
    return figure


ALL = "all questions"
LONGEST_NAME = 24
COLOURS = {
    methods.PLAIN.name: PLAIN,
    "hd": INK,
    "hd-published": STAGES["verify"],
    "lookup": STAGES["draft"],
    "rest": STAGES["sample"],
    **{tier: INKS[tier].colour for tier in TIERS},
}
"""The colours of methods. A method that drafts from one database has its colour."""
CATEGORIES = {
    "math": "mathematics",
    "math_reasoning": "word problems",
    "qa": "question answering",
    "rag": "answers from documents",
    "roleplay": "role play",
    "stem": "science",
    "summarization": "summaries",
}


def category_name(category: str) -> str:
    return CATEGORIES.get(category, category)


def by_category(report: Report | None) -> go.Figure:
    """A bar for each method and category: the speedup over plain decoding, or the speed if plain
    decoding was not measured. Plain decoding and unknown values have no bar."""
    plain = report is not None and any(one.method == methods.PLAIN.name for one in report.metrics)
    title = "Speedup over plain decoding" if plain else "Speed"
    figure = framed(f"{title}, by category", "", "times as fast" if plain else "tokens/s", True)
    # The legend has a line per method where the window is narrow.
    lines = 20 * max(0, len(report.plan.methods) - 2) if report else 0
    figure.update_layout(
        showlegend=True, barmode="group", margin={"t": 70 + lines}, height=HEIGHT + 50 + lines
    )
    if report is None or not report.metrics:
        return figure
    groups = {ALL: report.metrics, **report.categories}
    for number, method in enumerate(report.plan.methods):
        if plain and method == methods.PLAIN:
            continue
        own = {
            name: next(one for one in metrics if one.method == method.name)
            for name, metrics in groups.items()
        }
        values = {
            name: metrics.speedup.whole if plain else metrics.tokens_per_second
            for name, metrics in own.items()
        }
        known = {name: value for name, value in values.items() if value is not None}
        figure.add_bar(
            x=[inert(category_name(name)[:LONGEST_NAME]) for name in known],
            y=[round(value, 4) for value in known.values()],
            name=inert(title_of(method.name)),
            marker={"color": COLOURS.get(method.name) or DRAFT_SHADES[number % len(DRAFT_SHADES)]},
            customdata=[own[name].questions for name in known],
            hovertemplate=f"%{{y:.2f}}{'×' if plain else ' tokens/s'}, %{{customdata}} questions",
        )
    if plain:
        figure.add_hline(y=1, line=NEUTRAL)
    return figure
