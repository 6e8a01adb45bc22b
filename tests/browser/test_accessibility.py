"""What axe-core finds on every tab, light and dark, on a desktop and a phone; that nothing scrolls
sideways, and that every tab begins at one left edge. A tab that is added is looked at by itself."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.pages import DESKTOP, PHONE, finished, fits, send, set_number, visit

pytestmark = pytest.mark.browser
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LOOK = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter((found) => ["serious", "critical"].includes(found.impact))
  .map((found) => [found.id, found.nodes.slice(0, 4).map((node) => node.html.slice(0, 200)
    + " | " + node.failureSummary.split("\\n")[1])])"""
WIDTHS = {"desktop": DESKTOP, "phone": PHONE}
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


@pytest.fixture(params=product(WIDTHS, ("light", "dark")), ids="-".join)
def seen(
    request: pytest.FixtureRequest, another: Callable[..., BrowserContext], address: str
) -> Page:
    """The page as somebody sees it first, in one of its widths and themes."""
    width, theme = request.param
    context = another(viewport=WIDTHS[width], reduced_motion="reduce")
    context.add_init_script(f"if (location.host) localStorage['strata-theme'] = '{theme}'")
    page = context.new_page()
    visit(page, address)
    return page


@pytest.mark.soak(stay=1)
def test_nothing_serious_is_found_on_any_tab(seen: Page) -> None:
    page = seen
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
        assert fits(page), f"{name} is too wide"
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.soak
def test_nothing_serious_is_found_in_search_help_tour_and_simple_mode(seen: Page) -> None:
    page = seen
    page.click(".no-tour")
    page.keyboard.press("Control+k")
    settle(page)
    found = {"search": problems(page)}
    page.keyboard.press("Escape")
    page.click("#to-help")
    found["help"] = problems(page)
    page.click("#help .to-tour")
    found["tour"] = problems(page)
    page.keyboard.press("Escape")
    page.click("#mode")
    found["simple mode"] = problems(page)
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.soak
def test_every_tab_begins_at_one_left_edge(page: Page) -> None:
    edges = {}
    for name in tabs(page):
        page.get_by_role("tab", name=name, exact=True).click()
        settle(page)
        edges[name] = page.evaluate(EDGE)
    assert {name: edge for name, edge in edges.items() if abs(edge) > 1} == {}
