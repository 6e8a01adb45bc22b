"""Chat: what can be done with one message. Nothing that is done destroys anything.

The page names an action and its message (assets/chat/actions.js). Every action leaves the page
with the conversation as it is then.
"""

from collections.abc import Iterator, Sequence

import gradio as gr
from gradio.blocks import Block

from app.service.comparison import Proof
from app.web.metrics_panel import panel_values
from app.web.tabs.chat_view import shown, stored, working
from app.web.tabs.talking import Talk
from app.web.verdicts import proof_line, waiting_line
from app.web.wiring import AT_ONCE, Listing, Memory, Updates, owner_of, sent, told, warn
from engine.errors import PromptError, StrataError
from engine.metrics import summarise
from engine.queue import Waiting

DELETED = "The message and what followed it are deleted."
GONE = "There is no such message. It may be deleted: reload the page."


def named(data: gr.EventData) -> tuple[str, str]:
    """The action and the message, or the deletion to undo, that a page sent along with an event."""
    said = sent(data)
    return str(said.get("act")), str(said.get("message"))


def undo(token: str, words: str) -> dict[str, object]:
    """An offer to undo, as a part of the token view's value. It stays for some seconds."""
    return {"undo": {"token": token, "words": words}}


class Actions(Talk):
    """What the events of single messages do."""

    def edit(
        self, data: gr.EventData, request: gr.Request, conversation: str | None, memory: Memory
    ) -> Updates:
        """Put a message into the composer; sending it then makes another version of it."""
        owner, (_, wanted) = owner_of(self.session, memory, request), named(data)
        with told():
            store = self.session.chat.conversations(owner)
            messages = store.messages(conversation, pieces=False) if conversation else ()
            for message in messages:
                if message.id == wanted and message.role == "user":
                    return {self.parts.editing: message.id}
            raise PromptError(GONE)
        return {self.parts.editing: None}

    def act(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Do what a button of a message says."""
        owner, (act, message) = owner_of(self.session, memory, request), named(data)
        try:
            self.alone(owner, conversation)
            if act in ("again", "on"):
                return self.answer(request, owner, conversation or "", act, message, values)
            return self.change(request, owner, conversation or "", act, message, memory)
        except StrataError as error:
            warn(str(error))
            return self.nothing

    def answer(
        self,
        request: gr.Request,
        owner: str,
        conversation: str,
        act: str,
        message: str,
        values: Sequence[object],
    ) -> Updates:
        """Begin another answer beside this one, or go on with it."""
        _, preferences = self.ready(values)
        if act == "again":
            self.session.chat.again(owner, conversation, message)
        else:
            self.session.chat.go_on(owner, conversation)
        return self.begin(request, owner, conversation, preferences)

    def change(
        self,
        request: gr.Request,
        owner: str,
        conversation: str,
        act: str,
        message: str,
        memory: Memory,
    ) -> Updates:
        """Show another version, branch, delete or undo; then show what there is."""
        chat, offer = self.session.chat, dict[str, object]()
        if act == "show":
            chat.conversations(owner).show(conversation, message)
        elif act == "branch":
            conversation = chat.branch(owner, conversation, message)
        elif act == "remove":
            offer = undo(chat.delete_message(owner, conversation, message), DELETED)
        elif act == "undo":
            conversation = chat.undo(owner, message)
        self.session.viewing[request.session_hash or ""] = conversation
        seen = shown(self.session, self.parts, request, owner, conversation)
        value = seen[self.parts.tokens]
        assert isinstance(value, dict)
        return {
            **seen,
            self.parts.tokens: {**value, **offer},
            self.parts.proof: "",
            self.parts.editing: None,
            self.current: conversation,
            self.memory: {**(memory or {}), "conversation": conversation},
        }

    def prove(
        self, request: gr.Request, conversation: str | None, memory: Memory
    ) -> Iterator[Updates]:
        """Decode the last answer again, plainly and with drafts."""
        owner = owner_of(self.session, memory, request)
        try:
            yield {**working(self.parts, True), self.parts.proof: proof_line(Proof(0))}
            for proof in self.session.proofs.prove(owner, conversation or ""):
                if isinstance(proof, Waiting):
                    yield {self.parts.proof: waiting_line(proof)}
                else:
                    yield {self.parts.proof: proof_line(proof), **self.proven(proof)}
        except StrataError as error:
            warn(str(error))
            yield {self.parts.proof: ""}
        yield working(self.parts, False)

    def proven(self, proof: Proof) -> Updates:
        """The figures of the answer with the speedup that was just measured."""
        run = proof.shown
        if run is None:
            return {}
        return {self.parts.figures: panel_values(summarise(run), run.steps, proof.speedup)}


def wire(on: Actions, here: Sequence[Block], said: Sequence[Block], listing: Listing) -> None:
    """Connect the buttons of messages. `here` is the open conversation and the memory, `said` what
    an answer that begins changes."""
    parts, tokens = on.parts, on.parts.tokens
    tokens.rewrite(on.edit, here, parts.editing, **AT_ONCE)
    tokens.act(*listing.with_list(on.act, [*here, *on.controls.inputs], said), **AT_ONCE)
    proving = [*stored(parts), parts.proof, parts.figures]
    tokens.prove(on.prove, here, proving, **AT_ONCE)
