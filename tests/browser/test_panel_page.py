"""The live figures: told by events while an answer grows, by values else."""

from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from app.web.metrics_panel import panel_values
from engine.compare import Speedup
from engine.types import MODEL, TARGET, Prefill, Step, Token
from tests.support.runs import summed
from tests.web.test_metrics_panel import RUN

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=fired()> ${fired()} {{constructor.constructor('fired()')()}}"
FIRE = """([name, details]) => {
  for (const detail of details) document.dispatchEvent(new CustomEvent(name, { detail }));
}"""


def fire(page: Page, *details: dict[str, Any], name: str = "strata:figures") -> None:
    page.evaluate(FIRE, [name, list(details)])


def told(steps: list[Step], since: int = 0, prompt: float = 0.03, **more: Any) -> dict[str, Any]:
    """What is sent of a run whose steps up to `since` were sent before."""
    return panel_values(summed(Prefill(9, 0, prompt), steps), steps[since:], **more)


def figure(page: Page, name: str) -> str:
    """A figure and what stands below it."""
    box = page.locator("#figures .figure").filter(has=page.get_by_text(name, exact=True))
    return f"{box.locator('b').inner_text()} | {box.locator('small').inner_text()}"


def cells(page: Page, table: str = "sources") -> list[str]:
    rows = page.locator(f"#figures .{table} tbody tr").all()
    return [" | ".join(row.locator("td").all_inner_texts()) for row in rows]


def columns(page: Page) -> list[str]:
    found = page.locator("#figures .ribbon b").evaluate_all("all => all.map(n => n.title)")
    assert isinstance(found, list)
    return found


@pytest.mark.soak
def test_figures_change_in_their_places_and_updates_ask_for_no_layout(page: Page) -> None:
    lead = page.locator("#figures .figure.lead")
    levels = page.locator("#figures .levels")
    # Without an answer there are dashes.
    assert figure(page, "Speed") == "– | tokens/s while writing"
    assert figure(page, "Speedup") == "– | of the whole answer"
    assert figure(page, "First token") == "– | in the model"
    names = ("This chat", "Past answers", "General text", "Built-in head", "The model itself")
    assert cells(page) == [f"{name} | – | – | –" for name in names]
    expect(levels).to_be_hidden()
    expect(page.locator("#figures .ended")).to_be_hidden()
    assert columns(page) == []
    # The legend's shares are of the conversation, these of one answer.
    expect(page.locator("#figures h4").first).to_have_text("Where this answer's tokens came from")
    said = tuple(Token(n, n, MODEL if n == 3 else TARGET) for n in range(8))
    fire(page, told([Step(0, said, {MODEL: 1}, {MODEL: 1}, verify_seconds=0.01)]))
    assert [row.split(" | ")[1] for row in cells(page)] == ["0 %", "13 %", "0 %", "0 %", "88 %"]

    fire(page, told(RUN[:30], ended="60 tokens"))
    assert figure(page, "Speed") == "142 | tokens/s while writing; plain: 100"
    assert figure(page, "Speedup") == "1.39× | of the whole answer, estimated from 10 plain steps"
    assert lead.get_attribute("title") == "decoding alone 1.42×"
    assert figure(page, "Tokens per step") == "2.00 | plain decoding: 1.00"
    assert figure(page, "First token") == "44 ms | in the model"
    assert cells(page)[0] == "This chat | 17 % | 10 / 80 13 % | 123 µs"
    assert cells(page)[3:5] == ["Built-in head | 0 % | – | –", "The model itself | 50 % |  | "]
    assert columns(page)[:3] == ["step 1: 1 token", "step 2: 2 tokens", "step 3: 3 tokens"]
    widths = page.locator("#figures .shares i").evaluate_all("all => all.map(n => n.clientWidth)")
    assert sum(widths) == pytest.approx(page.locator("#figures .shares").bounding_box()["width"], 1)
    assert widths[0] == widths[1] == widths[2] == pytest.approx(widths[4] / 3, 2)
    mark = "all => all.forEach(node => { node.mine = true; })"
    places = page.locator("#figures :not(.ribbon b)")
    places.evaluate_all(mark)
    page.locator("#figures .ribbon b").evaluate_all(mark)
    fire(page, told(RUN[:50], 30, ended="100 tokens"))
    assert places.evaluate_all("all => all.every(node => node.mine)"), "no part is made anew"
    kept = page.locator("#figures .ribbon b").evaluate_all("all => all.map(n => Boolean(n.mine))")
    assert kept == [True] * 30 + [False] * 20, "columns are appended"
    expect(page.locator("#figures .ended")).to_have_text("100 tokens")
    fire(page, told(RUN[:30], speedup=Speedup(1.67, 1.8)))
    assert figure(page, "Speedup") == "1.67× | of the whole answer; decoding alone 1.80×"
    assert figure(page, "Speed") == "142 | tokens/s while writing", "no estimate, nothing it is of"

    # The ribbon shows the latest steps, each once.
    fire(page, told(RUN[:60]), told(RUN[:90], 60), told(RUN[:95], 80))
    assert columns(page) == [
        f"step {n + 1}: {n % 3 + 1} token{'s' if n % 3 else ''}" for n in range(31, 95)
    ]
    fire(page, told(RUN[:400], 330))
    assert columns(page)[0].startswith("step 337:") and len(columns(page)) == 64
    fire(page, told(RUN[:405], 403))
    assert [title[:9] for title in columns(page)] == ["step 404:", "step 405:"], "not over a gap"
    fire(page, told(RUN[:3], prompt=0.05))
    assert len(columns(page)) == 3, "another run begins anew"

    # Names of draft models are text, and have a row each.
    small, evil = "draft:small", f"draft:{EVIL}"
    said = (Token(1, 0, small), Token(2, 1, evil), Token(3, 2, TARGET))
    one = Step(0, said, {small: 3, evil: 2}, {small: 1, evil: 1}, look_ups={small: 0.004})
    step = replace(one, levels={small: (5, 0, 0), evil: (2, 8, 6)}, verify_seconds=0.01)
    fire(page, told(RUN[:2]), told([step]))
    assert cells(page)[5:] == [
        f"Draft {EVIL} | 33 % | 1 / 2 50 % | –",
        "Draft small | 33 % | 1 / 3 33 % | 4.0 ms",
    ]
    assert cells(page, "levels") == [
        f"Draft {EVIL} | 2 | 6 / 8 75 %",
        "Draft small | 5 | drafts alone",
    ]
    assert page.locator("#figures img, #figures script").count() == 0
    page.locator("#figures tr").evaluate_all(mark)
    fire(page, told([step, replace(step, index=1)], 1))
    assert page.locator("#figures tr").evaluate_all("all => all.every(row => row.mine)")
    colours = page.locator("#figures .shares i:nth-child(n + 6)").evaluate_all(
        "all => all.map(node => getComputedStyle(node).backgroundColor)"
    )
    assert len(set(colours)) == 2 and len(columns(page)) == 2
    fire(page, told(RUN[:2]))
    assert len(cells(page)) == 5 and cells(page, "levels") == []
    expect(levels).to_be_hidden()

    # Many updates at once are laid out once: none of them reads a size or a place.
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def laid_out() -> int:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return int(next(m["value"] for m in metrics if m["name"] == "LayoutCount"))

    page.wait_for_timeout(500)
    before = laid_out()
    fire(page, *(told(RUN[: n + 10], n) for n in range(0, 400, 10)))
    page.wait_for_timeout(200)
    assert 1 <= laid_out() - before <= 4
    count = "document.querySelectorAll('#figures *').length"
    nodes = page.evaluate(count)
    fire(page, *(told(RUN[: n + 10], n) for n in range(400, 800, 10)))
    assert page.evaluate(count) == nodes, "a long answer needs no more nodes"


@pytest.mark.soak
def test_the_time_to_the_first_token_is_that_of_the_screen(page: Page) -> None:
    """Its event may come before or after the run's first figures; other runs have their model's."""
    seen = {"name": "strata:first"}
    fire(page, told(RUN[:5], prompt=0.1))
    fire(page, told(RUN[:1]))
    # A minute since the click: the run was begun since then, however slow this machine is.
    fire(page, {"seconds": 60.06}, **seen)
    assert figure(page, "First token") == "60.06 s | on screen; in the model 44 ms"
    fire(page, told(RUN[:9], 1))
    assert figure(page, "First token") == "60.06 s | on screen; in the model 44 ms"
    page.wait_for_timeout(350)
    fire(page, {"seconds": 0.3}, **seen)
    assert figure(page, "First token").startswith("60.06 s"), "it was another answer's"
    fire(page, told(RUN[:1], prompt=1.2))
    assert figure(page, "First token") == "300 ms | on screen; in the model 1.21 s"
    fire(page, told(RUN[:5], prompt=0.1))
    assert figure(page, "First token") == "114 ms | in the model"
