"""Chat: the messages, the composer, and the live figures beside them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import count

import gradio as gr
from gradio.blocks import Block

from app.service.generation import Answer
from app.service.served import server_words
from app.service.session import Session
from app.web import guide, stream
from app.web.metrics_panel import panel, panel_values
from app.web.tabs import composer, messages, race
from app.web.tabs.chat_view import Parts, ended, ending, shown, stored, viewed, working
from app.web.tabs.settings import Controls
from app.web.tabs.talking import Talk
from app.web.tabs.welcome import welcome
from app.web.token_view import token_view
from app.web.wiring import (
    AFTER,
    AT_ONCE,
    Listing,
    Memory,
    Updates,
    owner_of,
    pass_on,
    sent,
    told,
    unasked,
    warn,
)
from engine.errors import StrataError

QUEUE_SECONDS = 0.1
"""How often a page is told by the queue, where its stream does not come through."""
OVERLAP = 12
"""Events that are told again by the queue: an update may be skipped."""


def build(session: Session) -> Parts:
    """Messages and composer, then the figures."""
    with gr.Column(scale=6, min_width=420, elem_classes="talk"):
        empty, examples = welcome()
        with empty:
            contest = race.build()
        tokens = token_view(chat=True, elem_id="tokens", elem_classes="transcript")
        proof = gr.HTML(elem_id="proof", apply_default_css=False)
        written = composer.composer(session.current.info.name)
    with gr.Column(scale=3, min_width=300, elem_classes="live"):
        guide.bar()
        figures = panel(elem_id="figures")
    return Parts(
        tokens,
        empty,
        examples,
        written.box,
        written.send,
        written.stop,
        proof,
        figures,
        gr.State(None),
        contest,
        written,
    )


class Handlers(Talk):
    """What the tab's events do."""

    def say(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        editing: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Store what was said, or said differently, and begin to answer it. The page is told
        whether it was taken; if not, it stays where it was written."""
        owner, asked = owner_of(self.session, memory, request), composer.Asked(data)
        sent = self.parts.written.channels["sent"]
        refused: Updates = {sent: {"number": asked.number, "ok": False}}
        if not asked.about(conversation):
            return refused
        try:
            system, preferences = self.ready(values)
            self.alone(owner, conversation)
            text = self.session.attachments.message(owner, asked.files, asked.text("text"))
            store = self.session.chat.conversations(owner)
            if conversation is not None and editing is not None:
                self.session.chat.edit(owner, conversation, editing, text)
            else:
                fresh = conversation is None
                conversation = self.session.chat.say(owner, conversation, text)
                if fresh:
                    store.set_system_prompt(conversation, system)
                    store.set_settings(conversation, preferences.mapping())
            begun = self.begin(request, owner, conversation, preferences)
        except StrataError as error:
            warn(str(error))
            return refused
        self.session.attachments.drop(owner, asked.files)
        return {
            **begun,
            sent: {"number": asked.number, "ok": True},
            self.current: conversation,
            # At once: a page that is reloaded opens it again.
            self.memory: {**(memory or {}), "conversation": conversation},
            self.parts.editing: None,
        }

    def answer_of(
        self, data: gr.EventData, owner: str, conversation: str | None
    ) -> tuple[Answer | None, int]:
        """The answer that a page speaks of, and how much of it the page says it has drawn."""
        said = sent(data)
        answer, drawn = self.session.generations.get(str(said.get("token"))), said.get("drawn")
        theirs = answer is not None and (answer.owner, answer.conversation) == (owner, conversation)
        return answer if theirs else None, drawn if isinstance(drawn, int) and drawn > 0 else 0

    def over(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
    ) -> Updates:
        """What an answer left behind, for a page that has seen its end."""
        owner = owner_of(self.session, memory, request)
        pass_on(self.session, owner)
        answer, drawn = self.answer_of(data, owner, conversation)
        with told():
            if answer is None:
                return shown(self.session, self.parts, request, owner, conversation)
            if answer.error:
                warn(answer.error)
            left = ended(self.session, self.parts, request, answer, drawn)
            if answer.update is not None:
                figures, words = answer.update.metrics, ending(answer.update)
                served = server_words(answer.update.recorder.collector.plan, answer.update.counted)
                left[self.parts.figures] = panel_values(
                    figures, answer.update.steps, ended=words, server=served
                )
            return {**left, self.parts.proof: ""}
        return {**working(self.parts, False), self.parts.proof: ""}

    async def fall_back(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
    ) -> AsyncIterator[Updates]:
        """What a stream that does not come through would have told, by the queue."""
        owner, here = owner_of(self.session, memory, request), request.session_hash or ""
        answer, drawn = self.answer_of(data, owner, conversation)
        number, recent = count(), deque[tuple[object, ...]](maxlen=OVERLAP)
        token = str(sent(data).get("token"))

        def update() -> Updates:
            # As text: what changed between two lists would be told as edits of their parts.
            return {self.parts.tokens: {"events": stream.compact([*recent]), "token": token}}

        if answer is None:
            recent.append((0, "end", 0, 0))
            yield update()
            return
        async with aclosing(stream.tell(answer, drawn)) as events:
            async for news in events:
                for start in range(0, len(news), OVERLAP // 2):
                    if self.session.viewing.get(here) != conversation:
                        return
                    # Few at a time: the page has to see each of them in one update at least.
                    part = news[start : start + OVERLAP // 2]
                    recent.extend((next(number), *event) for event in part)
                    yield update()
                    await asyncio.sleep(QUEUE_SECONDS)

    def look(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Show a page what another one changed."""
        owner = owner_of(self.session, memory, request)
        with told():
            return shown(self.session, self.parts, request, owner, conversation)
        return self.nothing

    def resend(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Send all of a conversation to a page that has drawn something else."""
        self.session.drawn.pop(request.session_hash or "", None)
        owner = owner_of(self.session, memory, request)
        with told():
            value, _, _ = viewed(self.session, request, owner, conversation)
            return {self.parts.tokens: value}
        return {self.parts.tokens: gr.skip()}

    def stop(self, request: gr.Request, conversation: str | None, memory: Memory) -> None:
        """End the answer."""
        if conversation:
            self.session.tasks.stop(owner_of(self.session, memory, request), conversation)


def wire(
    session: Session,
    parts: Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
    listing: Listing,
) -> None:
    """Connect composer, actions and views. `listing` says how the list is drawn anew."""
    screen = stored(parts)
    on = Handlers(session, parts, controls, current, memory)
    said = [*screen, current, memory, parts.proof, parts.editing]
    spoken = [current, parts.editing, memory, *controls.inputs]
    writer, sent = parts.written.writer, parts.written.channels["sent"]
    said.append(sent)
    saying = listing.with_list(on.say, spoken, said)
    writer.say(*saying, trigger_mode="multiple", **AT_ONCE)
    here = [current, memory]
    composer.wire(session, parts.written, current, parts.editing, memory, controls.system)
    parts.stop.click(on.stop, here, None, **AT_ONCE)
    actions = messages.Actions(session, parts, controls, current, memory)
    messages.wire(actions, here, said, listing)
    wire_stream(on, here, listing)


def wire_stream(on: Handlers, here: Sequence[Block], listing: Listing) -> None:
    """Connect what the token view asks for while an answer grows, and once it is over."""
    parts = on.parts
    left = [*stored(parts), parts.figures, parts.proof]
    over = listing.with_list(on.over, here, left)
    parts.tokens.over(*over, trigger_mode="multiple", **AT_ONCE)
    parts.tokens.fallback(on.fall_back, here, parts.tokens, **AT_ONCE)
    parts.tokens.resend(on.resend, here, parts.tokens, **AT_ONCE)
    seen = [listing.asked, *here]
    look = parts.tokens.look(unasked(on.look), seen, stored(parts), **AT_ONCE)
    look.then(*listing.refresh, **AFTER)
    parts.tokens.waiting(None, None, parts.proof, js="() => window.strata.line", **AT_ONCE)
