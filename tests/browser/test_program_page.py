"""A program that starts, ends and starts again: a model that comes late, damaged files, a kill,
guests. What it says where it cannot start is in tests/processes/test_environments.py."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import EMBEDDED
from tests.support.hub import Hub, serving
from tests.support.pages import (
    LONG,
    act,
    answer,
    end,
    finished,
    guarded,
    long_answer,
    open_tab,
    running,
    send,
    set_number,
    settled,
    start,
    stored,
    until,
    visit,
)

pytestmark = pytest.mark.browser


@pytest.mark.soak
def test_a_damaged_database_is_put_aside_and_an_answer_outlives_a_kill(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "strata.db").write_bytes(b"this is no database " * 500)
    process, url, said = start(tmp_path)
    assert "was damaged" in said
    with guarded(browser, url) as context:
        page = context.new_page()
        visit(page, url)
        expect(page.locator("#header .notice")).to_contain_text("was damaged")
        long_answer(page)
        until(page, lambda: any(len(each.pieces) > 40 for each in stored(tmp_path, "local")))
        page.close()  # Its requests would fail.
        process.kill()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()
    with running(tmp_path) as url, guarded(browser, url) as context:
        page = context.new_page()
        visit(page, url)
        page.locator("#conversations .title").first.click()
        expect(page.locator("#tokens .turn.said")).to_have_text(LONG)
        # How many spans that is depends on how many neighbours have one source.
        kept = stored(tmp_path, "local")[0].text
        until(page, lambda: answer(page) == kept)
        assert len(kept) > 80


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine with a small model, and programs that ask it."""
    files = {path.name: path.read_bytes() for path in (EMBEDDED.parent / "mid").iterdir()}
    with serving(Hub({"someone/tiny": files})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield served


@pytest.mark.soak
def test_a_page_is_there_before_its_model_and_follows_it(
    browser: Browser, tmp_path: Path, hub: Hub
) -> None:
    hub.sends.clear()
    with (
        running(tmp_path / "data", "--model", "someone/tiny") as url,
        guarded(browser, url) as context,
    ):
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#header .facts")).to_contain_text("Downloading tiny")
        expect(page.locator("#box textarea")).to_have_attribute(
            "placeholder", "tiny is loading. Write now; it answers as soon as it is ready."
        )
        send(page, "Tell me a short story about a boat.")
        expect(page.locator("#proof")).to_contain_text("Waiting for the model to load")
        open_tab(page, "Models")
        expect(page.locator("#models-status")).to_contain_text("Downloading tiny")
        hub.sends.set()
        expect(page.locator("#header .facts")).to_contain_text("2.1 M parameters")
        expect(page.locator("#models-status")).to_have_text("")
        expect(page.locator("#models-stop")).to_be_hidden()
        expect(page.locator("#models-loaded")).to_contain_text("someone/tiny")
        open_tab(page, "Chat")
        expect(page.locator("#box textarea")).to_have_attribute(
            "placeholder", "Message someone/tiny"
        )
        finished(page)
        assert answer(page) and page.locator("#tokens .turn.said").count() == 1


def log_in(page: Page, url: str, password: str) -> None:
    page.goto(url)
    page.get_by_label("username").fill("guest")
    page.get_by_label("password").fill(password)
    page.get_by_role("button", name="Login").click()
    settled(page)


@pytest.mark.soak
def test_guests_log_in_and_are_kept_apart(browser: Browser, tmp_path: Path) -> None:
    """Who waits while another one's answers are computed is told, and can leave the queue."""
    process, url, said = start(tmp_path, "--host", "0.0.0.0")
    found = re.search(r"'guest' with the password (\S+)", said)
    assert found, said
    url = url.replace("0.0.0.0", "127.0.0.1")
    with guarded(browser, url) as one, guarded(browser, url) as two:
        greedy, other = pages = one.new_page(), two.new_page()
        for page, text in zip(pages, ("The first guest's words", "The second's"), strict=True):
            log_in(page, url, found[1])
            expect(page.get_by_role("tab", name="Databases")).to_have_count(0)
            open_tab(page, "Diagnostics")
            expect(page.locator("#costs")).to_contain_text("Cost of a step")
            expect(page.locator("#measure")).to_have_count(0)
            set_number(page, "Max tokens", 10)
            send(page, text)
            finished(page)
            expect(page.locator("#conversations .title")).to_have_text([text])

        set_number(greedy, "Max tokens", 1200)
        open_tab(greedy, "Settings")
        greedy.get_by_role("button", name="Exact").click()
        open_tab(greedy, "Compare")
        greedy.fill("#compare-prompt textarea", LONG)
        greedy.click("#compare")
        compares = greedy.locator("#verdict .running")
        expect(compares).to_contain_text("repeat")
        send(other, "Hello there.")
        told = other.locator("#proof")
        expect(told).to_contain_text("Waiting for the model: 1 request comes first")
        other.click("#stop")
        expect(other.locator("#send")).to_be_visible()
        expect(told).not_to_contain_text("Waiting")
        expect(compares).to_contain_text("repeat")
        expect(other.locator("#tokens .turn")).to_have_count(3)
        act(other, "Answer", "said")
        finished(other)
        expect(told).not_to_contain_text("Waiting")
        other.click("#log-out")
        expect(other.get_by_label("password")).to_be_visible()
    end(process)
