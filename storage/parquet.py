"""A column of a Parquet file, read a few rows at a time, so that no file is too large.

DuckDB reads them. A result of it would be held in memory as a whole, so each query asks for the
next rows only; it then reads no others.
"""

import re
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from engine.errors import StorageError
from storage.duck import connection

ROWS = 1024
"""Rows that are in memory at a time. Those of texts have some thousand bytes each."""
TEXT, CHAT = "VARCHAR", re.compile(r"STRUCT\(.*\)\[\]")
"""The types of columns that hold texts, or chats."""


def column(
    path: Path, wanted: str, usual: Sequence[str]
) -> Iterator[tuple[int, str | list[Any] | None, float]]:
    """(number of the row, its value, share of the file that is read by then) of the column
    `wanted`, or of the first of the `usual` ones that it has. Raises StorageError."""
    with connection(
        f"Reading the Parquet file {str(path)!r}",
        lambda why: f"The file {str(path)!r} cannot be read: {why} Get it again if it is damaged.",
    ) as duck:
        duck.execute("SET threads = 1")
        duck.execute("SET enable_external_file_cache = false")
        name = escape(str(path))
        described = duck.execute("DESCRIBE SELECT * FROM read_parquet(?)", [name]).fetchall()
        chosen = choice(path, {row[0]: row[1] for row in described}, wanted, usual)
        counted = duck.execute("SELECT sum(num_rows) FROM parquet_file_metadata(?)", [name])
        total = int(counted.fetchone()[0] or 0)
        own = '"' + chosen.replace('"', '""') + '"'
        query = (
            f"SELECT {own} FROM read_parquet(?, file_row_number = true) "
            "WHERE file_row_number >= ? AND file_row_number < ? ORDER BY file_row_number"
        )
        for start in range(0, total, ROWS):
            for at, (value,) in enumerate(
                duck.execute(query, [name, start, start + ROWS]).fetchall(), start + 1
            ):
                yield at, value, at / total


def choice(path: Path, types: dict[str, str], wanted: str, usual: Sequence[str]) -> str:
    """The column to read. Raises StorageError."""
    by_name = {name.lower(): name for name in types}
    names = [wanted.lower()] if wanted else usual
    found = next((by_name[name] for name in names if name in by_name), None)
    there = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    if found is None:
        missing = repr(wanted) if wanted else f"named {', '.join(usual)}"
        raise StorageError(
            f"The file {str(path)!r} has no column {missing}. Name one with --field: it has {there}"
        )
    if types[found] != TEXT and not CHAT.fullmatch(types[found]):
        raise StorageError(
            f"The column {found!r} of {str(path)!r} holds no texts or chats, but {types[found]}. "
            f"Name another with --field: it has {there}"
        )
    return found
