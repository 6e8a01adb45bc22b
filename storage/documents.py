"""Documents in files, for statistics: texts and chats, read piece by piece and never unpacked.

A file may come from anywhere. Nothing of it is written to disk, a packed one may give `MOST_BYTES`
at most unless more is asked for, and a line is never longer than `LONGEST`. So a file that is not
what it seems costs time that can be stopped, and no more. What cannot be read raises StorageError
with the file's name.
"""

import csv
import gzip
import importlib
import io
import json
import lzma
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Any

from engine.errors import StorageError
from engine.types import Document, Message
from storage.parquet import column

PIECE = 1 << 16
"""Characters of a longer text that are one document, about: it is cut where a line ends."""
LONGEST = 16 << 20
"""The most characters of a line."""
MOST_BYTES = 8 << 30
MOST_JSON = 128 << 20
"""The most bytes of a JSON file, which has to be read as a whole."""
CHAT = "messages"
FIELDS = (CHAT, "text", "content")
"""Where a record or a table holds its texts or chats, unless it is said: the first that is there.
Without one a row of CSV is a document."""
PARQUET = ".parquet"
IN_ARCHIVES = (".txt", ".md", ".jsonl", ".json", ".csv")
KINDS = (*IN_ARCHIVES, PARQUET)
PACKED = (".zip", ".xz", ".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,  # a way to pack that Python does not know
    csv.Error,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read: which field of a record or a table holds the document, "" for the first
    of `FIELDS`; and the most bytes that are unpacked from a file, None for any number."""

    field: str = ""
    most_bytes: int | None = MOST_BYTES


USUAL = Reading()


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

    def __init__(self, packed: IO[bytes], most: int | None) -> None:
        super().__init__()
        self.packed, self.most, self.taken = packed, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self.packed.read(len(buffer))
        self.taken += len(found)
        if self.most is not None and self.taken > self.most:
            raise StorageError(
                f"It holds more than {self.most >> 30} GiB, the most that is unpacked. Split it, "
                "or count it with strata-statistics --memory."
            )
        buffer[: len(found)] = found
        return len(found)


def documents(
    path: Path, meter: Meter | None = None, reading: Reading = USUAL
) -> Iterator[Document]:
    """The documents of one file; `meter` counts what was read of it. Raises StorageError, also for
    a file without any."""
    some = False
    for found in found_in(path, meter or Meter(), reading):
        some = True
        yield found
    if not some:
        raise StorageError(
            f"The file {str(path)!r} is empty: it holds no document. Leave it out, or get it again."
        )


def found_in(path: Path, meter: Meter, reading: Reading) -> Iterator[Document]:
    """The documents of one file, if any."""
    kind, packing = path.suffix.lower(), ""
    if kind in PACKED:
        kind, packing = Path(path.stem).suffix.lower(), kind
    if kind == PARQUET:
        if packing:
            raise StorageError(f"The file {str(path)!r} is packed. Unpack it first.")
        yield from in_parquet(path, meter, reading)
        return
    with named(str(path)), io.BufferedReader(Counted(path, meter)) as raw:
        if packing == ".zip":
            yield from in_archive(path, raw, reading)
        else:
            openers: dict[str, Callable[[IO[bytes]], Any]] = {
                ".xz": lzma.open,
                ".gz": gzip.open,
                ".zst": unpacked_zst,
            }
            opened = openers[packing](raw) if packing else raw
            yield from in_stream(str(path), kind, opened, reading)


def unpacked_zst(raw: IO[bytes]) -> Any:
    """What a .zst file holds. Raises StorageError where no library reads it."""
    try:
        zstd: Any = importlib.import_module(ZSTD)
    except ImportError as error:
        raise StorageError(
            f"The file {str(raw.name)!r} is packed with Zstandard, and the package backports.zstd "
            "is not installed. Install it with: pip install backports.zstd"
        ) from error
    return zstd.open(raw)


def in_archive(path: Path, raw: IO[bytes], reading: Reading) -> Iterator[Document]:
    """The documents of all files of an archive whose kind is known."""
    with zipfile.ZipFile(raw) as archive:
        known = [
            info
            for info in archive.infolist()
            if not info.is_dir() and PurePath(info.filename).suffix.lower() in IN_ARCHIVES
        ]
        if not known:
            raise StorageError(
                f"The archive {str(path)!r} holds no file that can be read. It may hold "
                f"{', '.join(IN_ARCHIVES)}."
            )
        for info in known:
            name = f"{path}/{info.filename}"
            if info.flag_bits & 1:
                raise StorageError(f"The file {name!r} has a password. Unpack it first.")
            with named(name), archive.open(info) as opened:
                kind = PurePath(info.filename).suffix.lower()
                yield from in_stream(name, kind, opened, reading)


def in_stream(name: str, kind: str, opened: IO[bytes], reading: Reading) -> Iterator[Document]:
    """The documents of a file of that kind; what is of no known kind is text."""
    limited = io.BufferedReader(Limited(opened, reading.most_bytes))
    lines = io.TextIOWrapper(limited, encoding="utf-8-sig", newline="" if kind == ".csv" else None)
    readers = {".jsonl": json_lines, ".json": json_file, ".csv": table}
    yield from readers.get(kind, text)(name, lines, reading.field)


def in_parquet(path: Path, meter: Meter, reading: Reading) -> Iterator[Document]:
    """The documents of a Parquet file: a column of texts, or of chats."""
    with named(str(path)), path.open("rb"):
        size, before = path.stat().st_size, meter.done
    for number, value, share in column(path, reading.field, FIELDS):
        if value is not None:
            with understood(f"Row {number} of {str(path)!r}"):
                yield text_or_chat(value)
        meter.done = before + int(size * share)


def text(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
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


def json_lines(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
    """A document per line."""
    number = 0
    while line := lines.readline(LONGEST):
        number += 1
        if len(line) == LONGEST:
            raise StorageError(
                f"Line {number} of {name!r} is longer than {LONGEST:,} characters. Split it."
            )
        with understood(f"Line {number} of {name!r}"):
            yield document_of(json.loads(line), field)


def json_file(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
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
            yield document_of(record, field)


def table(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
    """A document per row: its column of texts, or all of it."""
    csv.field_size_limit(LONGEST)
    rows = csv.reader(lines)
    titles = [title.strip().lower() for title in next(rows, [])]
    wanted = [field.lower()] if field else FIELDS[1:]
    at = next((titles.index(column) for column in wanted if column in titles), None)
    if field and at is None:
        raise StorageError(
            f"The file {name!r} has no column {field!r}: it has {', '.join(titles) or 'none'}."
        )
    for row in rows:
        if at is None:
            yield ", ".join(row)
        elif at < len(row):
            yield row[at]


def document_of(record: Any, field: str = "") -> Document:
    """A record's text or chat: that of a field, or of the first of `FIELDS` that it has. Raises
    what `understood` explains."""
    field = field or next((name for name in FIELDS if name in record), "text")
    return text_or_chat(record[field], field == CHAT)


def text_or_chat(value: Any, chat: bool = False) -> Document:
    """What stands in a field. Raises what `understood` explains."""
    if chat or isinstance(value, list):
        return tuple(Message(str(m["role"]), str(m["content"])) for m in value)
    return str(value)


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Say where a record is none."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(
            f"{where} is not a document ({str(error)[:80]}). It must be a JSON object with "
            '"messages", "text" or "content", or what --field names.'
        ) from error


def read_errors() -> tuple[type[Exception], ...]:
    """What reading raises. That of Zstandard is known once its library was needed."""
    zstd = sys.modules.get(ZSTD)
    return (*READ_ERRORS, zstd.ZstdError) if zstd else READ_ERRORS


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say which file cannot be read."""
    try:
        yield
    except read_errors() as error:
        raise StorageError(
            f"The file {name!r} cannot be read: {error}. Get it again if it is damaged. It must be "
            f"UTF-8 text, JSON, JSON lines or CSV, also packed ({', '.join(PACKED)}), or Parquet."
        ) from error
