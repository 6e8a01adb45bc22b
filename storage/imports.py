"""Reads conversations from files, which may come from anywhere.

The invariant: the work is bounded, whatever a file holds. Every conversation is checked before any
is stored. Conversations beyond a limit are left out, and a notice says how many.

`read_file` takes a file of JSON, of JSON lines, or a ZIP archive of such files. `read` takes one
parsed value and returns plain, checked, bounded values, or raises a `StorageError` that says which
part is wrong. No ids, owners or runs are read from files. Strata's own form is read here, those of
other programs in `foreign.py`.
"""

import io
import json
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, ValidationError

from engine.errors import StorageError
from engine.text import read_json
from storage import foreign
from storage.exported import LATEST, MAX_TITLE, Export, ExportedMessage, typed
from storage.exported import refusal as not_imported
from storage.validation import Outside, problem_of, refusal

FORMAT, VERSION = "strata-conversation", 2
"""Files of version 1 are read as well; in them, each message follows the one before it."""
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
MAX_MESSAGES = 10_000
MAX_PIECES = 262_144
"""The context tier forgets tokens beyond this number too, and a page takes seconds to show them."""
MAX_CHARS = 10_000_000
MAX_CONVERSATIONS = 10_000
MAX_FILE_MESSAGES = 200_000
MAX_FILE_PIECES = 1_000_000
MAX_FILE_CHARS = 100_000_000
"""The most that is taken from one file: thousands of conversations of ordinary length. They are
stored in one transaction, and an answer that is being written waits for it."""
MAX_SOURCE_CHARS = 200
MAX_UNPACKED = 512 << 20
"""The most bytes that are unpacked from an archive."""
MAX_FOLDER = 60
MAX_SETTINGS_CHARS = 65_536
MAX_SETTINGS_DEPTH = 8
Text = InstanceOf[str]
"""A text as it was parsed."""
Small = Annotated[int, Field(ge=0, lt=2**31)]
"""A larger integer could be stored and then not be read back."""
Piece = Annotated[
    tuple[
        Text,
        Annotated[Text, Field(max_length=MAX_SOURCE_CHARS)],
        Small,
        Small,
        Small,
        Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)],
    ],
    Field(strict=False, fail_fast=True),
]
"""Text, source, match length, step, position and probability of a token; a list in JSON."""
# Limits of an InstanceOf apply only within the same Annotated.
Title = Annotated[
    Text,
    AfterValidator(str.strip),
    Field(min_length=1, max_length=MAX_TITLE, description=f"1 to {MAX_TITLE} characters"),
]
Time = Annotated[
    float,
    Field(ge=0, lt=LATEST, allow_inf_nan=False),
    BeforeValidator(lambda seconds: time.time() if seconds is None else seconds),
]


def _storable(settings: dict[str, Any]) -> dict[str, Any]:
    try:
        size, depth = len(json.dumps(settings, allow_nan=False)), _depth(settings)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal("its settings are not plain JSON values") from error
    if size > MAX_SETTINGS_CHARS or depth > MAX_SETTINGS_DEPTH:
        raise refusal(
            f"its settings have {size} characters and {depth} levels, and the most are "
            f"{MAX_SETTINGS_CHARS} and {MAX_SETTINGS_DEPTH}"
        )
    return settings


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)


class OwnMessage(Outside):
    """A message in a file of Strata, with its place in the tree of messages."""

    role: Role
    content: Text
    created: Time = Field(default_factory=time.time)
    pieces: Annotated[list[Piece], Field(fail_fast=True, max_length=MAX_PIECES)] | None = None
    parent: Annotated[int, Field(ge=0)] | None = None
    chosen: Small = 0


class OwnFile(Outside):
    """A file of Strata, without the fields that name its format."""

    title: Title
    system_prompt: Text = ""
    settings: Annotated[dict[Any, Any], AfterValidator(_storable)] = {}
    created: Time = Field(default_factory=time.time)
    messages: Annotated[list[OwnMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    pinned: bool = False
    folder: Annotated[Text, AfterValidator(lambda folder: folder[:MAX_FOLDER])] = ""


def read(data: object) -> Export:
    found = _reader(data)(data)
    for name, size, limit in (
        ("messages", len(found.messages), MAX_MESSAGES),
        ("pieces", found.pieces, MAX_PIECES),
        ("characters", found.chars, MAX_CHARS),
    ):
        if size > limit:
            raise not_imported(f"it has {size:,} {name} and the most is {limit:,}")
    return found


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """The conversations of a file, in its order, and notices for the user."""

    conversations: Sequence[Export]
    notices: Sequence[str]


def parse(content: bytes) -> object:
    """The JSON value of a file, or the list of the values of its lines. Raises `StorageError` if it
    cannot be read."""
    try:
        return read_json(content)
    except RecursionError as error:
        raise StorageError(
            "The file nests its values too deeply to be read: no export does. Choose another file."
        ) from error
    except ValueError as error:
        if lines := [*_lines(content)]:
            return lines
        raise StorageError(
            f"The file is no readable JSON ({str(error)[:80]}). Choose a conversation exported "
            "from here, or an export of ChatGPT or Open WebUI."
        ) from error


def _lines(content: bytes) -> Iterator[object]:
    """The values of JSON lines, with an error for each broken line; empty if the file is not in
    that format."""
    try:
        text = content.decode(json.detect_encoding(content), "surrogatepass")
    except UnicodeDecodeError:
        return
    rows = [(number, row) for number, row in enumerate(text.split("\n"), 1) if row.strip()]
    for place, (number, row) in enumerate(rows):
        try:
            yield json.loads(row)
        except (ValueError, RecursionError) as error:
            if place == 0 or len(rows) < 2:
                return
            yield StorageError(f"Line {number} is no readable JSON ({str(error)[:80]}).")


def _unpacked(content: bytes) -> Iterator[bytes]:
    """The files of conversations in a ZIP archive: ChatGPT's, or all that are JSON. Raises
    `StorageError`."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = {PurePath(info.filename): info for info in archive.infolist()}
            shown = [n for n in files if not n.name.startswith(".") and "__MACOSX" not in n.parts]
            known = [n for n in shown if n.suffix.lower() in (".json", ".jsonl")]
            chosen = [n for n in known if n.name.startswith("conversations")] or known
            left = MAX_UNPACKED
            for name in sorted(chosen):
                with archive.open(files[name]) as file:
                    data = file.read(left + 1)
                left -= len(data)
                if left < 0:
                    raise StorageError(
                        f"The archive unpacks to more than {MAX_UNPACKED >> 20} MiB. Unpack it, "
                        "and import its files one by one."
                    )
                yield data
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise StorageError(f"The archive is damaged ({error}). Get the export again.") from error
    except (RuntimeError, NotImplementedError) as error:
        raise StorageError(
            f"The archive cannot be unpacked here ({error}). Unpack it, and import its files."
        ) from error
    if not chosen:
        raise StorageError("The archive holds no JSON file. Choose an export of conversations.")


def _entries(content: bytes) -> list[Any]:
    """The conversations of a file, not checked yet, with an error for each part that is not
    JSON."""
    if content[:4] == b"PK\3\4":
        return [entry for file in _unpacked(content) for entry in _tried(file)]
    data = parse(content)
    if isinstance(data, dict) and data.get("type") == "session":
        data = [data]
    if not isinstance(data, list):
        inner = data.get("conversations") if isinstance(data, dict) else None
        return [data] if not isinstance(inner, list) or foreign.is_plain(inner) else inner
    if any(isinstance(each, dict) and each.get("type") == "session" for each in data):
        return [*_sessions(data)]
    return [data] if foreign.is_plain(data) else data


def _tried(content: bytes) -> list[Any]:
    try:
        return _entries(content)
    except StorageError as error:
        return [error]


def _sessions(records: Sequence[Any]) -> Iterator[Any]:
    """The conversations of llama.cpp's page in JSON lines: each begins with a record of its own,
    and its messages follow."""
    latest: list[Any] | None = None
    for record in records:
        if isinstance(record, dict) and record.get("type") == "session":
            latest = []
            yield {"conv": record, "messages": latest}
        elif latest is None or isinstance(record, StorageError):
            yield record
        else:
            latest.append(record.get("message", record) if isinstance(record, dict) else record)


def read_file(content: bytes, room: int) -> ImportedFile:
    """The conversations of a file, at most `room`.

    Raises `StorageError` if no conversation can be read.
    """
    entries = _entries(content)
    if room <= 0:
        raise StorageError("No more conversations can be kept. Delete some first.")
    found, problems, looked = list[Export](), list[str](), 0
    messages = pieces = chars = 0
    for entry in entries[: min(room, MAX_CONVERSATIONS)]:
        try:
            export = read(entry)
        except StorageError as error:
            problems.append(str(error))
        else:
            messages += len(export.messages)
            pieces += export.pieces
            chars += export.chars
            if messages > MAX_FILE_MESSAGES or pieces > MAX_FILE_PIECES or chars > MAX_FILE_CHARS:
                break
            found.append(export)
        looked += 1
    if not found:
        reason = problems[0] if problems else "The file is empty."
        raise StorageError(f"The file holds no conversation that can be read. {reason}")
    left = sum((Counter(export.left_out) for export in found), Counter[str]())
    return ImportedFile(found, _notices(problems, looked, len(entries), left))


def _notices(problems: Sequence[str], looked: int, entries: int, left: Counter[str]) -> list[str]:
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
            f"conversations with {MAX_FILE_MESSAGES:,} messages, {MAX_FILE_PIECES:,} tokens with "
            f"their origin and {MAX_FILE_CHARS:,} characters. Split it, or delete conversations to "
            "make room."
        )
    if left:
        parts = ", ".join(f"{what} ({number:,})" for what, number in left.most_common())
        notices.append(f"These parts of the conversations were left out: {parts}.")
    return notices


def _reader(data: object) -> Callable[[Any], Export]:
    if isinstance(data, StorageError):
        raise data
    if foreign.is_plain(data):
        return foreign.read_plain
    entry = typed(data, dict, "the conversation")
    if "format" in entry:
        return _read_ours
    if reader := foreign.reader_of(entry):
        return reader
    keys = ", ".join(repr(str(key)[:30]) for key in list(entry)[:5]) or "nothing"
    raise not_imported(
        f"it holds {keys}, which is none of the formats that can be read: Strata's own, ChatGPT's, "
        "Open WebUI's, ShareGPT's, that of llama.cpp's page, or plain messages with "
        '"role" and "content"'
    )


def _read_ours(entry: dict[str, Any]) -> Export:
    version = entry.get("version")
    if entry.get("format") != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        given = f"{entry.get('format')!r} {version!r}"[:80]
        raise not_imported(
            f"its format is {given}, and this program reads {FORMAT!r} 1 to {VERSION}"
        )
    if version == 1 and isinstance(items := entry.get("messages"), list):
        places = ({"parent": n - 1 if n else None, "chosen": 0} for n in range(len(items)))
        placed = zip(items, places, strict=True)
        items = [each | place if isinstance(each, dict) else each for each, place in placed]
        entry = entry | {"messages": items}
    try:
        found = OwnFile.model_validate(entry)
    except ValidationError as error:
        problem = problem_of(error, OwnFile).text.removesuffix(".")
        raise not_imported(problem) from error
    messages = [ExportedMessage(**dict(each)) for each in found.messages]
    for number, each in enumerate(messages):
        if each.parent is not None and each.parent >= number:
            name = f"message {number + 1}"
            raise not_imported(f"the parent of {name} is not one of the messages before it")
    return Export(**dict(found) | {"messages": messages})
