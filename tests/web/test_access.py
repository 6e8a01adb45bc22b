"""Every request is checked: whose name it asks for, what for, and who asks."""

import asyncio
import http.client
import json
import re
import socket
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import pytest
from gradio import routes
from starlette.datastructures import Headers

from app.http.access import (
    JOIN,
    MAX_UPLOAD,
    PROGRAMS,
    ROUTES,
    Access,
    Hosts,
    Refusal,
    Route,
    address_of,
    check,
    isolated,
    own_cookie,
)
from app.http.login import LogIns
from app.web import server
from tests.support.blocks import made, serving

PORT = 7860
OWN = f"http://127.0.0.1:{PORT}"
PAGE = {"sec-fetch-site": "same-origin", "sec-fetch-dest": "empty", "sec-fetch-mode": "cors"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}
ASSETS = Path(gr.__file__).parent / "templates" / "frontend" / "assets"


async def reached(scope: Any, receive: Any, send: Any) -> None:
    """An app that lets everything in, with the headers that Gradio would add."""
    headers = [
        (b"access-control-allow-origin", b"http://evil.example"),
        (b"access-control-allow-credentials", b"true"),
        (b"set-cookie", b"access-token-x=t; HttpOnly; Path=/; SameSite=none; Secure"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": scope["query_string"]})


def requested(
    path: str,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    hosts: Hosts | None = None,
    host: str | None = f"127.0.0.1:{PORT}",
    query: str = "",
    allowed: Sequence[Route] = ROUTES,
) -> tuple[int, list[tuple[bytes, bytes]], str]:
    raw = [(b"host", host.encode())] if host is not None else []
    raw += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": raw,
        "client": ("10.0.0.1", 1),
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    access = Access(reached, hosts or Hosts("127.0.0.1", PORT), LogIns(), allowed)
    asyncio.run(access(scope, receive, send))
    start, *rest = sent
    return start["status"], start["headers"], b"".join(m["body"] for m in rest).decode()


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7860", "localhost:7860", "LOCALHOST:7860", "[::1]:7860"]
)
def test_the_names_of_this_machine_are_let_in(host: str) -> None:
    assert requested("/", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("x.localhost:7860", "localhost.:7860", "127.0.0.1.:7860", "evil.example:7860"),
        *("127.0.0.1", "127.0.0.1:80", "127.0.0.1:7861", "localhost", "0.0.0.0:7860", "127.1:7860"),
        *(
            "2130706433:7860",
            "[::]:7860",
            "[::ffff:127.0.0.1]:7860",
            "localhost:7860@evil",
            "",
            None,
        ),
        *("evil.example#localhost:7860", "127.0.0.1:7860, evil.example", "192.168.1.5:7860"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/theme.css", "/gradio_api/queue/data"])
def test_every_other_name_is_refused_and_the_right_one_named(host: str | None, path: str) -> None:
    status, _, text = requested(path, host=host)
    assert status == 421 and f"http://127.0.0.1:{PORT}" in text and "--host" in text


def test_two_hosts_are_none_and_the_default_port_of_http_is_not_written() -> None:
    assert requested("/", {"host": f"127.0.0.1:{PORT}"})[0] == 421
    hosts = Hosts("127.0.0.1", 80)
    assert requested("/", hosts=hosts, host="127.0.0.1")[0] == 200
    assert requested("/", {"origin": "http://localhost"}, hosts=hosts, host="localhost")[0] == 200


@pytest.mark.parametrize(
    ("given", "host", "status"),
    [
        ("my.lan", "my.lan:7860", 200),
        ("my.lan", f"{socket.gethostname().lower()}:7860", 200),
        ("my.lan", "other.lan:7860", 421),
        ("my.lan", "192.168.1.5:7860", 421),
        ("192.168.1.5", "192.168.1.5:7860", 200),
        ("192.168.1.5", "192.168.1.6:7860", 421),
        ("0.0.0.0", "192.168.1.5:7860", 200),
        ("0.0.0.0", "[fe80::1]:7860", 200),
        ("::", "[fe80::1]:7860", 200),
        ("0.0.0.0", "fe80::1:7860", 421),
        ("0.0.0.0", "192.168.1.5:80", 421),
        ("0.0.0.0", "evil.example:7860", 421),
        ("0.0.0.0", "192.168.1.5.evil.example:7860", 421),
        ("0.0.0.0", "[zzz]:7860", 421),
    ],
)
def test_a_server_for_others_answers_under_its_addresses(
    given: str, host: str, status: int
) -> None:
    assert requested("/", hosts=Hosts(given, PORT), host=host)[0] == status


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/"),
        ("::1", "http://[::1]:80/"),
        ("0.0.0.0", "http://localhost:80/"),
        ("::", "http://[::1]:80/"),
    ],
)
def test_an_address_is_one_that_a_browser_opens(host: str, address: str) -> None:
    assert address_of(host, 80) == address


def test_a_share_link_is_let_in_once_it_is_known() -> None:
    hosts = Hosts("127.0.0.1", PORT)
    link = {"hosts": hosts, "host": "abc123.gradio.live"}
    assert requested("/", **link)[0] == 421
    hosts.share("https://abc123.gradio.live")
    assert requested("/", **link)[0] == 200
    body = {**PAGE, "content-length": "2"}
    for origin, status in (
        ("https://abc123.gradio.live", 200),
        ("http://abc123.gradio.live", 403),
        ("https://other.gradio.live", 403),
    ):
        sent = {**body, "origin": origin}
        assert requested("/gradio_api/queue/join", sent, "POST", **link)[0] == status
    assert requested("/", hosts=hosts, host="other.gradio.live")[0] == 421
    _, headers, _ = requested(
        "/login", {**body, "origin": "https://abc123.gradio.live"}, "POST", **link
    )
    (cookie,) = (value for name, value in headers if name == b"set-cookie")
    assert b"Secure" in cookie and b"SameSite=Lax" in cookie and b"HttpOnly" in cookie


DATA = (
    "/gradio_api/queue/data",
    "/gradio_api/heartbeat/abc",
    "/gradio_api/app_id",
    "/stream/a-B_9",
    "/revision/a-B_9",
    "/shared",
)
POSTS = ("/gradio_api/queue/join", "/shared/a-B_9", "/gradio_api/upload", "/login", "/logout")
"""The last one is answered here; the app sees the others."""
FOREIGN = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": f"http://localhost:{PORT}"},
    {"origin": "http://127.0.0.1:9000"},
    {"origin": f"https://127.0.0.1:{PORT}"},
    {"origin": f"http://127.0.0.1:{PORT}.evil.example"},
    {"origin": ""},
    {**PAGE, "sec-fetch-site": "cross-site"},
    {**PAGE, "sec-fetch-site": "same-site"},
    {**PAGE, "sec-fetch-site": ""},
    {**LINK, "sec-fetch-dest": "iframe"},
)


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", ["/", "/theme.css", "/assets/a.js", "/vendor/0a/b", *DATA, *POSTS])
def test_other_origins_are_refused_on_every_route(path: str, headers: dict[str, str]) -> None:
    method = "POST" if path in POSTS else "GET"
    status, answered, _ = requested(path, {**headers, "content-length": "2"}, method)
    assert status == 403
    assert not [name for name, _ in answered if name.startswith(b"access-control")]


@pytest.mark.parametrize("path", ["/theme.css", *DATA, *POSTS[:-1]])
def test_the_page_itself_may_ask(path: str) -> None:
    method = "POST" if path in POSTS else "GET"
    assert requested(path, {**PAGE, "origin": OWN, "content-length": "2"}, method)[0] == 200
    assert requested(path, {**PAGE, "content-length": "2"}, method)[0] == 200


def test_a_link_opens_the_page_and_nothing_else() -> None:
    assert requested("/", LINK)[0] == 200
    assert requested("/", {**LINK, "sec-fetch-site": "none"})[0] == 200
    assert {requested(path, LINK)[0] for path in ("/theme.css", *DATA)} == {403}


@pytest.mark.parametrize("expected", ["image", "script", "iframe", "document", "style", "video"])
@pytest.mark.parametrize("path", DATA)
def test_contents_of_the_page_reach_no_data(path: str, expected: str) -> None:
    assert requested(path, {**PAGE, "sec-fetch-dest": expected})[0] == 403


def test_programs_may_look_and_not_change() -> None:
    assert {requested(path)[0] for path in ("/", "/theme.css", *DATA)} == {200}
    assert {requested(path, {"content-length": "2"}, "POST")[0] for path in POSTS} == {403}


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("/login", "8193", 413),
        ("/login", "8192", 200),
        ("/gradio_api/queue/join", str(2**23 + 1), 413),
        ("/shared/a-B_9", "8193", 413),
        ("/gradio_api/upload", str(2 * MAX_UPLOAD), 413),
        ("/gradio_api/upload", str(MAX_UPLOAD), 200),
        ("/gradio_api/upload", "-1", 411),
        ("/gradio_api/upload", "²", 411),
        ("/gradio_api/upload", None, 411),
    ],
)
def test_bodies_have_a_limit(path: str, length: str | None, status: int) -> None:
    headers = {**PAGE, "content-length": length} if length is not None else PAGE
    assert requested(path, headers, "POST")[0] == status


def test_the_page_learns_in_its_own_format_that_something_is_too_long() -> None:
    sent = {**PAGE, "origin": OWN, "content-length": str(9 << 20)}
    status, _, body = requested(JOIN, sent, "POST")
    assert status == 413
    assert json.loads(body)["error"] == "9,437,184 bytes are too many. Send at most 8,388,608."


def test_the_page_is_given_no_question() -> None:
    assert requested("/", query="deep_link=x&all_endpoints=1")[2] == ""
    assert requested("/gradio_api/queue/data", query="session_hash=x")[2] == "session_hash=x"


def all_of_gradio() -> list[tuple[str, str]]:
    """Every route that Gradio serves, with values for what its paths leave open."""
    with gr.Blocks() as blocks:
        gr.HTML()
    blocks.run_history = True
    return [
        (method, re.sub(r"\{\w+(:path)?\}", "abc", route.path))
        for found in gr.routes.App.create_app(blocks).routes
        for route in getattr(getattr(found, "original_router", None), "routes", [found])
        for method in route.methods
    ]


def test_of_gradios_routes_only_those_that_the_page_needs_exist() -> None:
    gradio_routes = made(all_of_gradio, apps=True)
    assert len(gradio_routes) > 80
    own = {**PAGE, "origin": OWN, "content-length": "2"}
    there = {
        f"{m} {path}" for m, path in gradio_routes if requested(path, own, m)[0] not in (404, 403)
    }
    api = "app_id heartbeat/abc queue/data startup-events theme.css"
    assert there - {"GET /", "HEAD /"} == {
        *(f"GET /gradio_api/{name}" for name in api.split()),
        *("GET /assets/abc", "GET /static/abc", "GET /theme.css", "GET /favicon.ico"),
        *("GET /manifest.json", "GET /pwa_icon"),
        *("POST /gradio_api/queue/join", "POST /gradio_api/upload", "POST /login"),
    }


def test_every_file_of_gradios_page_can_be_had() -> None:
    names = [path.name for path in ASSETS.iterdir()]
    assert len(names) > 100
    assert {requested(f"/assets/{name}")[0] for name in names} == {200}


TARGET = "http://127.0.0.1:9/x"
TARGETS = (
    *(TARGET, quote(TARGET, safe=""), quote(quote(TARGET, safe=""), safe="")),
    *("//127.0.0.1:9/x", "\\\\127.0.0.1:9\\x", "hTTp:\\127.0.0.1:9", "/etc/passwd", "../x"),
)


@pytest.mark.parametrize("name", ["file", "FILE", "File", "%66ile", "proxy"])
@pytest.mark.parametrize("prefix", ["/gradio_api/", "//gradio_api/", "/assets/../gradio_api/", "/"])
def test_no_spelling_makes_the_server_fetch(prefix: str, name: str) -> None:
    hosts = Hosts("127.0.0.1", PORT)
    for between, target in product(["=", "/", "%3D", "=/", "=//", "=\\", "%2f"], TARGETS):
        for headers in (PAGE, {}, {**PAGE, "sec-fetch-dest": "image"}):
            path = prefix + name + between + target
            with pytest.raises(Refusal) as refused:
                check(hosts, "GET", path, Headers({"host": f"127.0.0.1:{PORT}", **headers}))
            assert refused.value.status == 404, path


def test_the_server_fetches_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths as they are sent, which the web server decodes before they are looked at."""
    fetched: list[str] = []

    async def fetch(url: str, request: object) -> object:
        fetched.append(url)
        return routes.PlainTextResponse("fetched")

    monkeypatch.setattr(routes, "secure_url_stream_response", fetch)
    target = "http://198.51.100.7/x"
    encoded = target.replace(":", "%3A").replace("/", "%2F")
    spelled = [target, encoded, encoded.replace("%", "%25"), "hTTp:%5C%5C198.51.100.7", "//a/b"]
    names = ("file=", "%66ile=", "file%3D", "file/", "file%3d/", "proxy=")
    statuses = set()
    with serving() as page:
        for path in [f"/gradio_api/{name}{target}" for name in names for target in spelled]:
            connection = http.client.HTTPConnection(page.address.removeprefix("http://"))
            connection.putrequest("GET", path)
            connection.endheaders()
            statuses.add(connection.getresponse().status)
            connection.close()
    assert fetched == [] and statuses == {404}


@pytest.mark.parametrize("path", ["/assets/../x", "/static/a/../../x", "/assets/..", "/a\n", "/\n"])
def test_no_path_climbs(path: str) -> None:
    assert requested(path)[0] == 404


def test_sockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"127.0.0.1:7860")]}
    access = Access(reached, Hosts("127.0.0.1", PORT), LogIns())
    asyncio.run(access(scope, reached, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("path", ["/", "/nowhere", "/theme.css"])
def test_every_answer_forbids_frames_and_foreign_readers(path: str) -> None:
    headers = {name.decode(): value.decode() for name, value in requested(path)[1]}
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "default-src 'self'" in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("application/json", True),
        ("text/event-stream; charset=utf-8", True),
        ("text/html; charset=utf-8", False),
        ("image/svg+xml", False),
        ("text/javascript", False),
    ],
)
def test_what_is_no_page_shows_and_loads_nothing(kind: str, data: bool) -> None:
    headers = dict(isolated([(b"Content-Type", kind.encode())], False))
    policy = headers[b"content-security-policy"].decode()
    assert ("default-src 'none'" in policy) is data and "frame-ancestors 'none'" in policy
    assert headers[b"x-content-type-options"] == b"nosniff"


@pytest.mark.parametrize(
    ("cookie", "secure", "kept"),
    [
        ("a=b; HttpOnly; Path=/; SameSite=none; Secure", True, ["HttpOnly", "Lax", "Secure"]),
        ("a=b; Path=/", True, ["HttpOnly", "Lax", "Secure"]),
        ("a=b; HttpOnly; Path=/; SameSite=lax", False, ["HttpOnly", "Lax"]),
    ],
)
def test_cookies_keep_to_this_site(cookie: str, secure: bool, kept: list[str]) -> None:
    made = own_cookie(cookie, secure)
    assert made.startswith("a=b;") and all(word in made for word in kept)
    assert "none" not in made.lower() and ("Secure" in made) == ("Secure" in kept)


def test_access_stands_before_all_other_layers() -> None:
    """Gradio's own layer would answer a foreign page's question whether it may ask."""

    async def served() -> Any:
        app = server.Server(lambda inner: Access(inner, Hosts("127.0.0.1", PORT), LogIns()))
        app.add_middleware(gr.route_utils.CustomCORSMiddleware)
        return app.build_middleware_stack()

    assert isinstance(asyncio.run(served()), Access)


PROGRAM = ("/v1/models", "/v1/models/org/some name", "/health", "/metrics")
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")


def test_programs_ask_on_routes_of_their_own() -> None:
    for path in PROGRAM:
        assert requested(path)[0] == 200 and requested(path, method="POST")[0] == 404
    for path in COMPLETIONS:
        assert requested(path, {"content-length": "2"}, "POST")[0] == 200
        assert requested(path, {}, "POST")[0] == 200, "how long it is, the reader counts"
        assert requested(path, {"content-length": str(2**23 + 1)}, "POST")[0] == 413
    assert {requested(path)[0] for path in ("/v1", "/v1/", "/v1/files", "/v1/../x")} == {404}


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("path", [*PROGRAM, *COMPLETIONS])
def test_a_foreign_page_is_no_program(path: str, headers: dict[str, str]) -> None:
    method = "POST" if path in COMPLETIONS else "GET"
    status, answered, text = requested(path, {**headers, "content-length": "2"}, method)
    assert status == 403 and json.loads(text)["error"]["type"] == "permission_error"
    assert not [name for name, _ in answered if name.startswith(b"access-control")]
    assert requested(path, headers, "OPTIONS")[0] in (403, 404)


def test_under_a_foreign_name_programs_are_refused_in_their_own_words() -> None:
    status, _, text = requested("/v1/models", host="evil.example:7860")
    assert status == 421 and "127.0.0.1" in json.loads(text)["error"]["message"]


def test_an_api_alone_has_no_other_route() -> None:
    paths = [*PROGRAM, "/", "/theme.css", "/stream/a", "/gradio_api/queue/data"]
    found = {path: requested(path, allowed=PROGRAMS)[0] for path in paths}
    assert {path for path, status in found.items() if status == 200} == set(PROGRAM)
    assert set(found.values()) == {200, 404}
