"""The calibration's store: how far each kind of evidence could be trusted, per owner and model.

It holds counts, no text; what they mean is engine/drafting/calibration.py's. A file may come from
anywhere, so a row that cannot be (a text for a number, an infinite one) is passed over: what it was
about is learned anew.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Any

from engine.types import CalibrationRow
from storage.database import Database


class CalibrationStore:
    """What was learned from one owner's answers by one model."""

    def __init__(self, db: Database, owner: str, fingerprint: str) -> None:
        self._db = db
        self._key = (db.key("owners", owner), db.key("fingerprints", fingerprint))

    def load(self) -> list[CalibrationRow]:
        """All usable rows, in no useful order."""
        rows = self._db.execute_read(
            "SELECT tier, match_length, strength, reached, trusted FROM calibrations "
            "WHERE owner = ? AND fingerprint = ?",
            self._key,
        )
        return [CalibrationRow(*row) for row in rows if _usable(*row)]

    def save(self, rows: Iterable[CalibrationRow]) -> None:
        """Keep these rows in place of what was kept; one transaction."""
        with self._db.write() as handle:
            self.wipe()
            handle.conn.executemany(
                "INSERT INTO calibrations "
                "(owner, fingerprint, tier, match_length, strength, reached, trusted) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                ((*self._key, *row) for row in rows),
            )

    def wipe(self) -> None:
        """Forget everything."""
        with self._db.write() as handle:
            handle.execute(
                "DELETE FROM calibrations WHERE owner = ? AND fingerprint = ?", self._key
            )


def _usable(tier: Any, match_length: Any, strength: Any, reached: Any, trusted: Any) -> bool:
    """Whether the values are what `save` writes; SQLite itself takes any type in any column."""
    if not isinstance(tier, str) or not all(isinstance(n, int) for n in (match_length, strength)):
        return False
    if not all(isinstance(n, int | float) and isfinite(n) for n in (reached, trusted)):
        return False
    return bool(min(match_length, strength, reached, trusted) >= 0)
