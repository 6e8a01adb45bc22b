"""A conversation as a Markdown document."""

import pytest

from app.service.markdown_export import closed, markdown
from storage.conversations import Conversations
from storage.database import Database


def test_who_said_what(db: Database) -> None:
    store = Conversations(db, "local")
    made = store.create("Two\nlines")
    store.set_system_prompt(made.id, "Be brief.")
    for role, text in (("user", "  Hi *there*\n"), ("assistant", "# Hello\n\n- one")):
        store.append(made.id, role, text)
    assert markdown(store.get(made.id), store.messages(made.id)) == (
        "# Two lines\n\n## Instructions\n\nBe brief.\n\n## You\n\nHi *there*\n\n"
        "## Answer\n\n# Hello\n\n- one\n"
    )


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("plain", ""),
        ("```py\nx", "\n```"),
        ("```py\nx\n```", ""),
        ("````\n```\nx", "\n````"),
        ("~~~\n```", "\n~~~"),
        ("```\nx\n``` no end", "\n```"),
        ("``` `in line` ```", ""),
        ("    ```\nindented", ""),
        ("```\na\n```\n```", "\n```"),
    ],
)
def test_a_block_of_code_that_was_cut_off_ends_with_its_message(text: str, added: str) -> None:
    assert closed(text) == text + added
