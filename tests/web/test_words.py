"""What people read: plain names on the page, the papers' names in tooltips and brackets only."""

import re
from collections.abc import Iterator

import gradio as gr

from app.web import charts, metrics_panel, stack_charts
from app.web.colors import INKS
from app.web.tabs import compare
from app.web.tabs.databases import card
from engine.drafting.calibration import Calibration
from storage.steps import NOTHING

ATTRIBUTE = r'(?:title|class|id|target|href)="[^"]*"'
ASIDE = re.compile(rf"\([^)]*\)|{ATTRIBUTE}|<svg.*?</svg>", re.DOTALL)
PAPERS = re.compile(
    r"\b(tiers?|forwards?|target|hierarchical|harvest|evidence|hands? up|logits)\b", re.IGNORECASE
)
"""Words of the papers, and of the code, that a reader of the page need not know."""


def texts(page: gr.Blocks) -> Iterator[str]:
    """Every text of the page's components: labels, explanations, choices, contents."""
    for block in page.blocks.values():
        for name in ("label", "info", "placeholder", "value", "html_template"):
            text = getattr(block, name, None)
            if isinstance(text, str):
                yield text
        yield from (str(title) for title, _ in getattr(block, "choices", None) or ())
        yield from getattr(block, "headers", None) or ()


def of_charts() -> Iterator[str]:
    figures = [
        *compare.drawn(None),
        charts.speed_of_runs(()),
        charts.speedup_of_runs(()),
        charts.step_times(NOTHING),
        charts.cost_curve(None),
        charts.worth_of_evidence(Calibration()),
        stack_charts.acceptance(None, "match"),
        stack_charts.cost_curves(None),
        stack_charts.hierarchy(None, "match", None),
        stack_charts.plans(()),
    ]
    for figure in figures:
        shown = figure.layout.to_plotly_json()
        axes = (part for name, part in shown.items() if "axis" in name)
        yield from (str(part.get("title", {}).get("text")) for part in (shown, *axes))
        yield from (str(line.name or "") for line in figure.data)


def test_the_page_speaks_plainly(owners_page: gr.Blocks) -> None:
    found = [*texts(owners_page), *of_charts()]
    assert len(found) > 150
    assert [text for text in found if PAPERS.search(ASIDE.sub("", text))] == []


def test_sources_have_plain_names_and_the_papers_ones_in_their_tooltips() -> None:
    titles = [look.title for look in INKS.values()]
    assert titles == [
        "This chat",
        "Past answers",
        "General text",
        "Built-in head",
        "The model itself",
    ]
    panel, database = metrics_panel.template(), card("context", "", [])
    for source, look in INKS.items():
        assert source in look.meaning
        assert f'title="{look.meaning}">{look.title}</span>' in panel
    assert f'title="{INKS["context"].meaning}">This chat</span>' in database


def test_settings_that_a_chat_rarely_needs_are_behind_advanced(owners_page: gr.Blocks) -> None:
    blocks = owners_page.blocks.values()
    (advanced,) = (b for b in blocks if b.elem_id == "advanced")
    assert isinstance(advanced, gr.Accordion) and not advanced.open
    behind = {str(getattr(part, "label", "")) for part in parts(advanced)}
    tab = next(b for b in blocks if isinstance(b, gr.Tab) and b.label == "Settings")
    front = {str(getattr(part, "label", "")) for part in parts(tab)} - behind
    assert {"Databases", "Draft size", "Max drafted tokens", "Minimum probability"} <= behind
    assert {"System prompt", "Max tokens", "Temperature", "Seed", "Method"} <= front


def parts(block: gr.blocks.Block) -> Iterator[gr.blocks.Block]:
    """All that stands in a block."""
    for child in getattr(block, "children", ()):
        yield child
        yield from parts(child)
