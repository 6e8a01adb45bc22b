"""The component that shows tokens. Text reaches it as data; its template and script are fixed.

The chat's has all of assets/chat; the two of Compare have the part of it that draws tokens. The
files are one scope, in the order in which they are named here: shared values first.

Scripts are long, so the page does not bring them along: `GET /chat/<digest>.js` has both, and the
browser keeps it.
"""

import re
from functools import cache
from hashlib import sha256
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

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


LOADER = """// It asks the server by these events: {events}.
// A whole address: code that Gradio evaluates may be taken over from a page of another program.
const script = new URL(props.script, location.href).href;
import(script).then((view) => view.{name}(element, props, trigger, watch));"""
FUNCTION = "export function {name}(element, props, trigger, watch) {{\n{script}\n}}\n"


@cache
def script(chat: bool = False) -> str:
    """The view's script."""
    names = (*TOKENS, *(CHAT if chat else ()), END)
    files = (ASSETS / "chat" / f"{name}.js" for name in names)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@cache
def module() -> str:
    """The scripts of both views as one module."""
    scripts = {"chat": script(chat=True), "tokens": script()}
    return "".join(FUNCTION.format(name=name, script=code) for name, code in scripts.items())


@cache
def address() -> str:
    """Where the page finds it; what it says never changes."""
    return f"/chat/{sha256(module().encode()).hexdigest()[:16]}.js"


@cache
def loader(chat: bool = False) -> str:
    """What fetches it. Gradio wants the names of events to stand there, in quotes."""
    events = sorted(set(re.findall(r'trigger\(("\w+")', script(chat))))
    return LOADER.format(events=", ".join(events), name="chat" if chat else "tokens")


def routes() -> list[Route]:
    """The route by which it is fetched."""

    async def send(request: Request) -> Response:
        if request.url.path != address():
            return PlainTextResponse("There is no such script.", 404)
        return Response(module(), headers=vendor.FOREVER, media_type="text/javascript")

    return [Route("/chat/{name}", send, methods=["GET"])]


def token_view(chat: bool = False, **more: Any) -> gr.HTML:
    """A token view; the `chat` one follows answers, and formats them. Its template is fixed text:
    values reach it as data only. `more` are arguments of Gradio's component."""
    return gr.HTML(
        value={"turns": []},
        html_template=CHAT_TEMPLATE if chat else TEMPLATE,
        js_on_load=loader(chat),
        names=render.names(),
        vendor=vendor.prefix(),
        script=address(),
        apply_default_css=False,
        **more,
    )
