"""Why a token was fast: what the token view asks for while somebody points at a token.

`explain` in assets/chat/why.js asks by an event of the token view, and is answered by the value of
a component that shows nothing. The owner is known as for any event; ids of runs of others do not
exist for them.
"""

from contextlib import suppress
from itertools import count

import gradio as gr

from app.service.session import Session
from app.service.why import Data
from app.web.wiring import AT_ONCE, Memory, owner_of, sent
from engine.errors import StrataError

TELL = """watch("value", () => {
  const told = props.value;
  if (told && told.run) document.dispatchEvent(new CustomEvent("strata:why", { detail: told }));
});"""
NUMBERS = count(1)
"""No two answers are equal: an equal one would not be looked at."""


def build() -> gr.HTML:
    """The component that answers."""
    return gr.HTML(
        value={}, html_template="", js_on_load=TELL, elem_id="why", visible="hidden", padding=False
    )


def asked(data: gr.EventData) -> tuple[str, int, int]:
    """The run, step and token that a page asks about; what is none of these is nobody's."""
    said = sent(data)
    run, step, token = said.get("run"), said.get("step"), said.get("token", 0)
    numbers = (step if isinstance(step, int) else -1, token if isinstance(token, int) else -1)
    return run if isinstance(run, str) else "", *numbers


def wire(session: Session, tokens: gr.HTML, answer: gr.HTML, memory: gr.BrowserState) -> None:
    """Answer what the token view asks."""

    def explain(data: gr.EventData, request: gr.Request, memory: Memory) -> Data:
        run, step, token = asked(data)
        told: Data = {"run": run, "step": step, "token": token, "recorded": False}
        # A run that is gone has nothing to tell, and who points at it is not disturbed.
        with suppress(StrataError):
            told = session.why.explain(owner_of(session, memory, request), run, step, token)
        return {**told, "number": next(NUMBERS)}

    tokens.explain(explain, memory, answer, trigger_mode="multiple", **AT_ONCE)
