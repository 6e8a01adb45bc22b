"""Serves the interface, and checks every request first."""

import webbrowser
from collections.abc import Callable, Sequence
from functools import partial

import gradio as gr
from gradio.routes import App, ORJSONResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.arguments import Options
from app.http.access import (
    GUESTS_UPLOAD,
    MAX_UPLOAD,
    Access,
    Hosts,
    address_of,
    bracketed,
    pick_port,
)
from app.http.login import Gate, LogIns
from app.web import layout, shared
from app.web.gradio_workarounds import (
    FIND_COMPONENTS,
    EventQueue,
    ask_directly,
    convert_at_once,
    keep_keys,
)
from assets import ASSETS
from engine.queue import MOST_WAITING

__all__ = ["Server", "launch", "pick_port"]
THREADS = MOST_WAITING + 40
"""The size of Gradio's thread pool. Every waiting run holds a thread; 40 are for everything
else."""
EVENTS_AT_ONCE = 4
"""How often an event without a limit of its own may run at the same time."""
LENGTH = b"content-length"
PAGE_LEVEL = 4
"""The compression level of the page. It shrinks to a ninth in 4 ms; twice the time saves another
7 %."""


class Server(App):
    """Gradio's app with further routes. `access` wraps the whole app, so it sees every request
    first."""

    def __init__(
        self, access: Callable[[ASGIApp], ASGIApp], routes: Sequence[BaseRoute] = ()
    ) -> None:
        self.access = access
        super().__init__(default_response_class=ORJSONResponse, routes=[*routes])

    def build_middleware_stack(self) -> ASGIApp:
        return self.access(with_small_page(with_early_scripts(super().build_middleware_stack())))


def with_early_scripts(app: ASGIApp) -> ASGIApp:
    """The app, with scripts at the beginning of its page: those for shared streams and for finding
    components. Gradio opens its first stream, and makes its tree of components, before it runs any
    script that it was given."""
    head = b"<head>"
    script = head + f'<script src="{shared.address()}"></script>{FIND_COMPONENTS}'.encode()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def extended(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The body becomes longer than it says.
                kept = [pair for pair in message["headers"] if pair[0].lower() != LENGTH]
                await send({**message, "headers": kept})
            else:
                body = message.get("body", b"")
                await send({**message, "body": body.replace(head, script, 1)})

        page = scope["type"] == "http" and scope["path"] == "/"
        await app(scope, receive, extended if page else send)

    return serve


def with_small_page(app: ASGIApp) -> ASGIApp:
    """The app with its page compressed, which is mostly 0.7 MB of JSON. Gradio compresses only
    files. Other responses are small, and streams must not be delayed."""
    compressed = GZipMiddleware(app, compresslevel=PAGE_LEVEL)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        page = scope["type"] == "http" and scope["path"] == "/"
        await (compressed if page else app)(scope, receive, send)

    return serve


def launch(blocks: gr.Blocks, options: Options, port: int, routes: Sequence[BaseRoute] = ()) -> str:
    """Start serving in the background, with `routes` in addition to Gradio's. Returns the
    address."""
    gate = Gate(options.user, options.password) if options.user and options.password else None
    hosts = Hosts(options.host, port)
    # Gradio offers no way to choose the queue, and its own method would make another app.
    blocks.api_open = False
    keep_keys()
    ask_directly()
    convert_at_once()
    blocks._queue = EventQueue(True, THREADS, 1, None, blocks, EVENTS_AT_ONCE)
    _, _, public = blocks.launch(
        server_name=bracketed(options.host),
        server_port=port,
        share=options.share,
        auth=gate,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        max_threads=THREADS,
        max_file_size=GUESTS_UPLOAD if options.public else MAX_UPLOAD,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        num_workers=0,
        pwa=False,
        _frontend=False,  # Otherwise a start fails if the page takes more than 3 s.
        favicon_path=ASSETS / "logo.svg",
        theme=layout.theme(),
        css=layout.css(),
        _app=Server(
            partial(Access, hosts=hosts, log_ins=LogIns(), origins=options.origins), routes
        ),
    )
    if public:
        hosts.share(public)
    # Gradio's own page for a shared app fetches its script from another server.
    blocks.share = False
    address = str(public or address_of(options.host, port))
    if options.browser:
        webbrowser.open(address)
    return address
