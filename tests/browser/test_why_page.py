"""Why an answer was fast: the explanation of a token, the replay, the race, the
badge. Texts of tokens run nothing, wherever they are shown."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from engine.recorded import NODE
from engine.types import CONTEXT, STATISTICS, TARGET, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Traces
from tests.support.pages import (
    DESKTOP,
    PHONE,
    entry,
    finished,
    fits,
    fixed_budget,
    open_tab,
    send,
    set_number,
    settled,
    until,
    visit,
)

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


@pytest.fixture
def answered(data: Path, owner: str) -> None:
    with Database(data / "strata.db") as database:
        store, traces = Conversations(database, owner), Traces(database, owner)
        talk, run = store.create("Boats").id, seeded()
        run_id = traces.save(run, talk)
        store.append(talk, "user", "What of the boat?")
        store.append(talk, "assistant", "".join(t.text for t in run.tokens), run_id)
        found = {"kind": "differs", "at": 3, "plain": EVIL, "said": " on", "gap": 0.0012}
        traces.prove(run_id, found)


@pytest.fixture
def talk(answered: None, page: Page) -> Page:
    entry(page, "Boats").locator(".open").click()
    expect(page.locator("#tokens .turn.answered")).to_contain_text("sank.")
    return page


def stand_on(page: Page, number: int) -> Locator:
    """Go to a token of the last answer with the keyboard; what is then told of it."""
    box = page.locator("#tokens .turn.answered").last
    box.focus()
    page.keyboard.press("Home")
    for _ in range(number):
        page.keyboard.press("ArrowRight")
    return page.locator("#tokens .why")


def copied(page: Page) -> str:
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
    expect(why).to_contain_text("Nothing was guessed here.")
    answer = talk.locator(".message").last
    expect(answer.locator(".note")).to_have_text(
        "2 of 79 tokens were guessed, which saved about 0.3 s."
    )
    expect(answer.locator(".badge")).to_have_text("differs at token 3")
    title = answer.locator(".badge").get_attribute("title") or ""
    assert EVIL in title and "0.0012 apart" in title
    assert talk.locator("#tokens img").count() == 0


def edges(place: Locator) -> tuple[float, float, float, float]:
    box = place.bounding_box()
    assert box is not None
    return box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]


def is_at_its_word(page: Page, word: Locator) -> None:
    """The box is right below or above the word, over the messages alone."""
    left, top, right, bottom = edges(page.locator("#tokens .word-box"))
    lines = word.evaluate(
        "(node) => [...node.getClientRects()].map((r) => [r.left, r.top, r.right, r.bottom])"
    )
    assert any(
        (0 <= top - line[3] < 12 or 0 <= line[1] - bottom < 12)
        and left < line[2]
        and right > line[0]
        for line in lines
    )
    frame = edges(page.locator("#tokens .turns"))
    assert left >= frame[0] and top >= frame[1] and right <= frame[2] and bottom <= frame[3]


@pytest.mark.soak
def test_the_box_is_at_its_word_and_covers_no_legend(talk: Page) -> None:
    """Wherever the word is among the messages."""
    word = talk.locator("#tokens .tok", has_text="sank").last
    for height in (900, 500):
        talk.set_viewport_size({"width": 1440, "height": height})
        for at in ("start", "center", "end"):
            word.evaluate(f"(node) => node.scrollIntoView({{ block: '{at}' }})")
            word.hover()
            expect(talk.locator("#tokens .why")).to_contain_text("Nothing was guessed here.")
            is_at_its_word(talk, word)
            talk.mouse.move(0, 0)
            expect(talk.locator("#tokens .word-box")).to_be_hidden()


@pytest.mark.soak
def test_a_word_answers_to_a_tap(
    answered: None, another: Callable[..., BrowserContext], address: str
) -> None:
    page = another(viewport=PHONE, has_touch=True, is_mobile=True).new_page()
    visit(page, address)
    expect(page.locator("#tokens .inspector")).to_have_text("Tap a word to see where it came from.")
    page.locator("#conversations .title", has_text="Boats").first.evaluate("(n) => n.click()")
    word, box = (
        page.locator("#tokens .tok", has_text="sank").last,
        page.locator("#tokens .word-box"),
    )
    for mode in ("simple", "full"):
        page.evaluate("(mode) => { document.documentElement.dataset.mode = mode; }", mode)
        word.tap()
        expect(box).to_contain_text("The model itself: its own choice, not guessed (the target)")
        expect(box).to_contain_text("Nothing was guessed here.")
        is_at_its_word(page, word)
        word.tap()
        expect(box).to_be_hidden()
        word.tap()
        expect(box).to_be_visible()
        page.locator("#box textarea").tap()
        expect(box).to_be_hidden()
        word.tap()
        expect(box).to_be_visible()
        replay = page.locator("#tokens [data-act=replay]").last
        replay.focus()
        assert box.is_visible(), "nothing moves before the click"
        replay.tap()
        expect(page.locator(".replay-view")).to_be_visible()
        expect(box).to_be_hidden()
        page.keyboard.press("Escape")
        expect(page.locator(".replay-view")).to_be_hidden()


def long_copy(page: Page) -> Locator:
    """A word of the last answer that was copied from another conversation, after a long match."""
    spans = page.locator("#tokens .message:last-of-type .tok.k-model")
    at = spans.evaluate_all("all => all.findLastIndex(({ run, first }) => run.matches[first] >= 8)")
    assert at >= 0
    return spans.nth(at)


def test_a_long_copy_links_to_the_conversation_that_it_came_from(page: Page) -> None:
    set_number(page, "Max tokens", 60)
    fixed_budget(page)
    send(page, "Tell me of the sea and of the boats.")
    finished(page)
    page.click("#new")
    expect(page.locator("#tokens .turn")).to_have_count(0)
    send(page, "Tell me of the sea and of the boats.")
    finished(page)
    box, current = page.locator("#tokens .word-box"), page.locator("#conversations .entry.current")
    expect(page.locator("#conversations .entry")).to_have_count(2)
    newest = current.locator(".open").get_attribute("data-id")
    long_copy(page).hover()
    link = box.get_by_role("button")
    expect(box).to_contain_text("Copied from the conversation")
    link.hover()
    expect(link).to_be_visible()
    link.click()
    expect(current.locator(".open")).not_to_have_attribute("data-id", newest or "")
    expect(box).to_be_hidden()
    entry(page, "Tell me").locator(".open").click()
    expect(current.locator(".open")).to_have_attribute("data-id", newest or "")
    # With the keyboard, Enter follows the link of the token at which one stands.
    expect(stand_on(page, 30)).to_contain_text("Copied from the conversation")
    page.keyboard.press("Enter")
    expect(current.locator(".open")).not_to_have_attribute("data-id", newest or "")


@pytest.mark.soak
def test_an_answer_is_replayed_step_by_step_also_on_a_phone(talk: Page) -> None:
    answer = talk.locator(".message").last
    answer.hover()
    answer.locator("[data-act=replay]").click()
    view = talk.locator("#replay .replay-view")
    expect(view).to_be_focused()
    for screen in (PHONE, DESKTOP):
        talk.set_viewport_size(screen)
        expect(view).to_be_in_viewport(ratio=1)
        assert fits(talk)
    expect(talk.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
    expect(view.locator(".number")).to_have_text(f"Step 1 of {PAGES + 7}")
    expect(view.locator(".summary")).to_contain_text("Nothing was guessed: a plain step")
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
    expect(view.locator(".summary")).to_contain_text(
        "Guessed 5, accepted 2, rejected 2, not checked 1 · the model wrote 3 tokens"
    )
    expect(view.get_by_role("img")).to_have_attribute(
        "aria-label", f"Guesses. Accepted: “boat” “{EVIL.strip()}”. "
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
    assert view.locator("img").count() == 0
    talk.keyboard.press("Escape")
    expect(view).to_be_hidden()
    expect(answer.locator("[data-act=replay]")).to_be_focused()


@pytest.mark.soak
def test_a_race_is_recorded_and_can_be_stopped_and_run_again(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    race = page.locator("#race .race")
    expect(race.get_by_role("button", name="Race at the pace of a real model")).to_be_visible()
    expect(race.locator(".about")).to_contain_text("padded to the cost of 0.5\u00a0B parameters")
    race.get_by_role("button", name="Watch a race").click()
    race.get_by_role("button", name="Stop").click()
    expect(race.locator(".line")).to_have_text("Stopped.")
    page.reload()
    settled(page)
    race.get_by_role("button", name="Watch a race").click()
    over = race.get_by_role("button", name=re.compile("Watch another race|Race anyway"))
    expect(over).to_be_visible()
    if over.text_content() == "Race anyway":
        # Whether there is a gain to show depends on the machine. Without one nothing is played.
        expect(race.locator(".line")).to_contain_text(
            re.compile("no gain to show|guessing is not expected to gain anything")
        )
        expect(race.locator(".lanes")).to_be_hidden()
        over.click()
        expect(over).to_be_visible()
        return
    expect(race.locator(".outcome")).to_contain_text("Recorded just now on this machine")
    expect(race.locator(".outcome")).to_contain_text("Both say the same, all")
    for seen in ("article >> nth=0", "article >> nth=1", ".outcome"):
        expect(race.locator(seen)).to_be_in_viewport(ratio=1)
    plain, fast = (race.locator(".text").nth(lane).text_content() for lane in (0, 1))
    assert plain and plain == fast
    clocks = race.locator("h3 output")
    for lane in (0, 1):
        told = (clocks.nth(lane).text_content() or "").removesuffix(" s")
        expect(race.locator(".outcome")).to_contain_text(told)


@pytest.mark.soak
def test_an_answer_is_proved_in_the_background(page: Page) -> None:
    """The badge comes by itself, and is there after a reload."""
    set_number(page, "Max tokens", 24)
    open_tab(page, "Settings")
    page.get_by_label("Check every answer in the background").check()
    open_tab(page, "Chat")
    send(page, "Tell me of the sea.")
    badge = page.locator(".message .badge").last
    expect(badge).to_contain_text("proved: same text")
    page.reload()
    settled(page)
    expect(badge).to_contain_text("proved: same text")
