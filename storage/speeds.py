"""How fast models decode plainly on this machine, and what was chosen for it by hand.

Belongs to the machine and to no owner. A model is known by its source and by the version of the
library that ran it. What is read is checked: a damaged row counts as none.
"""

import time
from typing import NamedTuple

from storage.columns import as_text
from storage.database import Database


class MeasuredSpeed(NamedTuple):
    """Tokens per second, 0 where the model did not run, and when that was (seconds since 1970)."""

    tokens_per_second: float
    measured: float


class SpeedStore:
    """The last measurement of each model; and one choice, by its name."""

    FASTEST = 1e7
    END_OF_TIME = 2.0**33
    """What is beyond these is not believed."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def load(self, source: str, library: str) -> MeasuredSpeed | None:
        """What was measured of a model with that version of its library; None where nothing was."""
        rows = self._db.execute_read(
            "SELECT tokens_per_second, measured FROM speeds WHERE source = ? AND library = ?",
            (_key(source), library),
        )
        for speed, measured in rows:
            numbers = isinstance(speed, int | float) and isinstance(measured, int | float)
            if numbers and 0 <= speed <= self.FASTEST and 0 <= measured < self.END_OF_TIME:
                return MeasuredSpeed(float(speed), float(measured))
        return None

    def save(self, source: str, library: str, tokens_per_second: float) -> None:
        """Keep a measurement in place of what was kept of that model."""
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO speeds (source, library, tokens_per_second, measured) "
                "VALUES (?, ?, ?, ?)",
                (_key(source), library, tokens_per_second, time.time()),
            )

    def chosen(self, name: str) -> str:
        """What was chosen under a name, "" for nothing."""
        rows = self._db.execute_read("SELECT value FROM choices WHERE name = ?", [name])
        return as_text(rows[0][0]) if rows else ""

    def choose(self, name: str, value: str) -> None:
        """Keep a choice in place of the one that was kept; "" forgets it."""
        with self._db.write() as handle:
            handle.execute("DELETE FROM choices WHERE name = ?", [name])
            if value:
                handle.execute("INSERT INTO choices (name, value) VALUES (?, ?)", [name, value])


def _key(source: str) -> bytes:
    """A source as it is stored: a path need not be text."""
    return source.encode("utf-8", "surrogateescape")
