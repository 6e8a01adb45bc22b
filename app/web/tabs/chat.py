"""The Chat tab: the messages with their actions, the composer, and the live figures.

The page shows the stored messages, then the growing answer, which arrives as a stream
(app/web/stream.py). An event from the page names an action and its message
(assets/chat/actions.js). No action destroys anything, and after each one the page shows the
conversation as it then is.

`Session.drawn` remembers which messages each page has drawn, so that none is sent twice. A page
that has drawn other messages asks for the whole conversation. Each page also knows the
conversation's revision, and so notices what other pages change.
"""

from collections.abc import Callable, Iterator, Sequence
from os.path import commonprefix
from typing import Any, get_args

import gradio as gr

from app.service.answering import Answer
from app.service.comparison import Proof
from app.service.current import seen_in
from app.service.history import settings_of
from app.service.preferences import Preferences
from app.service.session import Session
from app.service.tool_calls import Choice, Pending
from app.service.why import server_sentence
from app.web import render
from app.web.kit import (
    AT_ONCE,
    Event,
    Payload,
    Tab,
    Updates,
    Visit,
    explained,
    hide,
    html,
    notify_errors,
    numbered,
    show_notices,
    warn,
)
from app.web.markup import template
from app.web.metrics_panel import panel, panel_values, with_pace
from app.web.render import remarks
from app.web.run_html import proof_line, waiting_line
from app.web.tabs import settings
from app.web.tabs.composer import Composer, ComposerRequest
from app.web.tabs.settings import Settings
from app.web.tabs.welcome import RaceView, welcome
from app.web.token_view import token_view
from engine.compare import Speedup
from engine.errors import Busy, StorageError
from engine.metrics import Metrics, summarise
from engine.queue import Waiting
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
CHOICES: dict[str, Choice] = {choice: choice for choice in get_args(Choice)}
"""What the page may answer to the question about a call."""
DELETED = "The message and what followed it are deleted."
Drawn = tuple[tuple[str, int], ...]
"""The messages that a page has drawn: the id of each, and a digest of the content it was sent."""


def drawn_of(messages: Sequence[StoredMessage], notes: render.Remarks) -> Drawn:
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


def undo(token: str, text: str) -> dict[str, object]:
    """An offer to undo, as part of the token view's value. The page shows it for some seconds."""
    return {"undo": {"token": token, "text": text}}


def ending(finish: str | None, metrics: Metrics, seed: int | None, dropped: int = 0) -> str:
    """A summary of an answer: how it ended, its tokens, its seed, and how many older messages did
    not fit the context."""
    parts = [ENDINGS.get(finish or "", "")]
    parts.append(f"{metrics.tokens:,} tokens in {metrics.forwards:,} steps")
    parts.append("" if seed is None else f"seed {seed}")
    parts.append(f"{dropped} older messages did not fit the context" if dropped else "")
    return " · ".join(part for part in parts if part)


class Chat(Tab):
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
            html(html_template=template("bar.html"), js_on_load=None, elem_id="bar")
            self.figures = panel(elem_id="figures")
        composer = self.composer
        self.stored = [self.tokens, self.empty, self.figures, composer.send, composer.stop]
        self.opened = [self.current, composer.channels["place"], self.memory]

    def wire(self, controls: Settings, with_list: Callable[..., Event]) -> None:
        """Connect the composer, the actions and the views. `with_list` adds the list of
        conversations to the updates of an event."""
        self.controls = controls
        composer, tokens, here = self.composer, self.tokens, self.current
        taken = [*self.stored, *self.opened, self.proof]
        values, sent = controls.inputs, [*taken, composer.channels["sent"]]
        saying = with_list(self.say, values, sent)
        self.on(composer.writer.say, saying, mode="multiple")
        composer.wire(here, controls.system)
        self.on(composer.stop.click, self.stop, here)
        revised = [*taken, composer.channels["revised"]]
        self.on(tokens.revise, with_list(self.revise, values, revised))
        self.on(tokens.act, with_list(self.act, values, taken))
        self.on(tokens.prove, self.prove, here, [*self.stored, self.proof])
        over = with_list(self.over, (), [*self.stored, self.proof])
        self.on(tokens.over, over, mode="multiple")
        self.on(tokens.resend, self.resend, here, tokens)
        attached = composer.channels["attached"]
        self.on(tokens.rewrite, self.rewrite, here, attached, mode="multiple")
        tokens.waiting(None, None, self.proof, js="() => window.strata.line", **AT_ONCE)

    def say(
        self, visit: Visit, data: gr.EventData, conversation: str | None, *values: object
    ) -> Updates:
        """Store a message and begin to answer it. The page learns whether the message was accepted;
        if not, the text stays in the composer. While an answer that another page began is growing,
        the message waits on this page until that answer ends."""
        request, sent = ComposerRequest(data), self.composer.channels["sent"]
        refused: Updates = {sent: {"number": request.number, "ok": False}}
        if not request.about(conversation):
            return refused
        if self.answering(visit.owner, conversation):
            waits = {"number": request.number, "ok": False, "waits": True}
            return {**self.refused(visit, conversation), sent: waits}
        try:
            system, preferences = self.ready(values)
            self.alone(visit.owner, conversation)
            text = self.composer.written(visit.owner, request)
            store, fresh = self.session.chat.conversations(visit.owner), conversation is None
            conversation = self.session.chat.say(visit.owner, conversation, text)
            if fresh:
                store.set_system_prompt(conversation, system)
            updates = self.begin(visit, conversation, preferences)
        except Exception as error:
            warn(explained(error))
            return {**self.refused(visit, conversation), **refused}
        self.session.attachments.drop(visit.owner, request.files)
        return {
            **updates,
            sent: {"number": request.number, "ok": True},
            **self.open(visit, conversation),
        }

    def answer_of(
        self, data: gr.EventData, owner: str, conversation: str | None
    ) -> tuple[Answer | None, int]:
        sent = Payload(data)
        answer = self.session.generations.get(sent.text("token"))
        same = answer is not None and (answer.owner, answer.conversation) == (owner, conversation)
        return answer if same else None, max(0, sent.integer("drawn"))

    def over(self, visit: Visit, data: gr.EventData, conversation: str | None) -> Updates:
        """Show the final state of an answer on a page that has received its last event. A page that
        the stream does not reach asks for it too, maybe before the answer is over."""
        show_notices(self.session, visit.owner)
        answer, drawn = self.answer_of(data, visit.owner, conversation)
        with notify_errors():
            if answer is None or not answer.over:
                return self.shown(visit, conversation)
            if answer.error:
                warn(answer.error)
            left = self.ended(visit, answer, drawn)
            if (update := answer.update) is not None:
                metrics = update.metrics
                text = ending(update.finish, metrics, update.seed, update.dropped)
                served = server_sentence(update.recorder.collector.plan, update.counted)
                values = panel_values(metrics, update.steps, ended=text, server=served)
                left[self.figures] = with_pace(values, seen_in(metrics))
            return {**left, self.proof: ""}
        return {**self.working(False), self.proof: ""}

    def resend(self, visit: Visit, conversation: str | None) -> Updates:
        """Send the whole conversation to a page that has drawn other messages."""
        self.session.drawn.pop(visit.page, None)
        value, _, _ = self.viewed(visit, conversation)
        return {self.tokens: value}

    def stop(self, owner: str, conversation: str | None) -> None:
        if conversation:
            self.session.tasks.stop(owner, conversation)

    def revise(
        self, visit: Visit, data: gr.EventData, conversation: str | None, *values: object
    ) -> Updates:
        """Store another version of a message and begin to answer it. The page learns whether the
        version was accepted; if not, the text stays in the message's editor."""
        request = ComposerRequest(data)
        taken = self.composer.channels["revised"]
        try:
            _, preferences = self.ready(values)
            self.alone(visit.owner, conversation)
            text = self.composer.edited(visit.owner, conversation, request)
            self.session.chat.edit(visit.owner, conversation or "", request.text("message"), text)
            self.session.attachments.drop(visit.owner, request.files)
            updates = self.begin(visit, conversation or "", preferences)
        except Exception as error:
            warn(explained(error))
            refused = self.refused(visit, conversation)
            return {**refused, taken: {"number": request.number, "ok": False}}
        return {**updates, taken: {"number": request.number, "ok": True}}

    def act(
        self, visit: Visit, data: gr.EventData, conversation: str | None, *values: object
    ) -> Updates:
        sent, here = Payload(data), conversation or ""
        try:
            self.alone(visit.owner, conversation)
            act = sent.text("act")
            if act not in ("again", "on", *CHOICES):
                return self.change(visit, here, sent)
            _, preferences = self.ready(values)
            if choice := CHOICES.get(act):
                place = sent.text("message"), sent.integer("call")
                self.session.tool_calls.decide(visit.owner, here, *place, choice, preferences)
                return {**self.shown(visit, here), self.proof: ""}
            if act == "again":
                self.session.chat.again(visit.owner, here, sent.text("message"))
            else:
                self.session.chat.continue_answer(visit.owner, here)
            return self.begin(visit, here, preferences)
        except Exception as error:
            warn(explained(error))
            return self.refused(visit, conversation)

    def change(self, visit: Visit, conversation: str, sent: Payload) -> Updates:
        """Show another version, make a rewritten answer a version of another one, branch, delete or
        undo, then show the conversation."""
        chat, store = self.session.chat, self.session.chat.conversations(visit.owner)
        act, message = sent.text("act"), sent.text("message")
        offer = dict[str, object]()
        if act == "show":
            store.show(conversation, message)
        elif act == "accept":
            store.copy_as_version(conversation, message, sent.text("of"))
        elif act == "branch":
            conversation = store.copy(conversation, message)
        elif act == "remove":
            offer = undo(chat.delete_message(visit.owner, conversation, message), DELETED)
        elif act == "undo":
            conversation = chat.undo(visit.owner, message)
        opened = self.open(visit, conversation)
        seen = self.shown(visit, conversation)
        value = seen[self.tokens]
        assert isinstance(value, dict)
        return {**seen, self.tokens: {**value, **offer}, self.proof: "", **opened}

    def rewrite(self, owner: str, data: gr.EventData, conversation: str | None) -> render.Data:
        return self.composer.rewrite(owner, conversation, ComposerRequest(data))

    def prove(self, owner: str, conversation: str | None) -> Iterator[Updates]:
        try:
            yield {**self.working(True), self.proof: proof_line(Proof(0))}
            for proof in self.session.proofs.prove(owner, conversation or ""):
                if isinstance(proof, Waiting):
                    yield {self.proof: waiting_line(proof)}
                else:
                    exact = self.session.current.info.exact
                    yield {self.proof: proof_line(proof, exact), **self.proven(proof)}
        except Exception as error:
            warn(explained(error))
            yield {self.proof: ""}
        yield self.working(False)

    def proven(self, proof: Proof) -> Updates:
        run = proof.shown
        if run is None:
            return {}
        values = panel_values(summarise(run), run.steps, proof.speedup)
        return {self.figures: with_pace(values, self.session.current.plain)}

    # showing a conversation

    def token_value(
        self,
        page: str,
        messages: Sequence[StoredMessage],
        answer: Answer | None = None,
        adopted: str = "",
        continuable: bool = False,
        notes: render.Remarks = render.NO_REMARKS,
    ) -> render.Data:
        """The value of the token view: the messages that it has not drawn, and the answer to
        follow. `adopted` is the id of the message as which an answer was stored, if the page has
        already drawn all of that answer."""
        now, before = drawn_of(messages, notes), self.session.drawn.get(page) or ()
        kept = len(commonprefix([(*before, *(now[-1:] if adopted else ())), now]))
        self.session.drawn[page] = now
        value = numbered(render.transcript(messages, kept, continuable, notes))
        if adopted:
            value["adopt"] = render.about(messages[-1], messages[:-1], continuable, notes)
        if answer is not None:
            request = answer.target
            further = {"on": True} if request is not None and request.continues else {}
            value["stream"] = {"token": answer.token, **further}
        return value

    def messages_and_answer(
        self, owner: str, conversation: str | None
    ) -> tuple[Sequence[StoredMessage], Answer | None]:
        """The messages of a conversation, and its growing answer. The part of that answer that is
        already stored is left out, because its stream sends all of it."""
        if not conversation:
            return (), None
        answer = self.session.generations.find(owner, conversation)
        store, request = self.session.chat.conversations(owner), answer.target if answer else None
        if request is not None and request.after is None:
            return (), answer
        last = request.after if request else None
        if last and not store.has(conversation, last):
            last = None
        return store.messages(conversation, to=last or None), answer

    def may_continue(self, owner: str, messages: Sequence[StoredMessage]) -> bool:
        """Whether the last answer is incomplete: stopped, cut off, or ended by a limit."""
        if not messages or messages[-1].role == "user" or messages[-1].run_id is None:
            return False
        try:
            finish = Traces(self.session.database, owner).load(messages[-1].run_id).finish
        except StorageError:
            return False
        return finish not in COMPLETE

    def viewed(
        self, visit: Visit, conversation: str | None
    ) -> tuple[render.Data, Sequence[StoredMessage], bool]:
        """The value of the token view for a conversation, the messages that it shows, and whether
        an answer is growing."""
        # The revision is read first, so that the page looks again for any later change.
        watch = watched(self.session, visit.owner, conversation)
        messages, answer = self.messages_and_answer(visit.owner, conversation)
        continuable = answer is None and self.may_continue(visit.owner, messages)
        pending = self.pending(visit.owner, conversation)
        notes = self.notes(visit.owner, conversation, messages, pending)
        value = self.token_value(visit.page, messages, answer, continuable=continuable, notes=notes)
        asking = self.asking(visit.owner, conversation, pending)
        return {**value, **watch, **asking}, messages, answer is not None

    def pending(self, owner: str, conversation: str | None) -> Pending | None:
        """The call that waits, unless an answer grows."""
        if conversation is None or self.session.generations.find(owner, conversation):
            return None
        return self.session.tool_calls.pending(owner, conversation)

    def asking(self, owner: str, conversation: str | None, pending: Pending | None) -> render.Data:
        """The question about a call, as part of the token view's value."""
        if pending is None:
            return {}
        runs = self.session.tool_calls.busy(owner, conversation or "")
        return {"asking": render.question(pending, runs)}

    def notes(
        self,
        owner: str,
        conversation: str | None,
        messages: Sequence[StoredMessage],
        pending: Pending | None,
    ) -> render.Remarks:
        waiting = pending.call.name if pending else ""
        return remarks(self.session.database, owner, conversation, messages, waiting)

    def last_figures(self, owner: str, messages: Sequence[StoredMessage]) -> render.Data:
        run_id = next((m.run_id for m in reversed(messages) if m.run_id), None)
        if run_id is None:
            return panel_values(None)
        store = Traces(self.session.database, owner)
        trace, run = store.get(run_id), store.load(run_id)
        known = Speedup(trace.speedup, trace.decode_speedup) if trace.speedup else None
        metrics, last = summarise(run), settings_of(run.parts[-1] if run.parts else run)
        text = ending(run.finish, metrics, last.sampling.seed if last else None)
        return panel_values(metrics, run.steps, known, text, server_sentence(run))

    def open(self, visit: Visit, conversation: str | None) -> Updates:
        """Open a conversation on a page, or none. The composer learns this in the same update,
        because a message for a conversation that is not open is refused. The browser remembers it,
        and opens the conversation again after a reload."""
        self.session.viewing[visit.page] = conversation
        return {
            self.current: conversation,
            self.composer.channels["place"]: numbered({"conversation": conversation}),
            self.memory: {**(visit.memory or {}), "conversation": conversation},
        }

    def shown(self, visit: Visit, conversation: str | None) -> Updates:
        """Show a conversation. The figures are those of its last stored answer; while an answer
        grows, its stream sends the figures."""
        value, messages, growing = self.viewed(visit, conversation)
        values = panel_values(None)
        if not growing:
            with notify_errors():
                values = self.last_figures(visit.owner, messages)
        return {
            self.tokens: value,
            self.empty: gr.update(visible=not messages),
            self.figures: values,
            **self.working(growing or self.busy(visit.owner, conversation)),
        }

    def ended(self, visit: Visit, answer: Answer, drawn: int) -> Updates:
        """Show an answer that is over, on a page that has drawn `drawn` of its tokens. If these are
        all of them, next to nothing changes."""
        owner, conversation = answer.owner, answer.conversation
        watch = watched(self.session, owner, conversation)
        messages, other = self.messages_and_answer(owner, conversation)
        complete = drawn == answer.tokens and messages and messages[-1].id == answer.message_id
        if other is not None or not complete:
            return self.shown(visit, conversation)
        finish = answer.update.finish if answer.update else None
        pending = self.pending(owner, conversation)
        value = self.token_value(
            visit.page,
            messages,
            adopted=answer.message_id,
            continuable=finish not in COMPLETE,
            notes=self.notes(owner, conversation, messages, pending),
        )
        asking = self.asking(owner, conversation, pending)
        return {
            self.tokens: {**value, **watch, **asking},
            **self.working(self.busy(owner, conversation)),
        }

    def blank(self, page: str) -> Updates:
        return {
            self.tokens: self.token_value(page, ()),
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

    def busy(self, owner: str, conversation: str | None) -> bool:
        """Whether something of a conversation can be stopped."""
        here = conversation or ""
        return self.session.tasks.busy(owner, here) or self.session.tool_calls.busy(owner, here)

    def answering(self, owner: str, conversation: str | None) -> bool:
        """Whether an answer is growing, or a tool runs for it. It would not see a new message."""
        if not conversation:
            return False
        growing = self.session.generations.find(owner, conversation) is not None
        return growing or self.session.tool_calls.busy(owner, conversation)

    def alone(self, owner: str, conversation: str | None) -> None:
        if self.answering(owner, conversation):
            raise Busy("The last message is still being answered. Wait for the end, or press Stop.")

    def refused(self, visit: Visit, conversation: str | None) -> Updates:
        """The updates for a page whose event was refused. If another page has begun an answer, this
        page now shows it, with its Stop button."""
        if self.answering(visit.owner, conversation):
            with notify_errors():
                return self.shown(visit, conversation)
        return {}

    def begin(self, visit: Visit, conversation: str, preferences: Preferences) -> Updates:
        """Begin an answer. A conversation without settings keeps those of this answer."""
        store = self.session.chat.conversations(visit.owner)
        if not store.get(conversation).settings:
            store.set_settings(conversation, preferences.mapping())
        self.session.viewing[visit.page] = conversation
        self.session.generations.start(visit.owner, conversation, preferences)
        return {**self.shown(visit, conversation), self.proof: ""}
