"""Logging in to a server of tools over HTTP: the real server of the library, and a browser that is
a client of ours."""

import time
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from app.http.access import pick_port
from app.service import tool_connections, tool_logins
from app.service.jobs import Stop
from app.service.tool_servers import ToolServers
from engine.errors import ToolError
from engine.types import ToolCall
from storage.database import Database
from tests.support.inside import on_toy
from tests.support.served import listening

HELLO = ToolCall("1", "hello", "{}")


@dataclass
class Accounts:
    """Grants every login, unless it `refuses`. Tokens are valid while they are in `tokens`."""

    refuses: bool = False
    clients: dict[str, OAuthClientInformationFull] = field(default_factory=dict)
    codes: dict[str, AuthorizationCode] = field(default_factory=dict)
    tokens: dict[str, AccessToken] = field(default_factory=dict)

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.clients[str(client_info.client_id)] = client_info

    async def authorize(
        self, client: OAuthClientInformationFull, params: AuthorizationParams
    ) -> str:
        back = str(params.redirect_uri)
        if self.refuses:
            return construct_redirect_uri(back, error="access_denied", state=params.state)
        code = AuthorizationCode(
            code=f"code{len(self.codes)}",
            scopes=[],
            expires_at=time.time() + 60,
            client_id=str(client.client_id),
            **params.model_dump(exclude={"state", "scopes"}),
        )
        self.codes[code.code] = code
        return construct_redirect_uri(back, code=code.code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        token = f"token{len(self.tokens)}"
        self.tokens[token] = AccessToken(token=token, client_id=str(client.client_id), scopes=[])
        return OAuthToken(access_token=token, expires_in=3600)

    async def load_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: str
    ) -> RefreshToken | None:
        return None

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.tokens.get(token)


@dataclass
class Browser:
    """What opens the pages of logins: `opened` are their addresses. It follows them back."""

    opened: list[str] = field(default_factory=list)
    there: bool = True
    shown: str = ""

    def open(self, url: str) -> bool:
        self.opened.append(url)
        if self.there:
            with httpx.Client(follow_redirects=True, timeout=20) as client:
                self.shown = client.get(url).text
        return self.there


@pytest.fixture
def accounts() -> Accounts:
    return Accounts()


@pytest.fixture
def address(accounts: Accounts) -> Iterator[str]:
    port = pick_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    settings = AuthSettings.model_validate(
        {
            "issuer_url": url,
            "resource_server_url": f"{url}/mcp",
            "client_registration_options": ClientRegistrationOptions(enabled=True),
            "validate_token_resource": False,
        }
    )
    server = MCPServer(
        "private", log_level="CRITICAL", auth_server_provider=accounts, auth=settings
    )

    @server.tool()
    def hello() -> str:
        """Says hello."""
        return "Hello, you."

    with listening(server.streamable_http_app(), port):
        yield f"{url}/mcp"


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Browser:
    made = Browser()
    monkeypatch.setattr(webbrowser, "open", made.open)
    return made


@pytest.fixture
def servers(db: Database) -> Iterator[ToolServers]:
    made = on_toy(db).tool_servers
    yield made
    made.connections.close()


def test_a_login_is_asked_for_once_and_kept(
    servers: ToolServers, db: Database, address: str, browser: Browser, accounts: Accounts
) -> None:
    (made,) = servers.add("Mine", address)
    assert [tool.name for tool in made.tools] == ["hello"] and len(browser.opened) == 1
    assert browser.shown == tool_logins.THANKS.decode()
    assert servers.call(made, HELLO, Stop()) == "Hello, you."
    (connection,) = servers.connections.open.values()
    assert connection.seconds == tool_connections.CALL_SECONDS, "only a login takes longer"
    servers.connections.close()
    again = on_toy(db).tool_servers
    assert again.call(made, HELLO, Stop()) == "Hello, you." and len(browser.opened) == 1
    again.connections.close()
    accounts.tokens.clear()
    assert again.call(made, HELLO, Stop()) == "Hello, you.", "a token that ended is asked for again"
    assert len(browser.opened) == 2 and len(accounts.clients) == 1
    again.connections.close()
    servers.remove(made.id)
    assert db.execute_read("SELECT count(*) FROM tool_servers")[0][0] == 0


def test_a_login_that_is_damaged_is_asked_for_again(
    servers: ToolServers, db: Database, address: str, browser: Browser
) -> None:
    (made,) = servers.add("Mine", address)
    for damaged in ("nonsense", "[]", '{"tokens": 1, "client": {"redirect_uris": "x"}}'):
        servers.connections.close()
        before = len(browser.opened)
        db.execute_write("UPDATE tool_servers SET login = ?", [damaged])
        assert servers.call(made, HELLO, Stop()) == "Hello, you."
        assert len(browser.opened) == before + 1


def test_a_login_that_is_refused_is_told(
    servers: ToolServers, address: str, browser: Browser, accounts: Accounts
) -> None:
    accounts.refuses = True
    with pytest.raises(ToolError, match="the login was refused: access_denied"):
        servers.add("Mine", address)
    assert browser.shown == tool_logins.REFUSED.decode()
    browser.there = False
    with pytest.raises(ToolError, match="There is no browser here"):
        servers.add("Mine", address)


def test_a_person_has_time_to_log_in_and_not_for_ever(
    servers: ToolServers, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_connections, "CALL_SECONDS", 5.0)
    monkeypatch.setattr(tool_logins, "SECONDS", 0.2)
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    began = time.monotonic()
    with pytest.raises(ToolError, match="gave no answer within 0 s"):
        servers.add("Mine", address)
    assert time.monotonic() - began < 4


def test_only_the_browser_of_this_login_is_heard(
    servers: ToolServers, address: str, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(url: str) -> bool:
        back = httpx.get(url, timeout=20).headers["location"]
        place, _, query = back.partition("?")
        for wrong in (f"{place}?code=1&state=other", f"{place}?code=1", place + "2?" + query):
            assert httpx.get(wrong, timeout=20).status_code == 404
        return browser.open(url)

    monkeypatch.setattr(webbrowser, "open", opened)
    (made,) = servers.add("Mine", address)
    assert servers.call(made, HELLO, Stop()) == "Hello, you."


def test_what_is_no_web_page_is_not_opened(
    servers: ToolServers, address: str, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = tool_logins.Login.ask
    monkeypatch.setattr(
        tool_logins.Login, "ask", lambda self, url: ask(self, f"file:///etc/passwd?{url}")
    )
    with pytest.raises(ToolError, match="which is no web page"):
        servers.add("Mine", address)
    assert browser.opened == []
