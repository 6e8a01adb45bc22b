"""Calls of tools in the text of an answer, told apart from what is said.

A model writes its calls as text, each family in a form of its own. `FORMS` is the only list of
these forms, and `CallSplitter` the only code that looks for calls. A call counts once it is whole:
it can be read, and names a tool of the request. Everything else stays text, so that nothing that a
model wrote is lost, and nobody is asked to run a tool that was not offered.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.text import read_json, unsure
from engine.thinking import CALLS, NEXT
from engine.types import Tool, ToolCall

Named = tuple[str, Any]
"""The name of a tool, and the arguments of a call."""
QUOTE = '<|"|>'
"""What Gemma 4 puts around a text."""


class CallForm(NamedTuple):
    """How a family of models writes calls.

    A call stands between one of the `begins` and the `end`, or the end of the answer if that is "".
    If `opens`, it can only be the beginning of the answer. A `single` call ends the answer, and
    `stop` is the token with which the model ends it. Chat templates of the form have `sign`, or
    else the first of the `begins`. The template takes the arguments as `text`, or else as an
    object. `frame` is what the template writes before a tool's name, before its arguments in JSON,
    and after them; None for another form of arguments. `id` names a call in its conversation by its
    tool's name and its number; "" stands for any nine letters and digits. If the template shows no
    calls, `inline` ones are a list in JSON in the text of a message.
    """

    name: str
    begins: tuple[str, ...]
    end: str = ""
    opens: bool = False
    single: bool = False
    stop: str = ""
    sign: str = ""
    text: bool = False
    id: str = ""
    inline: bool = False
    frame: tuple[str, str, str] | None = None


FORMS = (
    CallForm("tagged", ("<tool_call>",), "</tool_call>"),  # Hermes, Qwen, GLM
    CallForm("deepseek", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>"),
    CallForm("gemma", ("<|tool_call>",), "<tool_call|>"),
    CallForm("mistral", ("[TOOL_CALLS]",)),
    CallForm("granite", ("<|tool_call|>",), inline=True),  # Granite 3
    CallForm("phi", ("<|tool_call|>",), "<|/tool_call|>", sign="<|/tool_call|>"),  # Phi-4-mini
    CallForm(  # LFM2
        "pythonic",
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        sign="List of tools: ",
        inline=True,
    ),
    CallForm(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        id="functions.{name}:{number}",
    ),
    # The templates of gpt-oss and Llama 3 show only one call of a message, or refuse several.
    CallForm(
        "harmony",
        (*(NEXT + call for call in CALLS), *CALLS),
        single=True,
        stop="<|call|>",
        sign="<|channel|>commentary",
    ),
    CallForm(
        "llama",
        ("<|python_tag|>", "{"),
        opens=True,
        single=True,
        sign='"parameters": dictionary of argument name',
    ),
)


def form_of(template: str) -> CallForm | None:
    """The form whose sign a template has; the last one of several."""
    found = (each for each in reversed(FORMS) if (each.sign or each.begins[0]) in template)
    return next(found, None)


def stop_of(template: str) -> str:
    """The token that ends an answer after a call, "" if it is the usual one."""
    form = form_of(template)
    return form.stop if form else ""


def as_json(value: Any) -> str:
    """JSON as models read and write it. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def named(value: Any) -> Named:
    """The call in an object with a name and arguments, which may be JSON in a text."""
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    return value["name"], read_json(arguments) if isinstance(arguments, str) else arguments


def one_or_more(value: Any) -> Iterator[Named]:
    return map(named, value if isinstance(value, list) else [value])


def typed(tool: Tool, name: str, text: str) -> Any:
    """An argument that was written without quotes, as the schema of its tool wants it."""
    schema = json.loads(tool.parameters).get("properties", {}).get(name, {})
    if schema.get("type", "string" if not schema else "") == "string":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def tagged(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    body = text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    if body.startswith(("{", "[")):
        yield from one_or_more(read_json(body))
        return
    if body.startswith("<function="):  # Qwen 3.5 and Qwen3-Coder
        name = body[len("<function=") : body.index(">")]
        ends = r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"
        found = re.findall(rf"<parameter=([^>\n]+)>\n?(.*?){ends}", body, re.DOTALL)
    else:  # GLM
        name = body.partition("<arg_key>")[0].strip()
        pairs = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        found = re.findall(pairs, body, re.DOTALL)
    yield name, {key: typed(tools[name], key, value) for key, value in found}


def deepseek(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    for call in re.findall("<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL):
        name, _, arguments = call.partition("<｜tool▁sep｜>")
        if name == "function":  # V3 and R1 write the name next, and a block of code
            name, _, arguments = arguments.partition("\n```json\n")
            arguments = arguments.strip().removesuffix("```")
        yield name.strip(), read_json(arguments)


def gemma(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    body = text.removeprefix("<|tool_call>").removesuffix("<tool_call|>").strip()
    name, _, arguments = body.removeprefix("call:").partition("{")
    parts = ("{" + arguments).split(QUOTE)
    parts[1::2] = map(json.dumps, parts[1::2])
    parts[::2] = (re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+):", r'\1"\2":', part) for part in parts[::2])
    yield name, read_json("".join(parts))


def mistral(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, separator, arguments = part.partition("[ARGS]")
        if separator:
            yield name.partition("[CALL_ID]")[0].strip(), read_json(arguments)
        else:
            yield from map(named, read_json(part))


def listed(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    body = text.removeprefix("<|tool_call|>").removesuffix("<|/tool_call|>")
    yield from one_or_more(read_json(body))


class JsonNames(ast.NodeTransformer):
    """Reads the words of JSON, which some models write between Python's."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def pythonic(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    body = text.removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>").strip()
    if body.startswith("[{"):  # Some templates show the calls as JSON.
        yield from one_or_more(read_json(body))
        return
    try:
        calls: Any = ast.parse(body, mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise ValueError("this is no Python") from error
    for call in calls.elts:
        given = {
            each.arg: ast.literal_eval(JsonNames().visit(each.value)) for each in call.keywords
        }
        if call.args or None in given:
            raise ValueError("an argument has no name")
        yield ast.unparse(call.func), given


def kimi(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    for call in re.findall(r"<\|tool_call_begin\|>(.*?)<\|tool_call_end\|>", text, re.DOTALL):
        id, _, arguments = call.partition("<|tool_call_argument_begin|>")
        yield re.sub(r":\d+$", "", id.strip().removeprefix("functions.")), read_json(arguments)


def harmony(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    head, _, arguments = text.partition("<|message|>")
    yield re.findall(r" to=functions\.([\w./:-]+)", head)[0], read_json(arguments)


def llama(text: str, tools: Mapping[str, Tool]) -> Iterator[Named]:
    body = text.removeprefix("<|python_tag|>").lstrip()
    _, end = json.JSONDecoder().raw_decode(body)
    if body[end:].strip() and not body[end:].lstrip().startswith(";"):
        raise ValueError("text follows the call")
    yield named(read_json(body[:end]))


READERS: dict[str, Callable[[str, Mapping[str, Tool]], Iterator[Named]]] = {
    "tagged": tagged,
    "deepseek": deepseek,
    "gemma": gemma,
    "mistral": mistral,
    "granite": listed,
    "phi": listed,
    "pythonic": pythonic,
    "kimi": kimi,
    "harmony": harmony,
    "llama": llama,
}
"""How the text of a call is read, by the form. They raise all kinds of errors if it cannot be."""


def frame_of(form: CallForm, shown: str, tool: Tool, arguments: str) -> tuple[str, str, str] | None:
    """The frame of the last call in a filled template, which is one of this tool with these
    arguments; None if they are not written as JSON."""
    at = shown.rfind(arguments)
    named = shown.rfind(tool.name, 0, max(at, 0))
    begin = max(shown.rfind(mark, 0, max(named, 0)) for mark in form.begins)
    if at < 0 or named < 0 or begin < 0:
        return None
    after = at + len(arguments)
    if form.end:
        end = shown.find(form.end, after) + len(form.end)
    else:
        end = after + len(shown[after:]) - len(shown[after:].lstrip("]}"))
    frame = shown[begin:named], shown[named + len(tool.name) : at], shown[after:end]
    try:
        written = frame[0] + tool.name + frame[1] + arguments + frame[2]
        read = list(READERS[form.name](written, {tool.name: tool}))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return frame if read == [(tool.name, json.loads(arguments))] else None


class Said(NamedTuple):
    """A part of an answer: text, and the calls after it."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallSplitter:
    """Splits one answer. With `single` it ends with its first call."""

    def __init__(self, form: CallForm, tools: Sequence[Tool], single: bool = False) -> None:
        self.form, self.tools = form, {tool.name: tool for tool in tools}
        self.single = single or form.single
        self.begin = re.compile("|".join(map(re.escape, form.begins)))
        self.held = ""
        self.tried = 0
        """How much of the held text is known to hold no whole call."""
        self.said = self.called = False

    def push(self, text: str, over: bool = False) -> Said:
        """Add text, which is the last if `over`. Returns what is certain now, and holds back what
        may be part of a call."""
        self.held += text
        shown, calls = "", list[ToolCall]()
        while self.held and not (self.called and self.single):
            found = self.begin.search(self.held)
            before = len(self.held[: found.start()].rstrip()) if found else 0
            if found is None or self.form.opens and (before or self.said):
                never = over or self.form.opens and self.said
                shown += self.certain(
                    len(self.held) - (0 if never else unsure(self.held, self.form.begins))
                )
                break
            read, end = self.read(found.start(), over)
            if read:
                shown += self.certain(before)
                calls += read[:1] if self.single else read
                self.held, self.tried, self.called = self.held[end - before :], 0, True
            elif over:
                shown += self.certain(found.end())
                self.tried = 0
            else:
                shown += self.certain(before)
                break
        if over and self.called and not shown.strip():
            shown = ""
        return Said(shown, tuple(calls))

    def certain(self, length: int) -> str:
        """Take so much of the held text, which is no call."""
        text, self.held = self.held[:length], self.held[length:]
        self.tried = max(0, self.tried - length)
        self.said = self.said or bool(text.strip())
        return text

    def read(self, start: int, over: bool) -> tuple[list[ToolCall], int]:
        """The calls in the held text from `start` on, [] if none is whole, and where they end. An
        argument may hold the end mark, so each one may be the end."""
        mark, end = self.form.end, len(self.held)
        while mark and (at := self.held.find(mark, max(start, self.tried))) >= 0:
            self.tried = at + len(mark)
            if calls := self.calls(self.held[start : self.tried]):
                return calls, self.tried
        return (self.calls(self.held[start:]) if over else []), end

    def calls(self, text: str) -> list[ToolCall]:
        try:
            found = list(READERS[self.form.name](text, self.tools))
            if not all(name in self.tools and isinstance(given, dict) for name, given in found):
                return []
            written = [(name, as_json(given)) for name, given in found]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return []
        return [ToolCall(secrets.token_hex(5)[:9], *call) for call in written]


def said_in(
    text: str, tools: Sequence[Tool], single: bool = False, forms: Sequence[CallForm] = FORMS
) -> Said:
    """The text and the calls of a whole answer, in the first of some forms in which it calls any;
    with `single` the text before its first call, and that call."""
    found = (CallSplitter(form, tools, single).push(text, over=True) for form in forms)
    return next((said for said in found if said.calls), Said(text))
