"""Tabs and their parts as tests build them, without a browser."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import gradio as gr
from starlette.routing import BaseRoute

from app.arguments import parse
from app.service.session import Session
from app.web import server
from app.web.gradio_workarounds import without_apps
from app.web.tabs.chat import Chat
from app.web.tabs.settings import Settings

T = TypeVar("T")
EVIL = "<img src=x onerror=alert(1)>"


def made(build: Callable[[], T], apps: bool = False) -> T:
    """What `build` makes of Gradio's blocks, which leave an event loop open unless one runs. The
    apps that would serve them take most of the time, and most tests serve nothing."""

    async def run() -> T:
        with nullcontext() if apps else without_apps():
            return build()

    return asyncio.run(run())


def tab_of(kind: Callable[..., T], session: Session) -> T:

    def build() -> T:
        with gr.Blocks(), gr.Tab("Tab") as tab:
            return kind(session, gr.BrowserState({}), tab)

    return made(build)


def last(updates: Iterator[Any]) -> Any:
    *_, found = updates
    return found


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


def talk_of(session: Session) -> Chat:

    def build() -> Chat:
        memory, current = gr.BrowserState({}), gr.State(None)
        with gr.Blocks():
            talk = Chat(session, memory, current)
            talk.controls = Settings(session, memory)
            return talk

    return made(build)
