"""The queue for the model as people meet it: who waits is told, and can leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.support.pages import (
    PATIENCE,
    act,
    end,
    finished,
    open_tab,
    send,
    set_number,
    settled,
    start,
)

pytestmark = pytest.mark.browser


@pytest.fixture
def pages(browser: Browser, tmp_path: Path) -> Iterator[tuple[Page, Page]]:
    """Two guests, each with a browser of their own."""
    process, address, said = start(tmp_path, "--auth", "guest:secret", "--host", "0.0.0.0")
    assert "secret" not in said
    address = address.replace("0.0.0.0", "127.0.0.1")
    contexts = [browser.new_context(viewport={"width": 1440, "height": 900}) for _ in range(2)]
    try:
        first, second = (logged_in(context, address) for context in contexts)
        yield first, second
    finally:
        for context in contexts:
            context.close()
        end(process)


def logged_in(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.get_by_label("Username").fill("guest")
    page.get_by_label("Password").fill("secret")
    page.get_by_role("button", name="Login").click()
    settled(page)
    return page


def test_who_waits_for_the_model_is_told_and_stop_leaves_the_queue(
    pages: tuple[Page, Page],
) -> None:
    """One guest compares long answers, the other one asks something meanwhile."""
    greedy, other = pages
    set_number(greedy, "Max tokens", 1200)
    open_tab(greedy, "Settings")
    greedy.get_by_role("button", name="Exact").click()
    open_tab(greedy, "Compare")
    greedy.fill(
        "#compare-prompt textarea",
        "Write a very long story about a king, a queen, a boat and a storm.",
    )
    greedy.click("#compare")
    expect(greedy.locator("#verdict .running")).to_contain_text("repeat")
    send(other, "Hello there.")
    expect(other.locator("#proof")).to_contain_text("Waiting for the model: 1 request comes first")
    other.click("#stop")
    expect(other.locator("#send")).to_be_visible()
    expect(other.locator("#proof")).not_to_contain_text("Waiting")
    expect(greedy.locator("#verdict .running")).to_contain_text("repeat")
    expect(other.locator("#tokens .turn")).to_have_count(1)
    act(other, "Answer", "said")
    finished(other)
    expect(other.locator("#proof")).not_to_contain_text("Waiting")
