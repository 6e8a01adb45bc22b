"""What a page costs: calls of functions, events, frames and layouts. No time is taken."""

import json
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests.support.pages import be_exact, finished, open_tab, send, set_number, until, visit

pytestmark = pytest.mark.browser
CALLS = 1_500_000
"""Of an answer, at most. They were ten million while the page kept Gradio's account of what waits,
and are a third of a million without it."""
COUNT_FRAMES = """() => {
  window.frames_asked = 0;
  const ask = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => {
    window.frames_asked += 1;
    return ask(draw);
  };
}"""


def frames(page: Page, seconds: float = 2) -> int:
    page.evaluate("() => { window.frames_asked = 0 }")
    page.wait_for_timeout(1000 * seconds)
    return int(page.evaluate("() => window.frames_asked"))


@pytest.mark.soak
def test_an_answer_takes_few_calls_and_two_events_and_an_idle_page_no_frames(
    context: BrowserContext, address: str
) -> None:
    context.add_init_script(f"({COUNT_FRAMES})()")
    page = context.new_page()
    visit(page, address)
    set_number(page, "Max tokens", 128)
    be_exact(page)
    send(page, "Hello")
    finished(page)
    events: list[Any] = []

    def asked(request: Request) -> None:
        if "/queue/join" in request.url:
            events.append(json.loads(request.post_data or "{}")["event_data"])

    page.on("request", asked)
    # How full the context is with what was typed is asked a moment after the typing.
    page.fill("#box textarea", "Tell me a short story about a boat.")
    until(page, lambda: any(each and each.get("text") for each in events))
    events.clear()
    wire = context.new_cdp_session(page)
    wire.send("Profiler.enable")
    wire.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    page.click("#send")
    expect(page.locator("#tokens .turn")).to_have_count(4)
    finished(page)
    found: list[dict[str, Any]] = wire.send("Profiler.takePreciseCoverage")["result"]
    wire.detach()
    functions = (each for script in found for each in script["functions"])
    assert sum(int(each["ranges"][0]["count"]) for each in functions) < CALLS
    begins = [each for each in events if each and each.get("text")]
    ends = [each for each in events if each and "drawn" in each]
    # It may look whether others changed the list. An event behind another one, which says nothing
    # itself, would be the list's.
    behind, looks = events.count(None), events.count({})
    assert len(begins) == len(ends) == 1 and behind <= looks

    expect(page.locator("#header .facts")).to_contain_text("parameters")
    for name in ("Diagnostics", "Models", "Chat"):
        open_tab(page, name)
        counts = [frames(page)]
        while counts[-1] and len(counts) < 30:
            counts.append(frames(page))
        assert counts[-1] == 0, f"{name}: {counts}"
    page.evaluate("() => { const draw = () => requestAnimationFrame(draw); draw() }")
    page.locator("#tokens").click()
    assert all(frames(page, 1) > 5 for _ in range(5)), "what draws goes on"


SEARCH_ON_CLICK = """async () => {
  const names = performance.getEntriesByType("resource").map(({ name }) => name);
  const { AppTree } = await import(names.find((name) => /\\/core-[^/]+\\.js$/.test(name)));
  const root = Object.getOwnPropertyDescriptor(AppTree.prototype, "root");
  const size = (node) => (node.children || []).reduce((sum, child) => sum + size(child), 1);
  const sizes = [];
  Object.defineProperty(AppTree.prototype, "root", { ...root, get() {
    const searched = root.get.call(this);
    sizes.push(size(searched));
    return searched;
  } });
  document.querySelector("#send").click();
  Object.defineProperty(AppTree.prototype, "root", root);
  return sizes;
}"""
"""Clicks on Send; returns among how many components each one is searched that the event needs."""


TRIGGERS = """async () => {
  const names = performance.getEntriesByType("resource").map(({ name }) => name);
  const { AppTree } = await import(names.find((name) => /\\/core-[^/]+\\.js$/.test(name)));
  const events = [
    { targets: [[1, "click"], [1, "change"], [2, "select"]] },
    { targets: [[1, null], [1, "blur"], [2, "input"]] },
    { targets: [] },
    { targets: [[1, "submit"]] },
  ];
  const attached = (id) => {
    const node = { id, props: { shared_props: {} } };
    return AppTree.prototype.find_attached_events(node, events).props.shared_props.attached_events;
  };
  return [1, 2, 3].map(attached);
}"""
"""What three components trigger, by a page's own tree."""


@pytest.mark.soak
def test_a_component_knows_what_it_triggers(page: Page) -> None:
    assert page.evaluate(TRIGGERS) == [["click", "submit"], ["select", "input"], []]


@pytest.mark.soak
def test_a_click_finds_the_components_that_it_needs_without_a_search(page: Page) -> None:
    page.fill("#box textarea", "Hello")
    sizes = page.evaluate(SEARCH_ON_CLICK)
    assert len(sizes) > 10 and max(sizes) == 1
    finished(page)
    expect(page.locator("#tokens .turn")).to_have_count(2)
