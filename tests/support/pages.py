"""The program and its page, as the browser tests use them: started, visited, spoken to, ended.

Nothing here waits for a time. What is waited for is on the page: an expectation has PATIENCE, which
a slow machine with other work needs.
"""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import ROOT

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"]
PATIENCE = 90_000
"""Milliseconds that an expectation waits for. The usual answer takes two of its seconds."""
ENDED = 60
"""Seconds that the program has for its end."""


def start(folder: Path, *more: str) -> tuple[subprocess.Popen[str], str, str]:
    """The running program, its address, and what it printed until it was ready."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(folder)]
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
    expect(page.locator("#header .facts")).to_contain_text("context")


def send(page: Page, text: str) -> None:
    """Say something, and see that it was taken."""
    page.fill("#box textarea", text)
    page.click("#send")
    expect(page.locator("#tokens .turn.said").last).to_have_text(text)


def finished(page: Page) -> None:
    """Wait until the last answer is over."""
    expect(page.locator("#tokens .turn").last).to_have_class(re.compile("answered"))
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#again")).to_be_enabled()


def answer(page: Page) -> str:
    """The text of the last answer. A turn that was never laid out has no inner text yet."""
    return page.locator("#tokens .turn.answered").last.text_content() or ""


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


def stored(database: Path) -> list[tuple[str, list[Any], str | None]]:
    """Text, tokens and run of the answers that are stored, the newest first."""
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "SELECT content, pieces, run FROM messages WHERE role = 'assistant' "
            "ORDER BY created DESC"
        ).fetchall()
    connection.close()
    return [(content, json.loads(pieces or "[]"), run) for content, pieces, run in rows]


def settings(database: Path) -> str:
    """The settings of the conversation that was used last."""
    with sqlite3.connect(database) as connection:
        text = connection.execute("SELECT settings FROM conversations ORDER BY updated DESC")
        found = text.fetchone()
    connection.close()
    return str(found[0])


def open_tab(page: Page, name: str) -> None:
    """Go to a tab."""
    page.get_by_role("tab", name=name).click()


def open_advanced(page: Page) -> None:
    """Show the settings that a chat rarely needs."""
    open_tab(page, "Settings")
    expect(page.get_by_label("Fixed", exact=True)).to_be_hidden()
    page.locator("#advanced button").first.click()


def set_number(page: Page, label: str, value: int) -> None:
    """Change a setting, and go back to the chat."""
    open_tab(page, "Settings")
    page.get_by_label(label, exact=True).first.fill(str(value))
    page.get_by_label(label, exact=True).first.press("Tab")
    open_tab(page, "Chat")


def load(page: Page, label: str, words: str) -> None:
    """Choose a model of the Models tab's list and load it."""
    page.locator("#models-choice label", has_text=label).first.click()
    expect(page.locator("#models-need")).to_contain_text("free on")
    page.click("#models-load")
    expect(page.locator("#models-status")).to_contain_text(words)
    expect(page.locator("#models-load")).to_be_enabled()
