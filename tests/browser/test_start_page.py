"""The start as people meet it: a page that says what it waits for, and costs nothing when idle."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from app.service.formats import BOTH, WORDS, library
from storage.database import Database
from storage.speeds import SpeedStore
from tests.conftest import EMBEDDED
from tests.support.hub import Hub, serving
from tests.support.pages import PATIENCE, answer, end, finished, load, open_tab, send, start

pytestmark = pytest.mark.browser
Open = Callable[..., Page]
COUNT_FRAMES = """() => {
  window.frames_asked = 0;
  const ask = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (draw) => {
    window.frames_asked += 1;
    return ask(draw);
  };
}"""


def frames(page: Page, seconds: int = 2) -> int:
    """How many frames a page asks for in that time."""
    page.evaluate("() => { window.frames_asked = 0 }")
    page.wait_for_timeout(1000 * seconds)
    return int(page.evaluate("() => window.frames_asked"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine with a small model, and an app that asks it."""
    mid = EMBEDDED.parent / "mid"
    files = {path.name: path.read_bytes() for path in mid.iterdir()}
    with serving(Hub({"someone/tiny": files})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield served


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Starts the program with an empty data directory, and opens a page of it."""
    with ExitStack() as stack:

        def open_page(*arguments: str, script: str = "") -> Page:
            process, url, _ = start(tmp_path / "data", *arguments)
            stack.callback(end, process)
            page = browser.new_page()
            stack.callback(page.close)
            page.set_default_timeout(PATIENCE)
            page.add_init_script(script)
            page.goto(url)
            return page

        yield open_page


def test_a_page_is_there_before_its_model_and_follows_it(opened: Open, hub: Hub) -> None:
    hub.sends.clear()
    page = opened("--model", "someone/tiny")
    expect(page.locator("#header .facts")).to_contain_text("Downloading tiny")
    expect(page.locator("#box textarea")).to_have_attribute(
        "placeholder", "tiny is loading. Write now; it answers as soon as it is ready."
    )
    send(page, "Tell me a short story about a boat.")
    expect(page.locator("#proof")).to_contain_text("Waiting for the model to load")
    open_tab(page, "Models")
    expect(page.locator("#models-status")).to_contain_text("A model is being loaded")
    hub.sends.set()
    expect(page.locator("#header .facts")).to_contain_text("2.1 M parameters")
    expect(page.locator("#models-status")).to_have_text("")
    expect(page.locator("#models-stop")).to_be_hidden()
    expect(page.locator("#models-loaded")).to_contain_text("someone/tiny")
    open_tab(page, "Chat")
    expect(page.locator("#box textarea")).to_have_attribute("placeholder", "Message someone/tiny")
    finished(page)
    assert answer(page) and page.locator("#tokens .turn.said").count() == 1


def test_a_first_model_that_fails_leaves_a_page_that_says_why(opened: Open, hub: Hub) -> None:
    hub.status = 503
    page = opened("--model", "someone/tiny")
    expect(page.locator("#header .notice")).to_contain_text("could not be")
    expect(page.locator("#header")).to_contain_text("No model is loaded at the moment")
    expect(page.locator("#box textarea")).to_have_attribute("placeholder", "No model is loaded")
    page.reload()
    expect(page.locator("#header .notice")).to_contain_text("could not be")
    page.fill("#box textarea", "Tell me a short story about a boat.")
    page.click("#send")
    expect(page.locator(".toast-body")).to_contain_text("No model is loaded at the moment")
    open_tab(page, "Models")
    page.locator("#models-choice label", has_text="tiny-chat · transformers").click()
    expect(page.locator("#models-need")).to_contain_text("free on")
    load(page, "tiny-chat · transformers", "tiny-chat is loaded")
    open_tab(page, "Chat")
    expect(page.locator("#header .notice")).to_have_count(0)
    page.click("#send")
    finished(page)
    assert answer(page), "what was typed was still there"


def test_an_idle_page_asks_for_no_frames(opened: Open) -> None:
    page = opened(script=f"({COUNT_FRAMES})()")
    expect(page.locator("#header .facts")).to_contain_text("parameters")
    send(page, "Tell me a short story about a boat.")
    finished(page)
    for name in ("Diagnostics", "Models", "Chat"):
        open_tab(page, name)
        asked = [frames(page)]
        while asked[-1] and len(asked) < 30:
            asked.append(frames(page))
        assert asked[-1] == 0, f"{name}: {asked}"
    page.evaluate("() => { const draw = () => requestAnimationFrame(draw); draw() }")
    page.locator("#tokens").click()
    assert all(frames(page, 1) > 5 for _ in range(5)), "what draws goes on"


@pytest.mark.gguf
@pytest.mark.parametrize("faster", ["GGUF", "safetensors"])
def test_the_demonstration_model_runs_in_the_format_that_is_faster_here(
    opened: Open, tmp_path: Path, faster: str
) -> None:
    with Database(tmp_path / "data" / "strata.db") as database:
        for source in BOTH:
            speed = 300.0 if WORDS[source] == faster else 100.0
            SpeedStore(database).save(source, library(source), speed)
    page = opened("--model", "")
    expect(page.locator("#header .facts")).to_contain_text("parameters")
    open_tab(page, "Models")
    words = f"{faster} is 3.0 times as fast here"
    expect(page.locator("#models-loaded")).to_contain_text(words)
    kind = "llama.cpp" if faster == "GGUF" else "transformers"
    expect(page.locator("#models-choice label.selected")).to_contain_text(f"{kind} ·")
    expect(page.locator("#models-choice label.selected")).to_contain_text("loaded")
