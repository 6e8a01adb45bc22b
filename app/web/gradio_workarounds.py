"""Replaces or disables parts of Gradio that cost time or lose updates.

- Blocks make one app when they begin and another when they are complete. Strata serves a third one
  (app/web/server.py), so the first two, a tenth of the start, are not made.
- Gradio's queue polls for work a thousand times a second, 1 to 5 % of a core. `EventQueue` is woken
  by new events instead, so that events also begin at once.
- After the first update of a handler, Gradio sends edits, and the page applies them in place to the
  previous update, which it may not have shown yet. An edit that deletes `visible` made a Stop
  button never appear. Updates that would lose a key are therefore sent whole.
- The page records the status of each component's last event for its progress indicators, which no
  event of Strata shows (app/web/kit.py): ten million function calls for one answer.
- For each component of an event, the page walks through all components to find it: 20 ms before a
  click on Send is sent, and again for the reply. `FIND_COMPONENTS` looks them up instead.
- Each value of an event is converted on another thread, one after the other: 12 ms for a click on
  Send. `convert_at_once` converts in place what takes microseconds, all but CONVERTED_LATER.
- If a component is removed while it waits, the clock of its waiting time requests 60 frames a
  second for ever, 2 to 5 % of a core. `STOP_CLOCKS` counts the requested frames, and how many of
  them belong to clocks (a clock reads the time in each frame). If all do, it cancels them;
  otherwise something on the page is moving, and it tries again later.
- When it starts, Gradio asks its own address whether it answers, through a proxy of the environment
  if there is one. `ask_directly` lets it ask without.

If a version of Gradio does not have such a part, nothing is replaced.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx
from gradio import blocks, components, queueing, utils
from gradio.routes import App

from assets import read

MAKER = "create_app"


@contextmanager
def without_apps() -> Iterator[None]:
    """Blocks that are built in this context make no app until they are served."""
    make = vars(App)[MAKER]
    setattr(App, MAKER, staticmethod(lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(App, MAKER, make)


PROGRESS_SECONDS = 1.0
"""How often Gradio looks for reports to its own progress bars, which Strata does not use."""


class WaitForWork:
    """Runs a polling coroutine without polling: at each `asyncio.sleep(0)` it waits until `work` is
    set."""

    def __init__(self, polling: Coroutine[object, None, None], work: asyncio.Event) -> None:
        self.polling, self.work = polling, work

    def __await__(self) -> Generator[object, None, None]:
        try:
            for waited in self.polling.__await__():
                # asyncio.sleep(0) yields None, and anything else yields a future.
                if waited is None:
                    yield from self.work.wait().__await__()
                    self.work.clear()
                else:
                    yield waited
        finally:
            self.polling.close()


class EventQueue(queueing.Queue):
    """Gradio's queue, woken by events instead of polling; see the module's docstring. Its methods
    accept the arguments of Gradio's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sleep_when_free = 0
        self.progress_update_sleep_when_free = PROGRESS_SECONDS
        self.work = asyncio.Event()

    async def start_processing(self) -> None:
        self.work = asyncio.Event()  # An asyncio.Event belongs to the loop that first waits for it.
        await WaitForWork(super().start_processing(), self.work)

    async def push(self, *arguments: Any, **named: Any) -> Any:
        try:
            return await super().push(*arguments, **named)
        finally:
            self.work.set()

    async def process_events(self, *arguments: Any, **named: Any) -> None:
        try:
            await super().process_events(*arguments, **named)
        finally:
            self.work.set()

    def compute_analytics_summary(self, records: object) -> dict[str, Any]:
        """Do nothing. After each event, Gradio would summarise all recent events for a page of
        statistics that Strata does not serve."""
        return self.cached_event_analytics_summary


def keep_keys() -> None:
    """Make Gradio send an update whole that would lose a key."""
    diff: Any = utils.diff
    if hasattr(diff, "__wrapped__"):
        return

    @wraps(diff)
    def differences(old: Any, new: Any) -> list[list[Any]]:
        edits = diff(old, new)
        lost = any(action == "delete" for action, *_ in edits)
        return [["replace", [], new]] if lost else edits

    utils.diff = differences


class Replaced:
    """A module for Gradio's blocks in which some names are replaced."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        self.module = module
        self.__dict__ |= names

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def ask_directly() -> None:
    """Make Gradio ask this machine without a proxy. Blocks ask only this program itself."""
    direct = Replaced(httpx, get=partial(httpx.get, trust_env=False))
    setattr(blocks, "httpx", direct)  # noqa: B010


CONVERTED_LATER = (components.Dataframe, components.Plot, components.UploadButton)
"""The components of Strata that read or write much to convert a value."""


async def converted(work: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """`work(*values)`, on another thread unless it is a quick conversion by a component."""
    component = getattr(work, "__self__", None)
    if isinstance(component, components.Component) and not isinstance(component, CONVERTED_LATER):
        return work(*values)
    return await anyio.to_thread.run_sync(work, *values, **options)


def convert_at_once() -> None:
    thread = Replaced(anyio.to_thread, run_sync=converted)
    setattr(blocks, "anyio", Replaced(anyio, to_thread=thread))  # noqa: B010


SCRIPTS = Path(blocks.__file__).parent / "templates" / "frontend" / "assets"


def finding_components(folder: Path = SCRIPTS) -> str:
    """The element of the page's head that makes it look components up: a module that runs before
    Gradio makes its tree of components. It is empty if the `folder` with Gradio's scripts has no
    such tree."""
    for file in folder.glob("core-*.js"):
        if "AppTree" in file.read_text("utf-8"):
            tree = f'import {{ AppTree }} from "./assets/{file.name}";\n'
            return f'<script type="module">\n{tree}{read("find_components.js")}</script>'
    return ""


FIND_COMPONENTS = finding_components()
# Each of these scripts runs once in each page.
KEEP_NO_STATUS = read("no_status.js")
STOP_CLOCKS = read("stop_clocks.js")
