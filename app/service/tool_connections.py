"""Connections to servers of tools, in the Model Context Protocol (package mcp).

A server is started with the first request, and stays open until the program ends. A request that
fails, is stopped or takes too long ends the server, so that the next one begins with a fresh one.
A server may send anything: a result becomes text, and anything else an error that says what to do.
"""

import asyncio
import json
import logging
import re
import shlex
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from io import TextIOWrapper
from os import SEEK_END
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TextIO, TypeVar

from app.service.jobs import Stop
from app.service.tool_logins import Login
from app.service.tool_settings import filled
from engine.errors import Cancelled, ToolError, first_line
from engine.tools import as_json
from engine.types import ToolCall
from storage.tool_servers import ServerTool, ToolServer, ToolServerStore

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import Transport, TransportStreams
    from mcp.client.auth import OAuthClientProvider
    from mcp_types import CallToolResult

T = TypeVar("T")
CALL_SECONDS = 60.0
"""How long a request may take, including the start of its server."""
CLOSING_SECONDS = 5.0
"""How long to wait for servers that were told to end."""
MOST_TOOLS = 100
LONGEST_TOOL = 20_000
"""The most tools of a server, and the most characters of a tool's description and schema."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names of tools that every form of calls can hold (engine/tools.py)."""
FAILED = "The tool reports an error: "
LONGEST_LOG = 300
"""How many bytes of what a failed server wrote are shown."""


class Connections:
    """Open connections to tool servers, on an event loop that has a thread of its own."""

    def __init__(self, store: ToolServerStore) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.open: dict[str, Connection] = {}
        """The open connections by the ids of their servers. Only the loop's thread changes it."""
        self.tasks = set[asyncio.Task[None]]()
        """Those of all connections, also of those that are being closed."""

    def list_tools(self, server: ToolServer) -> list[ServerTool]:
        async def listed(client: "Client") -> list[ServerTool]:
            tools, page = list[ServerTool](), await client.list_tools()
            while True:
                tools += [
                    ServerTool(
                        name=tool.name,
                        description=tool.description or "",
                        parameters=json.dumps(tool.input_schema, ensure_ascii=False),
                    )
                    for tool in page.tools
                ]
                if page.next_cursor is None or len(tools) >= MOST_TOOLS:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
            return [tool for tool in tools[:MOST_TOOLS] if usable(tool)]

        return self.run(server, listed, Stop())

    def call(self, server: ToolServer, call: ToolCall, stop: Stop) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        async def called(client: "Client") -> str:
            try:
                return text_of(await client.call_tool(call.name, json.loads(call.arguments)))
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    raise
                return FAILED + str(error)  # The model may correct its call.

        return self.run(server, called, stop)

    def run(self, server: ToolServer, work: Callable[["Client"], Awaitable[T]], stop: Stop) -> T:
        future = asyncio.run_coroutine_threadsafe(self.within(server, work), self.started())

        def end() -> None:
            future.cancel()

        try:
            with stop.calling(end):
                return future.result()
        except CancelledError as error:
            raise Cancelled("The call was stopped.") from error

    async def within(self, server: ToolServer, work: Callable[["Client"], Awaitable[T]]) -> T:
        connection = self.open.get(server.id)
        if connection is None:
            connection = self.open[server.id] = Connection(server, self.store)
            self.tasks.add(connection.task)
            connection.task.add_done_callback(self.tasks.discard)
        try:
            async with connection.patience():
                return await work(await asyncio.shield(connection.client))
        except BaseException as error:
            self.end(server.id, connection)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise failure(connection, error) from error

    def started(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None:
                # A server that sends nonsense would fill the terminal.
                logging.getLogger("mcp").setLevel(logging.CRITICAL)
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self.loop.run_forever, name="tools", daemon=True).start()
            return self.loop

    def end(self, id: str, connection: "Connection") -> None:
        if self.open.get(id) is connection:
            del self.open[id]
        connection.task.cancel()

    def close(self, *ids: str) -> None:
        """End these servers, or all of them; then wait until they have ended."""

        async def closed() -> None:
            for id in ids or [*self.open]:
                if id in self.open:
                    self.end(id, self.open[id])
            if self.tasks and not ids:
                await asyncio.wait(self.tasks, timeout=CLOSING_SECONDS)

        if self.loop is not None:
            asyncio.run_coroutine_threadsafe(closed(), self.loop).result()


class Connection:
    """One open server. A task of its own opens and closes it, as the library demands."""

    def __init__(self, server: ToolServer, store: ToolServerStore) -> None:
        self.server, self.login = server, Login(server, store, self.wait)
        self.seconds = CALL_SECONDS
        """How long the last request may take."""
        self.limits = set[asyncio.Timeout]()
        """Those of the requests in progress."""
        self.log: TextIO | None = None
        """What the server writes to its standard error; `wrote` is its end, once it is closed."""
        self.wrote = ""
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self.keep())

    async def keep(self) -> None:
        from mcp import Client

        with TextIOWrapper(TemporaryFile(), "utf-8", "replace") as self.log:
            try:
                async with Client(self.transport(self.log)) as client:
                    self.client.set_result(client)
                    await asyncio.Event().wait()
            except Exception as error:
                if not self.client.done():
                    self.client.set_exception(error)
            finally:
                self.client.cancel()
                self.wrote = self.written()

    def transport(self, log: TextIO) -> "Transport":
        """How the server is reached: over HTTP, or as a program that is started."""
        from mcp import StdioServerParameters, stdio_client

        address = self.server.address
        settings = {name: filled(value) for name, value in self.server.settings.items()}
        if address.startswith(("http://", "https://")):
            url, has_key = filled(address), "authorization" in map(str.lower, settings)
            return over_http(url, settings, None if has_key else self.login.provider(url), log)
        command, *arguments = map(filled, shlex.split(address))
        known = StdioServerParameters(command=command, args=arguments, env=settings or None)
        return stdio_client(known, log)

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """The limit of a request in this block."""
        self.seconds = CALL_SECONDS
        async with asyncio.timeout(self.seconds) as limit:
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.discard(limit)

    def wait(self, seconds: float) -> None:
        """Let the requests in progress take so many seconds from now on, as a person logs in."""
        self.seconds = seconds
        for limit in self.limits:
            limit.reschedule(asyncio.get_running_loop().time() + seconds)

    def written(self) -> str:
        if self.log is None or self.log.closed:
            return self.wrote
        self.log.seek(max(0, self.log.seek(0, SEEK_END) - LONGEST_LOG))
        return self.log.read().strip()


@asynccontextmanager
async def over_http(
    url: str, headers: dict[str, str], login: "OAuthClientProvider | None", log: TextIO
) -> AsyncIterator["TransportStreams"]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def answered(response: httpx2.Response) -> None:
        if response.is_error and str(response.request.url) == url:
            log.write(f"HTTP {response.status_code} {response.reason_phrase}\n")

    # A stream of events may be silent for as long as it likes; requests have a limit of their own.
    patience = httpx2.Timeout(CALL_SECONDS, read=None)
    async with (
        httpx2.AsyncClient(
            headers=headers, auth=login, timeout=patience, event_hooks={"response": [answered]}
        ) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


def usable(tool: ServerTool) -> bool:
    return bool(NAME.fullmatch(tool.name)) and (
        len(tool.description) + len(tool.parameters) <= LONGEST_TOOL
    )


def text_of(result: "CallToolResult") -> str:
    """A result as a model reads it. Of what is no text, it reads the address or the kind."""
    parts = list[str]()
    for block in result.content:
        shown = block.resource if block.type == "resource" else block
        what = getattr(shown, "uri", None) or getattr(shown, "mime_type", None)
        parts.append(getattr(shown, "text", f"[{block.type}: {what}]"))
    if not parts and result.structured_content is not None:
        parts.append(as_json(result.structured_content))
    return (FAILED if result.is_error else "") + "\n".join(parts)


def failure(connection: Connection, error: BaseException) -> ToolError:
    server, log = connection.server, connection.written()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        what = f"gave no answer within {connection.seconds:.0f} s, and was ended"
    elif isinstance(error, OSError):
        what = f"cannot be started or reached ({error.strerror or first_line(error)})"
    else:
        problem = first_line(error) if isinstance(error, Exception) else type(error).__name__
        what = f"failed ({problem})"
    last = f" It wrote at last: {log!r}." if log else ""
    return ToolError(
        f"The tool server {server.name!r} {what}.{last} It starts again with the next call. If "
        f"that fails too, check its address in the Settings tab: {server.address}"
    )
