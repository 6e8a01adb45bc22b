"""The Chat tab: the messages with their actions, the composer, and the live figures.

An event from the page names an action and its message (assets/chat/actions.js). No action destroys
anything, and after each one the page shows the conversation as it then is.
"""

from collections.abc import Iterator, Sequence

import gradio as gr

from app.service.answering import Answer
from app.service.comparison import Proof
from app.service.current import seen_in
from app.service.why import server_sentence
from app.web import render
from app.web.kit import (
    AT_ONCE,
    REFRESH,
    Memory,
    Updates,
    explained,
    notify_errors,
    payload,
    show_notices,
    warn,
)
from app.web.metrics_panel import panel_values, with_pace
from app.web.run_html import proof_line, waiting_line
from app.web.tabs.chat_view import ChatView, ending, undo, viewed
from app.web.tabs.composer import ComposerRequest, chip, edited_text, text_to_rewrite
from app.web.tabs.conversations import ConversationList
from app.web.tabs.settings import Settings
from engine.metrics import summarise
from engine.queue import Waiting

DELETED = "The message and what followed it are deleted."


class Chat(ChatView):
    def wire(self, controls: Settings, listing: ConversationList) -> None:
        """Connect the composer, the actions and the views. `listing` adds the list of conversations
        to the updates of an event."""
        self.controls = controls
        composer, tokens, here = self.composer, self.tokens, self.current
        taken = [*self.stored, *self.opened, self.proof]
        values, sent = controls.inputs, [*taken, composer.channels["sent"]]
        saying = listing.with_list(self.say, values, sent)
        self.on(composer.writer.say, saying, mode="multiple")
        composer.wire(here, controls.system)
        self.on(composer.stop.click, self.stop, here)
        revised = [*taken, composer.channels["revised"]]
        self.on(tokens.revise, listing.with_list(self.revise, values, revised))
        self.on(tokens.act, listing.with_list(self.act, values, taken))
        self.on(tokens.prove, self.prove, here, [*self.stored, self.proof])
        over = listing.with_list(self.over, (), [*self.stored, self.proof])
        self.on(tokens.over, over, mode="multiple")
        self.on(tokens.resend, self.resend, here, tokens)
        attached = composer.channels["attached"]
        self.on(tokens.rewrite, self.rewrite, here, attached, mode="multiple")
        listing.on(tokens.look, self.shown, here, self.stored, guard=REFRESH)
        tokens.waiting(None, None, self.proof, js="() => window.strata.line", **AT_ONCE)

    def say(
        self,
        owner: str,
        page: str,
        memory: Memory,
        data: gr.EventData,
        conversation: str | None,
        *values: object,
    ) -> Updates:
        """Store a message and begin to answer it. The page learns whether the message was accepted;
        if not, the text stays in the composer. While an answer that another page began is growing,
        the message waits on this page until that answer ends."""
        request, sent = ComposerRequest(data), self.composer.channels["sent"]
        refused: Updates = {sent: {"number": request.number, "ok": False}}
        if not request.about(conversation):
            return refused
        if self.answering(owner, conversation):
            waits = {"number": request.number, "ok": False, "waits": True}
            return {**self.refused(owner, page, conversation), sent: waits}
        try:
            system, preferences = self.ready(values)
            self.alone(owner, conversation)
            text = self.session.attachments.message(owner, request.files, request.text("text"))
            store, fresh = self.session.chat.conversations(owner), conversation is None
            conversation = self.session.chat.say(owner, conversation, text)
            if fresh:
                store.set_system_prompt(conversation, system)
                store.set_settings(conversation, preferences.mapping())
            updates = self.begin(owner, page, conversation, preferences)
        except Exception as error:
            warn(explained(error))
            return {**self.refused(owner, page, conversation), **refused}
        self.session.attachments.drop(owner, request.files)
        return {
            **updates,
            sent: {"number": request.number, "ok": True},
            **self.open(page, memory, conversation),
        }

    def answer_of(
        self, data: gr.EventData, owner: str, conversation: str | None
    ) -> tuple[Answer | None, int]:
        values = payload(data)
        answer, drawn = self.session.generations.get(str(values.get("token"))), values.get("drawn")
        same = answer is not None and (answer.owner, answer.conversation) == (owner, conversation)
        return answer if same else None, drawn if isinstance(drawn, int) and drawn > 0 else 0

    def over(self, owner: str, page: str, data: gr.EventData, conversation: str | None) -> Updates:
        """Show the final state of an answer on a page that has received its last event. A page that
        the stream does not reach asks for it too, maybe before the answer is over."""
        show_notices(self.session, owner)
        answer, drawn = self.answer_of(data, owner, conversation)
        with notify_errors():
            if answer is None or not answer.over:
                return self.shown(owner, page, conversation)
            if answer.error:
                warn(answer.error)
            left = self.ended(page, answer, drawn)
            if (update := answer.update) is not None:
                metrics = update.metrics
                text = ending(update.finish, metrics, update.seed, update.dropped)
                served = server_sentence(update.recorder.collector.plan, update.counted)
                values = panel_values(metrics, update.steps, ended=text, server=served)
                left[self.figures] = with_pace(values, seen_in(metrics))
            return {**left, self.proof: ""}
        return {**self.working(False), self.proof: ""}

    def resend(self, owner: str, page: str, conversation: str | None) -> Updates:
        """Send the whole conversation to a page that has drawn other messages."""
        self.session.drawn.pop(page, None)
        value, _, _ = viewed(self.session, owner, page, conversation)
        return {self.tokens: value}

    def stop(self, owner: str, conversation: str | None) -> None:
        if conversation:
            self.session.tasks.stop(owner, conversation)

    def revise(
        self, owner: str, page: str, data: gr.EventData, conversation: str | None, *values: object
    ) -> Updates:
        """Store another version of a message and begin to answer it. The page learns whether the
        version was accepted; if not, the text stays in the message's editor."""
        request = ComposerRequest(data)
        taken = self.composer.channels["revised"]
        try:
            _, preferences = self.ready(values)
            self.alone(owner, conversation)
            text = edited_text(self.session, owner, conversation, request)
            self.session.chat.edit(owner, conversation or "", request.text("message"), text)
            self.session.attachments.drop(owner, request.files)
            updates = self.begin(owner, page, conversation or "", preferences)
        except Exception as error:
            warn(explained(error))
            refused = self.refused(owner, page, conversation)
            return {**refused, taken: {"number": request.number, "ok": False}}
        return {**updates, taken: {"number": request.number, "ok": True}}

    def act(
        self,
        owner: str,
        page: str,
        memory: Memory,
        data: gr.EventData,
        conversation: str | None,
        *values: object,
    ) -> Updates:
        act, message, other = (str(payload(data).get(name)) for name in ("act", "message", "of"))
        try:
            self.alone(owner, conversation)
            if act in ("again", "on"):
                return self.answer(owner, page, conversation or "", act, message, values)
            return self.change(owner, page, memory, conversation or "", act, message, other)
        except Exception as error:
            warn(explained(error))
            return self.refused(owner, page, conversation)

    def answer(
        self,
        owner: str,
        page: str,
        conversation: str,
        act: str,
        message: str,
        values: Sequence[object],
    ) -> Updates:
        _, preferences = self.ready(values)
        if act == "again":
            self.session.chat.again(owner, conversation, message)
        else:
            self.session.chat.continue_answer(owner, conversation)
        return self.begin(owner, page, conversation, preferences)

    def change(
        self,
        owner: str,
        page: str,
        memory: Memory,
        conversation: str,
        act: str,
        message: str,
        other: str,
    ) -> Updates:
        """Show another version, make a rewritten answer a version of the `other` one, branch,
        delete or undo, then show the conversation."""
        chat, offer = self.session.chat, dict[str, object]()
        if act == "show":
            chat.conversations(owner).show(conversation, message)
        elif act == "accept":
            chat.conversations(owner).copy_as_version(conversation, message, other)
        elif act == "branch":
            conversation = chat.conversations(owner).copy(conversation, message)
        elif act == "remove":
            offer = undo(chat.delete_message(owner, conversation, message), DELETED)
        elif act == "undo":
            conversation = chat.undo(owner, message)
        opened = self.open(page, memory, conversation)
        seen = self.shown(owner, page, conversation)
        value = seen[self.tokens]
        assert isinstance(value, dict)
        return {**seen, self.tokens: {**value, **offer}, self.proof: "", **opened}

    def rewrite(self, owner: str, data: gr.EventData, conversation: str | None) -> render.Data:
        """Attach a text of the conversation to the message that is being written, to be rewritten:
        an answer, or a file of a message."""
        file = text_to_rewrite(self.session, owner, conversation, ComposerRequest(data))
        (shown,) = chip(self.session, self.session.attachments.add(owner, [file]))
        return {"file": shown}

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
