"""What a server has learned, kept from one start to the next: past answers, and what evidence is
worth.

All workers read it when they start, before any of them writes. One alone writes, behind the steps.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from app.vllm.attached import Attached
from engine.drafting.calibration import Calibration
from engine.types import CalibrationRow, Gram
from storage.calibrations import CalibrationStore
from storage.database import Database
from storage.ngrams import ModelNgrams

OWNER = "server"
"""All who ask a server share what it has learned."""
MOST = 400_000
"""N-grams that are kept, some thousand answers; more are dropped when the server starts."""
EVERY = 8
"""Answers after which what evidence is worth is kept again."""


class Learned:
    """The store of one worker; `writes` is whether it is the one that keeps what is learned."""

    def __init__(self, attached: Attached, writes: bool) -> None:
        self.attached, self.path = attached, attached.learned
        self.writes = writes and self.path is not None
        self.answers = 0
        self.database: Database | None = None
        self.thread = ThreadPoolExecutor(1, "strata-learned") if self.writes else None

    def grams(self) -> list[Gram]:
        """The n-grams of past answers."""
        if self.path is None:
            return []
        with closing(Database(self.path)) as database:
            return ModelNgrams(database, OWNER, self.attached.model).load()

    def calibration(self) -> list[CalibrationRow]:
        """What evidence was worth."""
        if self.path is None:
            return []
        with closing(Database(self.path)) as database:
            return CalibrationStore(database, OWNER, self.attached.model).load()

    def prepare(self) -> None:
        """Make the file, and drop what is too much: before the workers start."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(Database(self.path)) as database:
                ModelNgrams(database, OWNER, self.attached.model).prune(MOST)

    def keep(self, grams: Iterable[tuple[int, ...]], calibration: Calibration) -> None:
        """Keep what an answer taught, some time soon."""
        if self.thread is not None:
            rows = calibration.rows() if self.answers % EVERY == 0 else []
            self.answers += 1
            self.thread.submit(self.save, list(grams), rows)

    def save(self, grams: list[tuple[int, ...]], rows: list[CalibrationRow]) -> None:
        """Keep it now."""
        if self.database is None:
            self.database = Database(self.path)
        ModelNgrams(self.database, OWNER, self.attached.model).learn(grams)
        if rows:
            CalibrationStore(self.database, OWNER, self.attached.model).save(rows)
