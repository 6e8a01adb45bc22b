"""Where in a conversation a guess was copied from.

The context tier counts what followed the last tokens; it keeps no places. So the place is looked
for when somebody wants to see it: the last one before the step at which the same tokens stood.
Among answers of the same model tokens are compared, which is exact. What the user said is known as
text only; there the same text is looked for, whole words first.
"""

from collections.abc import Sequence
from typing import NamedTuple

AROUND = 60
"""Characters of the surroundings that are told on either side."""


class Spoken(NamedTuple):
    """One message: its text, and where it is an answer of the same model its tokens. `ends[i]` is
    where the text of token i ends."""

    key: str
    text: str
    ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class Wanted(NamedTuple):
    """A guess: the tokens that led to it, as far as its own answer goes, itself, and the text of
    all of them. `whole` says that no more led to it: nothing of before the answer."""

    match: tuple[int, ...]
    token: int
    text: str
    whole: bool = True


class Place(NamedTuple):
    """Characters `start` to `end` of the message `key`; tokens `first` to `last` of it where it has
    some, else -1. The words before and behind."""

    key: str
    start: int
    end: int
    first: int
    last: int
    before: str
    copied: str
    after: str


def origin(spoken: Sequence[Spoken], wanted: Wanted, until: int) -> Place | None:
    """The last place before the token number `until` of the last message, which is the answer;
    None where there is none any more."""
    *earlier, answer = spoken
    found = by_tokens(answer, wanted, until) if wanted.whole else None
    if found is not None:
        return found
    for message in reversed(earlier):
        if message.ids:
            found = by_tokens(message, wanted, len(message.ids))
        elif wanted.whole:
            found = by_text(message, wanted.text)
        if found is not None:
            return found
    return None


def by_tokens(message: Spoken, wanted: Wanted, until: int) -> Place | None:
    """The last place where the tokens stand, before number `until`. What was led to by more than
    its answer stands where another answer begins in the same way."""
    ids, size = message.ids, len(wanted.match)
    places = range(min(until, len(ids)) - 1, size - 1, -1) if wanted.whole else (size,)
    for at in places:
        first = at - size
        if at < min(until, len(ids)) and ids[first : at + 1] == (*wanted.match, wanted.token):
            start = message.ends[first - 1] if first else 0
            return placed(message, start, message.ends[at], first, at)
    return None


def by_text(message: Spoken, text: str) -> Place | None:
    """The last place of a text: where it stands as whole words, else wherever it does."""
    if not text.strip():
        return None
    content, any_place = message.text, -1
    at = content.rfind(text)
    while at >= 0:
        end = at + len(text)
        if end == len(content) or not (content[end].isalnum() and text[-1].isalnum()):
            return placed(message, at, end)
        any_place = at if any_place < 0 else any_place
        at = content.rfind(text, 0, end - 1)
    if any_place >= 0:
        return placed(message, any_place, any_place + len(text))
    # At the beginning no space leads a word.
    begins = text.lstrip()
    return placed(message, 0, len(begins)) if content.startswith(begins) else None


def placed(message: Spoken, start: int, end: int, first: int = -1, last: int = -1) -> Place:
    """A place with its surroundings, in whole words where there are spaces; "…" stands for more."""
    text = message.text
    before, after = text[max(0, start - AROUND) : start], text[end : end + AROUND]
    if start > AROUND:
        before = f"… {before.partition(' ')[2] or before}"
    if end + AROUND < len(text):
        after = f"{after.rpartition(' ')[0] or after} …"
    return Place(message.key, start, end, first, last, before, text[start:end], after)
