"""Serving the interface: a free port, headers that keep the page to itself, no surprises."""

import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from app import ui
from app.arguments import FIRST_PORT, PORTS_TRIED, Gate, Options
from engine.errors import SettingError

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self'; worker-src 'self' blob:; "
    "frame-src 'none'; object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Nothing is loaded from elsewhere, whatever an answer or an imported conversation asks for.
Gradio itself needs inline and evaluated scripts."""
MAX_UPLOAD, GUESTS_UPLOAD = "128mb", "32mb"
"""An export of thousands of conversations is large; reading it takes several times its size."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class KeepsToItself:
    """Adds the policy to every response, without touching the body."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"content-security-policy", POLICY.encode()),
                    (b"referrer-policy", b"no-referrer"),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        await self.app(scope, receive, send_with_policy)


def is_free(host: str, port: int) -> bool:
    """Whether the port can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def pick_port(host: str, wanted: int | None) -> int:
    """The wanted port, or a free one for None and 0. Raises SettingError when there is none."""
    if wanted:
        if not is_free(host, wanted):
            raise SettingError(
                f"{host}:{wanted} cannot be listened on: the port is in use, or the address is "
                "not this machine's. Choose another with --port, or leave it out."
            )
        return wanted
    if wanted is None:
        for port in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED):
            if is_free(host, port):
                return port
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise SettingError(
            f"The address {host!r} cannot be listened on ({error.strerror or error}). "
            "Give an address of this machine with --host."
        ) from error


def launch(blocks: gr.Blocks, options: Options, port: int) -> str:
    """Start serving in the background; returns the address to open."""
    gate = Gate(options.user, options.password) if options.user and options.password else None
    _, local, public = blocks.queue(default_concurrency_limit=4, api_open=False).launch(
        server_name=options.host,
        server_port=port,
        share=options.share,
        auth=gate,
        inbrowser=options.browser,
        prevent_thread_lock=True,
        quiet=True,
        footer_links=[],
        allowed_paths=[],
        max_file_size=GUESTS_UPLOAD if options.public else MAX_UPLOAD,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        app_kwargs={"middleware": [Middleware(KeepsToItself)]},
        favicon_path=ui.ASSETS / "logo.svg",
        theme=ui.theme(),
        css=ui.css(),
    )
    return str(public or local)
