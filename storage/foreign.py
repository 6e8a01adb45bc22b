"""Reads conversations of other programs: of ChatGPT, Open WebUI and llama.cpp's page, those in the
form of ShareGPT, and plain messages.

All of them are read as trees of messages (`_tree`); in a plain list, each message follows the one
before it. What is left out of a message is counted (`foreign_messages.py`).
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from engine.errors import StorageError
from storage.exported import (
    LATEST,
    MAX_TITLE,
    Export,
    ExportedMessage,
    inside,
    moment,
    refusal,
    typed,
)
from storage.foreign_messages import (
    CALLS,
    CANVAS,
    EMPTY,
    FAILED,
    FILES,
    HIDDEN,
    IMAGES,
    INSTRUCTIONS,
    RECORDINGS,
    RESULTS,
    THINKING,
    UNKNOWN,
    UNREADABLE,
    Turn,
    attached,
    plain_turn,
    words_of,
)
from storage.titles import title_from

Timed = tuple[Turn, float]
LISTS = ("messages", "conversations", "conversation", "items")
"""The names under which a list of messages stands; all but the first are ShareGPT's."""


def reader_of(entry: Mapping[str, Any]) -> Callable[[Any], Export] | None:
    """What reads a conversation of another program; None if it has no form that is known."""
    if "mapping" in entry:
        return read_chatgpt
    if "conv" in entry:
        return read_llama_cpp
    if "chat" in entry or "history" in entry:
        return read_open_webui
    return read_plain if any(name in entry for name in LISTS) else None


def is_plain(data: object) -> bool:
    """Whether the value is a list of messages, which is one conversation."""
    return isinstance(data, list) and any(
        bool(data) and inside(data[0], name) is not None for name in ("role", "from")
    )


# ChatGPT

SAID = ("text", "multimodal_text")
NOT_SAID = {
    "code": CALLS,
    "user_editable_context": INSTRUCTIONS,
    "model_editable_context": HIDDEN,
    "reasoning_recap": HIDDEN,
    **dict.fromkeys(("execution_output", "tether_quote", "tether_browsing_display"), RESULTS),
    **dict.fromkeys(("sonic_webpage", "system_error", "citable_code_output"), RESULTS),
}
"""Types of content that are no words of the user or of the answer."""


def read_chatgpt(entry: dict[str, Any]) -> Export:
    """All branches; the branch that was shown last is chosen."""
    mapping = typed(entry["mapping"], dict, "mapping")
    node = entry.get("current_node") or next(reversed(mapping), None)
    found, left = _tree(mapping, node, "parent", _chatgpt_turn)
    return _foreign(entry.get("title"), entry.get("create_time"), found, left)


def _chatgpt_turn(node: dict[str, Any]) -> Timed | None:
    """None for the root, and for empty notes of the system."""
    message = node.get("message")
    if message is None:
        return None
    role, content = inside(inside(message, "author"), "role"), inside(message, "content")
    if not isinstance(role, str) or not isinstance(content, dict):
        return Turn("", left=Counter([UNREADABLE])), 0.0
    turn, metadata = Turn(role), inside(message, "metadata")
    kind, recipient = content.get("content_type"), inside(message, "recipient")
    turn.add(content.get("parts"))
    if role not in ("user", "assistant"):
        if role == "system" and not turn.texts and not inside(metadata, "is_user_system_message"):
            return None
        turn.left = turn.left or Counter([INSTRUCTIONS if role == "system" else RESULTS])
    elif inside(metadata, "is_visually_hidden_from_conversation") is True:
        turn.left = Counter([HIDDEN])
    elif role == "assistant" and recipient not in (None, "", "all"):
        turn.left = Counter([CANVAS if str(recipient).startswith("canmore") else CALLS])
    elif kind == "thoughts" or inside(message, "channel") == "analysis":
        turn.thoughts = [words_of([content.get("thoughts"), turn.texts])]
    elif isinstance(kind, str) and kind not in SAID and (role == "assistant" or kind in NOT_SAID):
        turn.left = Counter([NOT_SAID.get(kind, UNKNOWN)])
    else:
        turn.add(None if turn.texts else words_of(content.get("text")))
        _chatgpt_details(turn, metadata)
        turn.finish()
        return turn, moment(inside(message, "create_time"), "create_time")
    turn.texts = []
    return turn, moment(inside(message, "create_time"), "create_time")


def _chatgpt_details(turn: Turn, metadata: object) -> None:
    """The attachments and the links of a message."""
    files = inside(metadata, "attachments")
    turn.left[FILES] += max(0, len(files if isinstance(files, list) else ()) - turn.left[IMAGES])
    references = inside(metadata, "content_references")
    for each in references if isinstance(references, list) else ():
        mark, link = inside(each, "matched_text"), inside(each, "alt")
        if isinstance(mark, str) and isinstance(link, str) and link.strip():
            turn.links[mark.strip()] = link


# Open WebUI


def read_open_webui(entry: dict[str, Any]) -> Export:
    """All branches; if the file has none, the list of messages."""
    chat = typed(entry.get("chat", entry), dict, "chat")
    history = chat.get("history") or {}
    tree, node = inside(history, "messages"), inside(history, "currentId")
    items = chat.get("messages")
    if isinstance(tree, dict) and any(isinstance(item, dict) for item in tree.values()):
        last = inside(items[-1], "id") if isinstance(items, list) and items else None
        known = (id for id in (node, last) if isinstance(id, str) and id in tree)
        node = next(known, next(reversed(tree)))
        found, left = _tree(tree, node, "parentId", _open_webui_turn)
    else:
        rows = _rows(typed(items, list, "messages"), _open_webui_turn)
        found, left = _tree(*rows)
    system = inside(chat.get("params"), "system")
    return _foreign(
        entry.get("title") or chat.get("title"),
        entry.get("created_at"),
        found,
        left,
        system if isinstance(system, str) else "",
    )


def _open_webui_turn(item: object, name: str = "a message") -> Timed:
    files = inside(item, "files")
    own = {**item, "files": None} if isinstance(item, dict) else item
    if isinstance(own, dict) and own.get("content") is None:
        own["content"] = ""
    turn = plain_turn(own, name)
    for file in _listed(files):
        _attach(turn, file, inside(inside(inside(file, "file"), "data"), "content"))
    written = Turn(turn.role)
    written.add(inside(item, "output"))
    if written.texts or written.thoughts or written.left:
        written.finish()
        _complete(turn, written)
    turn.left[FAILED] += bool(inside(item, "error"))
    turn.left[UNKNOWN] += bool(inside(item, "merged"))
    return turn, time.time()


def _complete(turn: Turn, written: Turn) -> None:
    """Add what the items that a model wrote say more than the content."""
    content, items = (" ".join(each.own.split()) for each in (turn, written))
    if content in items:
        turn.texts = written.texts
    elif items not in content:
        turn.left[UNKNOWN] += 1
    turn.thoughts = turn.thoughts or written.thoughts
    turn.left |= written.left


def _attach(turn: Turn, file: object, text: object) -> None:
    """A file of a message: its text, or that it is left out."""
    kind, name = inside(file, "type"), inside(file, "name")
    if isinstance(text, str) and text.strip():
        turn.files.append(attached(name if isinstance(name, str) else "file", text))
        return
    kind = kind.lower() if isinstance(kind, str) else ""
    spoken = kind.startswith(("audio", "video"))
    turn.left[IMAGES if kind.startswith("image") else RECORDINGS if spoken else FILES] += 1


# llama.cpp's page


def read_llama_cpp(entry: dict[str, Any]) -> Export:
    """All branches; the branch that was shown last is chosen. This format stores the system prompt
    as a message."""
    conv = typed(entry["conv"], dict, "conv")
    listed = typed(entry.get("messages"), list, "messages")
    items = [typed(item, dict, "a message") for item in listed]
    nodes = {str(item.get("id")): item for item in items}
    left = Counter({UNREADABLE: len(items) - len(nodes)})
    node = conv.get("currNode") or next(reversed(nodes), None)
    path = [nodes[id] for id in _branch(nodes, node, "parent", ())]
    prompts = [item for item in path if item.get("role") == "system" and _words(item)]

    def read(item: dict[str, Any]) -> Timed | None:
        return None if prompts and item is prompts[0] else _llama_cpp_turn(item)

    found, more = _tree(nodes, node, "parent", read)
    system = _words(prompts[0]) if prompts else ""
    when = _in_seconds(conv.get("lastModified"))
    return _foreign(conv.get("name"), when, found, left + more, system)


def _llama_cpp_turn(item: dict[str, Any]) -> Timed | None:
    """A message, with attached files; None for the root."""
    if item.get("role") == "system" and not item.get("content"):
        return None
    turn, extra = plain_turn(item, "a message"), item.get("extra")
    if turn.role == "system":
        turn = Turn("", left=Counter([INSTRUCTIONS]))
    for part in _listed(extra):
        _attach(turn, part, inside(part, "content"))
    return turn, moment(_in_seconds(item.get("timestamp")), "the time of a message")


def _words(item: dict[str, Any]) -> str:
    return plain_turn({"content": "", **item}, "a message").own


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _in_seconds(milliseconds: object) -> object:
    usable = isinstance(milliseconds, int | float) and 0 <= milliseconds < 1000 * LATEST
    return milliseconds / 1000 if usable else None  # type: ignore[operator]


# lists of messages


def read_plain(data: dict[str, Any] | list[Any]) -> Export:
    entry = {"messages": data} if isinstance(data, list) else data
    name = next(name for name in LISTS if name in entry)
    found, left = _tree(
        *_rows(typed(entry[name], list, name), lambda *item: (plain_turn(*item), time.time()))
    )
    system = words_of(entry.get("system"))
    if found and found[0].role == "system":
        system = "\n\n".join(filter(None, [system, found[0].content]))
        rest = found[1:]
        found = [each._replace(parent=each.parent - 1 if each.parent else None) for each in rest]
    return _foreign(entry.get("title") or entry.get("name"), None, found, left, system)


def _rows(
    items: list[Any], read: Callable[[object, str], Timed]
) -> tuple[dict[str, Any], str, str, Callable[[dict[str, Any]], Timed]]:
    """A list of messages as a tree for `_tree`."""
    nodes: dict[str, Any] = {
        str(number): {"item": item, "parent": str(number - 1), "name": f"message {number}"}
        for number, item in enumerate(items, 1)
    }
    return nodes, str(len(items)), "parent", lambda node: read(node["item"], node["name"])


# all of them


class Thoughts(NamedTuple):
    """The numbered pieces of thinking of a message, linked to those of the messages before it."""

    before: "Thoughts | None"
    pieces: list[tuple[int, str]]

    def all(self) -> list[tuple[int, str]]:
        found, part = list[list[tuple[int, str]]](), self
        while True:
            found.append(part.pieces)
            if part.before is None:
                return [piece for pieces in reversed(found) for piece in pieces]
            part = part.before


def _tree(
    nodes: dict[str, Any],
    shown: object,
    parent: str,
    read: Callable[[dict[str, Any]], Timed | None],
) -> tuple[list[ExportedMessage], Counter[str]]:
    """The messages of a tree, parents first, and what was left out; the path to `shown` is chosen.

    Nodes without text are skipped, and their children follow the parent instead. Thinking that
    stands in a node of its own goes to the answer after it. Unreadable nodes are skipped as well,
    unless they are on the chosen path.
    """
    path = set(_branch(nodes, shown, parent, ()))
    left = Counter({UNREADABLE: sum(not isinstance(node, dict) for node in nodes.values())})
    nodes = {id: node for id, node in nodes.items() if isinstance(node, dict)}
    numbers: dict[str, int | None] = {}
    thoughts: dict[str, Thoughts] = {}
    numbered, used = count(), set[int]()
    found: list[ExportedMessage] = []
    for id in _in_order(nodes, parent, numbers):
        before = str(nodes[id].get(parent))
        numbers[id] = above = numbers.get(before)
        waiting = thoughts.get(before)
        try:
            turn, when = read(nodes[id]) or (Turn(""), 0.0)
        except StorageError:
            if id in path:
                raise
            left[UNREADABLE] += 1
            continue
        if turn.thoughts:
            waiting = Thoughts(waiting, [(next(numbered), each) for each in turn.thoughts])
        own, bare = turn.role == "assistant", not turn.content().strip()
        left += turn.left
        left[EMPTY] += bare and bool(turn.role) and not (turn.thoughts or +turn.left)
        if bare:
            if waiting:
                thoughts[id] = waiting
            continue
        thought = waiting.all() if waiting and own else []
        used |= {number for number, _ in thought}
        content = turn.content(each for _, each in thought)
        numbers[id] = len(found)
        found.append(ExportedMessage(turn.role, content, when, None, above, int(id in path)))
    left[THINKING] += next(numbered) - len(used)
    return found, +left


def _in_order(nodes: dict[str, Any], parent: str, known: Container[str]) -> Iterator[str]:
    """The ids of all nodes, parents first; each is `known` once it was read."""
    for last in nodes:
        yield from _branch(nodes, last, parent, known)


def _branch(nodes: dict[str, Any], node: object, parent: str, known: Container[str]) -> list[str]:
    """The ids on the way to a node, from the root or from a known node on."""
    path: dict[str, None] = {}
    while isinstance(node, str | int):
        name = str(node)
        if name not in nodes or name in known or name in path:  # a damaged file may have a cycle
            break
        path[name] = None
        node = typed(nodes[name], dict, "an entry of the tree of messages").get(parent)
    return [*path][::-1]


def _foreign(
    title: object,
    created: object,
    messages: list[ExportedMessage],
    left: Mapping[str, int],
    system: str = "",
) -> Export:
    """A conversation of another program: no settings, and its title and time if they are usable."""
    if not messages:
        parts = ", ".join(f"{what}: {number:,}" for what, number in left.items())
        raise refusal("it has no messages with text" + (f" ({parts})" if parts else ""))
    usable = isinstance(created, int | float) and 0 <= created < LATEST
    own = title.strip()[:MAX_TITLE].strip() if isinstance(title, str) else ""
    return Export(
        title=own or title_from((each.role, each.content) for each in messages) or "Imported",
        system_prompt=system,
        settings={},
        created=moment(created if usable else None, "its time"),
        messages=messages,
        left_out=left,
    )
