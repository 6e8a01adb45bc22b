"""A file of conversations, from anywhere: what of it is read, and what is left out.

The invariant: the work is bounded, whatever the file holds. Every conversation is checked before
any is stored, and what goes beyond a limit is left out and counted, never silently.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import StorageError
from storage import exports
from storage.exports import Export

MAX_CONVERSATIONS = 10_000
MAX_MESSAGES = 200_000
MAX_PIECES = 1_000_000
MAX_CHARS = 100_000_000
"""The most that is taken from one file: thousands of conversations of ordinary length. They are
stored in one transaction, and an answer that grows meanwhile waits so long for its own."""


@dataclass(frozen=True, slots=True)
class Found:
    """The conversations of a file, in its order, and what the user should be told about it."""

    conversations: Sequence[Export]
    notices: Sequence[str]


def parse(content: bytes) -> object:
    """The JSON value of a file. Raises `StorageError` where there is none."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise StorageError(
            "The file nests its values too deeply to be read: no export does. Choose another file."
        ) from error
    except ValueError as error:
        raise StorageError(
            f"The file is no readable JSON ({str(error)[:80]}). Choose a conversation exported "
            "from here, or an export of ChatGPT or Open WebUI."
        ) from error


def read_file(content: bytes, room: int) -> Found:
    """The conversations of a file, at most `room`: so many more may be kept.

    Raises `StorageError` where none can be read.
    """
    data = parse(content)
    entries = data if isinstance(data, list) and not exports.is_plain(data) else [data]
    if room <= 0:
        raise StorageError("No more conversations can be kept. Delete some first.")
    found, problems, looked, totals = list[Export](), list[str](), 0, (0, 0, 0)
    for entry in entries[: min(room, MAX_CONVERSATIONS)]:
        try:
            export = exports.read(entry)
        except StorageError as error:
            problems.append(str(error))
        else:
            totals = _sum(totals, export)
            if not _within(totals):
                break
            found.append(export)
        looked += 1
    if not found:
        reason = problems[0] if problems else "The file is empty."
        raise StorageError(f"The file holds no conversation that can be read. {reason}")
    return Found(found, _notices(problems, looked, len(entries)))


def _sum(totals: tuple[int, int, int], export: Export) -> tuple[int, int, int]:
    messages, pieces, chars = totals
    return messages + len(export.messages), pieces + export.pieces, chars + export.chars


def _within(totals: tuple[int, int, int]) -> bool:
    limits = (MAX_MESSAGES, MAX_PIECES, MAX_CHARS)
    return all(total <= limit for total, limit in zip(totals, limits, strict=True))


def _notices(problems: Sequence[str], looked: int, entries: int) -> list[str]:
    """What was not read, and why."""
    notices = []
    if problems:
        notices.append(
            f"{len(problems):,} of {entries:,} conversations could not be read. The first of "
            f"these: {problems[0]}"
        )
    if looked < entries:
        notices.append(
            f"The first {looked:,} of {entries:,} conversations in the file were read, the other "
            f"{entries - looked:,} were left out. A file may hold {MAX_CONVERSATIONS:,} "
            f"conversations with {MAX_MESSAGES:,} messages, {MAX_PIECES:,} tokens with their "
            f"origin and {MAX_CHARS:,} characters. Split it, or delete conversations to make room."
        )
    return notices
