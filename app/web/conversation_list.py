"""The component that lists conversations. Text reaches it as data; its template and script are
fixed.

Its value: `groups` (each a name and `items`: id, title, pinned, folder, and of a search the
`message` that holds the words and the `hit`: what stands before them, the words, what follows),
`current` (the open one), `folders` (their names), `empty` and `more` (a line where nothing, or not
everything, is shown).
"""

from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

import gradio as gr

from app.web.render import Data
from assets import ASSETS
from storage.conversations import Conversation

TEMPLATE = (
    '<div class="rows"></div><p class="nothing" hidden></p><p class="more" hidden></p>'
    '<datalist id="folders"></datalist>'
)
PINNED = "Pinned"


def conversation_list(elem_id: str) -> gr.HTML:
    """An empty list."""
    return gr.HTML(
        value={"groups": []},
        html_template=TEMPLATE,
        js_on_load=(ASSETS / "list.js").read_text(encoding="utf-8"),
        elem_id=elem_id,
        elem_classes="conversations",
        apply_default_css=False,
    )


def listed(
    found: Sequence[Conversation],
    current: str | None,
    search: str = "",
    folders: Iterable[str] = (),
    more: int = 0,
) -> Data:
    """The list's value. Without a search it is in groups: pinned ones, folders, then by time."""
    groups: dict[str, list[Data]] = {}
    today = date.today()
    for conversation in sorted(found, key=rank) if not search else found:
        name = "" if search else group_of(conversation, today)
        groups.setdefault(name, []).append(item(conversation))
    empty = "" if found else nothing(search)
    return {
        "groups": [{"name": name, "items": items} for name, items in groups.items()],
        "current": current,
        "folders": [*folders],
        "empty": empty,
        "more": f"{more:,} more. Search finds them." if more else "",
    }


def nothing(search: str) -> str:
    """What an empty list says."""
    if search:
        return "No conversation holds these words."
    return "Conversations stand here, as soon as there are any."


def item(conversation: Conversation) -> Data:
    """One entry."""
    shown: Data = {
        "id": conversation.id,
        "title": conversation.title,
        "pinned": conversation.pinned,
        "folder": conversation.folder,
    }
    if conversation.hit is None:
        return shown
    message, *hit = conversation.hit
    return {**shown, "message": message, "hit": hit}


def rank(conversation: Conversation) -> tuple[int, str]:
    """Pinned ones first, then folders by name; the order of time stays within each."""
    if conversation.pinned:
        return 0, ""
    return (1, conversation.folder.casefold()) if conversation.folder else (2, "")


def group_of(conversation: Conversation, today: date) -> str:
    """The name of the group that a conversation stands in."""
    if conversation.pinned:
        return PINNED
    if conversation.folder:
        return conversation.folder
    changed = datetime.fromtimestamp(conversation.updated).date()
    if changed >= today:
        return "Today"
    if changed >= today - timedelta(days=1):
        return "Yesterday"
    return "Last seven days" if changed >= today - timedelta(days=7) else "Earlier"
