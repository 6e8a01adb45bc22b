"""The connection that all tabs of a browser share, as the browser uses it: what it carries comes
through whole, its checks are those of any request, and who goes is noticed."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import gradio as gr
import httpx
import pytest

from app.service.answering import Generations
from app.service.session import Session
from app.web import shared, stream
from assets import read
from tests.service.test_session import OWNER, preferences, soon
from tests.support.blocks import serving
from tests.web.test_stream import Held, Page, columns

Serve = Callable[..., str]
OWN = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}


@pytest.fixture
def left() -> list[str]:
    return []


@pytest.fixture
def served(left: list[str]) -> Iterator[Serve]:
    def leave(request: gr.Request) -> None:
        left.append(request.session_hash or "")

    def build(blocks: gr.Blocks) -> None:
        gr.HTML("inside")
        blocks.unload(leave)

    with ExitStack() as stack:

        def serve(generations: Generations, *more: str) -> str:
            routes = [*shared.routes(), *stream.routes(generations)]
            return stack.enter_context(serving(*more, routes=routes, build=build)).address

        yield serve


class Connection:
    """A shared connection: what it has brought of each stream."""

    def __init__(self, address: str, events: Iterator[str], cookies: dict[str, str]) -> None:
        self.address, self.events, self.cookies = address, events, cookies
        self.status: dict[int, int] = {}
        self.texts: dict[int, str] = {}
        self.ended: set[int] = set()
        self.name = str(self.next())

    def next(self) -> Any:
        return next(json.loads(line[5:]) for line in self.events if line.startswith("data:"))

    def ask(self, number: object, path: object = "", **headers: str) -> int:
        """Open a stream, or close one; the status of that."""
        origin = {"Origin": self.address, **OWN, **headers, **self.cookies}
        body = {"number": number, "path": path}
        url = f"{self.address}/shared/{self.name}"
        return httpx.post(url, json=body, headers=origin, timeout=60).status_code

    def hear(self, until: Callable[[], bool]) -> None:
        """Take events in until something is so."""
        while not until():
            number, value = self.next()
            if value is None:
                self.ended.add(number)
            elif isinstance(value, int):
                self.status[number] = value
            else:
                self.texts[number] = self.texts.get(number, "") + value


@contextmanager
def connected(address: str, cookies: dict[str, str] | None = None) -> Iterator[Connection]:
    headers = {**OWN, **(cookies or {})}
    with httpx.stream("GET", f"{address}/shared", headers=headers, timeout=60) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Connection(address, response.iter_lines(), cookies or {})


def test_many_answers_come_by_one_connection_each_of_them_whole(
    session: Session, served: Serve
) -> None:
    address = served(session.generations)
    answers = []
    for number in range(8):
        conversation = session.chat.say(OWNER, None, f"hello {number}")
        answers.append(session.generations.start(OWNER, conversation, preferences()))
    with connected(address) as connection:
        for number, answer in enumerate(answers):
            assert connection.ask(number, f"/stream/{answer.token}?from=0") == 204
        connection.hear(lambda: len(connection.ended) == len(answers))
    for number, answer in enumerate(answers):
        page = Page()
        page.read(connection.texts[number].encode())
        assert connection.status[number] == 200 and page.kinds[-1] == "end"
        assert answer.update is not None and page.tokens == columns(answer.update.pieces)


def test_a_tab_that_closes_is_noticed_while_the_others_stay(
    session: Session, served: Serve, left: list[str]
) -> None:
    """Gradio forgets what it knows of a page when its heartbeat ends."""
    address = served(session.generations)
    with connected(address) as connection:
        for number, page in enumerate(("first", "second", "third")):
            assert connection.ask(number, f"/gradio_api/heartbeat/{page}") == 204
        connection.hear(lambda: len(connection.texts) == 3)
        assert all("ALIVE" in text for text in connection.texts.values()) and left == []
        assert connection.ask(1) == 204
        assert soon(lambda: left == ["second"])
    assert soon(lambda: sorted(left) == ["first", "second", "third"]), "and the browser itself"


def test_a_stream_that_is_closed_is_watched_by_nobody(
    session: Session, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.service.answering.UPDATE_SECONDS", 0.0)
    held = Held(session)
    generations = Generations(held.answer)
    address = served(generations)
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = generations.start(OWNER, conversation, preferences())
    with connected(address) as connection:
        connection.ask(1, f"/stream/{answer.token}")
        connection.ask(2, f"/stream/{answer.token}")
        connection.hear(lambda: len(connection.texts) == 2)
        assert soon(lambda: len(answer.bell.listening) == 2)
        assert connection.ask(1) == 204
        assert soon(lambda: len(answer.bell.listening) == 1)
    assert soon(lambda: not answer.bell.listening)
    held.gate.release(1000)


def test_it_carries_streams_and_nothing_else(session: Session, served: Serve) -> None:
    with connected(served(session.generations)) as connection:
        for path in (
            *("/", "/shared", "/gradio_api/app_id", "/gradio_api/queue/join"),
            *("/gradio_api/heartbeat/../app_id", "http://127.0.0.1/stream/x", "/stream/x?\u00e4"),
        ):
            assert connection.ask(1, path) == 404, path
        for number, path in ((1, 7), ("1", "/stream/x"), (True, "/stream/x"), (None, "")):
            assert connection.ask(number, path) == 400
        assert connection.ask(5, "") == 204


def test_each_stream_is_checked_as_any_request(session: Session, served: Serve) -> None:
    address = served(session.generations)
    conversation = session.chat.say(OWNER, None, "hello there")
    answer = session.generations.start(OWNER, conversation, preferences())
    with connected(address) as connection:
        connection.ask(1, "/stream/nobody")
        connection.hear(lambda: 1 in connection.ended)
        assert connection.status[1] == 404 and "no such answer" in connection.texts[1]
        assert connection.ask(2, f"/stream/{answer.token}", Origin="http://evil.example") == 403
        assert connection.ask(2, f"/stream/{answer.token}") == 204
        connection.name = "another"
        assert connection.ask(3, f"/stream/{answer.token}") == 404


def test_no_more_streams_than_a_connection_holds(
    session: Session, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MOST_STREAMS", 2)
    with connected(served(session.generations)) as connection:
        statuses = [connection.ask(n, f"/gradio_api/heartbeat/p{n}") for n in (1, 1, 2, 3)]
        assert statuses == [204, 409, 204, 409]
        assert connection.ask(1) == 204
        connection.hear(lambda: len(connection.texts) == 2)
        later = set[int]()
        assert soon(
            lambda: later.add(connection.ask(3, "/gradio_api/heartbeat/p3")) or 204 in later
        )


def test_who_has_not_logged_in_shares_nothing(session: Session, served: Serve) -> None:
    address = served(session.generations, "--auth", "ann:secret")
    assert httpx.get(f"{address}/shared", headers=OWN, timeout=60).status_code == 401
    origin = {"Origin": address}
    credentials = {"username": "ann", "password": "secret"}
    entered = httpx.post(f"{address}/login", data=credentials, headers=origin, timeout=60)
    cookies = {"Cookie": "; ".join(f"{n}={v}" for n, v in entered.cookies.items())}
    with connected(address, cookies) as connection:
        assert connection.ask(1, "/gradio_api/heartbeat/x") == 204
        connection.cookies = {}
        assert connection.ask(3, "/gradio_api/heartbeat/x") == 401


def test_the_page_begins_with_the_script_and_the_script_is_fetched_once(
    session: Session, served: Serve
) -> None:
    address = served(session.generations)
    page = httpx.get(address, timeout=60)
    tag = f'<head><script src="{shared.address()}"></script>'
    assert page.status_code == 200 and page.text.count(tag) == 1
    assert httpx.head(address, timeout=60).status_code == 200
    script = httpx.get(address + shared.address(), timeout=60)
    assert script.text == read(shared.SCRIPT) and "immutable" in script.headers["cache-control"]
    assert httpx.get(f"{address}/shared/0123456789abcdef.js", timeout=60).status_code == 404
