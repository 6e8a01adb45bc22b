"""Chat: the transcript as tokens or as Markdown, the composer, and the live figures beside it."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from app import render
from app.comparison import Pace
from app.events import AT_ONCE, ON_MODEL, owner_of, pass_on, told, warn
from app.panel import milliseconds, panel
from app.session import Proof, Session
from app.tabs.settings import Controls
from app.writer import Update
from engine.errors import PromptError, StrataError
from engine.metrics import summarise
from engine.types import Prefill
from storage.conversations import StoredMessage
from storage.traces import Traces

ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"
EXAMPLES = (
    "Tell me a short story about a boat and a storm.",
    "Tell that story again, with a happier ending.",
    "Write a list of ten things a curious child might find in a garden.",
    "Describe the same evening twice: once by the sea, once in a city.",
)
ENDINGS = {
    "eos": "the model ended its answer",
    "stop": "ended at a stop string",
    "length": "ended at the length limit",
    "context": "ended because the context is full",
    "cancelled": "stopped",
}
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]
FIGURES_SECONDS = 0.3
TOKENS, MARKDOWN = "Tokens", "Markdown"
TEMPLATE = (
    '<div class="legend"></div><div class="turns" role="log"></div>'
    '<div class="inspector">Point at a token to see where it came from.</div>'
)


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


@cache
def script() -> str:
    """The token view's script."""
    return (ASSETS / "tokens.js").read_text(encoding="utf-8")


def token_view(**more: Any) -> gr.HTML:
    """A token view. Its template is fixed text: values reach it as data only."""
    return gr.HTML(
        value={"turns": []},
        html_template=TEMPLATE,
        js_on_load=script(),
        names=render.names(),
        apply_default_css=False,
        **more,
    )


def build(session: Session) -> Parts:
    """Transcript and composer, then the figures."""
    with gr.Column(scale=6, min_width=420, elem_classes="talk"):
        view = gr.Radio(
            [TOKENS, MARKDOWN], value=TOKENS, show_label=False, container=False,
            elem_classes="switch", elem_id="view",
        )
        with gr.Column(elem_classes="empty-state", elem_id="empty") as empty:
            gr.HTML(
                "<h2>Ask something, and watch where each word comes from.</h2>"
                "<p>Three databases guess ahead; the model checks all guesses at once and keeps "
                "what it would have said anyway.</p>"
            )
            with gr.Row(elem_classes="examples"):
                examples = [gr.Button(text, size="sm") for text in EXAMPLES]
        tokens = token_view(elem_id="tokens", elem_classes="transcript")
        bubbles = gr.Chatbot(
            show_label=False, elem_id="markdown", visible="hidden", height=None,
            editable="user", sanitize_html=True, allow_tags=False, buttons=["copy"],
            latex_delimiters=LATEX, feedback_options=None, container=False, layout="bubble",
        )
        proof = gr.HTML(elem_id="proof", apply_default_css=False)
        with gr.Row(elem_classes="composer"):
            box = gr.Textbox(
                show_label=False, container=False, lines=1, max_lines=8, scale=8,
                placeholder=f"Message {session.backend.info.name}", elem_id="box", autofocus=True,
            )
            send = gr.Button("Send", variant="primary", scale=1, min_width=88, elem_id="send")
            stop = gr.Button(
                "Stop", variant="stop", scale=1, min_width=88, visible=False, elem_id="stop"
            )
        with gr.Row(elem_classes="actions"):
            again = gr.Button("Regenerate", size="sm", elem_id="again")
            edit = gr.Button("Edit last message", size="sm", elem_id="edit")
            prove = gr.Button("Prove it", size="sm", elem_id="prove")
    with gr.Column(scale=3, min_width=300, elem_classes="live"):
        figures = gr.HTML(
            panel(None, plain=session.plain_tokens_per_second),
            elem_id="figures",
            apply_default_css=False,
        )
    return Parts(
        view, tokens, bubbles, empty, examples, box, send, stop, again, edit, prove, proof,
        figures, gr.State(None), gr.State(None),
    )


def shown(
    session: Session, parts: Parts, owner: str, conversation: str | None
) -> dict[Any, Any]:
    """Everything that shows a conversation, as it is stored."""
    messages = session.conversations(owner).messages(conversation) if conversation else ()
    busy = conversation is not None and (owner, conversation) in session.answering
    return {
        parts.tokens: render.transcript(messages),
        parts.bubbles: render.bubbles(messages),
        parts.empty: gr.update(visible=not messages),
        **working(parts, busy),
    }


def last_figures(session: Session, owner: str, conversation: str | None) -> str:
    """The panel for the run behind a stored conversation's last answer."""
    plain = session.plain_tokens_per_second
    messages = session.conversations(owner).messages(conversation) if conversation else ()
    run_id = next((m.run_id for m in reversed(messages) if m.run_id), None)
    if run_id is None:
        return panel(None, plain=plain)
    store = Traces(session.database, owner)
    run, steps = store.get(run_id), store.steps(run_id)
    first = steps[0].seconds if steps else 0.0
    prefill = Prefill(run.prompt_tokens, run.reused_tokens, max(0.0, run.ttft_seconds - first))
    plain = run.baseline_tokens_per_second or plain
    return panel(summarise(prefill, steps), steps, plain, ENDINGS.get(run.finish or "", ""))


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
        self, session: Session, parts: Parts, messages: Sequence[StoredMessage]
    ) -> None:
        self.session, self.parts, self.messages = session, parts, messages
        self.sent: deque[int] = deque([0], maxlen=self.OVERLAP)
        self.view = ""
        self.figures_due = Pace(FIGURES_SECONDS)

    def changes(self, update: Update, view: str) -> dict[Any, Any]:
        """The changes for a page that shows `view`, "" for another conversation."""
        if view != self.view:
            self.view, self.sent = view, deque([0], maxlen=self.OVERLAP)
        changes: dict[Any, Any] = {}
        if view == TOKENS:
            changes[self.parts.tokens] = render.growing(update.pieces, self.sent[0])
            self.sent.append(len(update.pieces))
        elif view == MARKDOWN:
            changes[self.parts.bubbles] = render.bubbles(self.messages, update.text)
        if view and (update.finish or self.figures_due.due()):
            plain = self.session.plain_tokens_per_second
            changes[self.parts.figures] = panel(update.metrics, update.steps, plain, ending(update))
        return changes


def proof_line(proof: Proof) -> str:
    """The outcome of a plain rerun; numbers are ours, token texts are escaped."""
    found = proof.verdict
    if found is None:
        return f'<div class="verdict running">Decoding plainly … {proof.tokens:,} tokens</div>'
    if not found.identical:
        return (
            f'<div class="verdict differs"><b>First difference at token {found.position:,}</b>: '
            f"plain <code>{escape(repr(found.plain))}</code>, accelerated "
            f"<code>{escape(repr(found.accelerated))}</code>. In reduced precision a near-tie "
            "between two tokens can fall either way.</div>"
        )
    assert proof.plain and proof.accelerated
    slow, fast = proof.plain.metrics.decode_seconds, proof.accelerated.metrics.decode_seconds
    return (
        f'<div class="verdict same"><b>Identical</b>: all {found.tokens:,} tokens. Plain '
        f"{milliseconds(slow)}, accelerated {milliseconds(fast)}: "
        f"<b>{proof.speedup or 0:.2f}×</b>, measured.</div>"
    )


def wire(
    session: Session,
    parts: Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
    refresh: Any,
) -> None:
    """Connect composer, actions and views. `refresh` redraws the conversation list."""
    screen = [
        parts.tokens, parts.bubbles, parts.empty, parts.send, parts.stop, parts.again,
        parts.edit, parts.prove,
    ]

    def say(
        request: gr.Request,
        text: str,
        conversation: str | None,
        editing: int | None,
        memory: dict[str, Any] | None,
        *values: Any,
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        try:
            system, preferences = controls.read(values)
            store = session.conversations(owner)
            if conversation is not None and editing is not None:
                session.edit(owner, conversation, editing, text)
            else:
                fresh = conversation is None
                conversation = session.say(owner, conversation, text)
                if fresh:
                    store.set_system_prompt(conversation, system)
                    store.set_settings(conversation, preferences.mapping())
        except StrataError as error:
            warn(str(error))
            return {parts.pending: None}
        session.viewing[request.session_hash or ""] = conversation
        return {
            **shown(session, parts, owner, conversation),
            **working(parts, True),
            current: conversation,
            parts.box: "",
            parts.proof: "",
            parts.editing: None,
            parts.pending: conversation,
        }

    def answer(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None, *values: Any
    ) -> Iterator[dict[Any, Any]]:
        if conversation is None:
            yield {parts.pending: None}
            return
        owner, here = owner_of(session, memory, request), request.session_hash or ""
        try:
            stream = Stream(session, parts, session.conversations(owner).messages(conversation))
            for update in session.answer(owner, conversation, controls.read(values)[1]):
                there = session.viewing.get(here) == conversation
                changes = stream.changes(update, session.views.get(here, TOKENS) if there else "")
                if changes:
                    yield changes
        except StrataError as error:
            warn(str(error))
        pass_on(session, owner)
        if session.viewing.get(here) == conversation:
            with told():
                yield {**shown(session, parts, owner, conversation), parts.pending: None}
        else:
            yield {parts.pending: None}

    def retry(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        try:
            if conversation is None:
                raise PromptError("There is nothing to answer yet. Write a message first.")
            session.drop_answer(owner, conversation)
        except StrataError as error:
            warn(str(error))
            return {parts.pending: None}
        return {
            **shown(session, parts, owner, conversation),
            **working(parts, True),
            parts.proof: "",
            parts.pending: conversation,
        }

    def take_back(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        with told():
            store = session.conversations(owner)
            messages = store.messages(conversation) if conversation else ()
            said = [m for m in messages if m.role == "user"]
            if said:
                return {parts.box: said[-1].content, parts.editing: said[-1].position}
            raise PromptError("There is no message to edit yet. Write one first.")
        return {parts.editing: None}

    def rewrite(
        data: gr.EditData,
        request: gr.Request,
        conversation: str | None,
        memory: dict[str, Any] | None,
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        try:
            messages = session.conversations(owner).messages(conversation or "")
            at = data.index if isinstance(data.index, int) else data.index[0]
            session.edit(owner, conversation or "", messages[at].position, str(data.value))
        except StrataError as error:
            warn(str(error))
            return {parts.pending: None}
        return {
            **shown(session, parts, owner, conversation),
            **working(parts, True),
            parts.pending: conversation,
        }

    def stop(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> None:
        if conversation:
            session.stop(owner_of(session, memory, request), conversation)

    def prove(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> Iterator[dict[Any, Any]]:
        owner = owner_of(session, memory, request)
        try:
            yield {**working(parts, True), parts.proof: proof_line(Proof(0))}
            for proof in session.prove(owner, conversation or ""):
                yield {parts.proof: proof_line(proof)}
        except StrataError as error:
            warn(str(error))
            yield {parts.proof: ""}
        yield working(parts, False)

    def look(request: gr.Request, choice: str) -> list[Any]:
        session.views[request.session_hash or ""] = choice
        return [
            gr.update(visible=True if choice == name else "hidden") for name in (TOKENS, MARKDOWN)
        ]

    said = [*screen, current, parts.box, parts.proof, parts.editing, parts.pending]
    answered = [*screen, parts.figures, parts.pending]
    inputs = [parts.pending, memory, *controls.inputs]

    def then_answer(event: Any) -> None:
        event.then(answer, inputs, answered, **ON_MODEL).then(*refresh, **AT_ONCE)
        event.then(*refresh, **AT_ONCE)

    spoken = [current, parts.editing, memory, *controls.inputs]
    then_answer(
        gr.on([parts.box.submit, parts.send.click], say, [parts.box, *spoken], said, **AT_ONCE)
    )
    for button in parts.examples:
        then_answer(button.click(say, [button, *spoken], said, **AT_ONCE))
    then_answer(
        gr.on([parts.again.click, parts.bubbles.retry], retry, [current, memory], said, **AT_ONCE)
    )
    then_answer(parts.bubbles.edit(rewrite, [current, memory], said, **AT_ONCE))
    parts.edit.click(take_back, [current, memory], [parts.box, parts.editing], **AT_ONCE)
    parts.stop.click(stop, [current, memory], None, **AT_ONCE)
    parts.prove.click(prove, [current, memory], [*screen, parts.proof], **ON_MODEL)
    parts.view.change(look, parts.view, [parts.tokens, parts.bubbles], **AT_ONCE)
