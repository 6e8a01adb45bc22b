"""Stores data of this machine, which belongs to no owner: costs of forwards, profiles of draft
models and the chosen stacks, and the models and folders that were used.

Rows are checked when they are read. A damaged row is ignored, and measured or chosen again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from engine.errors import StorageError
from engine.types import Costs
from storage.database import Database, from_json, path_bytes, path_text

MOST_NODES = 128
"""No larger tree is drafted."""
Nodes = Annotated[int, Field(ge=0, le=MOST_NODES)]
Forward = Annotated[float, Field(ge=1e-7, le=1e6)]
Cost = Annotated[float, Field(ge=0, le=1e6)]
Time = Annotated[float, Field(ge=0, lt=2**33)]
BELIEVABLE = TypeAdapter(tuple[dict[Nodes, Forward], Cost, Cost, Time, Cost, Cost])
"""Costs as they may be: other ones are measured again."""
MOST_BYTES = 4 * 2**20
"""Longer JSON values are neither stored nor read."""


class CostStore:
    """The cost curve of one model on one device, with one number format and number of threads."""

    def __init__(
        self, db: Database, fingerprint: str, kind: str, device: str, dtype: str, threads: int
    ) -> None:
        self._db = db
        self._key = (db.key("fingerprints", fingerprint), kind, device, dtype, threads)

    def load(self) -> Costs | None:
        rows = self._db.execute_read(
            "SELECT points, node, other, measured, token, row FROM costs WHERE fingerprint = ? "
            "AND kind = ? AND device = ? AND dtype = ? AND threads = ?",
            self._key,
        )
        if not rows:
            return None
        text, *numbers = rows[0]
        try:
            return Costs(*BELIEVABLE.validate_python((from_json(text), *numbers)))
        except ValidationError:
            return None

    def save(self, costs: Costs) -> None:
        self._db.execute_write(
            "INSERT OR REPLACE INTO costs (fingerprint, kind, device, dtype, threads, "
            "points, node, other, measured, token, row) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*self._key, json.dumps(dict(costs.points)), *costs[1:]),
        )


class ProfileKey(NamedTuple):
    """The key of a profile: fingerprints of the target and of its drafts in their order, the
    sampler's numbers by name, and where the models run, such as "cpu/float32/2"."""

    target: str
    drafts: tuple[str, ...]
    sampling: Mapping[str, float]
    machine: str


class Choice(NamedTuple):
    """The stack to load: draft models as paths or hub ids, and the text of its plan; "" stands for
    the plan of the planner."""

    sources: tuple[str, ...]
    spec: str


class ProfileStore:
    """Measured profiles of families of models, and the stack that was chosen for each target.

    A profile is stored as a JSON mapping. Its key contains the fingerprints of its models, so a
    model whose files changed never gets an outdated profile.
    """

    MOST_PROFILES = 32
    """The number of profiles kept per target; the oldest are deleted first."""
    MOST_PROFILE_BYTES = MOST_BYTES
    MOST_CHOICE_BYTES = 64 * 2**10
    """Longer texts are neither stored nor read."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def load(self, key: ProfileKey) -> dict[str, Any] | None:
        rows = self._db.execute_read(
            "SELECT CAST(profile AS BLOB) FROM profiles "
            "WHERE fingerprint = ? AND drafts = ? AND sampling = ? AND machine = ?",
            self._values(key),
        )
        found = _from_blob(rows[0][0]) if rows else None
        return found if isinstance(found, dict) else None

    def save(self, key: ProfileKey, profile: Mapping[str, Any]) -> None:
        """Store the mapping of JSON values, replacing the previous one of this key.

        Raises `StorageError` if the mapping is too large.
        """
        values = (*self._values(key), _limited_json(dict(profile), self.MOST_PROFILE_BYTES))
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

    def chosen(self, target: str) -> Choice | None:
        rows = self._db.execute_read(
            "SELECT CAST(sources AS BLOB), CAST(spec AS BLOB) FROM stacks WHERE fingerprint = ?",
            (self._db.key("fingerprints", target),),
        )
        if not rows:
            return None
        sources, spec = (_from_blob(blob, self.MOST_CHOICE_BYTES) for blob in rows[0])
        if not isinstance(sources, list) or not all(isinstance(text, str) for text in sources):
            return None
        return Choice(tuple(sources), spec) if isinstance(spec, str) else None

    def choose(self, target: str, sources: Sequence[str], spec: str) -> None:
        """Store the stack chosen for the target, replacing the previous one.

        Raises `StorageError` if it is too large.
        """
        most = self.MOST_CHOICE_BYTES
        key = self._db.key("fingerprints", target)
        self._db.execute_write(
            "INSERT OR REPLACE INTO stacks (fingerprint, sources, spec) VALUES (?, ?, ?)",
            (key, _limited_json(list(sources), most), _limited_json(spec, most)),
        )

    def unchoose(self, target: str) -> None:
        key = self._db.key("fingerprints", target)
        self._db.execute_write("DELETE FROM stacks WHERE fingerprint = ?", (key,))

    def _values(self, key: ProfileKey) -> tuple[int, str, str, str]:
        sampling = {name: float(value) for name, value in key.sampling.items()}
        return (
            self._db.key("fingerprints", key.target),
            json.dumps(key.drafts),
            json.dumps(sampling, sort_keys=True),
            key.machine,
        )


class KnownModel(NamedTuple):
    """A model that was loaded: its source as it was named, and the settings that it ran with."""

    source: str
    runtime: Mapping[str, Any]


Kind = Literal["model", "folder"]


class SourceStore:
    """The models that were loaded and the folders that were scanned, the latest first."""

    MOST = 20
    """The number of models, and of folders, that are kept. Those used longest ago are deleted."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def models(self) -> list[KnownModel]:
        return self._rows("model")

    def folders(self) -> list[str]:
        return [known.source for known in self._rows("folder")]

    def add(self, name: str, runtime: Mapping[str, Any], kind: Kind = "model") -> None:
        """Store that a model was loaded with these settings, or that a folder was scanned."""
        with self._db.write() as handle:
            handle.execute(
                "INSERT OR REPLACE INTO sources (kind, name, runtime) VALUES (?, ?, ?)",
                (kind, path_bytes(name), json.dumps(dict(runtime))),
            )
            handle.execute(
                "DELETE FROM sources WHERE kind = ?1 AND id NOT IN "
                "(SELECT id FROM sources WHERE kind = ?1 ORDER BY id DESC LIMIT ?2)",
                (kind, self.MOST),
            )

    def forget(self, name: str, kind: Kind = "model") -> None:
        self._db.execute_write(
            "DELETE FROM sources WHERE kind = ? AND CAST(name AS BLOB) = ?",
            (kind, path_bytes(name)),
        )

    def _rows(self, kind: Kind) -> list[KnownModel]:
        rows = self._db.execute_read(
            "SELECT CAST(name AS BLOB), CAST(runtime AS BLOB) FROM sources WHERE kind = ? "
            "ORDER BY id DESC LIMIT ?",
            (kind, self.MOST),
        )
        return [
            KnownModel(path_text(name), runtime)
            for name, blob in rows
            if isinstance(runtime := _from_blob(blob), dict)
        ]


def _limited_json(value: Any, most: int) -> str:
    text = json.dumps(value)  # ASCII: a character is a byte
    if len(text) > most:
        raise StorageError(
            f"A stack's description of {len(text):,} bytes is too large to keep: {text[:60]}… "
            f"At most {most:,} bytes are kept. Use fewer models."
        )
    return text


def _from_blob(blob: bytes, most: int = MOST_BYTES) -> Any:
    """The value of a JSON text; None if the bytes are not JSON, or not even text."""
    try:
        return json.loads(blob) if len(blob) <= most else None
    except (RecursionError, ValueError):
        return None
