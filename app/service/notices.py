"""What went wrong aside from the work itself: each owner is told it once.

A store that fails costs memory, never an answer: what it says becomes a notice.
"""

from collections.abc import Callable
from typing import TypeVar

from app.service.latest import Latest
from engine.errors import StorageError

T = TypeVar("T")


class Notices:
    """What the owners have not been told yet."""

    def __init__(self) -> None:
        self.waiting: Latest[str, list[str]] = Latest()

    def report(self, owner: str, notice: str) -> None:
        """Remember a notice for the owner, once."""
        waiting = self.waiting.setdefault(owner, [])
        if notice not in waiting:
            waiting.append(notice)

    def take(self, owner: str) -> list[str]:
        """What the owner has not been told yet."""
        return self.waiting.pop(owner, [])

    def keep(self, owner: str, write: Callable[[], T]) -> T | None:
        """Do a write that the answer can do without; a failure becomes a notice."""
        try:
            return write()
        except StorageError as error:
            self.report(owner, str(error))
            return None
