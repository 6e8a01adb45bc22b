"""Answers in OpenAI's formats, whole or in chunks."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.figures import Answered, figures, usage
from app.api.requests import Completion
from app.api.running import Begun, News, Over, Piece
from engine.backends.base import BackendInfo
from engine.types import Token

LEAST = -9999.0
"""The reported logarithm of a probability of 0."""
WHOLE = {"chat": "chat.completion", "text": "text_completion"}
CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
PREFIX = {"chat": "chatcmpl-", "text": "cmpl-"}
Data = dict[str, Any]


def logarithm(probability: float) -> float:
    return math.log(probability) if probability > 0 else LEAST


def token_logprob(name: str, probability: float) -> Data:
    """A token with its logarithm; its bytes are unknown if it is part of a character."""
    known = list(name.encode("utf-8", "replace")) if "\ufffd" not in name else None
    return {"token": name, "logprob": logarithm(probability), "bytes": known}


def chat_logprobs(tokens: Sequence[Token], names: dict[int, str]) -> Data:
    content = [
        token_logprob(names[token.id], token.probability)
        | {"top_logprobs": [token_logprob(names[other], p) for other, p in token.likeliest]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Token], names: dict[int, str], start: int) -> Data:
    """`start` is the number of characters that were sent before."""
    texts = [names[token.id] for token in tokens]
    top = [{names[other]: logarithm(p) for other, p in token.likeliest} for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [logarithm(token.probability) for token in tokens],
        "top_logprobs": top if any(top) else None,
        "text_offset": [start + sum(map(len, texts[:n])) for n in range(len(texts))],
    }


def with_reasoning(reasoning: str) -> Data:
    """Thinking, under the name that llama-server and vLLM use; empty if there is none."""
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
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens += piece.tokens
        self.names |= piece.names


class Reply:
    """The growing answer to one request, by the model of `info`."""

    def __init__(self, completion: Completion, info: BackendInfo) -> None:
        self.kind, self.completion, self.info = completion.kind, completion, info
        self.with_logprobs = completion.likeliest is not None
        self.id, self.created = PREFIX[self.kind] + secrets.token_hex(12), int(time.time())
        self.choices = [Grown() for _ in completion.requests]

    def take(self, news: News) -> Data | None:
        """Add one piece of news; returns its chunk for a stream, or None if there is nothing to
        send."""
        if isinstance(news, Begun):
            self.info = news.info
            role = {"role": "assistant", "content": ""}
            return None if self.kind == "text" else self.chunk(news.choice, "", delta=role)
        grown = self.choices[news.choice]
        if isinstance(news, Over):
            grown.over = news
            last = len(self.answered) == len(self.choices) and not self.completion.usage
            more = figures(self.answered) if last else {}
            return self.chunk(news.choice, "", news.finish, **more)
        start = len(grown.text)
        grown.add(news)
        if not news.text and not news.reasoning and not (self.with_logprobs and news.tokens):
            return None
        part = Grown(tokens=list(news.tokens), names=news.names)
        logprobs = self.logprobs(part, start)
        return self.chunk(news.choice, news.text, reasoning=news.reasoning, logprobs=logprobs)

    @property
    def answered(self) -> list[Answered]:
        """The choices that are over."""
        return [grown.over.answered for grown in self.choices if grown.over is not None]

    def whole(self) -> Data:
        """The answer of a request that is not streamed."""
        choices = []
        for number, grown in enumerate(self.choices):
            content: Data = {"text": grown.text}
            if self.kind == "chat":
                message = {"role": "assistant", "content": grown.text, "refusal": None}
                content = {"message": message | with_reasoning(grown.reasoning)}
            finish = grown.over.finish if grown.over else None
            ends = {"logprobs": self.logprobs(grown), "finish_reason": finish}
            choices.append({"index": number, **content, **ends})
        return self.head(WHOLE) | {"choices": choices, **self.totals()}

    def last(self) -> Data:
        """The chunk after all choices, with the figures."""
        return self.head(CHUNK) | {"choices": [], **self.totals()}

    def totals(self) -> Data:
        prompts = self.completion.prompts
        return {"usage": usage(self.answered, prompts), **figures(self.answered)}

    def head(self, objects: dict[str, str]) -> Data:
        """The first fields of the answer and of each chunk."""
        return {
            "id": self.id,
            "object": objects[self.kind],
            "created": self.created,
            "model": self.info.name,
            "system_fingerprint": f"fp_{self.info.fingerprint}",
        }

    def logprobs(self, grown: Grown, start: int = 0) -> Data | None:
        """The probabilities of a choice or of a part of it, if they are requested."""
        if not self.with_logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(grown.tokens, grown.names)
        return text_logprobs(grown.tokens, grown.names, start)

    def chunk(
        self,
        number: int,
        text: str,
        finish: str | None = None,
        delta: Data | None = None,
        reasoning: str = "",
        logprobs: Data | None = None,
        **more: Any,
    ) -> Data:
        """A part of one choice."""
        content: Data = {"text": text}
        if self.kind == "chat":
            shown = {"content": text} if text else {}
            content = {"delta": (delta or {}) | shown | with_reasoning(reasoning)}
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": finish}
        if self.completion.usage:
            more["usage"] = None
        return self.head(CHUNK) | {"choices": [choice], **more}
