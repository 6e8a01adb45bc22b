"""The API tab: whether other programs may send requests, their keys, and examples.

A key is shown once, right after it was made. No later update contains it.
"""

import json
import shlex
from datetime import datetime

import gradio as gr
from gradio.blocks import Block

from app.service.session import Session
from app.web.kit import (
    ACT,
    REFRESH,
    Confirmation,
    Tab,
    Updates,
    html,
    notify_errors,
    small_button,
)
from app.web.markup import template

NO_KEY = "YOUR-KEY"
"""The placeholder for a key in the examples, because keys are not known after they were shown."""


def address_of(request: gr.Request) -> str:
    origin = request.headers.get("origin") or f"http://{request.headers.get('host', '')}"
    return f"{origin}/v1"


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def curl_example(address: str, model: str, key: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    return (
        f"curl {shlex.quote(f'{address}/chat/completions')} \\\n"
        f"  -H {shlex.quote(f'Authorization: Bearer {key}')} \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def python_example(address: str, model: str, key: str) -> str:
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


class Programs(Tab):
    def __init__(self, session: Session, memory: gr.BrowserState, tab: gr.Tab) -> None:
        super().__init__(session, memory)
        self.tab, self.programs = tab, session.programs
        with gr.Row(elem_classes="cards"):
            with gr.Column(elem_classes="card", min_width=320):
                gr.HTML(
                    "<h3>Other programs</h3><p>Programs that speak OpenAI's API can use the loaded "
                    "model: your scripts, an editor, Open WebUI. They wait in the same queue as "
                    "this page.</p>"
                )
                self.switch_box = gr.Checkbox(
                    label="Answer other programs",
                    interactive=not session.programs.always,
                    elem_id="api-on",
                )
                self.state = html(elem_id="api-state")
                self.curl, self.python = (
                    gr.Textbox(label=label, buttons=["copy"], interactive=False, elem_id=element)
                    for label, element in (
                        ("On a terminal", "api-curl"),
                        ("In Python", "api-python"),
                    )
                )
            with gr.Column(elem_classes="card", min_width=320):
                gr.HTML("<h3>Keys</h3>")
                self.keys = html(elem_id="api-keys")
                self.name = gr.Textbox(
                    label="Name of a new key, such as Open WebUI", elem_id="api-name"
                )
                self.make_button = small_button("Make a key", min_width=60, elem_id="api-make")
                self.secret = gr.Textbox(
                    label="The new key. It is shown only once: copy it now.",
                    buttons=["copy"],
                    interactive=False,
                    visible=False,
                    elem_id="api-secret",
                )
                self.which = gr.Dropdown([], label="Revoke a key", value=None, elem_id="api-which")
                button = small_button("Revoke", elem_id="api-revoke")
                self.confirmation = Confirmation.build(button, "Revoke it", "Keep it")

    def wire(self) -> None:
        outputs: list[Block] = [self.switch_box, self.state, self.keys, self.secret, self.which]
        outputs += [self.confirmation.shown, self.curl, self.python, self.name]
        # A key is shown once, so a late refresh must not remove it.
        self.on(self.tab.select, self.refresh, (), outputs, guard=REFRESH)
        turned = [self.switch_box, self.state]
        turn = self.switch_box.input
        self.on(turn, self.switch, self.switch_box, turned, mode="always_last", guard=ACT)
        making = [self.make_button.click, self.name.submit]
        self.on(making, self.make, self.name, outputs, guard=ACT)
        which = self.which
        self.confirm(self.confirmation, self.revoke, which, outputs, ask=self.ask, guard=ACT)

    def shown(self, address: str, secret: str = "") -> Updates:
        """Everything that the tab shows. `secret` is the key that was just made."""
        keys, model = self.programs.keys.list(), self.session.current.info.name
        key = secret or NO_KEY
        return {
            **self.switched(address),
            self.keys: template("keys.html", keys=keys, moment=moment),
            self.secret: gr.update(value=secret, visible=bool(secret)),
            self.which: gr.update(choices=[(key.name, key.id) for key in keys], value=None),
            self.confirmation.shown: gr.update(visible=False),
            self.curl: curl_example(address, model, key),
            self.python: python_example(address, model, key),
        }

    def switched(self, address: str) -> Updates:
        on, always = self.programs.on, self.programs.always
        state = template("api_state.html", on=on, always=always, address=address)
        return {self.switch_box: on, self.state: state}

    def refresh(self, request: gr.Request) -> Updates:
        return self.shown(address_of(request))

    def switch(self, request: gr.Request, on: bool) -> Updates:
        self.programs.keys.switch(on)
        return self.switched(address_of(request))

    def make(self, request: gr.Request, name: str) -> Updates:
        _, secret = self.programs.keys.make(name)
        return {**self.shown(address_of(request), secret), self.name: ""}

    def ask(self, which: str | None) -> Updates:
        return {self.confirmation.shown: gr.update(visible=bool(which))}

    def revoke(self, request: gr.Request, which: str | None) -> Updates:
        with notify_errors():
            self.programs.revoke(which or "")
        return self.refresh(request)
