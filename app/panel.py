"""The live figures beside the chat, as markup made of numbers and our own words only."""

from collections.abc import Mapping, Sequence
from html import escape

from app.palette import INKS, STAGES, ink, others
from engine.compare import Speedup
from engine.metrics import Metrics
from engine.types import TARGET, Step

NO_GAIN = "no draft was accepted, so there is no gain"
"""Why a speedup that was measured is not told (engine/compare.py)."""
RIBBON = 64
TALLEST = 12


def panel(
    figures: Metrics | None,
    steps: Sequence[Step] = (),
    speedup: Speedup | None = None,
    ended: str = "",
) -> str:
    """The whole panel; dashes where there is nothing to tell yet. `speedup` is against a plain run
    of the same prompt, None as long as there was none."""
    return (
        '<div class="panel">'
        + headline(figures, speedup)
        + section("Who wrote it", share_bar(figures) + tier_table(figures))
        + levels(figures)
        + section("Where a step goes", stage_bar(figures))
        + section("Step by step", ribbon(steps))
        + (f'<p class="ended">{escape(ended)}</p>' if ended else "")
        + "</div>"
    )


def section(title: str, body: str) -> str:
    """A titled part."""
    return f"<section><h4>{escape(title)}</h4>{body}</section>"


def headline(figures: Metrics | None, speedup: Speedup | None) -> str:
    """The four figures that matter most."""
    speed = figures.tokens_per_second if figures else 0.0
    gained = times(speedup.whole) if speedup else "–"
    cells = [
        ("Speed", f"{speed:,.0f}" if speed else "–", "tokens per second", ""),
        ("Speedup", gained, speedup_note(speedup), " lead"),
        (
            "Acceptance",
            f"{figures.mean_acceptance_length:.2f}" if figures and figures.forwards else "–",
            "tokens per forward",
            "",
        ),
        (
            "First token",
            milliseconds(figures.ttft_seconds) if figures and figures.forwards else "–",
            "model time",
            "",
        ),
    ]
    return (
        '<div class="figures">'
        + "".join(
            f'<div class="figure{kind}"><span>{title}</span><b>{value}</b>'
            f"<small>{note}</small></div>"
            for title, value, note, kind in cells
        )
        + "</div>"
    )


def times(ratio: float | None) -> str:
    """A speedup."""
    return "–" if ratio is None else f"{ratio:.2f}×"


def speedup_note(speedup: Speedup | None) -> str:
    """What the speedup is of, and how to get one."""
    if speedup is None:
        return "press Prove it to measure"
    if speedup.whole is None:
        return NO_GAIN
    return f"of the whole answer; decoding alone {times(speedup.decoding)}"


def milliseconds(seconds: float) -> str:
    """A duration at a sensible precision."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def stacked(parts: Sequence[tuple[str, float, str]]) -> str:
    """A bar of (colour, weight, title) parts."""
    whole = sum(weight for _, weight, _ in parts)
    if not whole:
        return '<div class="bar empty"></div>'
    return (
        '<div class="bar">'
        + "".join(
            f'<i style="width:{100 * weight / whole:.2f}%;background:{colour}" '
            f'title="{escape(title)}"></i>'
            for colour, weight, title in parts
            if weight
        )
        + "</div>"
    )


def share_bar(figures: Metrics | None) -> str:
    """Share of the output by source."""
    share: Mapping[str, float] = figures.share if figures else {}
    ordered = [*INKS, *others(share)]
    return stacked(
        [
            (ink(s).colour, share.get(s, 0.0), f"{ink(s).title} {100 * share.get(s, 0.0):.0f} %")
            for s in ordered
        ]
    )


def tier_table(figures: Metrics | None) -> str:
    """Per source: share of the output, accepted of proposed, look-up time per step."""
    head = "<tr><th>source</th><th>output</th><th>accepted / drafted</th><th>look-up</th></tr>"
    found = [*figures.share, *figures.proposed, *figures.levels] if figures else []
    rows = "".join(tier_row(figures, source) for source in [*INKS, *others(found)])
    return f'<table class="tiers">{head}{rows}</table>'


def tier_row(figures: Metrics | None, source: str) -> str:
    """One line of the table."""
    name = f"<td>{mark(source)}</td>"
    if figures is None or not figures.forwards:
        return f"<tr>{name}<td>–</td><td>–</td><td>–</td></tr>"
    share = f"{100 * figures.share.get(source, 0.0):.0f} %"
    if source == TARGET:
        return f"<tr>{name}<td>{share}</td><td></td><td></td></tr>"
    proposed = figures.proposed.get(source, 0)
    rate = (
        f"{figures.accepted.get(source, 0):,} / {proposed:,} "
        f"<em>{100 * figures.rate(source):.0f} %</em>"
        if proposed
        else "–"
    )
    spent = figures.look_up_seconds.get(source)
    each = milliseconds(spent / figures.forwards) if spent is not None else "–"
    return f"<tr>{name}<td>{share}</td><td>{rate}</td><td>{each}</td></tr>"


def mark(source: str) -> str:
    """A source's name in its look; a draft model's name is that of a folder, and is escaped."""
    look = ink(source)
    if source in INKS:
        return f'<span class="tok k-{source}">{look.title}</span>'
    title = escape(look.title)
    return f'<span class="tok k-draft" style="--k:{look.colour}" title="{title}">{title}</span>'


def levels(figures: Metrics | None) -> str:
    """What each draft model of a stack did; nothing where none took part."""
    if figures is None or not figures.levels:
        return ""
    head = "<tr><th>model</th><th>forwards</th><th>accepted / drafted for it</th></tr>"
    rows = ""
    for source in others(figures.levels):
        forwards, drafted, accepted = figures.levels[source]
        rate = (
            f"{accepted:,} / {drafted:,} <em>{100 * accepted / drafted:.0f} %</em>"
            if drafted
            else "drafts by itself"
        )
        rows += f"<tr><td>{mark(source)}</td><td>{forwards:,}</td><td>{rate}</td></tr>"
    return section("Levels of the stack", f'<table class="tiers">{head}{rows}</table>')


def stage_bar(figures: Metrics | None) -> str:
    """Mean time of a step, split into its stages."""
    if figures is None or not figures.forwards:
        return stacked([])
    seconds = {name: getattr(figures, f"{name}_seconds") / figures.forwards for name in STAGES}
    legend = "".join(
        f'<span><i style="background:{STAGES[name]}"></i>{name} {milliseconds(value)}</span>'
        for name, value in seconds.items()
    )
    bar = stacked([(STAGES[n], s, f"{n} {milliseconds(s)}") for n, s in seconds.items()])
    return f'{bar}<div class="stages">{legend}</div>'


def ribbon(steps: Sequence[Step]) -> str:
    """The latest steps: a column each, a cell per emitted token in its source's colour."""
    latest = [step for step in steps if step.tokens][-RIBBON:]
    if not latest:
        return '<div class="ribbon empty"></div>'
    columns = []
    for step in latest:
        cells = "".join(
            f'<i style="background:{ink(token.source).colour}"></i>'
            for token in step.tokens[:TALLEST]
        )
        columns.append(
            f'<b title="step {step.index + 1}: {len(step.tokens)} tokens in '
            f'{milliseconds(step.seconds)}">{cells}</b>'
        )
    return f'<div class="ribbon">{"".join(columns)}</div>'
