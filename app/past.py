"""What the loaded model taught us about each owner: what it says, and how far evidence can go.

N-grams and calibration belong together: both come from the same answers, are stored for the same
owner and model, and are wiped as one. An owner's past is read once and then kept in memory, until
others need the room (app/memory.py). The lock is held over each look at memory with the write that
goes with it, so that an answer that ends while its past is wiped brings nothing back.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from engine.calibration import SIZE, Calibration
from engine.drafters.model import ModelTier
from storage.calibrations import CalibrationStore
from storage.database import Database
from storage.ngrams import ModelNgrams

MODEL_GRAMS = 100_000
SLACK = 1.1
"""The tier is cut to its size once it exceeds it by this much, not after every answer."""


@dataclass(slots=True)
class Past:
    """One owner's past with the loaded model. A calibration that could not be read is not `kept`:
    what is stored must not be replaced by a fresh one. `used` is when it was last asked for."""

    tier: ModelTier
    calibration: Calibration
    kept: bool
    used: float = field(default_factory=monotonic)


class Pasts:
    """The pasts of all owners with one model; `keep(owner, write)` does what may fail."""

    def __init__(
        self,
        database: Database,
        fingerprint: str,
        keep: Callable[[str, Callable[[], Any]], Any],
    ) -> None:
        self.database, self.fingerprint, self.keep = database, fingerprint, keep
        self.known: dict[str, Past] = {}
        self.lock = threading.Lock()

    def ngrams(self, owner: str) -> ModelNgrams:
        """Where the owner's n-grams are stored."""
        return ModelNgrams(self.database, owner, self.fingerprint)

    def calibrations(self, owner: str) -> CalibrationStore:
        """Where the owner's calibration is stored."""
        return CalibrationStore(self.database, owner, self.fingerprint)

    def of(self, owner: str) -> Past:
        """The owner's past, as stored. What it learns of an answer is stored by itself."""
        with self.lock:
            if owner not in self.known:
                grams = self.keep(owner, lambda: self.ngrams(owner).load()) or ()
                rows = self.keep(owner, lambda: self.calibrations(owner).load())

                def learned(fresh: Iterable[tuple[int, ...]]) -> None:
                    with self.lock:
                        if self.known.get(owner) is past:
                            self.keep(owner, lambda: self.ngrams(owner).learn(fresh))

                past = Past(ModelTier(grams, learned), Calibration(rows or ()), rows is not None)
                self.known[owner] = past
            self.known[owner].used = monotonic()
            return self.known[owner]

    @property
    def bytes(self) -> int:
        """About what all pasts take in memory."""
        with self.lock:
            return sum(past.tier.bytes + SIZE for past in self.known.values())

    def ages(self) -> list[tuple[float, str]]:
        """When each past was last asked for, and its owner."""
        with self.lock:
            return [(past.used, owner) for owner, past in self.known.items()]

    def drop(self, owner: str) -> None:
        """Have the owner's past read again when it is next needed. All of it is stored."""
        with self.lock:
            self.known.pop(owner, None)

    def save(self, owner: str, calibration: Calibration) -> None:
        """Store what an answer taught, unless the past that it belongs to was wiped meanwhile."""
        with self.lock:
            past = self.known.get(owner)
            if past is not None and past.kept and past.calibration is calibration:
                self.keep(owner, lambda: self.calibrations(owner).save(calibration.rows()))

    def prune(self, owner: str) -> bool:
        """Keep the n-grams within their number; whether that made the past be read again."""
        with self.lock:
            past = self.known.get(owner)
            if past is None or past.tier.size <= MODEL_GRAMS * SLACK:
                return False
            self.keep(owner, lambda: self.ngrams(owner).prune(MODEL_GRAMS))
            del self.known[owner]
            return True

    def wipe(self, owner: str) -> None:
        """Forget the owner's past. An answer under way is not learned any more."""
        with self.lock:
            with self.database.write():
                self.ngrams(owner).wipe()
                self.calibrations(owner).wipe()
            self.known.pop(owner, None)
