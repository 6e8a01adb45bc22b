"""The chat's view of messages alone: its scripts, its styles and its libraries in a page without a
program. What a test draws is data, as the program would send it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Route

from app.web import layout, render, routes, token_view
from engine.thinking import thought_in
from storage.conversations import Piece, text_of
from tests.support.pages import PATIENCE

HOST = "http://view.test"
PAGE = (
    "<!doctype html><html><head><style>{style}</style></head><body><div id='tokens' "
    "class='transcript'>{template}</div></body></html>"
)
OPEN = """([script, names, vendor]) => {
  const element = document.getElementById("tokens");
  window.props = { value: { turns: [] }, names, vendor };
  window.asked = [];
  const inside = "return { drawn: () => drawn, draw, take, newRun, begin, grows, show, redraw, "
    + "library, tell, thoughtOf, answerOf, blocksOf, later: () => later.size };";
  window.view = new Function("element", "props", "trigger", "watch", script + inside)(
    element, props, (name, data) => asked.push([name, data]), () => {});
  for (const name of ["markdown", "highlight", "katex"]) view.library(name);
}"""
READY = "() => window.markdownit && window.hljs && window.katex && view.later() === 0"


@contextmanager
def message_view(browser: Browser) -> Iterator[Page]:
    """A page with the view in it, and all of its libraries. It must raise no error."""
    problems: list[str] = []

    def serve(route: Route) -> None:
        path = route.request.url.removeprefix(HOST)
        file = routes.library_files().get(path.removeprefix(f"{routes.library_prefix()}/"))
        if path == "/":
            style, template = layout.css(), token_view.CHAT_TEMPLATE
            body = PAGE.format(style=style, template=template)
            route.fulfill(body=body, content_type="text/html; charset=utf-8")
        elif file is not None:
            route.fulfill(path=file)
        else:
            problems.append(route.request.url)
            route.abort()

    page = browser.new_page(viewport={"width": 900, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.add_init_script("window.ran = 0; window.fired = () => { window.ran += 1; };")
    page.route("**/*", serve)
    page.goto(HOST)
    page.evaluate(OPEN, [token_view.script(chat=True), render.names(), routes.library_prefix()])
    page.wait_for_function(READY)
    yield page
    assert page.evaluate("window.ran") == 0, "a script ran"
    page.close()
    assert problems == []


def cut(text: str, lengths: Sequence[int], sources: Sequence[str]) -> list[Piece]:
    found: list[Piece] = []
    at = 0
    while at < len(text):
        number = len(found)
        length = lengths[number % len(lengths)]
        source = sources[number % len(sources)]
        found.append(Piece(text[at : at + length], source, 1, number, number, 0.5))
        at += length
    return found


def grouped(pieces: Sequence[Piece]) -> tuple[list[Any], list[str]]:
    sources: dict[str, int] = {}
    return render.groups(pieces, sources), [*sources]


def draw(page: Page, pieces: Sequence[Piece] = (), begun: bool = False, **about: Any) -> None:
    """Show one answer, and wait until it is formatted. With `begun` it begins inside thinking."""
    groups, sources = grouped(pieces)
    text = text_of(pieces)
    thought = render.thought_data(text, thought_in(text, begun=begun))
    turn = {"key": "answer", "role": "assistant", "groups": groups, **thought, **about}
    value = {"kept": 0, "after": "", "turns": [turn], "sources": sources, "names": {}}
    page.evaluate("(value) => { props.value = { turns: [] }; view.draw(); }", None)
    page.evaluate("(value) => { props.value = value; view.draw(); }", value)
    page.wait_for_function(READY)


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{3,}", text)
