"""Data for open pages: notices, change tokens, and files to download.

Pages come and go without notice. Tokens cannot be guessed, so anyone who has one may use it.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from engine.engine import Engine
from storage.database import Database, Writes

K = TypeVar("K")
V = TypeVar("V")


class LimitedDict(OrderedDict[K, V]):
    """Keeps the `most` entries that were set last, as browsers come and go without notice."""

    LIMIT = 1_000

    def __init__(self, most: int = LIMIT) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)


QUIET_SECONDS = 600.0
"""After how many seconds a lasting problem of the stores is printed again."""


class Notices:
    """Notices that owners have not seen yet. `say` prints one where the program was started."""

    def __init__(self, database: Database, engine: Engine) -> None:
        self.database, self.engine = database, engine
        self.writes = Writes(database, self.report)
        self.keep, self.tried = self.writes.do, self.writes.tried
        self.waiting: LimitedDict[str, list[str]] = LimitedDict()
        self.say: Callable[[str], None] = lambda notice: None
        self.printed: LimitedDict[str, float] = LimitedDict()

    @property
    def locked(self) -> str:
        """What blocks the writes of this process or the engine's; "" if nothing does."""
        return self.writes.locked or self.engine.state.locked

    def report(self, owner: str, notice: str) -> None:
        """Remember a notice for the owner, once, and print it unless it was printed recently."""
        self.remember(owner, notice)
        now = monotonic()
        if now - self.printed.get(notice, -QUIET_SECONDS) >= QUIET_SECONDS:
            self.printed[notice] = now
            self.say(notice)

    def remember(self, owner: str, notice: str) -> None:
        waiting = self.waiting.setdefault(owner, [])
        if notice not in waiting:
            waiting.append(notice)

    def take(self, owner: str) -> list[str]:
        return self.waiting.pop(owner, [])


WatchKey = tuple[str, str]
"""An owner and one of their conversations, or THE_LIST of all of them."""
THE_LIST = ""
LISTED = 300
"""The most conversations to list, as a page with thousands is slow. The search finds the others."""


class ChangeTokens:
    """Tokens by which pages watch for changes. A token is forgotten after many newer ones."""

    def __init__(self) -> None:
        self.tokens: LimitedDict[WatchKey, str] = LimitedDict()
        self.keys: LimitedDict[str, WatchKey] = LimitedDict()

    def token(self, owner: str, conversation: str) -> str:
        """The token of a conversation, the same for all its pages."""
        key = owner, conversation
        token = self.tokens.get(key) or secrets.token_urlsafe(18)
        self.tokens[key], self.keys[token] = token, key
        return token


class ListRevisions:
    """A number per owner that grows with every change of what their list shows."""

    def __init__(self) -> None:
        self.known: LimitedDict[str, tuple[int, int]] = LimitedDict()
        self.lock = threading.Lock()

    def number(self, owner: str, outline: Callable[[int], object]) -> int:
        """The number for the list as it is now. `outline` returns what the list shows, for at most
        the given number of conversations. Numbers are at least the current time in milliseconds, so
        they also grow if the last number was forgotten."""
        with self.lock:
            digest = hash(repr(outline(LISTED)))
            before, number = self.known.get(owner, (None, 0))
            if digest != before:
                number = max(number + 1, time.time_ns() // 1_000_000)
                self.known[owner] = digest, number
            return number


SECONDS = 60.0
MOST = 64
"""The most files that wait to be downloaded."""


@dataclass(frozen=True, slots=True)
class Download:
    """A file: its name, its media type, and a function that makes it part by part."""

    name: str
    kind: str
    parts: Callable[[], Iterator[bytes]]


class Downloads:
    def __init__(self) -> None:
        self.offered: LimitedDict[str, tuple[float, Download]] = LimitedDict(MOST)
        self.lock = threading.Lock()

    def offer(self, download: Download) -> str:
        token = secrets.token_urlsafe(24)
        with self.lock:
            self.offered[token] = time.monotonic() + SECONDS, download
        return token

    def take(self, token: str) -> Download | None:
        with self.lock:
            until, download = self.offered.pop(token, (0.0, None))
        return download if time.monotonic() < until else None
