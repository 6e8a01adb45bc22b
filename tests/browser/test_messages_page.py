"""What can be done with a message: nothing destroys anything, and all pages show the same."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from engine.types import MODEL
from storage.conversations import Conversations, Piece
from storage.database import Database
from tests.support.pages import (
    LONG,
    OWNER,
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
    until,
    visit,
)

pytestmark = pytest.mark.browser
MARKDOWN = "So **this** is `it`.\n\n| a | b |\n|---|---|\n| $x$ | y |\n\n```js\nlet a = 1;\n```"
THOUGHT = f"<think>\nLet me see.\n</think>\n\n{MARKDOWN}"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The running program's address, and its database with a conversation in Markdown."""
    folder = tmp_path_factory.mktemp("data")
    with Database(folder / "strata.db") as database:
        store = Conversations(database, OWNER)
        id = store.create("Formatted").id
        store.append(id, "user", "Show me.")
        pieces = [Piece(part, MODEL, 1, n, n, 0.5) for n, part in enumerate(cut(THOUGHT))]
        store.append(id, "assistant", THOUGHT, pieces=pieces)
    process, url, _ = start(folder)
    yield url, folder / "strata.db"
    end(process)


def cut(text: str) -> list[str]:
    return re.findall(r"\w+|\W", text)


@pytest.fixture
def context(browser: Browser, program: tuple[str, Path]) -> Iterator[BrowserContext]:
    made = browser.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
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


def open_formatted(page: Page) -> None:
    page.locator("#conversations .title", has_text="Formatted").first.click()
    expect(page.locator("#tokens .formatted .katex")).to_have_count(1)


def copied(page: Page) -> Any:
    return page.evaluate("navigator.clipboard.readText()")


def test_a_stored_answer_is_formatted_and_the_choice_of_view_outlives_a_reload(
    page: Page, program: tuple[str, Path]
) -> None:
    asked: list[str] = []
    page.on("response", lambda got: asked.append(got.url) if "/vendor/" in got.url else None)
    open_formatted(page)
    assert answer(page) == THOUGHT
    expect(page.locator("#tokens .formatted strong")).to_have_text("this")
    expect(page.locator("#tokens .formatted .hljs-keyword")).to_have_text("let")
    assert any("katex.min.css" in url for url in asked)
    page.locator("#tokens .message").last.hover()
    page.get_by_role("button", name="Copy code").click()
    until(page, lambda: copied(page) == "let a = 1;\n")
    act(page, "Copy")
    until(page, lambda: copied(page) == MARKDOWN)
    show(page, "Tokens")
    page.locator("#view").get_by_role("button", name="Colours").click()
    visit(page, program[0])
    expect(page.locator("#tokens .turn.answered")).to_have_text(THOUGHT)
    chosen = page.locator("#view [aria-pressed=true]")
    expect(chosen).to_have_text("Tokens")
    show(page, "Formatted")
    expect(page.locator("#tokens .formatted strong")).to_have_text("this")
    show(page, "Colours")


def test_versions_stay_when_a_message_is_edited_or_answered_again(page: Page) -> None:
    page.click("#new")
    set_number(page, "Max tokens", 30)
    send(page, "Tell me about a boat.")
    finished(page)
    first = answer(page)
    act(page, "Regenerate")
    versions = page.locator("#tokens .message:not(.mine) .versions")
    expect(versions).to_have_text("2 / 2")
    finished(page)
    second = answer(page)
    assert second != first
    act(page, "Version before")
    expect(versions).to_have_text("1 / 2")
    until(page, lambda: answer(page) == first)
    act(page, "Edit", "said")
    expect(page.locator("#box textarea")).to_have_value("Tell me about a boat.")
    send(page, "Tell me about a hill.")
    expect(page.locator("#tokens .mine .versions")).to_have_text("2 / 2")
    finished(page)
    act(page, "Version before", "said")
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me about a boat.")
    until(page, lambda: answer(page) == first)
    act(page, "Version after", "said")
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me about a hill.")


def test_a_stopped_answer_goes_on_and_a_deleted_one_comes_back(page: Page) -> None:
    page.click("#new")
    long_answer(page)
    expect(page.locator("#tokens .turn.answered .tok").nth(30)).to_be_attached()
    page.click("#stop")
    finished(page)
    stopped = answer(page)
    set_number(page, "Max tokens", 20)
    act(page, "Continue")
    until(page, lambda: len(answer(page)) > len(stopped))
    finished(page)
    longer = answer(page)
    assert longer.startswith(stopped)
    act(page, "Delete")
    expect(page.locator("#tokens .turn.answered")).to_have_count(0)
    expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
    page.locator("#tokens .offers").get_by_role("button", name="Undo").click()
    until(page, lambda: page.locator("#tokens .turn.answered").count() == 1)
    assert answer(page) == longer
    expect(page.locator("#tokens .offers button")).to_have_count(0)


def test_a_branch_is_a_conversation_of_its_own(page: Page) -> None:
    page.click("#new")
    set_number(page, "Max tokens", 20)
    send(page, "The trunk of it")
    finished(page)
    send(page, "What grows further")
    finished(page)
    listed = page.locator("#conversations .title")
    before = listed.count()
    first = page.locator("#tokens .message", has=page.locator(".turn.answered")).first
    first.hover()
    trunk = page.evaluate("document.documentElement.dataset.conversation")
    first.get_by_role("button", name="Branch").click()
    expect(listed).to_have_count(before + 1)
    # The composer is told in its turn: what is written before that belongs to the trunk.
    page.wait_for_function(
        "old => document.documentElement.dataset.conversation !== old", arg=trunk
    )
    expect(page.locator("#tokens .turn")).to_have_count(2)
    expect(page.locator("#conversations .current .title")).to_contain_text("The trunk of it")
    send(page, "Another way")
    finished(page)
    expect(page.locator("#tokens .turn")).to_have_count(4)


@pytest.mark.parametrize("one_browser", [True, False])
def test_two_pages_on_one_conversation_show_the_same(
    browser: Browser, context: BrowserContext, page: Page, program: tuple[str, Path],
    one_browser: bool,
) -> None:  # fmt: skip
    """Pages of one browser tell each other; those of others ask."""
    page.click("#new")
    set_number(page, "Max tokens", 20)
    send(page, f"Seen twice {one_browser}")
    finished(page)
    elsewhere = context if one_browser else browser.new_context()
    other = elsewhere.new_page()
    other.set_default_timeout(PATIENCE)
    visit(other, program[0])
    if not one_browser:
        other.locator("#conversations .title", has_text=f"Seen twice {one_browser}").click()
    expect(other.locator("#tokens .turn")).to_have_count(2)
    assert answer(other) == answer(page)
    set_number(page, "Max tokens", 300)
    send(page, "Say more.")
    expect(other.locator("#tokens .turn")).to_have_count(4)
    for each in (page, other):
        finished(each)
    assert answer(other) == answer(page)
    act(other, "Delete")
    expect(page.locator("#tokens .turn")).to_have_count(3)
    other.locator("#tokens .offers").get_by_role("button", name="Undo").click()
    expect(page.locator("#tokens .turn")).to_have_count(4)
    other.close()
    if not one_browser:
        elsewhere.close()


def test_messages_are_reached_by_the_keyboard_and_fit_a_phone(page: Page) -> None:
    open_formatted(page)
    expect(page.get_by_role("log", name="Conversation")).to_be_visible()
    page.locator("#tokens .turn.answered").focus()
    names = list[str]()
    for _ in range(16):
        page.keyboard.press("Tab")
        here = "document.activeElement"
        names.append(page.evaluate(f"{here}.getAttribute('aria-label') || {here}.tagName"))
    wanted = ["SUMMARY", "Copy code", "Copy", "Regenerate", "Branch", "Delete", "Prove it"]
    assert [name for name in names if name in wanted] == wanted
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 840})
        page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth + 1")
