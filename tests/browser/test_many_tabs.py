"""Many tabs of one browser: all of them load, ask and are told, over one connection."""

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.pages import (
    LONG,
    answer,
    be_exact,
    finished,
    long_answer,
    send,
    stop,
    until,
    visit,
)

pytestmark = [pytest.mark.browser, pytest.mark.soak]
TABS = 8
"""A browser opens six connections to one server."""
STREAMS = ("/heartbeat/", "/queue/data", "/stream/")
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""

GROWS = """() => {
  window.grew = false;
  const looks = new MutationObserver(() => {
    window.grew ||= Boolean(document.querySelector("#tokens .turn.growing .tok"));
  });
  looks.observe(document.querySelector("#tokens"), { childList: true, subtree: true });
}"""
"""Notes that an answer grows, however soon it ends."""

LATE_TO_THE_PAGE = """{
  const Worker = window.SharedWorker;
  window.SharedWorker = class {
    constructor(source) {
      const { port } = new Worker(source);
      this.port = {
        postMessage: (said) => port.postMessage(said),
        set onmessage(hear) {
          port.onmessage = (event) => {
            const { kind, value } = event.data;
            const last = kind === "end" || kind === "part" && value.includes('"close_stream"');
            setTimeout(() => hear(event), last ? 400 : 0);
          };
        },
      };
    }
  };
}"""
"""The worker is slow to pass on that the server has closed a stream."""

LATE_TO_THE_CLIENT = """{
  const Decoder = window.TextDecoderStream;
  window.TextDecoderStream = class {
    constructor() {
      const decoder = new Decoder();
      const late = new TransformStream({
        transform: async (text, controller) => {
          if (text.includes('"close_stream"')) await new Promise((then) => setTimeout(then, 400));
          controller.enqueue(text);
        },
      });
      this.writable = decoder.writable;
      this.readable = decoder.readable.pipeThrough(late);
    }
  };
}"""
"""Gradio's client is slow to read that the server has closed a stream."""

WITHOUT_WORKER = "delete window.SharedWorker;"
"""Each stream has a connection of its own, as where the shared one cannot be had."""


def opened(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    visit(page, address)
    return page


def tokens(page: Page) -> int:
    return page.locator("#tokens .turn.answered").last.locator(".tok").count()


def test_eight_tabs_load_ask_and_see_one_answer_grow(context: BrowserContext, address: str) -> None:
    streams: list[str] = []
    first = opened(context, address)
    send(first, "Hello")
    finished(first)
    context.on("request", lambda request: streams.append(request.url))
    tabs = [first, *(opened(context, address) for _ in range(TABS - 1))]
    for tab in tabs:
        tab.evaluate(GROWS)
    long_answer(first, 4000)
    for tab in tabs:
        expect(tab.locator("#tokens .turn.said").last).to_have_text(LONG)
        tab.wait_for_function("window.grew")
    stop(tabs[TABS // 2])
    for tab in tabs:
        finished(tab)
        assert answer(tab) == answer(first)
    for number, tab in enumerate(tabs):
        tab.click("#new")
        expect(tab.locator("html")).to_have_attribute("data-conversation", "")
        send(tab, f"I am tab {number}.")
    for number, tab in enumerate(tabs):
        finished(tab)
        expect(tab.locator("#tokens .turn.said")).to_have_text(f"I am tab {number}.")
    own = [url for url in streams if any(part in url for part in STREAMS)]
    assert own == [], "no tab holds a connection of its own"
    for tab in tabs[:-1]:
        tab.close()
    send(tabs[-1], "Are you still there?")
    finished(tabs[-1])


def test_a_hidden_tab_lets_the_answer_go_has_all_of_it_when_it_is_shown_and_sends_what_waits(
    context: BrowserContext, address: str
) -> None:
    page = opened(context, address)
    send(page, "Hello")
    finished(page)
    other = opened(context, address)
    long_answer(page, 1500)
    expect(other.locator("#tokens .turn.growing .tok").nth(1)).to_be_attached()
    page.evaluate(HIDE, True)
    before, shown = tokens(page), tokens(other)
    until(other, lambda: tokens(other) > shown + 20)
    # What was on its way is drawn, and nothing after it.
    hidden, shown = tokens(page), tokens(other)
    until(other, lambda: tokens(other) > shown + 20)
    assert before <= hidden == tokens(page)
    stop(other)
    finished(other)
    page.evaluate(HIDE, False)
    finished(page)
    assert answer(page) == answer(other)
    other.close()

    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    long_answer(page, 600)
    page.fill("#box textarea", "And then?")
    page.press("#box textarea", "Enter")
    expect(page.locator(".waits .wait")).to_have_count(1)
    page.evaluate(HIDE, True)
    expect(page.locator("#tokens .turn.said")).to_have_text([LONG, "And then?"])
    page.evaluate(HIDE, False)
    finished(page)
    expect(page.locator("#tokens .turn")).to_have_count(4)


@pytest.mark.parametrize(
    "late",
    [LATE_TO_THE_PAGE, LATE_TO_THE_CLIENT, WITHOUT_WORKER + LATE_TO_THE_CLIENT],
    ids=["page", "client", "client without a worker"],
)
def test_an_event_that_follows_a_closed_stream_is_answered(
    context: BrowserContext, address: str, late: str
) -> None:
    """The client has asked for the next event before it learns that the stream was closed."""
    context.add_init_script(late)
    page = opened(context, address)
    send(page, "Hello")
    finished(page)
    page.click("#new")
    expect(page.locator("#empty")).to_be_visible()
    send(page, "Are you still there?")
    finished(page)


def test_of_two_tabs_that_ask_at_once_the_second_waits_and_says_so(
    context: BrowserContext, address: str
) -> None:
    """The second one has not been told of the first one's answer when it asks."""
    context.add_init_script("delete window.BroadcastChannel;")
    first = opened(context, address)
    be_exact(first)  # What is said to "Hello" decides how long the next answer is.
    send(first, "Hello")
    finished(first)
    second = context.new_page()
    second.route("**/revision/**", lambda route: route.abort())
    visit(second, address)
    expect(second.locator("#tokens .turn")).to_have_count(2)
    long_answer(first, 4000)
    expect(second.locator("#send")).to_be_visible()
    second.fill("#box textarea", "And then?")
    second.click("#send")
    expect(second.locator(".waits .words")).to_have_text("And then?")
    expect(second.locator(".waiting > span")).to_have_text("Sent when the answer has ended:")
    expect(second.locator("#box textarea")).to_have_value("")
    expect(second.locator("#tokens .turn.said")).to_have_text(["Hello", LONG])
    assert second.locator(".toast-body").count() == 0
    stop(first)
    expect(second.locator("#tokens .turn.said")).to_have_text(["Hello", LONG, "And then?"])
    finished(second)
    expect(second.locator(".waits > *")).to_have_count(0)
