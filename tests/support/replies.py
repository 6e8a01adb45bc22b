"""Answers in a conversation: what the engine does for one, without a request."""

from collections.abc import Callable, Iterator, Sequence

from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.costs import CostCurve
from engine.prompt import Chat
from engine.settings import Drafting, Generation
from engine.types import Event, Step


def reply(
    chat: Chat,
    prompt: Sequence[int],
    drafters: Sequence[Drafter],
    generation: Generation,
    drafting: Drafting,
    cancelled: Callable[[], bool] = never,
    costs: CostCurve | None = None,
) -> Iterator[Event]:
    """The events of one answer, whose tokens the chat knows in its next turn."""
    chat.tokens = list(prompt)
    for event in decode(chat.backend, prompt, drafters, generation, drafting, cancelled, costs):
        if isinstance(event, Step):
            chat.tokens += [token.id for token in event.tokens]
        yield event
