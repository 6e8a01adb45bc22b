"""Why a token was fast, and the replay of an answer. Both show the draft trees of the steps.

`explain` in assets/chat/why.js sends a request while the user points at a token. The replay
(assets/replay.js) opens over the page, from the chat or from Diagnostics. It receives the steps in
pages (app/service/why.py) when it needs them, so a long answer costs no more than a short one. Text
travels as data. An owner can see only their own runs.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import gradio as gr

from app.service.session import Session
from app.service.why import PAGE, Data
from app.web import render
from app.web.kit import Payload, Tab, Trigger, channel, html, numbered
from app.web.markup import template
from app.web.run_html import title_of
from assets import read
from engine.errors import StorageError, StrataError


class Why(Tab):
    """The hidden component that brings the reason to the page, at an event of the token view."""

    def __init__(self, session: Session, memory: gr.BrowserState, trigger: Trigger) -> None:
        super().__init__(session, memory)
        self.on(trigger, self.explain, (), channel("why"), mode="multiple")

    def explain(self, owner: str, data: gr.EventData) -> Data:
        """Why a token was fast. A deleted run gives no reason and no notice."""
        sent = Payload(data)
        run, step, token = sent.text("run"), sent.integer("step"), sent.integer("token")
        found: Data = {"run": run, "step": step, "token": token, "recorded": False}
        with suppress(StrataError):
            found = self.session.why.explain(owner, run, step, token)
        return numbered(found)


REPLAY = template("replay.html")


class Replay(Tab):
    """The replay, outside of all tabs. It is closed until an event of the chat (`trigger`) shows an
    answer, or the `button` of Diagnostics the run that is `shown` there."""

    def __init__(
        self,
        session: Session,
        memory: gr.BrowserState,
        trigger: Trigger,
        button: gr.Button,
        shown: gr.State,
    ) -> None:
        super().__init__(session, memory)
        self.view: Any = html(
            value={},
            html_template=REPLAY,
            js_on_load=read("replay.js"),
            names=render.names(),
            elem_id="replay",
            padding=False,
        )
        self.on(button.click, self.begin, shown, self.view)
        self.on(trigger, partial(self.send, True), (), self.view)
        self.on(self.view.wanted, partial(self.send, False), (), self.view)

    def begin(self, owner: str, run_id: str | None) -> Data:
        if not run_id:
            raise StorageError("Choose a run in the table first.")
        return self.opened(owner, run_id, 0, fresh=True)

    def opened(self, owner: str, run_id: str, step: int, fresh: bool) -> Data:
        """The page of steps that holds `step`. `fresh` begins a replay there."""
        page = self.session.why.page(owner, run_id, max(0, step) // PAGE * PAGE)
        sources = {guess[2] for each in page["steps"] for guess in each["guesses"] or ()}
        sources |= {source for each in page["steps"] for _, source, _ in each["tokens"]}
        shown = {"method": title_of(page["method"]), "names": render.drafts(sources)}
        return numbered({**page, **shown, "size": PAGE, "at": step if fresh else None})

    def send(self, fresh: bool, owner: str, data: gr.EventData) -> Data:
        """Begin the replay of an answer, or send further steps of it."""
        sent = Payload(data)
        return self.opened(owner, sent.text("run"), sent.integer("step"), fresh)
