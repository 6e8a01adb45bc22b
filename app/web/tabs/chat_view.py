"""The chat's components, and how they show a conversation: its stored messages, then the answer
under way, which arrives as a stream (app/web/stream.py).

A page keeps what it has drawn. `Session.drawn` remembers which messages these are, so none is sent
twice. A page that has drawn something else asks for the whole conversation. Each page also knows
the conversation's revision, by which it notices what other pages do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from os.path import commonprefix

import gradio as gr
from gradio.blocks import Block

from app.service.generation import Answer
from app.service.recorder import Update
from app.service.served import server_words
from app.service.session import Session
from app.web import render
from app.web.metrics_panel import panel_values
from app.web.remarks import remarks
from app.web.tabs.composer import Composer
from app.web.wiring import Updates
from engine.compare import Speedup
from engine.errors import StorageError
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
COMPLETE = ("eos", "stop")
"""Endings of answers that there is no use in continuing."""
Drawn = tuple[tuple[str, int], ...]
"""Messages that a page has drawn: the id of each, and a digest of what it was told of it."""
NUMBERS = count()
"""No two values of the token view are equal: an equal one would not be looked at."""


@dataclass(slots=True)
class Parts:
    """The tab's components."""

    tokens: gr.HTML
    empty: gr.Column
    examples: list[gr.Button]
    box: gr.Textbox
    send: gr.Button
    stop: gr.Button
    proof: gr.HTML
    figures: gr.HTML
    editing: gr.State
    race: gr.HTML
    written: Composer


def stored(parts: Parts) -> list[Block]:
    """The components that `shown` updates."""
    return [parts.tokens, parts.empty, parts.send, parts.stop]


def told_tokens(
    session: Session,
    request: gr.Request,
    messages: Sequence[StoredMessage],
    answer: Answer | None = None,
    adopted: str = "",
    goes_on: bool = False,
    said: render.Said = render.NOTHING_SAID,
) -> render.Data:
    """What the token view is sent: the messages that it has not drawn, and which answer to follow.

    `adopted` is the message that an answer was stored as, where the page has drawn all of it;
    `said` are remarks on answers, by their runs.
    """
    here, now = request.session_hash or "", drawn_of(messages, said)
    before = session.drawn.get(here) or ()
    kept = len(commonprefix([(*before, *(now[-1:] if adopted else ())), now]))
    session.drawn[here] = now
    value = {**render.transcript(messages, kept, goes_on, said), "number": next(NUMBERS)}
    if adopted:
        value["adopt"] = render.about(messages[-1], goes_on, said)
    if answer is not None:
        wanted = answer.wanted
        further = {"on": True} if wanted is not None and wanted.going_on else {}
        value["stream"] = {"token": answer.token, **further}
    return value


def drawn_of(messages: Sequence[StoredMessage], said: render.Said) -> Drawn:
    """What a page that was told these messages has drawn."""

    def digest(message: StoredMessage) -> int:
        remark = repr(said.get(message.run_id or ""))
        return hash((len(message.content), len(message.pieces or ()), message.versions, remark))

    return tuple((message.id, digest(message)) for message in messages)


def watched(session: Session, owner: str, conversation: str | None) -> render.Data:
    """By which a page notices that another one changed the conversation."""
    if not conversation:
        return {}
    revision = session.chat.revision(owner, conversation)
    return {"watch": {"token": session.watches.name(owner, conversation), "revision": revision}}


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


def may_go_on(session: Session, owner: str, messages: Sequence[StoredMessage]) -> bool:
    """Whether the last answer ended before its end: it was stopped, cut off or is too long."""
    if not messages or messages[-1].role == "user" or messages[-1].run_id is None:
        return False
    try:
        finish = Traces(session.database, owner).load(messages[-1].run_id).finish
    except StorageError:
        return False
    return finish not in COMPLETE


def viewed(
    session: Session, request: gr.Request, owner: str, conversation: str | None
) -> tuple[render.Data, bool, bool]:
    """A conversation for the token view, as it is stored or grows; whether there is something in
    it, and whether an answer is under way."""
    watch = watched(session, owner, conversation)  # First: what comes after it is looked at again.
    messages, answer = spoken(session, owner, conversation)
    goes_on = answer is None and may_go_on(session, owner, messages)
    said = remarks(session.database, owner, conversation)
    value = told_tokens(session, request, messages, answer, goes_on=goes_on, said=said)
    return {**value, **watch}, bool(messages), answer is not None


def shown(
    session: Session, parts: Parts, request: gr.Request, owner: str, conversation: str | None
) -> Updates:
    """Everything that shows a conversation, as it is stored or grows."""
    value, there, growing = viewed(session, request, owner, conversation)
    return {
        parts.tokens: value,
        parts.empty: gr.update(visible=not there),
        **working(parts, growing or session.tasks.busy(owner, conversation or "")),
    }


def ended(
    session: Session, parts: Parts, request: gr.Request, answer: Answer, drawn: int
) -> Updates:
    """What an answer that is over changes on a page that has drawn so many of its tokens: as good
    as nothing, where these are all."""
    owner, conversation = answer.owner, answer.conversation
    watch = watched(session, owner, conversation)
    messages, other = spoken(session, owner, conversation)
    complete = drawn == answer.tokens and messages and messages[-1].id == answer.message_id
    if other is not None or not complete:
        return shown(session, parts, request, owner, conversation)
    finish = answer.update.finish if answer.update else None
    value = told_tokens(
        session,
        request,
        messages,
        adopted=answer.message_id,
        goes_on=finish not in COMPLETE,
        said=remarks(session.database, owner, conversation),
    )
    return {parts.tokens: {**value, **watch}, **working(parts, False)}


def blank(session: Session, parts: Parts, request: gr.Request) -> Updates:
    """A conversation of which nothing can be shown."""
    return {
        parts.tokens: told_tokens(session, request, ()),
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
    words, served = ENDINGS.get(run.finish or "", ""), server_words(run)
    return panel_values(summarise(run), run.steps, known, words, served)


def working(parts: Parts, busy: bool) -> Updates:
    """Send or Stop."""
    return {parts.send: gr.update(visible=not busy), parts.stop: gr.update(visible=busy)}


def ending(update: Update) -> str:
    """What there is to say of the answer: what guessing saved; how it ended, its seed, what was
    left out."""
    words = [ENDINGS.get(update.finish or "", "")] if update.finish else []
    words.append(f"{update.metrics.tokens:,} tokens in {update.metrics.forwards:,} steps")
    words.append(f"seed {update.seed}")
    if update.dropped:
        words.append(f"{update.dropped} older messages did not fit the context")
    return " · ".join(word for word in words if word)
