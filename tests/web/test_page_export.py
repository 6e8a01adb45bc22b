"""A conversation as a page of its own: coloured, complete, and inert."""

from collections import Counter
from html.parser import HTMLParser

from app.web import page_export
from app.web.colors import INKS
from engine.types import CONTEXT, TARGET
from storage.conversations import Conversations, Piece
from storage.database import Database
from tests.support.hostile import PAYLOADS


class Reader(HTMLParser):
    """What a browser would find: tags with their attributes, and the text of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.blocks: list[str] = []
        self.open: list[str] = []
        self.sources: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
        if tag == "div":
            self.blocks.append("")
        if tag == "span":
            self.sources.append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "div" in self.open:
            self.blocks[-1] += data
        if self.open[-1:] == ["span"]:
            self.sources[-1] = (self.sources[-1][0], self.sources[-1][1] + data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_every_word_is_there_and_those_that_were_guessed_have_their_colour(db: Database) -> None:
    store = Conversations(db, "local")
    id = store.create("A title").id
    pieces = [Piece("One ", TARGET, 0, 0, 0, 0.5), Piece("<two>", CONTEXT, 3, 1, 1, 0.5)]
    store.append(id, "user", "Count & stop")
    store.append(id, "assistant", "One <two>", None, pieces)
    page = page_export.page(store.get(id), store.messages(id))
    found = read(page)
    assert found.blocks == ["Count & stop", "One <two>"]
    assert found.sources == [("s0", "This chat"), ("", "The model itself"), ("s0", "<two>")]
    assert f"span.s0{{--k:{INKS[CONTEXT].colour};" in page and page.count("50%") == 2


def test_without_guesses_there_is_no_legend(db: Database) -> None:
    store = Conversations(db, "local")
    id = store.create("Empty").id
    found = read(page_export.page(store.get(id), ()))
    assert found.blocks == [] and found.tags["ul"] == 0


def test_what_was_said_stays_text(db: Database) -> None:
    store = Conversations(db, "local")
    for hostile in PAYLOADS:
        id = store.create(f"T{hostile}").id
        store.set_system_prompt(id, f"S{hostile}")
        store.append(id, "user", hostile)
        store.append(
            id, "assistant", hostile, None, [Piece(hostile, f"draft:{hostile}", 0, 0, 0, 0.0)]
        )
        page = page_export.page(store.get(id), store.messages(id))
        found = read(page)
        kept = store.messages(id)[0].content
        assert kept in found.blocks[1] and kept in found.blocks[2]
        known = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span"}
        assert set(found.tags) <= known | {"ul", "li"}
        assert found.tags["style"] == 1 and "default-src 'none'" in page
        known = {"lang", "charset", "http-equiv", "content", "name", "class"}
        assert found.attributes <= known
