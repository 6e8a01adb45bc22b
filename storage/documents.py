"""Documents in files, for statistics: texts and chats, read piece by piece and never unpacked.

A file may come from anywhere. Nothing of it is written to disk, a packed one may give `MOST_BYTES`
at most, and a line is never longer than `LONGEST`. So a file that is not what it seems costs time
that can be stopped, and no more. What cannot be read raises StorageError with the file's name.
"""

import csv
import gzip
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

from engine.errors import StorageError
from engine.types import Document, Message

PIECE = 1 << 16
"""Characters of a longer text that are one document, about: it is cut where a line ends."""
LONGEST = 16 << 20
"""The most characters of a line."""
MOST_BYTES = 8 << 30
MOST_JSON = 128 << 20
"""The most bytes of a JSON file, which has to be read as a whole."""
COLUMNS = ("text", "content")
"""The column of a table that holds its texts; without one a row is a document."""
KINDS = (".txt", ".md", ".jsonl", ".json", ".csv")
PACKED = (".zip", ".xz", ".gz")
READ_ERRORS = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,  # a way to pack that Python does not know
    csv.Error,
)


@dataclass(slots=True)
class Meter:
    """How many bytes of files were read, as they lie on the disk."""

    done: int = 0


class Counted(io.FileIO):
    """A file that is read, with what was read of it counted."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self.meter = meter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self.meter.done += count
        return count


class Limited(io.RawIOBase):
    """What is unpacked from a file, up to a limit."""

    def __init__(self, packed: IO[bytes], left: int) -> None:
        super().__init__()
        self.packed, self.left = packed, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self.packed.read(len(buffer))
        self.left -= len(found)
        if self.left < 0:
            raise StorageError(
                f"It holds more than {MOST_BYTES >> 30} GiB, the most that is unpacked. Split it."
            )
        buffer[: len(found)] = found
        return len(found)


def documents(path: Path, meter: Meter | None = None) -> Iterator[Document]:
    """The documents of one file; `meter` counts what was read of it."""
    with named(str(path)), io.BufferedReader(Counted(path, meter or Meter())) as raw:
        kind, packing = path.suffix.lower(), ""
        if kind in PACKED:
            kind, packing = Path(path.stem).suffix.lower(), kind
        if packing == ".zip":
            yield from in_archive(path, raw)
        elif kind == ".parquet":
            raise StorageError(
                f"The file {str(path)!r} is a Parquet file, which is not read here. "
                "Save it as JSON lines or CSV first."
            )
        else:
            openers: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open}
            opened = openers[packing](raw) if packing else raw
            yield from in_stream(str(path), kind, opened)


def in_archive(path: Path, raw: IO[bytes]) -> Iterator[Document]:
    """The documents of all files of an archive whose kind is known."""
    with zipfile.ZipFile(raw) as archive:
        known = [
            info
            for info in archive.infolist()
            if not info.is_dir() and PurePath(info.filename).suffix.lower() in KINDS
        ]
        if not known:
            raise StorageError(
                f"The archive {str(path)!r} holds no file that can be read. It may hold "
                f"{', '.join(KINDS)}."
            )
        for info in known:
            name = f"{path}/{info.filename}"
            if info.flag_bits & 1:
                raise StorageError(f"The file {name!r} has a password. Unpack it first.")
            with named(name), archive.open(info) as opened:
                yield from in_stream(name, PurePath(info.filename).suffix.lower(), opened)


def in_stream(name: str, kind: str, opened: IO[bytes]) -> Iterator[Document]:
    """The documents of a file of that kind; what is of no known kind is text."""
    limited = io.BufferedReader(Limited(opened, MOST_BYTES))
    lines = io.TextIOWrapper(limited, encoding="utf-8-sig", newline="" if kind == ".csv" else None)
    readers = {".jsonl": json_lines, ".json": json_file, ".csv": table}
    yield from readers.get(kind, text)(name, lines)


def text(name: str, lines: io.TextIOWrapper) -> Iterator[Document]:
    """A document per file, or several where it is long."""
    kept = ""
    while piece := lines.read(PIECE):
        kept += piece
        if len(piece) == PIECE:
            end = kept.rfind("\n") + 1 or len(kept)
            yield kept[:end]
            kept = kept[end:]
    if kept:
        yield kept


def json_lines(name: str, lines: io.TextIOWrapper) -> Iterator[Document]:
    """A document per line."""
    number = 0
    while line := lines.readline(LONGEST):
        number += 1
        if len(line) == LONGEST:
            raise StorageError(
                f"Line {number} of {name!r} is longer than {LONGEST:,} characters. Split it."
            )
        with understood(f"Line {number} of {name!r}"):
            yield document_of(json.loads(line))


def json_file(name: str, lines: io.TextIOWrapper) -> Iterator[Document]:
    """The documents of a list, or the only one."""
    content = lines.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise StorageError(
            f"The file {name!r} is larger than {MOST_JSON >> 20} MiB, which is the most of one "
            "JSON value. Save it as JSON lines, a value per line."
        )
    with understood(f"The file {name!r}"):
        found = json.loads(content)
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        with understood(f"Entry {number} of {name!r}"):
            yield document_of(record)


def table(name: str, lines: io.TextIOWrapper) -> Iterator[Document]:
    """A document per row: its column of texts, or all of it."""
    csv.field_size_limit(LONGEST)
    rows = csv.reader(lines)
    titles = [title.strip().lower() for title in next(rows, [])]
    at = next((titles.index(column) for column in COLUMNS if column in titles), None)
    for row in rows:
        if at is None:
            yield ", ".join(row)
        elif at < len(row):
            yield row[at]


def document_of(record: Any) -> Document:
    """A record's text, or its chat. Raises what `understood` explains."""
    if "messages" not in record:
        return str(record["text"])
    return tuple(Message(str(m["role"]), str(m["content"])) for m in record["messages"])


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Say where a record is none."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{where} is not a document ({str(error)[:80]}). It must be a JSON object with "
            '"text" or "messages".'
        ) from error


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say which file cannot be read."""
    try:
        yield
    except READ_ERRORS as error:
        raise StorageError(
            f"The file {name!r} cannot be read: {error}. Give UTF-8 text, JSON, JSON lines or "
            f"CSV, also packed ({', '.join(PACKED)})."
        ) from error
