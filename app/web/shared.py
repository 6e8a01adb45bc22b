"""One connection that carries the streams of all tabs of a browser, which opens at most six to a
server (assets/shared.js; docs/how-it-works.md says more).

- `GET /shared` opens the connection. Its first event is its name, which cannot be guessed. Each
  further event is a pair: the number of a stream, and its status, a part of its text, or null for
  its end.
- `POST /shared/<name>` with a `number` and a `path` opens a stream on the connection; without a
  path it closes that stream. Only the paths in STREAMS can be opened.

Each stream is a separate request to the app, with the headers of the POST. So it passes the same
checks as a direct request, and Gradio's handlers notice a closed tab as usual.
"""

import asyncio
import codecs
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from app.http.login import logged_in
from app.http.problems import EVENT_STREAM
from app.web.routes import script_address, script_route
from app.web.stream import HELLO, compact
from assets import read

STREAMS = re.compile(r"/stream/[\w-]+|/gradio_api/(?:queue/data|heartbeat/\w+)")
EVENTS = re.compile(r".+?(?:\n\n|\Z)", re.DOTALL)
"""Splits a stream into its events. They are passed on one by one, so that a page gets further even
on a bad connection."""
MOST_STREAMS = 512
"""The most streams on one connection: hundreds of tabs with two each."""
COPIED = ("type", "http_version", "scheme", "server", "client", "root_path")
"""What the request for a stream copies from the request that opened it, besides headers."""
ASGI = {"version": "3.0", "spec_version": "2.3"}
"""With this version, an app learns from `receive` that the client has disconnected."""
OF_A_BODY = (b"content-length", b"content-type", b"transfer-encoding")
SCRIPT = "shared.js"
"""The browser's code, both for the tabs and for the worker that they share."""
UNKNOWN = "There is no such connection. Open another one with GET /shared."

Event = tuple[bytes, asyncio.Future[None]]
"""The bytes of an event, and a future that is done once they were sent."""

log = logging.getLogger(__name__)


class SharedConnection:
    """A connection and its streams, by their numbers. A stream continues only after its last event
    was sent, so at most one event of each stream waits in memory."""

    def __init__(self) -> None:
        self.streams: dict[int, asyncio.Event] = {}
        """For each stream, an event that is set when the stream is to close."""
        self.waiting: list[Event] = []
        self.changed = asyncio.Event()
        self.over = False
        self.tasks = set[asyncio.Task[None]]()

    async def events(self) -> AsyncIterator[bytes]:
        while not self.over:
            await self.changed.wait()
            self.changed.clear()
            taken, self.waiting = self.waiting, []
            try:
                if taken:
                    yield b"".join(event for event, _ in taken)
            finally:
                sent(taken)

    async def send(self, number: int, *values: int | str | None) -> None:
        if self.over:
            return
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((b"".join(encoded([number, value]) for value in values), done))
        self.changed.set()
        await done

    def open(self, number: int, app: ASGIApp, scope: Scope) -> None:
        self.streams[number] = asyncio.Event()
        task = asyncio.create_task(self.carry(number, app, scope))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def carry(self, number: int, app: ASGIApp, scope: Scope) -> None:
        closed, decoder = self.streams[number], codecs.getincrementaldecoder("utf-8")("replace")
        requested = False

        async def receive() -> Message:
            nonlocal requested
            if not requested:
                requested = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if closed.is_set():
                return
            if message["type"] == "http.response.start":
                await self.send(number, message["status"])
            elif text := decoder.decode(message.get("body", b"")):
                await self.send(number, *EVENTS.findall(text))

        try:
            await app(scope, receive, send)
        except Exception:
            log.exception("A stream broke off.")
        finally:
            self.streams.pop(number, None)
        if not closed.is_set():
            await self.send(number, None)

    def close(self) -> None:
        self.over = True
        self.changed.set()
        for closed in self.streams.values():
            closed.set()
        sent(self.waiting)


def sent(events: Sequence[Event]) -> None:
    for _, done in events:
        if not done.done():
            done.set_result(None)


def encoded(value: object) -> bytes:
    return f"data:{compact(value)}\n\n".encode("utf-8", "replace")


def stream_request(body: bytes) -> tuple[int, str]:
    """The number and the path in a request. Raises ValueError if they are missing."""
    request: Any = json.loads(body)
    number, path = (
        (request.get("number"), request.get("path", "")) if isinstance(request, dict) else (0, 0)
    )
    if type(number) is not int or not isinstance(path, str):
        raise ValueError(f"{request!r} is not a number and a path.")
    return number, path


def scope_of(request: Request, path: str, query: str) -> Scope:
    """The request for a stream, as if the sender of `request` had sent it directly."""
    kept = [pair for pair in request.scope["headers"] if pair[0] not in OF_A_BODY]
    return {
        **{name: request.scope[name] for name in COPIED if name in request.scope},
        "asgi": ASGI,
        "state": dict(request.scope.get("state", {})),
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": kept,
    }


def address() -> str:
    return script_address("/shared", read(SCRIPT))


def routes() -> list[Route]:
    known: dict[str, SharedConnection] = {}

    async def connect(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        stop = getattr(request.app, "stop_event", None)

        async def body() -> AsyncIterator[bytes]:
            name, connection = secrets.token_urlsafe(18), SharedConnection()
            known[name] = connection
            ending = asyncio.create_task(close_after(stop, connection)) if stop else None
            try:
                yield HELLO + encoded(name)
                async for events in connection.events():
                    yield events
            finally:
                del known[name]
                connection.close()
                if ending is not None:
                    ending.cancel()

        return StreamingResponse(body(), headers=EVENT_STREAM)

    async def change(request: Request) -> Response:
        if not logged_in(request.app, request.cookies):
            return PlainTextResponse("Log in first.", 401)
        connection = known.get(request.path_params["name"])
        if connection is None:
            return PlainTextResponse(UNKNOWN, 404)
        try:
            number, target = stream_request(await request.body())
        except ValueError as error:
            return PlainTextResponse(f"This asks for no stream: {error}", 400)
        path, _, query = target.partition("?")
        if not target:
            if number in connection.streams:
                connection.streams[number].set()
        elif not STREAMS.fullmatch(path) or not query.isascii():
            return PlainTextResponse(f"There is no stream at {target!r}.", 404)
        elif number in connection.streams or len(connection.streams) >= MOST_STREAMS:
            open_now = len(connection.streams)
            return PlainTextResponse(f"{number} is in use, or {open_now} are too many.", 409)
        else:
            connection.open(number, request.app, scope_of(request, path, query))
        return Response(status_code=204)

    return [
        Route("/shared", connect, methods=["GET"]),
        Route("/shared/{name}", change, methods=["POST"]),
        script_route("/shared", lambda: read(SCRIPT)),
    ]


async def close_after(stop: asyncio.Event, connection: SharedConnection) -> None:
    """Close a connection when the server stops, because the server waits for its connections."""
    await stop.wait()
    connection.close()
