"""Compare and Benchmark: any two sides; a benchmark that is stopped and continued; both in the dark
and on a phone."""

import csv
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages import PHONE, fits, fixed_budget, open_tab, pick, set_number, settled

pytestmark = pytest.mark.browser


@pytest.mark.soak
def test_any_two_methods_and_any_two_models_are_compared(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    fixed_budget(page)
    page.emulate_media(color_scheme="dark")
    open_tab(page, "Compare")
    pick(page, "#compare-left-method", re.compile("^✓?\\s*This chat only$"))
    page.click("#compare")
    expect(page.locator("#verdict .same")).to_contain_text("Identical")
    expect(page.locator("#verdict .same")).to_contain_text("3 of 3 repeats")
    plots = page.locator(".js-plotly-plot:visible")
    expect(plots).to_have_count(6)
    # A title says what was found, an axis what is drawn.
    axes = plots.locator(".xtitle, .ytitle").all_text_contents()
    assert {"seconds of decoding", "tokens", "tokens from one step", "% of tokens"} <= set(axes)
    titles = plots.locator(".gtitle").all_text_contents()
    assert len(titles) == 6 and all(titles), titles
    expect(page.locator("#verdict")).to_contain_text("speedup of the right side")
    expect(page.locator("#compare")).to_be_visible()
    for side in ("#compare-plain", "#compare-fast"):
        assert page.locator(f"{side} .tok:not(.k-target)").count() > 1, "both sides have colours"
    facts = page.locator("#header .facts").text_content()
    pick(page, "#compare-model", re.compile("GGUF"))
    page.click("#compare")
    expect(page.locator("#verdict")).to_contain_text("Two models, 3 repeats")
    expect(page.locator(".side-head h3").nth(1)).to_contain_text("(llama.cpp)")
    expect(page.locator("#compare")).to_be_visible()
    open_tab(page, "Diagnostics")
    expect(page.locator("#runs")).to_contain_text("Compare")
    page.reload()
    settled(page)
    usual = re.compile(r" · plain decoding.*")
    now = page.locator("#header .facts").text_content()
    assert usual.sub("", now or "") == usual.sub("", facts or ""), "the usual model is back"
    open_tab(page, "Compare")
    page.set_viewport_size(PHONE)
    expect(page.locator("#compare-model")).to_be_visible()
    assert fits(page)


def test_both_sides_answer_at_once_in_a_race(page: Page) -> None:
    set_number(page, "Max tokens", 150)
    fixed_budget(page)
    open_tab(page, "Compare")
    page.click("#compare-race")
    left, right = (page.locator(".side-head").nth(at) for at in (0, 1))
    expect(page.locator("#verdict .same")).to_contain_text("The texts are identical")
    expect(left).to_contain_text("1.00 tokens/step")
    expect(right).not_to_contain_text("1.00 tokens/step")
    expect(page.locator("#compare-race")).to_be_visible()


@pytest.mark.soak
def test_a_benchmark_is_stopped_continues_after_a_reload_and_is_saved(page: Page) -> None:
    set_number(page, "Max tokens", 40)
    fixed_budget(page)
    open_tab(page, "Benchmark")
    page.locator("#benchmark-source label", has_text="Own prompts").click()
    prompts = "\n".join(f"Tell me a long story about {what}." for what in ("a cat", "hills", "tea"))
    page.fill("#benchmark-text textarea", prompts)
    page.fill("#benchmark-tokens input", "250")
    page.press("#benchmark-tokens input", "Tab")
    expect(page.locator("#benchmark-count")).to_contain_text("3 questions")
    page.click("#benchmark-run")
    status = page.locator("#benchmark-status .progress")
    expect(status).to_contain_text(re.compile("[1-5] of 6 runs"))
    page.click("#benchmark-stop")
    expect(page.locator("#benchmark-resume")).to_be_visible()
    page.reload()
    settled(page)
    open_tab(page, "Benchmark")
    result = page.locator("#benchmark-result")
    expect(result).to_contain_text("of 6 runs are done")
    page.click("#benchmark-resume")
    expect(result).to_contain_text("Figures cover all 3 questions")
    expect(result).to_contain_text("3 of 3")
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
