"""A model on a server, on the page: chat, colours, counters, Stop, errors, reload, Compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.openai_stub import Stub, stub

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
KEY = "a-key-of-the-server"


@pytest.fixture(scope="module")
def server() -> Iterator[Stub]:
    """A server with our drafter, in the place of vLLM."""
    with stub(strata=True, words=60, pace=0.02, key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def address(server: Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The running program, with the server's model."""
    from tests.support.pages import end, start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_SERVER_KEY", KEY)
        process, url, _ = start(tmp_path_factory.mktemp("data"), "--model", server.base)
    yield url
    end(process)


def test_the_page_chats_with_a_server_and_tells_what_it_knows(page: Page, server: Stub) -> None:
    from playwright.sync_api import expect

    from tests.support.pages import answer, finished, send, settled, show

    expect(page.locator("#header .facts")).to_contain_text("on the server 127.0.0.1")
    expect(page.locator("#header")).to_contain_text("Drafted by the server with its databases")
    send(page, "Tell me something.")
    finished(page)
    assert answer(page).startswith("word-0 word-1 word-2 ") and answer(page).endswith("word-59 ")
    show(page, "Tokens")
    expect(page.locator("#tokens .turns .k-context").first).to_be_visible()
    expect(page.locator("#tokens .turns .k-statistics").first).to_be_visible()
    figures = page.locator("#figures")
    counted = "The server as a whole accepted 45 of 75 drafted tokens (60 %)"
    expect(figures.locator(".served")).to_contain_text(counted)
    expect(figures.locator("[data-slot=speedup]")).to_contain_text("Compare measures it")
    expect(figures.locator("[data-slot=acceptance] b")).to_have_text("4.00")
    page.reload()
    settled(page)
    assert KEY not in page.content()
    assert answer(page).endswith("word-59 ")
    expect(figures.locator(".served")).to_contain_text(counted)


def test_stop_ends_the_answer_of_a_server(page: Page, server: Stub) -> None:
    from playwright.sync_api import expect

    from tests.support.pages import answer, finished, send

    server.hangs = 8
    try:
        send(page, "Tell me something.")
        expect(page.locator("#tokens .turn.growing")).to_contain_text("word-7")
        page.click("#stop")
        finished(page)
    finally:
        server.hangs = None
    assert answer(page) == "".join(f"word-{n} " for n in range(8))
    assert server.left.wait(10)


def test_a_server_that_fails_is_told_and_the_chat_stays(page: Page, server: Stub) -> None:
    from playwright.sync_api import expect

    from tests.support.pages import act, finished, send

    server.status, server.said = 429, {"error": {"message": "<b>too</b> many"}}
    try:
        send(page, "Are you there?")
        expect(page.get_by_text("takes no more requests for now")).to_be_visible()
        expect(page.locator("#tokens .turn.said").last).to_have_text("Are you there?")
    finally:
        server.status = 200
    page.reload()
    expect(page.locator("#tokens .turn.said").last).to_have_text("Are you there?")
    act(page, "Answer", of="said")
    finished(page)


def test_compare_runs_a_server_with_and_without_drafts(page: Page, server: Stub) -> None:
    from playwright.sync_api import expect

    page.get_by_role("tab", name="Compare", exact=True).click()
    verdict = page.locator("#verdict")
    expect(verdict).to_contain_text("The left side asks the server to draft nothing.")
    page.click("#compare")
    expect(verdict).to_contain_text("The same text in 3 repeats")
    expect(verdict).to_contain_text("not the text of a seed")
    expect(page.locator("#compare-fast .turns .k-context").first).to_be_visible()
    expect(page.locator("#compare-plain .turns .k-context")).to_have_count(0)
