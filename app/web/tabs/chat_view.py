"""The chat's components, and how they show a conversation: its stored messages, then the answer
under way, which arrives as a stream (app/web/stream.py).

A page keeps what it has drawn. `Session.drawn` remembers which messages these are, so none is sent
twice. A page that has drawn something else asks for the whole conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from os.path import commonprefix

import gradio as gr
from gradio.blocks import Block

from app.service.generation import Answer
from app.service.recorder import Update
from app.service.session import Session
from app.web import render
from app.web.metrics_panel import panel_values
from app.web.wiring import Updates
from engine.compare import Speedup
from engine.metrics import summarise
from storage.conversations import StoredMessage
from storage.traces import Traces

ENDINGS = {
    "eos": "the model ended its answer",
    "stop": "ended at a stop string",
    "length": "ended at the length limit",
    "context": "ended because the context is full",
    "cancelled": "stopped",
}
TOKENS, MARKDOWN = "Tokens", "Markdown"
NUMBERS = count()
"""No two values of the token view are equal: an equal one would not be looked at."""


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


def stored(parts: Parts) -> list[Block]:
    """The components that `shown` updates."""
    views = [parts.tokens, parts.bubbles, parts.empty]
    return [*views, parts.send, parts.stop, parts.again, parts.edit, parts.prove]


def view_of(session: Session, request: gr.Request) -> str:
    """The view that a page has chosen."""
    return session.views.get(request.session_hash or "", TOKENS)


def told_tokens(
    session: Session,
    request: gr.Request,
    messages: Sequence[StoredMessage],
    answer: Answer | None = None,
    adopted: str = "",
) -> render.Data:
    """What the token view is sent: the messages that it has not drawn, and which answer to follow.

    `adopted` is the message that an answer was stored as, where the page has drawn all of it.
    In the Markdown view it shows nothing, and an answer's tokens go there.
    """
    here, seen = request.session_hash or "", view_of(session, request) == TOKENS
    before, now = session.drawn.get(here) or (), tuple(m.id for m in messages) if seen else ()
    kept = len(commonprefix([(*before, *([adopted] if adopted else ())), now]))
    session.drawn[here] = now
    value = {**render.transcript(messages if seen else (), kept), "number": next(NUMBERS)}
    if adopted:
        value["adopt"] = adopted
    if answer is not None:
        value["stream"] = {"token": answer.token, "shown": seen}
    return value


def spoken(
    session: Session, owner: str, conversation: str | None
) -> tuple[Sequence[StoredMessage], Answer | None]:
    """A conversation's messages, and the answer under way. What is stored of that one is left out,
    as its stream brings all of it."""
    if not conversation:
        return (), None
    answer = session.generations.find(owner, conversation)
    store, wanted = session.chat.conversations(owner), answer.wanted if answer else None
    if wanted is not None and wanted.after is None:
        return (), answer
    there = wanted and wanted.after and store.has(conversation, wanted.after)
    return store.messages(conversation, to=wanted.after if wanted and there else None), answer


def viewed(
    session: Session,
    parts: Parts,
    request: gr.Request,
    messages: Sequence[StoredMessage],
    answer: Answer | None,
) -> Updates:
    """The messages in the view that is looked at. The hidden one holds nothing: what it would
    render, nobody has asked to see."""
    seen = view_of(session, request) == MARKDOWN
    return {
        parts.tokens: told_tokens(session, request, messages, answer),
        parts.bubbles: render.bubbles(messages if seen else ()),
    }


def shown(
    session: Session, parts: Parts, request: gr.Request, owner: str, conversation: str | None
) -> Updates:
    """Everything that shows a conversation, as it is stored or grows."""
    messages, answer = spoken(session, owner, conversation)
    busy = answer is not None or session.tasks.busy(owner, conversation or "")
    return {
        **viewed(session, parts, request, messages, answer),
        parts.empty: gr.update(visible=not messages),
        **working(parts, busy),
    }


def ended(
    session: Session, parts: Parts, request: gr.Request, answer: Answer, drawn: int
) -> Updates:
    """What an answer that is over changes on a page that has drawn so many of its tokens: as good
    as nothing, where these are all."""
    messages, other = spoken(session, answer.owner, answer.conversation)
    complete = drawn == answer.tokens and messages and messages[-1].id == answer.message_id
    if other is not None or not complete:
        return shown(session, parts, request, answer.owner, answer.conversation)
    return {
        parts.tokens: told_tokens(session, request, messages, adopted=answer.message_id),
        **working(parts, False),
    }


def blank(session: Session, parts: Parts, request: gr.Request) -> Updates:
    """A conversation of which nothing can be shown."""
    return {
        parts.tokens: told_tokens(session, request, ()),
        parts.bubbles: render.bubbles(()),
        parts.empty: gr.update(visible=False),
        parts.figures: gr.skip(),
        **working(parts, False),
    }


def last_figures(session: Session, owner: str, conversation: str | None) -> render.Data:
    """The panel's values for the run behind a stored conversation's last answer."""
    messages = session.chat.conversations(owner).messages(conversation) if conversation else ()
    run_id = next((m.run_id for m in reversed(messages) if m.run_id), None)
    if run_id is None:
        return panel_values(None)
    store = Traces(session.database, owner)
    trace, run = store.get(run_id), store.load(run_id)
    known = Speedup(trace.speedup, trace.decode_speedup) if trace.speedup else None
    return panel_values(summarise(run), run.steps, known, ENDINGS.get(run.finish or "", ""))


def working(parts: Parts, busy: bool) -> Updates:
    """Send or Stop, and whether the actions can be used."""
    return {
        parts.send: gr.update(visible=not busy),
        parts.stop: gr.update(visible=busy),
        **{b: gr.update(interactive=not busy) for b in (parts.again, parts.edit, parts.prove)},
    }


def ending(update: Update) -> str:
    """One line about the answer: how it ended, its seed, what was left out."""
    words = [ENDINGS.get(update.finish or "", "")] if update.finish else []
    words.append(f"{update.metrics.tokens:,} tokens in {update.metrics.forwards:,} steps")
    words.append(f"seed {update.seed}")
    if update.dropped:
        words.append(f"{update.dropped} older messages did not fit the context")
    return " · ".join(word for word in words if word)
