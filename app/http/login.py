"""Logging in and out with a password.

Guessing is slowed down, but nobody is locked out: an attempt waits before it is checked, longer
after many attempts, but never longer than a few seconds. So a user who knows the password can
always log in. The wait is a sleep in the event loop, which holds no thread and delays nobody else.
"""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = "access-token-"
"""The prefix of the names of Gradio's log-in cookies."""


def logged_in(app: Any, cookies: Mapping[str, str]) -> bool:
    """Whether a request to Gradio's app is logged in, by the same check as Gradio's own routes."""
    names = (f"{TOKEN}{app.cookie_id}", f"{TOKEN}unsecure-{app.cookie_id}")
    return app.auth is None or any(cookies.get(name) in app.tokens for name in names)


class Gate:
    """Checks name and password, in constant time."""

    def __init__(self, user: str, password: str) -> None:
        self.expected = (user.encode(), password.encode())

    def __call__(self, user: str, password: str) -> bool:
        name_fits = hmac.compare_digest(user.encode(), self.expected[0])
        password_fits = hmac.compare_digest(password.encode(), self.expected[1])
        return name_fits and password_fits


@dataclass(slots=True)
class Attempts:
    """Recent attempts to log in: after `free` of them the wait doubles from a quarter of a second
    up to `longest` seconds. One attempt is forgotten every `forget` seconds, and their count is
    bounded, so that waits end soon after a flood of attempts."""

    free: int
    longest: float
    forget: float
    count: float = 0.0
    last: float = 0.0

    def add(self, now: float) -> float:
        """Count an attempt; returns the seconds that it waits."""
        faded = max(0.0, self.count - (now - self.last) / self.forget)
        self.count, self.last = min(faded + 1, self.free + MARGIN), now
        over = self.count - self.free
        return 0.0 if over <= 0 else min(self.longest, 0.25 * 2 ** (over - 1))


MARGIN = 8.0
BY_SOURCE = Attempts(free=5, longest=8.0, forget=30.0)
BY_ALL = Attempts(free=30, longest=2.0, forget=2.0)
"""How attempts from one address, and all together, begin."""


class Throttle:
    """Slows attempts down, for each source address and for all together."""

    SOURCES = 1024

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self.sources: OrderedDict[str, Attempts] = OrderedDict()
        self.all = replace(BY_ALL)

    def wait(self, source: str) -> float:
        """Count an attempt from an address; returns the seconds that it waits."""
        attempts = self.sources.setdefault(source, replace(BY_SOURCE))
        self.sources.move_to_end(source)
        while len(self.sources) > self.SOURCES:
            self.sources.popitem(last=False)
        now = self.clock()
        return max(attempts.add(now), self.all.add(now))

    async def slow(self, scope: Scope) -> str:
        """Make an attempt wait; returns its source address."""
        source = str((scope.get("client") or ("",))[0])
        await self.sleep(self.wait(source))
        return source


class LogIns(Throttle):
    """Handles logging in and out. `tokens` are Gradio's sessions, by the values of their
    cookies."""

    async def enter(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an attempt to the app after its wait. A success forgets the attempts of its
        source."""
        source = await self.slow(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.sources.pop(source, None)
            await send(message)

        await app(scope, receive, noted)

    def leave(self, tokens: MutableMapping[str, str], cookie: str) -> PlainTextResponse:
        """End the session of a request with this `cookie` header, and no other."""
        response = PlainTextResponse("Logged out.", headers={"cache-control": "no-store"})
        for name, value in cookie_parser(cookie).items():
            if name.startswith(TOKEN):
                tokens.pop(value, None)
                response.delete_cookie(name)
        return response
