"""Messages and tokens as data for the browser. Text travels as data and becomes text nodes there.

Nothing here builds markup from what a user or a model wrote: the scripts in assets/chat create
text nodes, also where they format an answer as Markdown.
"""

from collections.abc import Iterable, Mapping, Sequence

from app.service import attachments
from app.web.colors import INKS, ink, others
from storage.conversations import Piece, StoredMessage

Data = dict[str, object]
"""What the browser is sent: all that JSON can hold."""
LONGEST = 20_000
"""Characters of a file that the page shows of it; the model has read all."""
Group = list[object]
Said = Mapping[str, dict[str, object]]
"""What there is to say of runs, beside what they said."""
NOTHING_SAID: Said = {}


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


def about(message: StoredMessage, goes_on: bool = False, said: Said = NOTHING_SAID) -> Data:
    """What stands below a message: its versions, its run, and whether it may be continued. Beside
    these there may be a `note`, a plain sentence, a `badge` of `text`, `kind` and `title`, and
    `thinking` where it begins within that: `said` holds them for each run (app/web/remarks.py)."""
    told: Data = {"key": message.id, "role": message.role}
    if len(message.versions) > 1:
        told["versions"] = [*message.versions]
    if message.run_id:
        told["run"] = message.run_id
        told.update(said.get(message.run_id, {}))
    return {**told, "on": True} if goes_on else told


def turn(
    message: StoredMessage,
    sources: dict[str, int],
    goes_on: bool = False,
    said: Said = NOTHING_SAID,
) -> Data:
    """One message; without pieces (the user's, an imported answer) it is uncoloured text."""
    told = about(message, goes_on, said)
    if message.pieces:
        return {**told, "groups": groups(message.pieces, sources)}
    if message.role != "user":
        return {**told, "text": message.content}
    files, text = attachments.split(message.content)
    if not files:
        return {**told, "text": text}
    shown = [{"name": f.name, "size": len(f.text), "text": f.text[:LONGEST]} for f in files]
    return {**told, "text": text, "files": shown}


def transcript(
    messages: Sequence[StoredMessage],
    kept: int = 0,
    goes_on: bool = False,
    said: Said = NOTHING_SAID,
) -> Data:
    """A stored conversation for the token view, which has drawn the first `kept` messages. Whether
    its last answer may be continued is told with it."""
    sources: dict[str, int] = {}
    last = len(messages) - 1
    turns = [
        turn(message, sources, goes_on and at == last, said)
        for at, message in enumerate(messages)
        if at >= kept
    ]
    after = messages[kept - 1].id if kept else ""
    return {"kept": kept, "after": after, "turns": turns, **legend(sources)}


def legend(sources: Iterable[str]) -> Data:
    """The sources in the order of their numbers, and how those look that are no tier."""
    return {"sources": [*sources], "names": drafts(sources)}


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
