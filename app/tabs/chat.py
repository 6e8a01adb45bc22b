"""Chat: the transcript as tokens or as Markdown, the composer, and the live figures beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from app.comparison import Proof
from app.events import AT_ONCE, owner_of, pass_on, told, warn
from app.panel import panel, panel_values
from app.preferences import Preferences
from app.session import Session
from app.tabs.screen import (
    MARKDOWN,
    TOKENS,
    Parts,
    Stream,
    shown,
    stored,
    view_of,
    viewed,
    working,
)
from app.tabs.settings import Controls
from app.token_view import token_view
from app.verdicts import proof_line, waiting_line
from engine.errors import Cancelled, PromptError, StrataError
from engine.queue import Waiting

EXAMPLES = (
    "Tell me a short story about a boat and a storm.",
    "Tell a story about two friends, then tell it once more, more slowly.",
    "Write a list of ten things a curious child might find in a garden.",
    "Describe the same evening twice: once by the sea, once in a city.",
)
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]


def welcome() -> tuple[gr.Column, list[gr.Button]]:
    """What stands where the first answer will be."""
    with gr.Column(elem_classes="empty-state", elem_id="empty") as empty:
        gr.HTML(
            "<h2>Ask something, and watch where each word comes from.</h2>"
            "<p>Three databases guess ahead; the model checks all guesses at once and keeps "
            "what it would have said anyway.</p>"
        )
        with gr.Row(elem_classes="examples"):
            examples = [gr.Button(text, size="sm") for text in EXAMPLES]
    return empty, examples


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


def invitation(name: str) -> str:
    """What an empty composer says."""
    return f"Message {name}"


def composer(name: str) -> tuple[gr.Textbox, gr.Button, gr.Button]:
    """Where messages are written, with Send and, while an answer grows, Stop."""
    with gr.Row(elem_classes="composer"):
        box = gr.Textbox(
            show_label=False,
            container=False,
            lines=1,
            max_lines=8,
            scale=8,
            placeholder=invitation(name),
            elem_id="box",
            autofocus=True,
        )
        send = gr.Button("Send", variant="primary", scale=1, min_width=88, elem_id="send")
        stop = gr.Button(
            "Stop", variant="stop", scale=1, min_width=88, visible=False, elem_id="stop"
        )
    return box, send, stop


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
        tokens = token_view(elem_id="tokens", elem_classes="transcript")
        bubbles = markdown_view()
        proof = gr.HTML(elem_id="proof", apply_default_css=False)
        box, send, stop = composer(session.info.name)
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
        gr.State(None),
    )


class Handlers:
    """What the tab's events do."""

    def __init__(
        self, session: Session, parts: Parts, controls: Controls, current: gr.State
    ) -> None:
        self.session, self.parts, self.controls, self.current = session, parts, controls, current
        self.filling: dict[str, str] = {}
        """The conversation whose answer grows on a page."""

    def ready(self, values: Sequence[Any]) -> tuple[str, Preferences]:
        """System prompt and preferences; raises SettingError where they could not be followed,
        before anything is stored or taken back for an answer that cannot come."""
        system, preferences = self.controls.read(values)
        self.session.stacks.check(preferences.chosen(), preferences.generation.sampling)
        return system, preferences

    def say(
        self,
        request: gr.Request,
        text: str,
        conversation: str | None,
        editing: int | None,
        memory: dict[str, Any] | None,
        *values: Any,
    ) -> dict[Any, Any]:
        """Store what was said, or said differently; `pending` then asks for an answer."""
        owner = owner_of(self.session, memory, request)
        try:
            system, preferences = self.ready(values)
            store = self.session.conversations(owner)
            if conversation is not None and editing is not None:
                self.session.edit(owner, conversation, editing, text)
            else:
                fresh = conversation is None
                conversation = self.session.say(owner, conversation, text)
                if fresh:
                    store.set_system_prompt(conversation, system)
                    store.set_settings(conversation, preferences.mapping())
            now = shown(self.session, self.parts, request, owner, conversation)
        except StrataError as error:
            warn(str(error))
            return {self.parts.pending: None}
        self.session.viewing[request.session_hash or ""] = conversation
        return {
            **now,
            **working(self.parts, True),
            self.current: conversation,
            self.parts.box: "",
            self.parts.proof: "",
            self.parts.editing: None,
            self.parts.pending: conversation,
        }

    def answer(
        self,
        request: gr.Request,
        conversation: str | None,
        memory: dict[str, Any] | None,
        *values: Any,
    ) -> Iterator[dict[Any, Any]]:
        """Answer the pending conversation, showing it grow if the page still looks at it."""
        if conversation is None:
            yield {self.parts.pending: None}
            return
        owner, here = owner_of(self.session, memory, request), request.session_hash or ""
        try:
            messages = self.session.conversations(owner).messages(conversation)
            view = view_of(self.session, request)
            stream = Stream(self.session, self.parts, messages, view)
            for update in self.session.answer(owner, conversation, self.controls.read(values)[1]):
                there = self.session.viewing.get(here) == conversation
                view = view_of(self.session, request) if there else ""
                changes = stream.changes(update, view)
                if not isinstance(update, Waiting):
                    self.filling[here] = conversation
                if changes:
                    yield changes
        except Cancelled:
            pass  # it left the queue, and what is stored is shown below
        except StrataError as error:
            warn(str(error))
        finally:
            # Before the view is read for the last time: who switches it from now on fills it.
            self.filling.pop(here, None)
        pass_on(self.session, owner)
        if self.session.viewing.get(here) == conversation:
            with told():
                final = shown(self.session, self.parts, request, owner, conversation)
                yield {**final, self.parts.proof: "", self.parts.pending: None}
        else:
            yield {self.parts.pending: None}

    def retry(
        self,
        request: gr.Request,
        conversation: str | None,
        memory: dict[str, Any] | None,
        *values: Any,
    ) -> dict[Any, Any]:
        """Take the last answer back and ask for another."""
        owner = owner_of(self.session, memory, request)
        try:
            if conversation is None:
                raise PromptError("There is nothing to answer yet. Write a message first.")
            self.ready(values)
            self.session.drop_answer(owner, conversation)
            now = shown(self.session, self.parts, request, owner, conversation)
        except StrataError as error:
            warn(str(error))
            return {self.parts.pending: None}
        return {
            **now,
            **working(self.parts, True),
            self.parts.proof: "",
            self.parts.pending: conversation,
        }

    def take_back(
        self, request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        """Put the last message into the composer; sending it then replaces it."""
        owner = owner_of(self.session, memory, request)
        with told():
            store = self.session.conversations(owner)
            messages = store.messages(conversation) if conversation else ()
            said = [m for m in messages if m.role == "user"]
            if said:
                return {self.parts.box: said[-1].content, self.parts.editing: said[-1].position}
            raise PromptError("There is no message to edit yet. Write one first.")
        return {self.parts.editing: None}

    def rewrite(
        self,
        data: gr.EditData,
        request: gr.Request,
        conversation: str | None,
        memory: dict[str, Any] | None,
        *values: Any,
    ) -> dict[Any, Any]:
        """Replace a message that was edited in the Markdown view."""
        owner = owner_of(self.session, memory, request)
        try:
            self.ready(values)
            messages = self.session.conversations(owner).messages(conversation or "")
            at = data.index if isinstance(data.index, int) else data.index[0]
            self.session.edit(owner, conversation or "", messages[at].position, str(data.value))
            now = shown(self.session, self.parts, request, owner, conversation)
        except StrataError as error:
            warn(str(error))
            return {self.parts.pending: None}
        return {
            **now,
            **working(self.parts, True),
            self.parts.pending: conversation,
        }

    def stop(
        self, request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> None:
        """End the answer."""
        if conversation:
            self.session.stop(owner_of(self.session, memory, request), conversation)

    def prove(
        self, request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> Iterator[dict[Any, Any]]:
        """Decode the last answer again, plainly and with drafts."""
        owner = owner_of(self.session, memory, request)
        try:
            yield {**working(self.parts, True), self.parts.proof: proof_line(Proof(0))}
            for proof in self.session.prove(owner, conversation or ""):
                if isinstance(proof, Waiting):
                    yield {self.parts.proof: waiting_line(proof)}
                else:
                    yield {self.parts.proof: proof_line(proof), **self.proven(proof)}
        except StrataError as error:
            warn(str(error))
            yield {self.parts.proof: ""}
        yield working(self.parts, False)

    def proven(self, proof: Proof) -> dict[Any, Any]:
        """The figures of the answer with the speedup that was just measured."""
        run = proof.shown
        if run is None:
            return {}
        return {self.parts.figures: panel_values(run.metrics, run.steps, proof.speedup)}

    def look(
        self,
        request: gr.Request,
        choice: str,
        conversation: str | None,
        memory: dict[str, Any] | None,
    ) -> dict[Any, Any]:
        """Switch between tokens and Markdown. An answer that grows here fills the new view."""
        here = request.session_hash or ""
        self.session.views[here] = choice
        owner = owner_of(self.session, memory, request)
        content: dict[Any, Any] = {}
        if conversation and self.filling.get(here) != conversation:
            with told():
                messages = self.session.conversations(owner).messages(conversation)
                content = viewed(self.parts, choice, messages)
        return {
            part: gr.update(
                visible=True if choice == name else "hidden",
                **({"value": content[part]} if part in content else {}),
            )
            for part, name in ((self.parts.tokens, TOKENS), (self.parts.bubbles, MARKDOWN))
        }


def wire(
    session: Session,
    parts: Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
    refresh: Any,
) -> None:
    """Connect composer, actions and views. `refresh` redraws the conversation list."""
    screen = stored(parts)

    on = Handlers(session, parts, controls, current)
    said = [*screen, current, parts.box, parts.proof, parts.editing, parts.pending]
    answered = [*screen, parts.figures, parts.proof, parts.pending]
    inputs = [parts.pending, memory, *controls.inputs]

    def then_answer(event: Any) -> None:
        event.then(on.answer, inputs, answered, **AT_ONCE).then(*refresh, **AT_ONCE)
        event.then(*refresh, **AT_ONCE)

    spoken = [current, parts.editing, memory, *controls.inputs]
    then_answer(
        gr.on([parts.box.submit, parts.send.click], on.say, [parts.box, *spoken], said, **AT_ONCE)
    )
    for button in parts.examples:
        then_answer(button.click(on.say, [button, *spoken], said, **AT_ONCE))
    again = [current, memory, *controls.inputs]
    retried = [parts.again.click, parts.bubbles.retry]
    then_answer(gr.on(retried, on.retry, again, said, **AT_ONCE))
    then_answer(parts.bubbles.edit(on.rewrite, again, said, **AT_ONCE))
    parts.edit.click(on.take_back, [current, memory], [parts.box, parts.editing], **AT_ONCE)
    parts.stop.click(on.stop, [current, memory], None, **AT_ONCE)
    parts.prove.click(on.prove, [current, memory], [*screen, parts.proof, parts.figures], **AT_ONCE)
    looked = [parts.view, current, memory]
    parts.view.change(on.look, looked, [parts.tokens, parts.bubbles], **AT_ONCE)
