"""Replay: an answer step by step, with the draft tree of each step.

The page draws it from JSON alone (assets/replay.js). What it shows comes in pages of some steps
(app/service/why.py), asked for when they are wanted, so that a long answer costs no more than a
short one. All text is data, and becomes text nodes.
"""

from dataclasses import dataclass
from functools import cache
from itertools import count

import gradio as gr

from app.service.session import Session
from app.service.why import PAGE, Data
from app.web import render
from app.web.tabs.why import asked
from app.web.verdicts import title_of
from app.web.wiring import AT_ONCE, Memory, Updates, owner_of, told, warn
from assets import ASSETS
from engine.errors import StrataError

TEMPLATE = (
    '<section class="replay-view" tabindex="-1" aria-label="Replay" hidden>'
    '<header><h2>Replay</h2><p class="fine what"></p></header>'
    '<div class="keys">'
    '<button type="button" class="play" aria-label="Play">Play</button>'
    '<button type="button" class="back" aria-label="One step back">‹</button>'
    '<input type="range" min="0" max="0" value="0" aria-label="Step">'
    '<button type="button" class="on" aria-label="One step on">›</button>'
    '<output class="number"></output></div>'
    '<p class="sofar" aria-label="The answer up to this step"></p>'
    '<div class="tree" role="img"></div>'
    '<p class="told fine" aria-live="polite"></p>'
    '<ul class="keymap fine"></ul>'
    "</section>"
)
NUMBERS = count(1)
"""No two values are equal: an equal one would not be looked at."""


@dataclass(slots=True)
class Parts:
    """The button that opens the replay of the run that is shown, and the replay."""

    open: gr.Button
    view: gr.HTML


@cache
def script() -> str:
    """The replay's script."""
    return (ASSETS / "replay.js").read_text(encoding="utf-8")


def build() -> Parts:
    """The button, and the replay, which is hidden until it shows something."""
    button = gr.Button("Replay its steps", size="sm", min_width=120, elem_id="open-replay")
    view = gr.HTML(
        value={},
        html_template=TEMPLATE,
        js_on_load=script(),
        names=render.names(),
        elem_id="replay",
        apply_default_css=False,
        padding=False,
    )
    return Parts(button, view)


def opened(session: Session, owner: str, run_id: str, step: int, fresh: bool) -> Data:
    """The page of a run that holds a step; `fresh` begins a replay there. Raises StorageError."""
    page = session.why.page(owner, run_id, max(0, step) // PAGE * PAGE)
    sources = {guess[2] for each in page["steps"] for guess in each["guesses"] or ()}
    sources |= {source for each in page["steps"] for _, source, _ in each["said"]}
    return {
        **page,
        "method": title_of(page["method"]),
        "names": render.drafts(sources),
        "size": PAGE,
        "at": step if fresh else None,
        "number": next(NUMBERS),
    }


def wire(session: Session, parts: Parts, shown: gr.State, memory: gr.BrowserState) -> None:
    """Open the run that is shown, and send the pages that the replay asks for."""

    def begin(request: gr.Request, run_id: str | None, memory: Memory) -> object:
        if not run_id:
            warn("Choose a run in the table first.")
            return gr.skip()
        with told():
            return opened(session, owner_of(session, memory, request), run_id, 0, fresh=True)
        return gr.skip()

    def page(data: gr.EventData, request: gr.Request, memory: Memory) -> object:
        run_id, step, _ = asked(data)
        with told():
            return opened(session, owner_of(session, memory, request), run_id, step, fresh=False)
        return gr.skip()

    parts.open.click(begin, [shown, memory], parts.view, **AT_ONCE)
    parts.view.wanted(page, memory, parts.view, **AT_ONCE)


def wire_chat(
    session: Session,
    parts: Parts,
    tokens: gr.HTML,
    tabs: gr.Tabs,
    tab: str,
    shown: gr.State,
    memory: gr.BrowserState,
) -> None:
    """Open the replay of an answer from the chat; it is in the tab of that id, which then shows
    this run."""

    def jump(data: gr.EventData, request: gr.Request, memory: Memory) -> Updates:
        run_id, step, _ = asked(data)
        try:
            found = opened(session, owner_of(session, memory, request), run_id, step, fresh=True)
        except StrataError as error:
            warn(str(error))
            return {tabs: gr.skip()}
        return {parts.view: found, tabs: gr.update(selected=tab), shown: run_id}

    tokens.replay(jump, memory, [parts.view, tabs, shown], **AT_ONCE)
