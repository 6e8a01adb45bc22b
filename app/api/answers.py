"""Answers in OpenAI's older formats, whole or in chunks. `Reply` is what all formats share."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from app.api.figures import FINISHES, AnswerFigures, figures, usage
from app.api.requests import Completion, OpenAI
from app.api.running import AnswerEvent, AnswerStart, Over, Piece
from engine.backends.base import BackendInfo
from engine.types import Message, Token, ToolCall

LEAST = -9999.0
"""The reported logarithm of a probability of 0."""
BYTES = "bytes:"
"""The prefix of a token that is written as bytes, in the answers to text requests."""
WHOLE = {"chat": "chat.completion", "text": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "text": "cmpl-"}
Data = dict[str, Any]


def logarithm(probability: float) -> float:
    return math.log(probability) if probability > 0 else LEAST


def escaped(piece: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in piece)


def written(piece: bytes, prefix: str = "") -> str:
    """A token as text. One that is only a part of a character is written as the numbers of its
    bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + escaped(piece)


def token_logprob(piece: bytes, probability: float) -> Data:
    return {"token": written(piece), "logprob": logarithm(probability), "bytes": list(piece)}


def chat_logprobs(tokens: Sequence[Token], names: dict[int, bytes]) -> Data:
    content = [
        token_logprob(names[token.id], token.probability)
        | {"top_logprobs": [token_logprob(names[other], p) for other, p in token.likeliest]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Token], starts: Sequence[int], names: dict[int, bytes]) -> Data:
    top = [alternatives(token, names) for token in tokens]
    return {
        "tokens": [written(names[token.id], BYTES) for token in tokens],
        "token_logprobs": [logarithm(token.probability) for token in tokens],
        "top_logprobs": top if any(top) else None,
        "text_offset": [*starts],
    }


def alternatives(token: Token, names: dict[int, bytes]) -> dict[str, float]:
    """The likeliest tokens by their texts. A further one with the same text also has its id, so
    that none is missing."""
    found: dict[str, float] = {}
    for other, probability in token.likeliest:
        name = written(names[other], BYTES)
        name = f"{BYTES}{escaped(names[other])} ({other})" if name in found else name
        found[name] = logarithm(probability)
    return found


def with_reasoning(reasoning: str) -> Data:
    """Thinking, under the name that llama-server and vLLM use; empty if there is none."""
    return {"reasoning_content": reasoning} if reasoning else {}


def called(number: int, call: ToolCall) -> Data:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": number, "id": call.id, "type": "function", "function": function}


@dataclass(slots=True)
class Grown:
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: dict[int, bytes] = field(default_factory=dict)
    over: Over | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.calls += piece.calls
        self.tokens += piece.tokens
        self.starts += piece.starts
        self.names |= piece.names

    @property
    def finish(self) -> str | None:
        """Why the answer ended, in OpenAI's terms."""
        if self.over is None or self.over.finish is None:
            return None
        finish = FINISHES[self.over.finish]
        return "tool_calls" if self.calls and finish == "stop" else finish


class Reply:
    """The growing answer to one request, by the model of `info`. If `named`, the chunks of a stream
    are events with a name, which is their type, and nothing follows them."""

    named: ClassVar[bool] = True

    def __init__(self, completion: Completion, info: BackendInfo) -> None:
        self.completion, self.info, self.created = completion, info, int(time.time())
        self.choices = [Grown() for _ in completion.requests]

    def take(self, event: AnswerEvent) -> list[Data]:
        """Add an event; returns its chunks for a stream."""
        raise NotImplementedError

    def whole(self) -> Data:
        """The answer, once it is over."""
        raise NotImplementedError

    def last(self) -> list[Data]:
        """The chunks after the end of all choices."""
        return []

    @property
    def kept(self) -> tuple[str, tuple[Message, ...]] | None:
        """The id of an answer that can be continued by its name, and the messages up to it; None if
        it cannot."""
        return None

    @property
    def answered(self) -> list[AnswerFigures]:
        return [grown.over.answered for grown in self.choices if grown.over is not None]

    @property
    def usage(self) -> Data:
        return usage(self.answered, self.completion.prompts)


BlockKind = Literal["thinking", "text", "call", "custom"]
Step = Literal["start", "delta", "stop"]


@dataclass(slots=True)
class Block:
    """A part of an answer, in the model's own order. The text of a call are its arguments, or the
    input of a custom tool."""

    kind: BlockKind
    number: int
    id: str
    text: str = ""
    call: ToolCall | None = None


class Blocks(Reply):
    """An answer of blocks, which a stream starts, extends and stops, one after the other."""

    prefix: ClassVar[str]

    def __init__(self, completion: Completion, info: BackendInfo) -> None:
        super().__init__(completion, info)
        self.id = self.prefix + secrets.token_hex(12)
        self.blocks = list[Block]()
        self.growing: Block | None = None

    def begin(self, tokens: int) -> list[Data]:
        """The chunks before all blocks; the prompt has so many tokens."""
        raise NotImplementedError

    def step(self, step: Step, block: Block, text: str = "") -> list[Data]:
        """The chunks for a step of a block, which its text was added to."""
        raise NotImplementedError

    def end(self) -> list[Data]:
        """The chunks after all blocks."""
        raise NotImplementedError

    @property
    def grown(self) -> Grown:
        return self.choices[0]

    def take(self, event: AnswerEvent) -> list[Data]:
        if isinstance(event, AnswerStart):
            self.info = event.info
            return self.begin(event.tokens)
        if isinstance(event, Over):
            self.grown.over = event
            return [*self.close(), *self.end()]
        self.grown.add(event)
        chunks = self.grow("thinking", event.reasoning) if event.reasoning else []
        chunks += self.grow("text", event.text) if event.text else []
        for call in event.calls:
            chunks += [*self.close(), *self.grow("call", call.arguments, call), *self.close()]
        return chunks

    def grow(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> list[Data]:
        chunks, block = list[Data](), self.growing
        if block is None or block.kind != kind:
            chunks += self.close()
            self.growing = block = Block(kind, len(self.blocks), secrets.token_hex(12), "", call)
            self.blocks.append(block)
            chunks += self.step("start", block)
        block.text += text
        return [*chunks, *self.step("delta", block, text)]

    def close(self) -> list[Data]:
        block, self.growing = self.growing, None
        return self.step("stop", block) if block is not None else []


class OpenAIReply(Reply):
    named = False

    def __init__(self, completion: Completion, info: BackendInfo) -> None:
        super().__init__(completion, info)
        assert isinstance(completion.body, OpenAI)
        self.kind = completion.body.kind
        self.with_logprobs = completion.options.likeliest is not None
        self.id = PREFIX[self.kind] + secrets.token_hex(12)

    def take(self, event: AnswerEvent) -> list[Data]:
        if isinstance(event, AnswerStart):
            self.info = event.info
            first = self.content("", role="assistant", content="")
            return [] if self.kind == "text" else [self.chunk(event.choice, first)]
        grown = self.choices[event.choice]
        if isinstance(event, Over):
            grown.over = event
            last = len(self.answered) == len(self.choices) and not self.completion.options.usage
            more = figures(self.answered) if last else {}
            return [self.chunk(event.choice, self.content(""), grown.finish, **more)]
        before = len(grown.calls)
        grown.add(event)
        chunks = list[Data]()
        if event.text or event.reasoning or self.with_logprobs and event.tokens:
            content = self.content(event.text, **with_reasoning(event.reasoning))
            chunks.append(self.chunk(event.choice, content, logprobs=self.logprobs(event)))
        for number, call in enumerate(event.calls, before):
            whole = called(number, call)
            name = whole | {"function": whole["function"] | {"arguments": ""}}
            rest = {"index": number, "function": {"arguments": call.arguments}}
            for part in (name, rest):
                chunks.append(self.chunk(event.choice, self.content("", tool_calls=[part])))
        return chunks

    def whole(self) -> Data:
        choices = []
        for number, grown in enumerate(self.choices):
            content: Data = {"text": grown.text}
            if self.kind == "chat":
                message: Data = {"role": "assistant", "content": grown.text, "refusal": None}
                if grown.calls:
                    calls = [called(number, call) for number, call in enumerate(grown.calls)]
                    message |= {"content": grown.text or None, "tool_calls": calls}
                content = {"message": message | with_reasoning(grown.reasoning)}
            ends = {"logprobs": self.logprobs(grown), "finish_reason": grown.finish}
            choices.append({"index": number, **content, **ends})
        return self.head(WHOLE) | {"choices": choices, **self.totals()}

    def last(self) -> list[Data]:
        if not self.completion.options.usage:
            return []
        return [self.head(CHUNK) | {"choices": [], **self.totals()}]

    def totals(self) -> Data:
        return {"usage": self.usage, **figures(self.answered)}

    def head(self, objects: dict[str, str]) -> Data:
        return {
            "id": self.id,
            "object": objects[self.kind],
            "created": self.created,
            "model": self.info.name,
            "system_fingerprint": f"fp_{self.info.fingerprint}",
        }

    def logprobs(self, grown: Grown | Piece) -> Data | None:
        if not self.with_logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(grown.tokens, grown.names)
        return text_logprobs(grown.tokens, grown.starts, grown.names)

    def content(self, text: str, **delta: Any) -> Data:
        """What a chunk adds: text, and what only answers to messages have."""
        if self.kind == "text":
            return {"text": text}
        return {"delta": ({"content": text} if text else {}) | delta}

    def chunk(
        self,
        number: int,
        content: Data,
        finish: str | None = None,
        logprobs: Data | None = None,
        **more: Any,
    ) -> Data:
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}
        if self.completion.options.usage:
            more["usage"] = None
        return self.head(CHUNK) | {"choices": [choice], **more}
