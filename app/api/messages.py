"""Anthropic's messages: requests and answers in the format of /v1/messages."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from app.api.answers import Block, Blocks, Data, Step
from app.api.figures import figures
from app.api.formats import Schema, usable
from app.api.requests import (
    EFFORTS,
    LIST,
    NO_ARGUMENTS,
    AnswerOptions,
    Body,
    Choice,
    Content,
    Earlier,
    Given,
    Id,
    Limit,
    Object,
    SentEffort,
    Stops,
    ToolFunction,
    ToolName,
    in_parts,
    joined,
    offer,
    result,
    talk,
)
from engine.backends.base import BackendInfo
from engine.engine import Request
from engine.settings import ANY_OBJECT, MOST_TOKENS
from engine.types import Finish, Message, ToolCall
from storage.validation import refusal

STOPS: dict[Finish, str] = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "max_tokens",
}
"""Why an answer ended, in Anthropic's terms."""
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of what is added to a block, and the name under which it is sent."""


class SentBlock(Given):
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"] = Field(
        description="'text', 'tool_use', 'tool_result' or 'thinking': no images or documents"
    )
    text: str = ""
    id: Id | None = None
    name: ToolName | None = None
    input: Object = "{}"
    tool_use_id: Id | None = None
    content: Content = []

    @model_validator(mode="after")
    def whose_call(self) -> Self:
        if self.type == "tool_use" and not (self.id and self.name):
            raise refusal("A tool_use needs an id and a name.")
        if self.type == "tool_result" and not self.tool_use_id:
            raise refusal("A tool_result needs the tool_use_id of its call.")
        return self


class SentMessage(Given):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[SentBlock], FailFast(), BeforeValidator(in_parts)] = Field(
        description="a string, or a list of blocks"
    )

    @property
    def messages(self) -> Iterator[Message]:
        """Results stand before text, as they do in Anthropic's API. Thinking is not read again."""
        calls = list[ToolCall]()
        for block in self.content:
            if block.type == "tool_result":
                yield result(block.tool_use_id or "", joined(block.content))
            elif block.type == "tool_use" and self.role == "assistant":
                calls.append(ToolCall(block.id or "", block.name or "", block.input))
        text = "\n".join(block.text for block in self.content if block.type == "text")
        yield Message(self.role, text, tuple(calls))


class SentTool(ToolFunction):
    parameters: Object = Field(default=NO_ARGUMENTS, alias="input_schema")


class SentChoice(Given):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def which_tool(self) -> Self:
        if self.type == "tool" and not self.name:
            raise refusal("tool_choice of the type 'tool' needs the name of one of the tools.")
        return self

    @property
    def choice(self) -> Choice:
        kind: Any = {"any": "required", "tool": "required"}.get(self.type, self.type)
        return Choice(kind, self.name if self.type == "tool" else "")


class SentThinking(Given):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Given):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="a JSON schema")

    @model_validator(mode="after")
    def has_schema(self) -> Self:
        if self.schema_ is None:
            raise refusal("output_config.format.schema is missing. Give a JSON schema.")
        return self


class OutputConfig(Given):
    effort: SentEffort | None = None
    format: OutputFormat | None = None


class Messages(Body):
    max_tokens: Limit = None
    system: Content = []
    messages: Annotated[list[SentMessage], *LIST]
    stop_sequences: Stops = []
    tools: Annotated[list[SentTool], FailFast(), offer("custom")] = []
    tool_choice: SentChoice = SentChoice()
    thinking: SentThinking | None = None
    output_config: OutputConfig = OutputConfig()

    @property
    def options(self) -> AnswerOptions:
        thinks = EFFORTS[self.output_config.effort]
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled" and (thinks or True)
        wanted = self.output_config.format
        schema = wanted.schema_ or ANY_OBJECT if wanted else ""
        return AnswerOptions(
            self.max_tokens or MOST_TOKENS,
            self.stop_sequences,
            single=self.tool_choice.disable_parallel_tool_use,
            thinking=thinks,
            form=usable("output_config", "json_schema", schema) if schema else None,
        )

    def requests(self, basic: Request, info: BackendInfo, earlier: Earlier) -> list[Request]:
        turns = [Message("system", joined(self.system))]
        for each in self.messages:
            turns += each.messages
        tools = [each.tool for each in self.tools]
        return [talk(basic, info, turns, tools, self.tool_choice.choice, "messages")]


class MessagesReply(Blocks):
    prefix: ClassVar[str] = "msg_"

    def begin(self, tokens: int) -> list[Data]:
        usage = {"input_tokens": tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self.message(None, usage)}]

    def step(self, step: Step, block: Block, text: str = "") -> list[Data]:
        kind, name = DELTAS[block.kind]
        more: dict[Step, Data] = {
            "start": {"content_block": content_of(block)},
            "delta": {"delta": {"type": kind, name: text}},
            "stop": {},
        }
        return [{"type": f"content_block_{step}", "index": block.number, **more[step]}]

    def end(self) -> list[Data]:
        delta = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self.tokens}
        return [last | figures(self.answered), {"type": "message_stop"}]

    def whole(self) -> Data:
        return self.message(self.stop_reason, self.tokens) | figures(self.answered)

    def message(self, stop_reason: str | None, usage: Data) -> Data:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.info.name,
            "content": [content_of(block) for block in self.blocks],
            "stop_reason": stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": usage,
        }

    @property
    def stop_reason(self) -> str | None:
        over = self.grown.over
        if over is None or over.finish is None:
            return None
        return "tool_use" if self.grown.finish == "tool_calls" else STOPS[over.finish]

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer. Of several, it is not known which one did."""
        stops = self.completion.options.stop
        return stops[0] if self.stop_reason == "stop_sequence" and len(stops) == 1 else None

    @property
    def tokens(self) -> Data:
        found = self.usage
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": found["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": found["completion_tokens"],
        }


def content_of(block: Block) -> dict[str, Any]:
    if block.call is not None:
        given = json.loads(block.text or "{}")
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
