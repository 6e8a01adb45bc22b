"""What an answer, an import or a title holds runs nothing, fetches nothing and holds up no page:
what takes too long to format is shown as it is written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from engine.types import TARGET
from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.imports import FORMAT, VERSION
from tests.support.hostile import DEFINED, FORMULAS, PAYLOADS, heavy, references
from tests.support.message_view import READY, draw, message_view
from tests.support.pages import entry, pictures, server, set_number, show, visit

pytestmark = pytest.mark.browser
ALL = "All of them"
HEAVY = heavy()
KINDS = ("maths", "blocks", "inline", "code")
MOST_SECONDS = 2.0
SHOW = """(text) => {
  const sources = ["context", "target", "model", "target", "target"];
  const groups = (text.match(/[^]{1,3}/g) || []).map((part, at) => [at % 5, 0, 1, [part], [50]]);
  const turn = { key: "answer", role: "assistant", groups };
  window.coming = { kept: 0, after: "", turns: [turn], sources, names: {} };
}"""
DRAWN = """new Promise((done) => {
  props.value = window.coming;
  view.draw();
  const wait = () => (view.later() ? setTimeout(wait)
    : requestAnimationFrame(() => requestAnimationFrame(done)));
  wait();
})"""
EMPTY = "() => { props.value = { turns: [] }; view.draw(); }"
ATTEMPTS = """() => {
  const run = view.newRun();
  const turn = view.begin("growing", "assistant", run);
  const markdown = window.markdownit.prototype;
  let parsed = 0;
  const parse = markdown.parse;
  markdown.parse = function counted(...args) { parsed += 1; return parse.apply(this, args); };
  const step = () => {
    const part = "- ".repeat(100) + "x\\n";
    view.take(run, [[0, 0, 1, [part], [50]]], run.texts.length, ["context"]);
    view.show(turn);
  };
  view.grows(turn, true);
  for (let frame = 0; frame < 5; frame += 1) step();
  const growing = parsed;
  view.grows(turn, false);
  view.show(turn);
  return new Promise((done) => {
    const wait = () => (view.later() ? setTimeout(wait) : done([growing, parsed - growing]));
    wait();
  }).finally(() => { markdown.parse = parse; });
}"""


@pytest.fixture(scope="module")
def view(browser: Browser) -> Iterator[Page]:
    with message_view(browser) as opened:
        yield opened


@pytest.fixture
def canary() -> Iterator[str]:
    """The address of a server that must not be asked for anything."""
    with server() as (port, heard):
        yield f"http://127.0.0.1:{port}"
    assert heard == []


# the page


def split(text: str) -> list[Piece]:
    parts = [text[at : at + 3] for at in range(0, len(text), 3)]
    return [Piece(part, TARGET, 0, at, at, 0.5) for at, part in enumerate(parts)]


def inert(page: Page) -> None:
    """No answer has brought anything but text, and links that somebody has to follow."""
    pictures(page)
    risky = ":is(script, iframe, object, embed, img, style, link, form, [onerror], [onload])"
    assert page.locator(f"#tokens .turn {risky}").count() == 0
    links = page.locator("#tokens .turn a").evaluate_all("all => all.map((link) => link.href)")
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in links)


def test_titles_imports_and_answers_run_and_fetch_nothing(
    context: BrowserContext, address: str, data: Path, owner: str, canary: str, tmp_path: Path
) -> None:
    hostile = [*PAYLOADS, *references(canary)]
    with Database(data / "strata.db") as database:
        store = Conversations(database, owner)
        for text in PAYLOADS:
            store.create(text)
        everything = store.create(ALL).id
        for text in hostile:
            store.append(everything, "user", text)
            store.append(everything, "assistant", text, pieces=split(text))
    page = context.new_page()
    visit(page, address)
    listed = page.locator("#conversations .title")
    expect(listed).to_have_count(len(PAYLOADS) + 1)
    assert page.locator("#conversations :is(img, svg, script, iframe)").count() == 0
    listed.filter(has_text=ALL).click()
    turns, answers = page.locator("#tokens .turn"), page.locator("#tokens .turn.answered")
    expect(turns).to_have_count(2 * len(hostile))
    assert page.locator("#tokens .turn.said").all_text_contents()[: len(PAYLOADS)] == [*PAYLOADS]
    expect(answers.locator(".formatted")).to_have_count(len(hostile))
    inert(page)
    show(page, "Tokens")
    expect(answers.locator(".formatted")).to_have_count(0)
    assert answers.all_text_contents()[: len(PAYLOADS)] == [*PAYLOADS]
    assert page.locator("#tokens .turn :is(img, svg, script, iframe, style, a)").count() == 0
    show(page, "Formatted")

    said: list[dict[str, object]] = [
        {"role": role, "content": text} for text in hostile for role in ("user", "assistant")
    ]
    for number, message in enumerate(said[1:]):
        message["parent"] = number
    file = tmp_path / "import.json"
    talk = {"format": FORMAT, "version": VERSION, "title": PAYLOADS[13], "messages": said}
    file.write_text(json.dumps(talk))
    page.click("#new")
    expect(turns).to_have_count(0)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(str(file))
    expect(turns).to_have_count(len(said))
    expect(answers.locator(".formatted")).to_have_count(len(hostile))
    inert(page)
    page.click("#new")
    expect(turns).to_have_count(0)
    set_number(page, "Max tokens", 15)
    page.fill("#box textarea", "\n\n".join(references(canary)[:8]))
    page.click("#send")
    expect(page.locator("#tokens .turn.answered .tok").first).to_be_attached()
    expect(page.locator("#send")).to_be_visible()
    inert(page)
    page.wait_for_timeout(500)  # Time for what must not happen.
    assert page.url == address and len(page.frames) == 1, "the page went elsewhere"


@pytest.mark.soak
def test_a_conversation_of_heavy_messages_can_be_opened_again(
    context: BrowserContext, address: str, data: Path, owner: str
) -> None:
    with Database(data / "strata.db") as database:
        store = Conversations(database, owner)
        talk = store.create("Heavy").id
        for text in [text for name, text in HEAVY.items() if "400 deep" in name][:12]:
            store.append(talk, "user", "Draw this.")
            store.append(talk, "assistant", text)
    page = context.new_page()
    for _ in range(2):
        visit(page, address)
        entry(page, "Heavy").locator(".open").click()
        expect(page.locator("#tokens .turn.answered .formatted")).to_have_count(12)
        pictures(page)


# the view of messages alone


def drawn(view: Page, text: str) -> None:
    view.evaluate(EMPTY)
    view.evaluate(SHOW, text)
    view.evaluate(DRAWN)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_message_takes_the_page_longer_than_its_limit(view: Page, kind: str) -> None:
    """Measured is what the page's own thread computed, whatever else the machine does: parsing,
    building, styles, layout and painting."""
    session = view.context.new_cdp_session(view)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    for name, text in HEAVY.items():
        if name.startswith(kind):
            view.evaluate(EMPTY)
            view.evaluate(SHOW, text)
            before = busy()
            view.evaluate(DRAWN)
            assert busy() - before < MOST_SECONDS, name
            assert view.evaluate("view.drawn()[0].box.raw()") == text, name
    session.detach()
    drawn(view, "An **ordinary** $x^2$")
    expect(view.locator(".formatted strong")).to_have_text("ordinary")
    expect(view.locator(".formatted .katex")).to_have_count(1)


def test_a_formula_that_is_nested_too_deeply_or_too_large_shows_its_source(view: Page) -> None:
    """A formula as deep as people write them is drawn, where KaTeX takes it at all."""
    for name, (before, after) in FORMULAS.items():
        deep, fine = (f"{before * depth}x{after * depth}" for depth in (60, 8))
        drawn(view, f"$$\n{deep}\n$$\n\n$$\n{fine}\n$$")
        source = view.locator(".maths code").first
        assert (source.text_content() or "").strip() == deep, name
        why = source.locator("..").get_attribute("title") or ""
        if view.locator(".maths .katex").count():
            assert why == "This formula cannot be drawn: it is nested more than 50 deep", name
        else:
            assert "KaTeX parse error" in why, f"{name}: no nesting of this kind is a formula"
    for name, tex in DEFINED.items():
        drawn(view, f"$$\n{tex}\n$$")
        assert view.locator(".maths code, .maths .katex").count() == 1, name


def test_a_message_that_is_not_formatted_keeps_its_colours_and_says_so(view: Page) -> None:
    text = "- " * 100 + "deep"
    drawn(view, text)
    expect(view.locator(".as-written")).to_contain_text("Shown as it is written")
    expect(view.locator(".unformatted")).to_have_text(text)
    kinds = view.locator(".unformatted .tok").evaluate_all("all => all.map((n) => n.source)")
    assert {"context", "model", "target"} == {*kinds}


@pytest.mark.soak
def test_a_growing_message_is_tried_once_and_once_more_when_it_is_over(view: Page) -> None:
    """Each attempt may take the limit, so there must not be one for each frame."""
    draw(view)
    view.wait_for_function(READY)
    assert view.evaluate(ATTEMPTS) == [1, 1]
