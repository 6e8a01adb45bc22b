"""The conversation list: new, search, open, rename, delete after asking, export and import."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from app.events import AT_ONCE, owner_of, pass_on, told, warn
from app.preferences import Preferences
from app.session import Session
from app.tabs import chat
from app.tabs.settings import Controls
from engine.errors import StorageError, StrataError
from storage.conversations import Conversation

SAVE_FILE = """(text) => {
  if (!text) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}"""


@dataclass(slots=True)
class Parts:
    """The list's components."""

    new: gr.Button
    search: gr.Textbox
    list: gr.Radio
    rename: gr.Button
    delete: gr.Button
    export: gr.Button
    import_: gr.UploadButton
    naming: gr.Row
    name: gr.Textbox
    name_save: gr.Button
    asking: gr.Column
    question: gr.HTML
    yes: gr.Button
    no: gr.Button
    outgoing: gr.Textbox


def build() -> Parts:
    """A column beside the chat."""
    with gr.Column(scale=2, min_width=210, elem_classes="list"):
        new = gr.Button("New conversation", size="sm", elem_id="new")
        search = gr.Textbox(
            show_label=False, container=False, placeholder="Search", elem_id="search"
        )
        choices = gr.Radio(
            [], show_label=False, container=False, elem_classes="conversations",
            elem_id="conversations",
        )
        with gr.Row(elem_classes="tools"):
            rename = gr.Button("Rename", size="sm", min_width=40, elem_id="rename")
            delete = gr.Button("Delete", size="sm", min_width=40, elem_id="delete")
            export = gr.Button("Export", size="sm", min_width=40)
            import_ = gr.UploadButton(
                "Import", size="sm", min_width=40, file_types=[".json"], type="filepath"
            )
        with gr.Row(visible=False, elem_classes="naming") as naming:
            name = gr.Textbox(show_label=False, container=False, elem_id="title", scale=4)
            name_save = gr.Button("Save", size="sm", min_width=40, elem_id="title-save")
        with gr.Column(visible=False, elem_classes="asking") as asking:
            question = gr.HTML("Delete this conversation and all that was learned from it?")
            with gr.Row():
                yes = gr.Button("Delete", size="sm", variant="stop", min_width=40, elem_id="yes")
                no = gr.Button("Keep", size="sm", min_width=40, elem_id="no")
        outgoing = gr.Textbox(visible="hidden")
    return Parts(
        new, search, choices, rename, delete, export, import_, naming, name, name_save, asking,
        question, yes, no, outgoing,
    )


def choices(found: Any) -> list[tuple[str, str]]:
    """Titles and ids; the browser shows titles as plain text."""
    return [(conversation.title, conversation.id) for conversation in found]


def wire(
    session: Session,
    parts: Parts,
    talk: chat.Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
) -> Any:
    """Connect the list; returns (function, inputs, outputs) that redraw it."""
    screen = [
        talk.tokens, talk.bubbles, talk.empty, talk.send, talk.stop, talk.again, talk.edit,
        talk.prove, talk.proof, talk.figures, talk.editing, current, parts.list, parts.naming,
        parts.asking, *controls.inputs,
    ]

    def redraw(
        request: gr.Request,
        conversation: str | None,
        search: str,
        memory: dict[str, Any] | None,
    ) -> tuple[Any, Any]:
        owner = owner_of(session, memory, request)
        found = session.conversations(owner).list(search)
        remembered = {**(memory or {}), "conversation": conversation}
        there = conversation in [c.id for c in found]
        return (
            gr.update(choices=choices(found), value=conversation if there else None),
            remembered,
        )

    refresh = (redraw, [current, parts.search, memory], [parts.list, memory])

    def settings_of(conversation: Conversation) -> dict[Any, Any]:
        if not conversation.settings:
            return {}
        stored = Preferences.from_mapping(conversation.settings)
        values = controls.show(conversation.system_prompt, stored)
        return dict(zip(controls.inputs, values, strict=True))

    def show(request: gr.Request, owner: str, conversation: str | None) -> dict[Any, Any]:
        updates: dict[Any, Any] = {
            current: conversation,
            talk.proof: "",
            talk.editing: None,
            parts.naming: gr.update(visible=False),
            parts.asking: gr.update(visible=False),
        }
        with told():
            updates |= chat.shown(session, talk, owner, conversation)
            updates[talk.figures] = chat.last_figures(session, owner, conversation)
            session.viewing[request.session_hash or ""] = conversation
            if conversation:
                updates |= settings_of(session.conversations(owner).get(conversation))
        return updates

    def open_(
        request: gr.Request, chosen: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        return show(request, owner_of(session, memory, request), chosen)

    def new(request: gr.Request, memory: dict[str, Any] | None) -> dict[Any, Any]:
        updates = show(request, owner_of(session, memory, request), None)
        return {**updates, parts.list: gr.update(value=None)}

    def ask_name(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> tuple[Any, Any]:
        owner = owner_of(session, memory, request)
        with told():
            if conversation is None:
                raise StorageError("No conversation is open. Open the one to rename first.")
            return gr.update(visible=True), session.conversations(owner).get(conversation).title
        return gr.update(visible=False), ""

    def save_name(
        request: gr.Request, conversation: str | None, title: str, memory: dict[str, Any] | None
    ) -> Any:
        owner = owner_of(session, memory, request)
        with told():
            if conversation:
                session.conversations(owner).rename(conversation, title)
            return gr.update(visible=False)
        return gr.update()

    def ask_delete(conversation: str | None) -> Any:
        if conversation is None:
            warn("No conversation is open. Open the one to delete first.")
        return gr.update(visible=conversation is not None)

    def delete(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        with told():
            if conversation:
                session.delete(owner, conversation)
        return show(request, owner, None)

    def export(
        request: gr.Request, conversation: str | None, memory: dict[str, Any] | None
    ) -> str:
        owner = owner_of(session, memory, request)
        with told():
            if conversation is None:
                raise StorageError("No conversation is open. Open the one to export first.")
            return json.dumps(session.conversations(owner).export(conversation), indent=1)
        return ""

    def import_(
        request: gr.Request, file: str | None, memory: dict[str, Any] | None
    ) -> dict[Any, Any]:
        owner = owner_of(session, memory, request)
        made = None
        with told():
            made = read_in(session, owner, file)
        pass_on(session, owner)
        return show(request, owner, made) if made else {current: gr.skip()}

    parts.list.input(open_, [parts.list, memory], screen, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.new.click(new, [memory], screen, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.search.change(*refresh, trigger_mode="always_last", **AT_ONCE)
    parts.rename.click(ask_name, [current, memory], [parts.naming, parts.name], **AT_ONCE)
    gr.on(
        [parts.name.submit, parts.name_save.click],
        save_name,
        [current, parts.name, memory],
        parts.naming,
        **AT_ONCE,
    ).then(*refresh, **AT_ONCE)
    parts.delete.click(ask_delete, current, parts.asking, **AT_ONCE)
    parts.no.click(lambda: gr.update(visible=False), None, parts.asking, **AT_ONCE)
    parts.yes.click(delete, [current, memory], screen, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.export.click(export, [current, memory], parts.outgoing, **AT_ONCE).then(
        None, parts.outgoing, None, js=SAVE_FILE, **AT_ONCE
    )
    parts.import_.upload(import_, [parts.import_, memory], screen, **AT_ONCE).then(
        *refresh, **AT_ONCE
    )
    return refresh, open_, screen


def read_in(session: Session, owner: str, file: str | None) -> str:
    """Import a file's conversations; returns the id of the last one. Raises StorageError."""
    try:
        data = json.loads(Path(file or "").read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The file is not readable JSON ({type(error).__name__}). "
            "Choose a conversation exported from here, or a ChatGPT export."
        ) from error
    entries = data if isinstance(data, list) else [data]
    made, refused = "", 0
    for entry in entries:
        try:
            made = session.conversations(owner).import_(entry).id
        except StrataError:
            refused += 1
            if len(entries) == 1:
                raise
    if refused:
        session.report(owner, f"{refused} of {len(entries)} conversations could not be read.")
    if not made:
        raise StorageError("The file holds no conversation that can be read. Choose another.")
    return made
