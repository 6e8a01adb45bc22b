"""What a message of another program says, apart from that program's own markup.

The invariant: every part of a message is kept, as text, as thinking or as an attached file, or it
is counted in `left_out`. Nothing that was meant for a tool, and no markup of another program,
becomes part of an answer.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import StorageError
from engine.thinking import with_thinking
from storage.exported import inside, refusal
from storage.validation import quoted

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
"""What a part is by its type; the first that fits counts."""
COUNTED = {
    **dict.fromkeys(("tool_calls", "toolCalls", "function_call", "toolInvocations"), CALLS),
    **dict.fromkeys(("attachments", "experimental_attachments", "files"), FILES),
    **dict.fromkeys(("citations", "annotations", "sources"), CITATIONS),
    **dict.fromkeys(("images",), IMAGES),
}
"""Fields of a message that hold no words of it."""
THOUGHTS = ("reasoning_content", "reasoningContent", "reasoning", "thinking", "thoughts")
WORDS = ("summary", "text", "refusal", "content", "transcript", "thinking", "reasoning", "value")
"""Where an object keeps its text."""
CONTENTS = ("content", "value", "text", "parts")
"""Where a message keeps its content."""


def words_of(value: object) -> str:
    """All texts of a value, whatever it is made of."""
    found, waiting = list[str](), [value]
    while waiting:
        match waiting.pop():
            case str(text):
                found.append(text)
            case list(items):
                waiting += reversed(items)
            case dict(items):
                waiting += [items[name] for name in reversed(WORDS) if name in items]
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
    goes_on: bool = False
    links: dict[str, str] = field(default_factory=dict)
    """What stands for a citation of the text, by its mark."""

    def add(self, content: object) -> None:
        """Take content in: a text, a part, or a list of parts."""
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
        """A bare text continues the bare text before it."""
        if self.goes_on:
            self.texts[-1] += text
        elif text.strip():
            self.texts.append(text)
            self.goes_on = True

    def add_part(self, part: Mapping[str, Any]) -> None:
        kind, words = part.get("type", part.get("content_type")), words_of(part)
        if kind in TEXTS and (words or kind):
            self.texts += [words] if words else []
            self.goes_on = False
            return
        name = kind.lower() if isinstance(kind, str) else ""
        what = next((what for pattern, what in KINDS if pattern.search(name)), UNKNOWN)
        if what == THINKING and words:
            self.thoughts.append(words)
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
        """Take the markup of other programs out of an answer."""
        if self.role == "assistant":
            self.texts = [self.cleaned(text) for text in self.texts]

    @property
    def own(self) -> str:
        """Its own words."""
        return "\n".join(text for text in self.texts if text.strip())

    def content(self, thoughts: Iterable[str] = ()) -> str:
        """The message: its files, thinking in the form in which models write it, its own words."""
        thought = "\n\n".join(each.strip() for each in thoughts if each.strip())
        said = with_thinking(thought, self.own) if thought else self.own
        return "\n\n".join(filter(None, [*self.files, said]))

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
        """What stands for a citation: its link, the name of what it describes, or nothing."""
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
        """Where a block of markup ends, and what stands for it."""
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
    """Where what begins in a text ends. An end that is missing is searched only once."""

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
        """The end of a block of code, or of the text."""
        closed = re.compile(rf"(?m)^ {{0,3}}{fence}[`~]*[ \t]*$").search(self.text, start)
        return closed.end() if closed else len(self.text)

    def tick(self, ticks: str, start: int) -> int:
        """The end of code within a line; that of the backticks if they open none."""
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
"""How a call begins within its tag."""
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
    words = html.unescape(re.sub(r"\A\s*<summary>.*?</summary>", "", block, count=1, flags=re.S))
    return re.sub(r"(?m)^> ?", "", words).strip()


def role_of(item: Mapping[str, Any], name: str) -> str:
    """The role of a message, in any spelling that is known. Raises StorageError."""
    given = item.get("role", item.get("from"))
    role = given.lower() if isinstance(given, str) else ""
    if role not in ROLES and role not in TOOLS:
        what = "is missing" if given is None else f"cannot be {quoted(given)}"
        raise refusal(f"in {name}, role {what}. Give 'system', 'user' or 'assistant'")
    return role


def plain_turn(item: object, name: str) -> Turn:
    """A message as programs send it to a model, in the forms of OpenAI, Anthropic, Ollama and
    ShareGPT. Raises StorageError for one that is none."""
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
    turn.texts += [words for words in [words_of(item.get("refusal"))] if words]
    turn.thoughts += [words for each in THOUGHTS if (words := words_of(item.get(each)))][:1]
    if spoken := words_of(inside(item.get("audio"), "transcript")):
        turn.texts += [spoken] if not turn.texts else []
        turn.left[RECORDINGS] += 1
    for each, what in COUNTED.items():
        turn.count(what, item.get(each))
    nothing = not (turn.texts or turn.thoughts or turn.left)
    if nothing and not any(each in item for each in CONTENTS):
        raise refusal(f"in {name}, content is missing. Give a text")
    turn.finish()
    return turn
