"""Why an answer was fast, as people see it: the explanation of a token, the replay, the race, the
badge. Texts of tokens run nothing, wherever they are shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from engine.recorded import NODE
from engine.types import CONTEXT, STATISTICS, TARGET, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.support.pages import OWNER, end, open_tab, settled, start, until

pytestmark = pytest.mark.browser
EVIL = " <img src=x onerror=fired()>"
TEXTS = {1: " The", 2: " boat", 3: EVIL, 4: " sank", 5: ".", 7: "!", 8: " on"}
PAGES = 70
"""Steps behind those that matter: more than one page of the replay."""


def node(token: int, parent: int, source: int, match: int, percent: int = 0) -> bytes:
    return NODE.pack(token, 0, parent, source << 4 | match, percent)


def seeded() -> Run:
    """An answer that copies from itself: " The boat" once more, behind which a guess was wrong."""

    def said(at: int, id: int, source: str = TARGET, match: int = 0) -> Token:
        return Token(id, 10 + at, source, match, TEXTS[id], 0.5)

    steps = [
        Step(at, (said(at, id),), verify_seconds=0.01, plain_seconds=0.01, tree=b"")
        for at, id in enumerate((1, 2, 3, 4, 5, 1))
    ]
    tree = (
        node(2, 0, 0, 1, 80) + node(3, 1, 0, 2, 70) + node(4, 0, 1, 1, 12) + node(5, 3, 0, 2)
        + node(3, 2, 1, 1, 2)
    )  # fmt: skip
    tokens = said(6, 2, CONTEXT, 1), said(7, 3, CONTEXT, 2), said(8, 7)
    proposed = {CONTEXT: 3, STATISTICS: 2}
    steps.append(
        Step(
            6, tokens, proposed, {CONTEXT: 2}, ((2, 1), (2, 1), (1, 0)), 0.001, 0.012,
            plain_seconds=0.35, tree=tree,
        )
    )  # fmt: skip
    steps += [
        Step(7 + at, (said(9 + at, 8),), verify_seconds=0.01, plain_seconds=0.01, tree=b"")
        for at in range(PAGES)
    ]
    return Run("hd", EVIL, "another", {}, Prefill(10, 0, 0.01, 0.01), tuple(steps))


@pytest.fixture(scope="module")
def address(data: Path) -> Iterator[str]:
    """The program with one conversation whose answer is the one above."""
    with Database(data / "strata.db") as database:
        store, traces = Conversations(database, OWNER), Traces(database, OWNER)
        talk, run = store.create("Boats").id, seeded()
        run_id = traces.save(run, talk)
        store.append(talk, "user", "What of the boat?")
        store.append(talk, "assistant", "".join(t.text for t in run.tokens), run_id)
        found = {"kind": "differs", "at": 3, "plain": EVIL, "said": " on", "gap": 0.0012}
        traces.prove(run_id, found)
    process, url, _ = start(data)
    yield url
    end(process)


@pytest.fixture
def talk(page: Page) -> Page:
    """A page that shows the conversation."""
    page.evaluate("() => { window.fired = () => { window.hurt = true; }; }")
    page.locator("#conversations .title", has_text="Boats").first.click()
    expect(page.locator("#tokens .turn.answered")).to_contain_text("sank.")
    return page


def stand_on(page: Page, number: int) -> Locator:
    """Go to a token of the last answer with the keyboard; what is then told of it."""
    box = page.locator("#tokens .turn.answered").last
    box.focus()
    page.keyboard.press("Home")
    for _ in range(number):
        page.keyboard.press("ArrowRight")
    return page.locator("#tokens .inspector .why")


def copied(page: Page) -> str:
    """The text that is highlighted as the place of origin."""
    return str(
        page.evaluate(
            "[...(CSS.highlights.get('copied-from') || [])].map((range) => range.toString())"
            ".join('')"
        )
    )


def test_a_token_tells_where_it_was_copied_from_and_what_was_rejected(talk: Page) -> None:
    why = stand_on(talk, 6)
    expect(why.locator("mark")).to_have_text(" The boat")
    expect(why).to_contain_text("Copied from this answer")
    expect(why).to_contain_text("Rejected guess: sank (General text, the model gave it 12 %)")
    expect(why).to_contain_text("1 more guess of this step followed a wrong one")
    assert copied(talk).strip() == "The boat"
    why = stand_on(talk, 7)
    expect(why.locator("mark")).to_have_text(f" The boat{EVIL}")
    why = stand_on(talk, 8)
    expect(why.locator("s")).to_have_text(EVIL)
    expect(why).to_contain_text("the model gave it 2 %")
    until(talk, lambda: copied(talk) == "")
    why = stand_on(talk, 0)
    expect(why).to_contain_text("Nobody guessed a word here.")
    answer = talk.locator(".message").last
    expect(answer.locator(".note")).to_have_text(
        "2 of 79 tokens were guessed, which saved about 0.3 s."
    )
    expect(answer.locator(".badge")).to_have_text("differs at token 3")
    title = answer.locator(".badge").get_attribute("title") or ""
    assert EVIL in title and "0.0012 apart" in title
    assert talk.evaluate("window.hurt") is None and talk.locator("#tokens img").count() == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_an_answer_is_replayed_step_by_step(talk: Page, scheme: str, width: int) -> None:
    talk.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    talk.set_viewport_size({"width": width, "height": 844})
    answer = talk.locator(".message").last
    answer.hover()
    answer.locator("[data-act=replay]").click()
    view = talk.locator("#replay .replay-view")
    expect(view).to_be_focused()
    expect(view.locator(".number")).to_have_text(f"Step 1 of {PAGES + 7}")
    expect(view.locator(".told")).to_contain_text("Nothing was guessed: a plain step")
    for _ in range(6):
        talk.keyboard.press("ArrowRight")
    expect(view.locator(".number")).to_have_text(f"Step 7 of {PAGES + 7}")
    expect(view.locator(".sofar")).to_have_text(
        f" The boat{EVIL} sank. The boat{EVIL}!", use_inner_text=False
    )
    nodes = view.locator(".node")
    kinds = [(EVIL.strip() if e else t, k) for t, k, e in (
        ("boat", "kept", 0), ("", "kept", 1), ("", "rejected", 1), ("sank", "rejected", 0),
        (".", "unseen", 0),
    )]  # fmt: skip
    shown = nodes.evaluate_all(
        "all => all.map((node) => [node.textContent, node.classList[node.classList.length - 1]])"
    )
    assert sorted(map(tuple, shown)) == sorted(kinds)
    expect(view.locator(".told")).to_contain_text(
        "Guessed 5, accepted 2, rejected 2, not looked at 1 · the model said 3 tokens"
    )
    expect(view.get_by_role("img")).to_have_attribute(
        "aria-label", f"Draft tree. Accepted: “boat” “{EVIL.strip()}”. "
        f"Rejected: “sank” “{EVIL.strip()}”.",
    )  # fmt: skip
    # The other page of steps comes when it is wanted.
    slider = view.get_by_role("slider", name="Step")
    slider.focus()
    talk.keyboard.press("End")
    expect(view.locator(".number")).to_have_text(f"Step {PAGES + 7} of {PAGES + 7}")
    expect(view.locator(".sofar")).to_contain_text(f"{EVIL}! on on")
    # It goes on while the test looks, so that the page tells where it began.
    began = view.get_by_role("button", name="Play").evaluate(
        "(play) => { play.click(); return document.querySelector('#replay .number').textContent }"
    )
    assert began == f"Step 1 of {PAGES + 7}"
    expect(view.locator(".number")).not_to_have_text(began)
    view.get_by_role("button", name="Pause").click()
    expect(view.get_by_role("button", name="Play")).to_be_visible()
    assert talk.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert talk.evaluate("window.hurt") is None and view.locator("img").count() == 0


def test_a_race_is_recorded_and_can_be_stopped_and_run_again(page: Page) -> None:
    page.locator("#new").click()
    race = page.locator("#race .race")
    race.get_by_role("button", name="Watch a race").click()
    race.get_by_role("button", name="Stop").click()
    expect(race.locator(".line")).to_have_text("Stopped.")
    page.reload()
    settled(page)
    page.locator("#new").click()
    race.get_by_role("button", name="Watch a race").click()
    expect(race.locator(".told")).to_contain_text("Recorded just now on this machine: plain")
    expect(race.locator(".told")).to_contain_text("Both say the same, all")
    plain, fast = (race.locator(".words").nth(lane).text_content() for lane in (0, 1))
    assert plain and plain == fast
    clocks = race.locator("h3 output")
    for lane in (0, 1):
        told = (clocks.nth(lane).text_content() or "").removesuffix(" s")
        expect(race.locator(".told")).to_contain_text(told)
    expect(race.get_by_role("button", name="Watch another race")).to_be_visible()


def test_an_answer_is_proved_in_the_background(page: Page) -> None:
    """The badge comes by itself, and is there after a reload."""
    open_tab(page, "Settings")
    page.get_by_label("Check every answer in the background").check()
    page.get_by_label("Max tokens").last.fill("24")
    open_tab(page, "Chat")
    page.locator("#new").click()
    page.fill("#box textarea", "Tell me of the sea.")
    page.locator("#send").click()
    badge = page.locator(".message .badge").last
    expect(badge).to_contain_text("proved: same text")
    page.reload()
    settled(page)
    expect(page.locator(".message .badge").last).to_contain_text("proved: same text")
