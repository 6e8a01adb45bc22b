"""OpenAI's responses: requests and answers in the format of /v1/responses."""

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from app.api.answers import Block, BlockKind, Blocks, Data, Step
from app.api.figures import figures
from app.api.formats import ResponseFormat, usable
from app.api.requests import (
    EFFORTS,
    LIST,
    MOST_MESSAGES,
    AnswerOptions,
    Arguments,
    Body,
    Choice,
    Content,
    Earlier,
    Given,
    Id,
    Limit,
    Object,
    SentEffort,
    ToolChoice,
    ToolFunction,
    ToolName,
    joined,
    offer,
    result,
    talk,
)
from engine.backends.base import BackendInfo
from engine.engine import Request
from engine.settings import MOST_TOKENS
from engine.tools import as_json
from engine.types import Message, Tool, ToolCall
from storage.validation import refusal

ITEMS = {
    "thinking": ("reasoning", "rs_", "reasoning_text"),
    "text": ("message", "msg_", "output_text"),
    "call": ("function_call", "fc_", "function_call_arguments"),
    "custom": ("custom_tool_call", "ctc_", "custom_tool_call_input"),
}
"""The item of each kind of block: its type, the beginning of its id, and the name of its text."""


SKIPPED = ("reasoning", "web_search_call")
"""Items that are not read again: thinking, and searches, whose results only their maker knows."""


def items(value: Any) -> Any:
    """The items of an input, which may be a text."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [each for each in value if not (isinstance(each, dict) and each.get("type") in SKIPPED)]


class Item(Given):
    """A message, a call or its result. Calls without a schema are read as those of functions."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "local_shell_call",
    ] = Field(
        default="message",
        description="'message', 'function_call', 'custom_tool_call' or one of their outputs",
    )
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = []
    call_id: Id | None = None
    name: ToolName | None = None
    namespace: ToolName | None = None
    arguments: Arguments = "{}"
    input: str = ""
    action: Object = "{}"
    output: Content = []

    @model_validator(mode="after")
    def whole_item(self) -> Self:
        if self.type == "message" and not self.role:
            raise refusal("A message needs a role.")
        if self.type != "message" and not self.call_id:
            raise refusal(f"A {self.type} needs the call_id of its call.")
        if self.type in ("function_call", "custom_tool_call") and not self.name:
            raise refusal(f"A {self.type} needs a name.")
        return self

    @property
    def message(self) -> Message:
        id, name = self.call_id or "", joint_name(self.namespace or "", self.name or "")
        calls = {
            "function_call": ToolCall(id, name, self.arguments),
            "custom_tool_call": ToolCall(id, name, as_json({"input": self.input})),
            "local_shell_call": ToolCall(id, "local_shell", self.action),
        }
        if call := calls.get(self.type):
            return Message("assistant", "", (call,))
        if self.type != "message":
            return result(id, joined(self.output))
        role = "system" if self.role == "developer" else self.role or ""
        return Message(role, joined(self.content))


WRITTEN = {"call": "arguments", "custom": "input"}
"""The name of the text of a call, by the kind of its block; of other blocks it is "text"."""
ANY_INPUT = as_json(
    {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
)


def joint_name(namespace: str, name: str) -> str:
    """The name by which a model knows a tool of a namespace, as programs form it as well."""
    separator = "" if namespace.endswith("_") or not namespace else "__"
    return namespace + separator + name


class InputFormat(Given):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


class SentTool(ToolFunction):
    """A function; a custom tool, which is a function whose only argument is a text; or a namespace
    of such tools. Codex sends the tools of each MCP server as one. The grammar of the text of a
    custom tool, if there is one, is told to the model and not enforced."""

    type: Literal["function", "custom", "namespace"]
    format: InputFormat = InputFormat()
    tools: Annotated[list["SentTool"], FailFast(), offer("function", "custom")] = []

    def named(self) -> dict[str, tuple[str, "SentTool"]]:
        """The tool with its namespace, or all of a namespace, by the names that a model knows."""
        if self.type != "namespace":
            return {self.name: ("", self)}
        return {joint_name(self.name, tool.name): (self.name, tool) for tool in self.tools}

    def offered(self) -> list[Tool]:
        """What a model reads of them. What a namespace says of itself precedes its first tool."""
        found = [replace(tool.tool, name=name) for name, (_, tool) in self.named().items()]
        if self.type == "namespace" and found and self.description:
            text = f"{self.description}\n\n{found[0].description}"
            found[0] = replace(found[0], description=text.strip())
        return found

    @property
    def tool(self) -> Tool:
        if self.type == "function":
            return super().tool
        description = self.description
        if self.format.definition:
            description += f"\n\nGrammar of the input ({self.format.syntax}):\n"
            description += self.format.definition
        return Tool(self.name, description, ANY_INPUT)

    def shown(self) -> Data:
        """The tool in an answer, as it was sent."""
        kept = {"type", "name", "description"}
        if self.type == "custom":
            return self.model_dump(include=kept | {"format"})
        known = self.model_dump(include=kept)
        if self.type == "namespace":
            return {**known, "tools": [tool.shown() for tool in self.tools]}
        return {**known, "parameters": json.loads(self.parameters), "strict": None}


class TextFormat(ResponseFormat):
    place: ClassVar[str] = "text.format.schema"


class TextOptions(Given):
    format: TextFormat = TextFormat(type="text")


class Reasoning(Given):
    effort: SentEffort | None = None


def not_stored(value: Any) -> Any:
    if value:
        raise refusal("Stored prompts are not supported. Send instructions and an input.")
    return value


class Responses(Body):
    asked: ClassVar[str] = "input"
    prompt: Annotated[Any, AfterValidator(not_stored)] = None
    input: Annotated[list[Item], *LIST, BeforeValidator(items)] = Field(
        description=f"a text, or a list of 1 to {MOST_MESSAGES:,} items"
    )
    instructions: str = ""
    previous_response_id: Id | None = None
    store: bool = True
    max_output_tokens: Limit = None
    tools: Annotated[list[SentTool], FailFast(), offer("function", "custom", "namespace")] = []
    tool_choice: ToolChoice = Choice()
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()

    @property
    def options(self) -> AnswerOptions:
        schema = self.text.format.schema_text
        return AnswerOptions(
            self.max_output_tokens or MOST_TOKENS,
            single=not self.parallel_tool_calls,
            thinking=EFFORTS[self.reasoning.effort],
            form=usable("text", "json_schema", schema) if schema else None,
        )

    def requests(self, basic: Request, info: BackendInfo, earlier: Earlier) -> list[Request]:
        before = earlier(self.previous_response_id) if self.previous_response_id else ()
        instructions = Message("system", self.instructions)
        turns = [instructions, *before, *(each.message for each in self.input)]
        tools = [tool for each in self.tools for tool in each.offered()]
        return [talk(basic, info, turns, tools, self.choice, "input")]

    @property
    def named(self) -> dict[str, tuple[str, SentTool]]:
        return {name: tool for each in self.tools for name, tool in each.named().items()}

    @property
    def choice(self) -> Choice:
        """The choice of a tool, which may leave out the namespace if no other tool has its name."""
        choice: Choice = self.tool_choice
        known = self.named
        within = [name for name, (_, tool) in known.items() if tool.name == choice.name]
        return replace(choice, name=within[0]) if len(within) == 1 else choice


class ResponsesReply(Blocks):
    prefix: ClassVar[str] = "resp_"
    sent = 0
    """How many events were sent."""

    def event(self, name: str, **data: Any) -> Data:
        self.sent += 1
        return {"type": f"response.{name}", "sequence_number": self.sent - 1, **data}

    def grow(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> list[Data]:
        _, tool = self.tool_of(call)
        if tool is not None and tool.type == "custom":
            found = json.loads(text or "{}").get("input")
            kind, text = "custom", found if isinstance(found, str) else text
        return super().grow(kind, text, call)

    def tool_of(self, call: ToolCall | None) -> tuple[str, SentTool | None]:
        """The called tool, and its namespace."""
        return ("", None) if call is None else self.body.named.get(call.name, ("", None))

    def begin(self, tokens: int) -> list[Data]:
        names = "created", "in_progress"
        return [self.event(name, response=self.response("in_progress")) for name in names]

    def step(self, step: Step, block: Block, text: str = "") -> list[Data]:
        output, name = block.number, ITEMS[block.kind][2]
        item = self.item(block, "in_progress" if step == "start" else self.status_of(block))
        where: Data = {"item_id": item["id"], "output_index": output}
        if block.call is None:
            where["content_index"] = 0
        if block.kind == "text" and step != "start":
            where["logprobs"] = []
        if step == "delta":
            return [self.event(f"{name}.delta", **where, delta=text)]
        part = [] if block.call else [("content_part", {"part": part_of(block)})]
        if step == "start":
            found = [("output_item", {"item": item}), *part]
            return [self.event(f"{n}.added", **where, **data) for n, data in found]
        written: Data = {WRITTEN.get(block.kind, "text"): block.text}
        found = [(name, written), *part, ("output_item", {"item": item})]
        return [self.event(f"{n}.done", **where, **data) for n, data in found]

    def end(self) -> list[Data]:
        whole = self.whole()
        return [self.event(str(whole["status"]), response=whole)]

    def whole(self) -> Data:
        status = "incomplete" if self.grown.finish == "length" else "completed"
        return self.response(status) | {"usage": self.tokens} | figures(self.answered)

    def status_of(self, block: Block) -> str:
        """The status of an item that does not grow any more: a call is whole in any case."""
        is_cut = self.grown.finish == "length" and block is self.blocks[-1] and not block.call
        return "incomplete" if is_cut else "completed"

    def response(self, status: str) -> Data:
        body, generation = self.body, self.completion.requests[0].generation
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.info.name,
            "output": [self.item(block, self.status_of(block)) for block in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "temperature": generation.sampling.temperature,
            "top_p": generation.sampling.top_p,
            "tool_choice": body.tool_choice.sent,
            "tools": [each.shown() for each in body.tools],
        }

    def item(self, block: Block, status: str) -> Data:
        kind, prefix, _ = ITEMS[block.kind]
        item: Data = {"type": kind, "id": prefix + block.id, "status": status}
        if call := block.call:
            namespace, tool = self.tool_of(call)
            within = {"namespace": namespace} if namespace else {}
            name = call.name if tool is None else tool.name
            return item | {
                "call_id": call.id,
                **within,
                "name": name,
                WRITTEN[block.kind]: block.text,
            }
        more: Data = {"summary": []} if block.kind == "thinking" else {"role": "assistant"}
        return item | more | {"content": [part_of(block)] if block.text else []}

    @property
    def kept(self) -> tuple[str, tuple[Message, ...]] | None:
        """Instructions hold for one answer alone, so they are not kept."""
        if not self.body.store:
            return None
        (request,) = self.completion.requests
        first, *rest = request.messages
        alone = first.content.removeprefix(self.body.instructions).removeprefix("\n\n")
        first = replace(first, content=alone) if first.role == "system" else first
        grown = self.grown
        last = Message("assistant", request.prefix + grown.text, tuple(grown.calls))
        return self.id, (first, *rest, last)

    @property
    def body(self) -> Responses:
        assert isinstance(self.completion.body, Responses)
        return self.completion.body

    @property
    def tokens(self) -> Data:
        found = self.usage
        cached = found["prompt_tokens_details"]["cached_tokens"]
        thought = found["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": found["total_tokens"],
        }


def part_of(block: Block) -> Data:
    part = {"type": ITEMS[block.kind][2], "text": block.text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})
