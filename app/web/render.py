"""Messages and tokens as data for the browser. Text travels as data and becomes text nodes there.

Nothing here builds markup from what a user or a model wrote: assets/tokens.js creates one text
node per token, and the chat component gets plain strings that it sanitises itself.
"""

from collections.abc import Iterable, Sequence

from app.web.colors import INKS, ink, others
from storage.conversations import Piece, StoredMessage

Data = dict[str, object]
"""What the browser is sent: all that JSON can hold."""
Group = list[object]


def groups(pieces: Iterable[Piece], sources: dict[str, int], step: int = 0) -> list[Group]:
    """Tokens for the browser, in groups of one step, source and match length:

    [number of the source, match length, steps since the group before, texts, probabilities in %]

    `sources` numbers the sources, and grows with them; `step` is that of the token before. What is
    missing follows from the order: a token's position is how many come before it.
    """
    found: list[Group] = []
    texts, chances = list[str](), list[int]()
    last: tuple[str, int, int] | None = None
    for piece in pieces:
        key = piece.source, piece.match_length, piece.step
        if key != last:
            number = sources.setdefault(piece.source, len(sources))
            texts, chances = [], []
            found.append([number, piece.match_length, piece.step - step, texts, chances])
            last, step = key, piece.step
        texts.append(piece.text)
        chances.append(percent(piece.probability))
    return found


def percent(probability: float) -> int:
    """A probability in whole percent, at least 1; 0 where it is not known."""
    return max(1, round(100 * probability)) if 0 < probability <= 1 else 0


def turn(message: StoredMessage, sources: dict[str, int]) -> Data:
    """One message; without pieces (the user's, an imported answer) it is uncoloured text."""
    shown: Data = {"key": message.id, "role": message.role}
    if message.pieces:
        return {**shown, "groups": groups(message.pieces, sources)}
    return {**shown, "text": message.content}


def transcript(messages: Sequence[StoredMessage], kept: int = 0) -> Data:
    """A stored conversation for the token view, which has drawn the first `kept` messages."""
    sources: dict[str, int] = {}
    turns = [turn(message, sources) for message in messages[kept:]]
    after = messages[kept - 1].id if kept else ""
    return {"kept": kept, "after": after, "turns": turns, **legend(sources)}


def legend(sources: Iterable[str]) -> Data:
    """The sources in the order of their numbers, and how those look that are no tier."""
    return {"sources": [*sources], "names": drafts(sources)}


def bubbles(messages: Sequence[StoredMessage]) -> list[Data]:
    """A conversation for the Markdown view."""
    return [{"role": m.role, "content": m.content} for m in messages]


def side_by_side(name: str, pieces: Sequence[Piece]) -> Data:
    """One run of a comparison for the token view."""
    sources: dict[str, int] = {}
    turns = [{"key": name, "role": "assistant", "groups": groups(pieces, sources)}]
    return {"kept": 0, "after": "", "turns": turns, **legend(sources)}


def names() -> dict[str, dict[str, str]]:
    """What the legend and the hover text call each source, and the class that colours it."""
    return {
        source: {"title": look.title, "meaning": look.meaning, "kind": f"k-{source}"}
        for source, look in ((name, ink(name)) for name in INKS)
    }


def drafts(sources: Iterable[str]) -> dict[str, dict[str, str]]:
    """The same for the draft models among sources, each with its own colour."""
    return {
        source: {
            "title": look.title,
            "meaning": look.meaning,
            "kind": "k-draft" if look.underline else "k-target",
            "colour": look.colour,
        }
        for source in others(sources)
        for look in (ink(source),)
    }
