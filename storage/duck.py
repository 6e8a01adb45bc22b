"""DuckDB, where it is installed: connections that say what went wrong in our words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import StorageError, first_line


@contextmanager
def connection(purpose: str, failure: Callable[[str], str]) -> Iterator[Any]:
    """A connection in memory. Raises StorageError where DuckDB is not installed, and for what goes
    wrong while it is used: `failure` puts that in words."""
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
    """A path within a string of SQL."""
    return str(path).replace("'", "''")
