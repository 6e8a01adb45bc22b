"""Gradio's queue of events, which works when there is work instead of asking for it all the time.

Gradio's own looks for work a thousand times a second, pages or none: 1 to 5 % of a core. Ours is
woken by what makes work: an event that came, or one that ended and left its place. So an event
also begins at once instead of at the next look.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from gradio import queueing

PROGRESS_SECONDS = 1.0
"""How often Gradio looks for reports to its own progress bars. No event of ours has one."""


class Held:
    """A coroutine that polls, run so that it does not: where it would only let others go first
    (`asyncio.sleep(0)`), it is held until `work` is set."""

    def __init__(self, polling: Coroutine[object, None, None], work: asyncio.Event) -> None:
        self.polling, self.work = polling, work

    def __await__(self) -> Generator[object, None, None]:
        try:
            for waited in self.polling.__await__():
                # A sleep of no length waits for nothing, anything else waits for a future.
                if waited is None:
                    yield from self.work.wait().__await__()
                    self.work.clear()
                else:
                    yield waited
        finally:
            self.polling.close()


class EventQueue(queueing.Queue):
    """See the module's docstring. What is done with events is as Gradio does it: its methods take
    whatever those of Gradio take."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sleep_when_free = 0
        self.progress_update_sleep_when_free = PROGRESS_SECONDS
        self.work = asyncio.Event()

    async def start_processing(self) -> None:
        """Begin events as they come."""
        self.work = asyncio.Event()  # one belongs to the loop that waits for it first
        await Held(super().start_processing(), self.work)

    async def push(self, *arguments: Any, **named: Any) -> Any:
        """Take an event in."""
        try:
            return await super().push(*arguments, **named)
        finally:
            self.work.set()

    async def process_events(self, *arguments: Any, **named: Any) -> None:
        """Work on events; the next ones may have waited for their place."""
        try:
            await super().process_events(*arguments, **named)
        finally:
            self.work.set()

    def compute_analytics_summary(self, records: object) -> dict[str, Any]:
        """Nothing. Gradio groups all recent events in a table after each one, for a page of
        statistics that we do not serve."""
        return self.cached_event_analytics_summary
