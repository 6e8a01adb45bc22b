"""Rewriting a text: a message holds the text and says what to change; its answer is the new text.

The text is a file of the message (app/service/attachments.py). As the answer mostly repeats it, it
is also predicted to follow, so that drafts come from it. Nothing else tells a rewrite from another
message, so versions, copies and exports of a conversation keep it, and its answer is an answer like
any other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from app.service import attachments
from app.service.attachments import Attachment

Change = tuple[Literal["same", "removed", "added"], str]
WORDS = re.compile(r"\A\s+|\S+\s*")
FENCED = re.compile(r"\s*(`{3,})[\w+-]*\n(.*)\n\1\s*", re.DOTALL)
LONGEST = 200_000
"""The most characters of two texts that are compared."""
AROUND = 160
"""How many characters without changes are shown on each side of a change."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The text that was rewritten, the new text, and the words that changed; no changes if the
    texts are the same, None if they are too long to compare."""

    old: Attachment
    new: str
    changes: Sequence[Change] | None


def to_rewrite(content: str) -> Attachment | None:
    files, _ = attachments.split(content)
    return next((file for file in files if file.rewrite), None)


def rewritten(content: str, answer: str) -> Rewritten | None:
    """What an answer, given without its thinking, changed in the text that the message `content`
    asks to rewrite; None if it asks for nothing of the kind."""
    old = to_rewrite(content)
    if old is None:
        return None
    # Models like to put the text into a fence, as it came to them.
    fenced = FENCED.fullmatch(answer)
    new = fenced[2] if fenced else answer.strip()
    too_long = len(old.text) + len(new) > LONGEST
    return Rewritten(old, new, None if too_long else changes(old.text, new))


def changes(old: str, new: str) -> Sequence[Change]:
    """The words that were removed and added, with some of the text around them."""
    before, after = WORDS.findall(old), WORDS.findall(new)
    found: list[Change] = []
    steps = SequenceMatcher(None, before, after).get_opcodes()
    for at, (kind, start, end, begin, stop) in enumerate(steps):
        if kind == "equal":
            text = "".join(after[begin:stop])
            found.append(("same", shortened(text, at == 0, at == len(steps) - 1)))
            continue
        removed, added = "".join(before[start:end]), "".join(after[begin:stop])
        found += [("removed", removed)] if removed else []
        found += [("added", added)] if added else []
    return [] if all(kind == "same" for kind, _ in found) else found


def shortened(text: str, first: bool, last: bool) -> str:
    """A text between two changes without its middle, if it is long. The `first` text has no change
    before it, and the `last` one none after it."""
    if len(text) <= 2 * AROUND:
        return text
    before = "" if first else text[:AROUND].rpartition(" ")[0]
    after = "" if last else text[-AROUND:].partition(" ")[2]
    return f"{before} … {after}"
