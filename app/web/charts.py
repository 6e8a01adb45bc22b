"""Charts of runs: pure functions from sums to figures, in the one palette.

Grounds are transparent and the ink is a mid-grey, so a figure fits light and dark alike. What is
drawn is bounded (storage/digests.py): a figure travels whole to the browser. A title says what was
found. The points of some charts can be opened: `customdata` then begins with what they are, "run"
or "step", and which one (assets/picks.js).
"""

from collections.abc import Sequence
from html import escape
from operator import mul
from statistics import median

import plotly.graph_objects as go

from app.web.colors import GRID, INK, INKS, PLAIN, STAGES, ink, others
from engine.drafting.calibration import Calibration
from engine.drafting.costs import CostCurve
from engine.types import HEAD, NO_RUN, TARGET, UNKNOWN, Run
from storage.digests import NOTHING, Digest, digest
from storage.traces import Mark

HEIGHT = 290
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
WORDS = "#7c8aa5"
"""Plotly's own ink: readable on both grounds."""

AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}


def framed(title: str, x: str, y: str, legend: bool = False) -> go.Figure:
    """An empty figure with the house's frame; a legend stands below the title. All of it is given
    at once: plotly takes ten times as long to change a figure as to make it."""
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
            "font": {"family": FONT, "size": 12, "color": WORDS},
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


def name_of(source: str) -> str:
    """A source's title as plain text: the charting library reads markup in what it is given."""
    return escape(ink(source).title, quote=False)


def counted(number: int, noun: str) -> str:
    """A number of things: "1 step", "2 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def of_run(accelerated: Run, plain: Run = NO_RUN) -> list[go.Figure]:
    """The five charts that tell one run, with the plain run beside it where there is one."""
    return of_digest(digest(accelerated), digest(plain))


def of_digest(run: Digest, plain: Digest = NOTHING) -> list[go.Figure]:
    """The same of a run of which the sums are known."""
    return [
        tokens_over_time(run, plain),
        accepted_lengths(run),
        share_by_tier(run),
        rate_by_depth(run),
        tier_rates(run),
    ]


def tokens_over_time(run: Digest, plain: Digest = NOTHING) -> go.Figure:
    """Tokens emitted against decoding time; each accelerated step in its main source's colour."""
    seconds = f" in {run.line[-1].seconds:.2f} s" if run.line else ""
    title = counted(run.tokens, "token") + seconds if run.line else "Tokens over time"
    figure = framed(title, "seconds of decoding", "tokens", True)
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
    """How many tokens came from each step."""
    title = f"{run.tokens / run.steps:.2f} tokens per step" if run.steps else "Tokens per step"
    figure = framed(title, "tokens from one step", "steps")
    lengths = dict(run.lengths)
    if lengths:
        longest = max(lengths)
        x = list(range(1, longest + 1))
        colours = [PLAIN if n == 1 else INK for n in x]
        figure.add_bar(
            x=x,
            y=[lengths.get(n, 0) for n in x],
            marker={"color": colours},
            hovertemplate="%{y} steps gave %{x}<extra></extra>",
        )
        figure.update_xaxes(dtick=1 if longest <= 16 else None)
    return figure


def share_by_tier(run: Digest) -> go.Figure:
    """Which source gave how much of the output."""
    share = {source: count / run.tokens for source, count in run.share}
    guessed = 1 - share.get(TARGET, 0.0)
    title = f"{100 * guessed:.0f} % of the tokens were guessed"
    known = share and UNKNOWN not in share
    figure = framed(title if known else "Where the tokens came from", "", "% of tokens")
    sources = [*INKS, *others(share)]
    figure.add_bar(
        x=[name_of(source) for source in sources],
        y=[round(100 * share.get(source, 0.0), 2) for source in sources],
        marker={"color": [ink(source).colour for source in sources]},
        texttemplate="%{y:.0f} %",
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}: %{y} %<extra></extra>",
    )
    return figure


def rate_by_depth(run: Digest) -> go.Figure:
    """Share of the drafted tokens accepted at each depth of the tree."""
    rows = [(depth, *pair) for depth, pair in enumerate(run.by_depth, start=1) if pair[0]]
    first = f"{100 * rows[0][2] / rows[0][1]:.0f} % of the first guesses were right" if rows else ""
    title = first if rows and rows[0][0] == 1 else "Accepted drafts by position"
    figure = framed(title, "position in the draft", "% accepted")
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
    """Drafted and accepted tokens of each tier."""
    proposed, accepted = dict(run.proposed), dict(run.accepted)
    drafted, kept = sum(proposed.values()), sum(accepted.values())
    title = f"{kept:,} of {drafted:,} guessed tokens were right"
    figure = framed(title if drafted else "Drafted and accepted by source", "", "tokens")
    sources = [source for source in INKS if source != TARGET] + others(proposed)
    titles = [name_of(source) for source in sources]
    colours = [ink(source).colour for source in sources]
    for name, of in (("drafted", proposed), ("accepted", accepted)):
        figure.add_bar(
            x=titles,
            y=[of.get(source, 0) for source in sources],
            name=name,
            marker={"color": colours, "opacity": 0.35 if name == "drafted" else 1.0},
            hovertemplate="%{x}: %{y} " + name + "<extra></extra>",
        )
    figure.update_layout(barmode="group")
    return figure


def step_times(run: Digest) -> go.Figure:
    """What the steps of a run took, split into their stages."""
    totals = {name: sum(getattr(point, name) for point in run.line) for name in STAGES}
    whole = sum(totals.values())
    verify = totals["verify"]  # Of a server's steps the stages are not known.
    title = f"Verifying takes {100 * verify / whole:.0f} % of a step" if verify else ""
    figure = framed(title or "What a step takes", "step", "ms per step", True)
    for name, colour in STAGES.items():
        if not run.line:
            break
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
    """Decode speed of past runs, oldest first; a point can be opened."""
    fast = [mark.speed for mark in marks if not mark.plain]
    title = f"With drafts: {median(fast):,.0f} tokens/s (median)" if fast else "Speed of past runs"
    figure = framed(title, "run", "tokens per second", True)
    if not marks:
        return without_axes(figure, "No run yet. Ask something in the Chat tab.")
    for kind, plain in (("with drafts", False), ("plain", True)):
        points = [mark for mark in marks if mark.plain == plain]
        figure.add_scatter(
            x=[mark.number + 1 for mark in points],
            y=[round(mark.speed, 3) for mark in points],
            name=kind,
            mode="markers",
            marker={
                "color": PLAIN if plain else INK,
                "size": 7,
                "symbol": "x-thin-open" if plain else "circle",
            },
            customdata=[["run", mark.id, among(mark)] for mark in points],
            hovertemplate="%{y:.0f} tokens/s%{customdata[2]}<extra></extra>",
        )
    figure.update_xaxes(dtick=1 if marks[-1].number < 16 else None)
    return figure


def speedup_of_runs(marks: Sequence[Mark]) -> go.Figure:
    """What past runs gained, as far as it was measured; a point can be opened."""
    known = [mark for mark in marks if mark.speedup is not None]
    middle = median([mark.speedup or 0.0 for mark in known]) if known else 0.0
    title = f"Measured speedup: {middle:.2f}× (median)" if known else "No speedup is known yet"
    figure = framed(title, "run", "times as fast as plain")
    if not known:
        return without_axes(figure, "Press Prove it below an answer, or Compare.")
    figure.add_scatter(
        x=[mark.number + 1 for mark in known],
        y=[round(mark.speedup or 0.0, 3) for mark in known],
        mode="markers",
        marker={"color": INK, "size": 7},
        customdata=[["run", mark.id, among(mark)] for mark in known],
        hovertemplate="%{y:.2f}×%{customdata[2]}<extra></extra>",
    )
    figure.update_xaxes(dtick=1 if marks[-1].number < 16 else None)
    figure.add_hline(y=1.0, line={"color": PLAIN, "dash": "dot", "width": 1.5})
    return figure


def without_axes(figure: go.Figure, words: str) -> go.Figure:
    """A chart that has nothing to show yet says what to do."""
    figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False})
    figure.add_annotation(text=words, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure


def among(mark: Mark) -> str:
    """What to add where a point stands for several runs."""
    return f" (mean of {mark.runs:,} runs)" if mark.runs > 1 else ""


def speedups(values: Sequence[float | None], whole: float | None = None) -> go.Figure:
    """Speedup of each repeat, None where it is not known, and a line at that of all of them; 1 is
    plain decoding."""
    figure = framed("Speedup over plain decoding", "repeat", "times as fast")
    told = {str(i): value for i, value in enumerate(values, 1) if value is not None}
    if told:
        figure.add_bar(
            x=list(told),
            y=[round(value, 4) for value in told.values()],
            marker={"color": INK},
            texttemplate="%{y:.2f}×",
            textposition="outside",
            cliponaxis=False,
            name="repeat",
        )
        figure.update_xaxes(type="category")
    if whole is not None:
        figure.add_hline(y=whole, line={"color": INK, "width": 1.5})
    figure.add_hline(y=1.0, line={"color": PLAIN, "dash": "dot", "width": 1.5})
    return figure


def cost_curve(curve: CostCurve | None, run: Digest = NOTHING) -> go.Figure:
    """Time of a step by the tokens it verifies, and behind it how many a run really drafted."""
    figure = framed("What a step costs, and how much was drafted", "drafted tokens", "steps", True)
    figure.update_layout(
        yaxis={"side": "right", "showgrid": False},
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

    A point is the mean over all strengths of such a match, weighted by how often each was met.
    Beside a head, matches are judged apart: what was met more often counts. A head itself matches
    no tokens.
    """
    figure = framed("How much a match is trusted", "tokens matched", "% trusted", True)
    beside = calibration.headed or calibration
    for tier, own in calibration.weights.items():
        if tier == HEAD:
            continue
        pairs = zip(own, beside.weights[tier], strict=True)
        lengths = [max(pair, key=lambda t: sum(t.reached)) for pair in pairs]
        met = {length: sum(t.reached) for length, t in enumerate(lengths, start=1)}
        shown = [length for length in met if met[length] >= 1]
        look = ink(tier)
        figure.add_scatter(
            x=shown,
            y=[
                round(100 * sum(map(mul, t.reached, t.values)) / met[length], 2)
                for length in shown
                for t in (lengths[length - 1],)
            ],
            name=look.title,
            mode="lines+markers",
            line={"color": look.colour, "width": 2},
            customdata=[round(met[length]) for length in shown],
            hovertemplate="%{y:.0f} %, learned from %{customdata:,} tokens",
        )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 100])
    return figure
