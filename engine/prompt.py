"""Turns messages into a prompt whose beginning is already in the cache, and tokens into text.

The tokens that a model emitted may differ from those that the tokenizer makes of the same text, and
then the cache of the last turn would be useless. The tokens of the last turn are therefore reused
if the new prompt begins with the same text (all of it, or up to an end token), and only the rest is
tokenized. The text of a prompt has LITERAL in the special tokens that messages spell
(engine/backends/special_tokens.py), so a message cannot imitate a turn.

`TextStream` turns the tokens of the answer into text as they arrive. The pieces returned so far,
joined, are a prefix of the final text: nothing is ever taken back, so the interface only appends.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.backends.base import Backend, BackendInfo
from engine.backends.special_tokens import LITERAL
from engine.errors import PromptError
from engine.settings import ThinkingChoice
from engine.text import overlap
from engine.thinking import Splitter, answer_of, opened
from engine.types import Message, Tool

BLOCKS = 4
"""The number of blocks in the room for a prompt; a long conversation is shortened by whole
blocks."""
MOST_COUNTS = 1 << 16
"""The number of pieces of text whose token counts are cached."""
LAST_TOKENS = 16
"""The number of last tokens of a prompt in which a mark that opens the thinking is searched."""


@dataclass(frozen=True, slots=True)
class Size:
    """The use of the context by a prompt: `tokens` of the `room` that the answer leaves.

    The oldest `dropped` messages would be left out. `fits` is False if the last message alone is
    too long.
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
        """The number of tokens of pieces of text, by their hashes."""

    def prompt(
        self,
        messages: Sequence[Message],
        known: Sequence[int] | None = None,
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """The prompt for the next answer; `known` are tokens to reuse (default: last turn's).

        Raises PromptError if there is nothing to answer.
        """
        text = self.text(messages, "", thinking, tools)
        return splice(self.backend, text, self.tokens if known is None else known)

    def text(
        self,
        messages: Sequence[Message],
        begun: str = "",
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The text of the prompt for the next answer, including the text that the answer has
        `begun` with. Raises PromptError as `prompt` does."""
        last = messages[-1] if messages else Message("user", "")
        if last.role != "tool" and not (last.role == "user" and last.content.strip()):
            raise PromptError("The message is empty. Write something first.")
        begun = self.backend.special.literal(begun, answer=True)
        return self.rendered(messages, thinking, tools) + begun

    def rendered(
        self,
        messages: Sequence[Message],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The messages in the model's chat template, earlier answers without thinking that the
        template would refuse."""
        private = tuple(each for each in self.backend.info.marks if each.private)
        shown = [
            replace(each, content=answer_of(each.content, private) or each.content)
            if private and each.role == "assistant"
            else each
            for each in messages
        ]
        return self.backend.render(shown, thinking, tools)

    def check(self, text: str) -> None:
        """Raise PromptError for a message that cannot be answered: empty, or too long even alone.

        A short message is not tokenized for this check.
        """
        messages = [Message("user", text)]
        if 2 * byte_count(self.text(messages)) > self.backend.info.context_length:
            self.fit(messages)

    @property
    def room(self) -> int:
        """The most tokens of a prompt. The rest is reserved for the answer: a quarter of the
        context, at most 256 tokens."""
        context = self.backend.info.context_length
        return context - min(context // 4, 256)

    def measure(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Size:
        """The size of a prompt of these messages and tools. This changes nothing that an answer
        depends on, and tokenizes only text that was not counted before."""
        tokens = self.count(self.rendered(messages, tools=tools)) if messages else 0
        room = self.room
        if tokens <= room:
            return Size(tokens, room)
        try:
            return Size(tokens, room, self.fit(messages, tools=tools)[1])
        except PromptError:
            return Size(tokens, room, len(messages) - 1, fits=False)

    def fit(
        self,
        messages: Sequence[Message],
        begun: str = "",
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> tuple[list[int], int]:
        """The prompt for the next answer, with the text that it has `begun` with, and the number of
        the oldest messages that it leaves out.

        The prompt keeps the system prompt and is within `room`. Whole exchanges are left out, a
        block of them at a time. The ends of blocks depend only on the beginning of the
        conversation, so the following turns are cut at the same place and begin with cached tokens.
        Raises PromptError when the last message alone is too long.
        """
        context, room = self.backend.info.context_length, self.room
        block = max(1, room // BLOCKS)
        head = [m for m in messages[:1] if m.role == "system"]
        rest = messages[len(head) :]
        turns = [at for at, m in enumerate(rest) if not at or m.role == "user"] or [0]
        dropped, sizes = 0, list[int]()
        while True:
            text = self.text([*head, *rest[dropped:]], begun, thinking, tools)
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

    def continue_answer(
        self,
        messages: Sequence[Message],
        answered: Sequence[int],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> tuple[list[int], int]:
        """The prompt before an answer with these tokens, and the number of the oldest messages that
        it leaves out."""
        _, dropped = self.fit(messages, self.backend.detokenize(answered), thinking, tools)
        head = [m for m in messages[:1] if m.role == "system"]
        kept = [*head, *messages[len(head) + dropped :]]
        return self.prompt(kept, None, thinking, tools), dropped

    def sizes(self, messages: Sequence[Message], whole: int) -> list[int]:
        """The approximate number of tokens that each message adds to a prompt of so many: its own,
        and an equal share of what the template adds."""
        own = [self.content(message.content) for message in messages]
        frame = max(0, round((whole - sum(own)) / len(own)))
        return [size + frame for size in own]

    def cheap(self, text: str, room: int) -> bool:
        """Whether only a little of a text has to be tokenized, because the text is short or
        continues the last turn. A token has at least one byte."""
        if byte_count(text) <= room:
            return True
        read = text.replace(LITERAL, "")
        return bool(self.tokens) and read.startswith(self.backend.detokenize(self.tokens))

    def count(self, text: str) -> int:
        """The number of tokens of a prompt. Tokenization starts afresh after a token that ends a
        turn, so the text between two of them is counted once."""
        ends = map(self.backend.detokenize, ([token] for token in self.backend.info.eos_ids))
        pattern = "|".join(re.escape(end) for end in ends if end)
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        return sum(map(self.counted, pieces))

    def content(self, text: str) -> int:
        """The number of tokens of a text in a message."""
        return self.counted(self.backend.special.literal(text))

    def counted(self, text: str) -> int:
        key = hash(text)
        if key not in self.counts:
            if len(self.counts) >= MOST_COUNTS:
                self.counts.clear()
            self.counts[key] = len(self.backend.tokenize(text))
        return self.counts[key]


def no_room(info: BackendInfo, length: int) -> PromptError:
    """The error for an answer that, with its prompt, is too long to be continued."""
    return PromptError(
        f"The answer cannot be continued: with its prompt it has {length:,} tokens, and "
        f"{info.name} reads at most {info.context_length:,}. Start a new conversation, or load "
        "the model with a longer context."
    )


def splice(backend: Backend, text: str, known: Sequence[int]) -> list[int]:
    """Tokens of `text` that begin with as much of `known` as is safe.

    It is safe to reuse all of it, or the part up to an end token, after which tokenization starts
    afresh, if the result decodes to exactly `text` and has its special tokens.
    """
    read = text.replace(LITERAL, "")

    def departs(end: int) -> bool:
        return not read.startswith(backend.detokenize(known[:end]))

    shared = len(known)
    if departs(shared):
        ends = [i + 1 for i, token in enumerate(known) if token in backend.info.eos_ids]
        shared = max(ends[: bisect_left(ends, True, key=departs)], default=0)
    if shared:
        head = backend.detokenize(known[:shared])
        spliced = [*known[:shared], *backend.tokenize(behind(text, len(head)))]
        if backend.detokenize(spliced) == read and backend.special.agree(text, spliced):
            return spliced
    return backend.tokenize(text)


def behind(text: str, length: int) -> str:
    """What follows the first `length` characters of a text, in which LITERAL is not counted."""
    at = length
    while (marks := text.count(LITERAL, 0, at)) != at - length:
        at = length + marks
    return text[at:]


def byte_count(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def ends_in_thinking(backend: Backend, prompt: Sequence[int], begun: str = "") -> bool:
    """Whether an answer to this prompt begins inside thinking that the template has opened. The
    prompt may end with the text that the answer has `begun` with."""
    last = backend.detokenize(prompt if begun else prompt[-LAST_TOKENS:])
    return opened(last.removesuffix(begun), backend.info.marks)


CUT = "�"
WINDOW = 8
LONGEST_CUT = 3
"""A cut UTF-8 sequence has at most three bytes, so three tokens, so three replacement marks."""


class TextStream:
    """Turns tokens into pieces of text, and notices the first stop string.

    `tokens` is the window: `start` splits it where a token's text began, the first `shown`
    characters of its text are handed out or held, and `waiting` tokens ended in a cut sequence.
    """

    def __init__(
        self,
        detokenize: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        splitter: Splitter | None = None,
    ) -> None:
        """Stop strings count wherever they stand, or with a `splitter` in the answer alone."""
        self.detokenize, self.splitter = detokenize, splitter
        self.stop = [string for string in stop if string]
        self.returned = 0
        """The number of characters that were returned."""
        self.tokens: list[int] = []
        self.start = 0
        self.shown = 0
        self.waiting = 0
        self.held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that `token` completes, and whether a stop string ended the answer there.

        Only a window of tokens is decoded again, enough for tokens whose text depends on their
        left neighbour (a leading space, the rest of a UTF-8 sequence). The window never begins
        inside a sequence. A cut sequence has at most three tokens, so after these the text is no
        longer held back.
        """
        self.tokens.append(token)
        text = self.detokenize(self.tokens)
        whole = len(text.rstrip(CUT))
        self.waiting = self.waiting + 1 if whole < len(text) else 0
        if self.waiting > LONGEST_CUT:
            whole = max(whole, len(text) - LONGEST_CUT)
        whole = max(whole, self.shown)
        self.hold(text[self.shown : whole])
        self.shown = whole
        if len(self.tokens) >= self.start + WINDOW and not 0 < self.waiting <= LONGEST_CUT:
            pending = len(text) - whole
            del self.tokens[: self.start]
            self.start = len(self.tokens)
            self.shown = len(self.detokenize(self.tokens)) - pending
        return self.release()

    @property
    def length(self) -> int:
        """The number of whole characters so far, returned or held."""
        return self.returned + len(self.held)

    def hold(self, text: str) -> None:
        self.held += text
        if self.splitter is not None:
            self.splitter.push(text)

    def release(self, over: bool = False) -> tuple[str, bool]:
        """Return the held text up to a stop string, or up to a possible beginning of one."""
        start = self.answer_start(over)
        if start is None:
            return "", False
        ends = [at for string in self.stop if (at := self.held.find(string, start)) >= 0]
        if ends:
            piece, self.held = self.held[: min(ends)], ""
            return piece, True
        keep = max((overlap(self.held[start:], string) for string in self.stop), default=0)
        cut = len(self.held) - keep
        piece, self.held = self.held[:cut], self.held[cut:]
        self.returned += len(piece)
        return piece, False

    def answer_start(self, over: bool) -> int | None:
        """Where the answer begins in the held text, None if that cannot be known yet."""
        splitter = self.splitter
        if splitter is None or splitter.thought is None:
            decided = splitter is None or over or splitter.state == "answers"
            return 0 if decided else None
        answer = splitter.thought.answer
        return len(self.held) if answer is None else max(0, answer - self.returned)

    def flush(self) -> str:
        """The text that is still held when the answer ends for another reason."""
        text = self.detokenize(self.tokens) if self.tokens else ""
        self.hold(text[self.shown :])
        self.shown = len(text)
        piece, stopped = self.release(over=True)
        if not stopped:
            piece, self.held = piece + self.held, ""
        return piece


def resumed(
    detokenize: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    tokens: Sequence[int],
    splitter: Callable[[], Splitter | None] = lambda: None,
) -> tuple[TextStream, str]:
    """The stream of an interrupted answer with these tokens, and the text that it has returned so
    far.

    A stop string in these tokens did not end the answer; only later ones count.
    """
    stream, pieces = TextStream(detokenize, stop, splitter()), list[str]()
    for token in tokens:
        piece, stopped = stream.push(token)
        pieces.append(piece)
        if stopped:
            stream, text = resumed(detokenize, (), tokens, splitter)
            stream.stop = [string for string in stop if string]
            return stream, text
    return stream, "".join(pieces)


def continued(
    detokenize: Callable[[Sequence[int]], str],
    stop: Sequence[str],
    tokens: Sequence[int],
    splitter: Splitter | None = None,
    begun: str = "",
) -> TextStream:
    """The stream of an answer that continues after tokens whose text, which ends with `begun`, was
    already returned."""
    stream = TextStream(detokenize, stop, splitter)
    if splitter is not None:
        splitter.push(begun)
    stream.returned = len(begun)
    stream.tokens = list(tokens[-WINDOW:])
    stream.shown = len(detokenize(stream.tokens))
    return stream
