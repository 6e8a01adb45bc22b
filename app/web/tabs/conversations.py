"""The list of conversations: search, open, pin, rename, move to a folder, delete, export, import.

Text reaches the component as data; its template and script (assets/list.js) are fixed. Its value
has these keys:

- `groups`: each has a name and `items`. An item has the id, title, `pinned` and folder of a
  conversation. In a search, it also has the `message` that holds the words, and the `hit`: the text
  before the words, the words, and the text after them.
- `current`: the id of the open conversation.
- `folders`: the names of all folders.
- `empty` and `more`: a line that is shown if the list is empty or incomplete.
- `watch`: the token and revision with which the page notices that another page changed the list.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import Any

import gradio as gr
from gradio.blocks import Block

from app.service import exports
from app.service.pages import LISTED, THE_LIST, Download
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import page_export
from app.web.kit import (
    REFRESH,
    Event,
    Payload,
    Tab,
    Updates,
    Visit,
    hide,
    html,
    newest,
    notify_errors,
    numbered,
    show,
    show_notices,
    small_button,
    upload_button,
    upload_content,
    warn,
)
from app.web.render import Data
from app.web.tabs import settings
from app.web.tabs.chat import Chat, undo, watched
from app.web.tabs.settings import Settings
from assets import read
from engine.text import folded
from storage import imports
from storage.conversations import Conversation

SHOWN = LISTED
DELETED = "The conversation was deleted."
FORMATS = {
    "json": exports.JSON,
    "markdown": exports.MARKDOWN,
    "page": exports.Format(
        "html", "text/html", lambda store, id: page_export.page(store.get(id), store.messages(id))
    ),
}
ALL = (("JSON", "json"), ("Markdown", "markdown"), ("Pages", "page"))


class ConversationList(Tab):
    """The column with the list. `refresh` is the event that redraws it. `with_list` makes the event
    of another part of the chat update the list too, which costs half as much as an event of its
    own. The chat's refreshes use the guard of this tab."""

    chat: Chat
    controls: Settings
    refresh: Event

    def __init__(self, session: Session, memory: gr.BrowserState, current: gr.State) -> None:
        super().__init__(session, memory)
        self.current = current
        with gr.Column(scale=2, min_width=210, elem_classes="list"):
            self.new_button = small_button("New conversation", elem_id="new")
            self.start_from = settings.preset_picker()
            self.search = gr.Textbox(
                show_label=False,
                container=False,
                label="Search conversations",
                placeholder="Search",
                elem_id="search",
            )
            self.listed: Any = html(
                value={"groups": []},
                html_template=TEMPLATE,
                js_on_load=read(*SCRIPT),
                elem_id="conversations",
                elem_classes="conversations",
            )
            with gr.Row(elem_classes="tools"):
                self.import_button = upload_button(
                    "Import", min_width=40, file_types=[".json", ".jsonl", ".zip"]
                )
                self.export_button = small_button("Export all", min_width=40, elem_id="export-all")
            with gr.Row(visible=False, elem_classes="tools", elem_id="formats") as self.formats:
                self.every = {kind: small_button(name, min_width=40) for name, kind in ALL}

    def wire(self, chat: Chat, controls: Settings) -> Event:
        """Connect the list. Returns the event that opens the conversation that was open before."""
        self.chat, self.controls = chat, controls
        list_value = self.listed
        showing: list[Block] = [*chat.stored, chat.proof, *chat.opened, *controls.outputs]
        # The conversation that was chosen last opens, even if answers for others arrive later.
        chosen, here = newest(showing), [self.current, self.search]
        self.refresh = refresh = self.event(self.look, here, list_value, guard=newest([list_value]))
        opened = self.on(list_value.open, self.open, (), showing, mode="multiple", guard=chosen)
        self.then(opened, refresh)
        started = self.on(
            self.new_button.click,
            self.new,
            self.start_from,
            [*showing, chat.composer.channels["ready"]],
            mode="multiple",
            guard=chosen,
        )
        self.then(started, refresh)
        self.on(self.search.change, refresh, mode="always_last")
        self.on(list_value.look, self.look, here, list_value, mode="always_last", guard=REFRESH)
        self.on(chat.tokens.look, chat.shown, self.current, chat.stored, guard=REFRESH)
        for trigger, handler in (
            (list_value.pin, self.pin),
            (list_value.rename, self.rename),
            (list_value.folder, self.file),
            (list_value.title, self.suggest),
        ):
            self.then(self.on(trigger, handler, mode="multiple"), refresh)
        self.then(self.on(list_value.remove, self.remove, self.current, showing), refresh)
        self.on_save(list_value.export, self.export)
        self.on(self.export_button.click, show, (), self.formats)
        for kind, button in self.every.items():
            self.on_save(button.click, partial(self.export_all, kind))
            self.on(button.click, hide, (), self.formats)
        imported = self.on(self.import_button.upload, self.import_, self.import_button, showing)
        self.then(imported, refresh)
        return self.event(self.show, self.current, showing, guard=REFRESH)

    def look(self, visit: Visit, conversation: str | None, search: str) -> Updates:
        """Redraw the list, filtered by the search. The open conversation stays as it is."""
        return {self.listed: self.value(visit, conversation, search)[0]}

    def value(self, visit: Visit, conversation: str | None, search: str) -> tuple[Data, bool]:
        """The current value of the list, and whether it differs from the one the page received."""
        store = self.session.chat.conversations(visit.owner)
        # The revision is read first, so that the page looks again for any later change.
        watch = watched(self.session, visit.owner, THE_LIST)
        found = store.list(search, SHOWN)
        more = store.count() - len(found) if len(found) == SHOWN and not search.strip() else 0
        value = {**list_value(found, conversation, search.strip(), store.folders(), more), **watch}
        digest = sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        before, self.session.listed[visit.page] = self.session.listed.get(visit.page), digest
        return numbered(value), digest != before

    def with_list(
        self, handler: Callable[..., Updates], inputs: Sequence[Block], outputs: Sequence[Block]
    ) -> Event:
        """An event whose handler takes the visit, the event's data and the open conversation, then
        the values of `inputs`. It also updates the list if that changed, which saves an event of
        its own."""

        def both(
            visit: Visit,
            data: gr.EventData,
            conversation: str | None,
            search: str,
            *values: object,
        ) -> Updates:
            updates = handler(visit, data, conversation, *values)
            # The handler may have opened another conversation.
            now = self.session.viewing.get(visit.page, conversation)
            with notify_errors():
                value, fresh = self.value(visit, now, search)
                return {**updates, **({self.listed: value} if fresh else {})}
            return updates

        return self.event(both, [self.current, self.search, *inputs], [*outputs, self.listed])

    def settings_of(self, conversation: Conversation) -> Updates:
        """Show the settings stored with a conversation, or the default ones if those cannot be
        used. Without stored settings, the page keeps its own."""
        if not conversation.settings and not conversation.damaged:
            return {self.controls.system: conversation.system_prompt}
        stored, problem = Preferences.usable(conversation.settings)
        if problem or conversation.damaged:
            problem = problem or "They are damaged in the database."
            warn(
                f"The settings of this conversation cannot be used. {problem} The default settings "
                "are shown instead."
            )
        return self.controls.shown(conversation.system_prompt, stored)

    def show(self, visit: Visit, conversation: str | None) -> Updates:
        updates: Updates = {**self.chat.open(visit, conversation), self.chat.proof: ""}
        # The conversation is open even if it cannot be shown, so that it can be deleted.
        updates |= self.chat.blank(visit.page)
        with notify_errors():
            updates |= self.chat.shown(visit, conversation)
            if conversation:
                updates |= self.settings_of(
                    self.session.chat.conversations(visit.owner).get(conversation)
                )
        return updates

    def open(self, visit: Visit, data: gr.EventData) -> Updates:
        """Open the chosen conversation. From a search, show the version that holds the words."""
        sent = Payload(data)
        conversation, message = sent.text("id") or None, sent.text("message")
        if conversation and message:
            with notify_errors():
                self.session.chat.conversations(visit.owner).show(conversation, message)
        return self.show(visit, conversation)

    def new(self, visit: Visit, preset: str | None) -> Updates:
        """Show no conversation, with the settings of a preset. The composer sends nothing before
        they are there."""
        ready = self.chat.composer.channels["ready"]
        updates = {**self.show(visit, None), ready: numbered({})}
        with notify_errors():
            updates |= self.controls.use(visit.owner, preset)
        return updates

    def pin(self, owner: str, data: gr.EventData) -> None:
        sent, store = Payload(data), self.session.chat.conversations(owner)
        store.pin(sent.text("id"), sent.values.get("pinned") is True)

    def rename(self, owner: str, data: gr.EventData) -> None:
        sent, store = Payload(data), self.session.chat.conversations(owner)
        store.rename(sent.text("id"), sent.text("title"))

    def file(self, owner: str, data: gr.EventData) -> None:
        sent, store = Payload(data), self.session.chat.conversations(owner)
        store.file(sent.text("id"), sent.text("folder"))

    def suggest(self, owner: str, data: gr.EventData) -> None:
        self.session.chat.suggest_title(owner, Payload(data).text("id"))

    def remove(self, visit: Visit, data: gr.EventData, conversation: str | None) -> Updates:
        id = Payload(data).text("id")
        offer = undo(self.session.chat.delete(visit.owner, id), DELETED)
        updates = self.show(visit, None if id == conversation else conversation)
        tokens = updates[self.chat.tokens]
        return {**updates, self.chat.tokens: {**tokens, **offer}}  # type: ignore[dict-item]

    def export(self, owner: str, data: gr.EventData) -> Download:
        sent, store = Payload(data), self.session.chat.conversations(owner)
        format = FORMATS.get(sent.text("kind"), exports.JSON)
        return exports.one(store, sent.text("id"), format)

    def export_all(self, kind: str, owner: str) -> Download:
        return exports.every(self.session.chat.conversations(owner), FORMATS[kind])

    def import_(self, visit: Visit, file: str | None) -> Updates:
        made = None
        with notify_errors():
            made = read_in(self.session, visit.owner, upload_content(file))
        show_notices(self.session, visit.owner)
        return self.show(visit, made) if made else {}


def read_in(session: Session, owner: str, content: bytes) -> str:
    """Import the conversations of a file that are not stored yet. Returns the id of the first one.
    Raises StorageError."""
    store = session.chat.conversations(owner)
    found = imports.read_file(content, store.room())
    stored = store.stored(found.conversations)
    fresh = [one for one, id in zip(found.conversations, stored, strict=True) if id is None]
    conversations, problems = [], []
    for export in fresh:
        problem = Preferences.usable(export.settings)[1]
        conversations.append(export._replace(settings={}) if problem else export)
        problems += [problem] if problem else []
    made = store.import_(conversations)
    for notice in (*found.notices, *already(len(stored) - len(fresh), len(stored))):
        session.notices.report(owner, notice)
    if problems:
        session.notices.report(
            owner,
            f"The settings of {len(problems):,} conversations could not be used and were left out. "
            f"The first: {problems[0]}",
        )
    return next(id for id in (*made, *stored) if id is not None)


def already(known: int, read: int) -> Iterator[str]:
    """The notice that so many of the conversations of a file were stored before, if any."""
    if read == known == 1:
        yield (
            "This conversation is here already, with the same title and messages. It was opened, "
            "and not imported again."
        )
    elif known:
        yield (
            f"{known:,} of {read:,} conversations are here already, with the same title and "
            "messages. They were not imported again."
        )


TEMPLATE = (
    '<div class="rows"></div><p class="nothing" hidden></p><p class="more" hidden></p>'
    '<datalist id="folders"></datalist>'
)
PINNED = "Pinned"
NO_HIT = "No conversation contains these words."
SCRIPT = ("chat/pages.js", "list.js")


def list_value(
    found: Sequence[Conversation],
    current: str | None,
    search: str = "",
    folders: Iterable[str] = (),
    more: int = 0,
) -> Data:
    """The value of the list. Without a search it has groups: pinned, the folders, then by time."""
    groups: dict[str, list[Data]] = {}
    today = date.today()
    for conversation in sorted(found, key=rank) if not search else found:
        name = "" if search else group_of(conversation, today)
        groups.setdefault(name, []).append(item(conversation))
    nothing = NO_HIT if search else "Your conversations will appear here."
    return {
        "groups": [{"name": name, "items": items} for name, items in groups.items()],
        "current": current,
        "folders": [*folders],
        "empty": "" if found else nothing,
        "more": f"{more:,} more. Use the search to find them." if more else "",
    }


def item(conversation: Conversation) -> Data:
    shown: Data = {
        name: getattr(conversation, name) for name in ("id", "title", "pinned", "folder")
    }
    if conversation.hit is not None:
        message, *hit = conversation.hit
        shown |= {"message": message, "hit": hit}
    return shown


def rank(conversation: Conversation) -> tuple[int, str]:
    """The sort key: pinned conversations first, then folders by name. Within each, the order by
    time stays."""
    if conversation.pinned:
        return 0, ""
    return (1, folded(conversation.folder)) if conversation.folder else (2, "")


def group_of(conversation: Conversation, today: date) -> str:
    if conversation.pinned:
        return PINNED
    if conversation.folder:
        return conversation.folder
    changed = datetime.fromtimestamp(conversation.updated).date()
    if changed >= today:
        return "Today"
    if changed >= today - timedelta(days=1):
        return "Yesterday"
    return "Last 7 days" if changed >= today - timedelta(days=7) else "Earlier"
