"""What the server's own layers need of ASGI: types, a request's headers, a short answer."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Pairs = Iterable[tuple[bytes, bytes]]


class Headers:
    """The headers of a request."""

    def __init__(self, raw: Pairs) -> None:
        self.raw = [(name.lower(), value.decode("latin-1").strip()) for name, value in raw]

    def one(self, name: str) -> str:
        """A header's value; "" where it is missing or comes twice."""
        found = [value for key, value in self.raw if key == name.encode()]
        return found[0] if len(found) == 1 else ""

    def has(self, name: str) -> bool:
        """Whether it was sent."""
        return any(key == name.encode() for key, _ in self.raw)


PLAIN = b"text/plain; charset=utf-8"


async def answer(
    send: Send, status: int, words: str, headers: Pairs = (), kind: bytes = PLAIN
) -> None:
    """A short text as the whole answer."""
    body = words.encode("utf-8", "replace")
    fixed = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    start = {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
