"""The conversation list: new, search, open, rename, delete (after asking), export and import."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from app.service.preferences import Preferences
from app.service.session import Session
from app.web.tabs import chat_view
from app.web.tabs.settings import Controls
from app.web.wiring import AT_ONCE, Event, Memory, Updates, owner_of, pass_on, told, warn
from engine.errors import StorageError
from storage import imports
from storage.conversations import Conversation

SHOWN = 300
"""So many are listed, as a page with thousands is slow. The search finds the others."""
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
            [],
            show_label=False,
            container=False,
            elem_classes="conversations",
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
            question = gr.HTML(
                "Delete this conversation? What the model learned from its own answers stays, "
                "until Past answers is emptied in the Databases tab."
            )
            with gr.Row():
                yes = gr.Button("Delete", size="sm", variant="stop", min_width=40, elem_id="yes")
                no = gr.Button("Keep", size="sm", min_width=40, elem_id="no")
        outgoing = gr.Textbox(visible="hidden")
    return Parts(
        new,
        search,
        choices,
        rename,
        delete,
        export,
        import_,
        naming,
        name,
        name_save,
        asking,
        question,
        yes,
        no,
        outgoing,
    )


def choices(found: Iterable[Conversation]) -> list[tuple[str, str]]:
    """Titles and ids; the browser shows titles as plain text."""
    return [(conversation.title, conversation.id) for conversation in found]


class Handlers:
    """What the list's events do."""

    def __init__(
        self,
        session: Session,
        parts: Parts,
        talk: chat_view.Parts,
        controls: Controls,
        current: gr.State,
    ) -> None:
        self.session, self.parts, self.talk = session, parts, talk
        self.controls, self.current = controls, current

    def redraw(
        self,
        request: gr.Request,
        conversation: str | None,
        search: str,
        memory: Memory,
    ) -> tuple[object, object]:
        """The list, filtered; the browser remembers what is open."""
        owner = owner_of(self.session, memory, request)
        remembered = {**(memory or {}), "conversation": conversation}
        with told():
            found = self.session.chat.conversations(owner).list(search, SHOWN)
            there = conversation in [c.id for c in found]
            value = conversation if there else None
            return gr.update(choices=choices(found), value=value), remembered
        return gr.skip(), remembered

    def settings_of(self, conversation: Conversation) -> Updates:
        """The settings that were kept with a conversation, the usual ones where these cannot be
        used; without any, those of the page stay."""
        if not conversation.settings and not conversation.damaged:
            return {self.controls.system: conversation.system_prompt}
        stored, problem = Preferences.usable(conversation.settings)
        if problem or conversation.damaged:
            problem = problem or "They are damaged in the database."
            warn(
                f"The settings of this conversation cannot be used. {problem} The default settings "
                "are shown instead."
            )
        values = self.controls.show(conversation.system_prompt, stored)
        return dict(zip(self.controls.inputs, values, strict=True))

    def show(self, request: gr.Request, owner: str, conversation: str | None) -> Updates:
        """Open a conversation, or none."""
        updates: Updates = {
            self.current: conversation,
            self.talk.proof: "",
            self.talk.editing: None,
            self.parts.naming: gr.update(visible=False),
            self.parts.asking: gr.update(visible=False),
        }
        self.session.viewing[request.session_hash or ""] = conversation
        # It is open whatever of it cannot be shown: so it can be deleted.
        updates |= chat_view.blank(self.session, self.talk, request)
        with told():
            updates |= chat_view.shown(self.session, self.talk, request, owner, conversation)
            if conversation:
                updates |= self.settings_of(
                    self.session.chat.conversations(owner).get(conversation)
                )
            updates[self.talk.figures] = chat_view.last_figures(self.session, owner, conversation)
        return updates

    def open_(self, request: gr.Request, chosen: str | None, memory: Memory) -> Updates:
        """Open the chosen one."""
        return self.show(request, owner_of(self.session, memory, request), chosen)

    def new(self, request: gr.Request, memory: Memory) -> Updates:
        """Open none: the first message makes a new one."""
        updates = self.show(request, owner_of(self.session, memory, request), None)
        return {**updates, self.parts.list: gr.update(value=None)}

    def ask_name(
        self, request: gr.Request, conversation: str | None, memory: Memory
    ) -> tuple[object, object]:
        """Show the box for a new title."""
        owner = owner_of(self.session, memory, request)
        with told():
            if conversation is None:
                raise StorageError("No conversation is open. Open the one to rename first.")
            title = self.session.chat.conversations(owner).get(conversation).title
            return gr.update(visible=True), title
        return gr.update(visible=False), ""

    def save_name(
        self,
        request: gr.Request,
        conversation: str | None,
        title: str,
        memory: Memory,
    ) -> object:
        """Keep the new title."""
        owner = owner_of(self.session, memory, request)
        with told():
            if conversation:
                self.session.chat.conversations(owner).rename(conversation, title)
            return gr.update(visible=False)
        return gr.update()

    def ask_delete(self, conversation: str | None) -> object:
        """Ask before deleting."""
        if conversation is None:
            warn("No conversation is open. Open the one to delete first.")
        return gr.update(visible=conversation is not None)

    def delete(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Delete the open conversation."""
        owner = owner_of(self.session, memory, request)
        with told():
            if conversation:
                self.session.chat.delete(owner, conversation)
        return self.show(request, owner, None)

    def export(self, request: gr.Request, conversation: str | None, memory: Memory) -> str:
        """The open conversation as JSON text, which the browser saves."""
        owner = owner_of(self.session, memory, request)
        with told():
            if conversation is None:
                raise StorageError("No conversation is open. Open the one to export first.")
            return json.dumps(self.session.chat.conversations(owner).export(conversation), indent=1)
        return ""

    def import_(self, request: gr.Request, file: str | None, memory: Memory) -> Updates:
        """Read a file and open what it held."""
        owner = owner_of(self.session, memory, request)
        made = None
        with told():
            try:
                made = read_in(self.session, owner, file)
            finally:
                with suppress(OSError):
                    Path(file or "").unlink()  # Gradio would keep what was uploaded
        pass_on(self.session, owner)
        return self.show(request, owner, made) if made else {self.current: gr.skip()}


def wire(
    session: Session,
    parts: Parts,
    talk: chat_view.Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
) -> tuple[Event, Event]:
    """Connect the list; returns the events that redraw it, and that open a conversation."""
    showing = [*chat_view.stored(talk), talk.proof, talk.figures, talk.editing, current]
    showing += [parts.list, parts.naming, parts.asking, *controls.inputs]

    on = Handlers(session, parts, talk, controls, current)
    refresh = Event(on.redraw, [current, parts.search, memory], [parts.list, memory])
    opening = Event(on.open_, [parts.list, memory], showing)

    parts.list.input(*opening, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.new.click(on.new, [memory], showing, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.search.change(*refresh, trigger_mode="always_last", **AT_ONCE)
    parts.rename.click(on.ask_name, [current, memory], [parts.naming, parts.name], **AT_ONCE)
    gr.on(
        [parts.name.submit, parts.name_save.click],
        on.save_name,
        [current, parts.name, memory],
        parts.naming,
        **AT_ONCE,
    ).then(*refresh, **AT_ONCE)
    parts.delete.click(on.ask_delete, current, parts.asking, **AT_ONCE)
    parts.no.click(lambda: gr.update(visible=False), None, parts.asking, **AT_ONCE)
    parts.yes.click(on.delete, [current, memory], showing, **AT_ONCE).then(*refresh, **AT_ONCE)
    parts.export.click(on.export, [current, memory], parts.outgoing, **AT_ONCE).then(
        None, parts.outgoing, None, js=SAVE_FILE, **AT_ONCE
    )
    parts.import_.upload(on.import_, [parts.import_, memory], showing, **AT_ONCE).then(
        *refresh, **AT_ONCE
    )
    return refresh, opening


def read_in(session: Session, owner: str, file: str | None) -> str:
    """Import a file's conversations; returns the id of the first one. Raises StorageError."""
    try:
        content = Path(file or "").read_bytes()
    except OSError as error:
        raise StorageError(f"The file cannot be read ({error.strerror}). Try again.") from error
    store = session.chat.conversations(owner)
    found = imports.read_file(content, store.room())
    conversations, problems = [], []
    for export in found.conversations:
        problem = Preferences.usable(export.settings)[1]
        conversations.append(export._replace(settings={}) if problem else export)
        problems += [problem] if problem else []
    made = store.import_(conversations)
    for notice in found.notices:
        session.notices.report(owner, notice)
    if problems:
        session.notices.report(
            owner,
            f"The settings of {len(problems):,} conversations could not be used and were left out. "
            f"The first: {problems[0]}",
        )
    return made[0]
