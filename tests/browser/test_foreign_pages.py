"""A page on another origin gets nothing: no conversation, no change, no upload, under any name.

The browser is told that a foreign name means this machine (`FOREIGN` in tests/support/pages.py). A
page under that name and the program's port is then of the program's own origin.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from storage.conversations import Conversations
from storage.database import Database
from tests.support.pages import FOREIGN, PATIENCE, server, visit

pytestmark = pytest.mark.browser
SECRET = "A secret conversation"
OWNER = "local"
"""Whom a page without the cookie of these tests would find."""
ATTACK = (Path(__file__).parent / "foreign.js").read_text(encoding="utf-8")
NAMES = ("x.localhost", "localhost.", *FOREIGN, "0.0.0.0")
"""Names that lead to this machine and are not the program's."""


class Place(NamedTuple):
    port: int
    data: Path

    def state(self) -> tuple[Any, ...]:
        """What is stored of conversations and messages, and the files that were uploaded."""
        with Database(self.data / "strata.db") as database:
            store = Conversations(database, OWNER)
            found = [(talk, store.messages(talk.id)) for talk in store.list()]
        return found, sorted((self.data / "uploads").rglob("*foreign*"))


@pytest.fixture
def place(address: str, data: Path) -> Place:
    with Database(data / "strata.db") as database:
        store = Conversations(database, OWNER)
        if SECRET not in [talk.title for talk in store.list()]:
            store.append(store.create(SECRET).id, "user", "Nobody else may read this.")
    return Place(urlsplit(address).port or 0, data)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    with server("<!doctype html><body>another page") as (port, _):
        yield port


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def gained(page: Page, place: Place, *targets: str) -> dict[str, list[str]]:
    """What the open page gets out of the program, by address; nothing may have changed."""
    before = place.state()
    attacks = f"(targets) => Promise.all(targets.map((base) => ({ATTACK})({{ base }})))"
    found = dict(zip(targets, page.evaluate(attacks, targets), strict=True))
    framed = [frame.url for frame in page.frames[1:] if frame.evaluate("!!window.gradio_config")]
    assert place.state() == before and framed == []
    return {target: got for target, got in found.items() if got}


def test_a_page_of_another_origin_gets_nothing(page: Page, place: Place, elsewhere: int) -> None:
    names = ("127.0.0.1", "localhost", *NAMES)
    for name in ("evil.example", "localhost", "127.0.0.1"):
        page.goto(f"http://{name}:{elsewhere}/")
        assert gained(page, place, *(f"http://{n}:{place.port}" for n in names)) == {}


@pytest.mark.soak
def test_a_page_whose_name_came_to_mean_this_machine_gets_nothing(page: Page, place: Place) -> None:
    page.route(
        "**/foreign.html",
        lambda route: route.fulfill(content_type="text/html", body="<!doctype html><body>"),
    )
    for name in NAMES:
        page.goto(f"http://{name}:{place.port}/foreign.html")
        assert gained(page, place, page.evaluate("location.origin")) == {}


def test_the_page_does_not_open_under_a_foreign_name(page: Page, place: Place) -> None:
    for name in NAMES:
        reply = page.goto(f"http://{name}:{place.port}/")
        assert reply is not None and reply.status == 421, name
        assert f"http://127.0.0.1:{place.port}" in page.locator("body").inner_text()


@pytest.mark.soak
def test_the_page_opens_under_its_own_names_and_from_a_link(
    page: Page, place: Place, elsewhere: int
) -> None:
    for name in ("127.0.0.1", "localhost"):
        visit(page, f"http://{name}:{place.port}/")
        expect(page.locator("#conversations")).to_contain_text(SECRET)
        works = ["read /theme.css", "conversations"]
        attack = {"base": f"http://{name}:{place.port}", "patience": PATIENCE, "only": works}
        assert page.evaluate(ATTACK, attack) == works, "the attempts work where they may"
    page.goto(f"http://evil.example:{elsewhere}/")
    page.evaluate(f"location.href = 'http://127.0.0.1:{place.port}/'")
    expect(page.locator("#conversations")).to_contain_text(SECRET)
