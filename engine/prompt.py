"""From messages to a prompt that the cache knows already, and on to the answer.

A prompt is the chat template's text, tokenized. But what a model emitted need not be what the
tokenizer would make of its text, and then the cache of the last turn would be worthless. So the
tokens of the last turn are taken over as far as the new prompt shares their text (whole, or up to
an end token), and only the rest is tokenized: the second turn costs no more than its new words.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.backends.base import Backend, BackendInfo
from engine.errors import PromptError
from engine.types import Message

BLOCKS = 4
"""What is left out of a long conversation at a time is this part of the room, or a little more."""
MOST_COUNTS = 1 << 16
"""Pieces of text whose tokens are counted once."""
THINKING, THINKING_TOKENS = "<think>", 16
"""What begins the thinking of a model, and in how many of a prompt's last tokens it is sought."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a context a prompt takes: `tokens` of the `room` that the answer leaves.

    `dropped` of the oldest messages would not be read. Where the last one alone is too long,
    nothing `fits`.
    """

    tokens: int
    room: int
    dropped: int = 0
    fits: bool = True


class Chat:
    """One loaded model in conversation. `tokens` is the last turn, prompt and answer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tokens: list[int] = []
        self.counts: dict[int, int] = {}
        """How many tokens a piece of text has, by its hash."""

    def prompt(
        self,
        messages: Sequence[Message],
        known: Sequence[int] | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """The prompt for the next answer; `known` are tokens to take over (default: last turn's).

        Raises PromptError when there is nothing to answer.
        """
        text = self.text(messages, thinking=thinking)
        return splice(self.backend, text, self.tokens if known is None else known)

    def text(
        self, messages: Sequence[Message], begun: str = "", thinking: bool | None = None
    ) -> str:
        """The text of the prompt for the next answer, and of what it has `begun` with. Raises
        PromptError as `prompt` does."""
        if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
            raise PromptError("The message is empty. Write something first.")
        return self.backend.render(messages, thinking) + begun

    def check(self, text: str) -> None:
        """Raise PromptError for a message that cannot be answered: empty, or too long even alone.

        A short one is not tokenized to know that.
        """
        messages = [Message("user", text)]
        if 2 * byte_count(self.text(messages)) > self.backend.info.context_length:
            self.fit(messages)

    @property
    def room(self) -> int:
        """Tokens that a prompt may have: a quarter of the context, at most 256 tokens, is the
        answer's."""
        context = self.backend.info.context_length
        return context - min(context // 4, 256)

    def measure(self, messages: Sequence[Message]) -> Size:
        """What a prompt of these messages takes. It changes nothing that an answer goes on from,
        and tokenizes only what was not counted before."""
        tokens, room = (self.count(self.backend.render(messages)) if messages else 0), self.room
        if tokens <= room:
            return Size(tokens, room)
        try:
            return Size(tokens, room, self.fit(messages)[1])
        except PromptError:
            return Size(tokens, room, len(messages) - 1, fits=False)

    def fit(
        self, messages: Sequence[Message], begun: str = "", thinking: bool | None = None
    ) -> tuple[list[int], int]:
        """The prompt for the next answer, with what that has `begun` with, and how many of the
        oldest messages it leaves out.

        It keeps a system prompt, and `room`. What is left out are whole exchanges, a block of them
        at a time. Where blocks end follows from the beginning of the conversation, so the turns
        that follow are cut at the same place and begin with tokens that the cache holds. Raises
        PromptError when the last message alone is too long.
        """
        context, room = self.backend.info.context_length, self.room
        block = max(1, room // BLOCKS)
        head = [m for m in messages[:1] if m.role == "system"]
        rest = messages[len(head) :]
        turns = [at for at, m in enumerate(rest) if not at or m.role == "user"] or [0]
        dropped, sizes = 0, list[int]()
        while True:
            text = self.text([*head, *rest[dropped:]], begun, thinking)
            last = dropped == turns[-1]
            size = room if last or self.cheap(text, room) else self.count(text)
            if size <= room:
                prompt = splice(self.backend, text, self.tokens)
                size = len(prompt)
                if size <= room or last and size < context:
                    return prompt, dropped
            if last and begun:
                raise no_room(self.backend.info, size)
            if last:
                raise PromptError(
                    f"The message has {size:,} tokens, and {self.backend.info.name} reads at "
                    f"most {context:,} with the answer. Shorten it."
                )
            sizes = sizes or self.sizes(rest, self.count(text))
            before = [0, *accumulate(sizes)]
            blocks = -(-(before[dropped] + size - room) // block)
            later = (at for at in turns if at > dropped and before[at] >= blocks * block)
            dropped = next(later, turns[-1])

    def go_on(
        self, messages: Sequence[Message], said: Sequence[int], thinking: bool | None = None
    ) -> tuple[list[int], int]:
        """The prompt in front of an answer of which these tokens were said, and how many of the
        oldest messages it leaves out."""
        _, dropped = self.fit(messages, self.backend.detokenize(said), thinking)
        head = [m for m in messages[:1] if m.role == "system"]
        kept = [*head, *messages[len(head) + dropped :]]
        return self.prompt(kept, thinking=thinking), dropped

    def sizes(self, messages: Sequence[Message], whole: int) -> list[int]:
        """About how many tokens each message adds to a prompt of so many: those of its own, and an
        equal share of what the template adds."""
        own = [self.counted(message.content) for message in messages]
        frame = max(0, round((whole - sum(own)) / len(own)))
        return [size + frame for size in own]

    def cheap(self, text: str, room: int) -> bool:
        """Whether little of a text has to be tokenized, as it is short, or goes on from the last
        turn. A token takes a byte at least."""
        if byte_count(text) <= room:
            return True
        return bool(self.tokens) and text.startswith(self.backend.detokenize(self.tokens))

    def count(self, text: str) -> int:
        """How many tokens a prompt has. Tokenization starts afresh after a token that ends a turn,
        so what stands between two of them is counted once."""
        ends = map(self.backend.detokenize, ([token] for token in self.backend.info.eos_ids))
        pattern = "|".join(re.escape(end) for end in ends if end)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        return sum(map(self.counted, pieces))

    def counted(self, text: str) -> int:
        """How many tokens a piece of text has."""
        key = hash(text)
        if key not in self.counts:
            if len(self.counts) >= MOST_COUNTS:
                self.counts.clear()
            self.counts[key] = len(self.backend.tokenize(text))
        return self.counts[key]


def no_room(info: BackendInfo, length: int) -> PromptError:
    """An answer that has so many tokens with its prompt cannot go on."""
    return PromptError(
        f"The answer cannot go on: with its prompt it has {length:,} tokens, and {info.name} reads "
        f"at most {info.context_length:,}. Start a new conversation, or load the model with a "
        "longer context."
    )


def splice(backend: Backend, text: str, known: Sequence[int]) -> list[int]:
    """Tokens of `text` that begin with as much of `known` as is safe.

    Safe means: all of it, or up to an end token, after which tokenization starts afresh, and only
    when the result reads exactly as `text`.
    """

    def departs(end: int) -> bool:
        return not text.startswith(backend.detokenize(known[:end]))

    shared = len(known)
    if departs(shared):
        ends = [i + 1 for i, token in enumerate(known) if token in backend.info.eos_ids]
        shared = max(ends[: bisect_left(ends, True, key=departs)], default=0)
    if shared:
        head = backend.detokenize(known[:shared])
        spliced = [*known[:shared], *backend.tokenize(text[len(head) :])]
        if backend.detokenize(spliced) == text:
            return spliced
    return backend.tokenize(text)


def byte_count(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "replace"))


def ends_in_thinking(backend: Backend, prompt: Sequence[int]) -> bool:
    """Whether an answer behind this prompt begins within thinking that the template has begun."""
    return backend.detokenize(prompt[-THINKING_TOKENS:]).rstrip().endswith(THINKING)
