"""The component that shows tokens. Text reaches it as data; its template and script are fixed.

The chat's has all of assets/chat; the two of Compare have the part of it that draws tokens. The
files are one scope, in the order in which they are named here: shared values first.
"""

from functools import cache
from typing import Any

import gradio as gr

from app.web import render, vendor
from assets import ASSETS

TOKENS = ("state", "run", "spans", "legend", "scroll", "inspector", "turns", "start")
CHAT = (
    "vendor",
    "positions",
    "maths",
    "plan",
    "code",
    "patch",
    "thinking",
    "attached",
    "formatted",
    "actions",
    "choices",
    "stream",
    "pages",
    "undo",
    "why",
)
END = "begin"
LOG = (
    '<div class="turns" role="log" aria-label="{name}"></div>'
    '<div class="inspector" role="status">Point at a word to see where it came from.</div>'
)
TEMPLATE = '<div class="legend"></div>' + LOG.format(name="Tokens")
CHAT_TEMPLATE = (
    '<div class="top"><div class="legend" role="group" aria-label="Sources"></div>'
    '<div class="views" id="view" role="group" aria-label="View">'
    '<button type="button" data-view="formatted">Formatted</button>'
    '<button type="button" data-view="tokens">Tokens</button>'
    '<button type="button" data-colours="">Colours</button>'
    "</div></div>" + LOG.format(name="Conversation") + '<div class="offers" role="status"></div>'
)


@cache
def script(chat: bool = False) -> str:
    """The view's script."""
    names = (*TOKENS, *(CHAT if chat else ()), END)
    files = (ASSETS / "chat" / f"{name}.js" for name in names)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def token_view(chat: bool = False, **more: Any) -> gr.HTML:
    """A token view; the `chat` one follows answers, and formats them. Its template is fixed text:
    values reach it as data only. `more` are arguments of Gradio's component."""
    return gr.HTML(
        value={"turns": []},
        html_template=CHAT_TEMPLATE if chat else TEMPLATE,
        js_on_load=script(chat),
        names=render.names(),
        vendor=vendor.prefix(),
        apply_default_css=False,
        **more,
    )
