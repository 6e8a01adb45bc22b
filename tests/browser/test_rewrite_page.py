"""Rewriting on the page: an answer or a file is attached, its answer shows what changed, and the
new text becomes a version or a file."""

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from storage.conversations import Conversations
from storage.database import Database
from tests.support.pages import act, answer, entry, finished, fixed_budget, send, set_number

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=fired()>"


def attached(page: Page) -> Locator:
    return page.locator("#writer .file")


def instruct(page: Page, text: str) -> Locator:
    page.fill("#box textarea", text)
    page.click("#send")
    expect(page.locator("#tokens .turn.said").last).to_contain_text(text)
    finished(page)
    return page.locator("#tokens .message").last.locator(".changes")


def test_an_answer_is_rewritten_and_the_new_text_becomes_its_version(page: Page) -> None:
    set_number(page, "Max tokens", 32)
    fixed_budget(page)
    send(page, "Tell me of the sea.")
    finished(page)
    first = answer(page)
    act(page, "Rewrite")
    expect(attached(page)).to_contain_text("answer.md · to be rewritten")
    expect(page.locator("#box textarea")).to_be_focused()
    changes = instruct(page, "Make it shorter.")
    expect(attached(page)).to_have_count(0)
    expect(page.locator("#tokens .attached summary")).to_contain_text("answer.md · to be rewritten")
    second = answer(page)
    kept = changes.locator(".words").evaluate(
        "(box) => [...box.childNodes].filter(({ tagName }) => tagName !== 'DEL')"
        ".map((node) => node.textContent).join('')"
    )
    assert second != first and kept.split() == second.split()
    changes.get_by_role("button", name="Use as a new version").click()
    expect(page.locator("#tokens .turn.said")).to_have_count(1)
    expect(page.locator("#tokens .versions").last).to_contain_text("2 / 2")
    assert answer(page) == second
    act(page, "Version before")
    expect(page.locator("#tokens .turn.said")).to_have_count(2)


def test_an_attached_file_is_rewritten_and_the_new_text_is_saved(
    data: Path, owner: str, page: Page
) -> None:
    page.set_input_files("#writer .choose", {
        "name": "notes.md", "mimeType": "text/plain", "buffer": f"The boat {EVIL} sank.".encode(),
    })  # fmt: skip
    expect(attached(page)).to_contain_text("notes.md")
    set_number(page, "Max tokens", 8)
    instruct(page, "Sum it up.")
    page.locator("#tokens .attached").hover()
    page.locator("#tokens .attached").get_by_role("button", name="Rewrite").click()
    expect(attached(page)).to_contain_text("notes.md · to be rewritten")
    changes = instruct(page, "Say it in other words.")
    expect(changes.locator("del").first).to_be_visible()
    with page.expect_download() as started:
        changes.get_by_role("button", name="Save as notes.md").click()
    assert started.value.suggested_filename == "notes.md"
    assert Path(started.value.path()).read_text() == answer(page).strip()
    with Database(data / "strata.db") as opened:
        store = Conversations(opened, owner)
        (talk,) = store.list()
        asked = store.messages(talk.id)[2].content
    assert asked.startswith("Rewrite this text, and answer with the whole new text alone: notes.md")
    page.reload()
    expect(page.locator("#tokens .changes")).to_contain_text(EVIL)
    expect(entry(page, talk.title)).to_be_visible()
