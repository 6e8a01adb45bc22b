"""Coming in: guessing is slow, nobody is shut out; going out: one's own session alone."""

import asyncio
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gradio import networking

from app.http.login import BY_ALL, BY_SOURCE, Gate, LogIns
from tests.support.blocks import serving

LINK = "https://abc123.gradio.live"


def test_the_gate_checks_both_and_never_shuts() -> None:
    gate = Gate("ann", "pässword")
    assert gate("ann", "pässword")
    assert not gate("bob", "pässword") and not gate("ann", "wrong") and not gate("", "")
    for _ in range(1000):
        assert not gate("ann", "guess")
    assert gate("ann", "pässword")


class Door:
    """Attempts at a clock that only waiting moves."""

    def __init__(self, alone: bool = True) -> None:
        self.now, self.waited, self.alone = 0.0, [0.0], alone
        self.log_ins = LogIns(clock=lambda: self.now, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds if self.alone else 0.0

    def knock(self, right: bool = False, source: str = "10.0.0.1") -> tuple[float, int]:
        """One attempt: the seconds it waited, and the status of its answer."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200 if right else 400})

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "client": (source, 1)}
        asyncio.run(self.log_ins.enter(app, scope, send, send))
        return self.waited[-1], sent[0]["status"]


def test_guesses_wait_ever_longer_up_to_a_bound_and_are_forgotten() -> None:
    door = Door()
    waits = [door.knock()[0] for _ in range(100)]
    assert waits[: BY_SOURCE.free] == [0.0] * BY_SOURCE.free and waits[BY_SOURCE.free] > 0
    assert max(waits) == BY_SOURCE.longest
    assert all(before <= after for before, after in pairwise(waits[:12]))
    door.now += (BY_SOURCE.free + 8) * BY_SOURCE.forget
    assert door.knock()[0] == 0.0


def test_guesses_at_once_wait_too_and_others_hardly_wait() -> None:
    door = Door(alone=False)
    waits = [door.knock()[0] for _ in range(1000)]
    assert waits[20:] == [BY_SOURCE.longest] * 980
    assert door.knock(right=True, source="10.0.0.2") == (BY_ALL.longest, 200)


def test_who_knows_the_password_comes_in_after_a_thousand_guesses() -> None:
    door = Door()
    for _ in range(1000):
        assert door.knock()[1] == 400
    waited, status = door.knock(right=True)
    assert status == 200 and waited <= BY_SOURCE.longest
    assert door.knock(right=True)[0] <= BY_ALL.longest, "and is not slowed by its own source again"


def test_many_sources_are_slowed_together_and_cost_no_memory() -> None:
    door = Door(alone=False)
    for number in range(3 * LogIns.SOURCES):
        door.knock(source=f"10.0.{number // 256}.{number % 256}")
    assert door.knock(source="10.9.9.9")[0] == BY_ALL.longest
    assert len(door.log_ins.sources) == LogIns.SOURCES


def test_leaving_ends_the_own_session_and_no_other() -> None:
    tokens = {"mine": "guest", "other": "guest"}
    left = LogIns().leave(tokens, "access-token-x=mine; access-token-unsecure-x=mine; theme=dark")
    assert tokens == {"other": "guest"} and left.status_code == 200
    over = [value for name, value in left.raw_headers if name == b"set-cookie"]
    assert [value.split(b"=")[0] for value in over] == [
        b"access-token-x",
        b"access-token-unsecure-x",
    ]
    assert all(b"Max-Age=0" in value for value in over)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A shared server with a password, the tunnel made up: its address here, and there."""
    monkeypatch.setattr(networking, "setup_tunnel", lambda **more: LINK)
    with serving("--share", "--auth", "ann:secret") as page:
        yield page.address, page.public


def guest(here: str, host: str, origin: str) -> httpx.Client:
    return httpx.Client(base_url=here, headers={"host": host, "origin": origin}, timeout=60)


def enter(client: httpx.Client, password: str = "secret") -> httpx.Response:
    return client.post("/login", data={"username": "ann", "password": password})


def test_a_share_link_serves_guests_and_sends_no_cookie_elsewhere(
    served: tuple[str, str],
) -> None:
    here, there = served
    assert there == LINK
    with guest(here, "abc123.gradio.live", LINK) as client:
        page = client.get("/")
        assert page.status_code == 200 and "https://gradio.s3" not in page.text
        assert re.search(r'<script type="module" crossorigin src="\./assets/', page.text)
        assert enter(client, "wrong").status_code == 400
        reply = enter(client)
        assert reply.status_code == 200
        cookies = reply.headers.get_list("set-cookie")
        assert len(cookies) == 2
        for cookie in cookies:
            assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and "Secure" in cookie
    with guest(here, "abc123.gradio.live", "https://other.gradio.live") as client:
        reply = enter(client)
        assert reply.status_code == 403 and "set-cookie" not in reply.headers
        assert not [name for name in reply.headers if name.startswith("access-control")]
        asks = {"access-control-request-method": "POST"}
        assert client.options("/gradio_api/queue/join", headers=asks).status_code == 404
    with guest(here, "other.gradio.live", "https://other.gradio.live") as client:
        assert client.get("/").status_code == 421


def test_one_guest_cannot_log_out_another(served: tuple[str, str]) -> None:
    here, _ = served
    host = here.removeprefix("http://")
    with guest(here, host, here) as one, guest(here, host, here) as two:
        for client in (one, two):
            token = enter(client).headers.get_list("set-cookie")[1].split(";")[0]
            client.headers["cookie"] = token
            assert '"username":"ann"' in client.get("/").text
        assert one.get("/logout").status_code == 404
        assert one.post("/logout", headers={"origin": "http://evil.example"}).status_code == 403
        assert '"username":"ann"' in one.get("/").text
        assert one.post("/logout").status_code == 200
        assert '"auth_required":true' in one.get("/").text
        assert '"username":"ann"' in two.get("/").text, "the other is still in"
