"""Tabs and their parts as tests build them, without a browser."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import gradio as gr
from starlette.routing import BaseRoute

from app.arguments import parse
from app.service.pages import Download
from app.service.session import Session
from app.web import server
from app.web.gradio_workarounds import without_apps
from app.web.tabs.settings import Settings, preset_picker

T = TypeVar("T")
EVIL = "<img src=x onerror=alert(1)>"


def made(build: Callable[[], T], apps: bool = False) -> T:
    """What `build` makes of Gradio's blocks, which leave an event loop open unless one runs. The
    apps that would serve them take most of the time, and most tests serve nothing."""

    async def run() -> T:
        with nullcontext() if apps else without_apps():
            return build()

    return asyncio.run(run())


def tab_of(kind: type[T], session: Session) -> T:
    """A tab alone, with the settings that it may read. It is not wired."""

    def build() -> T:
        memory = gr.BrowserState({})
        with gr.Blocks(), gr.Tab("Tab") as tab:
            parts = {"tab": tab, "current": gr.State(None), "start_from": preset_picker()}
            parts |= {"bits": gr.Dropdown(), "ready": gr.HTML()}
            named = signature(kind).parameters
            found: Any = kind(session, memory, **{n: parts[n] for n in parts if n in named})
            if "controls" in kind.__annotations__:
                found.controls = Settings(session, memory)
            return found  # type: ignore[no-any-return]

    return made(build)


def last(updates: Iterator[Any]) -> Any:
    *_, found = updates
    return found


def content(file: Download) -> str:
    """The text of a file that a page saves."""
    return b"".join(file.parts()).decode()


def after(updates: Iterator[Any]) -> dict[Any, Any]:
    """What a page shows after all of a handler's updates."""
    shown: dict[Any, Any] = {}
    for update in updates:
        for part, change in update.items():
            both = isinstance(change, dict) and isinstance(shown.get(part), dict)
            shown[part] = {**shown[part], **change} if both else change
    return shown


class SmallPage(NamedTuple):
    """A served page: the address of its server, the address that users are given, its blocks."""

    address: str
    public: str
    blocks: gr.Blocks


@contextmanager
def serving(
    *options: str,
    routes: Sequence[BaseRoute] = (),
    build: Callable[[gr.Blocks], object] = lambda blocks: gr.HTML("inside"),
) -> Iterator[SmallPage]:
    port = server.pick_port("127.0.0.1", 0)

    def launched() -> tuple[str, gr.Blocks]:
        with without_apps(), gr.Blocks(analytics_enabled=False) as blocks:
            build(blocks)
        return server.launch(blocks, parse(["--no-browser", *options]), port, routes), blocks

    public, blocks = made(launched, apps=True)
    try:
        yield SmallPage(f"http://127.0.0.1:{port}", public, blocks)
    finally:
        blocks.close(verbose=False)


def labels(blocks: gr.Blocks) -> set[str]:
    return {
        str(getattr(block, "value", None) or getattr(block, "label", ""))
        for block in blocks.blocks.values()
        if isinstance(block, gr.Button | gr.Tab) and block.visible
    }
