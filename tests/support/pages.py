"""The program and its page, as the browser tests use them: started, visited, spoken to, ended.

Nothing here waits for a time. What is waited for is on the page: an expectation has PATIENCE, which
a slow machine with other work needs.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.traces import Traces
from tests.conftest import EMBEDDED, ROOT

OWNER = "local"
"""Whose the conversations are where nobody logs in."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"]
PATIENCE = 90_000
"""Milliseconds that an expectation waits for. The usual answer takes two of its seconds."""
LONG = "Tell me a very long story about the sea."
ENDED = 60
"""Seconds that the program has for its end."""


def start(
    folder: Path, *more: str, held: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str, str]:
    """The running program, its address, and what it printed until it was ready.

    It runs the embedded model as a folder unless another `--model` is named: the format that it
    takes by itself depends on the machine, and measuring that would disturb what is tested. The
    handlers that are `held` answer when they are told to: see `late`.
    """
    program = ["-m", "tests.support.held", str(folder), *held, "--"] if held else ["app.py"]
    command = [sys.executable, *program, "--no-browser", "--port", "0", "--data-dir", str(folder)]
    command += [] if "--model" in more else ["--model", str(EMBEDDED)]
    process = subprocess.Popen(
        [*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"ready at (http\S+)", line):
            return process, found[1], said
    raise AssertionError(f"The program ended with {process.wait()}:\n{said}")


@contextmanager
def late(folder: Path, name: str) -> Iterator[Callable[[], int]]:
    """While this goes on, a handler that is held does not answer. Tells how often it began:
    a choice in a list may begin it twice."""
    file, begun = folder / name, folder / f"{name}.begun"
    begun.write_text("")
    file.touch()
    try:
        yield lambda: len(begun.read_text())
    finally:
        file.unlink()


def told(process: subprocess.Popen[str], words: str) -> str:
    """The next line with these words that the program prints."""
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)


def end(process: subprocess.Popen[str]) -> None:
    """End the program, and wait until it has ended."""
    process.terminate()
    process.wait(ENDED)
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """The browser that is installed, without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "These tests need Chromium: apt-get install chromium."
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=[*FLAGS, *flags])
        yield opened
        opened.close()


def visit(page: Page, address: str) -> None:
    """Open the program's page, and wait until it shows a model and what was open before."""
    page.goto(address)
    settled(page)


def settled(page: Page) -> None:
    """All that happens when a page opens has happened: it shows its model and its conversation."""
    expect(page.locator("html")).to_have_attribute("data-opened", "")
    expect(page.locator("#tokens .turns")).to_have_attribute("data-ready", "")
    expect(page.locator("#header .facts")).to_contain_text("context")


def send(page: Page, text: str) -> None:
    """Say something, and see that it was taken."""
    page.fill("#box textarea", text)
    page.click("#send")
    expect(page.locator("#tokens .turn.said").last).to_have_text(text)


def finished(page: Page) -> None:
    """Wait until the last answer is over, and shown as it is stored."""
    expect(page.locator("#tokens .turn").last).to_have_class(re.compile("answered"))
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#tokens .turn.growing")).to_have_count(0)


def answer(page: Page) -> str:
    """The text of the last answer, as the model wrote it."""
    return str(page.locator("#tokens .turn.answered").last.evaluate("box => box.raw()"))


def act(page: Page, name: str, of: str = "answered") -> None:
    """Press a button of the last message of one kind: `said` or `answered`."""
    message = page.locator("#tokens .message", has=page.locator(f".turn.{of}")).last
    message.hover()
    message.get_by_role("button", name=name, exact=True).click()


def show(page: Page, view: str) -> None:
    """Look at messages as `Formatted` or as `Tokens`."""
    page.locator("#view").get_by_role("button", name=view).click()


def entry(page: Page, title: str) -> Locator:
    """A conversation in the list."""
    return page.locator("#conversations .entry", has_text=title).first


def choose(page: Page, title: str, what: str) -> None:
    """Do something with a conversation, from its menu."""
    entry(page, title).hover()
    entry(page, title).locator(".dots").click()
    page.get_by_role("menuitem", name=what, exact=True).click()


def until(page: Page, wanted: Callable[[], bool]) -> None:
    """Wait for what shows elsewhere than on the page."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not wanted():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def pictures(page: Page) -> None:
    """Every picture on the page has come or failed, and two frames were drawn since."""
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    page.evaluate("new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")


class Stored(NamedTuple):
    """An answer as it is stored; `ended` once all of it is."""

    text: str
    pieces: Sequence[Piece]
    ended: bool


def stored(database: Path) -> list[Stored]:
    """The answers that are stored, the newest first."""
    with Database(database) as opened:
        store, traces = Conversations(opened, OWNER), Traces(opened, OWNER)
        messages = [m for each in store.list() for m in store.messages(each.id)]
        answers = [m for m in messages if m.role == "assistant"]
        ends = [m.run_id and traces.load(m.run_id).finish for m in answers]
    found = zip(answers, ends, strict=True)
    newest = sorted(found, key=lambda each: each[0].created, reverse=True)
    return [Stored(m.content, m.pieces or (), end is not None) for m, end in newest]


def settings(database: Path) -> dict[str, Any]:
    """The settings of the conversation that was used last."""
    with Database(database) as opened:
        return Conversations(opened, OWNER).list()[0].settings


def open_tab(page: Page, name: str) -> None:
    """Go to a tab."""
    page.get_by_role("tab", name=name).click()


def open_advanced(page: Page) -> None:
    """Show the settings that a chat rarely needs."""
    open_tab(page, "Settings")
    expect(page.get_by_label("Fixed", exact=True)).to_be_hidden()
    page.locator("#advanced button").first.click()


def be_exact(page: Page) -> None:
    """From now on the likeliest token is said: such an answer is always the same, and long."""
    open_tab(page, "Settings")
    page.get_by_role("button", name="Exact").click()
    open_tab(page, "Chat")


def set_number(page: Page, label: str, value: int) -> None:
    """Change a setting, and go back to the chat."""
    open_tab(page, "Settings")
    page.get_by_label(label, exact=True).first.fill(str(value))
    page.get_by_label(label, exact=True).first.press("Tab")
    open_tab(page, "Chat")


def long_answer(page: Page, tokens: int = 1500, method: str = "Plain decoding") -> None:
    """Begin an answer that takes seconds, and see some of it. Without drafts it takes long, and
    without chance it does not end early."""
    set_number(page, "Max tokens", tokens)
    be_exact(page)
    open_tab(page, "Settings")
    page.locator("#method input").click()
    page.get_by_role("option", name=method, exact=True).click()
    open_tab(page, "Chat")
    send(page, LONG)
    expect(page.locator("#tokens .turn.answered .tok").nth(1)).to_be_attached()


def load(page: Page, label: str, words: str) -> None:
    """Choose a model of the Models tab's list and load it."""
    page.locator("#models-choice label", has_text=label).first.click()
    expect(page.locator("#models-need")).to_contain_text("free on")
    page.click("#models-load")
    expect(page.locator("#models-status")).to_contain_text(words)
    expect(page.locator("#models-load")).to_be_enabled()
