"""The shapes of an exported conversation, read as what they are: values from anywhere.

`read` takes a parsed JSON value and gives plain, checked, bounded values, or raises `StorageError`
that says which part is wrong. Nothing read here names an id, an owner or a run. Five shapes are
known: Strata's own, an entry of a ChatGPT export, a chat of Open WebUI or of llama.cpp's page, and
plain messages.
"""

import json
import re
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, TypeVar

from engine.errors import StorageError

FORMAT, VERSION = "strata-conversation", 2
"""Files of version 1 are read as well: their messages follow each other."""
ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 10_000
MAX_PIECES = 262_144
"""More tokens than this the context tier forgets too, and a page takes seconds to show them."""
MAX_CHARS = 10_000_000
MAX_SOURCE_CHARS = 200
MAX_TITLE, MAX_FOLDER = 200, 60
LATEST = 2**33
"""Seconds since 1970, in the year 2242."""
MAX_SETTINGS_CHARS = 65_536
MAX_SETTINGS_DEPTH = 8

T = TypeVar("T")


class ExportedMessage(NamedTuple):
    """A message; a piece is [text, source, match_length, step, position, probability].

    It follows the message with the number `parent`, which comes before it; None: it is a first one.
    Of those that follow the same one, that with the largest `chosen` is shown.
    """

    role: str
    content: str
    created: float
    pieces: list[list[Any]] | None
    parent: int | None = None
    chosen: int = 0


class Export(NamedTuple):
    """A conversation; times are in seconds since 1970, and now where the file gives none."""

    title: str
    system_prompt: str
    settings: dict[str, Any]
    created: float
    messages: list[ExportedMessage]
    pinned: bool = False
    folder: str = ""

    @property
    def chars(self) -> int:
        """The characters of all texts."""
        pieces = (piece for message in self.messages for piece in message.pieces or ())
        texts = (len(message.content) for message in self.messages)
        return len(self.system_prompt) + sum(texts) + sum(len(p[0]) + len(p[1]) for p in pieces)

    @property
    def pieces(self) -> int:
        """The number of pieces of all messages."""
        return sum(len(message.pieces or ()) for message in self.messages)


def read(data: object) -> Export:
    """Check an exported conversation of any known shape."""
    found = _reader(data)(data)
    for name, size, limit in (
        ("messages", len(found.messages), MAX_MESSAGES),
        ("pieces", found.pieces, MAX_PIECES),
        ("characters", found.chars, MAX_CHARS),
    ):
        if size > limit:
            raise _refusal(f"it has {size:,} {name} and the most is {limit:,}")
    return found


def _reader(data: object) -> Callable[[Any], Export]:
    """What reads a value of this shape."""
    if is_plain(data):
        return _read_plain
    entry = _typed(data, dict, "the conversation")
    if "format" in entry:
        return _read_ours
    if "mapping" in entry:
        return _read_chatgpt
    if "conv" in entry:
        return _read_llama_cpp
    if "chat" in entry or "history" in entry:
        return _read_open_webui
    if "messages" in entry:
        return _read_plain
    keys = ", ".join(repr(str(key)[:30]) for key in list(entry)[:5]) or "nothing"
    raise _refusal(
        f"it holds {keys}, which is none of the formats that can be read: Strata's own, ChatGPT's, "
        "Open WebUI's, that of llama.cpp's page, or plain messages with "
        '"role" and "content"'
    )


def is_plain(data: object) -> bool:
    """Whether a list is one of messages, and so one conversation."""
    return isinstance(data, list) and bool(data) and _inside(data[0], "role") is not None


def _read_ours(entry: dict[str, Any]) -> Export:
    version = entry.get("version")
    if entry.get("format") != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        given = f"{entry.get('format')!r} {version!r}"[:80]
        raise _refusal(f"its format is {given}, and this program reads {FORMAT!r} 1 to {VERSION}")
    messages = _typed(entry.get("messages"), list, "messages")
    title = _typed(entry.get("title"), str, "title").strip()
    if not 0 < len(title) <= MAX_TITLE:
        raise _refusal(f"its title has {len(title):,} characters, not 1 to {MAX_TITLE}")
    found = [_read_message(item, f"message {n}") for n, item in enumerate(messages, 1)]
    return Export(
        title=title,
        system_prompt=_typed(entry.get("system_prompt", ""), str, "system_prompt"),
        settings=_read_settings(entry.get("settings", {})),
        created=_time(entry.get("created"), "created"),
        messages=_in_a_row(found) if version == 1 else _as_placed(found, messages),
        pinned=_typed(entry.get("pinned", False), bool, "pinned"),
        folder=_typed(entry.get("folder", ""), str, "folder")[:MAX_FOLDER],
    )


def _in_a_row(messages: list[ExportedMessage]) -> list[ExportedMessage]:
    """Each message follows the one before it."""
    return [each._replace(parent=n - 1 if n else None) for n, each in enumerate(messages)]


def _as_placed(messages: list[ExportedMessage], items: list[Any]) -> list[ExportedMessage]:
    """Each message follows the one that the file says."""
    found = []
    for number, (message, item) in enumerate(zip(messages, items, strict=True)):
        parent, name = item.get("parent"), f"message {number + 1}"
        if parent is not None and not 0 <= _typed(parent, int, f"the parent of {name}") < number:
            raise _refusal(f"the parent of {name} is not one of the messages before it")
        chosen = _typed(item.get("chosen", 0), int, f"the choice of {name}")
        if not 0 <= chosen < 2**31:
            raise _refusal(f"the choice of {name} is out of range")
        found.append(message._replace(parent=parent, chosen=chosen))
    return found


def _read_settings(value: object) -> dict[str, Any]:
    """Settings that can be stored and, at any depth of calls, be read back."""
    settings = _typed(value, dict, "settings")
    try:
        size, depth = len(json.dumps(settings, allow_nan=False)), _depth(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal("its settings are not plain JSON values") from error
    if size > MAX_SETTINGS_CHARS or depth > MAX_SETTINGS_DEPTH:
        raise _refusal(
            f"its settings have {size} characters and {depth} levels, and the most are "
            f"{MAX_SETTINGS_CHARS} and {MAX_SETTINGS_DEPTH}"
        )
    return settings


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)


def _read_message(item: object, name: str) -> ExportedMessage:
    entry = _typed(item, dict, name)
    role = _typed(entry.get("role"), str, f"the role of {name}")
    if role not in ROLES:
        raise _refusal(f"the role of {name} is {role[:40]!r}, not one of {', '.join(ROLES)}")
    pieces = entry.get("pieces")
    if pieces is not None:
        rows = _typed(pieces, list, f"the pieces of {name}")
        pieces = [_read_piece(row, f"a piece of {name}") for row in rows]
    return ExportedMessage(
        role=role,
        content=_typed(entry.get("content"), str, f"the content of {name}"),
        created=_time(entry.get("created"), f"the time of {name}"),
        pieces=pieces,
    )


def _read_piece(row: object, name: str) -> list[Any]:
    piece = _typed(row, list, name)
    if len(piece) != 6:
        raise _refusal(f"{name} has {len(piece)} parts, not 6")
    text, source, *numbers = piece[:5]
    probability = _number(piece[5], f"the probability of {name}")
    if not 0 <= probability <= 1:
        raise _refusal(f"the probability of {name} is {probability:g}")
    if len(_typed(source, str, f"the source of {name}")) > MAX_SOURCE_CHARS:
        raise _refusal(f"the source of {name} has more than {MAX_SOURCE_CHARS} characters")
    for number in numbers:
        # An unbounded integer could be stored and then not be read back.
        if not 0 <= _typed(number, int, f"a number of {name}") < 2**31:
            raise _refusal(f"a number of {name} is out of range")
    return [_typed(text, str, f"the text of {name}"), source, *numbers, probability]


def _read_chatgpt(entry: dict[str, Any]) -> Export:
    """All branches; that which was shown last is shown."""
    mapping = _typed(entry["mapping"], dict, "mapping")
    node = entry.get("current_node") or next(reversed(mapping), None)
    found = _tree(mapping, node, "parent", _read_chatgpt_message)
    return _foreign(entry.get("title"), entry.get("create_time"), found)


def _read_chatgpt_message(holder: dict[str, Any]) -> ExportedMessage | None:
    """A text by the user or the assistant; None for tool calls, images and empty system notes."""
    message = holder.get("message")
    role = _inside(_inside(message, "author"), "role")
    parts = _inside(_inside(message, "content"), "parts")
    if role not in ("user", "assistant") or not isinstance(parts, list):
        return None
    text = "".join(part for part in parts if isinstance(part, str))
    return ExportedMessage(role, text, _time(_inside(message, "create_time"), "create_time"), None)


def _read_open_webui(entry: dict[str, Any]) -> Export:
    """All branches, else the list of messages beside them."""
    chat = _typed(entry.get("chat", entry), dict, "chat")
    history = chat.get("history") or {}
    tree, node = _inside(history, "messages"), _inside(history, "currentId")
    if isinstance(tree, dict) and node in tree:
        found = _tree(tree, node, "parentId", lambda item: _read_plain_message(item, "a message"))
    else:
        items = _typed(chat.get("messages"), list, "messages")
        found = _in_a_row([_read_plain_message(m, f"message {n}") for n, m in enumerate(items, 1)])
    system = _inside(chat.get("params"), "system")
    return _foreign(
        entry.get("title") or chat.get("title"),
        entry.get("created_at"),
        found,
        system if isinstance(system, str) else "",
    )


def _read_llama_cpp(entry: dict[str, Any]) -> Export:
    """All branches; that which was shown last is shown. Its instructions are a message there."""
    conv = _typed(entry["conv"], dict, "conv")
    items = [
        _typed(item, dict, "a message") for item in _typed(entry.get("messages"), list, "messages")
    ]
    nodes = {str(item.get("id")): item for item in items}
    node = conv.get("currNode") or next(reversed(nodes), None)
    path = [nodes[id] for id in _branch(nodes, node, "parent", ())]
    system = [item.get("content") for item in path if item.get("role") == "system"]
    return _foreign(
        conv.get("name"),
        _in_seconds(conv.get("lastModified")),
        _tree(nodes, node, "parent", _read_llama_cpp_message),
        next((text for text in system if isinstance(text, str) and text.strip()), ""),
    )


def _read_llama_cpp_message(item: dict[str, Any]) -> ExportedMessage | None:
    """A text by the user or the assistant, behind its thinking and the texts of attached files;
    None for the root, for instructions and for what tools said."""
    if item.get("role") not in ("user", "assistant") or item.get("type") == "root":
        return None
    message = _read_plain_message(item, "a message")
    thinking = item.get("reasoningContent") or item.get("thinking")
    extra = item.get("extra")
    files = [
        _attached(name, text)
        for part in (extra if isinstance(extra, list) else ())
        for name, text in [(_inside(part, "name"), _inside(part, "content"))]
        if isinstance(name, str) and isinstance(text, str)
    ]
    if isinstance(thinking, str) and thinking.strip():
        files.append(f"<think>\n{thinking.strip()}\n</think>")
    created = _time(_in_seconds(item.get("timestamp")), "the time of a message")
    return message._replace(content="\n\n".join([*files, message.content]), created=created)


def _attached(name: str, text: str) -> str:
    """A file as it stands in a message (app/service/attachments.py)."""
    fence = "`" * max((len(row) + 1 for row in re.findall(r"`{3,}", text)), default=3)
    return f"Attached file: {' '.join(name.split())}\n{fence}\n{text}\n{fence}"


def _in_seconds(milliseconds: object) -> object:
    """A time as the other formats have it."""
    usable = isinstance(milliseconds, int | float) and 0 <= milliseconds < 1000 * LATEST
    return milliseconds / 1000 if usable else None  # type: ignore[operator]


def _tree(
    nodes: dict[str, Any],
    shown: object,
    parent: str,
    read: Callable[[dict[str, Any]], ExportedMessage | None],
) -> list[ExportedMessage]:
    """The messages of a tree, those before that others follow; the path to `shown` is chosen.

    What is no message is passed over, and what follows it follows the one before it. So is what
    cannot be read, unless it is on the path.
    """
    path = set(_branch(nodes, shown, parent, ()))
    nodes = {id: node for id, node in nodes.items() if isinstance(node, dict)}
    numbers: dict[str, int | None] = {}
    found: list[ExportedMessage] = []
    for last in nodes:
        for id in _branch(nodes, last, parent, numbers):
            above = numbers.get(str(nodes[id].get(parent)))
            try:
                message = read(nodes[id])
            except StorageError:
                if id in path:
                    raise
                message = None
            numbers[id] = above
            if message is not None:
                numbers[id] = len(found)
                found.append(message._replace(parent=above, chosen=int(id in path)))
    return found


def _branch(nodes: dict[str, Any], node: object, parent: str, known: Container[str]) -> list[str]:
    """The ids on the way to a node, from the root or from what is known."""
    path: dict[str, None] = {}
    while isinstance(node, str) and node in nodes and node not in known and node not in path:
        path[node] = None  # it may run in circles
        node = _typed(nodes[node], dict, "an entry of the tree of messages").get(parent)
    return [*path][::-1]


def _read_plain(data: dict[str, Any] | list[Any]) -> Export:
    """Messages with "role" and "content", as programs send them to a model."""
    entry = {"messages": data} if isinstance(data, list) else data
    items = _typed(entry["messages"], list, "messages")
    messages = [_read_plain_message(item, f"message {n}") for n, item in enumerate(items, 1)]
    system = ""
    if messages and messages[0].role == "system":
        system = messages.pop(0).content
    return _foreign(entry.get("title"), None, _in_a_row(messages), system)


def _read_plain_message(item: object, name: str) -> ExportedMessage:
    """A message whose content is a text, or a list of parts of which some are texts."""
    entry = _typed(item, dict, name)
    content = entry.get("content")
    if isinstance(content, list):
        texts = (_inside(part, "text") for part in content)
        content = "".join(text for text in texts if isinstance(text, str))
    return _read_message({"role": entry.get("role"), "content": content}, name)


def _foreign(
    title: object, created: object, messages: list[ExportedMessage], system: str = ""
) -> Export:
    """A conversation of another program: without settings, its title and time as far as usable."""
    messages = _with_text(messages)
    if not messages:
        raise _refusal("it has no messages with text")
    usable = isinstance(created, int | float) and 0 <= created < LATEST
    return Export(
        title=(title.strip()[:MAX_TITLE].strip() if isinstance(title, str) else "") or "Imported",
        system_prompt=system,
        settings={},
        created=_time(created if usable else None, "its time"),
        messages=messages,
    )


def _with_text(messages: list[ExportedMessage]) -> list[ExportedMessage]:
    """The messages that say something; what follows another one follows the one before it."""
    numbers: list[int | None] = []
    found: list[ExportedMessage] = []
    for message in messages:
        above = None if message.parent is None else numbers[message.parent]
        says = bool(message.content.strip())
        numbers.append(len(found) if says else above)
        if says:
            found.append(message._replace(parent=above))
    return found


def _inside(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _typed(value: object, kind: type[T], name: str) -> T:
    """The value, when it is of exactly this type: a JSON true is no integer."""
    if type(value) is not kind:
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise _refusal(f"{name} is {found}, not of type {kind.__name__}")
    return value


def _number(value: object, name: str) -> float:
    """A finite number; the comparison fails for NaN and holds for no integer beyond floats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise _refusal(f"{name} is not a finite number")
    return float(value)


def _time(value: object, name: str) -> float:
    if value is None:
        return time.time()
    seconds = _number(value, name)
    if not 0 <= seconds < LATEST:
        raise _refusal(f"{name} is {seconds:g}, not a time in seconds since 1970")
    return seconds


def _refusal(problem: str) -> StorageError:
    return StorageError(
        f"The conversation cannot be imported: {problem}. Export it again, or mend the file."
    )
