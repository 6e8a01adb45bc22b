"""Charts of runs: pure functions from runs to figures, in the one palette.

Grounds are transparent and the ink is a mid-grey, so a figure fits light and dark alike. Series
are bounded to POINTS points: a figure travels whole to the browser.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from operator import mul

import plotly.graph_objects as go

from app.web.colors import GRID, INK, INKS, PLAIN, ink, others
from engine.drafting.calibration import Calibration
from engine.drafting.costs import CostCurve
from engine.metrics import summarise
from engine.types import NO_RUN, TARGET, Run, Step
from storage.traces import Trace

POINTS = 400
HEIGHT = 290
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
WORDS = "#7c8aa5"
"""Plotly's own ink: readable on both grounds."""

AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}


def framed(title: str, x: str, y: str, legend: bool = False) -> go.Figure:
    """An empty figure with the house's frame; a legend stands below the title."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        title={
            "text": title,
            "font": {"size": 14},
            "x": 0.01,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 14},
        },
        font={"family": FONT, "size": 12, "color": WORDS},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        height=HEIGHT,
        margin={"l": 48, "r": 16, "t": 70 if legend else 44, "b": 44},
        showlegend=None if legend else False,
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        hoverlabel={"font": {"family": FONT}},
        bargap=0.25,
    )
    figure.update_xaxes(title=x, **AXIS)
    figure.update_yaxes(title=y, rangemode="tozero", **AXIS)
    return figure


def thinned(count: int) -> list[int]:
    """At most POINTS indices below `count`, evenly spread, the last one included."""
    if count <= POINTS:
        return list(range(count))
    return [round(i * (count - 1) / (POINTS - 1)) for i in range(POINTS)]


def name_of(source: str) -> str:
    """A source's title as plain text: the charting library reads markup in what it is given."""
    return escape(ink(source).title, quote=False)


def main_source(step: Step) -> str:
    """The source of most of a step's tokens; the target when none of them was drafted."""
    drafted = Counter(token.source for token in step.tokens if token.source != TARGET)
    return drafted.most_common(1)[0][0] if drafted else TARGET


def of_run(accelerated: Run, plain: Run = NO_RUN) -> list[go.Figure]:
    """The five charts that tell one run, with the plain run beside it where there is one."""
    return [
        tokens_over_time(accelerated, plain),
        accepted_lengths(accelerated),
        share_by_tier(accelerated),
        rate_by_depth(accelerated),
        tier_rates(accelerated),
    ]


def tokens_over_time(
    accelerated: Run, plain: Run = NO_RUN, title: str = "Tokens over time"
) -> go.Figure:
    """Tokens emitted against decoding time; each accelerated step in its main source's colour."""
    figure = framed(title, "seconds of decoding", "tokens", True)
    for name, steps in (("plain", plain.steps), ("with drafts", accelerated.steps)):
        if not steps:
            continue
        seconds = list(accumulate(step.seconds for step in steps))
        tokens = list(accumulate(len(step.tokens) for step in steps))
        shown = thinned(len(steps))
        fast = name == "with drafts"
        figure.add_scatter(
            x=[0.0, *(seconds[i] for i in shown)],
            y=[0, *(tokens[i] for i in shown)],
            name=name,
            mode="lines+markers" if fast else "lines",
            line={"color": INK if fast else PLAIN, "dash": "solid" if fast else "dot", "width": 2},
            marker={
                "size": 5,
                "color": [PLAIN, *(ink(main_source(steps[i])).colour for i in shown)],
            },
            hovertemplate="%{y} tokens after %{x:.2f} s",
        )
    return figure


def accepted_lengths(run: Run) -> go.Figure:
    """How many tokens came from each step."""
    figure = framed("Tokens per step", "tokens from one step", "steps")
    lengths = summarise(run).lengths
    if lengths:
        longest = max(lengths)
        x = list(range(1, longest + 1))
        colours = [PLAIN if n == 1 else INK for n in x]
        figure.add_bar(x=x, y=[lengths.get(n, 0) for n in x], marker={"color": colours})
        figure.update_xaxes(dtick=1 if longest <= 16 else None)
    return figure


def share_by_tier(run: Run) -> go.Figure:
    """Which source gave how much of the output."""
    figure = framed("Where the tokens came from", "", "% of tokens")
    share = summarise(run).share
    sources = [*INKS, *others(share)]
    figure.add_bar(
        x=[name_of(source) for source in sources],
        y=[round(100 * share.get(source, 0.0), 2) for source in sources],
        marker={"color": [ink(source).colour for source in sources]},
        texttemplate="%{y:.0f} %",
        textposition="outside",
        cliponaxis=False,
    )
    return figure


def rate_by_depth(run: Run) -> go.Figure:
    """Share of the drafted tokens accepted at each depth of the tree."""
    figure = framed("Accepted drafts by position", "position in the draft", "% accepted")
    proposed: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for step in run.steps:
        for depth, (drafted, kept) in enumerate(step.by_depth, start=1):
            proposed[depth] += drafted
            accepted[depth] += kept
    depths = sorted(depth for depth in proposed if proposed[depth])
    figure.add_scatter(
        x=depths,
        y=[round(100 * accepted[d] / proposed[d], 2) for d in depths],
        customdata=[[accepted[d], proposed[d]] for d in depths],
        mode="lines+markers",
        line={"color": INK, "width": 2},
        hovertemplate="position %{x}: %{customdata[0]} of %{customdata[1]}<extra></extra>",
    )
    figure.update_xaxes(dtick=1 if len(depths) <= 16 else None)
    return figure


def tier_rates(run: Run) -> go.Figure:
    """Drafted and accepted tokens of each tier."""
    figure = framed("Drafted and accepted by source", "", "tokens")
    figures = summarise(run)
    sources = [source for source in INKS if source != TARGET] + others(figures.proposed)
    titles = [name_of(source) for source in sources]
    colours = [ink(source).colour for source in sources]
    counts: Mapping[str, Mapping[str, int]] = {
        "drafted": figures.proposed,
        "accepted": figures.accepted,
    }
    for name, of in counts.items():
        figure.add_bar(
            x=titles,
            y=[of.get(source, 0) for source in sources],
            name=name,
            marker={"color": colours, "opacity": 0.35 if name == "drafted" else 1.0},
        )
    figure.update_layout(barmode="group")
    return figure


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


def history(runs: Sequence[Trace]) -> go.Figure:
    """Decode speed of past runs, oldest first."""
    figure = framed("Speed of past runs", "run", "tokens per second", True)
    known = [run for run in reversed(runs) if run.decode_seconds and run.emitted_tokens]
    known = known[-POINTS:]
    for kind, drafted, colour in (("with drafts", True, INK), ("plain", False, PLAIN)):
        points = [(i, r) for i, r in enumerate(known, 1) if (r.method != "plain") == drafted]
        figure.add_scatter(
            x=[i for i, _ in points],
            y=[round(run.emitted_tokens / run.decode_seconds, 3) for _, run in points],
            name=kind,
            mode="markers",
            marker={"color": colour, "size": 7, "symbol": "circle" if drafted else "x-thin-open"},
            hovertemplate="%{y:.0f} tokens/s<extra></extra>",
        )
    figure.update_xaxes(dtick=1 if len(known) <= 16 else None)
    return figure


def cost_curve(curve: CostCurve | None, run: Run = NO_RUN) -> go.Figure:
    """Time of a step by the tokens it verifies, and behind it how many a run really drafted."""
    figure = framed("What a step costs, and how much was drafted", "drafted tokens", "steps", True)
    figure.update_layout(
        yaxis={"side": "right", "showgrid": False},
        yaxis2={"title": "ms per step", "overlaying": "y", "rangemode": "tozero", **AXIS},
    )
    drafted = Counter(sum(step.proposed.values()) for step in run.steps if step.tokens)
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
    """
    figure = framed("How much a match is trusted", "tokens matched", "% trusted", True)
    for tier, lengths in calibration.weights.items():
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
