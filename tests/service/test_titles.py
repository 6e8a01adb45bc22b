"""Titles: what is made of a first message, and what the model proposes."""

import pytest

from app.service.titles import LONGEST, title_of


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hi", "Hi"),
        ("  Two\n lines", "Two lines"),
        ("# Head\nand text", "Head"),
        ("Tell me a story. It should be long, and it should rhyme.", "Tell me a story"),
        ("What is 3.5 times 2? Explain.", "What is 3.5 times 2?"),
        ("# A heading\n\ntext", "A heading"),
        ("- **bold** `code` item", "bold code item"),
        ("> quoted\nmore", "quoted more"),
        ("1. First things first", "First things first"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("---\n***\nUnder the line", "Under the line"),
        ("e.g. this one", "e.g. this one"),
        ("", ""),
        (" \n ", ""),
        ("!!!", ""),
        ("数字の話をして。", "数字の話をして。"),
    ],
)
def test_a_title_is_how_the_first_message_begins(text: str, title: str) -> None:
    assert title_of(text) == title


def test_a_long_title_is_cut_behind_a_word() -> None:
    words = "a rather long first message that goes on and on without any end of a sentence"
    title = title_of(words)
    assert len(title) <= LONGEST and title.endswith("…")
    assert words.startswith(title[:-1]) and words[len(title) - 1] == " "
    assert title_of("x" * 500) == "x" * (LONGEST - 1) + "…"
