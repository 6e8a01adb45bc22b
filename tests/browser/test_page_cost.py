"""What a page does for an answer, counted: calls of functions, events. No time is taken."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import be_exact, finished, send, set_number

pytestmark = pytest.mark.browser
CALLS = 1_500_000
"""Of an answer, at most. They were ten million while the page kept Gradio's account of what waits,
and are a third of a million without it."""


def calls(page: Page, text: str) -> int:
    """How many functions the page calls while a message is answered."""
    wire = page.context.new_cdp_session(page)
    wire.send("Profiler.enable")
    wire.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    send(page, text)
    finished(page)
    found: list[dict[str, Any]] = wire.send("Profiler.takePreciseCoverage")["result"]
    wire.detach()
    functions = (each for script in found for each in script["functions"])
    return sum(int(each["ranges"][0]["count"]) for each in functions)


def test_an_answer_takes_few_calls(page: Page) -> None:
    set_number(page, "Max tokens", 128)
    be_exact(page)
    send(page, "Hello")
    finished(page)
    assert calls(page, "Tell me a short story about a boat.") < CALLS


def test_an_answer_takes_three_events(page: Page) -> None:
    """One that begins it, one at its end, one for the gauge of the context."""
    be_exact(page)
    send(page, "Hello")
    finished(page)
    events: list[str] = []
    gauge = page.locator("#writer .gauge")
    before = gauge.get_attribute("aria-valuetext")
    page.on("request", lambda asked: "/queue/join" in asked.url and events.append(asked.url))
    send(page, "Tell me a short story about a boat.")
    finished(page)
    expect(gauge).not_to_have_attribute("aria-valuetext", str(before))
    assert len(events) == 3
