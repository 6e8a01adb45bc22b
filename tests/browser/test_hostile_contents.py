"""What an answer, an import, a title or a model's name holds runs nothing and fetches nothing."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from engine.types import TARGET
from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.exports import FORMAT, VERSION
from tests.conftest import EMBEDDED
from tests.support.hostile import PAYLOADS, references
from tests.support.pages import (
    PATIENCE,
    end,
    pictures,
    set_number,
    show,
    start,
    visit,
)

pytestmark = pytest.mark.browser
ALL = "All of them"
NAME = "<img src=x onerror=fired()>"


class Canary:
    """A server that should hear nothing."""

    def __init__(self) -> None:
        heard = self.heard = []  # type: list[str]

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append(self.path)
                self.send_error(404)

            def log_message(self, format: str, *values: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    made = Canary()
    yield made
    made.close()


def split(text: str) -> list[Piece]:
    """A text as the tokens of an answer, cut within its tags."""
    parts = [text[at : at + 3] for at in range(0, len(text), 3)]
    return [Piece(part, TARGET, 0, at, at, 0.5) for at, part in enumerate(parts)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, canary: Canary) -> Iterator[str]:
    """The program with a model of a hostile name; hostile texts as titles, messages, answers."""
    data = tmp_path_factory.mktemp("data")
    shutil.copytree(EMBEDDED, data / NAME)
    with Database(data / "strata.db") as database:
        store = Conversations(database, "local")
        for text in PAYLOADS:
            store.create(text)
        everything = store.create(ALL).id
        for text in [*PAYLOADS, *references(canary.address)]:
            store.append(everything, "user", text)
            store.append(everything, "assistant", text, pieces=split(text))
    process, url, _ = start(data, "--model", str(data / NAME))
    yield url
    end(process)


@pytest.fixture
def page(browser: Browser, address: str, canary: Canary) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script("window.ran = 0; window.fired = () => { window.ran += 1; };")
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    problems: list[str] = []
    opened.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    opened.on("popup", lambda popup: problems.append(f"opened {popup.url}"))
    allowed = (address, "data:", "blob:")
    opened.on(
        "requestfinished",
        lambda asked: None if asked.url.startswith(allowed) else problems.append(asked.url),
    )
    opened.on(
        "response",
        lambda got: problems.append(got.url) if canary.address in got.url and got.ok else None,
    )
    visit(opened, address)
    yield opened
    pictures(opened)
    opened.wait_for_timeout(500)  # Time for what must not happen.
    ran = [frame.evaluate("window.ran") for frame in opened.frames]
    found = opened.url, len(opened.frames)
    context.close()
    assert found == (address, 1) and ran == [0], "a script ran, or the page went elsewhere"
    assert problems == [] and canary.heard == []


def inert(page: Page) -> None:
    """No answer has brought anything but text, and links that somebody has to follow."""
    risky = ":is(script, iframe, object, embed, img, style, link, form, [onerror], [onload])"
    assert page.locator(f"#tokens .turn {risky}").count() == 0
    links = page.locator("#tokens .turn a").evaluate_all("all => all.map((link) => link.href)")
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in links)


def test_there_are_enough() -> None:
    assert len(set(PAYLOADS)) >= 60 and len(set(references("http://x"))) >= 20


def test_titles_answers_and_names_run_and_fetch_nothing(page: Page) -> None:
    assert NAME in page.locator("#header .model").inner_text()
    listed = page.locator("#conversations .title")
    assert listed.count() == len(PAYLOADS) + 1
    assert page.locator("#conversations :is(img, svg, script, iframe)").count() == 0
    listed.filter(has_text=ALL).click()
    expect(page.locator("#tokens .turn")).to_have_count(2 * len(PAYLOADS) + 48)
    said = page.locator("#tokens .turn.said").all_text_contents()
    assert said[: len(PAYLOADS)] == list(PAYLOADS)
    expect(page.locator("#tokens .turn.answered .formatted")).to_have_count(len(PAYLOADS) + 24)
    pictures(page)
    inert(page)
    show(page, "Tokens")
    expect(page.locator("#tokens .turn.answered .formatted")).to_have_count(0)
    answered = page.locator("#tokens .turn.answered").all_text_contents()
    assert answered[: len(PAYLOADS)] == list(PAYLOADS)
    assert page.locator("#tokens .turn :is(img, svg, script, iframe, style, a)").count() == 0


def test_imports_and_growing_answers_run_and_fetch_nothing(
    page: Page, canary: Canary, tmp_path: Path
) -> None:
    said: list[dict[str, object]] = [
        {"role": role, "content": text}
        for text in [*PAYLOADS, *references(canary.address)]
        for role in ("user", "assistant")
    ]
    for number, message in enumerate(said[1:]):
        message["parent"] = number
    file = tmp_path / "import.json"
    entry = {"format": FORMAT, "version": VERSION, "title": PAYLOADS[13], "messages": said}
    file.write_text(json.dumps(entry))
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(str(file))
    expect(page.locator("#tokens .turn")).to_have_count(len(said))
    expect(page.locator("#tokens .turn.answered .formatted")).to_have_count(len(said) // 2)
    inert(page)
    page.click("#new")
    set_number(page, "Max tokens", 15)
    page.fill("#box textarea", "\n\n".join(references(canary.address)[:8]))
    page.click("#send")
    expect(page.locator("#tokens .turn.answered .tok").first).to_be_attached()
    expect(page.locator("#send")).to_be_visible()
    inert(page)
