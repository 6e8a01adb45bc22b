"""The API alone: the same routes as beside the page, behind the same checks, without Gradio."""

import socket
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from app.arguments import Options
from app.http.access import PROGRAMS, Access, Hosts
from app.http.login import LogIns

GOODBYE = 3
"""Seconds that answers under way have when the program is ended."""


class Server(uvicorn.Server):
    """Prints a line once it listens."""

    def __init__(self, config: uvicorn.Config, ready: str) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        if self.started:
            print(self.ready, flush=True)


def serve(options: Options, port: int, routes: Sequence[BaseRoute], ready: str) -> None:
    """Serve until interrupted; `ready` is printed once that works."""
    hosts = Hosts(options.host, port)
    app = Access(Starlette(routes=routes), hosts, LogIns(), PROGRAMS, options.origins)
    config = uvicorn.Config(
        app,
        options.host,
        port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GOODBYE,
    )
    Server(config, ready).run()
