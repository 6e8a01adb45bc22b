"""A conversation as a self-contained HTML page, with the colours of its tokens and a legend. It has
no script, so it can be sent to anyone and opened anywhere.

Every text is escaped, and the page's content security policy forbids loading or running anything.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby

from app.service.exports import SPEAKERS
from app.web.colors import INKS, ink, others
from app.web.markup import template
from assets import read
from engine.types import TARGET
from storage.conversations import Conversation, Piece, StoredMessage


def page(conversation: Conversation, messages: Sequence[StoredMessage]) -> str:
    pieces = [piece for message in messages for piece in message.pieces or ()]
    names = {source: f"s{n}" for n, source in enumerate(sources(pieces))}
    counts = Counter(names.get(piece.source, "") for piece in pieces)
    looks = {name: ink(source) for source, name in names.items()}
    rules = (
        f"span.{name}{{--k:{look.colour};text-decoration-style:{look.underline}}}\n"
        for name, look in looks.items()
    )
    shown = [*looks.items(), ("", INKS[TARGET])] if looks else []
    system = conversation.system_prompt
    sections = [("system", [("", system)])] if system.strip() else []
    sections += [(m.role if m.role in SPEAKERS else "user", texts(m, names)) for m in messages]
    return template(
        "page_export.html",
        title=conversation.title,
        when=f"{datetime.fromtimestamp(conversation.created, UTC):%Y-%m-%d}",
        style=read("page_export.css") + "".join(rules),
        legend=[(name, look, counts[name] / len(pieces)) for name, look in shown],
        sections=sections,
        speakers=SPEAKERS,
    )


def sources(pieces: Iterable[Piece]) -> list[str]:
    """The sources that guessed tokens: the palette's first, then draft models."""
    found = {piece.source for piece in pieces}
    coloured = [*(name for name in INKS if name in found), *others(found)]
    return [source for source in coloured if ink(source).underline]


def texts(message: StoredMessage, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """The text of a message in parts, each with the class of its colour ("" for none)."""
    if not message.pieces:
        return [("", message.content)]
    runs = groupby(message.pieces, key=lambda piece: names.get(piece.source, ""))
    return [(name, "".join(piece.text for piece in run)) for name, run in runs]
