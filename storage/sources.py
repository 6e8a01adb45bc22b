"""The models' store: which were loaded on this machine, how they were run, which folders were
scanned.

Both belong to the machine and to no owner. What is read is checked: a damaged row counts as none.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from storage.database import Database


class Known(NamedTuple):
    """A model that was loaded: its source as it was named, and the settings that it ran with."""

    source: str
    runtime: Mapping[str, Any]


class SourceStore:
    """Sources of models and folders with some, those used last first."""

    MOST = 20
    """So many models, and so many folders, are kept; those used longest ago go first."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, source: str, runtime: Mapping[str, Any]) -> None:
        """Remember that a model was loaded, with what settings."""
        self._put("model", source, dict(runtime))

    def models(self) -> list[Known]:
        """The models that were loaded."""
        return [Known(name, runtime) for name, runtime in self._rows("model")]

    def forget(self, source: str) -> None:
        """Forget a model."""
        self._drop("model", source)

    def forget_folder(self, folder: str) -> None:
        """Forget a folder."""
        self._drop("folder", folder)

    def add_folder(self, folder: str) -> None:
        """Remember a folder that holds models."""
        self._put("folder", folder, {})

    def folders(self) -> list[str]:
        """The folders that were scanned."""
        return [name for name, _ in self._rows("folder")]

    def _put(self, kind: str, name: str, runtime: Mapping[str, Any]) -> None:
        """Make it the newest of its kind, and forget the oldest."""
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO sources (kind, name, runtime) VALUES (?, ?, ?)",
                (kind, name.encode("utf-8", "surrogateescape"), json.dumps(runtime)),
            )
            handle.execute(
                "DELETE FROM sources WHERE kind = ?1 AND id NOT IN "
                "(SELECT id FROM sources WHERE kind = ?1 ORDER BY id DESC LIMIT ?2)",
                (kind, self.MOST),
            )

    def _drop(self, kind: str, name: str) -> None:
        """Forget one of a kind."""
        with self._db.write() as handle:
            handle.execute(
                "DELETE FROM sources WHERE kind = ? AND CAST(name AS BLOB) = ?",
                (kind, name.encode("utf-8", "surrogateescape")),
            )

    def _rows(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Names and settings of a kind, the newest first."""
        rows = self._db.execute_read(
            "SELECT CAST(name AS BLOB), CAST(runtime AS BLOB) FROM sources WHERE kind = ? "
            "ORDER BY id DESC LIMIT ?",
            (kind, self.MOST),
        )
        found = []
        for name, blob in rows:
            try:
                runtime = json.loads(blob)
            except (RecursionError, ValueError):
                continue
            if isinstance(runtime, dict):
                found.append((name.decode("utf-8", "surrogateescape"), runtime))
        return found
