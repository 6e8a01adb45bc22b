"""Events that take long: their late answers change nothing that the user did meanwhile."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from engine.types import Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.support.pages import entry, late, open_tab, until, visit

pytestmark = [pytest.mark.browser, pytest.mark.soak]
DATABASES = "Databases (hierarchy drafting)"
FILTER, SHOW, CHOOSE = (f"diagnostics.Diagnostics.{name}" for name in ("filter", "show", "choose"))
OPEN, LOOK = (f"conversations.ConversationList.{name}" for name in ("open", "look"))


@pytest.fixture(autouse=True)
def runs(page: Page, address: str, data: Path, owner: str) -> None:
    """Three runs, the oldest first: a plain one, and two with drafts."""
    with Database(data / "strata.db") as database:
        traces, talks = Traces(database, owner), Conversations(database, owner)
        for name, method in (("one", "plain"), ("two", "hd"), ("three", "hd")):
            talk = talks.create(name).id
            talks.append(talk, "user", f"question {name}")
            steps = tuple(Step(at, (Token(1, at, "target", text="x"),)) for at in range(30))
            run = traces.save(Run(method, "toy", "toy", {}, Prefill(9, 4), steps), talk, "chat")
            talks.append(talk, "assistant", "said", run)
    visit(page, address)


def row(page: Page, at: int) -> Locator:
    return page.locator("#runs .virtual-row").nth(at).get_by_test_id(f"cell-{at}-0")


def choose_method(page: Page, name: str) -> None:
    page.get_by_label("Method", exact=True).click()
    page.get_by_role("option", name=name, exact=True).click()


def open_runs(page: Page) -> tuple[Locator, Locator, Locator]:
    open_tab(page, "Diagnostics")
    listed, asked = page.locator("#range"), page.locator("#run-prompt")
    expect(listed).to_contain_text("1 to 3 of 3 runs")
    expect(asked).to_contain_text("question three")
    return listed, asked, page.locator("#step-card")


def test_a_late_filter_leaves_the_run_that_was_clicked_meanwhile(page: Page, data: Path) -> None:
    listed, asked, step = open_runs(page)
    with late(data, FILTER) as begun:
        choose_method(page, DATABASES)
        until(page, lambda: begun() >= 1)
        row(page, 2).click()
        expect(asked).to_contain_text("question one")
        page.locator("#steps").get_by_test_id("cell-3-0").click()
        expect(step).to_contain_text("Step 4 of")
    expect(listed).to_contain_text("1 to 2 of 2 runs")
    expect(asked).to_contain_text("question one")
    expect(step).to_contain_text("Step 4 of")


def test_a_choice_that_is_reported_twice_leaves_the_run_that_was_clicked_between(
    page: Page,
) -> None:
    """A dropdown triggers its event twice for one choice, the second time a little later."""
    listed, asked, _ = open_runs(page)
    events, held = list[int](), list[Route]()

    def hold_the_second(route: Route) -> None:
        event = json.loads(route.request.post_data or "{}")["fn_index"]
        events.append(event)
        if events.index(event) == len(events) - 1:
            route.continue_()
        else:
            held.append(route)

    page.route("**/queue/join*", hold_the_second)
    choose_method(page, DATABASES)
    until(page, lambda: bool(held))
    expect(listed).to_contain_text("1 to 2 of 2 runs")
    row(page, 1).click()
    expect(asked).to_contain_text("question two")
    with page.expect_response("**/queue/join*"):
        held[0].continue_()
    page.wait_for_timeout(700)  # Time for what must not happen.
    expect(asked).to_contain_text("question two")


def test_the_newest_of_two_filters_and_of_two_clicks_is_what_is_shown(
    page: Page, data: Path
) -> None:
    listed, asked, step = open_runs(page)
    with late(data, CHOOSE) as begun:
        row(page, 1).click()
        until(page, lambda: begun() >= 1)
        row(page, 2).click()
        until(page, lambda: begun() >= 2)
        # It is no step of the run that comes.
        page.locator("#steps").get_by_test_id("cell-3-0").click()
    expect(asked).to_contain_text("question one")
    expect(step).to_contain_text("Step 1 of 30")
    with late(data, FILTER) as begun:
        choose_method(page, DATABASES)
        until(page, lambda: begun() >= 1)
        page.get_by_label("Time", exact=True).click()
        page.get_by_role("option", name="Last hour", exact=True).click()
        until(page, lambda: begun() >= 2)
        choose_method(page, "Plain decoding")
    expect(listed).to_contain_text("1 to 1 of 1 runs")
    expect(asked).to_contain_text("question one")


def test_a_tab_that_is_late_leaves_what_was_filtered_meanwhile(
    page: Page, data: Path, owner: str
) -> None:
    listed, asked, _ = open_runs(page)
    open_tab(page, "Chat")
    with Database(data / "strata.db") as database:
        Traces(database, owner).save(Run("plain", "another model", "toy", {}), None, "compare")
    with late(data, SHOW) as begun:
        open_tab(page, "Diagnostics")
        until(page, lambda: begun() >= 1)
        choose_method(page, DATABASES)
        expect(listed).to_contain_text("1 to 2 of 2 runs")
        row(page, 1).click()
        expect(asked).to_contain_text("question two")
    page.get_by_label("Model", exact=True).click()
    models = page.get_by_role("listbox").get_by_role("option", name="another model")
    expect(models).to_be_visible()
    expect(page.get_by_label("Method", exact=True)).to_have_value(DATABASES)
    expect(listed).to_contain_text("1 to 2 of 2 runs")
    expect(asked).to_contain_text("question two")


def test_the_conversation_that_was_chosen_last_is_open(page: Page, data: Path) -> None:
    said = page.locator("#tokens .turn.said")
    current = page.locator("#conversations .entry.current")
    for held in (OPEN, LOOK):
        with late(data, held) as begun:
            entry(page, "one").locator(".open").click()
            until(page, lambda begun=begun: begun() >= 1)
            entry(page, "two").locator(".open").click()
            until(page, lambda begun=begun: begun() >= 2)
        expect(said).to_have_text("question two")
        expect(current).to_contain_text("two")
    with late(data, OPEN) as begun:
        entry(page, "three").locator(".open").click()
        until(page, lambda: begun() >= 1)
        page.click("#new")
        expect(current).to_have_count(0)
    # What is asked now is answered later than what was held.
    page.fill("#search textarea, #search input", "two")
    expect(page.locator("#conversations .entry")).to_have_count(1)
    expect(said).to_have_count(0)
