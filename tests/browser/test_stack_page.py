"""The Stack tab: two draft models, one of them with a hostile name."""

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.conftest import EMBEDDED
from tests.support.pages import (
    PATIENCE,
    act,
    end,
    finished,
    guarded,
    open_advanced,
    open_tab,
    running,
    send,
    start,
    told,
    visit,
)

pytestmark = [pytest.mark.browser, pytest.mark.soak]
SAME = re.compile(r"(\d) of \1 gave the text")
EVIL = "<img src=x onerror=fired()>"


def type_plan(page: Page, spec: str) -> None:
    page.get_by_label("Another plan").fill(spec)
    page.get_by_label("Another plan").press("Enter")


def load_and_profile(page: Page, folder: Path) -> None:
    open_tab(page, "Stack")
    expect(page.locator("#stack-models input:checked")).to_have_count(2)
    expect(page.locator("#stack-models")).to_contain_text("small · 1.0 M parameters")
    page.get_by_label("small").first.uncheck()
    page.locator("#stack-source input, #stack-source textarea").first.fill(str(folder))
    page.click("#stack-add")
    expect(page.locator("#stack-models")).to_contain_text(f"{EVIL} · 1.0 M parameters")
    expect(page.locator("#stack-use")).to_be_disabled()
    page.click("#stack-load")
    expect(page.locator("#stack-loaded")).to_contain_text(f"{EVIL}, mid")
    page.click("#stack-profile")
    page.click("#stack-stop")
    expect(page.locator("#stack-status")).to_contain_text("was stopped")
    page.click("#stack-profile")
    expect(page.locator("#stack-status .progress")).to_be_visible()
    expect(page.locator("#stack-profiled")).to_contain_text("measured on", timeout=3 * PATIENCE)


def test_from_two_models_to_a_coloured_answer(browser: Browser, tmp_path: Path) -> None:
    folder, data = tmp_path / EVIL, tmp_path / "data"
    shutil.copytree(EMBEDDED.parent / "small", folder)
    with running(data) as url, guarded(browser, url) as context:
        page = context.new_page()
        visit(page, url)
        load_and_profile(page, folder)
        expect(page.locator(".js-plotly-plot:visible")).to_have_count(4)
        expect(page.locator("#stack-planned")).to_contain_text("per token")
        expect(page.locator("#stack-findings .verdict").first).to_be_visible()
        type_plan(page, f"{EVIL}@99")
        expect(page.locator("#stack-planned")).to_contain_text("from 1 to 32")
        type_plan(page, f"{EVIL}@3/mid@2")
        expect(page.locator("#stack-planned")).to_contain_text("drafts 3 tokens at a time for mid")
        page.click("#stack-measure")
        expect(page.locator("#stack-outcome")).to_contain_text(SAME, timeout=3 * PATIENCE)
        page.click("#stack-use")
        expect(page.locator("#stack-status")).to_contain_text(f"hsd:{EVIL}@3/mid@2")
        open_advanced(page)
        # Without the measured budget the stack drafts even where it does not pay.
        page.get_by_label("Fixed").check()
        open_tab(page, "Chat")
        send(page, "Tell me a short story about a boat.")
        finished(page)
        drafted = page.locator("#tokens .turn.answered .tok.k-draft")
        assert drafted.count() > 5
        lines = drafted.evaluate_all("all => all.map(n => getComputedStyle(n).textDecorationStyle)")
        assert set(lines) == {"wavy"}
        expect(page.locator("#figures")).to_contain_text("Draft models")
        chip = page.locator(f'#tokens .chip[data-source="draft:{EVIL}"]')
        expect(chip).to_contain_text("Draft <img")
        chip.click()
        dimmed = page.locator("#tokens .turn.answered .tok.dim")
        assert dimmed.count() > 5 and page.locator("#tokens .tok.k-draft:not(.dim)").count() > 0
        chip.click()
        expect(dimmed).to_have_count(0)
        act(page, "Prove it")
        expect(page.locator("#proof .same")).to_contain_text("Identical")
        assert page.locator("img[src='x']").count() == 0
    shutil.rmtree(folder)
    process, url, _ = start(data)
    assert "cannot be found" in told(process, "The draft models were not loaded")
    with guarded(browser, url) as context:
        page = context.new_page()
        visit(page, url)
        expect(page.locator("#header .notice")).to_contain_text("were not loaded")
        page.locator("#conversations .title").first.click()
        expect(page.locator("#tokens .tok.k-draft").first).to_be_attached()
        act(page, "Regenerate")
        expect(page.get_by_text("none is loaded")).to_be_visible()
        expect(page.locator("#tokens .turn.answered")).to_have_count(1)
    end(process)
