"""The stacks' store: what families of models were measured to do, and which stack was chosen.

Both belong to the machine and to no owner. A profile is kept as the JSON mapping that it comes as,
under the fingerprints of its models: one whose files changed is never served what another was
measured to do. What is read is checked: a damaged row counts as none, and is measured or chosen
again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import StorageError
from storage.database import Database


class ProfileKey(NamedTuple):
    """What a profile holds for: fingerprints of the target and of its drafts in their order, the
    sampler's numbers by name, and where the models run, such as "cpu/float32/2"."""

    target: str
    drafts: tuple[str, ...]
    sampling: Mapping[str, float]
    machine: str


class Choice(NamedTuple):
    """The stack to load: draft models as paths or hub ids, the plan's text ("" is as planned)."""

    sources: tuple[str, ...]
    spec: str


class ProfileStore:
    """Profiles of families of models, and the stack that the machine's owner chose per target."""

    MOST_PROFILES = 32
    """So many are kept per target; those saved longest ago go first."""
    MOST_PROFILE_BYTES = 4 * 2**20
    MOST_CHOICE_BYTES = 64 * 2**10
    """What is longer is neither stored nor believed."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def load(self, key: ProfileKey) -> dict[str, Any] | None:
        """The profile's mapping; None when there is none that can be read."""
        rows = self._db.execute_read(
            "SELECT CAST(profile AS BLOB) FROM profiles "
            "WHERE fingerprint = ? AND drafts = ? AND sampling = ? AND machine = ?",
            self._values(key),
        )
        found = _decoded(rows[0][0], self.MOST_PROFILE_BYTES) if rows else None
        return found if isinstance(found, dict) else None

    def save(self, key: ProfileKey, profile: Mapping[str, Any]) -> None:
        """Keep the mapping, of JSON values, in place of what was kept; prune those of the target.

        Raises `StorageError` for one that is too large.
        """
        values = (*self._values(key), _encoded(dict(profile), self.MOST_PROFILE_BYTES))
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO profiles (fingerprint, drafts, sampling, machine, profile) "
                "VALUES (?, ?, ?, ?, ?)",
                values,
            )
            handle.execute(
                "DELETE FROM profiles WHERE fingerprint = ?1 AND id NOT IN "
                "(SELECT id FROM profiles WHERE fingerprint = ?1 ORDER BY id DESC LIMIT ?2)",
                (values[0], self.MOST_PROFILES),
            )

    def forget(self, key: ProfileKey) -> None:
        """Forget this profile, if there is one."""
        with self._db.write() as handle:
            handle.execute(
                "DELETE FROM profiles "
                "WHERE fingerprint = ? AND drafts = ? AND sampling = ? AND machine = ?",
                self._values(key),
            )

    def chosen(self, target: str) -> Choice | None:
        """The stack chosen for the target of that fingerprint; None when there is none."""
        rows = self._db.execute_read(
            "SELECT CAST(sources AS BLOB), CAST(spec AS BLOB) FROM stacks WHERE fingerprint = ?",
            (self._db.key("fingerprints", target),),
        )
        if not rows:
            return None
        sources, spec = (_decoded(blob, self.MOST_CHOICE_BYTES) for blob in rows[0])
        if not isinstance(sources, list) or not all(isinstance(text, str) for text in sources):
            return None
        return Choice(tuple(sources), spec) if isinstance(spec, str) else None

    def choose(self, target: str, sources: Sequence[str], spec: str) -> None:
        """Keep the stack in place of what was chosen for the target.

        Raises `StorageError` for one that is too large.
        """
        most = self.MOST_CHOICE_BYTES
        key = self._db.key("fingerprints", target)
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO stacks (fingerprint, sources, spec) VALUES (?, ?, ?)",
                (key, _encoded(list(sources), most), _encoded(spec, most)),
            )

    def unchoose(self, target: str) -> None:
        """Forget what was chosen for the target."""
        key = self._db.key("fingerprints", target)
        with self._db.write() as handle:
            handle.execute("DELETE FROM stacks WHERE fingerprint = ?", (key,))

    def _values(self, key: ProfileKey) -> tuple[int, str, str, str]:
        """The key as it lies in the table: equal samplers have equal texts."""
        sampling = {name: float(value) for name, value in key.sampling.items()}
        return (
            self._db.key("fingerprints", key.target),
            json.dumps(key.drafts),
            json.dumps(sampling, sort_keys=True),
            key.machine,
        )


def _encoded(value: Any, most: int) -> str:
    """As JSON, which is ASCII: a character is a byte."""
    text = json.dumps(value)
    if len(text) > most:
        raise StorageError(
            f"A stack's description of {len(text):,} bytes is too large to keep: {text[:60]}… "
            f"At most {most:,} bytes are kept. Use fewer models."
        )
    return text


def _decoded(blob: bytes, most: int) -> Any:
    """The value of a JSON text, which may be no JSON, nor even text; None when it has none."""
    try:
        return json.loads(blob) if len(blob) <= most else None
    except (RecursionError, ValueError):
        return None
