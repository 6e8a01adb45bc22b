"""Tools on the page: a server is added, its calls are asked about, and results are folded text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from storage.database import Database
from storage.tool_servers import ServerTool, ToolServerStore
from tests.support import calling
from tests.support.calling import COMMAND
from tests.support.pages import act, finished, open_tab, running, send, settled, show, until
from tests.support.tool_server import HOSTILE

pytestmark = pytest.mark.browser
QUESTION = "Please look."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    calling.file_of(folder).touch()
    schema = json.dumps({"type": "object", "properties": {"file": {"type": "string"}}})
    with Database(folder / "strata.db") as db:
        hang = ServerTool(name="hang", parameters=schema, on=True)
        ToolServerStore(db).add("Known", COMMAND, [hang])
    return folder


@pytest.fixture(scope="module")
def address(data: Path) -> Iterator[str]:
    with running(data) as url:
        yield url


def results(page: Page) -> Locator:
    return page.locator("#tokens .turn.called")


def calls(data: Path, *calls: str) -> None:
    """From now on the model makes these calls."""
    calling.file_of(data).write_text("\n".join(calls))


def test_a_call_that_runs_is_shown_and_stopped(page: Page, data: Path) -> None:
    begun = data / "begun"
    calls(data, calling.call("hang", file=str(begun)))
    send(page, QUESTION)
    asks = page.locator("#tokens .asks")
    asks.get_by_role("button", name="Always in this chat").click()
    expect(asks).to_contain_text("Running hang of Known")
    expect(asks.get_by_role("button")).to_have_count(0)
    until(page, lambda: calling.hangs(begun) > 0)
    page.click("#stop")
    expect(asks).to_contain_text("The model wants to call hang")
    expect(page.locator("#send")).to_be_visible()
    expect(results(page)).to_have_count(0)
    until(page, lambda: calling.hangs(begun) == 0)


def test_a_call_is_asked_about_and_its_result_is_folded_text(page: Page, data: Path) -> None:
    calls(data, calling.call("hostile"), calling.call("weather", city="Paris\u202e<b>"))
    open_tab(page, "Settings")
    page.get_by_label("Name of a server").fill("Tests <img src=x onerror=fired()>")
    page.get_by_label("Its command, its URL, or JSON from its documentation").fill(COMMAND)
    page.click("#tools-add")
    expect(page.locator("#tools-status")).to_contain_text("has 9 tools")
    for name in ("weather", "hostile"):
        page.locator("#tools-chosen label", has_text=f": {name} (").locator("input").check()
    open_tab(page, "Chat")
    send(page, QUESTION)
    asks = page.locator("#tokens .asks")
    expect(asks).to_contain_text("The model wants to call hostile of Tests <img src=x")
    first = page.locator("#tokens .turn.answered").first
    expect(first).to_have_text("I look.")
    expect(results(page)).to_have_count(0)
    page.reload()
    settled(page)
    asks.get_by_role("button", name="Allow once").click()
    expect(asks).to_contain_text("wants to call weather")
    expect(asks.locator("pre")).to_have_text('{\n "city": "Paris\\u202e<b>"\n}')
    expect(results(page)).to_have_count(1)
    asks.get_by_role("button", name="No", exact=True).click()
    finished(page)
    expect(page.locator("#tokens .turn.answered").last).to_have_text("I read 2 results.")
    expect(asks).to_be_empty()
    called = results(page).first
    expect(called.locator("summary")).to_have_text(f"Called hostile · {len(HOSTILE)} characters")
    expect(called.locator("pre").last).to_be_hidden()
    called.locator("summary").click()
    expect(called.locator("pre").last).to_have_text(HOSTILE)
    assert called.locator("a, img, script").count() == 0
    expect(results(page).last).to_contain_text("Called weather")
    page.reload()
    settled(page)
    expect(results(page)).to_have_count(2)
    expect(first).to_have_text("I look.")
    show(page, "Tokens")
    expect(first).to_contain_text("<tool_call>")
    show(page, "Formatted")
    act(page, "Prove it")
    expect(page.locator("#proof")).to_contain_text("Identical: all")
    act(page, "Regenerate")
    finished(page)
    expect(page.locator("#tokens .versions").last).to_contain_text("2 / 2")
    expect(results(page)).to_have_count(2)
    send(page, QUESTION)
    asks.get_by_role("button", name="Always in this chat").click()
    expect(asks).to_contain_text("wants to call weather")
    asks.get_by_role("button", name="Always in this chat").click()
    finished(page)
    send(page, QUESTION)
    expect(results(page)).to_have_count(6)
    finished(page)
    expect(asks).to_be_empty()
