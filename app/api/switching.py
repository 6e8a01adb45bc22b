"""Loading by name: with --api-load, a request that names another model of this machine loads it.

Requests enter one after the other. One that needs another model waits until the answers to all
earlier ones are over, and later requests wait behind it. So no answer is cut off by another request
or made by another model than it names, and no request waits forever. Nothing is downloaded.
"""

import asyncio
from contextlib import ExitStack, suppress

from starlette.concurrency import run_in_threadpool

from app.service.models import Candidate, Models
from engine.servers.client import is_address


class ModelSwitch:
    def __init__(self, models: Models) -> None:
        self.models = models
        self.turn = asyncio.Lock()
        self.inside = 0
        """The number of requests that have entered and are not over."""
        self.empty = asyncio.Event()
        self.empty.set()

    def known(self) -> dict[str, Candidate]:
        """The models on this machine by their names, of several with one name the first. Raises
        StorageError."""
        found = dict[str, Candidate]()
        for each in self.models.candidates():
            if not is_address(each.source) and self.models.loaders.present(each.source):
                found.setdefault(each.name, each)
        return found

    def other(self, name: str) -> Candidate | None:
        """The model that has to be loaded for a request that names it. None for the loaded one, and
        for an unknown one, which is refused later. Waits for a load in progress."""
        if not name:
            return None
        self.models.slot.wait()
        state = self.models.engine.state
        return None if state.is_loaded and state.info.name == name else self.known().get(name)

    def load(self, candidate: Candidate) -> None:
        for _ in self.models.start(candidate.source, candidate.runtime):
            pass

    async def enter(self, name: object, place: ExitStack) -> None:
        """Wait until the model of a request is loaded, and keep it until `place` is closed, on any
        thread. Raises ModelError if it cannot be loaded; the earlier model then stays."""
        loop = asyncio.get_running_loop()

        def left() -> None:
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(self.leave)

        async with self.turn:
            named = name if isinstance(name, str) else ""
            if (candidate := await run_in_threadpool(self.other, named)) is not None:
                await self.empty.wait()
                await run_in_threadpool(self.load, candidate)
            self.inside += 1
            self.empty.clear()
            place.callback(left)

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self.empty.set()
