"""The cost curves' store: what forwards of a model cost, for each way in which it can be run.

A curve belongs to the machine and to no owner. What is read is checked: a damaged curve counts as
none, and is measured again.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from storage.database import Database


class StoredCosts(NamedTuple):
    """`points` maps drafted nodes to seconds of a forward, `node` and `other` are seconds too.

    `measured` says when, in seconds since 1970; later corrections do not change it. Each token in
    the cache adds `token` seconds to a forward, and `row` more for every node; zeros are not known.
    """

    points: dict[int, float]
    node: float
    other: float
    measured: float
    token: float = 0.0
    row: float = 0.0


class CostStore:
    """The curve of one model on one device, with one number format and number of threads."""

    MOST_NODES = 128
    SHORTEST, LONGEST = 1e-7, 1e6
    END_OF_TIME = 2.0**33
    """What is beyond these is not believed: no such tree is drafted, no forward measures so."""

    def __init__(
        self, db: Database, fingerprint: str, kind: str, device: str, dtype: str, threads: int
    ) -> None:
        self._db = db
        self._key = (db.key("fingerprints", fingerprint), kind, device, dtype, threads)

    def load(self) -> StoredCosts | None:
        """The curve; None when there is none that can be used."""
        rows = self._db.execute_read(
            "SELECT points, node, other, measured, token, row FROM costs WHERE fingerprint = ? "
            "AND kind = ? AND device = ? AND dtype = ? AND threads = ?",
            self._key,
        )
        if not rows:
            return None
        text, *numbers = rows[0]
        try:
            points = {int(nodes): float(value) for nodes, value in json.loads(text).items()}
            node, other, measured, token, row = map(float, numbers)
        except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
            return None
        believable = (
            all(0 <= nodes <= self.MOST_NODES for nodes in points)
            and all(self.SHORTEST <= value <= self.LONGEST for value in points.values())
            and all(0 <= value <= self.LONGEST for value in (node, other, token, row))
            and 0 <= measured < self.END_OF_TIME
        )
        stored = StoredCosts(points, node, other, measured, token, row)
        return stored if believable else None

    def save(
        self,
        points: Mapping[int, float],
        node: float,
        other: float,
        measured: float,
        token: float = 0.0,
        row: float = 0.0,
    ) -> None:
        """Keep the curve in place of what was kept."""
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO costs (fingerprint, kind, device, dtype, threads, "
                "points, node, other, measured, token, row) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*self._key, json.dumps(dict(points)), node, other, measured, token, row),
            )
