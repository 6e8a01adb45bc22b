"""Answers in OpenAI's shapes: whole, and in chunks."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.asked import Wanted
from app.api.figures import Answered, figures, usage
from app.api.running import Over, Piece
from engine.backends.base import BackendInfo
from engine.types import Token

LEAST = -9999.0
"""The logarithm of a probability that is too small for a number."""
WHOLE = {"chat": "chat.completion", "text": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "text": "cmpl-"}
Data = dict[str, Any]


def logarithm(probability: float) -> float:
    """Of a probability."""
    return math.log(probability) if probability > 0 else LEAST


def spelled(name: str, probability: float) -> Data:
    """A token with its probability. Its bytes are not known where it is part of a character."""
    whole = "\ufffd" not in name
    known = list(name.encode("utf-8", "replace")) if whole else None
    return {"token": name, "logprob": logarithm(probability), "bytes": known}


def chat_logprobs(tokens: Sequence[Token], names: dict[int, str]) -> Data:
    """The probabilities of tokens, for chats."""
    content = [
        spelled(names[token.id], token.probability)
        | {"top_logprobs": [spelled(names[other], p) for other, p in token.likeliest]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Token], names: dict[int, str], start: int) -> Data:
    """The same for texts, of which `start` characters were told before."""
    texts = [names[token.id] for token in tokens]
    offsets = [start + sum(map(len, texts[:n])) for n in range(len(texts))]
    beside = [{names[other]: logarithm(p) for other, p in t.likeliest} for t in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logarithm(token.probability) for token in tokens],
        "top_logprobs": beside if any(beside) else None,
        "text_offset": offsets,
    }


def thought(reasoning: str) -> Data:
    """What was thought, in llama-server's and vLLM's words; nothing where nothing was."""
    return {"reasoning_content": reasoning} if reasoning else {}


@dataclass(slots=True)
class Grown:
    """A choice so far."""

    text: str = ""
    reasoning: str = ""
    tokens: list[Token] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    over: Over | None = None

    def add(self, piece: Piece) -> None:
        """What a step added."""
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens += piece.tokens
        self.names |= piece.names


class Reply:
    """The answer to one request, as it is written, by the model of `info`."""

    def __init__(self, wanted: Wanted, info: BackendInfo) -> None:
        self.kind, self.wanted, self.info = wanted.kind, wanted, info
        self.told = wanted.likeliest is not None
        self.id, self.created = PREFIX[self.kind] + secrets.token_hex(12), int(time.time())
        self.choices = [Grown() for _ in wanted.requests]

    def head(self, names: dict[str, str]) -> Data:
        """What every part of it begins with."""
        return {
            "id": self.id,
            "object": names[self.kind],
            "created": self.created,
            "model": self.info.name,
            "system_fingerprint": f"fp_{self.info.fingerprint}",
        }

    @property
    def answered(self) -> list[Answered]:
        """What the choices were worth."""
        return [grown.over.answered for grown in self.choices if grown.over is not None]

    @property
    def usage(self) -> Data:
        """What was read and said."""
        return usage(self.answered, self.wanted.prompts)

    def logprobs(self, grown: Grown, start: int = 0) -> Data:
        """The probabilities of a choice, or of a part of it."""
        if self.kind == "chat":
            return chat_logprobs(grown.tokens, grown.names)
        return text_logprobs(grown.tokens, grown.names, start)

    def whole(self) -> Data:
        """All of it."""
        choices = []
        for number, grown in enumerate(self.choices):
            said: Data = {"text": grown.text}
            if self.kind == "chat":
                message = {"role": "assistant", "content": grown.text, "refusal": None}
                said = {"message": message | thought(grown.reasoning)}
            finish = grown.over.finish if grown.over else None
            logprobs = self.logprobs(grown) if self.told else None
            choices.append({"index": number, **said, "logprobs": logprobs, "finish_reason": finish})
        return self.head(WHOLE) | {"choices": choices, "usage": self.usage} | figures(self.answered)

    def chunk(self, number: int, text: str, finish: str | None = None, **more: Any) -> Data:
        """A part of one choice."""
        said: Data = {"text": text}
        reasoning = more.pop("reasoning", "")
        if self.kind == "chat":
            delta = more.pop("delta", {}) | ({"content": text} if text else {})
            said = {"delta": delta | thought(reasoning)}
        choice = {"index": number, **said, "logprobs": more.pop("logprobs", None)}
        if self.wanted.usage:
            more["usage"] = None
        return self.head(CHUNK) | {"choices": [{**choice, "finish_reason": finish}], **more}

    def began(self, number: int) -> Data | None:
        """The first chunk of a choice, which says whose words follow."""
        if self.kind == "text":
            return None
        return self.chunk(number, "", delta={"role": "assistant", "content": ""})

    def part(self, piece: Piece) -> Data | None:
        """The chunk of a step; None where it has nothing to say."""
        grown = self.choices[piece.choice]
        start = len(grown.text)
        grown.add(piece)
        if not piece.text and not piece.reasoning and not (self.told and piece.tokens):
            return None
        part = Grown(tokens=list(piece.tokens), names=piece.names)
        logprobs = self.logprobs(part, start) if self.told else None
        return self.chunk(piece.choice, piece.text, reasoning=piece.reasoning, logprobs=logprobs)

    def ended(self, over: Over) -> Data:
        """The chunk that ends a choice; the last chunk of all has the figures."""
        self.choices[over.choice].over = over
        last = len(self.answered) == len(self.choices) and not self.wanted.usage
        return self.chunk(over.choice, "", over.finish, **(figures(self.answered) if last else {}))

    def used(self) -> Data:
        """The chunk behind all choices that says what was read and said, with the figures."""
        told = {"choices": [], "usage": self.usage}
        return self.head(CHUNK) | told | figures(self.answered)
