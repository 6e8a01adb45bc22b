"""Reads conversations of other programs: of ChatGPT, Open WebUI and llama.cpp's page, those in the
form of ShareGPT, and plain messages.

All of them are read as trees of messages (`_tree`); in a plain list, each message follows the one
before it. The invariant: every part of a message is kept, as text, as thinking or as an attached
file, or it is counted in `left_out`. Nothing that was meant for a tool, and no markup of another
program, becomes part of an answer.
"""

import html
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engine.errors import StorageError
from engine.thinking import with_thinking
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
from storage.titles import title_from
from storage.validation import quoted

# a message

IMAGES, RECORDINGS, FILES = "images", "recordings", "attached files"
CALLS, RESULTS, CANVAS = "tool calls", "results of tools", "canvas documents"
CITATIONS, THINKING = "citations", "pieces of thinking"
HIDDEN, INSTRUCTIONS = "hidden messages", "instructions"
EMPTY, FAILED, UNREADABLE = "empty messages", "failed answers", "messages that cannot be read"
UNKNOWN = "parts of an unknown kind"

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
TOOLS = {
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), RESULTS),
    **dict.fromkeys(("function_response", "function-response", "tool_result"), RESULTS),
    **dict.fromkeys(("function_call", "function-call", "tool_call"), CALLS),
}
TEXTS = (None, "text", "input_text", "output_text", "audio_transcription", "refusal")
KINDS = (
    (re.compile(r"think|thought|reasoning"), THINKING),
    (re.compile(r"image|dalle|picture"), IMAGES),
    (re.compile(r"audio|video|voice"), RECORDINGS),
    (re.compile(r"result|_output|response"), RESULTS),
    (re.compile(r"tool|function|_call|computer|interpreter"), CALLS),
    (re.compile(r"file|document|attachment|pdf"), FILES),
    (re.compile(r"citation|source"), CITATIONS),
)
"""The kind of a part, by its type; the first match counts."""
COUNTED = {
    **dict.fromkeys(("tool_calls", "toolCalls", "function_call", "toolInvocations"), CALLS),
    **dict.fromkeys(("attachments", "experimental_attachments", "files"), FILES),
    **dict.fromkeys(("citations", "annotations", "sources"), CITATIONS),
    **dict.fromkeys(("images",), IMAGES),
}
"""Fields of a message that hold none of its text."""
THOUGHTS = ("reasoning_content", "reasoningContent", "reasoning", "thinking", "thoughts")
FIELDS = ("summary", "text", "refusal", "content", "transcript", "thinking", "reasoning", "value")
"""Where an object keeps its text."""
CONTENTS = ("content", "value", "text", "parts")
"""Where a message keeps its content."""


def text_of(value: object) -> str:
    """All texts of a value, whatever it is made of."""
    found, waiting = list[str](), [value]
    while waiting:
        match waiting.pop():
            case str(text):
                found.append(text)
            case list(items):
                waiting += reversed(items)
            case dict(items):
                waiting += [items[name] for name in reversed(FIELDS) if name in items]
    return "\n".join(text for text in found if text.strip())


def attached(name: str, text: str) -> str:
    """A file in the form that messages have for attachments (app/service/attachments.py)."""
    fence = "`" * max((len(row) + 1 for row in re.findall(r"`{3,}", text)), default=3)
    return f"Attached file: {' '.join(name.split())}\n{fence}\n{text}\n{fence}"


@dataclass(slots=True)
class Turn:
    """A message in parts. One without a role of a conversation has no texts, only `left`."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    continues: bool = False
    links: dict[str, str] = field(default_factory=dict)
    """The replacement of each citation in the text, by its mark."""

    def add(self, content: object) -> None:
        """Add content: a text, a part, or a list of parts."""
        waiting = [content]
        while waiting:
            part = waiting.pop()
            if isinstance(part, list):
                waiting += reversed(part)
            elif isinstance(part, str):
                self.add_text(part)
            elif not isinstance(part, dict):
                self.left += Counter([UNKNOWN] if part is not None else [])
            elif part.get("type") == "message":
                waiting.append(part.get("content"))
            elif isinstance(part.get("parts"), list):
                waiting.append(part["parts"])
            else:
                self.add_part(part)

    def add_text(self, text: str) -> None:
        if self.continues:
            self.texts[-1] += text
        elif text.strip():
            self.texts.append(text)
            self.continues = True

    def add_part(self, part: Mapping[str, Any]) -> None:
        kind, text = part.get("type", part.get("content_type")), text_of(part)
        if kind in TEXTS and (text or kind):
            self.texts += [text] if text else []
            self.continues = False
            return
        name = kind.lower() if isinstance(kind, str) else ""
        what = next((what for pattern, what in KINDS if pattern.search(name)), UNKNOWN)
        if what == THINKING and text:
            self.thoughts.append(text)
        else:
            self.left[what] += 1

    def count(self, what: str, value: object) -> None:
        """Count the items of a field, which may be a list, or the JSON of one."""
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = [value]
        if value:
            self.left[what] += len(value) if isinstance(value, list) else 1

    def finish(self) -> None:
        if self.role == "assistant":
            self.texts = [self.cleaned(text) for text in self.texts]

    @property
    def own(self) -> str:
        return "\n".join(text for text in self.texts if text.strip())

    def content(self, thoughts: Iterable[str] = ()) -> str:
        """The message: its files, its thinking in the form in which models write it, and its
        text."""
        thought = "\n\n".join(each.strip() for each in thoughts if each.strip())
        text = with_thinking(thought, self.own) if thought else self.own
        return "\n\n".join(filter(None, [*self.files, text]))

    def cleaned(self, text: str) -> str:
        """An answer without markup. Code stays as it is. The work is linear in the text."""
        kept, at, ends, framed = list[str](), 0, Ends(text), False
        opens_thinking = "<think" in text
        while opened := MARKUP.search(text, at):
            kept.append(text[at : opened.start()])
            at = opened.end()
            if opened["fence"]:
                at = ends.fence(opened["fence"], at)
                kept.append(text[opened.start() : at])
            elif opened["tick"]:
                at = ends.tick(opened["tick"], at)
                kept.append(text[opened.start() : at])
            elif opened["ended"]:
                # The chat template had opened the thinking, so the model wrote only its end.
                if opens_thinking:
                    kept.append(opened[0])
                else:
                    self.thoughts.append("".join(kept))
                    kept.clear()
            elif opened["cited"]:
                kept.append(self.cited(opened[0]))
            elif opened["frame"]:
                opens = "{" in opened["frame"]
                kept.append("" if opens or framed else opened[0])
                framed = opens
            else:
                at, replaced = self.block(text, opened, ends)
                kept.append(replaced)
        found = "".join([*kept, text[at:]])
        return text if found == text else found.strip()

    def cited(self, mark: str) -> str:
        if (link := self.links.get(mark.strip())) is not None:
            return f"{mark[: len(mark) - len(mark.lstrip())]}{link}"
        kind, _, rest = mark.strip(" \ue200\ue201").partition("\ue202")
        if kind == "entity":
            try:
                named = json.loads(rest)
            except (ValueError, RecursionError):
                named = rest
            name = named[1] if isinstance(named, list) and len(named) > 1 else named
            if isinstance(name, str):
                return f" {name}" if mark[0] == " " else name
        self.left[CITATIONS] += 1
        return ""

    def block(self, text: str, opened: re.Match[str], ends: "Ends") -> tuple[int, str]:
        tag, begin = opened[0].strip(), opened.end()
        if tag == "<details":
            if (close := ends.find(">", begin)) < 0:
                return begin, opened[0]
            kind = re.search(r'\btype="([^"]*)"', text[begin:close])
            if kind is None:
                return close + 1, text[opened.start() : close + 1]
            tag, begin = f"<details {kind[1]}", close + 1
        closer = next((end for name, end in BLOCKS.items() if tag.startswith(name)), "")
        end = ends.find(closer, begin)
        after = end + len(closer) if end >= 0 else len(text)
        if "reasoning" in tag:
            held = text[begin:end] if end >= 0 else text[begin:]
            self.thoughts.append(unquoted(held) if tag.startswith("<details") else held)
            return after, ""
        # After a tag that was never closed, the rest is the call, or it is the answer.
        called = tag.startswith("<<<") or tag == "<tool_call>" and CALLED.match(text, begin)
        if end < 0 and not called:
            after = begin
            if not tag.startswith("<details"):
                return after, opened[0]  # the answer only speaks of such tags
        self.left[CALLS] += 1
        return after, ""


class Ends:
    """Finds the ends of blocks in a text. A missing end is searched only once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.missing: set[object] = set()

    def find(self, closer: str, start: int) -> int:
        if closer in self.missing:
            return -1
        found = self.text.find(closer, start)
        if found < 0:
            self.missing.add(closer)
        return found

    def fence(self, fence: str, start: int) -> int:
        closed = re.compile(rf"(?m)^ {{0,3}}{fence}[`~]*[ \t]*$").search(self.text, start)
        return closed.end() if closed else len(self.text)

    def tick(self, ticks: str, start: int) -> int:
        line = self.text.find("\n", start)
        line = len(self.text) if line < 0 else line
        if (ticks, line) in self.missing:
            return start
        closed = re.compile(rf"(?<!`){ticks}(?!`)").search(self.text, start, line)
        if closed is None:
            self.missing.add((ticks, line))
            return start
        return closed.end()


BLOCKS = {
    "<details": "</details>",
    "<tool_call>": "</tool_call>",
    "<code_interpreter": "</code_interpreter>",
    "<<<AGENTIC_TOOL_CALL_START>>>": "<<<AGENTIC_TOOL_CALL_END>>>",
    "<<<reasoning_content_start>>>": "<<<reasoning_content_end>>>",
}
"""What Open WebUI, llama.cpp's page and models write around calls of tools and thinking."""
CALLED = re.compile(r"\s*(?:\{|\[|<function)")
"""The beginning of a call within its tag."""
MARKUP = re.compile(
    r"""
      ^[ ]{0,3}(?P<fence>`{3,}|~{3,})
    | (?P<tick>`+)
    | (?P<cited>                                  # ChatGPT's citations, in its forms so far
          [ ]?\ue200[^\ue200\ue201\n]{0,2000}\ue201
        | [ ]?【[^【】\n]{0,200}†[^【】\n]{0,200}】
        | [ ]?:contentReference\[oaicite:\d{1,6}\]\{[^}\n]{0,200}\}
        | \b(?:file)?cite(?:turn\d+[a-z]+\d+)+ )
    | (?P<frame>^:::(?:\w+\{[^}\n]{0,500}\})?[ \t]*(?:\n|\Z))   # around a draft, which stays
    | (?P<ended>^[ ]{0,3}</think>[ \t]*$)
    | <details\b
    | ^[ ]{0,3}<tool_call>
    | <code_interpreter\b[^>\n]{0,500}>
    | <<<AGENTIC_TOOL_CALL_START>>>
    | <<<reasoning_content_start>>>
    """,
    re.VERBOSE | re.MULTILINE,
)


def unquoted(block: str) -> str:
    """The thinking in a block of Open WebUI: without its heading, its quotation marks at the lines'
    beginnings, and the spelling of HTML."""
    text = html.unescape(re.sub(r"\A\s*<summary>.*?</summary>", "", block, count=1, flags=re.S))
    return re.sub(r"(?m)^> ?", "", text).strip()


def role_of(item: Mapping[str, Any], name: str) -> str:
    given = item.get("role", item.get("from"))
    role = given.lower() if isinstance(given, str) else ""
    if role not in ROLES and role not in TOOLS:
        what = "is missing" if given is None else f"cannot be {quoted(given)}"
        raise refusal(f"in {name}, role {what}. Give 'system', 'user' or 'assistant'")
    return role


def plain_turn(item: object, name: str) -> Turn:
    """A message as programs send it to a model, in the format of OpenAI, Anthropic, Ollama or
    ShareGPT. Raises StorageError for anything else."""
    if isinstance(item, StorageError):
        raise item
    if not isinstance(item, dict):
        raise refusal(f"{name} is of type {type(item).__name__}, not of type dict")
    role = role_of(item, name)
    turn = Turn(ROLES.get(role, role))
    if role in TOOLS:
        turn.left[TOOLS[role]] += 1
        return turn
    content = next((item[each] for each in CONTENTS if item.get(each) is not None), None)
    if content is not None and not isinstance(content, str | list | dict):
        raise refusal(f"in {name}, content cannot be {quoted(content)}. Give a text")
    turn.add(content)
    turn.texts += [text for text in [text_of(item.get("refusal"))] if text]
    turn.thoughts += [text for each in THOUGHTS if (text := text_of(item.get(each)))][:1]
    if spoken := text_of(inside(item.get("audio"), "transcript")):
        turn.texts += [spoken] if not turn.texts else []
        turn.left[RECORDINGS] += 1
    for each, what in COUNTED.items():
        turn.count(what, item.get(each))
    nothing = not (turn.texts or turn.thoughts or turn.left)
    if nothing and not any(each in item for each in CONTENTS):
        raise refusal(f"in {name}, content is missing. Give a text")
    turn.finish()
    return turn


# conversations

Timed = tuple[Turn, float]
LISTS = ("messages", "conversations", "conversation", "items")
"""The names under which a list of messages stands; all but the first are ShareGPT's."""


def reader_of(entry: Mapping[str, Any]) -> Callable[[Any], Export] | None:
    if "mapping" in entry:
        return read_chatgpt
    if "conv" in entry:
        return read_llama_cpp
    if "chat" in entry or "history" in entry:
        return read_open_webui
    return read_plain if any(name in entry for name in LISTS) else None


def is_plain(data: object) -> bool:
    return isinstance(data, list) and any(
        bool(data) and inside(data[0], name) is not None for name in ("role", "from")
    )


# ChatGPT

TEXT_TYPES = ("text", "multimodal_text")
OTHER_TYPES = {
    "code": CALLS,
    "user_editable_context": INSTRUCTIONS,
    "model_editable_context": HIDDEN,
    "reasoning_recap": HIDDEN,
    **dict.fromkeys(("execution_output", "tether_quote", "tether_browsing_display"), RESULTS),
    **dict.fromkeys(("sonic_webpage", "system_error", "citable_code_output"), RESULTS),
}
"""Types of content that are neither text of the user nor of the answer."""


def read_chatgpt(entry: dict[str, Any]) -> Export:
    """All branches; the branch that was shown last is chosen."""
    mapping = typed(entry["mapping"], dict, "mapping")
    node = entry.get("current_node") or next(reversed(mapping), None)
    found, left = _tree(mapping, node, "parent", _chatgpt_turn)
    return _foreign(entry.get("title"), entry.get("create_time"), found, left)


def _chatgpt_turn(node: dict[str, Any]) -> Timed | None:
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
        turn.thoughts = [text_of([content.get("thoughts"), turn.texts])]
    elif (
        isinstance(kind, str)
        and kind not in TEXT_TYPES
        and (role == "assistant" or kind in OTHER_TYPES)
    ):
        turn.left = Counter([OTHER_TYPES.get(kind, UNKNOWN)])
    else:
        turn.add(None if turn.texts else text_of(content.get("text")))
        _chatgpt_details(turn, metadata)
        turn.finish()
        return turn, moment(inside(message, "create_time"), "create_time")
    turn.texts = []
    return turn, moment(inside(message, "create_time"), "create_time")


def _chatgpt_details(turn: Turn, metadata: object) -> None:
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
    """Use the items that the model wrote in place of the content if they contain all of it."""
    content, items = (" ".join(each.own.split()) for each in (turn, written))
    if content in items:
        turn.texts = written.texts
    elif items not in content:
        turn.left[UNKNOWN] += 1
    turn.thoughts = turn.thoughts or written.thoughts
    turn.left |= written.left


def _attach(turn: Turn, file: object, text: object) -> None:
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
    own = [
        (item, plain_turn({"content": "", **item}, "a message").own)
        for item in path
        if item.get("role") == "system"
    ]
    prompt, system = next(((item, text) for item, text in own if text), (None, ""))

    def read(item: dict[str, Any]) -> Timed | None:
        return None if item is prompt else _llama_cpp_turn(item)

    found, more = _tree(nodes, node, "parent", read)
    when = _in_seconds(conv.get("lastModified"))
    return _foreign(conv.get("name"), when, found, left + more, system)


def _llama_cpp_turn(item: dict[str, Any]) -> Timed | None:
    if item.get("role") == "system" and not item.get("content"):
        return None
    turn, extra = plain_turn(item, "a message"), item.get("extra")
    if turn.role == "system":
        turn = Turn("", left=Counter([INSTRUCTIONS]))
    for part in _listed(extra):
        _attach(turn, part, inside(part, "content"))
    return turn, moment(_in_seconds(item.get("timestamp")), "the time of a message")


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
    system = text_of(entry.get("system"))
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
    thoughts: dict[str, tuple[list[tuple[int, str]], str | None]] = {}
    """The numbered pieces of thinking of a node without text, and such a node before it."""
    numbered, used = count(), set[int]()
    found: list[ExportedMessage] = []
    for id in _in_order(nodes, parent, numbers):
        before = str(nodes[id].get(parent))
        numbers[id] = above = numbers.get(before)
        try:
            turn, when = read(nodes[id]) or (Turn(""), 0.0)
        except StorageError:
            if id in path:
                raise
            left[UNREADABLE] += 1
            continue
        pieces = [(next(numbered), each) for each in turn.thoughts]
        last, bare = before if before in thoughts else None, not turn.content().strip()
        left += turn.left
        left[EMPTY] += bare and bool(turn.role) and not (turn.thoughts or +turn.left)
        if bare:
            thoughts[id] = pieces, last
            continue
        chain = [pieces] if turn.role == "assistant" else []
        while chain and last is not None:
            earlier, last = thoughts[last]
            chain.append(earlier)
        thought = [piece for each in reversed(chain) for piece in each]
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
