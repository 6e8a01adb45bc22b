"""Answers that wait for a test, in the process of the model: see tests/support/held.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decode import Turns
    from engine.drafting.controller import Company
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

    answer = Local.answer_now

    def waiting(
        self: Local, request: "Request", stream: "Stream[Event]", company: "Company"
    ) -> "Turns":
        file, steps, put = file_of(folder, request.owner), 0, stream.put

        def held(event: "Event") -> None:
            nonlocal steps
            put(event)
            steps += isinstance(event, Step)
            while file.exists() and not stream.stopped.wait(LOOK_SECONDS) and steps >= STEPS:
                pass

        stream.put = held  # type: ignore[method-assign]
        return answer(self, request, stream, company)

    Local.answer_now = waiting  # type: ignore[method-assign]
    return usual(*arguments)
