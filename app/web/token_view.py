"""The component that shows tokens. Text reaches it as data; its template and script are fixed."""

from functools import cache
from typing import Any

import gradio as gr

from app.web import render
from assets import ASSETS

TEMPLATE = (
    '<div class="legend"></div><div class="turns" role="log"></div>'
    '<div class="inspector">Point at a word to see where it came from.</div>'
)


@cache
def script() -> str:
    """The token view's script."""
    return (ASSETS / "tokens.js").read_text(encoding="utf-8")


def token_view(**more: Any) -> gr.HTML:
    """A token view. Its template is fixed text: values reach it as data only. `more` are arguments
    of Gradio's component."""
    return gr.HTML(
        value={"turns": []},
        html_template=TEMPLATE,
        js_on_load=script(),
        names=render.names(),
        apply_default_css=False,
        **more,
    )
