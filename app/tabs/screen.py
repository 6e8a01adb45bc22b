"""The chat's components, and what they show: a stored conversation, or an answer as it grows."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app import render
from app.comparison import Pace
from app.panel import panel_values
from app.session import Session
from app.verdicts import waiting_line
from app.writer import Update
from engine.compare import Speedup
from engine.metrics import summarise
from engine.queue import Waiting
from engine.types import Prefill
from storage.conversations import StoredMessage
from storage.traces import Traces

ENDINGS = {
    "eos": "the model ended its answer",
    "stop": "ended at a stop string",
    "length": "ended at the length limit",
    "context": "ended because the context is full",
    "cancelled": "stopped",
}
FIGURES_SECONDS = 0.5
TOKENS, MARKDOWN = "Tokens", "Markdown"


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    view: gr.Radio
    tokens: gr.HTML
    bubbles: gr.Chatbot
    empty: gr.Column
    examples: list[gr.Button]
    box: gr.Textbox
    send: gr.Button
    stop: gr.Button
    again: gr.Button
    edit: gr.Button
    prove: gr.Button
    proof: gr.HTML
    figures: gr.HTML
    editing: gr.State
    pending: gr.State


def stored(parts: Parts) -> list[Any]:
    """The components that `shown` updates."""
    views = [parts.tokens, parts.bubbles, parts.empty]
    return [*views, parts.send, parts.stop, parts.again, parts.edit, parts.prove]


def view_of(session: Session, request: gr.Request) -> str:
    """The view that a page has chosen."""
    return session.views.get(request.session_hash or "", TOKENS)


def viewed(
    parts: Parts, view: str, messages: Sequence[StoredMessage], growing: str | None = None
) -> dict[Any, Any]:
    """The messages in the view that is looked at. The hidden one holds nothing: what it would
    render, nobody has asked to see."""
    return {
        parts.tokens: render.transcript(messages if view == TOKENS else ()),
        parts.bubbles: render.bubbles(messages, growing) if view == MARKDOWN else [],
    }


def shown(
    session: Session, parts: Parts, request: gr.Request, owner: str, conversation: str | None
) -> dict[Any, Any]:
    """Everything that shows a conversation, as it is stored."""
    messages = session.conversations(owner).messages(conversation) if conversation else ()
    busy = conversation is not None and session.runs.busy(owner, conversation)
    return {
        **viewed(parts, view_of(session, request), messages),
        parts.empty: gr.update(visible=not messages),
        **working(parts, busy),
    }


def blank(parts: Parts) -> dict[Any, Any]:
    """A conversation of which nothing can be shown."""
    return {
        parts.tokens: render.transcript(()),
        parts.bubbles: render.bubbles(()),
        parts.empty: gr.update(visible=False),
        parts.figures: gr.skip(),
        **working(parts, False),
    }


def last_figures(session: Session, owner: str, conversation: str | None) -> dict[str, Any]:
    """The panel's values for the run behind a stored conversation's last answer."""
    messages = session.conversations(owner).messages(conversation) if conversation else ()
    run_id = next((m.run_id for m in reversed(messages) if m.run_id), None)
    if run_id is None:
        return panel_values(None)
    store = Traces(session.database, owner)
    run, steps = store.get(run_id), store.steps(run_id)
    first = steps[0].seconds if steps else 0.0
    prefill = Prefill(run.prompt_tokens, run.reused_tokens, max(0.0, run.ttft_seconds - first))
    known = Speedup(run.speedup, run.decode_speedup) if run.speedup else None
    figures = summarise(prefill, steps)
    return panel_values(figures, steps, known, ENDINGS.get(run.finish or "", ""))


def working(parts: Parts, busy: bool) -> dict[Any, Any]:
    """Send or Stop, and whether the actions can be used."""
    return {
        parts.send: gr.update(visible=not busy),
        parts.stop: gr.update(visible=busy),
        **{b: gr.update(interactive=not busy) for b in (parts.again, parts.edit, parts.prove)},
    }


def ending(update: Update) -> str:
    """One line about the answer: how it ended, its seed, what was left out."""
    words = [ENDINGS.get(update.finish or "", "")] if update.finish else []
    words.append(f"{update.metrics.tokens:,} tokens from {update.metrics.forwards:,} forwards")
    words.append(f"seed {update.seed}")
    if update.dropped:
        words.append(f"{update.dropped} older messages did not fit the context")
    return " · ".join(word for word in words if word)


class Stream:
    """What each update changes on the screen: little, as it is sent many times a second."""

    OVERLAP = 12

    def __init__(
        self, session: Session, parts: Parts, messages: Sequence[StoredMessage], view: str
    ) -> None:
        self.session, self.parts, self.messages, self.view = session, parts, messages, view
        self.sent: deque[int] = deque([0], maxlen=self.OVERLAP)
        self.waited = False
        self.figures_due = Pace(FIGURES_SECONDS)

    def changes(self, update: Update | Waiting, view: str) -> dict[Any, Any]:
        """The changes for a page that shows `view`, "" for another conversation. A view that was
        hidden until now is given the earlier messages too, and the other one is emptied."""
        if isinstance(update, Waiting):
            self.waited = True
            return {self.parts.proof: waiting_line(update)} if view else {}
        changes: dict[Any, Any] = {}
        if view != self.view:
            self.view, self.sent = view, deque([0], maxlen=self.OVERLAP)
            if view:
                changes = viewed(self.parts, view, self.messages, update.text)
        if self.waited and view:
            self.waited, changes[self.parts.proof] = False, ""
        if view == TOKENS:
            before = changes.get(self.parts.tokens)
            changes[self.parts.tokens] = render.growing(update.pieces, self.sent[0], before)
            self.sent.append(len(update.pieces))
        elif view == MARKDOWN:
            changes[self.parts.bubbles] = render.bubbles(self.messages, update.text)
        if view and (update.finish or self.figures_due.due()):
            words = ending(update)
            changes[self.parts.figures] = panel_values(update.metrics, update.steps, ended=words)
        return changes
