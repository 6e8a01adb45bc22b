"""The component that shows tokens. Text reaches it as data; its template and script are fixed.

The chat uses all files of assets/chat. Compare and Diagnostics use only the files that draw tokens.
The files share one scope and are joined in the order in which they are named here.

The scripts are long, so they are not part of the page: the browser fetches both from
`GET /chat/<digest>.js` and caches them.
"""

import re
from functools import cache
from typing import Any

import gradio as gr
from starlette.routing import Route

from app.web import render
from app.web.kit import html
from app.web.markup import template
from app.web.routes import library_prefix, script_address, script_route
from assets import read

TOKENS = ("state", "run", "spans", "legend", "scroll", "inspector", "turns", "start")
CHAT = (
    "vendor",
    "limit",
    "positions",
    "maths",
    "plan",
    "code",
    "patch",
    "thinking",
    "attached",
    "tools",
    "tree",
    "formatted",
    "rewrite",
    "quotes",
    "actions",
    "editing",
    "choices",
    "stream",
    "pages",
    "undo",
    "why",
)
END = "begin"
TEMPLATE = template("tokens.html", chat=False)
CHAT_TEMPLATE = template("tokens.html", chat=True)


LOADER = """// The script triggers these events of the server: {events}.
// The address is absolute, because a page of another program may evaluate code of this one.
const script = new URL(props.script, location.href).href;
import(script).then((view) => view.{name}(element, props, trigger, watch));"""
FUNCTION = "export function {name}(element, props, trigger, watch) {{\n{script}\n}}\n"


def script(chat: bool = False) -> str:
    names = (*TOKENS, *(CHAT if chat else ()), END)
    return read(*(f"chat/{name}.js" for name in names))


@cache
def module() -> str:
    scripts = {"chat": script(chat=True), "tokens": script()}
    return "".join(FUNCTION.format(name=name, script=code) for name, code in scripts.items())


@cache
def loader(chat: bool = False) -> str:
    """The code that fetches the script. It names the script's events in quotes, because Gradio
    searches the code for them."""
    events = sorted(set(re.findall(r'trigger\(("\w+")', script(chat))))
    return LOADER.format(events=", ".join(events), name="chat" if chat else "tokens")


def route() -> Route:
    return script_route("/chat", module)


def token_view(chat: bool = False, **more: Any) -> gr.HTML:
    """A token view. The one for the `chat` also follows growing answers and formats them. The
    template is fixed, and values reach it as data only. `more` are further arguments of Gradio's
    component."""
    return html(
        value={"turns": []},
        html_template=CHAT_TEMPLATE if chat else TEMPLATE,
        js_on_load=loader(chat),
        names=render.names(),
        vendor=library_prefix(),
        script=script_address("/chat", module()),
        **more,
    )
