"""API: whether other programs may ask, their keys, and how they ask.

A key stands on the page once, when it was made; nothing that is sent later holds it.
"""

import json
import shlex
from dataclasses import dataclass
from datetime import datetime
from html import escape

import gradio as gr

from app.service.session import Session
from app.web.wiring import AT_ONCE, LATEST, Deeds, Event, Updates, counted, told, unless_done
from storage.api_keys import ApiKey

NO_KEY = "YOUR-KEY"
"""Stands in examples where a key would, which is not known any more."""


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tab: gr.Tab
    switch: gr.Checkbox
    state: gr.HTML
    keys: gr.HTML
    name: gr.Textbox
    make: gr.Button
    secret: gr.Textbox
    which: gr.Dropdown
    revoke: gr.Button
    asking: tuple[gr.Row, gr.Button, gr.Button]
    curl: gr.Textbox
    python: gr.Textbox


def build(tab: gr.Tab, session: Session) -> Parts:
    """A switch, the keys, and two examples."""
    with gr.Row(elem_classes="cards"):
        with gr.Column(elem_classes="card", min_width=320):
            gr.HTML(
                "<h3>Other programs</h3><p>Programs that speak OpenAI's API can use the loaded "
                "model: your scripts, an editor, Open WebUI. They wait in the same queue as this "
                "page.</p>"
            )
            switch = gr.Checkbox(
                label="Answer other programs",
                interactive=not session.programs.always,
                elem_id="api-on",
            )
            state = gr.HTML(elem_id="api-state", apply_default_css=False)
            curl, python = (
                gr.Textbox(label=label, buttons=["copy"], interactive=False, elem_id=element)
                for label, element in (("On a terminal", "api-curl"), ("In Python", "api-python"))
            )
        with gr.Column(elem_classes="card", min_width=320):
            gr.HTML("<h3>Keys</h3>")
            keys = gr.HTML(elem_id="api-keys", apply_default_css=False)
            name = gr.Textbox(label="Name of a new key, such as Open WebUI", elem_id="api-name")
            make = gr.Button("Make a key", size="sm", min_width=60, elem_id="api-make")
            secret = gr.Textbox(
                label="The new key. It is shown this once: copy it now.",
                buttons=["copy"],
                interactive=False,
                visible=False,
                elem_id="api-secret",
            )
            which = gr.Dropdown([], label="Revoke a key", value=None, elem_id="api-which")
            revoke = gr.Button("Revoke", size="sm", elem_id="api-revoke")
            with gr.Row(visible=False, elem_classes="asking") as row:
                yes = gr.Button("Revoke it", size="sm", variant="stop", min_width=60)
                no = gr.Button("Keep it", size="sm", min_width=60)
    asking = (row, yes, no)
    return Parts(tab, switch, state, keys, name, make, secret, which, revoke, asking, curl, python)


def address_of(request: gr.Request) -> str:
    """Where the page was opened, which is where the API is too."""
    origin = request.headers.get("origin") or f"http://{request.headers.get('host', '')}"
    return f"{origin}/v1"


def state_line(session: Session, address: str) -> str:
    """Whether it is on, where it is, and who needs a key."""
    if not session.programs.on:
        return "<p>The API is off: programs are told so, and nothing else.</p>"
    asked = " It was switched on with --api." if session.programs.always else ""
    return (
        f"<p>The API is on.{asked} Its address is <code>{escape(address)}</code></p>"
        "<p class='fine'>Programs on this machine need no key, unless Strata asks for a password. "
        "All others do.</p>"
    )


def keys_table(keys: list[ApiKey]) -> str:
    """The keys, without their secrets."""
    if not keys:
        return "<p>There are no keys yet.</p>"
    rows = "".join(
        f"<tr><td>{escape(key.name)}</td><td>{moment(key.created)}</td>"
        f"<td>{moment(key.used) if key.used else 'never'}</td></tr>"
        for key in keys
    )
    head = "<tr><th scope='col'>Name</th><th scope='col'>Made</th><th scope='col'>Last used</th>"
    return f"<table class='keys'><thead>{head}</tr></thead><tbody>{rows}</tbody></table>"


def moment(seconds: float) -> str:
    """A time for people, in theirs."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def curl_example(address: str, model: str, key: str) -> str:
    """A request on a terminal."""
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    return (
        f"curl {shlex.quote(f'{address}/chat/completions')} \\\n"
        f"  -H {shlex.quote(f'Authorization: Bearer {key}')} \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def python_example(address: str, model: str, key: str) -> str:
    """The same with OpenAI's package."""
    return (
        "from openai import OpenAI\n\n"
        f"client = OpenAI(base_url={address!r}, api_key={key!r})\n"
        "answer = client.chat.completions.create(\n"
        f"    model={model!r},\n"
        '    messages=[{"role": "user", "content": "Why is the sky blue?"}],\n'
        ")\n"
        "print(answer.choices[0].message.content)\n"
        'print(answer.model_extra["strata"])'
    )


def shown(session: Session, parts: Parts, address: str, secret: str = "") -> Updates:
    """All of the tab; a `secret` is that of the key that was just made."""
    keys, model = session.programs.keys.list(), session.current.info.name
    key = secret or NO_KEY
    return {
        parts.switch: session.programs.on,
        parts.state: state_line(session, address),
        parts.keys: keys_table(keys),
        parts.secret: gr.update(value=secret, visible=bool(secret)),
        parts.which: gr.update(choices=[(key.name, key.id) for key in keys], value=None),
        parts.asking[0]: gr.update(visible=False),
        parts.curl: curl_example(address, model, key),
        parts.python: python_example(address, model, key),
    }


def wire(session: Session, parts: Parts) -> None:
    """Read it when the tab opens; switch, make, and revoke after asking."""

    def refresh(request: gr.Request) -> Updates:
        with told():
            return shown(session, parts, address_of(request))
        return {parts.state: gr.skip()}

    def switch(on: bool, request: gr.Request) -> Updates:
        with told():
            session.programs.keys.switch(on)
            return {
                parts.switch: session.programs.on,
                parts.state: state_line(session, address_of(request)),
            }
        return {parts.state: gr.skip()}

    def make(name: str, request: gr.Request) -> Updates:
        with told():
            _, secret = session.programs.keys.make(name)
            return {**shown(session, parts, address_of(request), secret), parts.name: ""}
        return {parts.name: gr.skip()}

    def ask(which: str | None) -> object:
        return gr.update(visible=bool(which))

    def revoke(which: str | None, request: gr.Request) -> Updates:
        with told():
            session.programs.revoke(which or "")
        return refresh(request)

    row, yes, no = parts.asking
    outputs = [parts.switch, parts.state, parts.keys, parts.secret, parts.which, row]
    outputs += [parts.curl, parts.python, parts.name]
    # A key is shown once: a tab that is late must not take it away.
    deeds = gr.State(Deeds())
    made = Event(counted(make), [deeds, parts.name], outputs)
    parts.tab.select(unless_done(refresh), deeds, outputs, **AT_ONCE)
    turned = [parts.switch, parts.state]
    parts.switch.input(counted(switch), [deeds, parts.switch], turned, **LATEST)
    parts.make.click(*made, **AT_ONCE)
    parts.name.submit(*made, **AT_ONCE)
    parts.revoke.click(counted(ask), [deeds, parts.which], row, **AT_ONCE)
    no.click(lambda: gr.update(visible=False), None, row, **AT_ONCE)
    yes.click(counted(revoke), [deeds, parts.which], outputs, **AT_ONCE)
