"""The chart of a benchmark: what every method gained, category by category."""

from html import escape

import plotly.graph_objects as go

from app.service.benchmark_report import Figures, Report
from app.web.charts import HEIGHT, framed
from app.web.colors import DRAFT_SHADES, INK, INKS, PLAIN, STAGES
from app.web.verdicts import title_of
from engine import methods
from engine.types import TIERS

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
"""Methods that draft from one database have its colour."""


def colour(method: str, number: int) -> str:
    """The colour of a method, which is the `number`-th of its benchmark."""
    return COLOURS.get(method) or DRAFT_SHADES[number % len(DRAFT_SHADES)]


def by_category(report: Report | None) -> go.Figure:
    """A bar per method and category: the speedup over plain decoding, or where that was not
    measured the speed. What says nothing has no bar."""
    plain = report is not None and any(one.method == methods.PLAIN.name for one in report.figures)
    title = "Speedup over plain decoding" if plain else "Speed"
    figure = framed(f"{title}, by category", "", "times as fast" if plain else "tokens/s", True)
    # The legend has a line per method where the window is narrow.
    lines = 20 * max(0, len(report.plan.methods) - 2) if report else 0
    figure.update_layout(
        showlegend=True, barmode="group", margin={"t": 70 + lines}, height=HEIGHT + 50 + lines
    )
    if report is None or not report.figures:
        return figure
    groups = {ALL: report.figures, **report.categories}
    for number, method in enumerate(report.plan.methods):
        own = {
            name: next(one for one in figures if one.method == method.name)
            for name, figures in groups.items()
        }
        values = {name: value(figures, plain) for name, figures in own.items()}
        told = {name: found for name, found in values.items() if found is not None}
        if plain and method == methods.PLAIN:
            continue
        figure.add_bar(
            x=[escape(name[:LONGEST_NAME], quote=False) for name in told],
            y=[round(found, 4) for found in told.values()],
            name=escape(title_of(method.name), quote=False),
            marker={"color": colour(method.name, number)},
            customdata=[own[name].questions for name in told],
            hovertemplate="%{y:.2f}"
            + ("×" if plain else " tokens/s")
            + ", %{customdata} questions",
        )
    if plain:
        figure.add_hline(y=1, line={"color": PLAIN, "width": 1.5, "dash": "dot"})
    return figure


def value(figures: Figures, plain: bool) -> float | None:
    """What a bar shows."""
    return figures.speedup.whole if plain else figures.tokens_per_second
