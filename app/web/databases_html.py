"""What the Databases tab says, as HTML; every text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape

from app.service.entries import Hit
from app.web.colors import INKS, ink, others
from app.web.metrics_panel import milliseconds
from engine.types import CONTEXT, MODEL, STATISTICS, TARGET
from storage.brought import Brought

UNKNOWN = {
    CONTEXT: "This conversation does not hold it, or none is open.",
    MODEL: "No past answer holds it.",
    STATISTICS: "The texts do not hold it, or there is no file for this model.",
}
"""What is said where a database knows none of the words."""
TIMES = {CONTEXT: "times", MODEL: "answers", STATISTICS: "times"}
"""What a database counts."""


def name(source: str) -> str:
    """A source in its colour."""
    look = ink(source)
    kind = f"k-{source}" if source in INKS else "k-draft"
    return (
        f'<span class="tok {kind}" style="--k:{look.colour}" title="{escape(look.meaning)}">'
        f"{escape(look.title)}</span>"
    )


def shown(text: str) -> str:
    """A text with its spaces and line ends to be seen."""
    return f"<code>{escape(repr(text)[1:-1].replace(' ', '␣'))}</code>"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of markup below their titles."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="tiers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def found(hits: Mapping[str, Hit]) -> str:
    """What each database holds for some words."""
    return f'<div class="found">{"".join(hit(source, each) for source, each in hits.items())}</div>'


def hit(source: str, each: Hit) -> str:
    """What one database holds for some words."""
    if not each.matched:
        return f"<div><h4>{name(source)}</h4><p class='fine'>{UNKNOWN[source]}</p></div>"
    tokens = "token" if each.matched == 1 else "tokens"
    rows = [
        [shown(entry.text), f"{entry.count:,}", f"{100 * entry.share:.0f} %"]
        for entry in each.entries
    ]
    return (
        f"<div><h4>{name(source)}</h4><p class='fine'>After {shown(each.key)} "
        f"({each.matched} {tokens}):</p>{table(['next', TIMES[source], 'share'], rows)}</div>"
    )


def brought(sums: Brought, model: str) -> str:
    """What each source brought to the latest answers of a model."""
    if not sums.runs:
        return "<p class='fine'>No answer with drafts by this model is stored yet.</p>"
    whole = sums.tokens.total()
    sources = [*INKS, *others({*sums.tokens, *sums.drafted})]
    rows = [
        [
            name(source),
            f"{100 * sums.tokens[source] / whole:.0f} %" if whole else "–",
            "–" if source == TARGET else f"{sums.accepted[source]:,}",
            f"{sums.drafted[source]:,}" if told(sums, source) else "–",
            milliseconds(sums.look_ups[source]) if source in sums.look_ups else "–",
        ]
        for source in sources
    ]
    titles = ["source", "share of the tokens", "accepted", "drafted", "looking up"]
    answers = f"{sums.runs:,} latest answers" if sums.runs > 1 else "latest answer"
    return (
        f"<p class='fine'>The {answers} of {escape(model)}: {whole:,} tokens.</p>"
        f"{table(titles, rows)}{saved(sums, whole)}"
    )


def told(sums: Brought, source: str) -> bool:
    """Whether it is known how much a source drafted: a server tells only what was accepted."""
    return source != TARGET and sums.drafted[source] >= sums.accepted[source]


def saved(sums: Brought, whole: int) -> str:
    """The seconds that drafting saved, as far as they are known, and how."""
    if not sums.timed:
        return "<p class='fine'>How long plain decoding would have taken is not known.</p>"
    gain = sums.plain - sums.spent
    words = f"{gain:.1f} s less" if gain >= 0 else f"{-gain:.1f} s more"
    part = "these tokens" if sums.timed == whole else f"{sums.timed:,} of these tokens"
    return (
        f"<p class='fine'>Decoding {part} took {sums.spent:.1f} s, <b>{words}</b> than plain "
        f"decoding would have taken ({sums.plain:.1f} s). Each step compares itself with the plain "
        "steps of its own answer. What one database saved cannot be told: drafts of all are "
        "verified together.</p>"
    )
