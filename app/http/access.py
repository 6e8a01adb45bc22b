"""Access rules: every request is checked before Gradio sees it.

There are three checks, in this order. First, the name in `Host` must be one of ours: a page whose
DNS name was pointed at this machine sends its own name, so it is refused. Second, the route must be
one that our page needs: Gradio serves dozens of others, which fetch addresses, hand out files or
end sessions; they do not exist here. Third, the request must come from our own page: browsers send
its origin (`Origin`) and its purpose (`Sec-Fetch-*`), which no page can forge. All responses forbid
frames, foreign contents and foreign readers.

Other programs have their own routes (`PROGRAMS`): they send no origin, and show a key instead
(`Gate` in app/api/routes.py). A page of another origin may use these only if the owner of this
server named its origin, and needs a key as well.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from errno import EACCES, EADDRINUSE
from http.cookies import SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.arguments import FIRST_PORT, PORTS_TRIED, is_local
from app.http.login import LogIns
from app.http.problems import encoded, problem
from engine.errors import SettingError
from engine.settings import shortened

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self'; worker-src 'self' blob:; "
    "frame-src 'none'; frame-ancestors 'none'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'"
)
"""Nothing is loaded from other origins, whatever an answer or an imported conversation contains,
and no other origin can frame the page. Gradio itself needs inline and evaluated scripts."""
DATA = (b"application/json", b"text/event-stream")
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
"""The policy for responses that are no page: nothing is shown or loaded. It is short because an
answer on the page takes several such responses, whose headers are longer than their content."""
HEADERS = (
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-robots-tag", b"noindex"),
)
NO_STORE = {"cache-control": "no-store"}
MEGABYTE = 2**20
MAX_UPLOAD, GUESTS_UPLOAD = 128 * MEGABYTE, 32 * MEGABYTE
"""An export of thousands of conversations is large; reading it takes several times its size."""
MAX_REQUEST = 8 * MEGABYTE
"""The largest request of another program, which is more than any context holds."""
CORS = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
)


@dataclass(frozen=True, slots=True)
class Route:
    """Paths that the page needs, or other `programs`. `destination` is the only Sec-Fetch-Dest with
    which a browser may request them, or "" for any; `longest` is the most bytes of a body."""

    methods: str
    path: str
    destination: str = ""
    longest: int = 0
    programs: bool = False

    def fits(self, method: str, path: str) -> bool:
        return method in self.methods.split() and bool(re.fullmatch(self.path, path))


JOIN = "/gradio_api/queue/join"
"""The path to which the page sends its events."""
PAGE = Route("GET HEAD", "/", "document")
PROGRAMS = (
    Route("GET HEAD", r"/v1/models(?:/.+)?|/health|/metrics", programs=True),
    Route(
        "POST",
        r"/v1/(?:(?:chat/)?completions|messages(?:/count_tokens)?|responses)",
        longest=MAX_REQUEST,
        programs=True,
    ),
)
"""The routes for other programs. `Gate` in app/api/routes.py decides whether a program may use
them."""
ROUTES = (
    PAGE,
    Route("GET", r"/(?:assets|static)/[\w./-]+|/(?:gradio_api/)?theme\.css"),
    Route("GET", r"/favicon\.ico|/manifest\.json|/pwa_icon"),
    Route("GET", r"/gradio_api/(?:queue/data|app_id|heartbeat/\w+|startup-events)", "empty"),
    Route("GET", r"/(?:stream|revision|download)/[\w-]+", "empty"),
    Route("GET", "/shared", "empty"),
    Route("POST", r"/shared/[\w-]+", "empty", 8192),
    Route("GET", r"/vendor/[\w./-]+|/(?:chat|shared)/\w+\.js"),
    Route("POST", JOIN, "empty", 8 * MEGABYTE),
    Route("POST", r"/gradio_api/upload", "empty", MAX_UPLOAD + MEGABYTE),
    Route("POST", r"/log(?:in|out)", "empty", 8192),
    *PROGRAMS,
)
"""All routes. Only the page's script may use those that change or reveal data: their `destination`
excludes images, forms and links that an answer or an import may contain."""


class Refusal(Exception):
    """Why a request is refused: the status and the text of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Hosts:
    """The names under which the page may be opened, each with the origin of its pages."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        names = {*LOOPBACK, host.strip("[]").lower()}
        if not is_local(host):
            own = socket.gethostname().lower()
            names |= {own, f"{own}.local"}
        self.origins = {
            written: f"http://{written}" for name in names for written in spelled(name, port)
        }
        self.everywhere = is_wildcard(host)

    def share(self, address: str) -> None:
        """Also accept this address, a link that others were given."""
        parts = urlsplit(address)
        self.origins[parts.netloc.lower()] = f"{parts.scheme}://{parts.netloc.lower()}"

    def origin(self, host: str) -> str | None:
        """The origin of a page opened under this Host; None for a name that is not ours.

        A server that listens on all addresses cannot know by which one it is reached, so it accepts
        every numeric address: no foreign page can have an origin that is an address of this
        machine.
        """
        host = host.lower()
        if self.everywhere and host not in self.origins and is_address(host, self.port):
            return f"http://{host}"
        return self.origins.get(host)


def spelled(name: str, port: int) -> list[str]:
    written = bracketed(name)
    return [f"{written}:{port}"] + ([written] if port == 80 else [])


def bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def address_of(host: str, port: int) -> str:
    """The web address of a server that listens on `host`; on this machine if on all addresses."""
    if is_wildcard(host):
        host = "::1" if ":" in host else "localhost"
    return f"http://{bracketed(host)}:{port}/"


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_address(host: str, port: int) -> bool:
    """Whether a Host names an address and this port, in the one way that browsers write them."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return host in spelled(str(ipaddress.ip_address(name)), port)
    except ValueError:
        return False


def pick_port(host: str, requested: int | None) -> int:
    """The requested port, or a free one for None and 0. Raises SettingError if there is none."""
    usual = range(FIRST_PORT, FIRST_PORT + PORTS_TRIED) if requested is None else ()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    why, is_port = "", False
    for port in (*usual, requested or 0):
        try:
            with socket.create_server((host, port), family=family) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            why = error.strerror or str(error)
            is_port = error.errno in (EADDRINUSE, EACCES)
    if requested and is_port:
        raise SettingError(
            f"{host}:{requested} cannot be listened on: the port is in use, or reserved by the "
            "system. Choose another with --port, or leave it out."
        )
    raise SettingError(
        f"The address {host!r} cannot be listened on ({why}). Give an address of this machine with "
        "--host."
    )


class Access:
    """See the module's docstring. `log_ins` handles logging in and out if there is a password.
    Pages of these `origins` may use the `routes` for programs."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Hosts,
        log_ins: LogIns,
        routes: Sequence[Route] = ROUTES,
        origins: Sequence[str] = (),
    ) -> None:
        self.app, self.hosts, self.log_ins = app, hosts, log_ins
        self.routes, self.origins = routes, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        origin = only(headers, "origin") if for_programs(path) else ""
        named = origin if origin in self.origins else ""
        asks_first = bool(named) and method == "OPTIONS"
        if asks_first:
            method = only(headers, "access-control-request-method")
        sends = only(headers, "access-control-request-headers") if asks_first else ""
        secure = (self.hosts.origin(only(headers, "host")) or "").startswith("https:")

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = isolated(message.get("headers", ()), secure)
                message["headers"] = [*kept, *opened(named, sends)]
            await send(message)

        try:
            check(self.hosts, method, path, headers, self.routes, named)
        except Refusal as refusal:
            await refused(path, refusal)(scope, receive, sealed)
            return
        if asks_first:
            await PlainTextResponse("", headers=NO_STORE)(scope, receive, sealed)
            return
        if path == "/":
            scope["query_string"] = b""
        if path == "/logout":
            response = self.log_ins.leave(scope["app"].tokens, only(headers, "cookie"))
            await response(scope, receive, sealed)
        elif path == "/login":
            await self.log_ins.enter(self.app, scope, receive, sealed)
        else:
            await self.app(scope, receive, sealed)


def for_programs(path: str) -> bool:
    """Whether a path is for other programs, which read errors in OpenAI's format."""
    return path.startswith("/v1/") or path in ("/v1", "/metrics", "/health")


def refused(path: str, refusal: Refusal) -> Response:
    if path == JOIN:  # The page's script reads JSON.
        body = encoded({"error": refusal.message, "detail": refusal.message})
    elif for_programs(path):
        body = encoded(problem(refusal.status, refusal.message))
    else:
        text = refusal.message.encode("utf-8", "replace")
        return PlainTextResponse(text, refusal.status, NO_STORE)
    return Response(body, refusal.status, NO_STORE, "application/json")


def only(headers: Headers, name: str) -> str:
    """A header's value; "" if it is missing or given twice."""
    found = headers.getlist(name)
    return found[0].strip() if len(found) == 1 else ""


def opened(origin: str, sends: str) -> list[tuple[bytes, bytes]]:
    """The headers that let a page of this origin read a response, and send the headers whose names
    it asks for: clients have their own, which change nothing here."""
    if not origin:
        return []
    named = (b"access-control-allow-origin", origin.encode("latin-1"))
    allowed = [(b"access-control-allow-headers", sends.encode("latin-1"))] if sends else []
    return [named, (b"vary", b"origin"), *CORS, *allowed]


def check(
    hosts: Hosts,
    method: str,
    path: str,
    headers: Headers,
    routes: Sequence[Route] = ROUTES,
    named: str = "",
) -> None:
    """Raise Refusal for a request that neither our page nor a program would send. `named` is the
    foreign origin of the request, if the owner allowed it."""
    own = hosts.origin(only(headers, "host"))
    if own is None:
        raise Refusal(
            421,
            f"This server does not answer under the name {only(headers, 'host')!r}. "
            f"Open http://127.0.0.1:{hosts.port} on its own machine. From others, open the address "
            "that was given with --host, or the link of --share. The port must be "
            f"{hosts.port} on both sides of a forwarding.",
        )
    found = next((route for route in routes if route.fits(method, path)), None)
    if found is None or ".." in path:
        raise Refusal(404, f"There is nothing at {shortened(path)} to {method}.")
    if not named:
        check_source(found, method, own, headers)
    if found.longest and not (found.programs and "content-length" not in headers):
        check_length(found.longest, headers)


def check_source(found: Route, method: str, own: str, headers: Headers) -> None:
    """Raise Refusal for a request of another page, or of this page for another purpose. Programs
    other than browsers send no such headers; they may read, but not change anything."""
    origin, site, destination = (
        only(headers, n) for n in ("origin", "sec-fetch-site", "sec-fetch-dest")
    )
    opens = found is PAGE and only(headers, "sec-fetch-mode") == "navigate"
    if "origin" in headers and origin != own:
        raise Refusal(403, f"Only pages of {own} may ask for this, and {origin!r} is not one.")
    if "sec-fetch-site" in headers and site not in ("same-origin", "none") and not opens:
        raise Refusal(403, f"Only pages of {own} may ask for this.")
    if "sec-fetch-dest" in headers and found.destination not in ("", destination):
        raise Refusal(403, f"This cannot be shown as {destination!r}.")
    names_itself = "origin" in headers or site == "same-origin"
    if method == "POST" and not names_itself and not found.programs:
        raise Refusal(403, f"Only the page itself may send this. Open {own} in a browser.")


def check_length(longest: int, headers: Headers) -> None:
    """Raise Refusal for a body that is too long, or of unknown length, before it is read."""
    length = only(headers, "content-length")
    if not length.isdecimal():
        raise Refusal(411, "The length of what is sent is missing.")
    if int(length) > longest:
        raise Refusal(413, f"{int(length):,} bytes are too many. Send at most {longest:,}.")


def isolated(headers: Iterable[tuple[bytes, bytes]], secure: bool) -> list[tuple[bytes, bytes]]:
    """The headers of a response, extended so that no other origin can read it, frame it or send its
    cookies."""
    kept, policy = [], POLICY
    for name, value in headers:
        if name.lower() == b"content-type" and value.split(b";")[0].strip() in DATA:
            policy = DATA_POLICY
        if name.lower() == b"set-cookie":
            kept.append((name, own_cookie(value.decode("latin-1"), secure).encode("latin-1")))
        elif not name.lower().startswith(b"access-control-"):
            kept.append((name, value))
    return [*kept, (b"content-security-policy", policy.encode()), *HEADERS]


def own_cookie(cookie: str, secure: bool) -> str:
    """A cookie that scripts cannot read and that requests of other sites do not carry."""
    parsed: SimpleCookie = SimpleCookie(cookie)
    for morsel in parsed.values():
        morsel["httponly"], morsel["samesite"] = True, "Lax"
        morsel["secure"] = secure or morsel["secure"]
    return "; ".join(morsel.OutputString() for morsel in parsed.values())
