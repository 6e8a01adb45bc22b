"""The list of conversations: search, open, pin, rename, file away, delete, export and import."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service import library
from app.service.downloads import Download
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import page_export
from app.web.conversation_list import conversation_list, listed
from app.web.render import Data
from app.web.tabs import chat_view, presets
from app.web.tabs.messages import undo
from app.web.tabs.settings import Controls
from app.web.wiring import (
    AFTER,
    AT_ONCE,
    LATEST,
    Asked,
    Event,
    Listing,
    Memory,
    Updates,
    newest,
    owner_of,
    pass_on,
    sent,
    told,
    unasked,
    warn,
)
from engine.errors import StorageError
from storage import imports
from storage.conversations import Conversation, Conversations

SHOWN = 300
"""So many are listed, as a page with thousands is slow. The search finds the others."""
DELETED = "The conversation was deleted."
NUMBERS = count()
"""No two values of the list are equal: an equal one would not be drawn, and a menu stay open."""
FORMATS = {
    "json": library.JSON,
    "markdown": library.MARKDOWN,
    "page": library.Format(
        "html", "text/html", lambda store, id: page_export.page(store.get(id), store.messages(id))
    ),
}
ALL = (("JSON", "json"), ("Markdown", "markdown"), ("Pages", "page"))
SAVE_FILE = """async (text) => {
  if (!text) return "";
  const { token, name } = JSON.parse(text);
  const answer = await fetch("/download/" + token);
  if (!answer.ok) return "";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return "";
}"""


@dataclass(slots=True)
class Parts:
    """The list's components."""

    new: gr.Button
    start_from: gr.Dropdown
    search: gr.Textbox
    listed: gr.HTML
    import_: gr.UploadButton
    export: gr.Button
    formats: gr.Row
    every: list[tuple[gr.Button, str]]
    outgoing: gr.Textbox


def build() -> Parts:
    """A column beside the chat."""
    with gr.Column(scale=2, min_width=210, elem_classes="list"):
        new = gr.Button("New conversation", size="sm", elem_id="new")
        start_from = presets.picker()
        search = gr.Textbox(
            show_label=False,
            container=False,
            label="Search conversations",
            placeholder="Search",
            elem_id="search",
        )
        found = conversation_list("conversations")
        with gr.Row(elem_classes="tools"):
            import_ = gr.UploadButton(
                "Import", size="sm", min_width=40, file_types=[".json", ".jsonl"], type="filepath"
            )
            export = gr.Button("Export all", size="sm", min_width=40, elem_id="export-all")
        with gr.Row(visible=False, elem_classes="tools", elem_id="formats") as formats:
            every = [(gr.Button(name, size="sm", min_width=40), kind) for name, kind in ALL]
        outgoing = gr.Textbox(visible="hidden")
    return Parts(new, start_from, search, found, import_, export, formats, every, outgoing)


class Handlers:
    """What the list's events do."""

    def __init__(
        self,
        session: Session,
        parts: Parts,
        talk: chat_view.Parts,
        controls: Controls,
        current: gr.State,
        memory: gr.BrowserState,
    ) -> None:
        self.session, self.parts, self.talk = session, parts, talk
        self.controls, self.current, self.memory = controls, current, memory

    def redraw(
        self,
        request: gr.Request,
        conversation: str | None,
        search: str,
        memory: Memory,
    ) -> Updates:
        """The list, filtered; the browser remembers what is open."""
        owner = owner_of(self.session, memory, request)
        remembered: Updates = {self.memory: {**(memory or {}), "conversation": conversation}}
        with told():
            value, _ = self.value(request, owner, conversation, search)
            return {**remembered, self.parts.listed: value}
        return remembered

    def value(
        self, request: gr.Request, owner: str, conversation: str | None, search: str
    ) -> tuple[Data, bool]:
        """The list as it is now, and whether the page shows another one. Then it is told of it."""
        store, here = self.session.chat.conversations(owner), request.session_hash or ""
        found = store.list(search, SHOWN)
        more = store.count() - len(found) if len(found) == SHOWN and not search.strip() else 0
        value = listed(found, conversation, search.strip(), store.folders(), more)
        digest = sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        before, self.session.listed[here] = self.session.listed.get(here), digest
        return {**value, "drawn": next(NUMBERS)}, digest != before

    def with_list(
        self,
        handler: Callable[..., Updates],
        inputs: Sequence[Block],
        outputs: Sequence[Block],
    ) -> Event:
        """An event whose handler is told what the page sent, and who asks. It then brings the list
        as well, where that changed: an event of its own for that costs as much as this one."""

        def both(
            data: gr.EventData,
            request: gr.Request,
            conversation: str | None,
            search: str,
            memory: Memory,
            *values: object,
        ) -> Updates:
            updates: Updates = handler(data, request, *values)
            owner, here = owner_of(self.session, memory, request), request.session_hash or ""
            now = self.session.viewing.get(here, conversation)  # What was done may open another.
            with told():
                value, fresh = self.value(request, owner, now, search)
                return {**updates, **({self.parts.listed: value} if fresh else {})}
            return updates

        here: list[Block] = [self.current, self.parts.search, self.memory]
        return Event(both, [*here, *inputs], [*outputs, self.parts.listed])

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

    def restore(self, request: gr.Request, conversation: str | None, memory: Memory) -> Updates:
        """Open what a browser had open."""
        return self.show(request, owner_of(self.session, memory, request), conversation)

    def open_(self, data: gr.EventData, request: gr.Request, memory: Memory) -> Updates:
        """Open the chosen one; from a search, at the version that holds the words."""
        owner, said = owner_of(self.session, memory, request), asked(data)
        conversation, message = said.get("id"), said.get("message")
        if conversation and message:
            with told():
                self.session.chat.conversations(owner).show(conversation, message)
        return self.show(request, owner, conversation)

    def new(self, request: gr.Request, memory: Memory) -> Updates:
        """Open none: the first message makes a new one."""
        return self.show(request, owner_of(self.session, memory, request), None)

    def pin(self, data: gr.EventData, request: gr.Request, memory: Memory) -> None:
        """Pin a conversation, or no longer."""
        owner, said = owner_of(self.session, memory, request), asked(data)
        with told():
            pinned = said.get("pinned") == "True"
            self.session.chat.conversations(owner).pin(said.get("id", ""), pinned)

    def rename(self, data: gr.EventData, request: gr.Request, memory: Memory) -> None:
        """Give a conversation another title."""
        owner, said = owner_of(self.session, memory, request), asked(data)
        with told():
            store = self.session.chat.conversations(owner)
            store.rename(said.get("id", ""), said.get("title", ""))

    def file(self, data: gr.EventData, request: gr.Request, memory: Memory) -> None:
        """Put a conversation into a folder, or into none."""
        owner, said = owner_of(self.session, memory, request), asked(data)
        with told():
            store = self.session.chat.conversations(owner)
            store.file(said.get("id", ""), said.get("folder", ""))

    def suggest(self, data: gr.EventData, request: gr.Request, memory: Memory) -> None:
        """Have the model give a conversation a title."""
        owner, said = owner_of(self.session, memory, request), asked(data)
        with told():
            self.session.titles.suggest(owner, said.get("id", ""))

    def remove(
        self,
        data: gr.EventData,
        request: gr.Request,
        conversation: str | None,
        memory: Memory,
    ) -> Updates:
        """Delete a conversation, and offer to take that back."""
        owner, id = owner_of(self.session, memory, request), asked(data).get("id", "")
        with told():
            offer = undo(self.session.chat.delete(owner, id), DELETED)
            updates = self.show(request, owner, None if id == conversation else conversation)
            tokens = updates[self.talk.tokens]
            return {**updates, self.talk.tokens: {**tokens, **offer}}  # type: ignore[dict-item]
        return {self.current: conversation}

    def export(self, data: gr.EventData, request: gr.Request, memory: Memory) -> str:
        """Offer one conversation to the browser, which saves it."""
        said = asked(data)
        with told():
            format = FORMATS.get(said.get("kind", ""), library.JSON)
            found = library.one(self.store(request, memory), said.get("id", ""), format)
            return self.offer(found)
        return ""

    def export_all(self, kind: str) -> Callable[[gr.Request, Memory], tuple[str, object]]:
        """What offers all conversations to the browser, in one file."""

        def export(request: gr.Request, memory: Memory) -> tuple[str, object]:
            with told():
                found = library.every(self.store(request, memory), FORMATS[kind])
                return self.offer(found), gr.update(visible=False)
            return "", gr.update(visible=False)

        return export

    def store(self, request: gr.Request, memory: Memory) -> Conversations:
        """The conversations of whoever asks."""
        return self.session.chat.conversations(owner_of(self.session, memory, request))

    def offer(self, download: Download) -> str:
        """What the page needs to fetch a file."""
        token = self.session.downloads.offer(download)
        return json.dumps({"token": token, "name": download.name})

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


def asked(data: gr.EventData) -> dict[str, str]:
    """What the list says was chosen, as texts."""
    return {str(name): str(value) for name, value in sent(data).items()}


def wire(
    session: Session,
    parts: Parts,
    talk: chat_view.Parts,
    controls: Controls,
    current: gr.State,
    memory: gr.BrowserState,
) -> tuple[Listing, Event]:
    """Connect the list; returns how others have it drawn, and the event that opens what was open
    before."""
    showing: list[Block] = [*chat_view.stored(talk), talk.proof, talk.figures, talk.editing]
    showing += [current, *controls.inputs]
    on = Handlers(session, parts, talk, controls, current, memory)
    # The conversation that was chosen last is open, however late the others come.
    asked = gr.State(Asked())
    drawn: list[Block] = [parts.listed, memory]
    refresh = Event(newest(on.redraw, drawn), [asked, current, parts.search, memory], drawn)
    listing = Listing(refresh, on.with_list, asked)

    parts.listed.open(
        newest(on.open_, showing), [asked, memory], showing, trigger_mode="multiple", **AT_ONCE
    ).then(*refresh, **AFTER)
    parts.new.click(newest(on.new, showing), [asked, memory], showing, **AT_ONCE).then(
        *refresh, **AFTER
    )
    parts.search.change(*refresh, **LATEST)
    changes = (
        (parts.listed.pin, on.pin),
        (parts.listed.rename, on.rename),
        (parts.listed.folder, on.file),
    )
    for event, handler in (*changes, (parts.listed.title, on.suggest)):
        event(handler, [memory], None, trigger_mode="multiple", **AT_ONCE).then(*refresh, **AFTER)
    parts.listed.remove(on.remove, [current, memory], showing, **AT_ONCE).then(*refresh, **AFTER)
    saved: dict[str, Any] = {"inputs": parts.outgoing, "outputs": parts.outgoing, "js": SAVE_FILE}
    exported = parts.listed.export(on.export, [memory], parts.outgoing, **AT_ONCE)
    exported.then(None, **saved, **AFTER)
    parts.export.click(lambda: gr.update(visible=True), None, parts.formats, **AT_ONCE)
    for button, kind in parts.every:
        exported = button.click(
            on.export_all(kind), [memory], [parts.outgoing, parts.formats], **AT_ONCE
        )
        exported.then(None, **saved, **AFTER)
    parts.import_.upload(on.import_, [parts.import_, memory], showing, **AT_ONCE).then(
        *refresh, **AFTER
    )
    return listing, Event(unasked(on.restore), [asked, current, memory], showing)


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
