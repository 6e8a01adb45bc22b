"""The components of the chat, and how they show a conversation: the stored messages, then the
growing answer, which arrives as a stream (app/web/stream.py).

`Session.drawn` remembers which messages each page has drawn, so that none is sent twice. A page
that has drawn other messages asks for the whole conversation. Each page also knows the
conversation's revision, and so notices what other pages change.
"""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import gradio as gr

from app.service.answering import Answer
from app.service.history import settings_of
from app.service.preferences import Preferences
from app.service.session import Session
from app.service.why import server_sentence
from app.web import header, render
from app.web.kit import Memory, Tab, Updates, hide, html, notify_errors, numbered
from app.web.metrics_panel import panel, panel_values
from app.web.render import remarks
from app.web.tabs import settings
from app.web.tabs.composer import Composer
from app.web.tabs.settings import Settings
from app.web.tabs.welcome import RaceView, welcome
from app.web.token_view import token_view
from engine.compare import Speedup
from engine.errors import Busy, StorageError
from engine.metrics import Metrics, summarise
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
"""How complete answers end."""
Drawn = tuple[tuple[str, int], ...]
"""The messages that a page has drawn: the id of each, and a digest of the content it was sent."""


def token_value(
    session: Session,
    page: str,
    messages: Sequence[StoredMessage],
    answer: Answer | None = None,
    adopted: str = "",
    continuable: bool = False,
    notes: render.Remarks = render.NO_REMARKS,
) -> render.Data:
    """The value of the token view: the messages that it has not drawn, and the answer to follow.

    `adopted` is the id of the message as which an answer was stored, if the page has already drawn
    all of that answer. `notes` are the remarks on answers, by run.
    """
    now, before = drawn_of(messages, notes), session.drawn.get(page) or ()
    kept = len(commonprefix([(*before, *(now[-1:] if adopted else ())), now]))
    session.drawn[page] = now
    value = numbered(render.transcript(messages, kept, continuable, notes))
    if adopted:
        value["adopt"] = render.about(messages[-1], messages[:-1], continuable, notes)
    if answer is not None:
        request = answer.target
        further = {"on": True} if request is not None and request.continues else {}
        value["stream"] = {"token": answer.token, **further}
    return value


def drawn_of(messages: Sequence[StoredMessage], notes: render.Remarks) -> Drawn:
    """What a page has drawn once it was sent these messages."""

    def digest(message: StoredMessage) -> int:
        remark = repr(notes.get(message.run_id or ""))
        return hash((len(message.content), len(message.pieces or ()), message.versions, remark))

    return tuple((message.id, digest(message)) for message in messages)


def watched(session: Session, owner: str, conversation: str | None) -> render.Data:
    """The token and the revision with which a page notices that another page changed the
    conversation, or the list of conversations (THE_LIST)."""
    if conversation is None:
        return {}
    revision = session.chat.revision(owner, conversation)
    return {
        "watch": {"token": session.change_tokens.token(owner, conversation), "revision": revision}
    }


def messages_and_answer(
    session: Session, owner: str, conversation: str | None
) -> tuple[Sequence[StoredMessage], Answer | None]:
    """The messages of a conversation, and its growing answer. The part of that answer that is
    already stored is left out, because its stream sends all of it."""
    if not conversation:
        return (), None
    answer = session.generations.find(owner, conversation)
    store, request = session.chat.conversations(owner), answer.target if answer else None
    if request is not None and request.after is None:
        return (), answer
    last = request.after if request else None
    if last and not store.has(conversation, last):
        last = None
    return store.messages(conversation, to=last or None), answer


def may_continue(session: Session, owner: str, messages: Sequence[StoredMessage]) -> bool:
    """Whether the last answer is incomplete: stopped, cut off, or ended by a limit."""
    if not messages or messages[-1].role == "user" or messages[-1].run_id is None:
        return False
    try:
        finish = Traces(session.database, owner).load(messages[-1].run_id).finish
    except StorageError:
        return False
    return finish not in COMPLETE


def viewed(
    session: Session, owner: str, page: str, conversation: str | None
) -> tuple[render.Data, bool, bool]:
    """The value of the token view for a conversation, whether the conversation has messages, and
    whether an answer is growing."""
    # The revision is read first, so that the page looks again for any later change.
    watch = watched(session, owner, conversation)
    messages, answer = messages_and_answer(session, owner, conversation)
    continuable = answer is None and may_continue(session, owner, messages)
    notes = remarks(session.database, owner, conversation)
    value = token_value(session, page, messages, answer, continuable=continuable, notes=notes)
    return {**value, **watch}, bool(messages), answer is not None


def undo(token: str, text: str) -> dict[str, object]:
    """An offer to undo, as part of the token view's value. The page shows it for some seconds."""
    return {"undo": {"token": token, "text": text}}


def last_figures(session: Session, owner: str, conversation: str | None) -> render.Data:
    """The values of the panel for the last answer that a conversation has stored."""
    messages = session.chat.conversations(owner).messages(conversation) if conversation else ()
    run_id = next((m.run_id for m in reversed(messages) if m.run_id), None)
    if run_id is None:
        return panel_values(None)
    store = Traces(session.database, owner)
    trace, run = store.get(run_id), store.load(run_id)
    known = Speedup(trace.speedup, trace.decode_speedup) if trace.speedup else None
    metrics, last = summarise(run), settings_of(run.parts[-1] if run.parts else run)
    text = ending(run.finish, metrics, last.sampling.seed if last else None)
    return panel_values(metrics, run.steps, known, text, server_sentence(run))


def ending(finish: str | None, metrics: Metrics, seed: int | None, dropped: int = 0) -> str:
    """A summary of an answer: how it ended, its tokens, its seed, and how many older messages did
    not fit the context."""
    parts = [ENDINGS.get(finish or "", "")]
    parts.append(f"{metrics.tokens:,} tokens in {metrics.forwards:,} steps")
    parts.append("" if seed is None else f"seed {seed}")
    parts.append(f"{dropped} older messages did not fit the context" if dropped else "")
    return " · ".join(part for part in parts if part)


class ChatView(Tab):
    """The components of the chat. `current` holds the id of the open conversation. `shown` updates
    the components in `stored`, and `open` those in `opened`."""

    controls: Settings

    def __init__(self, session: Session, memory: gr.BrowserState, current: gr.State) -> None:
        super().__init__(session, memory)
        self.current = current
        with gr.Column(scale=6, min_width=420, elem_classes="talk"):
            self.empty, self.examples = welcome(session.models)
            with self.empty:
                self.race = RaceView(session, memory)
            self.tokens: Any = token_view(chat=True, elem_id="tokens", elem_classes="transcript")
            self.proof = html(elem_id="proof")
            self.composer = Composer(session, memory)
            self.temperature = settings.temperature(session)
        with gr.Column(scale=3, min_width=300, elem_classes="live"):
            header.bar()
            self.figures = panel(elem_id="figures")
        composer = self.composer
        self.stored = [self.tokens, self.empty, self.figures, composer.send, composer.stop]
        self.opened = [self.current, composer.channels["place"], self.memory]

    def open(self, page: str, memory: Memory, conversation: str | None) -> Updates:
        """Open a conversation on a page, or none. The composer learns this in the same update,
        because a message for a conversation that is not open is refused. The browser remembers it,
        and opens the conversation again after a reload."""
        self.session.viewing[page] = conversation
        return {
            self.current: conversation,
            self.composer.channels["place"]: {"conversation": conversation},
            self.memory: {**(memory or {}), "conversation": conversation},
        }

    def shown(self, owner: str, page: str, conversation: str | None) -> Updates:
        """Show a conversation. The figures are those of its last stored answer; while an answer
        grows, its stream sends the figures."""
        value, has_messages, growing = viewed(self.session, owner, page, conversation)
        values = panel_values(None)
        if not growing:
            with notify_errors():
                values = last_figures(self.session, owner, conversation)
        return {
            self.tokens: value,
            self.empty: gr.update(visible=not has_messages),
            self.figures: values,
            **self.working(growing or self.session.tasks.busy(owner, conversation or "")),
        }

    def ended(self, page: str, answer: Answer, drawn: int) -> Updates:
        """Show an answer that is over, on a page that has drawn `drawn` of its tokens. If these are
        all of them, next to nothing changes."""
        owner, conversation = answer.owner, answer.conversation
        watch = watched(self.session, owner, conversation)
        messages, other = messages_and_answer(self.session, owner, conversation)
        complete = drawn == answer.tokens and messages and messages[-1].id == answer.message_id
        if other is not None or not complete:
            return self.shown(owner, page, conversation)
        finish = answer.update.finish if answer.update else None
        value = token_value(
            self.session,
            page,
            messages,
            adopted=answer.message_id,
            continuable=finish not in COMPLETE,
            notes=remarks(self.session.database, owner, conversation),
        )
        return {self.tokens: {**value, **watch}, **self.working(False)}

    def blank(self, page: str) -> Updates:
        return {
            self.tokens: token_value(self.session, page, ()),
            self.empty: hide(),
            self.figures: panel_values(None),
            **self.working(False),
        }

    def working(self, busy: bool) -> Updates:
        composer = self.composer
        return {composer.send: gr.update(visible=not busy), composer.stop: gr.update(visible=busy)}

    def ready(self, values: Sequence[object]) -> tuple[str, Preferences]:
        """The system prompt and the preferences. Raises SettingError if the loaded models cannot
        follow them, so that nothing is stored or changed for an answer that cannot come."""
        system, preferences = self.controls.read(values)
        self.session.stacks.check(preferences.chosen(), preferences.generation.sampling)
        return system, preferences

    def answering(self, owner: str, conversation: str | None) -> bool:
        """Whether an answer is growing, which would not see a new message."""
        return bool(conversation and self.session.generations.find(owner, conversation))

    def alone(self, owner: str, conversation: str | None) -> None:
        """Raise Busy while an answer is growing."""
        if self.answering(owner, conversation):
            raise Busy("The last message is still being answered. Wait for the end, or press Stop.")

    def refused(self, owner: str, page: str, conversation: str | None) -> Updates:
        """The updates for a page whose event was refused. If another page has begun an answer, this
        page now shows it, with its Stop button."""
        if self.answering(owner, conversation):
            with notify_errors():
                return self.shown(owner, page, conversation)
        return {}

    def begin(self, owner: str, page: str, conversation: str, preferences: Preferences) -> Updates:
        """Begin an answer, and show it on the page that requested it."""
        self.session.viewing[page] = conversation
        self.session.generations.start(owner, conversation, preferences)
        return {**self.shown(owner, page, conversation), self.proof: ""}
