"""How events are wired: whose they are, which queue they wait in, how errors are told.

No event waits for another: who uses the model waits in a queue of our own (app/service/tasks.py),
which knows whose turn it is and can be left. No event is an API endpoint for other programs.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from html import escape
from inspect import Parameter, Signature, isasyncgenfunction, isgeneratorfunction, signature
from typing import Any, NamedTuple, get_type_hints

import gradio as gr
from gradio.blocks import Block

from app.service.session import Session
from engine.errors import StrataError

Updates = dict[Block, object]
"""What an event changes: of each component its new value, or what `gr.update` says of it."""
Memory = dict[str, str | None] | None
"""What the browser remembers: who it is, and which conversation is open. None before it does."""


class Event(NamedTuple):
    """A handler and the components that it reads and changes, for more than one trigger."""

    handler: Callable[..., object]
    inputs: Block | Sequence[Block] | None
    outputs: Block | Sequence[Block] | None


class Listing(NamedTuple):
    """How others have the list of conversations drawn: by `refresh` after their own event, or by
    the same event, `with_list(handler, inputs, outputs)`, which costs half as much. `asked` is what
    the page was asked to show."""

    refresh: Event
    with_list: Callable[..., Event]
    asked: gr.State


# Gradio's own arguments, of many types.
QUIET: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "show_progress_on": (),
}
"""An event that shows no spinner, and on no component: the page keeps account of those that have
one (app/web/gradio_status.py)."""
AT_ONCE: dict[str, Any] = {**QUIET, "concurrency_limit": None}
"""An event that waits for no other. (Without any queue it could not show notices.)"""
AFTER: dict[str, Any] = {**AT_ONCE, "trigger_mode": "multiple"}
"""What follows an event, each time. Gradio would leave it out while the one before is at work."""
LATEST: dict[str, Any] = {**AT_ONCE, "trigger_mode": "always_last"}
"""What follows a choice: one that is made while the one before is at work is followed after it."""


def owner_of(session: Session, memory: Memory, request: gr.Request) -> str:
    """The owner behind an event. `memory` is what the browser remembers."""
    return session.owner(request.username, (memory or {}).get("browser"))


def sent(data: gr.EventData) -> dict[str, Any]:
    """What a page sent along with an event: whatever it likes, so that each part is checked."""
    return data._data if isinstance(data._data, dict) else {}


def warn(message: str) -> None:
    """A notice in the corner; whatever it quotes is inert."""
    gr.Warning(escape(message))


@contextmanager
def told() -> Iterator[None]:
    """Turn an error of ours into a notice; the block's remaining work is skipped."""
    try:
        yield
    except StrataError as error:
        warn(str(error))


Keep = Callable[[Updates], Updates]
"""Of what an event found, what it is to change."""


class Deeds:
    """How often the user of a page has done something in a tab: the value of a gr.State.

    To look how things are may take a second. What the user does meanwhile counts, and not what was
    found before it.
    """

    def __init__(self) -> None:
        self.count = 0


def leading(made: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes one value more than the handler that it was made of, before the others.
    Gradio sees by their types what it has to pass, such as the request."""
    first = Parameter("first", Parameter.POSITIONAL_OR_KEYWORD)
    others = signature(handler).parameters.values()
    made.__signature__ = Signature([first, *others])  # type: ignore[attr-defined]
    made.__annotations__ = get_type_hints(getattr(handler, "func", handler))
    for name in ("__name__", "__qualname__"):
        setattr(made, name, getattr(handler, name, getattr(made, name)))
    return made


def counted(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of what the user does. Its first input is the page's Deeds."""
    if isgeneratorfunction(handler):

        def doing(deeds: Deeds, *values: object) -> Iterator[Any]:
            deeds.count += 1
            yield from handler(*values)

        return leading(doing, handler)

    def done(deeds: Deeds, *values: object) -> Any:
        deeds.count += 1
        return handler(*values)

    return leading(done, handler)


def unless_done(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that looks how things are; it changes nothing once the user has done something."""

    @contextmanager
    def looking(deeds: Deeds) -> Iterator[Keep]:
        before = deeds.count
        yield lambda shown: shown if deeds.count == before else dict.fromkeys(shown, gr.skip())

    return guarded(handler, looking)


class Asked:
    """Which event was asked last to fill each part of a page: the value of a gr.State.

    Answers come in any order. One that comes late fills no part that another event, which began
    after it, was asked to fill as well.
    """

    def __init__(self) -> None:
        self.last: dict[Block, Asking] = {}

    def waits(self, part: Block) -> bool:
        """Whether an event that was asked to fill a part is still at work."""
        return part in self.last and not self.last[part].over


@dataclass(eq=False, slots=True)
class Asking:
    """One event that a user asked for; whether its handler is done."""

    over: bool = False


def newest(
    handler: Callable[..., Any], parts: Sequence[Block], of: Sequence[Block] = ()
) -> Callable[..., Any]:
    """A handler of what the user asks for. Its first input is the page's Asked.

    It decides about `parts`, and fills those that nothing newer was asked for. What it asks is
    about what `of` show: where that is about to be something else, it fills none.
    """

    @contextmanager
    def asking(asked: Asked) -> Iterator[Keep]:
        if any(map(asked.waits, of)):
            yield lambda shown: dict.fromkeys(shown, gr.skip())
            return
        mine = Asking()
        asked.last.update(dict.fromkeys(parts, mine))

        def keep(shown: Updates) -> Updates:
            gone = {part for part in parts if asked.last[part] is not mine}
            return {part: gr.skip() if part in gone else value for part, value in shown.items()}

        try:
            yield keep
        finally:
            mine.over = True

    return guarded(handler, asking)


def unasked(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that looks how things are; it fills no part that the user asks for meanwhile."""

    @contextmanager
    def looking(asked: Asked) -> Iterator[Keep]:
        before = {part: one for part, one in asked.last.items() if one.over}

        def keep(shown: Updates) -> Updates:
            return {
                part: value if asked.last.get(part) is before.get(part) else gr.skip()
                for part, value in shown.items()
            }

        yield keep

    return guarded(handler, looking)


def guarded(
    handler: Callable[..., Any], guard: Callable[[Any], AbstractContextManager[Keep]]
) -> Callable[..., Any]:
    """A handler with a value before the others, by which `guard` says what of its answer is kept.
    It may answer again and again."""

    async def followed(first: Any, *values: object) -> AsyncIterator[Updates]:
        with guard(first) as keep:
            async for shown in handler(*values):
                yield keep(shown)

    def answers(first: Any, *values: object) -> Iterator[Updates]:
        with guard(first) as keep:
            for shown in handler(*values):
                yield keep(shown)

    def answer(first: Any, *values: object) -> Updates:
        with guard(first) as keep:
            return keep(handler(*values))

    if isasyncgenfunction(handler):
        return leading(followed, handler)
    return leading(answers if isgeneratorfunction(handler) else answer, handler)


def pass_on(session: Session, owner: str) -> None:
    """Show what went wrong aside from the answer itself."""
    for notice in session.notices.take(owner):
        warn(notice)
