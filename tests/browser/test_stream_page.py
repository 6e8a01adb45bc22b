"""An answer in a real browser: it goes on without its page, and is there when the page returns."""

import html
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, Route, expect

from tests.support.pages import (
    LONG,
    Stored,
    answer,
    answer_at_length,
    finished,
    guarded,
    long_answer,
    send,
    set_number,
    show,
    shown,
    stop,
    stored,
    unending,
    until,
    visit,
)

pytestmark = pytest.mark.browser


LISTEN = """{
  const asked = window.fetch;
  window.told = "";
  const listen = async (body) => {
    try {
      for await (const chunk of body.pipeThrough(new TextDecoderStream())) window.told += chunk;
    } catch { }  // The page asks for no more.
  };
  window.fetch = async (...all) => {
    const response = await asked(...all);
    if (response.url.includes("/queue/data")) listen(response.clone().body);
    return response;
  };
}"""
"""Collects all that Gradio's queue tells a page."""


@pytest.fixture
def alone(context: BrowserContext, address: str) -> Page:
    """A page of a browser without shared workers, which asks for each stream itself: so it shows
    what is asked for and what comes."""
    context.add_init_script("delete window.SharedWorker;" + LISTEN)
    opened = context.new_page()
    visit(opened, address)
    return opened


@pytest.fixture
def complete(data: Path, owner: str) -> Callable[[Page], Stored]:
    """Checks that a page shows all that is stored of the newest answer, token by token, each
    once."""

    def checked(page: Page) -> Stored:
        found = stored(data, owner)[0]
        assert found.ended
        assert answer(page) == found.text == "".join(piece.text for piece in found.pieces)
        show(page, "Tokens")
        spans = page.locator("#tokens .turn.answered").last.locator(".tok")
        assert "".join(spans.all_text_contents()) == found.text
        counts = spans.evaluate_all("all => all.map((span) => span.count)")
        assert sum(counts) == len(found.pieces)
        show(page, "Formatted")
        return found

    return checked


def letters(text: str) -> str:
    return re.sub("[^a-z]", "", html.unescape(text.replace(r"\n", "")).lower())


@pytest.mark.soak
def test_the_first_token_waits_for_no_timer_and_each_is_described(page: Page) -> None:
    """It is drawn in the next frame: only what follows it is paced."""
    answer_at_length(page, 60)
    page.evaluate(
        """() => {
          const later = window.setTimeout;
          window.held = [];
          window.setTimeout = (act, wait, ...more) => {
            const drawn = document.querySelector("#tokens .turn.answered");
            if (!drawn && /schedule/.test(new Error().stack)) window.held.push(wait);
            return later(act, wait, ...more);
          };
        }"""
    )
    send(page, LONG)
    finished(page)
    assert page.evaluate("window.held") == []
    runs = page.locator("#tokens .turn.answered .tok")
    on_one_line = "(span) => span.count > 2 && span.getClientRects().length === 1"
    run = runs.nth(runs.evaluate_all(f"all => all.findIndex({on_one_line})"))
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


def test_an_answer_grows_in_few_nodes_and_nothing_is_sent_again(
    alone: Page, data: Path, owner: str, complete: Callable[[Page], Stored]
) -> None:
    page = alone
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.evaluate(
        "() => { window.firsts = []; window.figures = [];"
        "document.addEventListener('strata:first', (e) => firsts.push(e.detail.seconds));"
        "document.addEventListener('strata:figures', (e) => figures.push(e.detail)); }"
    )
    answer_at_length(page, 600, "Databases (hierarchy drafting)")
    with unending(data, owner):
        send(page, LONG)
        until(page, lambda: shown(page) > 1)
        early = len(answer(page))
    finished(page)
    assert len(answer(page)) > early
    text, pieces, _ = complete(page)
    spans = page.locator("#tokens .turn.answered .tok").count()
    assert spans < 0.8 * len(pieces), "a node per run, not per token"
    assert len([url for url in seen if "/stream/" in url]) == 1
    (first,) = page.evaluate("firsts")
    assert 0 < first < 60
    figures = page.evaluate("figures")
    per_step = len(pieces) / len({piece.step for piece in pieces})
    assert figures and figures[-1]["h"][2] == f"{per_step:.2f}"
    send(page, "And what then?")
    finished(page)
    page.wait_for_function("firsts.length === 2")
    told = letters(page.evaluate("told"))
    assert letters("And what then?") in told
    assert letters(text)[:60] not in told, "the first answer is not sent again"
    expect(page.locator("#tokens .turn")).to_have_count(4)
    complete(page)


def test_an_answer_ends_complete_whether_its_page_is_opened_again_or_closed(
    context: BrowserContext,
    page: Page,
    address: str,
    data: Path,
    owner: str,
    complete: Callable[[Page], Stored],
) -> None:
    with unending(data, owner):
        long_answer(page, 200)
        visit(page, address)
        expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
        expect(page.locator("#tokens .turn.answered .tok").nth(2)).to_be_attached()
        early = len(answer(page))
        page.close()
    again = context.new_page()
    visit(again, address)
    finished(again)
    assert len(answer(again)) >= early
    expect(again.locator("#tokens .turn")).to_have_count(2)
    complete(again)


class Between:
    """Stands between a browser and the program, under a port of its own, and cuts the connection
    that all streams share, `most` bytes after each of the first `cuts` streams of an answer."""

    def __init__(self, port: int, cuts: int, most: int) -> None:
        self.port, self.cuts, self.most, self.left = str(port), cuts, most, most
        self.begun: list[int] = []
        """Of each stream of an answer the place where it begins."""
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
            shared = threading.Event()
            for work in (self.ask, self.answer):
                threading.Thread(target=work, args=(near, far, shared), daemon=True).start()

    def ask(self, near: socket.socket, far: socket.socket, shared: threading.Event) -> None:
        """Pass requests on, under the name that the program answers to."""
        with suppress(OSError):
            while part := near.recv(1 << 16):
                if b"GET /shared " in part:
                    shared.set()
                    self.left = self.most
                if found := re.search(rb"/stream/[\w-]+\?from=(\d+)", part):
                    self.left = self.most
                    self.begun.append(int(found[1]))
                far.sendall(part.replace(f":{self.own}".encode(), f":{self.port}".encode()))
        self.close(near, far)

    def answer(self, near: socket.socket, far: socket.socket, shared: threading.Event) -> None:
        """Pass answers on, what is shared up to its cut."""
        with suppress(OSError):
            while part := far.recv(1 << 16):
                cut = shared.is_set() and 0 < len(self.begun) <= self.cuts
                near.sendall(part[: self.left] if cut else part)
                self.left -= len(part) if cut else 0
                if cut and self.left <= 0:
                    break
        self.close(near, far)

    @staticmethod
    def close(*sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.soak
def test_a_connection_that_is_cut_is_taken_up_again(
    browser: Browser, address: str, owner: str, complete: Callable[[Page], Stored]
) -> None:
    port = address.rstrip("/").rpartition(":")[2]
    between = Between(int(port), cuts=4, most=2500)
    near = address.replace(port, between.own)
    with guarded(browser, near, owner) as context:
        page = context.new_page()
        visit(page, near)
        long_answer(page)
        finished(page)
        between.listener.close()
        assert len(between.begun) == 5 and between.begun[0] == 0
        places = between.begun[1:]
        # A connection that brought no whole event is taken up again at the same place.
        assert places == sorted(places), "each goes on where the one before ended"
        assert places[-1] > 0, "what was brought is not asked for again"
        complete(page)


@pytest.mark.soak
@pytest.mark.parametrize("blocked", ["refused", "held back"])
def test_without_its_stream_a_page_shows_an_answer_once_it_is_complete(
    alone: Page, data: Path, owner: str, complete: Callable[[Page], Stored], blocked: str
) -> None:
    """As behind a proxy that refuses the stream, or one that passes nothing on."""
    page, stopped, asked = alone, list[Route](), list[Request]()

    def block(route: Route) -> None:
        stopped.append(route)
        if blocked == "refused":
            route.abort()

    def note(request: Request) -> None:
        if '"drawn"' in (request.post_data or ""):
            asked.append(request)

    page.route("**/stream/**", block)
    page.on("request", note)
    answer_at_length(page, 1500)
    with unending(data, owner):
        send(page, LONG)
        until(page, lambda: len(asked) > 1 and bool(stored(data, owner)))
        assert len(stopped) > 1 if blocked == "refused" else len(stopped) == 1
        expect(page.locator("#tokens .turn.answered")).to_have_count(0)
        page.click("#stop")
        finished(page)
    expect(page.locator("#figures")).to_contain_text("stopped")
    complete(page)
    page.unroute("**/stream/**")
    set_number(page, "Max tokens", 20)
    send(page, "And what then?")
    finished(page)
    complete(page)


@pytest.mark.soak
def test_views_and_conversations_are_switched_while_an_answer_grows(
    page: Page, complete: Callable[[Page], Stored]
) -> None:
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
        ends = page.locator("#stop").is_hidden
        until(page, lambda early=early, ends=ends: len(answer(page)) > early or ends())
    page.locator("#conversations .title", has_text="A short one").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text("A short one.")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_timeout(500)  # Time for what must not happen, though the answer goes on.
    expect(page.locator("#tokens .turn")).to_have_count(2)
    page.locator("#conversations .title", has_text="Tell me a very long").first.click()
    expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
    stop(page)
    finished(page)
    complete(page)


@pytest.mark.soak
def test_the_end_is_followed_unless_somebody_reads_above_and_no_layout_is_read(page: Page) -> None:
    page.set_viewport_size({"width": 1100, "height": 560})
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
    turns.evaluate(
        """t => new Promise((then) => {
          const frames = (act) => requestAnimationFrame(() => requestAnimationFrame(act));
          const up = () => {
            t.scrollTop = 10;
            frames(() => (t.classList.contains("pinned") ? up() : then()));
          };
          up();
        })"""
    )
    before = spans.count()
    expect(spans.nth(before + 3)).to_be_attached()
    assert turns.evaluate("t => t.scrollTop") == 10, "and it is not when somebody reads above"
    stop(page)
    finished(page)
    # At the end, the buttons of the last answer stay in sight whatever changes its size.
    turns.evaluate("t => { t.scrollTop = t.scrollHeight; }")
    expect(turns).to_have_class(re.compile(r"\bpinned\b"))
    below = """() => {
      const end = document.querySelector("#tokens .turns").getBoundingClientRect().bottom;
      return [...document.querySelectorAll("#tokens .foot")].pop().getBoundingClientRect().bottom
        - end;
    }"""

    resize = """(turn, height) => new Promise((then) => {
      turn.style.marginBottom = height;
      requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(then)));
    })"""
    for height in ("120px", "0px", "60px", "300px"):
        page.locator("#tokens .turn.answered").evaluate(resize, height)
        until(page, lambda: page.evaluate(below) <= 1)
