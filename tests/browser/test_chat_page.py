"""Messages and conversations: nothing destroys anything, and all pages show the same."""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from engine.types import MODEL
from storage.conversations import Conversations, Piece
from storage.database import Database
from tests.support.pages import (
    LONG,
    act,
    answer,
    answer_at_length,
    choose,
    entry,
    finished,
    fixed_budget,
    send,
    set_number,
    show,
    shown,
    unending,
    until,
    visit,
)

pytestmark = pytest.mark.browser
MARKDOWN = "So **this** is `it`.\n\n| a | b |\n|---|---|\n| $x$ | y |\n\n```js\nlet a = 1;\n```"
THOUGHT = f"<think>\nLet me see.\n</think>\n\n{MARKDOWN}"
SEARCH = "#search :is(textarea, input)"
TITLES = ("Tides", "Boats <b>", "Rain", "Bread")


def keep_conversations(data: Path, owner: str) -> None:
    with Database(data / "strata.db") as db:
        store = Conversations(db, owner)
        for title in reversed(TITLES):
            id = store.create(title).id
            store.append(id, "user", f"Of {title.lower()}, please")
            store.append(id, "assistant", f"Much can be said of {title.lower()}.")


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_text_contents()


def guessed(page: Page) -> str:
    return (page.locator("#tokens .message:not(.mine) .note").last.text_content() or "").strip()


def guessed_in_the_panel(page: Page) -> str:
    return (page.locator("#figures .saved").text_content() or "").strip()


def test_a_message_is_answered_token_by_token_and_found_again(page: Page, address: str) -> None:
    fixed_budget(page)
    set_number(page, "Max tokens", 80)
    send(page, "Tell me a short story about a boat.")
    finished(page)
    text = answer(page)
    kinds = page.locator("#tokens .turn.answered .tok:not(.k-target)")
    assert kinds.count() > 5, "drafted tokens are marked"
    colours = kinds.evaluate_all("all => all.map(n => getComputedStyle(n).textDecorationColor)")
    assert len(set(colours)) >= 2 and "rgba(0, 0, 0, 0)" not in colours
    kinds.first.hover()
    expect(page.locator("#tokens .inspector")).to_contain_text("position")
    expect(page.locator("#figures")).to_contain_text("Tokens per step")
    expect(page.locator("#figures .ribbon b").first).to_be_attached()
    expect(page.locator("#conversations .current .title")).to_contain_text("Tell me a short story")
    act(page, "Prove it")
    expect(page.locator("#proof .same")).to_contain_text("Identical")
    finished(page)
    pace, lead = page.locator("#header .pace"), page.locator("#figures .figure.lead")
    expect(pace).to_contain_text("(by the last proof)")
    expect(lead).to_contain_text(
        re.compile("of the whole answer.*; decoding alone|no (draft was|measurable difference)")
    )
    proved = pace.inner_text()
    visit(page, address)
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me a short story about a boat.")
    assert answer(page) == text, "a reload shows the conversation as it was"
    expect(pace).to_have_text(proved)
    page.click("#new")
    expect(lead.locator("b")).to_have_text("–")


@pytest.mark.soak
def test_a_stored_answer_is_formatted_copied_and_reached_by_the_keyboard(
    another: Callable[..., BrowserContext], address: str, data: Path, owner: str
) -> None:
    with Database(data / "strata.db") as database:
        store = Conversations(database, owner)
        id = store.create("Formatted").id
        store.append(id, "user", "Show me.")
        parts = re.findall(r"\w+|\W", THOUGHT)
        pieces = [Piece(part, MODEL, 1, n, n, 0.5) for n, part in enumerate(parts)]
        store.append(id, "assistant", THOUGHT, pieces=pieces)
    page = another(permissions=["clipboard-read", "clipboard-write"]).new_page()
    asked: list[str] = []
    page.on("response", lambda got: asked.append(got.url) if "/vendor/" in got.url else None)

    def copied() -> Any:
        return page.evaluate("navigator.clipboard.readText()")

    visit(page, address)
    entry(page, "Formatted").locator(".open").click()
    expect(page.locator("#tokens .formatted .katex")).to_have_count(1)
    assert answer(page) == THOUGHT
    expect(page.locator("#tokens .formatted strong")).to_have_text("this")
    expect(page.locator("#tokens .formatted .hljs-keyword")).to_have_text("let")
    assert any("katex.min.css" in url for url in asked)
    message = page.locator("#tokens .message").last
    message.hover()
    page.get_by_role("button", name="Copy code").click()
    until(page, lambda: copied() == "let a = 1;\n")
    names = message.locator(".acts .act:visible")
    shown = ["Copy", "Regenerate", "Rewrite", "Branch", "Delete", "Prove it"]
    expect(names).to_have_text(shown)
    act(page, "Copy")
    until(page, lambda: copied() == MARKDOWN)
    # Both buttons have said "Copied" for a moment.
    expect(page.get_by_role("button", name="Copy code")).to_have_count(1)
    expect(message.get_by_role("button", name="Copy", exact=True)).to_have_count(1)

    expect(page.get_by_role("log", name="Conversation")).to_be_visible()
    page.locator("#tokens .turn.answered").focus()
    reached = list[str]()
    for _ in range(16):
        page.keyboard.press("Tab")
        here = "document.activeElement"
        reached.append(page.evaluate(f"{here}.getAttribute('aria-label') || {here}.tagName"))
    wanted = ["SUMMARY", "Copy code", *shown]
    assert [name for name in reached if name in wanted] == wanted

    show(page, "Tokens")
    page.locator("#view").get_by_role("button", name="Colours").click()
    visit(page, address)
    expect(page.locator("#tokens .turn.answered")).to_have_text(THOUGHT)
    expect(page.locator("#view [aria-pressed=true]")).to_have_text("Tokens")
    show(page, "Formatted")
    expect(page.locator("#tokens .formatted strong")).to_have_text("this")


def test_versions_stay_when_a_message_is_edited_or_answered_again(page: Page) -> None:
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
    for way, text, number in (("before", first, 1), ("after", second, 2), ("before", first, 1)):
        act(page, f"Version {way}")
        expect(versions).to_have_text(f"{number} / 2")
        until(page, lambda text=text: answer(page) == text)
        until(page, lambda: guessed(page) == guessed_in_the_panel(page))
    act(page, "Edit", "said")
    editor = page.locator("#tokens .editor textarea")
    expect(editor).to_have_value("Tell me about a boat.")
    editor.fill("Tell me about a hill.")
    editor.press("Enter")
    expect(page.locator("#tokens .mine .versions")).to_have_text("2 / 2")
    finished(page)
    act(page, "Version before", "said")
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me about a boat.")
    until(page, lambda: answer(page) == first)
    act(page, "Version after", "said")
    expect(page.locator("#tokens .turn.said")).to_have_text("Tell me about a hill.")


def test_an_answer_is_stopped_continued_deleted_restored_and_branched(
    page: Page, data: Path, owner: str
) -> None:
    answer_at_length(page, 1500)
    with unending(data, owner):
        send(page, LONG)
        until(page, lambda: shown(page) > 30)
        page.click("#stop")
        finished(page)
    expect(page.locator("#figures")).to_contain_text("stopped")
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
    expect(page.locator("#tokens .turn.answered")).to_have_count(1)
    until(page, lambda: answer(page) == longer)
    expect(page.locator("#tokens .offers button")).to_have_count(0)

    send(page, "What grows further")
    finished(page)
    first = page.locator("#tokens .message", has=page.locator(".turn.answered")).first
    first.hover()
    trunk = page.evaluate("document.documentElement.dataset.conversation")
    first.get_by_role("button", name="Branch").click()
    expect(page.locator("#conversations .title")).to_have_count(2)
    # The composer is told in its turn: what is written before that belongs to the trunk.
    page.wait_for_function(
        "old => document.documentElement.dataset.conversation !== old", arg=trunk
    )
    expect(page.locator("#tokens .turn")).to_have_count(2)
    expect(page.locator("#conversations .current .title")).to_contain_text("Tell me a very long")
    send(page, "Another way")
    finished(page)
    expect(page.locator("#tokens .turn")).to_have_count(4)


@pytest.mark.soak
@pytest.mark.parametrize("one_browser", [True, False])
def test_two_pages_show_the_same(
    another: Callable[..., BrowserContext], page: Page, address: str, one_browser: bool
) -> None:
    """Pages of one browser tell each other; those of others ask. What is open stays open."""
    set_number(page, "Max tokens", 20)
    send(page, "Seen twice")
    finished(page)
    other = (page.context if one_browser else another()).new_page()
    visit(other, address)
    if not one_browser:
        entry(other, "Seen twice").locator(".open").click()
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

    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    send(page, "Of clouds, please")
    expect(other.locator("#conversations .title").first).to_have_text("Of clouds, please")
    finished(page)
    choose(page, "Of clouds", "Delete")
    expect(other.locator("#conversations .title")).to_have_text(["Seen twice"])
    expect(other.locator("#conversations .current .title")).to_have_text("Seen twice")
    expect(other.locator("#tokens .turn")).to_have_count(4)


@pytest.mark.soak
def test_the_list_is_arranged_searched_and_carried_off(
    context: BrowserContext, address: str, data: Path, owner: str, tmp_path: Path
) -> None:
    keep_conversations(data, owner)
    page = context.new_page()
    visit(page, address)
    heads = page.locator("#conversations h2")
    expect(heads).to_have_text(["Today"])
    choose(page, "Rain", "Pin")
    expect(heads).to_have_text(["Pinned", "Today"])
    choose(page, "Tides", "Move to folder")
    page.locator("#conversations .line").fill("Sea")
    page.keyboard.press("Enter")
    expect(heads).to_have_text(["Pinned", "Sea", "Today"])
    assert titles(page) == ["Rain", "Tides", "Boats <b>", "Bread"]
    # By keyboard: down twice, open it, rename it; delete it and the one below, and undo the first.
    page.locator("#conversations .open[tabindex='0']").focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    said, current = (
        page.locator("#tokens .turn.said"), page.locator("#conversations .current .title")
    )  # fmt: skip
    expect(said).to_have_text("Of boats <b>, please")
    expect(current).to_have_text("Boats <b>")
    entry(page, "Boats").locator(".open").focus()
    page.keyboard.press("F2")
    page.locator("#conversations .line").fill("Ships <b>")
    page.keyboard.press("Enter")
    expect(current).to_have_text("Ships <b>")
    choose(page, "Ships", "Delete")
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations .title")).to_have_count(4)
    expect(said).to_have_text("Of boats <b>, please")
    entry(page, "Bread").locator(".open").focus()
    page.keyboard.press("Delete")
    expect(page.locator("#conversations .title")).to_have_count(3)
    expect(said).to_have_text("Of boats <b>, please")
    # A search shows the words, and leads to them.
    page.fill(SEARCH, "said of TIDES")
    expect(page.locator("#conversations .title")).to_have_text(["Tides"])
    expect(page.locator("#conversations mark")).to_have_text("said of tides")
    entry(page, "Tides").locator(".open").click()
    expect(page.locator("#tokens .turn.answered")).to_contain_text("Much can be said of tides.")
    page.fill(SEARCH, "nowhere to be found")
    expect(page.locator("#conversations .nothing")).to_be_visible()
    page.press(SEARCH, "Escape")
    expect(page.locator(SEARCH)).to_have_value("")
    expect(page.locator("#conversations .title")).to_have_count(3)
    # One as a page that shows what was said and runs nothing, all of them as one file each.
    with page.expect_download() as coming:
        choose(page, "Ships", "Export as a page with colours")
    name = coming.value.suggested_filename
    assert name == "Ships b.html"
    coming.value.save_as(tmp_path / name)
    for kind, file in (("JSON", "all.json"), ("Markdown", "all.zip")):
        page.click("#export-all")
        with page.expect_download() as coming:
            page.get_by_role("button", name=kind, exact=True).click()
        coming.value.save_as(tmp_path / file)
    assert len(json.loads((tmp_path / "all.json").read_text())) == 3
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert len(archive.namelist()) == 3
    shown = context.new_page()
    shown.goto((tmp_path / name).as_uri())
    expect(shown.locator("h1")).to_have_text("Ships <b>")
    assert shown.locator("b, script").count() == 0


@pytest.mark.soak
def test_a_menu_is_left_as_it_was_found(
    another: Callable[..., BrowserContext], address: str, data: Path, owner: str
) -> None:
    keep_conversations(data, owner)
    page = another(viewport={"width": 1200, "height": 500}).new_page()
    visit(page, address)
    last = entry(page, "Bread")
    last.locator(".open").focus()
    page.keyboard.press("Shift+F10")
    menu = page.get_by_role("menu")
    expect(menu).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("menuitem", name="Pin")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    expect(last.locator(".open")).to_be_focused()
    page.keyboard.press("F2")
    page.locator("#conversations .line").fill("Another title")
    # What changes the list meanwhile waits until the title is written.
    with page.expect_response("**/queue/join*"):
        page.locator(SEARCH).evaluate(
            "(box) => { box.value = 'Tides'; box.dispatchEvent(new Event('input', "
            "{ bubbles: true })); }"
        )
    page.wait_for_timeout(500)  # Time for what must not happen.
    expect(page.locator("#conversations .line")).to_have_value("Another title")
    page.keyboard.press("Escape")
    expect(page.locator("#conversations .title")).to_have_text(["Tides"])
    page.fill(SEARCH, "")
    expect(page.locator("#conversations .title")).to_have_count(len(TITLES))
    assert titles(page) == list(TITLES), "Escape keeps the title"


@pytest.mark.soak
def test_an_import_is_opened_and_its_upload_deleted(page: Page, data: Path, tmp_path: Path) -> None:
    message = {"role": "user", "content": "A question from elsewhere"}
    choose_file = page.locator(".tools input[type=file]")
    for name, content in {"chat.json": json.dumps([message]), "deep.json": "[" * 100_000}.items():
        (tmp_path / name).write_text(content)
        choose_file.set_input_files(tmp_path / name)
        if name == "chat.json":
            expect(page.locator("#tokens .turn.said")).to_have_text(message["content"])
        else:
            expect(page.locator(".toast-body")).to_contain_text("too deeply")
    assert (data / "uploads").is_dir()
    until(page, lambda: not [*(data / "uploads").rglob("*.json")])
