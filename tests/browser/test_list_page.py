"""The list of conversations as people use it: by mouse, by keyboard, and on a phone."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from storage.conversations import Conversations
from storage.database import Database
from tests.support.pages import OWNER, choose, end, entry, start, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
SEARCHED = """(box, words) => {
  box.value = words;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}"""
TITLES = ("Tides", "Boats <b>", "Rain", "Bread")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with Database(tmp_path / "strata.db") as db:
        store = Conversations(db, OWNER)
        for title in reversed(TITLES):
            id = store.create(title).id
            store.append(id, "user", f"Of {title.lower()}, please")
            store.append(id, "assistant", f"Much can be said of {title.lower()}.")
    process, url, _ = start(tmp_path)
    yield url
    end(process)


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_text_contents()


def test_the_list_is_arranged_searched_and_carried_off(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    context = browser.new_context(accept_downloads=True)
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
    # By keyboard: down twice, open, and delete the one below.
    page.locator("#conversations .open[tabindex='0']").focus()
    for key in ("Home", "ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#tokens .turn.said")).to_have_text("Of boats <b>, please")
    expect(page.locator("#conversations .current .title")).to_have_text("Boats <b>")
    entry(page, "Bread").locator(".open").focus()
    page.keyboard.press("Delete")
    expect(page.locator("#conversations .title")).to_have_count(3)
    expect(page.locator("#tokens .turn.said")).to_have_text("Of boats <b>, please")
    # A search shows the words, and leads to them.
    page.fill("#search textarea, #search input", "said of TIDES")
    expect(page.locator("#conversations .title")).to_have_text(["Tides"])
    expect(page.locator("#conversations mark")).to_have_text("said of tides")
    entry(page, "Tides").locator(".open").click()
    expect(page.locator("#tokens .turn.answered")).to_contain_text("Much can be said of tides.")
    page.fill("#search textarea, #search input", "nowhere to be found")
    expect(page.locator("#conversations .nothing")).to_be_visible()
    page.fill("#search textarea, #search input", "")
    expect(page.locator("#conversations .title")).to_have_count(3)
    # One as a page that shows what was said and runs nothing, all of them as one file each.
    with page.expect_download() as coming:
        choose(page, "Boats", "Export as a page with colours")
    name = coming.value.suggested_filename
    assert name == "Boats b.html"
    coming.value.save_as(tmp_path / name)
    page.click("#export-all")
    with page.expect_download() as coming:
        page.get_by_role("button", name="JSON", exact=True).click()
    coming.value.save_as(tmp_path / "all.json")
    with page.expect_download() as coming:
        page.click("#export-all")
        page.get_by_role("button", name="Markdown", exact=True).click()
    coming.value.save_as(tmp_path / "all.zip")
    assert len(json.loads((tmp_path / "all.json").read_text())) == 3
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert len(archive.namelist()) == 3
    shown = context.new_page()
    shown.goto((tmp_path / name).as_uri())
    expect(shown.locator("h1")).to_have_text("Boats <b>")
    assert shown.locator("b, script").count() == 0
    context.close()


def test_a_menu_is_left_as_it_was_found(browser: Browser, address: str) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 500})
    page = context.new_page()
    visit(page, address)
    last = entry(page, "Bread")
    last.locator(".open").focus()
    page.keyboard.press("Shift+F10")
    menu = page.get_by_role("menu")
    box = menu.bounding_box()
    assert box is not None and box["y"] >= 0 and box["y"] + box["height"] <= 500, (
        "all of it is seen"
    )
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
        page.locator("#search :is(textarea, input)").evaluate(SEARCHED, "Tides")
    page.wait_for_timeout(500)
    expect(page.locator("#conversations .line")).to_have_value("Another title")
    page.keyboard.press("Escape")
    expect(page.locator("#conversations .title")).to_have_text(["Tides"])
    page.fill("#search textarea, #search input", "")
    expect(page.locator("#conversations .title")).to_have_count(len(TITLES))
    assert titles(page) == list(TITLES), "Escape keeps the title"
    context.close()
