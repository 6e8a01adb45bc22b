"""The shape of an exported conversation, read as what it is: a file from anywhere.

`read` takes a parsed JSON value and gives plain, checked, bounded values, or raises `StorageError`
that says which part is wrong. Nothing read here names an id, an owner or a run.
"""

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from engine.errors import StorageError

FORMAT, VERSION = "strata-conversation", 1
ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 10_000
MAX_PIECES = 1_000_000
MAX_CHARS = 10_000_000
MAX_SOURCE_CHARS = 200
MAX_SETTINGS_CHARS = 65_536
MAX_SETTINGS_DEPTH = 8

T = TypeVar("T")


class ExportedMessage(NamedTuple):
    """A message; a piece is [text, source, match_length, step, position, probability]."""

    role: str
    content: str
    created: float
    pieces: list[list[Any]] | None


class Export(NamedTuple):
    """A conversation; times are in seconds since 1970, and now where the file gives none."""

    title: str
    system_prompt: str
    settings: dict[str, Any]
    created: float
    messages: list[ExportedMessage]


def read(data: object) -> Export:
    """Check an exported conversation, ours or one entry of a ChatGPT export."""
    entry = _typed(data, dict, "the conversation")
    found = _read_chatgpt(entry) if "mapping" in entry else _read_ours(entry)
    pieces = [piece for message in found.messages for piece in message.pieces or ()]
    texts = [found.system_prompt, *(message.content for message in found.messages)]
    chars = sum(map(len, texts)) + sum(len(piece[0]) + len(piece[1]) for piece in pieces)
    for name, size, limit in (
        ("messages", len(found.messages), MAX_MESSAGES),
        ("pieces", len(pieces), MAX_PIECES),
        ("characters", chars, MAX_CHARS),
    ):
        if size > limit:
            raise _refusal(f"it has {size} {name} and the most is {limit}")
    return found


def _read_ours(entry: dict[str, Any]) -> Export:
    if entry.get("format") != FORMAT or entry.get("version") != VERSION:
        given = f"{entry.get('format')!r} {entry.get('version')!r}"[:80]
        raise _refusal(f"its format is {given}, not {FORMAT!r} {VERSION}")
    messages = _typed(entry.get("messages"), list, "messages")
    return Export(
        title=_typed(entry.get("title"), str, "title"),
        system_prompt=_typed(entry.get("system_prompt", ""), str, "system_prompt"),
        settings=_read_settings(entry.get("settings", {})),
        created=_time(entry.get("created"), "created"),
        messages=[_read_message(item, f"message {n}") for n, item in enumerate(messages, 1)],
    )


def _read_settings(value: object) -> dict[str, Any]:
    """Settings that can be stored and, at any depth of calls, be read back."""
    settings = _typed(value, dict, "settings")
    try:
        size, depth = len(json.dumps(settings, allow_nan=False)), _depth(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal("its settings are not plain JSON values") from error
    if size > MAX_SETTINGS_CHARS or depth > MAX_SETTINGS_DEPTH:
        raise _refusal(
            f"its settings have {size} characters and {depth} levels, and the most are "
            f"{MAX_SETTINGS_CHARS} and {MAX_SETTINGS_DEPTH}"
        )
    return settings


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)


def _read_message(item: object, name: str) -> ExportedMessage:
    entry = _typed(item, dict, name)
    role = _typed(entry.get("role"), str, f"the role of {name}")
    if role not in ROLES:
        raise _refusal(f"the role of {name} is {role[:40]!r}, not one of {', '.join(ROLES)}")
    pieces = entry.get("pieces")
    if pieces is not None:
        rows = _typed(pieces, list, f"the pieces of {name}")
        pieces = [_read_piece(row, f"a piece of {name}") for row in rows]
    return ExportedMessage(
        role=role,
        content=_typed(entry.get("content"), str, f"the content of {name}"),
        created=_time(entry.get("created"), f"the time of {name}"),
        pieces=pieces,
    )


def _read_piece(row: object, name: str) -> list[Any]:
    piece = _typed(row, list, name)
    if len(piece) != 6:
        raise _refusal(f"{name} has {len(piece)} parts, not 6")
    text, source, *numbers = piece[:5]
    probability = _number(piece[5], f"the probability of {name}")
    if len(_typed(source, str, f"the source of {name}")) > MAX_SOURCE_CHARS:
        raise _refusal(f"the source of {name} has more than {MAX_SOURCE_CHARS} characters")
    for number in numbers:
        # An unbounded integer could be stored and then not be read back.
        if not 0 <= _typed(number, int, f"a number of {name}") < 2**31:
            raise _refusal(f"a number of {name} is out of range")
    return [_typed(text, str, f"the text of {name}"), source, *numbers, probability]


def _read_chatgpt(entry: dict[str, Any]) -> Export:
    """The branch that was shown last: from the current node up to the root, turned round."""
    mapping = _typed(entry["mapping"], dict, "mapping")
    node = entry.get("current_node") or next(reversed(mapping), None)
    messages: list[ExportedMessage] = []
    visited: set[str] = set()
    while isinstance(node, str) and node in mapping and node not in visited:
        visited.add(node)  # a file can claim to be its own ancestor
        holder = _typed(mapping[node], dict, "an entry of mapping")
        message = _read_chatgpt_message(holder.get("message"))
        if message is not None:
            messages.append(message)
        node = holder.get("parent")
    title = entry.get("title")
    return Export(
        title=title.strip()[:200] or "Imported" if isinstance(title, str) else "Imported",
        system_prompt="",
        settings={},
        created=_time(entry.get("create_time"), "create_time"),
        messages=messages[::-1],
    )


def _read_chatgpt_message(message: object) -> ExportedMessage | None:
    """A text by the user or the assistant; None for tool calls, images and empty system notes."""
    role = _inside(_inside(message, "author"), "role")
    parts = _inside(_inside(message, "content"), "parts")
    if role not in ("user", "assistant") or not isinstance(parts, list):
        return None
    text = "".join(part for part in parts if isinstance(part, str))
    created = _time(_inside(message, "create_time"), "create_time")
    return ExportedMessage(role, text, created, None) if text.strip() else None


def _inside(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _typed(value: object, kind: type[T], name: str) -> T:
    """The value, when it is of exactly this type: a JSON true is no integer."""
    if type(value) is not kind:
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise _refusal(f"{name} is {found}, not of type {kind.__name__}")
    return value


def _number(value: object, name: str) -> float:
    """A finite number; the comparison fails for NaN and holds for no integer beyond floats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise _refusal(f"{name} is not a finite number")
    return float(value)


def _time(value: object, name: str) -> float:
    if value is None:
        return time.time()
    seconds = _number(value, name)
    if not 0 <= seconds < 2**40:
        raise _refusal(f"{name} is {seconds:g}, not a time in seconds since 1970")
    return seconds


def _refusal(problem: str) -> StorageError:
    return StorageError(
        f"The conversation cannot be imported: {problem}. Export it again, or mend the file."
    )
