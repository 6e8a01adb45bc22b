"""Quotes of an answer, looked up in the files and results of tools that the model has read.

A quote counts as found if its words stand in one of them in this order, with nothing left out but
what an ellipsis marks. White space, the forms of quotation marks and dashes, and Markdown's
emphasis may differ. Whether a model drafted or copied a quote makes no difference: only the two
texts are compared.
"""

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

SHORTEST = 16
"""The fewest bytes in UTF-8 of a quote that is looked up. Shorter ones are names and single
words."""
MOST = 100
"""The most quotes of an answer that are looked up."""
FENCED = re.compile(r"^ {0,3}(`{3,}+|~{3,}+)[^\n]*\n(.*?)(?:^ {0,3}\1[^\n]*$|\Z)", re.M | re.S)
BLOCK = re.compile(r"(?:^ {0,3}>[^\n]*(?:\n|\Z))+", re.M)
MARKER = re.compile(r"^ {0,3}> ?", re.M)
NAMED = re.compile(r"\n[ \t]*(?:[—–]|--?)\s[^\n]*\Z")
"""Who is quoted, in the last line of a block."""
MARKS = re.compile(
    r"“([^“”]+)”|„([^„“”]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』"
    r'|(?<![\w"])"(?=\S)([^"]+)"(?!\w)'
)
CODE = r"(?<!`)`([^`\n]+)`(?!`)"
QUOTED = re.compile(f"{CODE}|{MARKS.pattern}")
PARAGRAPH = re.compile(r"\n\s*\n")
OMISSION = re.compile(r"[\[(](?:…|\.{3})[\])]|…|\.{3}")
EMPHASIS = re.compile(r"(?<!\w)[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?!\w)")
EQUAL = str.maketrans("‘’‚‛“”„‟–—‑", "''''\"\"\"\"---")


@dataclass(frozen=True, slots=True)
class Source:
    """A text that the model has read: the message that holds it, and its position there."""

    message: str
    number: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Quote:
    """A quote, and the passage of `source` that it repeats, if it was found: characters from
    `start` to `end`."""

    text: str
    source: Source | None = None
    start: int = 0
    end: int = 0

    @property
    def line(self) -> int:
        return 1 + (self.source.text.count("\n", 0, self.start) if self.source else 0)


class Words:
    """The words of a source with single spaces, and where each of them begins in its text."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.text = plain(source.text)
        self.starts = array("L", (word.start() for word in re.finditer(r"\S+", source.text)))

    def find(self, parts: Sequence[str]) -> tuple[int, int] | None:
        """Where all parts follow each other, as characters of the source."""
        begin, at = -1, 0
        for part in parts:
            at = self.text.find(part, at)
            if at < 0:
                return None
            begin, at = (at if begin < 0 else begin), at + len(part)
        return self.position(begin), self.position(at - 1) + 1

    def position(self, at: int) -> int:
        """Where a character of the words is in the source."""
        return self.starts[self.text.count(" ", 0, at)] + at - self.text.rfind(" ", 0, at) - 1


def plain(text: str) -> str:
    return " ".join(text.translate(EQUAL).split())


def checked(answer: str, read: Callable[[], Sequence[Words]]) -> list[Quote]:
    """The quotes of an answer, in its order, each looked up in what was `read`, if there is any of
    either. Code is no quote unless it is found."""
    quoted = [*islice(quotes(answer), MOST)]
    if not quoted or not (sources := read()):
        return []
    found = ((look_up(text, sources), claimed) for text, claimed in quoted)
    return [*dict.fromkeys(quote for quote, claimed in found if claimed or quote.source)]


def look_up(text: str, sources: Sequence[Words]) -> Quote:
    for parts in forms(text):
        for source in sources:
            if span := source.find(parts):
                return Quote(text, source.source, *span)
    return Quote(text)


def forms(text: str) -> Iterator[list[str]]:
    """What a quote may be in its source, between its omissions: its first letter follows the
    sentence that quotes it, and so does a point or comma at its end."""
    for shown in dict.fromkeys((text, EMPHASIS.sub("", text))):
        whole = [part for part in map(plain, OMISSION.split(shown)) if part]
        for ended in (whole, [*whole[:-1], *(last.rstrip(".,;:!?") for last in whole[-1:])]):
            if ended and ended[-1]:
                yield ended
                yield [ended[0][0].swapcase() + ended[0][1:], *ended[1:]]


def quotes(answer: str) -> Iterator[tuple[str, bool]]:
    """What an answer quotes, and whether it is marked as a quote: text in quotation marks and in
    blocks of quotes is, code is not."""
    at = 0
    for fence in FENCED.finditer(answer):
        yield from in_prose(answer[at : fence.start()])
        yield from long_enough(fence[2], False)
        at = fence.end()
    yield from in_prose(answer[at:])


def in_prose(text: str) -> Iterator[tuple[str, bool]]:
    at = 0
    for block in BLOCK.finditer(text):
        yield from in_paragraphs(text[at : block.start()])
        quoted = NAMED.sub("", MARKER.sub("", block[0]).strip()).strip()
        inner = MARKS.fullmatch(quoted)
        yield from long_enough(next(filter(None, inner.groups())) if inner else quoted, True)
        at = block.end()
    yield from in_paragraphs(text[at:])


def in_paragraphs(text: str) -> Iterator[tuple[str, bool]]:
    for paragraph in PARAGRAPH.split(text):
        for match in QUOTED.finditer(paragraph):
            code, *marked = match.groups()
            yield from long_enough(code or next(filter(None, marked)), not code)


def long_enough(text: str, claimed: bool) -> Iterator[tuple[str, bool]]:
    if len((text := text.strip()).encode()) >= SHORTEST:
        yield text, claimed
