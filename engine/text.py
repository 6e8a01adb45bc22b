"""Text from outside the program: made well-formed once, where it comes in, and compared.

JSON, PDF files and browsers can hold half of a surrogate pair, which is no character: UTF-8 cannot
encode it, and neither SQLite nor a tokenizer accepts it.
"""

import json
from collections.abc import Iterable
from itertools import count
from typing import Any
from unicodedata import combining, normalize


def well_formed(value: Any) -> Any:
    """A text, or a value of JSON with all its texts, without halves of surrogate pairs. Two halves
    that belong together become their character, and any other half becomes U+FFFD."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    elif isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


def read_json(content: str | bytes, **options: Any) -> Any:
    """The value of a JSON text, with well-formed texts. `options` are those of `json.loads`, which
    also says what this raises."""
    if isinstance(content, bytes):
        content = content.decode(json.detect_encoding(content), "surrogatepass")
    found = json.loads(well_formed(content), **options)
    return well_formed(found) if "\\ud" in content or "\\uD" in content else found


def unsure(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of a text may belong to a mark or to the white space before
    it."""
    begun = max((overlap(text, mark) for mark in marks), default=0)
    return len(text) - len(text[: len(text) - begun].rstrip())


def overlap(text: str, mark: str) -> int:
    """The length of the longest beginning of `mark` that `text` ends with, short of all of it."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def folded(text: str) -> str:
    """A text as it is compared: without the difference between small and capital letters, between
    composed and decomposed characters, and between forms such as full-width letters."""
    if text.isascii():
        return text.lower()
    # A capital I with a dot becomes a small i and another dot.
    folds = normalize("NFKC", text).casefold().replace("i\u0307", "i")
    return normalize("NFKC", folds)


def apart(text: str) -> str:
    """The folded text with its marks as separate characters, so that its parts fold alone to what
    they are in it."""
    return normalize("NFKD", folded(text))


def find_folded(words: str, text: str) -> tuple[int, int] | None:
    """Where a text first holds the words, compared as `folded`: the start and the end, so that no
    letter is parted from its marks."""

    def is_mark(character: str) -> bool:
        # Half-width marks fold to marks.
        return bool(combining(normalize("NFKD", character)[0]))

    searched = apart(words)
    if (start := apart(text).find(searched)) < 0:
        return None
    end, at, begin = start + len(searched), 0, 0
    for line in text.splitlines(keepends=True):
        if at + (length := len(apart(line))) > start:
            break
        at, begin = at + length, begin + len(line)
    first = begin
    while at < end and begin < len(text):
        last = next(n for n in count(begin + 1) if n == len(text) or not is_mark(text[n]))
        first = begin if at <= start else first
        at, begin = at + len(apart(text[begin:last])), last
    return first, begin
