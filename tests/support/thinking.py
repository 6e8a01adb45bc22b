"""A toy whose chat template can switch thinking."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.types import Message, Tool
from tests.support.toy import ToyBackend

SHUT = "<think></think>"


class Thinking(ToyBackend):
    """Its template shuts the thoughts of an answer that is to come without any, as Qwen's does."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.info = replace(self.info, can_think=True)

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Sequence[Tool] = ()
    ) -> str:
        return super().render(messages, thinking) + ("" if thinking is not False else SHUT)
