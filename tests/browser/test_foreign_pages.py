"""A page on another origin gets nothing: no conversation, no change, no upload, under any name.

Chromium is told that a foreign name means this machine, as a name server that changes its answer
would tell it. A page under that name and the program's port is then of the program's own origin.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from storage.conversations import Conversations
from storage.database import Database
from tests.support.pages import chromium, end, start, visit

pytestmark = pytest.mark.browser
SECRET = "A secret conversation"
ATTACK = (Path(__file__).parent / "foreign.js").read_text(encoding="utf-8")
NAMES = ("x.localhost", "localhost.", "evil.example", "evil.example.", "0.0.0.0")
"""Names that lead to this machine and are not the program's."""
UNGUARDED = "LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
"""Guards of newer browsers, which others do not have: the program must not rest on them."""


class Place(NamedTuple):
    """The running program."""

    port: int
    data: Path
    uploads: Path

    def rows(self) -> list[tuple[object, ...]]:
        """What is stored of conversations and messages."""
        with sqlite3.connect(f"file:{self.data / 'strata.db'}?mode=ro", uri=True) as handle:
            found = []
            for table in ("conversations", "messages"):
                found += handle.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
        handle.close()
        return found

    def uploaded(self) -> list[str]:
        """The files that were uploaded."""
        return sorted(str(path) for path in self.uploads.rglob("*foreign*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    data, uploads = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("uploads")
    with Database(data / "strata.db") as database:
        store = Conversations(database, "local")
        store.append(store.create(SECRET).id, "user", "Nobody else may read this.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "GRADIO_TEMP_DIR", str(uploads))
        process, url, _ = start(data)
    yield Place(urlsplit(url).port or 0, data, uploads)
    end(process)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    rules = ", ".join(f"MAP {name} 127.0.0.1" for name in ("evil.example", "evil.example."))
    with chromium(f"--host-resolver-rules={rules}", f"--disable-features={UNGUARDED}") as opened:
        yield opened


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of another web server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><body>another page")

        def log_message(self, format: str, *values: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def gained(page: Page, place: Place, targets: list[str]) -> dict[str, list[str]]:
    """What the open page gets out of the program, by address; nothing may have changed."""
    before = place.rows(), place.uploaded()
    found = {target: page.evaluate(ATTACK, target) for target in targets}
    framed = [frame.url for frame in page.frames[1:] if frame.evaluate("!!window.gradio_config")]
    assert (place.rows(), place.uploaded()) == before and framed == []
    return {target: got for target, got in found.items() if got}


@pytest.mark.parametrize("name", ["evil.example", "localhost", "127.0.0.1"])
def test_a_page_of_another_origin_gets_nothing(
    page: Page, place: Place, elsewhere: int, name: str
) -> None:
    page.goto(f"http://{name}:{elsewhere}/")
    own = [f"http://{host}:{place.port}" for host in ("127.0.0.1", "localhost")]
    assert gained(page, place, [*own, *(f"http://{n}:{place.port}" for n in NAMES)]) == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_whose_name_came_to_mean_this_machine_gets_nothing(
    page: Page, place: Place, name: str
) -> None:
    address = f"http://{name}:{place.port}"
    page.route(
        "**/foreign.html",
        lambda route: route.fulfill(content_type="text/html", body="<!doctype html><body>"),
    )
    page.goto(f"{address}/foreign.html")
    origin = page.evaluate("location.origin")
    assert gained(page, place, [origin]) == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_does_not_open_under_a_foreign_name(page: Page, place: Place, name: str) -> None:
    reply = page.goto(f"http://{name}:{place.port}/")
    assert reply is not None
    said = page.locator("body").inner_text()
    assert reply.status == 421 and f"http://127.0.0.1:{place.port}" in said


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_page_opens_under_its_own_names(page: Page, place: Place, name: str) -> None:
    visit(page, f"http://{name}:{place.port}/")
    assert SECRET in page.locator("#conversations").inner_text()
    got = page.evaluate(ATTACK, f"http://{name}:{place.port}")
    assert {"read /theme.css", "conversations"} <= set(got), "the attempts work where they may"


def test_a_link_from_elsewhere_opens_the_page(page: Page, place: Place, elsewhere: int) -> None:
    page.goto(f"http://evil.example:{elsewhere}/")
    page.evaluate(f"location.href = 'http://127.0.0.1:{place.port}/'")
    expect(page.locator("#conversations")).to_contain_text(SECRET)
