"""Events that take long: their late answers change nothing that the user did meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from engine.types import Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.support.pages import OWNER, end, entry, late, open_tab, start, until

pytestmark = pytest.mark.browser
DATABASES = "Databases (hierarchy drafting)"
FILTER, SHOW, CHOOSE = (f"diagnostics.Handlers.{name}" for name in ("filter", "show", "choose"))
OPEN, REDRAW = (f"conversations.Handlers.{name}" for name in ("open_", "redraw"))


def keep_runs(folder: Path) -> None:
    """Three runs, the oldest first: a plain one, and two with drafts."""
    with Database(folder / "strata.db") as database:
        traces, talks = Traces(database, OWNER), Conversations(database, OWNER)
        for name, method in (("one", "plain"), ("two", "hd"), ("three", "hd")):
            talk = talks.create(name).id
            talks.append(talk, "user", f"question {name}")
            steps = tuple(Step(at, (Token(1, at, "target", text="x"),)) for at in range(30))
            run = traces.save(Run(method, "toy", "toy", {}, Prefill(9, 4), steps), talk, "chat")
            talks.append(talk, "assistant", "said", run)


@pytest.fixture(scope="module")
def address(data: Path) -> Iterator[str]:
    """The program, with handlers that can be held."""
    keep_runs(data)
    process, url, _ = start(data, held=[FILTER, SHOW, CHOOSE, OPEN, REDRAW])
    yield url
    end(process)


def row(page: Page, at: int) -> Locator:
    """A run in the list."""
    return page.locator("#runs .virtual-row").nth(at).get_by_test_id(f"cell-{at}-0")


def choose_method(page: Page, name: str) -> None:
    """Filter the runs."""
    page.get_by_label("Method", exact=True).click()
    page.get_by_role("option", name=name, exact=True).click()


def test_a_late_filter_leaves_the_run_that_was_clicked_meanwhile(page: Page, data: Path) -> None:
    open_tab(page, "Diagnostics")
    expect(page.locator("#range")).to_contain_text("1 to 3 of 3 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question three")
    with late(data, FILTER) as begun:
        choose_method(page, DATABASES)
        until(page, lambda: begun() >= 1)
        row(page, 2).click()
        expect(page.locator("#run-prompt")).to_contain_text("question one")
        page.locator("#steps").get_by_test_id("cell-3-0").click()
        expect(page.locator("#step-card")).to_contain_text("Step 4 of")
    expect(page.locator("#range")).to_contain_text("1 to 2 of 2 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question one")
    expect(page.locator("#step-card")).to_contain_text("Step 4 of")


def test_the_newest_of_two_filters_and_of_two_clicks_is_what_is_shown(
    page: Page, data: Path
) -> None:
    open_tab(page, "Diagnostics")
    expect(page.locator("#range")).to_contain_text("1 to 3 of 3 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question three")
    with late(data, CHOOSE) as begun:
        row(page, 1).click()
        until(page, lambda: begun() >= 1)
        row(page, 2).click()
        until(page, lambda: begun() >= 2)
        # It is no step of the run that comes.
        page.locator("#steps").get_by_test_id("cell-3-0").click()
    expect(page.locator("#run-prompt")).to_contain_text("question one")
    expect(page.locator("#step-card")).to_contain_text("Step 1 of 30")
    with late(data, FILTER) as begun:
        choose_method(page, DATABASES)
        until(page, lambda: begun() >= 1)
        page.get_by_label("Time", exact=True).click()
        page.get_by_role("option", name="Last hour", exact=True).click()
        until(page, lambda: begun() >= 2)
        choose_method(page, "Plain decoding")
    expect(page.locator("#range")).to_contain_text("1 to 1 of 1 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question one")


def test_a_tab_that_is_late_leaves_what_was_filtered_meanwhile(page: Page, data: Path) -> None:
    open_tab(page, "Diagnostics")
    expect(page.locator("#range")).to_contain_text("1 to 3 of 3 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question three")
    open_tab(page, "Chat")
    with Database(data / "strata.db") as database:
        Traces(database, OWNER).save(Run("plain", "another model", "toy", {}), None, "compare")
    with late(data, SHOW) as begun:
        open_tab(page, "Diagnostics")
        until(page, lambda: begun() >= 1)
        choose_method(page, DATABASES)
        expect(page.locator("#range")).to_contain_text("1 to 2 of 2 runs")
        row(page, 1).click()
        expect(page.locator("#run-prompt")).to_contain_text("question two")
    page.get_by_label("Model", exact=True).click()
    expect(page.get_by_role("option", name="another model", exact=True)).to_be_visible()
    expect(page.get_by_label("Method", exact=True)).to_have_value(DATABASES)
    expect(page.locator("#range")).to_contain_text("1 to 2 of 2 runs")
    expect(page.locator("#run-prompt")).to_contain_text("question two")


def test_the_conversation_that_was_chosen_last_is_open(page: Page, data: Path) -> None:
    said = page.locator("#tokens .turn.said")
    with late(data, OPEN) as begun:
        entry(page, "one").locator(".open").click()
        until(page, lambda: begun() >= 1)
        entry(page, "two").locator(".open").click()
        until(page, lambda: begun() >= 2)
    expect(said).to_have_text("question two")
    expect(page.locator("#conversations .entry.current")).to_contain_text("two")
    with late(data, REDRAW) as begun:
        entry(page, "one").locator(".open").click()
        until(page, lambda: begun() >= 1)
        entry(page, "two").locator(".open").click()
        until(page, lambda: begun() >= 2)
    expect(said).to_have_text("question two")
    expect(page.locator("#conversations .entry.current")).to_contain_text("two")
    with late(data, OPEN) as begun:
        entry(page, "three").locator(".open").click()
        until(page, lambda: begun() >= 1)
        page.click("#new")
        expect(page.locator("#conversations .entry.current")).to_have_count(0)
    # What is asked now is answered later than what was held.
    page.fill("#search textarea, #search input", "two")
    expect(page.locator("#conversations .entry")).to_have_count(1)
    expect(said).to_have_count(0)
