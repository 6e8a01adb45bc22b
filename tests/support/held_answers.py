"""Answers that wait for a test, in the process of the model: see tests/support/held.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.engine import Event, Request
    from engine.local import Local
    from engine.streams import Stream

STEPS = 60
"""After so many steps an answer waits."""
LOOK_SECONDS = 0.02
"""Seconds between two looks, and between the steps before: so pages are told of most of them."""


def file_of(folder: Path, owner: str) -> Path:
    """While this file is there, the answers to that owner wait until they are stopped."""
    return folder / f"answers to {owner}"


def engine_of(folder: Path, *arguments: Any) -> "Local":
    """The program's engine, whose answers wait while they have a file in the folder."""
    from app.cli import engine_of as usual
    from engine.local import Local
    from engine.types import Step

    events_of = Local.answer_events

    def waiting(self: Local, request: "Request", stream: "Stream[Event]") -> Iterator["Event"]:
        file, steps = file_of(folder, request.owner), 0
        for event in events_of(self, request, stream):
            yield event
            steps += isinstance(event, Step)
            while file.exists() and not stream.stopped.wait(LOOK_SECONDS) and steps >= STEPS:
                pass

    Local.answer_events = waiting  # type: ignore[method-assign]
    return usual(*arguments)
