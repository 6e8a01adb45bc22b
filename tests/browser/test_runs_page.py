"""Diagnostics and Databases: from past runs down to one step, and a statistics file that is built
in the page."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.support.pages import finished, open_tab, send, set_number

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=fired()>"
STORY = "The boat went out to sea and the storm came over the hills. "


def point_at(page: Page, point: Locator) -> None:
    """Click a point of a chart, as a mouse does: it comes from elsewhere and rests there."""
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 30, y - 20)
    page.mouse.move(x, y, steps=4)
    expect(page.locator(".hoverlayer .hovertext").first).to_be_attached()
    page.mouse.click(x, y)


def test_from_filters_to_a_run_to_a_step_and_into_a_file(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    for text in (f"Tell me of a boat. {EVIL}", "Tell me of the sea."):
        send(page, text)
        finished(page)
    open_tab(page, "Diagnostics")
    rows = page.locator("#runs .virtual-row")
    expect(rows).to_have_count(2)
    expect(page.locator("#range")).to_contain_text("1 to 2 of 2 runs")
    page.get_by_label("From", exact=True).click()
    page.get_by_role("option", name="Chat", exact=True).click()
    page.get_by_label("Time", exact=True).click()
    page.get_by_role("option", name="Last hour", exact=True).click()
    expect(page.locator("#range")).to_contain_text("1 to 2 of 2 runs")
    rows.nth(1).get_by_test_id("cell-1-0").click()
    expect(page.locator("#run-prompt")).to_contain_text(EVIL)
    expect(page.locator("#run-prompt")).not_to_contain_text("Tell me of the sea.")
    expect(page.locator("#run-text .tok").first).to_be_attached()
    # What it said is drawn wherever it is on the page: it is in a print of all of it.
    expect(page.locator("#run-text .message")).to_have_css("content-visibility", "visible")
    expect(page.locator("#step-card")).to_contain_text("Step 1 of")
    page.locator("#steps").get_by_test_id("cell-3-0").click()
    expect(page.locator("#step-card")).to_contain_text("Step 4 of")
    expect(page.locator("#step-card")).to_contain_text("verify")
    # A point of the chart of a run's time opens its step, one of the history opens its run.
    charts = page.locator(".js-plotly-plot:visible")
    point_at(page, charts.nth(2).locator(".point").nth(6))
    expect(page.locator("#step-card")).to_contain_text(re.compile(r"Step [5678] of"))
    point_at(page, charts.first.locator(".point").nth(1))
    expect(page.locator("#run-prompt")).to_contain_text("Tell me of the sea.")
    with page.expect_download() as saved:
        page.click("#runs-csv")
    text = Path(saved.value.path()).read_text()
    assert saved.value.suggested_filename == "runs.csv" and len(text.splitlines()) == 3
    # What a step costs is drawn, and can be measured again.
    costs = charts.last
    expect(costs.locator(".gtitle")).to_have_text("What a step costs, and how much was drafted")
    expect(costs.locator(".scatterlayer .js-line").first).to_be_attached()
    line = page.locator("#costs")
    expect(line).to_contain_text("Cost of a step: measured")
    page.click("#measure")
    expect(line).to_contain_text("Measuring")
    expect(line).to_contain_text("Cost of a step: measured")
    expect(costs.locator(".bars .point").first).to_be_attached()
    assert page.locator("img[src='x']").count() == 0


@pytest.mark.soak
def test_a_file_is_built_in_the_page_and_another_build_is_stopped(
    page: Page, data: Path, tmp_path: Path
) -> None:
    small, large = tmp_path / f"{EVIL.replace('/', '')}.txt", tmp_path / "large.txt"
    small.write_text(STORY * 300)
    large.write_text(STORY * 400_000)
    folder = data / "statistics"
    set_number(page, "Max tokens", 60)
    send(page, "Say the same thing twice, then twice again.")
    finished(page)
    open_tab(page, "Databases")
    trust = page.locator(".js-plotly-plot:visible")
    expect(trust.locator(".gtitle")).to_have_text("How much a match is trusted")
    expect(trust.locator(".scatterlayer .point").first).to_be_attached()
    status = page.locator("#general-status")
    with page.expect_file_chooser() as chooser:
        page.click("#general-upload")
    chooser.value.set_files(small)
    expect(status).to_contain_text("and in use")
    expect(page.locator("#tier-statistics")).to_contain_text("img src=x")
    (made,) = folder.iterdir()
    before = made.read_bytes()
    page.locator("#general-local button").first.click()
    page.fill("#general-paths textarea", str(large))
    page.click("#general-build")
    expect(status.locator(".progress")).to_contain_text("tokens")
    page.click("#general-stop")
    expect(status).to_contain_text("Nothing was changed")
    assert [*folder.iterdir()] == [made] and made.read_bytes() == before
    page.fill("#words textarea, #words input", "The boat went")
    page.click("#look-up")
    expect(page.locator("#found")).to_contain_text("␣out")
    page.get_by_role("button", name="Empty Past answers").click()
    page.locator(".asking:visible").get_by_role("button", name="Empty it").click()
    expect(trust.locator(".scatterlayer .point")).to_have_count(0)
    expect(page.locator("#tier-model dd").first).to_have_text("0")
    page.click("#general-remove")
    expect(status).to_contain_text("was removed")
    assert [*folder.iterdir()] == []
    expect(page.locator("#tier-statistics")).not_to_contain_text("img src=x")
    assert page.locator("img[src='x']").count() == 0
