"""Serving the interface: a free port, every request checked first, no surprises."""

from collections.abc import Callable, Sequence
from functools import partial

import gradio as gr
from gradio.routes import App, ORJSONResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from app.arguments import Options
from app.http.access import GUESTS_UPLOAD, MAX_UPLOAD, Access, Hosts
from app.http.login import Gate, LogIns
from app.http.ports import pick_port
from app.web import layout
from app.web.gradio_queue import EventQueue
from assets import ASSETS
from engine.queue import MOST_WAITING

__all__ = ["Server", "launch", "pick_port"]
THREADS = MOST_WAITING + 40
"""Every waiting run keeps one until its turn comes; 40 are for everything else."""
EVENTS_AT_ONCE = 4
"""Of an event that says nothing else."""
PAGE_LEVEL = 4
"""How hard the page is compressed: to a ninth in 4 ms. Twice the work saves another 7 %."""


class Server(App):
    """Gradio's app behind `Access`, which sees every request before all else, and beside routes of
    our own."""

    def __init__(
        self, access: Callable[[ASGIApp], ASGIApp], routes: Sequence[BaseRoute] = ()
    ) -> None:
        self.access = access
        super().__init__(default_response_class=ORJSONResponse, routes=[*routes])

    def build_middleware_stack(self) -> ASGIApp:
        """All layers, ours outermost."""
        return self.access(with_small_page(super().build_middleware_stack()))


def with_small_page(app: ASGIApp) -> ASGIApp:
    """The app with its page compressed, which is 0.7 MB of JSON for the most part. Gradio
    compresses files alone. Nothing else of ours is that large, and streams must not wait."""
    compressed = GZipMiddleware(app, compresslevel=PAGE_LEVEL)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        page = scope["type"] == "http" and scope["path"] == "/"
        await (compressed if page else app)(scope, receive, send)

    return serve


def launch(blocks: gr.Blocks, options: Options, port: int, routes: Sequence[BaseRoute] = ()) -> str:
    """Start serving in the background, `routes` beside Gradio's; returns the address to open."""
    gate = Gate(options.user, options.password) if options.user and options.password else None
    hosts = Hosts(options.host, port)
    # Gradio offers no choice of the queue; its own method would also make an app that nobody uses.
    blocks.api_open = False
    blocks._queue = EventQueue(True, THREADS, 1, None, blocks, EVENTS_AT_ONCE)
    _, local, public = blocks.launch(
        server_name=options.host,
        server_port=port,
        share=options.share,
        auth=gate,
        inbrowser=options.browser,
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
        _frontend=False,  # Else a start ends where the page takes more than 3 s: a busy machine.
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
    return str(public or local)
