"""Titles that are made from messages."""

import re
from collections.abc import Iterable

from engine.thinking import answer_of

LONGEST = 60
"""The most characters of a title that is made from a message: two lines of the list."""
BEGINNING = 20_000
"""The first characters of a message, from which a title is made."""
FILES = re.compile(
    r"(?ms)^(?:Attached file|Rewrite this text[^:\n]*): [^\n]+\n(`{3,})[\w+-]*\n.*?(?:^\1$|\Z)"
)
"""Attached files in a message, and texts to rewrite."""


def title_from(messages: Iterable[tuple[str, str]]) -> str:
    """A title from the first message that has words besides files and thinking, of messages with
    their roles."""
    own = ((role, FILES.sub("", content)[:BEGINNING]) for role, content in messages)
    texts = (answer_of(content) if role == "assistant" else content for role, content in own)
    return next(filter(None, map(title_of, texts)), "")


def title_of(text: str) -> str:
    """A title from a message: its first sentence without Markdown, cut after a word; "" for a text
    without words."""
    outside = re.sub(r"(?m)^[ \t]*(?:```|~~~).*$", "", text[:BEGINNING])
    for paragraph in re.split(r"\n\s*\n", outside):
        lines = paragraph.strip().splitlines()
        # A heading is a title by itself; other lines are joined.
        plain = " ".join(
            _bare(line) for line in (lines[:1] if paragraph.lstrip()[:1] == "#" else lines)
        )
        if re.search(r"\w", plain):
            sentence = re.match(r".{8,}?[.!?](?=\s|$)", plain.strip())
            return _cut(" ".join((sentence[0] if sentence else plain).split()).rstrip("."))
    return ""


def _bare(line: str) -> str:
    line = re.sub(r"^[\s#>*+`~-]+|^\s*\d+[.)]\s+", "", line).rstrip(" \t*`~")
    return line.replace("**", "").replace("`", "")


def _cut(text: str) -> str:
    """At most LONGEST characters, cut after a word if possible."""
    if len(text) <= LONGEST:
        return text
    beginning = text[:LONGEST]
    whole = beginning.rpartition(" ")[0] if text[LONGEST] != " " else beginning
    return (whole if len(whole) > LONGEST // 2 else beginning[:-1]).rstrip(" ,;:") + "…"
