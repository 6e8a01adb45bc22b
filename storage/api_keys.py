"""Keys of other programs, and whether the API is switched on.

A key is shown once, when it is made. Only its SHA-256 is stored, which is enough: a slow hash
protects passwords that people choose, but a key is 256 random bits, which nobody can guess at any
speed. A slow hash would only slow down every request. Comparing two digests takes the same time
wherever they differ.
"""

import hashlib
import hmac
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.errors import SettingError
from engine.text import folded
from storage.database import Database, LockedError, as_seconds, as_text
from storage.drafting import wipe

PREFIX = "sk-strata-"
"""How keys begin, so that people and scanners of leaked secrets recognise them."""
LONGEST_NAME = 60
MOST_KEYS = 100
USED_SECONDS = 60.0
"""A key's last use is stored at most once in this time."""
API = "api"
"""The switch of the whole API."""
KEYLESS = "api"
"""The owner of what is learned from programs without a key. It cannot be a guest, whose names have
a colon."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. `created` and `used` are in seconds since 1970, UTC; `used` is None
    for a key that was never used."""

    id: str
    name: str
    created: float
    used: float | None

    @property
    def owner(self) -> str:
        """The owner of everything that is done with this key."""
        return f"{KEYLESS}-{self.id}"


class ApiKeys:
    def __init__(self, db: Database) -> None:
        self._db = db

    def make(self, name: str) -> tuple[ApiKey, str]:
        """A new key, and its secret, which cannot be recovered later. Raises SettingError."""
        name = " ".join(name.split())
        if not name or len(name) > LONGEST_NAME:
            raise SettingError(
                f"A key cannot be called {name[:LONGEST_NAME]!r}. Give it a name of 1 to "
                f"{LONGEST_NAME} characters, such as that of the program that will use it."
            )
        key = ApiKey(secrets.token_hex(4), name, time.time(), None)
        secret = PREFIX + secrets.token_urlsafe(32)
        with self._db.write() as handle:
            known = handle.execute("SELECT name FROM api_keys").fetchall()
            if folded(name) in {folded(as_text(each)) for (each,) in known}:
                raise SettingError(f"There is a key called {name!r} already. Choose another name.")
            if len(known) >= MOST_KEYS:
                raise SettingError(
                    f"There are {len(known)} keys already. Revoke those that are not used."
                )
            handle.execute(
                "INSERT INTO api_keys (id, name, digest, created) VALUES (?, ?, ?, ?)",
                [key.id, key.name, digest(secret), key.created],
            )
        return key, secret

    def list(self) -> list[ApiKey]:
        rows = self._db.execute_read(
            "SELECT id, name, created, used FROM api_keys ORDER BY created, rowid"
        )
        return [_key(*row) for row in rows]

    def find(self, secret: str) -> ApiKey | None:
        expected, found = digest(secret), None
        rows = self._db.execute_read("SELECT id, name, created, used, digest FROM api_keys")
        for *columns, stored in rows:
            if isinstance(stored, bytes) and hmac.compare_digest(stored, expected):
                found = _key(*columns)
        return found

    def use(self, key: ApiKey) -> None:
        """Store that a key is used now, unless another program holds the file locked."""
        now = time.time()
        if key.used is None or now - key.used >= USED_SECONDS:
            with suppress(LockedError), self._db.at_once(), self._db.write() as handle:
                handle.execute("UPDATE api_keys SET used = ? WHERE id = ?", [now, key.id])

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key at once, and forget what was learned with it.

        Raises SettingError.
        """
        found = next((key for key in self.list() if key.id == key_id), None)
        if found is None:
            raise SettingError(
                f"There is no key {key_id[:LONGEST_NAME]!r}. It may be revoked already."
            )
        with self._db.write() as handle:
            handle.execute("DELETE FROM api_keys WHERE id = ?", [key_id])
            wipe(self._db, found.owner)
        return found

    @property
    def on(self) -> bool:
        """Whether other programs may use the API: the last choice, or no if nobody chose."""
        rows = self._db.execute_read("SELECT is_on FROM switches WHERE name = ?", [API])
        return bool(rows and rows[0][0] == 1)

    def switch(self, on: bool) -> None:
        self._db.execute_write(
            "INSERT INTO switches (name, is_on) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET is_on = excluded.is_on",
            [API, int(on)],
        )


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _key(key_id: Any, name: Any, created: Any, used: Any) -> ApiKey:
    last = float(used) if isinstance(used, int | float) else None
    return ApiKey(str(key_id), str(name), as_seconds(created), last)
