"""Logging in to servers of tools that are reached over HTTP (OAuth 2.1, by the package mcp).

If a server demands it, a page of the server opens in the browser of the person who started Strata.
After the login, that page sends the browser back to an address on this machine, where a listener
waits for it. What the server grants is stored with the server, and goes with it.
"""

import asyncio
import socket
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from pydantic import AnyUrl, BaseModel, ValidationError

from engine.errors import ToolError
from storage.tool_servers import ToolServer, ToolServerStore

if TYPE_CHECKING:
    from mcp.client.auth import OAuthClientProvider
    from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthToken

M = TypeVar("M", bound=BaseModel)
HOST, PATH = "127.0.0.1", "/callback"
SECONDS = 300.0
"""How long a person may take to log in."""
LONGEST = 16_384
"""The most bytes of a request to the listener."""
ANSWER = (
    b"HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
    b"Connection: close\r\n\r\n%s"
)
THANKS = b"Strata is logged in. You can close this page."
REFUSED = b"The server did not let Strata in. You can close this page."
UNFINISHED = asyncio.IncompleteReadError, asyncio.LimitOverrunError


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


class Login:
    """The login to one server. `waits` is called with the seconds that a person has for it."""

    def __init__(
        self, server: ToolServer, store: ToolServerStore, waits: Callable[[float], None]
    ) -> None:
        self.server, self.store, self.waits = server, store, waits
        self.granted: asyncio.Future[AuthorizationCodeResult] | None = None
        self.listener: asyncio.Server | None = None
        self.port, self.state = 0, ""

    def provider(self, url: str) -> "OAuthClientProvider":
        from mcp.client.auth import OAuthClientProvider
        from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata

        # The server knows the address that it was given at the first login.
        client = self.stored("client", OAuthClientInformationFull)
        known = [each.port for each in client.redirect_uris or ()] if client else []
        self.port = next(filter(None, known), 0) or free_port()
        address = AnyUrl(f"http://{HOST}:{self.port}{PATH}")
        about = OAuthClientMetadata(client_name="Strata", redirect_uris=[address])
        return OAuthClientProvider(url, about, self, self.ask, self.answered)

    async def ask(self, url: str) -> None:
        """Open the page of the server at which the person logs in."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise ToolError(f"The server asks to log in at {url[:200]!r}, which is no web page.")
        self.state = parse_qs(urlsplit(url).query).get("state", [""])[0]
        self.granted = asyncio.get_running_loop().create_future()
        self.listener = await asyncio.start_server(self.hear, HOST, self.port, limit=LONGEST)
        self.waits(SECONDS)
        if not await asyncio.to_thread(webbrowser.open, url):
            self.listener.close()
            raise ToolError("There is no browser here in which you could log in to the server.")

    async def answered(self) -> "AuthorizationCodeResult":
        """Wait until the browser comes back."""
        assert self.granted is not None and self.listener is not None
        async with self.listener:
            return await self.granted

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].decode("ascii")
            status, text = self.take(urlsplit(line.split(" ")[1]))
            writer.write(ANSWER % (status, len(text), text))
            await writer.drain()
        except (OSError, ValueError, IndexError, *UNFINISHED):
            pass  # This was no browser.
        finally:
            writer.close()

    def take(self, target: SplitResult) -> tuple[bytes, bytes]:
        """Take what the browser brought, if it comes from this login. Returns what it shows."""
        from mcp.shared.auth import AuthorizationCodeResult

        given = {name: values[0] for name, values in parse_qs(target.query).items()}
        if target.path != PATH or given.get("state") != self.state or self.granted is None:
            return b"404 Not Found", b"There is nothing here."
        if "code" in given and not self.granted.done():
            self.granted.set_result(AuthorizationCodeResult.model_validate(given))
        elif not self.granted.done():
            why = given.get("error_description") or given.get("error") or "it gave no reason"
            self.granted.set_exception(ToolError(f"the login was refused: {why[:200]}"))
            return b"200 OK", REFUSED
        return b"200 OK", THANKS

    # What the library stores and reads again.

    def stored(self, name: str, kind: type[M]) -> M | None:
        """What is stored under this name; None if nothing, or if it is damaged."""
        try:
            return kind.model_validate(self.store.login(self.server.id)[name])
        except (KeyError, ValidationError):
            return None

    async def get_tokens(self) -> "OAuthToken | None":
        from mcp.shared.auth import OAuthToken

        return self.stored("tokens", OAuthToken)

    async def set_tokens(self, tokens: "OAuthToken") -> None:
        self.store.set_login(self.server.id, "tokens", tokens.model_dump(mode="json"))

    async def get_client_info(self) -> "OAuthClientInformationFull | None":
        from mcp.shared.auth import OAuthClientInformationFull

        return self.stored("client", OAuthClientInformationFull)

    async def set_client_info(self, client_info: "OAuthClientInformationFull") -> None:
        self.store.set_login(self.server.id, "client", client_info.model_dump(mode="json"))
