"""One name, one colour and one underline for each token source, in tokens, legends and charts.

The page shows the names defined here; tooltips add the names that the papers use. The colours are
mid-tones that work on white and on near-black, so light and dark mode share them. The underline
repeats the information of the colour, for people who cannot distinguish the colours.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from app.service.draft_models import LEVELS
from engine.types import (
    CONTEXT,
    DRAFT,
    HEAD,
    MODEL,
    PREDICTION,
    SCHEMA,
    STATISTICS,
    TARGET,
    UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class Ink:
    """The look of a source. `underline` is a CSS text-decoration-style, "" for none; `meaning` is
    the text of tooltips."""

    title: str
    colour: str
    underline: str
    meaning: str


INKS = {
    CONTEXT: Ink(
        "This chat",
        "#12a5a5",
        "solid",
        "copied from this conversation (the context database)",
    ),
    MODEL: Ink(
        "Past answers", "#7f6df2", "dashed", "copied from past answers (the model database)"
    ),
    STATISTICS: Ink(
        "General text",
        "#e0982a",
        "dotted",
        "common in large texts (the statistics database)",
    ),
    HEAD: Ink(
        "Built-in head",
        "#4f9331",
        "double",
        "guessed by a small network that comes with the model (its head)",
    ),
    TARGET: Ink("The model itself", "#8792a6", "", "its own choice, not guessed (the target)"),
}
INK = "#64708a"
RARE = {
    SCHEMA: Ink("The format", "#d9603b", "dotted", "demanded by the format of the answer"),
    PREDICTION: Ink(
        "Prediction", INK, "solid", "copied from the text to be rewritten, which was expected"
    ),
    UNKNOWN: Ink("Not known", INK, "", "the server does not report where this token came from"),
}
"""The looks of sources that few answers have."""
MARKED = INKS | {source: look for source, look in RARE.items() if look.underline}
"""The looks that have a rule of their own in the style sheet."""
DRAFT_SHADES = ("#a93c79", "#d3609a", "#ea94bb", "#f2b8d2")
"""Shades of one hue for draft models, one per level of the stack. The largest model is darkest."""
PLAIN = INKS[TARGET].colour
GRID = "rgba(128, 140, 160, 0.22)"
SERIES = (INK, "#b0774a", "#4f6bb5", "#7d8f3a", "#a35d83")
"""The colours of models in a chart that compares them. No token source has one of these."""
STAGES = {
    "verify": "#4f6bb5",
    "draft": "#5fb0d9",
    "sample": "#9aa9c4",
    "other": "#c9d1df",
}
"""The parts of a step's time. Blues, so that none looks like a token source."""


def ink(source: str) -> Ink:
    """The look of a source. The shade of a draft model that was never loaded depends on its
    name."""
    if source in INKS:
        return INKS[source]
    if source in RARE:
        return RARE[source]
    if not source.startswith(DRAFT):
        return Ink("Unknown", INK, "", "a source that this version does not know")
    name = source.removeprefix(DRAFT)
    level = LEVELS.get(name, sum(name.encode("utf-8", "replace")))
    return Ink(
        f"Draft {name}",
        DRAFT_SHADES[level % len(DRAFT_SHADES)],
        "wavy",
        f"drafted by the smaller model {name}",
    )


def css_class(source: str) -> str:
    """The class of a source's tokens, which sets the underline, and for the palette the colour."""
    if source in MARKED:
        return f"k-{source}"
    return "k-draft" if source.startswith(DRAFT) else "k-target"


def others(sources: Iterable[str]) -> list[str]:
    """The sources outside the palette, such as draft models, the smaller models first."""
    found = {source for source in sources if source not in INKS}
    return sorted(found, key=lambda s: (-LEVELS.get(s.removeprefix(DRAFT), 0), s))


def variables() -> str:
    """The palette as CSS custom properties and one rule per source."""
    rules = [":root{" + "".join(f"--s-{name}:{i.colour};" for name, i in INKS.items())]
    rules += ["".join(f"--t-{name}:{colour};" for name, colour in STAGES.items()) + "}"]
    for name, i in MARKED.items():
        if i.underline:
            rules.append(f".k-{name}{{--k:{i.colour};text-decoration-style:{i.underline}}}")
        else:
            rules.append(f".k-{name}{{--k:{i.colour}}}")
    return "".join(rules)
