"""Files for a browser to save, made while they are sent: each is offered once, for a short time.

Whoever knows a file's token may have it. Nobody can guess one, so it also says that they may.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.service.latest import Latest

SECONDS = 60.0
MOST = 64
"""Files that wait to be fetched."""


@dataclass(frozen=True, slots=True)
class Download:
    """A file: how it is called, what it is, and what makes it, part by part."""

    name: str
    kind: str
    parts: Callable[[], Iterator[bytes]]


class Downloads:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.offered: Latest[str, tuple[float, Download]] = Latest(MOST)
        self.lock = threading.Lock()

    def offer(self, download: Download) -> str:
        """The token by which a file can be had."""
        token = secrets.token_urlsafe(24)
        with self.lock:
            self.offered[token] = time.monotonic() + SECONDS, download
        return token

    def take(self, token: str) -> Download | None:
        """The file with this token, if it is still offered; no one gets it again."""
        with self.lock:
            until, download = self.offered.pop(token, (0.0, None))
        return download if time.monotonic() < until else None
