"""Quotes of an answer are looked up word for word in what its model has read."""

import time
from collections.abc import Callable

import pytest

from app.service.quotes import MOST, Quote, Source, Words, checked

NOTES = Source(
    "message",
    0,
    "notes.md",
    "The quick brown fox — it’s fast —\njumps over the lazy dog. “Never again,” she said,\n"
    'and left the house at dawn.\nHe said: *I will be back tomorrow*.\nprint("hello world again")\n'
    "彼は静かな森の中を歩いていた。\n",
)


def read(*sources: Source) -> Callable[[], list[Words]]:
    return lambda: [Words(source) for source in sources]


def passage(quote: Quote) -> str:
    assert quote.source is not None
    return quote.source.text[quote.start : quote.end]


@pytest.mark.parametrize(
    ("answer", "found", "line"),
    [
        ("It “jumps over the lazy dog”.", "jumps over the lazy dog", 2),
        ('It "jumps over the lazy dog", he wrote.', "jumps over the lazy dog", 2),
        ("Es „jumps over the lazy dog“, so er.", "jumps over the lazy dog", 2),
        ("Il « jumps over the lazy dog » toujours.", "jumps over the lazy dog", 2),
        ("»jumps over the lazy dog«", "jumps over the lazy dog", 2),
        ("彼は「静かな森の中を歩いて」", "静かな森の中を歩いて", 6),
        (
            "> The quick brown fox - it's fast - jumps\n> over the lazy dog.\n> — the author",
            "The quick brown fox — it’s fast —\njumps over the lazy dog.",
            1,
        ),
        ('> "jumps over the lazy dog."', "jumps over the lazy dog.", 2),
        (
            "He knew “the quick brown fox … over the lazy dog,” of course.",
            "The quick brown fox — it’s fast —\njumps over the lazy dog",
            1,
        ),
        (
            "“quick brown fox [...] lazy dog”",
            "quick brown fox — it’s fast —\njumps over the lazy dog",
            1,
        ),
        ("“I will **be back** tomorrow”", "I will be back tomorrow", 4),
        ('With `print("hello world again")`.', 'print("hello world again")', 5),
        ('```py\nprint("hello world again")\n```', 'print("hello world again")', 5),
    ],
)
def test_what_is_found(answer: str, found: str, line: int) -> None:
    (quote,) = checked(answer, read(NOTES))
    assert (passage(quote), quote.line) == (found, line)


@pytest.mark.parametrize(
    "answer",
    [
        "It “jumps over a lazy dog”.",
        "It “leaps over the lazy dog”.",
        "“over the lazy dog … quick brown fox” turns it round.",
        "> The quick brown fox jumps over the lazy dog.",
        "“The quick brown fox — It’s fast”, with another letter.",
    ],
)
def test_what_is_not_found_is_named(answer: str) -> None:
    (quote,) = checked(answer, read(NOTES))
    assert quote.source is None and quote.text in answer.replace("> ", "")


@pytest.mark.parametrize(
    "answer",
    [
        "No quote at all.",
        "The “lazy dog” and the “fox” are names.",
        'Boards of 5" and 6" width are sold here, and of 8" as well.',
        "```py\nprint('no quote, but code')\n```\nand `another_piece(of_code)`",
        "“the mark of a quote that never ends, in a paragraph\n\nand another one",
    ],
)
def test_what_is_no_quote(answer: str) -> None:
    assert checked(answer, read(NOTES)) == []


def test_the_nearest_text_that_holds_a_quote_is_named_and_a_repeated_quote_counts_once() -> None:
    later = Source("later", 1, "copy.md", "He wrote that the fox jumps over the lazy dog.")
    answer = "“jumps over the lazy dog”, and again “jumps over the lazy dog”"
    (quote,) = checked(answer, read(later, NOTES))
    assert quote.source == later
    assert checked(answer, read()) == [], "nothing was read"
    assert checked("“jumps over a cat”", read(NOTES)) == [Quote("jumps over a cat")]


def test_no_answer_takes_long() -> None:
    """A second would be 50 times what the slowest takes; anything quadratic takes minutes."""
    long = Source("message", 0, "long.txt", "word and another “word” \n" * 40_000)
    for piece in ('"a', "“", '"a ', "\n", "> \n", "`", "```\n", "*_", "a...", "«»", '" ', "~~~"):
        began = time.process_time()
        checked(piece * (200_000 // len(piece)) + '"', read(long))
        assert time.process_time() - began < 5, piece

    def never() -> list[Words]:
        raise AssertionError("an answer without quotes reads nothing")

    assert checked("No quote at all.", never) == []
    several = "".join(f'"word and another word {n}" ' for n in range(5000))
    assert len(checked(several, read(long))) == MOST
