"""What axe-core finds on every tab, light and dark, on a desktop and a phone; that nothing scrolls
sideways, and that every tab begins at one left edge. A tab that is added is looked at by itself."""

from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.pages import PATIENCE, finished, send, set_number, visit

pytestmark = pytest.mark.browser
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LOOK = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter((found) => ["serious", "critical"].includes(found.impact))
  .map((found) => [found.id, found.nodes.slice(0, 4).map((node) => node.html.slice(0, 200)
    + " | " + node.failureSummary.split("\\n")[1])])"""
WIDTHS = {"desktop": (1440, 900), "phone": (390, 844)}
QUIET = """() => new Promise((then) => {
  let still = 0;
  const wait = () => { clearTimeout(still); still = setTimeout(done, 400); };
  const changes = new MutationObserver(wait);
  const done = () => { changes.disconnect(); clearTimeout(most); then(); };
  const most = setTimeout(done, 10000);
  changes.observe(document.body, { childList: true, subtree: true, characterData: true });
  wait();
})"""
EDGE = """() => {
  const tab = [...document.querySelectorAll(".tabitem")].find((one) => one.offsetParent);
  const words = "h3, label > span, p, button, dl, input:not([type]), textarea, table";
  const edges = [...tab.querySelectorAll(words)].filter((one) => one.offsetParent
    && getComputedStyle(one).opacity !== "0").map((one) => one.getBoundingClientRect())
    .filter((box) => box.width > 1).map((box) => Math.round(box.left));
  return edges.length ? Math.min(...edges) - Math.round(tab.getBoundingClientRect().left) : 0;
}"""


def tabs(page: Page) -> list[str]:
    return [name.strip() for name in page.get_by_role("tab").all_text_contents()]


def settle(page: Page) -> None:
    """What a tab asks for when it opens has come, its charts too, and what moves has arrived."""
    expect(page.locator('[aria-label="Empty value"]:visible')).to_have_count(0)
    page.evaluate(QUIET)


def problems(page: Page) -> list[Any]:
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(AXE)
    found: list[Any] = page.evaluate(LOOK)
    return found


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_serious_is_found_on_any_tab(
    browser: Browser, address: str, width: str, dark: bool
) -> None:
    wide, high = WIDTHS[width]
    context = browser.new_context(viewport={"width": wide, "height": high}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    theme = "dark" if dark else "light"
    context.add_init_script(f"localStorage.setItem('strata-theme', '{theme}')")
    page = context.new_page()
    visit(page, address)
    expect(page.locator(".offer")).to_be_visible()
    found = {"first visit": problems(page)}
    page.click(".no-tour")
    set_number(page, "Max tokens", 12)
    send(page, "Say a word.")
    finished(page)
    for name in tabs(page):
        page.get_by_role("tab", name=name, exact=True).click()
        settle(page)
        found[name] = problems(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= wide, f"{name} is too wide"
    page.get_by_role("tab", name="Chat", exact=True).click()
    page.keyboard.press("Control+k")
    settle(page)
    found["search"] = problems(page)
    page.keyboard.press("Escape")
    page.click("#to-help")
    found["help"] = problems(page)
    page.click("#help .to-tour")
    found["tour"] = problems(page)
    page.keyboard.press("Escape")
    page.click("#mode")
    found["simple mode"] = problems(page)
    context.close()
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.soak
def test_every_tab_begins_at_one_left_edge(page: Page) -> None:
    edges = {}
    for name in tabs(page):
        page.get_by_role("tab", name=name, exact=True).click()
        settle(page)
        edges[name] = page.evaluate(EDGE)
    assert {name: edge for name, edge in edges.items() if abs(edge) > 1} == {}
