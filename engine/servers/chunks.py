"""What a server streams, read: server-sent events that hold the chunks of a chat completion.

A server may send one token at a time or several, with their numbers or without, with the text of
each or only of all. What it does not tell stays unknown; nothing is guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.types import Finish

DATA, DONE = "data:", "[DONE]"
BEGIN, END = "<think>\n", "\n</think>\n\n"
"""Around what a server tells apart as thinking."""
FINISHES: dict[str, Finish] = {"length": "length"}
REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer: its text, the numbers of its tokens, each token's own text and the
    logarithm of its probability, as far as they are told; `prompt` are the numbers of the prompt's
    tokens. `problem` is what the server says went wrong."""

    text: str = ""
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt: tuple[int, ...] = ()
    finish: Finish | None = None
    read: int | None = None
    problem: str = ""
    done: bool = False


def chunk_of(line: str) -> Chunk | None:
    """What a line of the stream says; None for one that says nothing. Raises ValueError for one
    that is no chunk."""
    if not line.startswith(DATA):
        return None
    said = line[len(DATA) :].strip()
    if said == DONE:
        return Chunk(done=True)
    try:
        found = json.loads(said)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    if found.get("error") is not None or found.get("object") == "error":
        return Chunk(problem=said)
    return parsed(found)


def parsed(found: Mapping[str, Any]) -> Chunk:
    """A chunk's first choice, and what is told of the whole."""
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    choice = choice if isinstance(choice, dict) else {}
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    usage = found.get("usage")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    texts, logprobs = spelled(choice.get("logprobs"))
    return Chunk(
        words(delta.get("content")),
        next((words(delta[name]) for name in REASONING if delta.get(name)), ""),
        numbers(choice.get("token_ids")),
        texts,
        logprobs,
        numbers(found.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        finish_of(choice),
        read if is_number(read) else None,
    )


def code_of(problem: str) -> int:
    """The status that a problem within a stream stands for: 500 unless it says another one."""
    error = json.loads(problem).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def words(value: object) -> str:
    """A text; "" for what is none."""
    return value if isinstance(value, str) else ""


def is_number(value: object) -> bool:
    """Whether it is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def numbers(value: object) -> tuple[int, ...]:
    """Numbers of tokens; none unless all of them are."""
    return tuple(value) if isinstance(value, list) and all(map(is_number, value)) else ()


def spelled(value: object) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Each token's own text, and the logarithm of its probability."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        return (), ()
    rows = [row for row in content if isinstance(row, dict)]
    logprobs = [row.get("logprob") for row in rows]
    if not all(isinstance(each, int | float) for each in logprobs):
        return (), ()
    return tuple(words(row.get("token")) for row in rows), tuple(map(float, logprobs))  # type: ignore[arg-type]


def finish_of(choice: Mapping[str, Any]) -> Finish | None:
    """Why the answer ended. A stop string is told apart from the end by vLLM alone."""
    reason = choice.get("finish_reason")
    if not isinstance(reason, str):
        return None
    if reason == "stop" and isinstance(choice.get("stop_reason"), str):
        return "stop"
    return FINISHES.get(reason, "eos")


@dataclass(slots=True)
class Thinking:
    """Puts what is told apart as thinking back into the text, as models write it themselves."""

    begun: bool = field(default=False)

    def joined(self, chunk: Chunk) -> str:
        """The text of a chunk, with its thinking in front."""
        text = ""
        if chunk.reasoning:
            text = chunk.reasoning if self.begun else BEGIN + chunk.reasoning
            self.begun = True
        if chunk.text and self.begun:
            text += END
            self.begun = False
        return text + chunk.text


def shared(chunk: Chunk, text: str, count: int) -> Sequence[str]:
    """The text of a chunk among its `count` tokens: each its own where they make up the whole, else
    all of it with the last, which completes it."""
    if len(chunk.texts) == count and "".join(chunk.texts) == text:
        return chunk.texts
    return [*[""] * (count - 1), text]
