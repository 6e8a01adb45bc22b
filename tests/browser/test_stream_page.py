"""An answer in a real browser: it goes on without its page, and is there when the page returns."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.support.pages import (
    LONG,
    PATIENCE,
    act,
    answer,
    end,
    finished,
    long_answer,
    send,
    set_number,
    show,
    start,
    stored,
    until,
    visit,
)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The running program's address, and where it keeps what it stores."""
    folder = tmp_path_factory.mktemp("data")
    process, url, _ = start(folder)
    yield url, folder / "strata.db"
    end(process)


@pytest.fixture
def context(browser: Browser, program: tuple[str, Path]) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1440, "height": 900})
    made.set_default_timeout(PATIENCE)
    problems: list[str] = []
    made.on("weberror", lambda error: problems.append(str(error.error)))
    yield made
    made.close()
    assert problems == [], "the page raised errors"


@pytest.fixture
def page(context: BrowserContext, program: tuple[str, Path]) -> Page:
    opened = context.new_page()
    visit(opened, program[0])
    return opened


def complete(page: Page, database: Path) -> None:
    """What the page shows is all that is stored, token by token, each once."""
    text, pieces, ended = stored(database)[0]
    assert ended
    assert answer(page) == text == "".join(piece.text for piece in pieces)
    show(page, "Tokens")
    spans = page.locator("#tokens .turn.answered").last.locator(".tok")
    assert "".join(spans.all_text_contents()) == text
    counts = spans.evaluate_all("all => all.map((span) => span.count)")
    assert sum(counts) == len(pieces)
    show(page, "Formatted")


def asked(page: Page) -> list[str]:
    """The addresses that the page asks for from now on."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    return found


def told_by_the_queue(page: Page) -> list[int]:
    """The sizes of all that Gradio's queue tells a page from now on."""
    wire, streams, sizes = page.context.new_cdp_session(page), set[str](), list[int]()

    def asked_for(event: dict[str, Any]) -> None:
        if "/queue/data" in event["request"]["url"]:
            streams.add(event["requestId"])

    def received(event: dict[str, Any]) -> None:
        if event["requestId"] in streams:
            sizes.append(event["dataLength"])

    wire.on("Network.requestWillBeSent", asked_for)
    wire.on("Network.dataReceived", received)
    wire.send("Network.enable")
    return sizes


def test_an_answer_grows_in_few_nodes_and_nothing_is_sent_again(
    page: Page, program: tuple[str, Path]
) -> None:
    seen = asked(page)
    page.evaluate(
        "() => { window.firsts = []; window.figures = [];"
        "document.addEventListener('strata:first', (e) => firsts.push(e.detail.seconds));"
        "document.addEventListener('strata:figures', (e) => figures.push(e.detail)); }"
    )
    sizes = told_by_the_queue(page)
    long_answer(page, 1500, "Databases (hierarchy drafting)")
    early = len(answer(page))
    finished(page)
    assert len(answer(page)) > early
    complete(page, program[1])
    spans = page.locator("#tokens .turn.answered .tok").count()
    pieces = stored(program[1])[0].pieces
    assert spans < 0.8 * len(pieces), "a node per run, not per token"
    assert len([url for url in seen if "/stream/" in url]) == 1
    (first,) = page.evaluate("firsts")
    assert 0 < first < 60
    figures = page.evaluate("figures")
    assert (
        figures
        and figures[-1]["h"][2] == f"{len(pieces) / len({piece.step for piece in pieces}):.2f}"
    )
    sizes.clear()
    send(page, "And what then?")
    finished(page)
    page.wait_for_function("firsts.length === 2")
    first_text = stored(program[1])[1].text
    # It was seen to be less than the text alone; with its tokens it would be three times as much.
    assert sum(sizes) < 2 * len(first_text), "the first answer is not sent again"
    expect(page.locator("#tokens .turn")).to_have_count(4)
    complete(page, program[1])


def test_every_token_of_a_run_is_described(page: Page) -> None:
    long_answer(page, 60)
    finished(page)
    runs = page.locator("#tokens .turn.answered .tok")
    on_one_line = "(span) => span.count > 2 && span.getClientRects().length === 1"
    at = runs.evaluate_all(f"all => all.findIndex({on_one_line})")
    run = runs.nth(at)
    run.scroll_into_view_if_needed()
    box = run.bounding_box()
    assert box is not None
    found = []
    for x in range(1, int(box["width"]) - 1):
        page.mouse.move(box["x"] + x + 0.5, box["y"] + box["height"] / 2)
        words = page.locator("#tokens .inspector").inner_text()
        found.append(int(re.search(r"position (\d+)", words)[1]))  # type: ignore[index]
    first, count = run.evaluate("span => [span.first, span.count]")
    texts = run.evaluate("s => s.run.texts.slice(s.first, s.first + s.count)")
    assert found == sorted(found) and min(found) == first + 1 and max(found) == first + count
    assert len(set(found)) == sum(1 for text in texts if text)
    assert re.search(r"step \d+", run.get_attribute("title") or "")


def test_a_reload_in_mid_answer_goes_on_and_ends_complete(
    page: Page, program: tuple[str, Path]
) -> None:
    long_answer(page)
    visit(page, program[0])
    expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#tokens .turn.answered .tok").nth(2)).to_be_attached()
    early = len(answer(page))
    finished(page)
    assert len(answer(page)) > early
    expect(page.locator("#tokens .turn")).to_have_count(2)
    expect(page.locator("#figures")).to_contain_text("tokens in")
    complete(page, program[1])


def test_a_page_that_is_closed_leaves_a_complete_answer(
    context: BrowserContext, page: Page, program: tuple[str, Path]
) -> None:
    long_answer(page)
    early = len(answer(page))
    page.close()
    again = context.new_page()
    visit(again, program[0])
    finished(again)
    complete(again, program[1])
    assert len(answer(again)) > early


def test_two_pages_watch_one_answer_and_either_may_stop_it(
    context: BrowserContext, page: Page, program: tuple[str, Path]
) -> None:
    long_answer(page)
    other = context.new_page()
    visit(other, program[0])
    expect(other.locator("#tokens .turn.answered .tok").nth(2)).to_be_attached()
    other.click("#stop")
    for each in (page, other):
        finished(each)
        expect(each.locator("#figures")).to_contain_text("stopped")
        complete(each, program[1])


class Between:
    """Stands between a browser and the program, under a port of its own, and cuts the connections
    that bring a stream, the first `cuts` of them, after `most` bytes."""

    def __init__(self, port: int, cuts: int, most: int) -> None:
        self.port, self.cuts, self.most = str(port), cuts, most
        self.begun: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own = str(self.listener.getsockname()[1])
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", int(self.port)))
            streams = threading.Event()
            for work in (self.ask, self.answer):
                threading.Thread(target=work, args=(near, far, streams), daemon=True).start()

    def ask(self, near: socket.socket, far: socket.socket, streams: threading.Event) -> None:
        """Pass requests on, under the name that the program answers to."""
        with suppress(OSError):
            while part := near.recv(1 << 16):
                if found := re.match(rb"GET /stream/.*?\r\n\r\n", part, re.DOTALL):
                    place = re.search(rb"(?i)last-event-id: *(\d+)", found[0])
                    self.begun.append(place[1].decode() if place else "")
                    streams.set()
                far.sendall(part.replace(f":{self.own}".encode(), f":{self.port}".encode()))
        self.close(near, far)

    def answer(self, near: socket.socket, far: socket.socket, streams: threading.Event) -> None:
        """Pass answers on, streams up to their end."""
        left = self.most
        with suppress(OSError):
            while part := far.recv(1 << 16):
                cut = streams.is_set() and len(self.begun) <= self.cuts
                near.sendall(part[:left] if cut else part)
                left -= len(part) if cut else 0
                if left <= 0:
                    break
        self.close(near, far)

    @staticmethod
    def close(*sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_a_connection_that_is_cut_is_taken_up_again(
    context: BrowserContext, program: tuple[str, Path]
) -> None:
    address, database = program
    port = re.search(r":(\d+)", address)
    assert port
    between = Between(int(port[1]), cuts=4, most=4000)
    page = context.new_page()
    visit(page, address.replace(port[1], between.own))
    long_answer(page, 600)
    finished(page)
    between.listener.close()
    assert len(between.begun) == 5 and between.begun[0] == ""
    places = [int(place) for place in between.begun[1:]]
    # A connection that brought no whole event is taken up again at the same place.
    assert places == sorted(places), "each goes on where the one before ended"
    assert places[-1] > 0, "what was brought is not asked for again"
    complete(page, database)


def test_the_queue_stands_in_where_the_stream_cannot_be_had(
    page: Page, program: tuple[str, Path]
) -> None:
    blocked: list[str] = []

    def block(route: Route) -> None:
        blocked.append(route.request.url)
        route.abort()

    page.route("**/stream/**", block)
    page.click("#new")
    long_answer(page)
    early = len(answer(page))
    page.click("#stop")
    finished(page)
    assert blocked and len(answer(page)) >= early
    expect(page.locator("#figures")).to_contain_text("stopped")
    complete(page, program[1])
    set_number(page, "Max tokens", 200)
    act(page, "Regenerate")
    expect(page.locator("#stop")).to_be_visible()
    finished(page)
    expect(page.locator("#figures")).to_contain_text("tokens in")
    complete(page, program[1])


def test_the_queue_stands_in_where_the_stream_is_held_back(
    page: Page, program: tuple[str, Path]
) -> None:
    """As by a proxy that waits for the end before it passes anything on."""
    held: list[Route] = []
    page.route("**/stream/**", lambda route: held.append(route))
    page.click("#new")
    long_answer(page, 600)
    assert held
    finished(page)
    complete(page, program[1])


def test_views_and_conversations_are_switched_while_an_answer_grows(
    page: Page, program: tuple[str, Path]
) -> None:
    page.click("#new")
    set_number(page, "Max tokens", 10)
    send(page, "A short one.")
    finished(page)
    page.click("#new")
    long_answer(page)
    for view in ("Tokens", "Formatted"):
        early = len(answer(page))
        show(page, view)
        expect(page.locator("#tokens .formatted")).to_have_count(int(view == "Formatted"))
        expect(page.locator("#tokens .turn.answered .tok").nth(2)).to_be_attached()
        until(page, lambda early=early: len(answer(page)) > early)
    page.locator("#conversations .title", has_text="A short one").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text("A short one.")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_timeout(500)  # Nothing of the other answer comes, though it goes on.
    expect(page.locator("#tokens .turn")).to_have_count(2)
    page.locator("#conversations .title", has_text="Tell me a very long").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
    finished(page)
    complete(page, program[1])


def test_who_has_scrolled_up_is_left_in_peace_and_nothing_of_the_layout_is_read(
    page: Page, program: tuple[str, Path]
) -> None:
    page.set_viewport_size({"width": 1100, "height": 560})
    page.click("#new")
    long_answer(page)
    turns = page.locator("#tokens .turns")
    page.wait_for_function(
        "() => { const t = document.querySelector('#tokens .turns');"
        "return t.scrollHeight > t.clientHeight + 200; }"
    )
    to_end = "t => t.scrollHeight - t.clientHeight - t.scrollTop"
    assert turns.evaluate(to_end) < 60, "the end is followed"
    page.evaluate(
        """() => {
          window.reads = 0;
          const watch = (type, name) => {
            const found = Object.getOwnPropertyDescriptor(type, name);
            const read = found.get || found.value;
            const counted = function (...all) {
              if (this.closest?.("#tokens")) window.reads += 1;
              return read.apply(this, all);
            };
            if (found.get) Object.defineProperty(type, name, { ...found, get: counted });
            else Object.defineProperty(type, name, { ...found, value: counted });
          };
          for (const name of ["scrollHeight", "scrollTop", "clientHeight", "clientWidth",
            "getBoundingClientRect", "getClientRects", "scrollIntoView"]) {
            watch(Element.prototype, name);
          }
          for (const name of ["offsetHeight", "offsetTop", "offsetWidth"]) {
            watch(HTMLElement.prototype, name);
          }
        }"""
    )
    spans = page.locator("#tokens .turn.answered .tok")
    before = spans.count()
    expect(spans.nth(before + 3)).to_be_attached()
    assert page.evaluate("window.reads") == 0
    turns.evaluate("t => { t.scrollTop = 10; }")
    page.wait_for_timeout(200)
    before = spans.count()
    expect(spans.nth(before + 3)).to_be_attached()
    assert turns.evaluate("t => t.scrollTop") == 10, "and it is not when somebody reads above"
    page.click("#stop")
    finished(page)
