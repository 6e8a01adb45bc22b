"""What was deleted goes for good after an hour.

Until then all of it can come back, and with it what it takes to prove the last answer.
"""

import threading
import time
from contextlib import suppress

from app.service.history import Answered, History
from app.service.latest import Latest
from engine.engine import Engine
from engine.errors import StorageError
from storage import deletions
from storage.database import Database


class Trash:
    """See the module's docstring. What a program leaves behind goes at the start of the next."""

    def __init__(self, engine: Engine, database: Database, history: History) -> None:
        self.engine, self.database, self.history = engine, database, history
        self.proofs: Latest[str, tuple[tuple[str, str], Answered]] = Latest()
        """What it takes to prove the last answers of deleted conversations, by their tokens."""
        self.timer: threading.Timer | None = None
        self.lock = threading.Lock()

    def remember(self, token: str, owner: str, conversation_id: str = "") -> None:
        """Something was deleted, perhaps a whole conversation."""
        answered = self.history.last.pop((owner, conversation_id), None)
        if answered is not None:
            self.proofs[token] = (owner, conversation_id), answered
        self.watch()

    def recall(self, token: str) -> None:
        """It is there again."""
        key, answered = self.proofs.pop(token, (None, None))
        if key is not None and answered is not None:
            self.history.last[key] = answered

    def watch(self) -> None:
        """Be there when the oldest deletion is due."""
        oldest = deletions.oldest(self.database)
        with self.lock:
            if self.timer is not None or oldest is None:
                return
            seconds = max(0.0, oldest + deletions.SECONDS - time.time()) + 1.0
            self.timer = threading.Timer(seconds, self.sweep)
            self.timer.daemon = True
            self.timer.start()

    def sweep(self) -> None:
        """Really delete what is due."""
        with self.lock:
            self.timer = None
        with suppress(StorageError):  # The database may be closed, or locked: the next start looks.
            for gone in deletions.purge(self.database, deletions.SECONDS):
                self.proofs.pop(gone.token, None)
                self.history.last.pop(gone[:2], None)
                self.engine.forget(gone.owner, gone.conversation)
            self.watch()
