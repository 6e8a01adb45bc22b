"""Where messages are written: the keyboard, the queue, the edit mode, drafts, files, the gauge,
simple mode, the tour and the phone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, FilePayload, Page, Route, expect

from tests.support.pages import (
    PHONE,
    finished,
    long_answer,
    open_advanced,
    open_tab,
    send,
    set_number,
    settings,
    settled,
    until,
    visit,
)
from tests.unit.test_attachments import pdf

pytestmark = pytest.mark.browser
BOX = "#box textarea"
EDITOR = "#tokens .editor textarea"
COVERED = """(node) => {
  const { left, top, width, height } = node.getBoundingClientRect();
  const front = document.elementFromPoint(left + width / 2, top + height / 2);
  return Boolean(front && front.closest(".list"));
}"""
OVERLAPS = """() => {
  const wrong = [];
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  const speedup = box("#figures .lead b");
  if (!speedup.width || speedup.right > box("#figures").right + 1) wrong.push("speedup");
  const chips = [...document.querySelectorAll("#tokens .chip:not([hidden])")];
  if (new Set(chips.map((chip) => Math.round(chip.getBoundingClientRect().top))).size > 1) {
    wrong.push("legend");
  }
  const name = box("#header .brand .picked");
  const below = document.querySelector("#header .note:not(.drafted)").getBoundingClientRect();
  if (name.right > box(".switches").left || name.bottom > below.top) wrong.push("header");
  const acts = [...document.querySelectorAll("#tokens .act")].filter((act) => act.offsetParent);
  if (acts.some((act) => act.getBoundingClientRect().right > innerWidth)) wrong.push("buttons");
  return wrong;
}"""
COUNTED = re.compile(r"Context: \d+ of 1,792 tokens")
NOTES = b"# Notes\n```py\nx = 1\n```\n" + b"The boat was red. " * 20
HURRIED_CLOCK = """(most) => {
  const wait = window.setTimeout;
  window.setTimeout = (act, time, ...rest) => wait(act, time >= most ? 0 : time, ...rest);
}"""
FILL = """(box, size) => {
  box.value = "a".repeat(size);
  box.dispatchEvent(new Event("input", { bubbles: true }));
}"""
PASTE_AND_DROP = """() => {
  const data = new DataTransfer();
  data.items.add(new File(["name,age\\nAnn,7\\n"], "people.csv"));
  const box = document.querySelector("#box textarea");
  box.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
  const more = new DataTransfer();
  more.items.add(new File(["x"], "gone.txt"));
  box.dispatchEvent(new DragEvent("drop", { dataTransfer: more, bubbles: true }));
}"""


def file(name: str, content: bytes) -> FilePayload:
    return {"name": name, "mimeType": "text/plain", "buffer": content}


def said(page: Page, count: int) -> None:
    expect(page.locator("#tokens .turn.said")).to_have_count(count)


def edit(page: Page) -> None:
    page.locator("#tokens .message.mine").hover()
    page.locator("#tokens .mine [data-act=edit]").click()


def test_the_keyboard_and_the_edit_mode(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    box, editor = page.locator(BOX), page.locator(EDITOR)
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
    expect(editor).to_be_focused()
    expect(editor).to_have_value("one\ntwo")
    page.keyboard.press("Escape")
    expect(editor).to_have_count(0)
    expect(page.locator("#tokens .mine [data-act=edit]")).to_be_focused()

    box.fill("half a thought")
    edit(page)
    expect(editor).to_be_focused()
    expect(page.locator("#tokens .turn.said")).to_be_hidden()
    editor.fill("Something else")
    page.get_by_role("button", name="Cancel").click()
    expect(editor).to_have_count(0)
    expect(page.locator("#tokens .turn.said")).to_have_text("one\ntwo")
    edit(page)
    editor.fill("What is a ship")
    editor.press("End")
    editor.press("Shift+Enter")
    editor.press_sequentially("?")
    editor.press("Enter")
    expect(page.locator("#tokens .turn.said")).to_have_text(["What is a ship\n?"])
    expect(editor).to_have_count(0)
    expect(page.locator("#tokens .mine .versions")).to_have_text("2 / 2")
    expect(box).to_have_value("half a thought")
    finished(page)
    edit(page)
    editor.fill(" ")
    editor.press("Enter")
    expect(page.locator(".toast-body")).to_contain_text("message is empty")
    expect(editor).to_have_value(" ")
    expect(page.locator("#tokens .editor .send")).to_be_enabled()

    box.press("Control+Shift+O")
    expect(page.locator("#empty")).to_be_visible()
    open_tab(page, "Settings")
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


@pytest.mark.soak
def test_what_is_sent_while_an_answer_grows_waits_in_sight(page: Page) -> None:
    long_answer(page, 1500)
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


@pytest.mark.soak
def test_settings_and_drafts_are_kept_with_the_conversation(
    page: Page, data: Path, owner: str
) -> None:
    box, beside = page.locator(BOX), page.locator("#temperature input[type=range]")
    beside.fill("1.2")
    open_tab(page, "Settings")
    temperature = page.get_by_role("slider", name="Temperature").last
    expect(temperature).to_have_value("1.2")
    temperature.fill("0.35")
    open_tab(page, "Chat")
    expect(beside).to_have_value("0.35")
    open_tab(page, "Settings")
    page.get_by_role("button", name="Exact").click()
    expect(temperature).to_have_value("0")
    open_tab(page, "Chat")
    expect(beside).to_have_value("0")
    set_number(page, "Max tokens", 8)
    send(page, "A conversation with a draft")
    finished(page)
    beside.fill("0.9")
    before = settings(data, owner)
    open_advanced(page)
    expect(page.get_by_label("Adaptive", exact=True)).to_be_checked()
    page.get_by_label("Fixed", exact=True).check()
    until(page, lambda: settings(data, owner) != before)
    open_tab(page, "Chat")

    box.fill("for this one")
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    expect(box).to_have_value("")
    box.fill("for a new one")
    expect(beside).to_have_value("0.9")
    beside.fill("0.8")
    page.wait_for_function("sessionStorage['strata-settings'].includes('0.8')")
    page.reload()
    settled(page)
    expect(box).to_have_value("for a new one")
    expect(beside).to_have_value("0.8")
    open_tab(page, "Settings")
    expect(page.get_by_label("Max tokens", exact=True)).to_have_value("8")
    open_tab(page, "Chat")
    beside.fill("0.1")
    page.locator("#conversations").get_by_text("A conversation with a draft").click()
    expect(box).to_have_value("for this one")
    expect(beside).to_have_value("0.9")
    box.press("Enter")
    said(page, 2)
    finished(page)
    page.reload()
    settled(page)
    said(page, 2)
    expect(box).to_have_value("")
    open_advanced(page)
    expect(page.get_by_label("Fixed", exact=True)).to_be_checked()


@pytest.mark.soak
def test_a_file_that_nobody_reads_does_not_wait_forever(page: Page) -> None:
    page.evaluate(HURRIED_CLOCK, 100_000)
    page.route("**/queue/join*", lambda route: None)  # The request never reaches the program.
    page.locator("#writer .choose").set_input_files([file("notes.md", NOTES)])
    expect(page.locator(".files .words")).to_have_text(
        "notes.md did not arrive, or was not read. Attach it again."
    )


@pytest.mark.soak
def test_a_message_that_is_too_long_is_refused_before_it_is_sent(page: Page) -> None:
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.locator(BOX).evaluate(FILL, 9_000_000)
    drops = page.locator("#writer .drops")
    expect(drops).to_have_text(
        "This message has 9,000,000 characters, and at most 1,000,000 can be sent. Shorten it."
    )
    asked.clear()
    page.click("#send")
    page.wait_for_timeout(300)  # Time for what must not happen.
    assert not any("queue/join" in url for url in asked)
    said(page, 0)
    page.fill(BOX, "short")
    expect(drops).to_be_hidden()
    # The server says it where the page does not.
    open_tab(page, "Compare")
    page.locator("#compare-prompt textarea").evaluate(FILL, 9_000_000)
    page.click("#compare")
    expect(page.locator(".toast-body")).to_contain_text("bytes are too many. Send at most 8,388")


@pytest.mark.soak
def test_files_go_with_a_message_and_are_folded_in_it(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    choose = page.locator("#writer .choose")
    choose.set_input_files([file("notes.md", NOTES), file("cat.png", b"\x89PNG\0\0\0")])
    chips = page.locator(".files .words")
    expect(chips.nth(1)).to_contain_text("cat.png is not text")
    expect(chips.nth(0)).to_contain_text("notes.md · 384 B · ")
    expect(page.locator(".gauge")).to_have_attribute("aria-valuetext", COUNTED)
    page.get_by_role("button", name="Remove cat.png").click()
    choose.set_input_files([file("old.txt", "Отчёт о встрече".encode("cp1251"))])
    expect(chips.nth(1)).to_contain_text("old.txt · read as Windows-1251, a guess · 28 B · ")
    page.get_by_role("button", name="Remove old.txt").click()
    page.evaluate(PASTE_AND_DROP)
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
    expect(page.locator(EDITOR)).to_have_value("What do they say?")
    kept = page.locator("#tokens .editor .file")
    expect(kept).to_contain_text(["notes.md", "people.csv", "paper.pdf"])
    page.get_by_role("button", name="Remove people.csv").click()
    expect(kept).to_have_count(2)
    choose = page.locator("#tokens .editor input[type=file]")
    choose.set_input_files([file("cat.png", b"\x89PNG\0\0\0"), file("more.txt", b"More boats.")])
    expect(kept.nth(2)).to_contain_text("cat.png is not text")
    expect(page.locator("#tokens .editor .send")).to_be_disabled()
    page.get_by_role("button", name="Remove cat.png").click()
    expect(kept).to_have_text(["notes.md×", "paper.pdf×", "more.txt×"])
    expect(page.locator(".gauge")).to_have_attribute("aria-valuetext", COUNTED)
    page.locator(EDITOR).press("Enter")
    expect(message.locator("summary")).to_contain_text(["notes.md", "paper.pdf", "more.txt"])
    finished(page)


@pytest.mark.soak
def test_what_waits_for_its_files_sends_no_other_message(page: Page) -> None:
    set_number(page, "Max tokens", 8)
    send(page, "Hello there")
    finished(page)
    page.route("**/upload*", lambda route: None)
    choose, chips = page.locator("#writer .choose"), page.locator(".files .words")
    choose.set_input_files([file("notes.md", NOTES)])
    page.press(BOX, "Enter")
    expect(chips).to_have_text("notes.md · reading, then it is sent")
    page.click("#new")
    expect(chips).to_have_count(0)
    page.unroute("**/upload*")
    choose.set_input_files([file("more.txt", b"More boats.")])
    expect(chips).to_contain_text("more.txt · 11 B · ")
    said(page, 0)


@pytest.mark.parametrize("edits", [False, True])
def test_a_file_is_taken_away_also_while_it_is_read(page: Page, edits: bool) -> None:
    """Its line changes between pressing the button and releasing it."""
    held = list[Route]()
    if edits:
        set_number(page, "Max tokens", 8)
        send(page, "Hello there")
        finished(page)
        edit(page)
    place = "#tokens .editor" if edits else "#writer"
    page.route("**/upload*", lambda route: held.append(route))
    page.locator(f"{place} input[type=file]").set_input_files([file("gone.txt", b"x")])
    line = page.locator(f"{place} .file")
    expect(line).to_contain_text("gone.txt · reading")
    button = page.get_by_role("button", name="Remove gone.txt").bounding_box()
    assert button is not None
    page.mouse.move(button["x"] + button["width"] / 2, button["y"] + button["height"] / 2)
    page.mouse.down()
    for request in held:
        request.continue_()
    expect(line).not_to_contain_text("reading")
    page.mouse.up()
    expect(line).to_have_count(0)


@pytest.mark.soak
def test_the_gauge_says_what_would_be_left_out_and_what_is_too_long_is_not_lost(page: Page) -> None:
    page.click("#send")
    expect(page.locator(".toast-body")).to_contain_text("message is empty")
    set_number(page, "Max tokens", 8)
    for _ in range(2):
        send(page, "word " * 600)
        finished(page)
    drops = page.locator(".drops")
    page.fill(BOX, "word " * 700)
    expect(drops).to_contain_text("will not read the 2 oldest messages")
    words = "word " * 2500
    page.fill(BOX, words)
    expect(drops).to_contain_text("This message is too long")
    page.click("#send")
    expect(page.locator(".toast-body").last).to_contain_text("tokens, and")
    expect(page.locator(BOX)).to_have_value(words)
    page.fill(BOX, "")
    expect(drops).to_be_hidden()


@pytest.mark.soak
def test_a_phone(another: Callable[..., BrowserContext], address: str) -> None:
    page = another(viewport=PHONE, has_touch=True).new_page()
    visit(page, address)
    for height in (640, 844):
        page.set_viewport_size({"width": 390, "height": height})
        expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    page.click(".no-tour")
    expect(page.locator(".offer")).to_be_hidden()
    expect(page.locator(".list")).not_to_be_in_viewport()
    page.get_by_role("button", name="Conversations", exact=True).click()
    expect(page.locator("#new")).to_be_in_viewport()
    assert page.locator("#temperature label span").evaluate(COVERED), "the drawer is in front"
    page.click("#new")
    expect(page.locator("#new")).not_to_be_in_viewport()
    expect(page.locator("#figures .ribbon")).to_be_hidden()
    page.get_by_role("button", name="Figures", exact=True).click()
    expect(page.locator("#figures .ribbon")).to_be_visible()
    page.get_by_role("button", name="Figures", exact=True).click()
    send(page, "Say a word.")
    finished(page)
    page.locator("#header .model").evaluate("(name) => { name.textContent = 'model-'.repeat(20) }")
    assert page.evaluate(OVERLAPS) == [], "nothing is cut off, nothing overlaps"
    open_tab(page, "Settings")
    expect(page.get_by_label("Max tokens").first).to_be_visible()


@pytest.mark.soak
def test_simple_mode_and_the_tour(page: Page) -> None:
    page.get_by_role("button", name="Take the tour").click()
    titles = []
    while page.locator("#guide .step").is_visible():
        titles.append(page.locator("#step-title").text_content())
        page.keyboard.press("Enter")
    assert titles[0] == "Watch a race" and titles[-1] == "Models"
    for name in ("Diagnostics", "Models", "Settings"):
        page.click("#to-help")
        page.click("#help .to-tour")
        expect(page.locator("#guide .step")).to_be_visible()
        page.get_by_role("tab", name=name, exact=True).click()
        expect(page.locator("#guide .step")).to_be_hidden()
        expect(page.locator(".lit")).to_have_count(0)
        expect(page.get_by_role("tab", name=name, exact=True)).to_be_focused()
    page.click("#mode")
    for _ in range(2):
        expect(page.locator(".offer")).to_be_hidden()
        expect(page.get_by_role("tab", name="Models")).to_be_hidden()
        expect(page.locator("#figures .figure").first).to_be_visible()
        expect(page.locator("#figures .ribbon")).to_be_hidden()
        page.reload()
        settled(page)
    page.click("#mode")
    expect(page.get_by_role("tab", name="Models")).to_be_visible()
