"""Keys of other programs, and whether these may ask at all.

A key is shown once, when it is made. Stored is its SHA-256, which is enough: a slow hash protects
words that people choose, and a key is 256 random bits, which nobody can guess at any speed. A slow
one would only slow down every request. Comparisons take the same time wherever two digests differ.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Any

from engine.errors import SettingError
from storage.database import Database

PREFIX = "sk-strata-"
"""How keys begin, so that people and scanners of leaked secrets recognise them."""
LONGEST_NAME = 60
MOST_KEYS = 100
USED_SECONDS = 60.0
"""A key's last use is stored once in so many seconds."""
API = "api"
"""The switch of the whole API."""
KEYLESS = "api"
"""The owner of what programs without a key teach. No guest can be it: theirs have a colon."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. `created` and `used` are in seconds since 1970, UTC; `used` is None
    for one that never was."""

    id: str
    name: str
    created: float
    used: float | None

    @property
    def owner(self) -> str:
        """Whose it is what this key is used for: nobody else's."""
        return f"{KEYLESS}-{self.id}"


class ApiKeys:
    """See the module's docstring."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def make(self, name: str) -> tuple[ApiKey, str]:
        """A new key, and its secret, which can never be had again. Raises SettingError."""
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
            if (name,) in known:
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
        """All keys, in the order in which they were made."""
        rows = self._db.execute_read(
            "SELECT id, name, created, used FROM api_keys ORDER BY created, rowid"
        )
        return [_key(*row) for row in rows]

    def find(self, secret: str) -> ApiKey | None:
        """The key of this secret; None where there is none."""
        wanted, found = digest(secret), None
        rows = self._db.execute_read("SELECT id, name, created, used, digest FROM api_keys")
        for *columns, stored in rows:
            if isinstance(stored, bytes) and hmac.compare_digest(stored, wanted):
                found = _key(*columns)
        return found

    def use(self, key: ApiKey) -> None:
        """Note that a key is used now."""
        now = time.time()
        if key.used is None or now - key.used >= USED_SECONDS:
            with self._db.write() as handle:
                handle.execute("UPDATE api_keys SET used = ? WHERE id = ?", [now, key.id])

    def revoke(self, key_id: str) -> ApiKey:
        """Take a key back: it opens nothing from now on, and what it taught is forgotten.

        Raises SettingError.
        """
        found = next((key for key in self.list() if key.id == key_id), None)
        if found is None:
            raise SettingError(
                f"There is no key {key_id[:LONGEST_NAME]!r}. It may be revoked already."
            )
        with self._db.write() as handle:
            handle.execute("DELETE FROM api_keys WHERE id = ?", [key_id])
            for table in ("answers", "calibrations"):  # the n-grams go with the answers
                handle.execute(
                    f"DELETE FROM {table} WHERE owner = (SELECT id FROM owners WHERE name = ?)",
                    [found.owner],
                )
        return found

    @property
    def on(self) -> bool:
        """Whether other programs may ask, as it was chosen last; not before it was chosen."""
        rows = self._db.execute_read("SELECT is_on FROM switches WHERE name = ?", [API])
        return bool(rows and rows[0][0] == 1)

    def switch(self, on: bool) -> None:
        """Choose it."""
        with self._db.write() as handle:
            handle.execute(
                "INSERT INTO switches (name, is_on) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET is_on = excluded.is_on",
                [API, int(on)],
            )


def digest(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _key(key_id: Any, name: Any, created: Any, used: Any) -> ApiKey:
    """A key from its row, whatever a damaged file says."""
    known = isinstance(used, int | float)
    made = float(created) if isinstance(created, int | float) else 0.0
    return ApiKey(str(key_id), str(name), made, float(used) if known else None)
