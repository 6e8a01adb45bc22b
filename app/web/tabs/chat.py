"""Chat: the transcript as tokens or as Markdown, the composer, and the live figures beside it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from itertools import count

import gradio as gr
from gradio.blocks import Block

from app.service.comparison import Proof
from app.service.generation import Answer
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import stream
from app.web.metrics_panel import panel, panel_values
from app.web.tabs.chat_view import (
    MARKDOWN,
    TOKENS,
    Parts,
    ended,
    ending,
    shown,
    spoken,
    stored,
    told_tokens,
    viewed,
    working,
)
from app.web.tabs.composer import composer
from app.web.tabs.settings import Controls
from app.web.tabs.welcome import welcome
from app.web.token_view import token_view
from app.web.verdicts import proof_line, waiting_line
from app.web.wiring import AT_ONCE, Event, Memory, Updates, owner_of, pass_on, told, warn
from engine.errors import Busy, PromptError, StrataError
from engine.metrics import summarise
from engine.queue import Waiting

QUEUE_SECONDS = 0.1
"""How often a page is told by the queue, where its stream does not come through."""
OVERLAP = 12
"""Events that are told again by the queue: an update may be skipped."""
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]


def markdown_view() -> gr.Chatbot:
    """The conversation as Markdown: sanitised, its own messages editable."""
    return gr.Chatbot(
        show_label=False,
        elem_id="markdown",
        visible="hidden",
        height=None,
        editable="user",
        sanitize_html=True,
        allow_tags=False,
        buttons=["copy"],
        latex_delimiters=LATEX,
        feedback_options=None,
        container=False,
        layout="bubble",
    )


def build(session: Session) -> Parts:
    """Transcript and composer, then the figures."""
    with gr.Column(scale=6, min_width=420, elem_classes="talk"):
        view = gr.Radio(
            [TOKENS, MARKDOWN],
            value=TOKENS,
            show_label=False,
            container=False,
            elem_classes="switch",
            elem_id="view",
        )
        empty, examples = welcome()
        tokens = token_view(elem_id="tokens", elem_classes="transcript", live=True)
        bubbles = markdown_view()
        proof = gr.HTML(elem_id="proof", apply_default_css=False)
        box, send, stop = composer(session.current.info.name)
        with gr.Row(elem_classes="actions"):
            again = gr.Button("Regenerate", size="sm", elem_id="again")
            edit = gr.Button("Edit last message", size="sm", elem_id="edit")
            prove = gr.Button("Prove it", size="sm", elem_id="prove")
    with gr.Column(scale=3, min_width=300, elem_classes="live"):
        figures = panel(elem_id="figures")
    return Parts(
        view,
        tokens,
        bubbles,
        empty,
        examples,
        box,
        send,
        stop,
        again,
        edit,
        prove,
        proof,
        figures,
        gr.State(None),
    )


class Handlers:
    """What the tab's events do."""

    def __init__(
        self,
        session: Session,
        parts: Parts,
        controls: Controls,
        current: gr.State,
        memory: gr.BrowserState,
    ) -> None:
        self.session, self.parts, self.controls = session, parts, controls
        self.current, self.memory = current, memory
        self.nothing: Updates = {parts.editing: gr.skip()}

    def ready(self, values: Sequence[object]) -> tuple[str, Preferences]:
        """System prompt and preferences; raises SettingError where they could not be followed,
        before anything is stored or taken back for an answer that cannot come."""
        system, preferences = self.controls.read(values)
        self.session.stacks.check(preferences.chosen(), preferences.generation.sampling)
        return system, preferences

    def alone(self, owner: str, conversation: str | None) -> None:
        """Raises Busy while an answer is under way, which would not know what is said meanwhile."""
        if conversation and self.session.generations.find(owner, conversation):
            raise Busy("The last message is still being answered. Wait for the end, or press Stop.")

    def say(
        self,
        request: gr.Request,
        text: str,
        conversation: str | None,
        editing: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Store what was said, or said differently, and begin to answer it."""
        owner = owner_of(self.session, memory, request)
        try:
            system, preferences = self.ready(values)
            self.alone(owner, conversation)
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
            return self.nothing
        return {
            **begun,
            self.current: conversation,
            # At once: a page that is reloaded opens it again.
            self.memory: {**(memory or {}), "conversation": conversation},
            self.parts.box: "",
            self.parts.editing: None,
        }

    def begin(
        self, request: gr.Request, owner: str, conversation: str, preferences: Preferences
    ) -> Updates:
        """Begin an answer; what that changes on the page that asked for it."""
        self.session.viewing[request.session_hash or ""] = conversation
        self.session.generations.start(owner, conversation, preferences)
        return {
            **shown(self.session, self.parts, request, owner, conversation),
            self.parts.proof: "",
        }

    def answer_of(
        self, data: gr.EventData, owner: str, conversation: str | None
    ) -> tuple[Answer | None, int]:
        """The answer that a page speaks of, and how much of it the page says it has drawn."""
        said = data._data if isinstance(data._data, dict) else {}
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
                left[self.parts.figures] = panel_values(figures, answer.update.steps, ended=words)
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
        token = str(data._data.get("token")) if isinstance(data._data, dict) else ""

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

    def again(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Send all of a conversation to a page that has drawn something else."""
        self.session.drawn.pop(request.session_hash or "", None)
        owner = owner_of(self.session, memory, request)
        with told():
            return {
                self.parts.tokens: told_tokens(
                    self.session, request, *spoken(self.session, owner, conversation)
                )
            }
        return {self.parts.tokens: gr.skip()}

    def retry(
        self,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Begin another answer beside the last one."""
        owner = owner_of(self.session, memory, request)
        try:
            if conversation is None:
                raise PromptError("There is nothing to answer yet. Write a message first.")
            self.alone(owner, conversation)
            _, preferences = self.ready(values)
            self.session.chat.again(owner, conversation)
            return self.begin(request, owner, conversation, preferences)
        except StrataError as error:
            warn(str(error))
            return self.nothing

    def take_back(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Put the last message into the composer; sending it then replaces it."""
        owner = owner_of(self.session, memory, request)
        with told():
            store = self.session.chat.conversations(owner)
            messages = store.messages(conversation, pieces=False) if conversation else ()
            said = [m for m in messages if m.role == "user"]
            if said:
                return {self.parts.box: said[-1].content, self.parts.editing: said[-1].id}
            raise PromptError("There is no message to edit yet. Write one first.")
        return {self.parts.editing: None}

    def rewrite(
        self,
        data: gr.EditData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
        *values: object,
    ) -> Updates:
        """Replace a message that was edited in the Markdown view."""
        owner = owner_of(self.session, memory, request)
        try:
            self.alone(owner, conversation)
            _, preferences = self.ready(values)
            store = self.session.chat.conversations(owner)
            messages = store.messages(conversation or "", pieces=False)
            at = data.index if isinstance(data.index, int) else data.index[0]
            self.session.chat.edit(owner, conversation or "", messages[at].id, str(data.value))
            return self.begin(request, owner, conversation or "", preferences)
        except StrataError as error:
            warn(str(error))
            return self.nothing

    def stop(self, request: gr.Request, conversation: str | None, memory: Memory) -> None:
        """End the answer."""
        if conversation:
            self.session.tasks.stop(owner_of(self.session, memory, request), conversation)

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

    def look(
        self,
        request: gr.Request,
        choice: str,
        conversation: str | None,
        memory: Memory,
    ) -> Updates:
        """Switch between tokens and Markdown."""
        self.session.views[request.session_hash or ""] = choice
        owner = owner_of(self.session, memory, request)
        content: Updates = {}
        with told():
            found = spoken(self.session, owner, conversation)
            content = viewed(self.session, self.parts, request, *found)
        return {
            part: {
                **gr.update(visible=True if choice == name else "hidden"),
                **({"value": content[part]} if part in content else {}),
            }
            for part, name in ((self.parts.tokens, TOKENS), (self.parts.bubbles, MARKDOWN))
        }


def wire(
    session: Session,
    parts: Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
    refresh: Event,
) -> None:
    """Connect composer, actions and views. `refresh` redraws the conversation list."""
    screen = stored(parts)
    on = Handlers(session, parts, controls, current, memory)
    said = [*screen, current, memory, parts.box, parts.proof, parts.editing]
    spoken = [current, parts.editing, memory, *controls.inputs]
    sends = [
        gr.on([parts.box.submit, parts.send.click], on.say, [parts.box, *spoken], said, **AT_ONCE)
    ]
    sends += [b.click(on.say, [b, *spoken], said, **AT_ONCE) for b in parts.examples]
    again = [current, memory, *controls.inputs]
    sends += [
        gr.on([parts.again.click, parts.bubbles.retry], on.retry, again, said, **AT_ONCE),
        parts.bubbles.edit(on.rewrite, again, said, **AT_ONCE),
    ]
    for event in sends:
        event.then(*refresh, **AT_ONCE)
    here = [current, memory]
    parts.edit.click(on.take_back, here, [parts.box, parts.editing], **AT_ONCE)
    parts.stop.click(on.stop, here, None, **AT_ONCE)
    parts.prove.click(on.prove, here, [*screen, parts.proof, parts.figures], **AT_ONCE)
    parts.view.change(on.look, [parts.view, *here], [parts.tokens, parts.bubbles], **AT_ONCE)
    wire_stream(on, here, refresh)


def wire_stream(on: Handlers, here: Sequence[Block], refresh: Event) -> None:
    """Connect what the token view asks for while an answer grows, and once it is over."""
    parts = on.parts
    left = [*stored(parts), parts.figures, parts.proof]
    over = parts.tokens.over(on.over, here, left, trigger_mode="multiple", **AT_ONCE)
    over.then(*refresh, **AT_ONCE)
    parts.tokens.fallback(on.fall_back, here, parts.tokens, **AT_ONCE)
    parts.tokens.resend(on.again, here, parts.tokens, **AT_ONCE)
    grown = "(shown) => [window.strata.markdown(shown)]"
    parts.tokens.markdown(None, parts.bubbles, parts.bubbles, js=grown, **AT_ONCE)
    parts.tokens.waiting(None, None, parts.proof, js="() => window.strata.line", **AT_ONCE)
