"""Compare and Benchmark as people meet them: any two sides; a benchmark that is stopped and goes
on; by night and on a phone."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import open_advanced, open_tab, set_number, settled

pytestmark = pytest.mark.browser
PHONE = {"width": 390, "height": 844}


@pytest.fixture(autouse=True)
def same_answers(page: Page) -> Iterator[None]:
    """Short answers of one seed, with drafts whether they pay beside a browser or not."""
    set_number(page, "Max tokens", 40)
    open_advanced(page)
    page.get_by_label("Fixed", exact=True).check()
    page.get_by_label("A new seed for each answer").uncheck()
    yield


def choose(page: Page, box: str, option: str | re.Pattern[str]) -> None:
    """Choose from a dropdown."""
    page.locator(f"{box} input").click()
    page.get_by_role("option", name=option).click()


def fits(page: Page) -> bool:
    """Whether nothing hangs out of the window at its side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_any_two_methods_and_any_two_models_are_compared(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    open_tab(page, "Compare")
    choose(page, "#compare-left-method", re.compile("^✓?\\s*This chat only .context"))
    page.click("#compare")
    expect(page.locator("#verdict .same")).to_contain_text("3 of 3 repeats")
    expect(page.locator("#verdict")).to_contain_text("speedup of the right side")
    expect(page.locator("#compare")).to_be_visible()
    for side in ("#compare-plain", "#compare-fast"):
        assert page.locator(f"{side} .tok:not(.k-target)").count() > 1, "both sides have colours"
    facts = page.locator("#header .facts").text_content()
    choose(page, "#compare-model", re.compile("llama.cpp"))
    page.click("#compare")
    expect(page.locator("#verdict")).to_contain_text("Two models, 3 repeats")
    expect(page.locator(".side-head h3").nth(1)).to_contain_text("(llama.cpp)")
    expect(page.locator("#compare")).to_be_visible()
    page.reload()
    settled(page)
    usual = re.compile(r" · plain decoding.*")
    now = page.locator("#header .facts").text_content()
    assert usual.sub("", now or "") == usual.sub("", facts or ""), "the usual model is back"
    open_tab(page, "Compare")
    page.set_viewport_size(PHONE)
    expect(page.locator("#compare-model")).to_be_visible()
    assert fits(page)


def test_a_benchmark_is_stopped_goes_on_after_a_reload_and_is_saved(page: Page) -> None:
    open_tab(page, "Benchmark")
    page.locator("#benchmark-source label", has_text="Own prompts").click()
    prompts = "\n".join(f"Tell me a long story about {what}." for what in ("a cat", "hills", "tea"))
    page.fill("#benchmark-text textarea", prompts)
    page.fill("#benchmark-tokens input", "250")
    page.press("#benchmark-tokens input", "Tab")
    expect(page.locator("#benchmark-asked")).to_contain_text("3 questions")
    page.click("#benchmark-run")
    status = page.locator("#benchmark-status .progress")
    expect(status).to_contain_text(re.compile("[1-5] of 6 runs"))
    page.click("#benchmark-stop")
    expect(page.locator("#benchmark-resume")).to_be_visible()
    page.reload()
    settled(page)
    open_tab(page, "Benchmark")
    expect(page.locator("#benchmark-result")).to_contain_text("of 6 runs are done")
    page.click("#benchmark-resume")
    expect(page.locator("#benchmark-result")).to_contain_text("Figures are of all 3 questions")
    expect(page.locator("#benchmark-result")).to_contain_text("3 of 3")
    expect(page.locator("#benchmark-resume")).to_be_hidden()
    expect(page.locator("#benchmark-chart .js-plotly-plot")).to_be_visible()
    expect(page.locator("#benchmarks")).to_contain_text("6 of 6")
    with page.expect_download() as saved:
        page.click("#benchmark-csv")
    rows = list(csv.DictReader(Path(saved.value.path()).read_text().splitlines()))
    assert [row["method"] for row in rows].count("plain") == 3 and len(rows) == 6
    assert {row["same_text"] for row in rows} == {"True"}
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size(PHONE)
    expect(page.locator("#benchmark-detail .results")).to_be_visible()
    assert fits(page), "wide tables scroll by themselves"
