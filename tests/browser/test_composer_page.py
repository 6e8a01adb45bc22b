"""Where messages are written, in a real browser: the keyboard, the queue, the edit mode, drafts,
files, the gauge, simple mode, the tour and the phone."""

import re

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.support.pages import (
    PATIENCE,
    finished,
    long_answer,
    send,
    set_number,
    settled,
    visit,
)
from tests.unit.test_attachments import pdf

pytestmark = pytest.mark.browser
BOX = "#box textarea"
COUNTED = re.compile(r"Context: \d+ of 1,792 tokens")
NOTES = b"# Notes\n```py\nx = 1\n```\n" + b"The boat was red. " * 20


def file(name: str, content: bytes) -> FilePayload:
    return {"name": name, "mimeType": "text/plain", "buffer": content}


def said(page: Page, count: int) -> None:
    expect(page.locator("#tokens .turn.said")).to_have_count(count)


def test_the_keyboard(page: Page) -> None:
    set_number(page, "Max tokens", 12)
    box = page.locator(BOX)
    box.fill("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    box.dispatch_event("keydown", {"key": "Enter", "isComposing": True, "bubbles": True})
    expect(box).to_have_value("one\ntwo")
    said(page, 0)
    box.press("Enter")
    said(page, 1)
    expect(box).to_have_value("")
    finished(page)
    box.press("ArrowUp")
    expect(box).to_have_value("one\ntwo")
    expect(page.locator(".editing")).to_be_visible()
    box.press("Escape")
    expect(page.locator(".editing")).to_be_hidden()
    box.press("Control+Shift+O")
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("tab", name="Settings").click()
    page.keyboard.press("Control+k")
    expect(page.locator("#search").locator("input, textarea")).to_be_focused()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_hidden()
    page.locator("#to-help").focus()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    expect(page.locator("#to-help")).to_be_focused()


def test_what_is_sent_while_an_answer_grows_waits_in_sight(page: Page) -> None:
    long_answer(page, 400)
    box = page.locator(BOX)
    for text in ("first", "second", "third"):
        box.fill(text)
        expect(page.locator("#queue")).to_be_visible()
        box.press("Enter")
        expect(box).to_have_value("")
    waits = page.locator(".wait .words")
    expect(waits).to_have_text(["first", "second", "third"])
    page.get_by_role("button", name="Remove: second").click()
    expect(waits).to_have_text(["first", "third"])
    page.keyboard.press("Escape")  # Stops the answer; then nothing goes by itself.
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".waiting")).to_contain_text("Not sent yet")
    said(page, 1)
    page.reload()
    settled(page)
    expect(waits).to_have_text(["first", "third"])
    set_number(page, "Max tokens", 8)
    page.get_by_role("button", name="Send now").click()
    said(page, 3)
    expect(waits).to_have_count(0)
    texts = page.locator("#tokens .turn.said").all_text_contents()
    assert texts[1:] == ["first", "third"], "the next follows when an answer has ended by itself"
    finished(page)


def test_an_edit_gives_back_what_was_being_written(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    send(page, "What is a boat?")
    finished(page)
    box = page.locator(BOX)
    box.fill("half a thought")
    page.locator("#tokens .message.mine").hover()
    page.locator("#tokens .mine [data-act=edit]").click()
    expect(box).to_have_value("What is a boat?")
    page.get_by_role("button", name="Cancel").click()
    expect(box).to_have_value("half a thought")
    page.locator("#tokens .mine [data-act=edit]").click()
    expect(box).to_have_value("What is a boat?")
    box.fill("What is a ship?")
    box.press("Enter")
    expect(page.locator("#tokens .turn.said")).to_have_text(["What is a ship?"])
    expect(page.locator(".editing")).to_be_hidden()
    expect(box).to_have_value("half a thought")
    finished(page)


def test_drafts_survive_a_reload_and_another_conversation(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    send(page, "A conversation with a draft")
    finished(page)
    box = page.locator(BOX)
    box.fill("for this one")
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    expect(box).to_have_value("")
    box.fill("for a new one")
    page.reload()
    settled(page)
    expect(box).to_have_value("for a new one")
    page.locator("#conversations").get_by_text("A conversation with a draft").click()
    expect(box).to_have_value("for this one")
    box.press("Enter")
    said(page, 2)
    finished(page)
    page.reload()
    settled(page)
    said(page, 2)
    expect(box).to_have_value("")


def test_files_go_with_a_message_and_are_folded_in_it(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    choose = page.locator("#writer .choose")
    choose.set_input_files([file("notes.md", NOTES), file("cat.png", b"\x89PNG\0\0\0")])
    chips = page.locator(".files .words")
    expect(chips.nth(1)).to_contain_text("cat.png is not text")
    expect(chips.nth(0)).to_contain_text("notes.md · 384 B · ")
    expect(page.locator(".gauge")).to_have_attribute("aria-valuetext", COUNTED)
    page.get_by_role("button", name="Remove cat.png").click()
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["name,age\\nAnn,7\\n"], "people.csv"));
          const box = document.querySelector("#box textarea");
          box.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
          const more = new DataTransfer();
          more.items.add(new File(["x"], "gone.txt"));
          box.dispatchEvent(new DragEvent("drop", { dataTransfer: more, bubbles: true }));
        }"""
    )
    choose.set_input_files([file("paper.pdf", pdf("On boats."))])
    expect(chips).to_have_count(4)
    page.get_by_role("button", name="Remove gone.txt").click()
    page.fill(BOX, "What do they say?")
    page.press(BOX, "Enter")
    message = page.locator("#tokens .turn.said")
    expect(message.locator("summary")).to_contain_text(["notes.md", "people.csv", "paper.pdf"])
    expect(message.locator("pre").first).to_be_hidden()
    expect(message).to_contain_text("What do they say?")
    expect(chips).to_have_count(0)
    finished(page)
    message.locator("summary").nth(2).click()
    expect(message.locator("pre").nth(2)).to_have_text("On boats.")
    page.press(BOX, "ArrowUp")
    expect(page.locator(BOX)).to_have_value("What do they say?")
    expect(chips).to_have_count(3)
    page.keyboard.press("Escape")
    expect(chips).to_have_count(0)


def test_the_gauge_says_what_would_be_left_out(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    for _ in range(2):
        send(page, "word " * 600)
        finished(page)
    drops = page.locator(".drops")
    page.fill(BOX, "word " * 700)
    expect(drops).to_contain_text("will not read the 2 oldest messages")
    page.fill(BOX, "word " * 2500)
    expect(drops).to_contain_text("This message is too long")
    page.fill(BOX, "")
    expect(drops).to_be_hidden()


def test_a_phone(browser: Browser, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    visit(page, address)
    for height in (640, 844):
        page.set_viewport_size({"width": 390, "height": height})
        expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    page.click(".no-tour")
    expect(page.locator(".offer")).to_be_hidden()
    expect(page.locator(".list")).not_to_be_in_viewport()
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator("#new")).to_be_in_viewport()
    page.click("#new")
    expect(page.locator("#new")).not_to_be_in_viewport()
    expect(page.locator("#figures .ribbon")).to_be_hidden()
    page.get_by_role("button", name="Figures", exact=True).click()
    expect(page.locator("#figures .ribbon")).to_be_visible()
    page.get_by_role("button", name="Figures", exact=True).click()
    page.get_by_role("tab", name="Settings").click()
    expect(page.get_by_label("Max tokens").first).to_be_visible()
    context.close()


def test_simple_mode_and_the_tour(page: Page, address: str) -> None:
    page.get_by_role("button", name="Take the tour").click()
    titles = []
    while page.locator("#guide .step").is_visible():
        titles.append(page.locator("#step-title").text_content())
        page.keyboard.press("Enter")
    assert titles[0] == "Where words come from" and titles[-1] == "Models"
    page.reload()
    settled(page)
    expect(page.locator(".offer")).to_be_hidden()
    page.click("#mode")
    expect(page.get_by_role("tab", name="Models")).to_be_hidden()
    expect(page.locator("#figures .figure").first).to_be_visible()
    expect(page.locator("#figures .ribbon")).to_be_hidden()
    page.reload()
    settled(page)
    expect(page.get_by_role("tab", name="Models")).to_be_hidden()
    page.click("#mode")
    expect(page.get_by_role("tab", name="Models")).to_be_visible()
