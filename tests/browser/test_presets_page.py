"""Presets: saved in Settings, chosen beside New conversation."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import (
    answer,
    finished,
    late,
    open_tab,
    pick,
    send,
    set_number,
    settings,
    visit,
)

pytestmark = [pytest.mark.browser, pytest.mark.soak]
WET = (
    '{"type": "object", "properties": {"wet": {"enum": [true]}}, "required": ["wet"], '
    '"additionalProperties": false}'
)
EVIL = "<img src=x onerror=alert(1)>{{7*7}}"


def test_a_conversation_starts_from_a_preset(
    page: Page, address: str, data: Path, owner: str
) -> None:
    set_number(page, "Max tokens", 12)
    open_tab(page, "Settings")
    page.get_by_label("System prompt").fill("Speak of the sea.")
    page.fill("#preset-name textarea, #preset-name input", EVIL)
    page.click("#preset-save")
    expect(page.locator("#preset input")).to_have_value(EVIL)
    pick(page, "#preset", "Storyteller")
    page.click("#preset-use")
    expect(page.get_by_label("System prompt")).to_have_value(re.compile("^Tell stories"))
    expect(page.get_by_label("Max tokens", exact=True)).to_have_value("1024")
    open_tab(page, "Chat")
    pick(page, "#start-from", EVIL)
    page.click("#new")
    open_tab(page, "Settings")
    expect(page.get_by_label("System prompt")).to_have_value("Speak of the sea.")
    expect(page.get_by_label("Max tokens", exact=True)).to_have_value("12")
    open_tab(page, "Chat")
    send(page, "Tell me a short story about a boat.")
    finished(page)
    assert answer(page)
    assert settings(data, owner)["generation"]["max_tokens"] == 12
    assert page.locator("img[src='x']").count() == 0
    set_number(page, "Max tokens", 9)
    with late(data, "conversations.ConversationList.new"):
        page.click("#new")
        page.fill("#box textarea", "Tell me of a whale.")
        page.click("#send")
        expect(page.locator("#writer .wait .words")).to_have_text("Tell me of a whale.")
    expect(page.locator("#tokens .turn.said")).to_have_text(["Tell me of a whale."])
    finished(page)
    expect(page.locator("#conversations .entry")).to_have_count(2)
    assert settings(data, owner)["generation"]["max_tokens"] == 12
    open_tab(page, "Settings")
    pick(page, "#preset", EVIL)
    page.click("#preset-begin")
    expect(page.locator("#preset-first")).to_contain_text(EVIL)
    page.click("#preset-delete")
    expect(page.locator("#preset-first")).to_contain_text("its makers' settings")
    page.click("#preset-undo")
    expect(page.locator("#preset-first")).to_contain_text(EVIL)
    # as in another browser, with nothing open
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    visit(page, address)
    expect(page.locator("#start-from input")).to_have_value(EVIL)
    open_tab(page, "Settings")
    expect(page.get_by_label("System prompt")).to_have_value("Speak of the sea.")
    page.click("#preset-makers")
    expect(page.get_by_label("System prompt")).to_have_value("")
    expect(page.get_by_label("Max tokens", exact=True)).to_have_value("256")
    assert page.locator("img[src='x']").count() == 0


def test_a_conversation_starts_in_the_format_of_a_preset(page: Page) -> None:
    """Its answer is what the schema says, and has a tree."""
    open_tab(page, "Settings")
    pick(page, "#answer-format", "JSON with a schema")
    page.fill("#format-text textarea", WET)
    page.fill("#preset-name textarea, #preset-name input", "Wet")
    page.click("#preset-save")
    expect(page.locator("#preset input")).to_have_value("Wet")
    page.click("#preset-makers")
    expect(page.locator("#format-text")).to_be_hidden()
    open_tab(page, "Chat")
    pick(page, "#start-from", "Wet")
    page.click("#new")
    expect(page.locator("#format-text textarea")).to_have_value(WET)
    send(page, "Is the sea wet?")
    finished(page)
    assert answer(page) == '{"wet":true}'
    page.locator("#tokens .tree summary").click()
    expect(page.locator("#tokens .tree li")).to_have_text("wettrue")
    open_tab(page, "Settings")
    expect(page.locator("#format-text textarea")).to_have_value(WET)
