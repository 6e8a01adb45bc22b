"""The tokenizer of a transformers model: text to tokens, back, and conversations to text."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.base import TokenizerInfo, conversation
from engine.backends.chat_template import FILLER, Fill
from engine.types import Message


class TransformersTokenizer:
    """The library's tokenizer behind the Tokenizer protocol."""

    info: Any

    def __init__(self, tokenizer: Any, info: TokenizerInfo) -> None:
        self.tokenizer, self.info = tokenizer, info

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def detokenize(self, tokens: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def vocabulary(self) -> list[str]:
        return vocabulary_of(self.tokenizer)

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The conversation in the model's chat template (run in transformers' sandbox)."""
        begin = self.tokenizer.bos_token or ""
        return conversation(messages, filler(self.tokenizer), begin, self.info.name, thinking)


def filler(tokenizer: Any) -> Fill | None:
    """What fills a tokenizer's chat template; None where it has none."""

    def fill(turns: Sequence[Mapping[str, str]], variables: Mapping[str, bool]) -> str:
        template, tokens = tokenizer.get_chat_template(), tokenizer.special_tokens_map
        return FILLER.fill("transformers", template, tokens, turns, variables)

    return fill if tokenizer.chat_template else None


def vocabulary_of(tokenizer: Any) -> list[str]:
    """Every token as the tokenizer writes it, by id."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
