"""OpenAI's responses: requests and answers in the format of /v1/responses."""

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from app.api.answers import Block, BlockKind, Blocks, Data, Step
from app.api.figures import figures
from app.api.formats import ResponseFormat, usable
from app.api.requests import (
    EFFORTS,
    LIST,
    AnswerOptions,
    Arguments,
    Body,
    Choice,
    Content,
    Earlier,
    Given,
    Id,
    Limit,
    Nothing,
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
        id, name = self.call_id or "", self.name or ""
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


class InputFormat(Given):
    type: Literal["text", "grammar"] = "text"
    syntax: str = ""
    definition: str = ""


class SentTool(ToolFunction):
    """A function, or a custom tool: a function whose only argument is a text. The grammar of the
    text, if there is one, is told to the model and not enforced."""

    type: Literal["function", "custom"]
    format: InputFormat = InputFormat()

    @property
    def tool(self) -> Tool:
        if self.type == "function":
            return super().tool
        description = self.description
        if self.format.definition:
            description += f"\n\nGrammar of the input ({self.format.syntax}):\n"
            description += self.format.definition
        return Tool(self.name, description, ANY_INPUT)


def shown(tool: SentTool) -> Data:
    """A tool in an answer, as it was sent."""
    if tool.type == "custom":
        return tool.model_dump(exclude={"parameters"})
    given = tool.model_dump(exclude={"format"})
    return {**given, "parameters": json.loads(tool.parameters), "strict": None}


class TextOptions(Given):
    format: ResponseFormat = ResponseFormat(type="text")


class Reasoning(Given):
    effort: SentEffort | None = None


class Responses(Body):
    asked: ClassVar[str] = "input"
    input: Annotated[list[Item], *LIST, BeforeValidator(items)]
    instructions: str = ""
    previous_response_id: Id | None = None
    store: bool = True
    max_output_tokens: Limit = None
    tools: Annotated[list[SentTool], FailFast(), offer("function", "custom")] = []
    tool_choice: ToolChoice = Choice()
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()
    prompt: Nothing = None

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
        tools = [each.tool for each in self.tools]
        return [talk(basic, info, turns, tools, self.tool_choice, "input")]


class ResponsesReply(Blocks):
    prefix: ClassVar[str] = "resp_"
    sent = 0
    """How many events were sent."""

    def event(self, name: str, **data: Any) -> Data:
        self.sent += 1
        return {"type": f"response.{name}", "sequence_number": self.sent - 1, **data}

    def grow(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> list[Data]:
        custom = {tool.name for tool in self.body.tools if tool.type == "custom"}
        if call is not None and call.name in custom:
            found = json.loads(text or "{}").get("input")
            kind, text = "custom", found if isinstance(found, str) else text
        return super().grow(kind, text, call)

    def begin(self, tokens: int) -> list[Data]:
        names = "created", "in_progress"
        return [self.event(name, response=self.response("in_progress")) for name in names]

    def step(self, step: Step, block: Block, text: str = "") -> list[Data]:
        output, name = block.number, ITEMS[block.kind][2]
        item = item_of(block, "in_progress" if step == "start" else "completed")
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
            "output": [item_of(block, "completed") for block in self.blocks],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "temperature": generation.sampling.temperature,
            "top_p": generation.sampling.top_p,
            "tool_choice": body.tool_choice.sent,
            "tools": [shown(each) for each in body.tools],
        }

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


def item_of(block: Block, status: str) -> Data:
    kind, prefix, _ = ITEMS[block.kind]
    item: Data = {"type": kind, "id": prefix + block.id, "status": status}
    if call := block.call:
        return item | {"call_id": call.id, "name": call.name, WRITTEN[block.kind]: block.text}
    more: Data = {"summary": []} if block.kind == "thinking" else {"role": "assistant"}
    return item | more | {"content": [part_of(block)] if block.text else []}
