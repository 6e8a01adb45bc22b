"""What a model said to each owner, and how far evidence can be trusted there, as it is stored.

The engine holds it in memory while it is used, and tells what it learns (engine/engine.py). N-grams
and calibration belong together: both come from the same answers, are stored for the same owner and
model, and are wiped as one, here and in the engine. What was learned by an answer that began before
a wipe is not stored after it: nothing comes back.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from app.service.notices import Notices
from engine.backends.base import BackendInfo
from engine.engine import StoredPastAnswers
from engine.types import CalibrationRow
from storage import ngram_files
from storage.calibrations import CalibrationStore
from storage.database import Database
from storage.ngrams import ModelNgrams, Pruning

MODEL_GRAMS = 100_000
SLACK = 1.1
"""The n-grams are cut to their number once they exceed it by this much, not after every answer."""


class PastAnswersStore:
    """The stored pasts of all owners; `notices` tell what failed, `forget(owner)` has the engine
    forget."""

    def __init__(self, database: Database, notices: Notices, forget: Callable[[str], None]) -> None:
        self.database, self.notices, self.forget = database, notices, forget
        self.wiped: Counter[str] = Counter()
        """How often each owner's past was wiped: who reads it before a past is recalled can tell
        whether that past is still there."""
        self.unread: set[tuple[str, str]] = set()
        """Whose calibration could not be read: what is stored must not be replaced by a new one."""
        self.lock = threading.Lock()

    def ngrams(self, owner: str, fingerprint: str) -> ModelNgrams:
        """Where the owner's n-grams with a model are stored."""
        return ModelNgrams(self.database, owner, fingerprint)

    def calibrations(self, owner: str, fingerprint: str) -> CalibrationStore:
        """Where the owner's calibration with a model is stored."""
        return CalibrationStore(self.database, owner, fingerprint)

    def recall(self, owner: str, fingerprint: str) -> StoredPastAnswers:
        """All that is stored of an owner with a model."""
        grams = self.notices.keep(owner, lambda: list(self.ngrams(owner, fingerprint).load())) or ()
        rows = self.notices.keep(owner, lambda: self.calibrations(owner, fingerprint).load())
        if rows is None:
            self.unread.add((owner, fingerprint))
        else:
            self.unread.discard((owner, fingerprint))
        return StoredPastAnswers(grams, tuple(rows or ()))

    def learn(
        self, owner: str, fingerprint: str, wiped: int, grams: Iterable[tuple[int, ...]]
    ) -> None:
        """Store an answer's n-grams, unless the past was wiped since it began."""
        with self.lock:
            if self.wiped[owner] == wiped:
                self.notices.keep(owner, lambda: self.ngrams(owner, fingerprint).learn(grams))

    def save(
        self, owner: str, fingerprint: str, wiped: int, rows: Sequence[CalibrationRow]
    ) -> None:
        """Store the calibration after an answer, unless the past was wiped since it began."""
        with self.lock:
            if self.wiped[owner] == wiped and (owner, fingerprint) not in self.unread:
                self.notices.keep(
                    owner, lambda: self.calibrations(owner, fingerprint).save(list(rows))
                )

    def prune(self, owner: str, fingerprint: str, size: int) -> None:
        """Keep n-grams, of which there are `size`, within their number."""
        if size > MODEL_GRAMS * SLACK:
            with self.lock:
                self.notices.keep(owner, lambda: self.ngrams(owner, fingerprint).prune(MODEL_GRAMS))
                self.forget(owner)

    def saved(self, owner: str, info: BackendInfo) -> str:
        """The n-grams of a model as a file."""
        store = self.ngrams(owner, info.fingerprint)
        held = ngram_files.Held(store.learned(), store.load())
        return ngram_files.write(info.name, info.tokenizer_fingerprint, held)

    def take_in(self, owner: str, info: BackendInfo, content: bytes) -> int:
        """Add the n-grams of a file; how many it held. Raises `StorageError`, with nothing stored,
        for one that cannot be used."""
        tokenizer, vocabulary = info.tokenizer_fingerprint, info.vocabulary_size
        held = ngram_files.read(content, tokenizer, vocabulary)
        with self.lock:
            self.ngrams(owner, info.fingerprint).merge(*held)
            self.forget(owner)
        return len(held.grams)

    def drop(self, owner: str, fingerprint: str, wanted: Pruning) -> int:
        """Forget n-grams that are to go; how many they were."""
        with self.lock:
            dropped = self.ngrams(owner, fingerprint).drop(wanted)
            self.forget(owner)
        return dropped

    def wipe(self, owner: str, fingerprint: str) -> None:
        """Forget the owner's past with a model. An answer under way is not learned any more."""
        with self.lock:
            with self.database.write():
                self.ngrams(owner, fingerprint).wipe()
                self.calibrations(owner, fingerprint).wipe()
            self.forget(owner)
            self.wiped[owner] += 1
