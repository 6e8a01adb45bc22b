"""Who may ask this server for what. Every request is checked before Gradio sees it.

Three questions, in this order. Is the name in `Host` one of ours? A page whose own name was made to
lead to this machine sends its own name, so it is refused. Is it a route that our page needs? Gradio
serves dozens more, which fetch addresses, hand out files or end sessions; they do not exist here.
Does our own page ask? Browsers say from where a request comes (`Origin`) and what for
(`Sec-Fetch-*`), and no page can make them lie. All answers forbid frames, foreign contents and
foreign readers.

Other programs have routes of their own (`PROGRAMS`): they name no origin, and show a key instead
(app/api/gate.py). A page of another origin may ask there only where the owner of this server named
it, and then needs a key as well.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import SimpleCookie
from urllib.parse import urlsplit

from app.arguments import is_local
from app.http.asgi import App, Headers, Message, Pairs, Receive, Send, answer
from app.http.login import LogIns
from app.http.problems import encoded, problem

LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "media-src 'self' data: blob:; connect-src 'self'; worker-src 'self' blob:; "
    "frame-src 'none'; frame-ancestors 'none'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'"
)
"""Nothing is loaded from elsewhere, whatever an answer or an imported conversation asks for, and
nothing elsewhere frames the page. Gradio itself needs inline and evaluated scripts."""
DATA = (b"application/json", b"text/event-stream")
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
"""Of what is no page, nothing is shown and nothing loaded. It is also short: an answer on the page
takes several of these, and their headers are longer than what they say."""
HEADERS = (
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-robots-tag", b"noindex"),
)
MEGABYTE = 2**20
MAX_UPLOAD, GUESTS_UPLOAD = 128 * MEGABYTE, 32 * MEGABYTE
"""An export of thousands of conversations is large; reading it takes several times its size."""
MAX_REQUEST = 8 * MEGABYTE
"""Of another program: more than any context holds."""
CORS: Pairs = (
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type"),
    (b"access-control-max-age", b"600"),
)


@dataclass(frozen=True, slots=True)
class Route:
    """Paths that the page needs, or other `programs`. `wanted` is what a browser may want them for
    (the value of Sec-Fetch-Dest; all when empty); `longest` is how many bytes may be sent there."""

    methods: frozenset[str]
    path: re.Pattern[str]
    wanted: str = ""
    longest: int = 0
    programs: bool = False


def route(
    methods: str, path: str, wanted: str = "", longest: int = 0, programs: bool = False
) -> Route:
    """A route from plain words."""
    return Route(frozenset(methods.split()), re.compile(path), wanted, longest, programs)


PAGE = route("GET HEAD", "/", "document")
PROGRAMS = (
    route("GET", r"/v1/models(?:/.+)?|/health|/metrics", programs=True),
    route("POST", r"/v1/(?:chat/)?completions", longest=MAX_REQUEST, programs=True),
)
"""What other programs ask for. Whether they may, app/api/gate.py says."""
ROUTES = (
    PAGE,
    route("GET", r"/(?:assets|static)/[\w./-]+|/(?:gradio_api/)?theme\.css"),
    route("GET", r"/favicon\.ico|/manifest\.json|/pwa_icon"),
    route("GET", r"/gradio_api/(?:queue/data|app_id|heartbeat/\w+|startup-events)", "empty"),
    route("GET", r"/(?:stream|revision|download)/[\w-]+", "empty"),
    route("GET", r"/vendor/[\w./-]+|/chat/\w+\.js"),
    route("POST", r"/gradio_api/queue/join", "empty", 8 * MEGABYTE),
    route("POST", r"/gradio_api/upload", "empty", MAX_UPLOAD + MEGABYTE),
    route("POST", r"/log(?:in|out)", "empty", 8192),
    *PROGRAMS,
)
"""All that exists. What changes or tells something is asked for by the page's script alone: its
`wanted` shuts out images, forms and links that an answer or an import brings."""


class Refusal(Exception):
    """Why a request is refused, as it is told to who asked."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


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
        """Let in by this address too: a link that others were given."""
        parts = urlsplit(address)
        self.origins[parts.netloc.lower()] = f"{parts.scheme}://{parts.netloc.lower()}"

    def origin(self, host: str) -> str | None:
        """The origin of a page opened under this Host; None for a name that is not ours.

        A server that listens on all addresses cannot know how it is reached, so all of them
        will do: no foreign page can be of an origin that is an address of this machine.
        """
        host = host.lower()
        if self.everywhere and host not in self.origins and is_address(host, self.port):
            return f"http://{host}"
        return self.origins.get(host)


def spelled(name: str, port: int) -> list[str]:
    """How browsers write a name in Host and Origin."""
    written = f"[{name}]" if ":" in name else name
    return [f"{written}:{port}"] + ([written] if port == 80 else [])


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses."""
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


class Access:
    """See the module's docstring. `log_ins` lets in and out where a password is asked for; pages of
    these `origins` may ask what `routes` offer to programs."""

    def __init__(
        self,
        app: App,
        hosts: Hosts,
        log_ins: LogIns,
        routes: Sequence[Route] = ROUTES,
        origins: Sequence[str] = (),
    ) -> None:
        self.app, self.hosts, self.log_ins = app, hosts, log_ins
        self.routes, self.origins = routes, frozenset(origins)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers, method, path = Headers(scope["headers"]), scope["method"], scope["path"]
        origin = headers.one("origin") if for_programs(path) else ""
        named = origin if origin in self.origins else ""
        asks_first = bool(named) and method == "OPTIONS"
        if asks_first:
            method = headers.one("access-control-request-method")
        secure = (self.hosts.origin(headers.one("host")) or "").startswith("https:")

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = kept_to_itself(message.get("headers", ()), secure)
                message["headers"] = [*kept, *opened(named)]
            await send(message)

        try:
            check(self.hosts, method, path, headers, self.routes, named)
        except Refusal as refusal:
            await refuse(sealed, path, refusal)
            return
        if asks_first:
            await answer(sealed, 200, "")
            return
        if scope["path"] == "/":
            scope["query_string"] = b""
        if scope["path"] == "/logout":
            await self.log_ins.leave(scope["app"].tokens, headers, sealed)
        elif scope["path"] == "/login":
            await self.log_ins.enter(self.app, scope, receive, sealed)
        else:
            await self.app(scope, receive, sealed)


def for_programs(path: str) -> bool:
    """Whether other programs ask for it, and read errors in a shape of their own."""
    return path.startswith("/v1/") or path in ("/v1", "/metrics", "/health")


async def refuse(send: Send, path: str, refusal: Refusal) -> None:
    """Tell who asked."""
    if not for_programs(path):
        await answer(send, refusal.status, refusal.words)
        return
    body = encoded(problem(refusal.status, refusal.words)).decode()
    await answer(send, refusal.status, body, kind=b"application/json")


def opened(origin: str) -> list[tuple[bytes, bytes]]:
    """The headers that let a page of this origin read an answer."""
    if not origin:
        return []
    named = (b"access-control-allow-origin", origin.encode("latin-1"))
    return [named, (b"vary", b"origin"), *CORS]


def check(
    hosts: Hosts,
    method: str,
    path: str,
    headers: Headers,
    routes: Sequence[Route] = ROUTES,
    named: str = "",
) -> None:
    """Raises Refusal for a request that neither our page would send nor a program. `named` is the
    foreign origin that asks, where it may."""
    own = hosts.origin(headers.one("host"))
    if own is None:
        raise Refusal(
            421,
            f"This server does not answer under the name {headers.one('host')!r}. "
            f"Open http://127.0.0.1:{hosts.port} on its own machine. From others, open the address "
            "that was given with --host, or the link of --share. The port must be "
            f"{hosts.port} on both sides of a forwarding.",
        )
    found = next((r for r in routes if method in r.methods and r.path.fullmatch(path)), None)
    if found is None or ".." in path:
        raise Refusal(404, f"There is nothing at {path!r} to {method}.")
    if not named:
        check_source(found, method, own, headers)
    if found.longest and not (found.programs and not headers.has("content-length")):
        check_length(found.longest, headers)


def check_source(found: Route, method: str, own: str, headers: Headers) -> None:
    """Raises Refusal where another page asks, or this one for something else. Programs that are no
    browser say nothing of the kind; they may look, and not change anything."""
    origin, site, wanted = (headers.one(n) for n in ("origin", "sec-fetch-site", "sec-fetch-dest"))
    opens = found is PAGE and headers.one("sec-fetch-mode") == "navigate"
    if headers.has("origin") and origin != own:
        raise Refusal(403, f"Only pages of {own} may ask for this, and {origin!r} is not one.")
    if headers.has("sec-fetch-site") and site not in ("same-origin", "none") and not opens:
        raise Refusal(403, f"Only pages of {own} may ask for this.")
    if headers.has("sec-fetch-dest") and found.wanted not in ("", wanted):
        raise Refusal(403, f"This is not there to be shown as {wanted!r}.")
    names_itself = headers.has("origin") or site == "same-origin"
    if method == "POST" and not names_itself and not found.programs:
        raise Refusal(403, f"Only the page itself may send this. Open {own} in a browser.")


def check_length(longest: int, headers: Headers) -> None:
    """Raises Refusal for a body that is too long, or may be, before it is read."""
    length = headers.one("content-length")
    if not length.isdecimal():
        raise Refusal(411, "The length of what is sent is missing.")
    if int(length) > longest:
        raise Refusal(413, f"{int(length):,} bytes are too many. Send at most {longest:,}.")


def kept_to_itself(headers: Pairs, secure: bool) -> list[tuple[bytes, bytes]]:
    """The headers of an answer: no other origin reads it, frames it or sends its cookies."""
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
    """A cookie that no script reads and no other site's request carries."""
    parsed: SimpleCookie = SimpleCookie(cookie)
    for morsel in parsed.values():
        morsel["httponly"], morsel["samesite"] = True, "Lax"
        morsel["secure"] = secure or morsel["secure"]
    return "; ".join(morsel.OutputString() for morsel in parsed.values())
