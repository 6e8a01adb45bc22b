"""Reads conversations from files, which may come from anywhere.

The invariant: the work is bounded, whatever a file holds. Every conversation is checked before any
is stored. Conversations beyond a limit are left out, and a notice says how many.

`read` takes a parsed JSON value and returns plain, checked, bounded values, or raises a
`StorageError` that says which part is wrong. No ids, owners or runs are read from files. Five
shapes are known: Strata's own, an entry of a ChatGPT export, a chat of Open WebUI or of llama.cpp's
page, and plain messages.
"""

import json
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationError,
)

from engine.errors import StorageError
from engine.text import read_json
from storage.validation import Outside, problem_of, quoted, refusal

FORMAT, VERSION = "strata-conversation", 2
"""Files of version 1 are read as well; in them, each message follows the one before it."""
Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)
MAX_MESSAGES = 10_000
MAX_PIECES = 262_144
"""The context tier forgets tokens beyond this number too, and a page takes seconds to show them."""
MAX_CHARS = 10_000_000
MAX_CONVERSATIONS = 10_000
MAX_FILE_MESSAGES = 200_000
MAX_FILE_PIECES = 1_000_000
MAX_FILE_CHARS = 100_000_000
"""The most that is taken from one file: thousands of conversations of ordinary length. They are
stored in one transaction, and an answer that is being written waits for it."""
MAX_SOURCE_CHARS = 200
MAX_TITLE, MAX_FOLDER = 200, 60
LATEST = 2**33
"""Seconds since 1970, in the year 2242."""
MAX_SETTINGS_CHARS = 65_536
MAX_SETTINGS_DEPTH = 8
LONGEST = 60
"""The most characters of a title that is made from a message: two lines of the list."""
BEGINNING = 20_000
"""The first characters of a message, from which a title is made."""
NOT_WORDS = re.compile(
    r"(?ms)^Attached file: [^\n]+\n(`{3,})[\w+-]*\n.*?(?:^\1$|\Z)|<think>.*?(?:</think>|\Z)"
)
"""Parts of a message that are not its own words: attached files, and thinking."""

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Text = InstanceOf[str]
"""A text as it was parsed."""
Small = Annotated[int, Field(ge=0, lt=2**31)]
"""A larger integer could be stored and then not be read back."""
Piece = Annotated[
    tuple[
        Text,
        Annotated[Text, Field(max_length=MAX_SOURCE_CHARS)],
        Small,
        Small,
        Small,
        Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)],
    ],
    Field(strict=False, fail_fast=True),
]
"""Text, source, match length, step, position and probability of a token; a list in JSON."""
# Limits of an InstanceOf apply only within the same Annotated.
Title = Annotated[
    Text,
    AfterValidator(str.strip),
    Field(min_length=1, max_length=MAX_TITLE, description=f"1 to {MAX_TITLE} characters"),
]
Time = Annotated[
    float,
    Field(ge=0, lt=LATEST, allow_inf_nan=False),
    BeforeValidator(lambda seconds: time.time() if seconds is None else seconds),
]


def _storable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that can be stored, and read back at any depth of the call stack."""
    try:
        size, depth = len(json.dumps(settings, allow_nan=False)), _depth(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("its settings are not plain JSON values") from error
    if size > MAX_SETTINGS_CHARS or depth > MAX_SETTINGS_DEPTH:
        raise refusal(
            f"its settings have {size} characters and {depth} levels, and the most are "
            f"{MAX_SETTINGS_CHARS} and {MAX_SETTINGS_DEPTH}"
        )
    return settings


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)


def _texts(content: object) -> object:
    if not isinstance(content, list):
        return content
    texts = (_inside(part, "text") for part in content)
    return "".join(text for text in texts if isinstance(text, str))


class PlainMessage(Outside):
    """A message as programs send it to a model."""

    role: Role
    content: Annotated[Text, BeforeValidator(_texts)]


class OwnMessage(Outside):
    """A message in a file of Strata, version 1."""

    role: Role
    content: Text
    created: Time = Field(default_factory=time.time)
    pieces: Annotated[list[Piece], Field(fail_fast=True, max_length=MAX_PIECES)] | None = None


class PlacedMessage(OwnMessage):
    """A message in a file of Strata since version 2, with its place in the tree of messages."""

    parent: Annotated[int, Field(ge=0)] | None = None
    chosen: Small = 0


class OwnFile(Outside, Generic[M]):
    """A file of Strata, without the fields that name its format."""

    title: Title
    system_prompt: Text = ""
    settings: Annotated[dict[Any, Any], AfterValidator(_storable)] = {}
    created: Time = Field(default_factory=time.time)
    messages: Annotated[list[M], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    pinned: bool = False
    folder: Annotated[Text, AfterValidator(lambda folder: folder[:MAX_FOLDER])] = ""


class ExportedMessage(NamedTuple):
    """A message; a piece is [text, source, match_length, step, position, probability].

    It follows the earlier message with the number `parent`; None for a first message. Of the
    messages with the same parent, the one with the largest `chosen` is shown.
    """

    role: str
    content: str
    created: float
    pieces: Sequence[Sequence[Any]] | None
    parent: int | None = None
    chosen: int = 0


class Export(NamedTuple):
    """A conversation; times are in seconds since 1970, or now if the file has none."""

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


@dataclass(frozen=True, slots=True)
class Found:
    """The conversations of a file, in its order, and notices for the user."""

    conversations: Sequence[Export]
    notices: Sequence[str]


def parse(content: bytes) -> object:
    """The JSON value of a file. Raises `StorageError` if it cannot be read."""
    try:
        return read_json(content)
    except RecursionError as error:
        raise StorageError(
            "The file nests its values too deeply to be read: no export does. Choose another file."
        ) from error
    except ValueError as error:
        raise StorageError(
            f"The file is no readable JSON ({str(error)[:80]}). Choose a conversation exported "
            "from here, or an export of ChatGPT or Open WebUI."
        ) from error


def read_file(content: bytes, room: int) -> Found:
    """The conversations of a file, at most `room`.

    Raises `StorageError` if no conversation can be read.
    """
    data = parse(content)
    entries = data if isinstance(data, list) and not is_plain(data) else [data]
    if room <= 0:
        raise StorageError("No more conversations can be kept. Delete some first.")
    found, problems, looked = list[Export](), list[str](), 0
    messages = pieces = chars = 0
    for entry in entries[: min(room, MAX_CONVERSATIONS)]:
        try:
            export = read(entry)
        except StorageError as error:
            problems.append(str(error))
        else:
            messages += len(export.messages)
            pieces += export.pieces
            chars += export.chars
            if messages > MAX_FILE_MESSAGES or pieces > MAX_FILE_PIECES or chars > MAX_FILE_CHARS:
                break
            found.append(export)
        looked += 1
    if not found:
        reason = problems[0] if problems else "The file is empty."
        raise StorageError(f"The file holds no conversation that can be read. {reason}")
    return Found(found, _notices(problems, looked, len(entries)))


def _notices(problems: Sequence[str], looked: int, entries: int) -> list[str]:
    notices = []
    if problems:
        notices.append(
            f"{len(problems):,} of {entries:,} conversations could not be read. The first of "
            f"these: {problems[0]}"
        )
    if looked < entries:
        notices.append(
            f"The first {looked:,} of {entries:,} conversations in the file were read, the other "
            f"{entries - looked:,} were left out. A file may hold {MAX_CONVERSATIONS:,} "
            f"conversations with {MAX_FILE_MESSAGES:,} messages, {MAX_FILE_PIECES:,} tokens with "
            f"their origin and {MAX_FILE_CHARS:,} characters. Split it, or delete conversations to "
            "make room."
        )
    return notices


def _reader(data: object) -> Callable[[Any], Export]:
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
    """Whether the value is a list of messages, which is one conversation."""
    return isinstance(data, list) and bool(data) and _inside(data[0], "role") is not None


def _read_ours(entry: dict[str, Any]) -> Export:
    version = entry.get("version")
    if entry.get("format") != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        given = f"{entry.get('format')!r} {version!r}"[:80]
        raise _refusal(f"its format is {given}, and this program reads {FORMAT!r} 1 to {VERSION}")
    if version == 1:
        found: OwnFile[Any] = _checked(OwnFile[OwnMessage], entry)
        messages = _in_a_row([ExportedMessage(**dict(each)) for each in found.messages])
    else:
        found = _checked(OwnFile[PlacedMessage], entry)
        messages = [ExportedMessage(**dict(each)) for each in found.messages]
    for number, each in enumerate(messages):
        if each.parent is not None and each.parent >= number:
            name = f"message {number + 1}"
            raise _refusal(f"the parent of {name} is not one of the messages before it")
    return Export(**dict(found) | {"messages": messages})


def _in_a_row(messages: list[ExportedMessage]) -> list[ExportedMessage]:
    return [each._replace(parent=n - 1 if n else None) for n, each in enumerate(messages)]


def _with_text(messages: Iterable[ExportedMessage]) -> list[ExportedMessage]:
    return [message for message in messages if message.content.strip()]


def _read_chatgpt(entry: dict[str, Any]) -> Export:
    """All branches; the branch that was shown last is chosen."""
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
    """All branches; if the file has none, the list of messages."""
    chat = _typed(entry.get("chat", entry), dict, "chat")
    history = chat.get("history") or {}
    tree, node = _inside(history, "messages"), _inside(history, "currentId")
    if isinstance(tree, dict) and isinstance(node, str) and node in tree:
        found = _tree(tree, node, "parentId", lambda item: _read_plain_message(item, "a message"))
    else:
        items = _typed(chat.get("messages"), list, "messages")
        read = (_read_plain_message(m, f"message {n}") for n, m in enumerate(items, 1))
        found = _in_a_row(_with_text(read))
    system = _inside(chat.get("params"), "system")
    return _foreign(
        entry.get("title") or chat.get("title"),
        entry.get("created_at"),
        found,
        system if isinstance(system, str) else "",
    )


def _read_llama_cpp(entry: dict[str, Any]) -> Export:
    """All branches; the branch that was shown last is chosen. This format stores the system prompt
    as a message."""
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
    """A text by the user or the assistant, preceded by attached files and thinking; None for the
    root, for instructions and for the output of tools."""
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
    """A file in the form that messages have for attachments (app/service/attachments.py)."""
    fence = "`" * max((len(row) + 1 for row in re.findall(r"`{3,}", text)), default=3)
    return f"Attached file: {' '.join(name.split())}\n{fence}\n{text}\n{fence}"


def _in_seconds(milliseconds: object) -> object:
    usable = isinstance(milliseconds, int | float) and 0 <= milliseconds < 1000 * LATEST
    return milliseconds / 1000 if usable else None  # type: ignore[operator]


def _tree(
    nodes: dict[str, Any],
    shown: object,
    parent: str,
    read: Callable[[dict[str, Any]], ExportedMessage | None],
) -> list[ExportedMessage]:
    """The messages of a tree, parents first; the path to `shown` is chosen.

    Nodes without text are skipped, and their children follow the parent instead. Unreadable nodes
    are skipped as well, unless they are on the chosen path.
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
            if message is not None and message.content.strip():
                numbers[id] = len(found)
                found.append(message._replace(parent=above, chosen=int(id in path)))
    return found


def _branch(nodes: dict[str, Any], node: object, parent: str, known: Container[str]) -> list[str]:
    """The ids on the way to a node, from the root or from a known node on."""
    path: dict[str, None] = {}
    while isinstance(node, str) and node in nodes and node not in known and node not in path:
        path[node] = None  # a damaged file may contain a cycle
        node = _typed(nodes[node], dict, "an entry of the tree of messages").get(parent)
    return [*path][::-1]


def _read_plain(data: dict[str, Any] | list[Any]) -> Export:
    entry = {"messages": data} if isinstance(data, list) else data
    items = _typed(entry["messages"], list, "messages")
    messages = [_read_plain_message(item, f"message {n}") for n, item in enumerate(items, 1)]
    system = ""
    if messages and messages[0].role == "system":
        system = messages.pop(0).content
    return _foreign(
        entry.get("title") or entry.get("name"), None, _in_a_row(_with_text(messages)), system
    )


def _read_plain_message(item: object, name: str) -> ExportedMessage:
    """A message whose content is a text, or a list of parts, some of them texts."""
    each = _checked(PlainMessage, item, f"in {name}, ")
    return ExportedMessage(each.role, each.content, time.time(), None)


def _foreign(
    title: object, created: object, messages: list[ExportedMessage], system: str = ""
) -> Export:
    """A conversation of another program: no settings, and its title and time if they are usable."""
    if not messages:
        raise _refusal("it has no messages with text")
    usable = isinstance(created, int | float) and 0 <= created < LATEST
    own = title.strip()[:MAX_TITLE].strip() if isinstance(title, str) else ""
    return Export(
        title=own or _first_words(messages) or "Imported",
        system_prompt=system,
        settings={},
        created=_time(created if usable else None, "its time"),
        messages=messages,
    )


def _first_words(messages: Sequence[ExportedMessage]) -> str:
    """A title from the first message that has words besides files and thinking."""
    for message in messages:
        if title := title_of(NOT_WORDS.sub("", message.content[:BEGINNING])):
            return title
    return ""


def _inside(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _typed(value: object, kind: type[T], name: str) -> T:
    """The value, if it is of exactly this type: a JSON true is not an integer."""
    if type(value) is not kind:
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise _refusal(f"{name} is {found}, not of type {kind.__name__}")
    return value


def _time(value: object, name: str) -> float:
    if value is None:
        return time.time()
    # The comparison is false for NaN, and for integers that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        raise _refusal(f"{name} is {quoted(value)}, not a time in seconds since 1970")
    return float(value)


def _checked(model: type[M], value: object, where: str = "") -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = problem_of(error, model).text.removesuffix(".")
        raise _refusal(f"{where}{problem}") from error


def _refusal(problem: str) -> StorageError:
    return StorageError(
        f"The conversation cannot be imported: {problem}. Export it again, or repair the file."
    )


def title_of(text: str) -> str:
    """A title from a message: its first sentence without Markdown, cut after a word; "" for a text
    without words."""
    outside = re.sub(r"(?m)^\s*(?:```|~~~).*$", "", text)
    for paragraph in re.split(r"\n\s*\n", outside):
        lines = paragraph.strip().splitlines()
        # A heading is a title by itself; other lines are joined.
        words = " ".join(
            _bare(line) for line in (lines[:1] if paragraph.lstrip()[:1] == "#" else lines)
        )
        if re.search(r"\w", words):
            sentence = re.match(r".{8,}?[.!?](?=\s|$)", words.strip())
            return _cut(" ".join((sentence[0] if sentence else words).split()).rstrip("."))
    return ""


def _bare(line: str) -> str:
    """A line without its Markdown."""
    line = re.sub(r"^[\s#>*+`~-]+|^\s*\d+[.)]\s+|[\s*`~]+$", "", line)
    return line.replace("**", "").replace("`", "")


def _cut(text: str) -> str:
    """At most LONGEST characters, cut after a word if possible."""
    if len(text) <= LONGEST:
        return text
    beginning = text[:LONGEST]
    words = beginning.rpartition(" ")[0] if text[LONGEST] != " " else beginning
    return (words if len(words) > LONGEST // 2 else beginning[:-1]).rstrip(" ,;:") + "…"
