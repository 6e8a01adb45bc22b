"""A model on a server, on the page: chat, colours, counters, reload. Stop, errors and Compare are
tested in tests/web/test_servers.py."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.support.openai_stub import Stub, stub
from tests.support.pages import answer, finished, running, send, settled, show

pytestmark = pytest.mark.browser
KEY = "a-key-of-the-server"


@pytest.fixture(scope="module")
def server() -> Iterator[Stub]:
    with stub(strata=True, words=60, pace=0.02, key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def address(server: Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_SERVER_KEY", KEY)
        with running(tmp_path_factory.mktemp("data"), "--model", server.base) as url:
            yield url


@pytest.mark.soak
def test_the_page_chats_with_a_server_and_tells_what_it_knows(page: Page) -> None:
    expect(page.locator("#header .facts")).to_contain_text("on the server 127.0.0.1")
    expect(page.locator("#header")).to_contain_text("The server drafts with its databases")
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
