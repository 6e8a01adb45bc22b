"""A conversation as a self-contained HTML page, with the colours of its tokens and a legend. It has
no script, so it can be sent to anyone and opened anywhere.

Every text is escaped, and the page's content security policy forbids loading or running anything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby

from app.service.exports import SPEAKERS
from app.web.colors import INKS, Ink, ink, others
from assets import read
from storage.conversations import Conversation, Piece, StoredMessage

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(conversation: Conversation, messages: Sequence[StoredMessage]) -> str:
    """The HTML of the page."""
    pieces = [piece for message in messages for piece in message.pieces or ()]
    names = {source: f"s{n}" for n, source in enumerate(sources(pieces))}
    title, when = escape(conversation.title), datetime.fromtimestamp(conversation.created, UTC)
    sections = [section("system", escape(conversation.system_prompt))] if (
        conversation.system_prompt.strip()
    ) else []  # fmt: skip
    sections += [section(m.role, contents(m, names)) for m in messages]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{read('page_export.css')}{rules(names)}</style></head><body>\n"
        f'<h1>{title}</h1><p class="about">{when:%Y-%m-%d}, written with Strata. '
        "A colour says what guessed a word before the model chose it.</p>"
        f"{legend(pieces, names)}\n{''.join(sections)}</body></html>\n"
    )


def sources(pieces: Iterable[Piece]) -> list[str]:
    """The sources that guessed tokens: the palette's first, then draft models."""
    found = {piece.source for piece in pieces}
    coloured = [*(name for name in INKS if name in found), *others(found)]
    return [source for source in coloured if ink(source).underline]


def rules(names: dict[str, str]) -> str:
    looks = {name: ink(source) for source, name in names.items()}
    return "".join(
        f"span.{name}{{--k:{look.colour};text-decoration-style:{look.underline}}}\n"
        for name, look in looks.items()
    )


def legend(pieces: Sequence[Piece], names: dict[str, str]) -> str:
    """The meaning of the colours, and the share of the tokens that has each."""
    if not names:
        return ""
    counts, every = Counter(piece.source for piece in pieces), len(pieces)
    own = every - sum(counts[source] for source in names)
    items = [entry(ink(source), counts[source] / every, name) for source, name in names.items()]
    items.append(entry(INKS["target"], own / every))
    return f"<ul>{''.join(items)}</ul>"


def entry(look: Ink, share: float, name: str = "") -> str:
    coloured = f' class="{name}"' if name else ""
    return f"<li><span{coloured}>{escape(look.title)}</span> {share:.0%}</li>"


def section(role: str, content: str) -> str:
    """A message under the name of its author. `content` is markup already."""
    kind = role if role in SPEAKERS else "user"
    return f'<h2>{SPEAKERS[kind]}</h2><div class="{kind}">{content}</div>\n'


def contents(message: StoredMessage, names: dict[str, str]) -> str:
    if not message.pieces:
        return escape(message.content)
    runs = groupby(message.pieces, key=lambda piece: names.get(piece.source, ""))
    texts = ((name, escape("".join(piece.text for piece in run))) for name, run in runs)
    return "".join(f'<span class="{name}">{text}</span>' if name else text for name, text in texts)
