"""What people read: plain names of the sources, and rare settings behind *Advanced*."""

from collections.abc import Iterator

import gradio as gr

from app.web import metrics_panel
from app.web.colors import INKS
from app.web.tabs.databases import card


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


def test_settings_that_a_chat_rarely_needs_are_under_advanced(owners_page: gr.Blocks) -> None:
    blocks = owners_page.blocks.values()
    (advanced,) = (b for b in blocks if b.elem_id == "advanced")
    assert isinstance(advanced, gr.Accordion) and not advanced.open
    behind = {str(getattr(part, "label", "")) for part in parts(advanced)}
    tab = next(b for b in blocks if isinstance(b, gr.Tab) and b.label == "Settings")
    front = {str(getattr(part, "label", "")) for part in parts(tab)} - behind
    assert {"Databases", "Draft size", "Max drafted tokens", "Minimum probability"} <= behind
    assert {"System prompt", "Max tokens", "Temperature", "Seed", "Method"} <= front


def parts(block: gr.blocks.Block) -> Iterator[gr.blocks.Block]:
    for child in getattr(block, "children", ()):
        yield child
        yield from parts(child)
