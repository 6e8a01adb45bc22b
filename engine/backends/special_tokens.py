"""Special tokens that a message spells out, and how they are told from those of the template.

A chat template separates turns with special tokens. A message may contain the same characters: a
question about a template, a page that was pasted, or an attempt to imitate a turn. In a rendered
text, LITERAL therefore stands after the first character of every special token that came with a
message. The tokenizers read such a token as ordinary text, and without LITERAL.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from engine.errors import PromptError
from engine.thinking import MARKS
from engine.types import Message

LITERAL = "\udead"
"""Half of a surrogate pair, which no message contains (engine/text.py)."""
THOUGHT = {mark for each in MARKS for mark in (each.begin, *each.ends)} | {
    "<|channel>",
    "<|channel|>",
}
"""Special tokens around the thinking in an answer. Templates look for them there."""
Encode = Callable[[str], list[int]]


class SpecialTokens:
    """The special tokens of a vocabulary: `ids` by the text of each."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: id for text, id in ids.items() if len(text) > 1}
        self.known = frozenset(self.ids.values())
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def literal(self, text: str, answer: bool = False) -> str:
        """A text from a message, with LITERAL in the special tokens that it spells. Those around
        the thinking of an `answer` stay as they are."""

        def mark(found: re.Match[str]) -> str:
            token = found[0]
            return token if answer and token in THOUGHT else token[0] + LITERAL + token[1:]

        # What is left of a token may be another one.
        while (marked := self.pattern.sub(mark, text)) != text:
            text = marked
        return text

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        return [
            replace(each, content=self.literal(each.content, each.role == "assistant"))
            for each in messages
        ]

    def turns(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            self.within(turn)
            | {"content": self.literal(turn["content"], turn["role"] == "assistant")}
            for turn in turns
        ]

    def within(self, value: Any) -> Any:
        """A value of JSON, with LITERAL in the special tokens that its texts spell."""
        if isinstance(value, str):
            return self.literal(value)
        if isinstance(value, dict):
            return {self.literal(key): self.within(item) for key, item in value.items()}
        return [self.within(item) for item in value] if isinstance(value, list) else value

    def agree(self, text: str, tokens: Sequence[int]) -> bool:
        """Whether tokens contain the special tokens of a rendered text, and no others."""
        written = [self.ids[found] for found in self.pattern.findall(text)]
        return written == [token for token in tokens if token in self.known]

    def tokenize(self, text: str, encode: Encode, plain: Encode) -> list[int]:
        """The tokens of a rendered text. `encode` reads special tokens as such, and `plain` as
        text. The text between two special tokens is read as a whole."""
        if LITERAL not in text:
            return encode(text)
        pieces = re.split(f"({self.pattern.pattern})", text)
        tokens = list[int]()
        for literal, group in groupby(pieces, lambda piece: LITERAL in piece):
            whole = "".join(group)
            tokens += self.ordinary(whole, plain) if literal else encode(whole)
        return tokens

    def ordinary(self, text: str, plain: Encode) -> list[int]:
        """The tokens of a text without special tokens. Where `plain` finds some all the same, the
        text is cut within them."""
        tokens = plain(text.replace(LITERAL, ""))
        if self.known.isdisjoint(tokens):
            return tokens
        first, *parts = text.split(LITERAL)
        return [*plain(first), *(token for part in parts for token in following(plain, part))]


def following(plain: Encode, text: str) -> list[int]:
    """The tokens of a text that continues another one. Some tokenizers put a space before the first
    word of a text; this one is read after a line break, which is then removed."""
    before, tokens = plain("\n"), plain("\n" + text)
    return tokens[len(before) :] if tokens[: len(before)] == before else plain(text)


def special_tokens(
    tokens: Iterable[tuple[str, int, bool]], template: str | None, ends: Iterable[int]
) -> SpecialTokens:
    """The special tokens among `tokens`, each with its text, its id and whether the vocabulary
    calls it special. Others are special if they end a turn, or if the chat template writes them."""
    ended = frozenset(ends)
    return SpecialTokens(
        {
            text: id
            for text, id, special in tokens
            if special
            or id in ended
            or (text in (template or "") and not text.isspace() and not text.isalnum())
        }
    )


def imitable(render: Callable[[Sequence[Message]], str], special: SpecialTokens) -> bool:
    """Whether a message can imitate a turn, whatever the tokenizer does: because the text between
    turns holds no special token, or because the chat template removes LITERAL."""
    turns = [Message(*turn) for turn in (("user", "one"), ("assistant", "two"), ("user", "three"))]
    spelled = Message("user", special.literal(f"one {next(iter(special.ids), '')}"))
    try:
        text, other = render(turns), render([spelled, *turns[1:]])
    except PromptError:
        return False
    places = [text.find(turn.content) for turn in turns]
    between = [text[start:end] for start, end in pairwise(places) if 0 <= start < end]
    if not all(map(special.pattern.search, between)):
        return True
    return len(special.pattern.findall(other)) > len(special.pattern.findall(text))
