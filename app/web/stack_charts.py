"""Charts of a family of models: which model drafts well for which, at what cost, and which plan is
best.

All are pure functions from a profile to figures. Model names come from folder names; they are
escaped, because the charting library reads names as markup.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go

from app.web.charts import FONT, LABELLED, NEUTRAL, framed, inert
from app.web.colors import DRAFT_SHADES, INK, PLAIN, ink
from engine.hsd.planner import SOURCES, Edge, Graph, Plan, batches, edges, emitted, sources
from engine.hsd.profile import Pair, Profile
from engine.types import DRAFT, Rule

PALE, DARK = "#f8e4ed", "#2a1220"
"""The palest colour of the heat map, and the text on it, legible in light and dark mode."""
FAINT = "rgba(128, 140, 160, 0.55)"
LONGEST_NAME = 28
TALL = 340
CURVE = 16
"""How many straight pieces form an edge of the graph."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A plan in the chart of plans, with its seconds per token where they are known."""

    title: str
    colour: str
    predicted: float | None
    measured: float | None


def names(profile: Profile) -> list[str]:
    return [inert(model.name, LONGEST_NAME) for model in profile.models]


def colours(profile: Profile) -> list[str]:
    return [*(ink(DRAFT + model.name).colour for model in profile.models[:-1]), PLAIN]


def acceptance(profile: Profile | None, rule: Rule) -> go.Figure:
    figure = framed("How often a draft is accepted", "checked by", "drafted by")
    figure.update_yaxes(rangemode="normal")
    if profile is None:
        return figure
    labels = names(profile)
    below, above = range(len(labels) - 1), range(1, len(labels))
    pairs = [[profile.pairs[i, j] if i < j else None for j in above] for i in below]
    shares = [[pair and round(100 * pair.acceptance, 1) for pair in row] for row in pairs]
    details = [[pair_details(pair, rule) if pair else "" for pair in row] for row in pairs]
    figure.add_heatmap(
        x=labels[1:],
        y=labels[:-1],
        z=shares,
        customdata=details,
        colorscale=[[0, PALE], [1, DRAFT_SHADES[1]]],
        zmin=0,
        zmax=100,
        xgap=3,
        ygap=3,
        text=[["" if share is None else f"{share:.0f} %" for share in row] for row in shares],
        texttemplate="%{text}",
        textfont={"size": 15, "color": DARK},
        hoverongaps=False,
        hovertemplate="%{y} for %{x}: %{customdata}<extra></extra>",
        colorbar={"title": "%", "thickness": 10, "outlinewidth": 0},
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def pair_details(pair: Pair, rule: Rule) -> str:
    return (
        f"same distribution {100 * pair.acceptance:.1f} %; "
        f"same text {100 * pair.survives('match', 1):.1f} %; "
        f"4 drafts give {emitted(pair, rule, 4):.2f} tokens per step"
    )


def cost_curves(profile: Profile | None) -> go.Figure:
    """The time of a step of each model, by the number of drafted tokens that it verifies."""
    figure = framed("Time to check drafts", "drafted tokens", "ms (logarithmic)", True)
    figure.update_yaxes(type="log", rangemode="normal", dtick="D2")
    if profile is None:
        return figure
    for model, name, colour in zip(profile.models, names(profile), colours(profile), strict=True):
        sizes = sorted(model.costs)
        figure.add_scatter(
            x=sizes,
            y=[round(1e3 * model.costs[size], 4) for size in sizes],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 5},
            hovertemplate="%{x} drafted: %{y:.3g} ms",
        )
    return figure


def hierarchy(profile: Profile | None, rule: Rule, plan: Plan | None) -> go.Figure:
    """Models as vertices, the best batch between any two as edges, and the plan as a thick path."""
    figure = framed("Which model drafts for which; the thick path is the plan", "", "")
    figure.update_layout(hovermode="closest", height=TALL)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, rangemode="normal")
    if profile is None:
        return figure
    paths = {at: path.seconds for at, path in Graph(profile, rule).shortest().items()}
    chosen = steps_of(profile, rule, plan)
    for edge in edges(profile, rule):
        if edge.below != "" and (edge.below, edge.above) not in chosen:
            seconds = edge.seconds(paths[edge.below] if isinstance(edge.below, int) else 0.0)
            draw_edge(figure, edge, seconds, False)
    for edge, seconds in chosen.values():
        draw_edge(figure, edge, seconds, True)
    draw_vertices(figure, profile, paths, plan)
    first = -1 if sources_of(profile) else 0
    figure.update_xaxes(range=[first - 0.6, len(profile.models) - 0.4])
    return figure


def sources_of(profile: Profile) -> list[str]:
    """The measured sources that are not models: the databases, heads, or both in one tree."""
    return [
        name
        for name, parts in SOURCES.items()
        if any(model.rounds(*parts) for model in profile.models)
    ]


Steps = Mapping[tuple[int | str, int], tuple[Edge, float]]


def steps_of(profile: Profile, rule: Rule, plan: Plan | None) -> Steps:
    if plan is None:
        return {}
    last = len(profile.models) - 1
    levels = [*(profile.index(level.model) for level in plan.levels), last]
    edge = next(e for e in sources(profile, levels[0]) if e.below == plan.source)
    seconds = edge.seconds()
    found: dict[tuple[int | str, int], tuple[Edge, float]] = {}
    if plan.source:
        found[plan.source, levels[0]] = edge, seconds
    for (below, above), level in zip(pairwise(levels), plan.levels, strict=True):
        edge = batches(profile, rule, below, above)[level.batch - 1]
        seconds = edge.seconds(seconds)
        found[below, above] = edge, seconds
    return found


def draw_edge(figure: go.Figure, edge: Edge, seconds: float, chosen: bool) -> None:
    """Draw an arc with its batch at the top. It is higher the more vertices it passes."""
    start, end = edge.below if isinstance(edge.below, int) else -1, edge.above
    distance = end - start
    height = 0.1 if distance == 1 else 0.26 * distance
    shares = [at / CURVE for at in range(CURVE + 1)]
    figure.add_scatter(
        x=[start + share * distance for share in shares],
        y=[4 * height * share * (1 - share) for share in shares],
        mode="lines",
        line={
            "color": INK if chosen else FAINT,
            "width": 4 if chosen else 1.2,
            "dash": "solid" if chosen or edge.batch else "dot",
        },
        hoverinfo="skip",
    )
    batch = f"{edge.batch} at a time" if edge.batch else ""
    text = f"{batch} · {1e3 * seconds:.3g} ms" if batch else f"{1e3 * seconds:.3g} ms"
    figure.add_scatter(
        x=[(start + end) / 2],
        y=[height],
        mode="markers+text" if chosen or edge.batch else "markers",
        marker={"size": 7 if chosen else 4, "color": INK if chosen else FAINT},
        text=[text if chosen else batch],
        textposition="top center",
        textfont={"size": 12.5 if chosen else 10.5},
        customdata=[text],
        hovertemplate="%{customdata} per token<extra></extra>",
    )


def draw_vertices(
    figure: go.Figure, profile: Profile, paths: Mapping[int, float], plan: Plan | None
) -> None:
    """Draw the models with their times per token, alone and at best. The databases come first."""
    titles, shades = names(profile), colours(profile)
    labels = [
        f"<b>{name}</b><br>{1e3 * alone:.3g} ms alone<br>{1e3 * paths[at]:.3g} ms at best"
        for at, name in enumerate(titles)
        for alone in (profile.models[at].seconds(0),)
    ]
    places = list(range(len(titles)))
    if found := sources_of(profile):
        places, shades = [-1, *places], [INK, *shades]
        labels = [f"<b>{'<br>'.join(found)}</b>", *labels]
    used = {level.model for level in plan.levels} if plan else set()
    on_path = [
        place == len(titles) - 1
        or (place < 0 and plan is not None and plan.source != "")
        or (place >= 0 and profile.models[place].name in used)
        for place in places
    ]
    figure.add_scatter(
        x=places,
        y=[0] * len(places),
        mode="markers+text",
        marker={
            "size": [24 if chosen else 17 for chosen in on_path],
            "color": shades,
            "line": {"color": INK, "width": [3 if chosen else 0 for chosen in on_path]},
            "opacity": 1,
        },
        text=labels,
        textposition="bottom center",
        textfont={"family": FONT, "size": 12},
        hoverinfo="skip",
        cliponaxis=False,
    )
    highest = 0.26 * (len(places) - 1) if len(places) > 2 else 0.1
    figure.update_yaxes(range=[-0.55 * highest - 0.1, 1.2 * highest + 0.05])


def plans(bars: Sequence[Bar]) -> go.Figure:
    figure = framed("Predicted and measured time", "ms per token", "", True)
    titles = [inert(bar.title, LONGEST_NAME) for bar in bars]
    for name in ("measured", "predicted"):
        values = [bar.measured if name == "measured" else bar.predicted for bar in bars]
        if not any(values):
            continue
        figure.add_bar(
            x=[None if value is None else round(1e3 * value, 4) for value in values],
            y=titles,
            name=name,
            orientation="h",
            marker={
                "color": [bar.colour for bar in bars],
                "opacity": 1.0 if name == "measured" else 0.45,
                "pattern": {"shape": "" if name == "measured" else "/", "size": 5},
            },
            texttemplate="%{x:.3g}",
            **LABELLED,
            hovertemplate="%{y}, " + name + ": %{x:.3g} ms per token<extra></extra>",
        )
    if bars and (plain := bars[0].measured or bars[0].predicted):
        figure.add_vline(x=1e3 * plain, line=NEUTRAL)
    figure.update_layout(
        barmode="group",
        height=max(TALL, 110 + 36 * len(bars)),
        legend={"traceorder": "reversed"},
        xaxis={"rangemode": "tozero"},
    )
    figure.update_yaxes(type="category", autorange="reversed", rangemode="normal", showgrid=False)
    return figure
