"""What a page does for an answer, counted: calls of functions, events. No time is taken."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Request

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


def test_an_answer_takes_one_event_at_its_beginning_and_one_at_its_end(page: Page) -> None:
    """An event behind another one, which says nothing itself, would be the list's."""
    be_exact(page)
    send(page, "Hello")
    finished(page)
    events: list[Any] = []

    def asked(request: Request) -> None:
        if "/queue/join" in request.url:
            events.append(json.loads(request.post_data or "{}")["event_data"])

    page.on("request", asked)
    send(page, "Tell me a short story about a boat.")
    finished(page)
    begins = [each for each in events if each and "text" in each and "editing" not in each]
    ends = [each for each in events if each and "drawn" in each]
    behind, looks = events.count(None), events.count({})  # It may look whether others changed it.
    assert len(begins) == len(ends) == 1 and behind <= looks
