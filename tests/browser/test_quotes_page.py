"""The quotes of an answer, below it, lead to the passages that they repeat."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from app.service.attachments import Attachment, join
from storage.conversations import Conversations
from storage.database import Database
from tests.support.pages import entry

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=fired()>"


def test_a_quote_leads_to_its_passage_in_a_file(data: Path, owner: str, page: Page) -> None:
    notes = "A line of the file.\n" * 60 + f"The boat {EVIL} sank.\n" + "A line after it.\n" * 60
    with Database(data / "strata.db") as database:
        store = Conversations(database, owner)
        talk = store.create("What the notes say").id
        store.append(talk, "user", join([Attachment("notes.md", notes)], "What sank?"))
        answer = (
            "Much was said. " * 400
            + f"“The boat {EVIL} sank.” Nobody says that “the boat was made of gold”."
        )
        store.append(talk, "assistant", answer)
    page.reload()
    entry(page, "What the notes say").click()
    quotes = page.locator("#tokens .quotes")
    expect(quotes.locator("summary")).to_have_text(
        "Quotes: 1 of 2 found word for word in what the model has read"
    )
    expect(quotes.locator("li").first).to_be_hidden()
    quotes.locator("summary").click()
    expect(quotes.locator("li")).to_have_text(
        [f"The boat {EVIL} sank.notes.md, line 61", "the boat was made of goldnot found"]
    )
    quotes.get_by_role("button", name="notes.md, line 61").click()
    text = page.locator("#tokens .attached pre")
    expect(text).to_be_visible()
    assert page.evaluate("String(getSelection())") == f"The boat {EVIL} sank."
    top, bottom = page.evaluate(
        "(({ top, bottom }) => [top, bottom])(getSelection().getRangeAt(0).getBoundingClientRect())"
    )
    for box in (text.bounding_box(), page.locator("#tokens .turns").bounding_box()):
        assert box and box["y"] < top < bottom < box["y"] + box["height"]
    assert page.locator("#tokens img").count() == 0
