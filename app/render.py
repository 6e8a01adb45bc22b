"""Messages and tokens as data for the browser. Text travels as data and becomes text nodes there.

Nothing here builds markup from what a user or a model wrote: assets/tokens.js creates one text
node per token, and the chat component gets plain strings that it sanitises itself.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from app.palette import INKS, ink, others
from storage.conversations import Piece, StoredMessage

Row = list[Any]


def row(piece: Piece) -> Row:
    """One token for the browser: text, source, match length, step, position, probability."""
    return [
        piece.text,
        piece.source,
        piece.match_length,
        piece.step,
        piece.position,
        piece.probability,
    ]


def turn(key: str, role: str, text: str, pieces: Sequence[Piece] | None) -> dict[str, Any]:
    """One message; without pieces (the user's, an imported answer) it is uncoloured text."""
    if pieces:
        return {"key": key, "role": role, "tokens": [row(piece) for piece in pieces]}
    return {"key": key, "role": role, "text": text}


def transcript(messages: Sequence[StoredMessage]) -> dict[str, Any]:
    """A stored conversation for the token view."""
    turns = [turn(m.id, m.role, m.content, m.pieces) for m in messages]
    return {"turns": turns, "names": drafts(p for m in messages for p in m.pieces or ())}


def growing(
    pieces: Sequence[Piece], start: int, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The answer under way from token `start` on, for the token view to append to what it shows,
    or to the transcript `before`."""
    tail, earlier = pieces[start:], before or {}
    return {
        **earlier,
        "growing": {"from": start, "tokens": [row(p) for p in tail]},
        "names": {**earlier.get("names", {}), **drafts(tail)},
    }


def bubbles(messages: Sequence[StoredMessage], growing: str | None = None) -> list[dict[str, Any]]:
    """A conversation for the Markdown view."""
    shown = [{"role": m.role, "content": m.content} for m in messages]
    if growing is not None:
        shown.append({"role": "assistant", "content": growing})
    return shown


def side_by_side(name: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    """One run of a comparison for the token view."""
    turns = [{"key": name, "role": "assistant", "tokens": [row(p) for p in pieces]}]
    return {"turns": turns, "names": drafts(pieces)}


def names() -> dict[str, dict[str, str]]:
    """What the legend and the hover text call each source, and the class that colours it."""
    return {
        source: {"title": look.title, "meaning": look.meaning, "kind": f"k-{source}"}
        for source, look in ((name, ink(name)) for name in INKS)
    }


def drafts(pieces: Iterable[Piece]) -> dict[str, dict[str, str]]:
    """The same for the draft models among the sources of tokens, each with its own colour."""
    return {
        source: {
            "title": look.title,
            "meaning": look.meaning,
            "kind": "k-draft" if look.underline else "k-target",
            "colour": look.colour,
        }
        for source in others(piece.source for piece in pieces)
        for look in (ink(source),)
    }
