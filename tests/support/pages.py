"""The program and its page, as the browser tests use them: started, visited, spoken to, ended.

Nothing here waits for a time. What is waited for is on the page: an expectation has PATIENCE, which
a slow machine with other work needs.
"""

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import (
    Browser,
    BrowserContext,
    Error,
    Locator,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.traces import Traces
from tests.conftest import ROOT
from tests.support import held_answers
from tests.support.held import STACKS

DESKTOP: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
FOREIGN = ("evil.example", "evil.example.")
"""Names that the browser takes for this machine, as a name server that changes its answer would
tell it."""
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"),
    f"--host-resolver-rules={', '.join(f'MAP {name} 127.0.0.1' for name in FOREIGN)}",
    # Guards of newer browsers, which others do not have: the program must not rest on them. And the
    # pages of an address bar that is not there: each window would draw two.
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,"
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup",
]
PATIENCE = 60_000
"""Milliseconds that an expectation waits for. The usual answer takes two of its seconds."""
LONG = "Tell me a very long story about the sea."
ENDED = 60
"""Seconds that the program has for its end."""
RUNNING: dict[subprocess.Popen[str], Path] = {}
OPEN: list[BrowserContext] = []
REQUESTS: deque[str] = deque(maxlen=40)
"""The programs that run, the browsers that are open, and the last requests: what `scene` shows."""
FIELDS = """() => [...document.querySelectorAll("input, textarea")]
    .filter((field) => field.offsetParent && field.type !== "checkbox" && field.value)
    .map((field) => `${(field.closest("[id]") || {}).id}: ${field.value.slice(0, 200)}`)"""


def start(folder: Path, *more: str) -> tuple[subprocess.Popen[str], str, str]:
    """The running program, its address, and what it printed until it was ready."""
    program = ["-m", "tests.support.held", str(folder), "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, *program, "--data-dir", str(folder), *more],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"ready at (http\S+)", line):
            RUNNING[process] = folder
            return process, found[1], said
    raise AssertionError(f"The program ended with {process.wait()}:\n{said}")


@contextmanager
def running(folder: Path, *more: str) -> Iterator[str]:
    process, url, _ = start(folder, *more)
    try:
        yield url
    finally:
        end(process)


@contextmanager
def late(folder: Path, name: str) -> Iterator[Callable[[], int]]:
    """While this goes on, a handler in HELD (tests/support/held.py) does not answer. Tells how
    often it began: a choice in a list may begin it twice."""
    file, begun = folder / name, folder / f"{name}.begun"
    begun.write_text("")
    file.touch()
    try:
        yield lambda: len(begun.read_text())
    finally:
        file.unlink()


@contextmanager
def unending(folder: Path, owner: str) -> Iterator[None]:
    """While this goes on, a long answer to that owner grows to some length, and then waits until it
    is stopped: however slow the page is, it has not ended."""
    file = held_answers.file_of(folder, owner)
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def told(process: subprocess.Popen[str], words: str) -> str:
    """The next line with these words that the program prints."""
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)


def end(process: subprocess.Popen[str]) -> None:
    RUNNING.pop(process, None)
    process.terminate()
    process.wait(ENDED)
    assert process.stdout is not None
    process.stdout.close()


def scene() -> str:
    """What there is to see when a test fails: notices, fields, requests, and what the programs are
    doing."""
    lines = []
    for page in (page for context in OPEN for page in context.pages):
        lines += [f"page {page.url}", *page.locator(".toast-body").all_inner_texts()]
        lines += [f"  field {field}" for field in page.evaluate(FIELDS)]
    lines += REQUESTS
    for process, folder in RUNNING.items():
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        lines += [f"threads of {process.pid}", (folder / STACKS).read_text()[-20_000:]]
    return "\n".join(lines)


@contextmanager
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "These tests need Chromium: apt-get install chromium."
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@contextmanager
def server(page: str = "") -> Iterator[tuple[int, list[str]]]:
    """A web server on this machine with this page wherever it is asked, or with none: its port, and
    what was asked for."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *values: object) -> None:
            """Says nothing."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    yield made.server_port, heard
    made.shutdown()
    made.server_close()


@contextmanager
def guarded(
    browser: Browser, address: str, owner: str = "local", **options: Any
) -> Iterator[BrowserContext]:
    """A new browser that shows an owner's data. Its pages must raise no error, open no dialog or
    window, run nothing that calls `fired`, and ask nobody but the program."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(PATIENCE)
    context.add_init_script("window.ran = 0; window.fired = () => { window.ran += 1; };")
    context.add_cookies([{"name": "owner", "value": owner, "url": address}])
    problems: list[str] = []

    def opened(page: Page) -> None:
        if page.opener() is not None:
            problems.append(f"opened {page.url}")

    def asked(request: Request) -> None:
        if "/assets/" not in request.url:
            sent = (request.post_data or "")[:300] if "/queue/join" in request.url else ""
            REQUESTS.append(f"{time.strftime('%X')} {request.method} {request.url[-80:]} {sent}")
        if not request.url.startswith((address, "data:", "blob:", "file:", "chrome-error:")):
            problems.append(request.url)

    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    context.on("page", opened)
    context.on("requestfinished", asked)
    OPEN.append(context)
    try:
        yield context
        ran = [frame.evaluate("window.ran") for page in context.pages for frame in page.frames]
    finally:
        OPEN.remove(context)
        context.close()
    assert problems == [], "a page raised an error, opened something or asked another server"
    assert not any(ran), "a script ran"


def visit(page: Page, address: str) -> None:
    page.goto(address)
    settled(page)


def settled(page: Page) -> None:
    """All that happens when a page opens has happened: it shows its model and its conversation."""
    expect(page.locator("html")).to_have_attribute("data-opened", "")
    expect(page.locator("#tokens .turns")).to_have_attribute("data-ready", "")
    expect(page.locator("#header .facts")).to_contain_text("context")


def send(page: Page, text: str) -> None:
    page.fill("#box textarea", text)
    page.click("#send")
    expect(page.locator("#tokens .turn.said").last).to_have_text(text)


def finished(page: Page) -> None:
    expect(page.locator("#tokens .turn").last).to_have_class(re.compile("answered"))
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#tokens .turn.growing")).to_have_count(0)


def stop(page: Page) -> None:
    """End the answer that grows, unless it has ended by itself: pages may be slower than it."""
    with suppress(Error):
        page.click("#stop", timeout=5000)


def answer(page: Page) -> str:
    return str(page.locator("#tokens .turn.answered").last.evaluate("box => box.raw()"))


def shown(page: Page) -> int:
    spans = page.locator("#tokens .turn.answered").last.locator(".tok")
    return int(sum(spans.evaluate_all("all => all.map((span) => span.count)")))


def act(page: Page, name: str, of: str = "answered") -> None:
    message = page.locator("#tokens .message", has=page.locator(f".turn.{of}")).last
    message.hover()
    message.get_by_role("button", name=name, exact=True).click()


def show(page: Page, view: str) -> None:
    page.locator("#view").get_by_role("button", name=view).click()


def entry(page: Page, title: str) -> Locator:
    return page.locator("#conversations .entry", has_text=title).first


def choose(page: Page, title: str, what: str) -> None:
    entry(page, title).hover()
    entry(page, title).locator(".dots").click()
    page.get_by_role("menuitem", name=what, exact=True).click()


def until(page: Page, wanted: Callable[[], bool]) -> None:
    """Wait for what shows elsewhere than on the page."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not wanted():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def fixed_budget(page: Page) -> None:
    """From now on drafts are made whether they pay beside a browser or not, and all answers have
    one seed."""
    open_advanced(page)
    page.get_by_label("Fixed", exact=True).check()
    page.get_by_label("A new seed for each answer").uncheck()
    open_tab(page, "Chat")


def pictures(page: Page) -> None:
    """Every picture on the page has come or failed, and two frames were drawn since."""
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    page.evaluate("new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")


class Stored(NamedTuple):
    """An answer as it is stored; `ended` once all of it is."""

    text: str
    pieces: Sequence[Piece]
    ended: bool


def stored(folder: Path, owner: str) -> list[Stored]:
    with Database(folder / "strata.db") as opened:
        store, traces = Conversations(opened, owner), Traces(opened, owner)
        messages = [m for each in store.list() for m in store.messages(each.id)]
        answers = [m for m in messages if m.role == "assistant"]
        ends = [m.run_id and traces.load(m.run_id).finish for m in answers]
    found = zip(answers, ends, strict=True)
    newest = sorted(found, key=lambda each: each[0].created, reverse=True)
    return [Stored(m.content, m.pieces or (), end is not None) for m, end in newest]


def settings(folder: Path, owner: str) -> dict[str, Any]:
    with Database(folder / "strata.db") as opened:
        return Conversations(opened, owner).list()[0].settings


def open_tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def pick(page: Page, box: str, option: str | re.Pattern[str]) -> None:
    page.locator(f"{box} input").click()
    exact = isinstance(option, str)
    page.get_by_role("listbox").get_by_role("option", name=option, exact=exact).click()


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def open_advanced(page: Page) -> None:
    open_tab(page, "Settings")
    expect(page.get_by_label("Fixed", exact=True)).to_be_hidden()
    page.locator("#advanced button").first.click()


def be_exact(page: Page) -> None:
    """From now on the likeliest token is said: such an answer is always the same, and long."""
    open_tab(page, "Settings")
    page.get_by_role("button", name="Exact").click()
    open_tab(page, "Chat")


def set_number(page: Page, label: str, value: int) -> None:
    open_tab(page, "Settings")
    page.get_by_label(label, exact=True).first.fill(str(value))
    page.get_by_label(label, exact=True).first.press("Tab")
    open_tab(page, "Chat")


def answer_at_length(page: Page, tokens: int, method: str = "Plain decoding") -> None:
    """From now on answers take seconds: without drafts they take long, and without chance they do
    not end early."""
    set_number(page, "Max tokens", tokens)
    be_exact(page)
    open_tab(page, "Settings")
    pick(page, "#method", method)
    open_tab(page, "Chat")


def long_answer(page: Page, tokens: int = 1500, method: str = "Plain decoding") -> None:
    """Begin an answer that takes seconds, and see some of it."""
    answer_at_length(page, tokens, method)
    send(page, LONG)
    expect(page.locator("#tokens .turn.answered .tok").nth(1)).to_be_attached()


def load(page: Page, label: str, words: str) -> None:
    page.locator("#models-choice label", has_text=label).first.click()
    expect(page.locator("#models-need")).to_contain_text("free on")
    page.click("#models-load")
    expect(page.locator("#models-status")).to_contain_text(words)
    expect(page.locator("#models-load")).to_be_enabled()
