"""The tokenizer of a transformers model: text to tokens, back, and conversations to text."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.backends.base import TokenizerInfo, fingerprint
from engine.backends.chat_template import FILLER, Fill, Turn, conversation
from engine.backends.special_tokens import following, special_tokens
from engine.errors import ModelError, first_line
from engine.settings import ThinkingChoice
from engine.text import well_formed
from engine.types import Message, Tool

LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""The byte that each letter of a byte-level vocabulary stands for."""


class TransformersTokenizer:
    info: Any

    def __init__(self, tokenizer: Any, info: TokenizerInfo) -> None:
        self.tokenizer, self.info = tokenizer, info
        added = tokenizer.added_tokens_decoder.items()
        self.special = special_tokens(
            ((token.content, id, token.special) for id, token in added),
            str(tokenizer.chat_template or ""),
            info.eos_ids,
        )

    def tokenize(self, text: str) -> list[int]:
        return self.special.tokenize(text, self.encode, self.plain)

    def encode(self, text: str, **options: bool) -> list[int]:
        # A chat template may write anything, also halves of characters.
        text = well_formed(text)
        return list(self.tokenizer.encode(text, add_special_tokens=False, **options))

    def plain(self, text: str) -> list[int]:
        """The tokens of a text that follows a special token, and holds none."""
        encode = partial(self.encode, split_special_tokens=True)
        return following(encode, text) if self.spaced else encode(text)

    @cached_property
    def spaced(self) -> bool:
        """Whether a word has other tokens at the beginning of a text than after a special token."""
        token = next(iter(self.special.ids), "")
        return self.encode(f"{token}a")[len(self.encode(token)) :] != self.encode("a")

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def piece(self, token: int) -> bytes:
        """A token of a byte or of letters that stand for bytes is read as such. Of any other one
        the text counts, as it is after another token: some tokenizers leave out a first space."""
        written = self.tokenizer.convert_ids_to_tokens(token)
        if written is None:
            return b""
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", written):
            return bytes.fromhex(byte[1])
        if self.byte_level and token not in self.tokenizer.added_tokens_decoder:
            return bytes(LETTERS[letter] for letter in written if letter in LETTERS)
        before = self.detokenize(self.anchor)
        text = self.detokenize([*self.anchor, token]).removeprefix(before)
        return text.encode("utf-8", "replace")

    @cached_property
    def byte_level(self) -> bool:
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        return fast is not None and "ByteLevel" in str(fast.decoder)

    @cached_property
    def anchor(self) -> list[int]:
        return self.tokenize("a")[-1:]

    def vocabulary(self) -> list[str]:
        return vocabulary_of(self.tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        begin = self.tokenizer.bos_token or ""
        how = self.info, self.special, thinking, tools
        return conversation(messages, filler(self.tokenizer), begin, *how)


def filler(tokenizer: Any) -> Fill | None:
    """The function that fills a tokenizer's chat template; None without a template."""

    def fill(turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
        template, tokens = tokenizer.get_chat_template(), tokenizer.special_tokens_map
        return FILLER.fill("transformers", template, tokens, turns, variables)

    return fill if tokenizer.chat_template else None


def vocabulary_of(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]


def tokenizer_type(tokenizer: Any) -> str:
    """How a tokenizer splits text: the type of its model, else the name of its class."""
    if getattr(tokenizer, "is_fast", False):
        return type(tokenizer.backend_tokenizer.model).__name__
    return type(tokenizer).__name__


def tokenizer_fingerprint(source: str) -> str:
    """Names the vocabulary of a folder or hub id, in any version of the library: that of another
    engine's environment may be older than the one that loads models here. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        # The library raises anything for a file that it cannot read.
        raise ModelError(
            f"The tokenizer of {source!r} cannot be read ({first_line(error)}). Give a folder with "
            "a transformers model, or a Hugging Face id."
        ) from error
    return fingerprint(tokenizer_type(tokenizer), vocabulary_of(tokenizer))
