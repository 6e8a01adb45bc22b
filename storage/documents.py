"""Reads documents for statistics, texts and chats, from files, piece by piece and without
unpacking. Parquet files are read by DuckDB, if it is installed.

A file may come from anywhere. Nothing of it is written to disk, a packed file may unpack to
`MOST_BYTES` at most unless the caller allows more, and a line is never longer than `LONGEST`. A
malicious file can therefore only cost time, and reading can be stopped. A file that cannot be read
raises StorageError with its name.
"""

import csv
import gzip
import importlib
import io
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

from engine.errors import StorageError, first_line
from engine.text import read_json
from engine.types import Document, Message

PIECE = 1 << 16
"""A longer text is cut at ends of lines into documents of about so many characters."""
LONGEST = 16 << 20
"""The most characters of a line."""
MOST_BYTES = 8 << 30
MOST_JSON = 128 << 20
"""The most bytes of a JSON file, which has to be read as a whole."""
CHAT = "messages"
FIELDS = (CHAT, "text", "content")
"""The fields or columns that may hold texts or chats; the first one found is used. Without one, a
row of CSV is a document."""
PARQUET, TABLES = ".parquet", (".csv", ".tsv")
TOOLS = ("tool", "function")
"""The roles of messages that are no part of what people and models say to each other."""
DELIMITERS = ",;\t|"
"""The characters that may separate the columns of a table."""
IN_ARCHIVES = (".txt", ".md", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
KINDS = (*IN_ARCHIVES, PARQUET)
PACKED = (".zip", ".xz", ".gz", ".zst")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
ROWS = 1024
"""Rows of a Parquet file that are in memory at a time. Those of texts have some thousand bytes."""
TEXT_TYPE, CHAT_TYPE = "VARCHAR", re.compile(r"STRUCT\(.*\)\[\]")
"""The types of Parquet columns that hold texts, or chats."""
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    NotImplementedError,  # a compression method that Python does not know
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
    """How many bytes of files were read, counted before they are unpacked."""

    done: int = 0


class Counted(io.FileIO):
    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self.meter = meter

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self.meter.done += count
        return count


class Limited(io.RawIOBase):
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


def batches(found: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for each in found:
        batch.append(each)
        size += len(each) if isinstance(each, str) else sum(len(m.content) for m in each)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def found_in(path: Path, meter: Meter, reading: Reading) -> Iterator[Document]:
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
    """The content of a .zst file. Raises StorageError where no library reads it."""
    try:
        zstd: Any = importlib.import_module(ZSTD)
    except ImportError as error:
        raise StorageError(
            f"The file {str(raw.name)!r} is packed with Zstandard, and the package backports.zstd "
            "is not installed. Install it with: pip install backports.zstd"
        ) from error
    return zstd.open(raw)


def in_archive(path: Path, raw: IO[bytes], reading: Reading) -> Iterator[Document]:
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
    limited = io.BufferedReader(Limited(opened, reading.most_bytes))
    lines = io.TextIOWrapper(limited, encoding="utf-8-sig", newline="" if kind in TABLES else None)
    readers = {".jsonl": json_lines, ".ndjson": json_lines, ".json": json_file}
    readers |= dict.fromkeys(TABLES, table)
    yield from readers.get(kind, text)(name, lines, reading.field)


def in_parquet(path: Path, meter: Meter, reading: Reading) -> Iterator[Document]:
    """The documents of a column, a few rows at a time, so that a file may have any size. DuckDB
    would hold a whole result in memory, so each query requests the next rows by their numbers."""
    with named(str(path)), path.open("rb"):
        size, before = path.stat().st_size, meter.done
    with connection(
        f"Reading the Parquet file {str(path)!r}",
        lambda why: f"The file {str(path)!r} cannot be read: {why} Get it again if it is damaged.",
    ) as duck:
        duck.execute("SET threads = 1")
        duck.execute("SET enable_external_file_cache = false")
        name = escape(str(path))
        described = duck.execute("DESCRIBE SELECT * FROM read_parquet(?)", [name]).fetchall()
        chosen = column(path, {row[0]: row[1] for row in described}, reading.field)
        counted = duck.execute("SELECT sum(num_rows) FROM parquet_file_metadata(?)", [name])
        total = int(counted.fetchone()[0] or 0)
        own = '"' + chosen.replace('"', '""') + '"'
        query = (
            f"SELECT {own} FROM read_parquet(?, file_row_number = true) "
            "WHERE file_row_number >= ? AND file_row_number < ? ORDER BY file_row_number"
        )
        for start in range(0, total, ROWS):
            rows = duck.execute(query, [name, start, start + ROWS]).fetchall()
            for number, (value,) in enumerate(rows, start + 1):
                with understood(f"Row {number} of {str(path)!r}"):
                    found = text_or_chat(value)
                if found is not None:
                    yield found
                meter.done = before + size * number // total


def column(path: Path, types: dict[str, str], requested: str) -> str:
    """The column to read: the requested one, or the first of `FIELDS`. Raises StorageError."""
    by_name = {name.lower(): name for name in types}
    names = [requested.lower()] if requested else FIELDS
    found = next((by_name[name] for name in names if name in by_name), None)
    columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    if found is None:
        missing = repr(requested) if requested else f"named {', '.join(FIELDS)}"
        raise StorageError(
            f"The file {str(path)!r} has no column {missing}. Name one with --field: it has "
            f"{columns}"
        )
    if types[found] != TEXT_TYPE and not CHAT_TYPE.fullmatch(types[found]):
        raise StorageError(
            f"The column {found!r} of {str(path)!r} holds no texts or chats, but {types[found]}. "
            f"Name another with --field: it has {columns}"
        )
    return found


@contextmanager
def connection(purpose: str, failure: Callable[[str], str]) -> Iterator[Any]:
    """A connection in memory. Raises StorageError where DuckDB is not installed, and for what goes
    wrong while it is used; `failure` turns DuckDB's message into ours."""
    try:
        import duckdb
    except ImportError as error:
        raise StorageError(
            f"{purpose} needs DuckDB, which is not installed. Install it with: pip install duckdb"
        ) from error
    made = duckdb.connect()
    made.execute("SET enable_progress_bar = false")
    try:
        yield made
    except duckdb.Error as error:
        raise StorageError(failure(first_line(error))) from error
    finally:
        made.close()


def quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def text(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
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
    number = 0
    while line := lines.readline(LONGEST):
        number += 1
        if len(line) == LONGEST:
            raise StorageError(
                f"Line {number} of {name!r} is longer than {LONGEST:,} characters. Split it."
            )
        if line.isspace():
            continue
        with understood(f"Line {number} of {name!r}"):
            found = document_of(read_json(line), field)
        if found is not None:
            yield found


def json_file(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
    content = lines.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise StorageError(
            f"The file {name!r} is larger than {MOST_JSON >> 20} MiB, the limit for one "
            "JSON value. Save it as JSON lines, a value per line."
        )
    with understood(f"The file {name!r}"):
        found = read_json(content)
    for number, record in enumerate(found if isinstance(found, list) else [found], 1):
        with understood(f"Entry {number} of {name!r}"):
            document = document_of(record, field)
        if document is not None:
            yield document


def table(name: str, lines: io.TextIOWrapper, field: str) -> Iterator[Document]:
    csv.field_size_limit(LONGEST)
    names = [field.lower()] if field else FIELDS[1:]
    first = lines.readline(LONGEST)
    delimiter = delimiter_of(first, names)
    if first.rstrip("\r\n") == f"sep={delimiter}":
        first = lines.readline(LONGEST)  # as Excel writes it
    rows = csv.reader(chain([first], lines), delimiter=delimiter)
    titles = titles_of(next(rows, []))
    at = next((titles.index(column) for column in names if column in titles), None)
    if field and at is None:
        raise StorageError(
            f"The file {name!r} has no column {field!r}: it has {', '.join(titles) or 'none'}."
        )
    for row in rows:
        if at is None:
            yield ", ".join(row)
        elif at < len(row):
            yield row[at]


def titles_of(row: Sequence[str]) -> list[str]:
    return [title.strip().lower() for title in row]


def delimiter_of(first: str, names: Sequence[str]) -> str:
    """The character that separates the columns of a table: the one that the first line declares,
    the one that yields a column of texts, or the most frequent one."""
    if (declared := re.fullmatch(rf"sep=([{DELIMITERS}])[\r\n]*", first)) is not None:
        return declared[1]
    for delimiter in DELIMITERS:
        if set(names) & {*titles_of(next(csv.reader([first], delimiter=delimiter), []))}:
            return delimiter
    return max(DELIMITERS, key=first.count)


def document_of(record: Any, field: str = "") -> Document | None:
    """A record's text or chat, from `field` or the first of `FIELDS` that it has; None if it holds
    none. Raises the errors that `understood` explains."""
    names = [field] if field else [name for name in FIELDS if name in record] or ["text"]
    name = next((name for name in names if record[name] is not None), names[0])
    return text_or_chat(record[name], name == CHAT)


def text_or_chat(value: Any, chat: bool = False) -> Document | None:
    """The text or chat in a field, None for none. Raises the errors that `understood` explains."""
    if value is None:
        return None
    if chat or isinstance(value, list) and all("role" in item for item in value):
        return chat_of(value) or None
    return text_of(value) if isinstance(value, str) else text_of(value) or None


def chat_of(messages: Sequence[Any]) -> tuple[Message, ...]:
    """The messages that have a text. Calls of tools, and what tools returned, are left out."""
    turns = list[Message]()
    for each in messages:
        calls = each.get("tool_calls") or each.get("function_call")
        text = text_of(each.get("content") if calls else each["content"])
        role = each["role"]
        if not isinstance(role, str):
            raise TypeError(f"its role is {role!r}")
        if text and role not in TOOLS:
            turns.append(Message(role, text))
    return tuple(turns)


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text, nothing, or a list of parts. Raises
    TypeError for anything else."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(map(text_of_part, content))
    if not isinstance(content, str):
        raise TypeError(f"its text is {content!r}")
    return content


def text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if "type" in part else part["text"]
    return text if isinstance(text, str) else ""


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Turn errors about an invalid record into a StorageError that names its place."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(
            f"{where} is not a document ({str(error)[:80]}). It must be a JSON object with "
            '"messages", "text" or "content", or what --field names.'
        ) from error


def read_errors() -> tuple[type[Exception], ...]:
    """The exceptions that reading raises. Zstandard's exists only once its library is imported."""
    zstd = sys.modules.get(ZSTD)
    return (*READ_ERRORS, zstd.ZstdError) if zstd else READ_ERRORS


@contextmanager
def named(name: str) -> Iterator[None]:
    """Turn errors of reading into a StorageError that names the file."""
    try:
        yield
    except read_errors() as error:
        raise StorageError(
            f"The file {name!r} cannot be read: {error}. Get it again if it is damaged. It must be "
            f"UTF-8 text, JSON, JSON lines or CSV, also packed ({', '.join(PACKED)}), or Parquet."
        ) from error
