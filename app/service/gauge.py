"""How full the context is: what was said, and what is about to be said.

The engine is asked only while nothing else is done, as counting takes time that an answer could
use. A page keeps the last figures meanwhile.
"""

from collections.abc import Sequence
from contextlib import suppress

from app.service.chat import Chat
from app.service.tasks import Tasks
from engine.engine import Engine
from engine.errors import StrataError
from engine.prompt import Size
from engine.types import Message

CHARACTERS = 4
"""Of a token, where nobody can be asked: about right for English."""
NEXT = "?"
"""Stands for a message that is not written yet."""


class Gauge:
    """See the module's docstring."""

    def __init__(self, engine: Engine, chat: Chat, tasks: Tasks) -> None:
        self.engine, self.chat, self.tasks = engine, chat, tasks

    @property
    def free(self) -> bool:
        """Whether counting slows nobody."""
        return self.engine.state.there and self.tasks.idle

    def size(
        self, owner: str, conversation: str | None, system: str, text: str, editing: str | None
    ) -> Size | None:
        """What the next prompt takes with this text at its end, or in the place of the message that
        is edited. None while it is not the time to ask."""
        if not self.free or not self.engine.state.info.context_length:
            return None
        with suppress(StrataError):
            messages = self.messages(owner, conversation, system, editing)
            if not messages and not text.strip():
                return self.engine.measure(())
            return self.engine.measure((*messages, Message("user", text.strip() or NEXT)))
        return None

    def messages(
        self, owner: str, conversation: str | None, system: str, editing: str | None
    ) -> Sequence[Message]:
        """What the model reads before the text."""
        if conversation is None:
            return [Message("system", system)] if system.strip() else []
        store = self.chat.conversations(owner)
        said = store.messages(conversation, pieces=False, to=editing)
        before = said[:-1] if editing else said
        if before:
            return self.chat.prompt(owner, conversation, before[-1].id)
        return self.messages(owner, None, store.get(conversation).system_prompt, None)

    def counts(self, texts: Sequence[str]) -> list[tuple[int, bool]]:
        """How many tokens each text has, and whether that was counted, not estimated."""
        if self.free and self.engine.state.info.server is None:
            with suppress(StrataError):
                return [(count, True) for count in self.engine.counts(texts)]
        return [(-(-len(text) // CHARACTERS), False) for text in texts]
