"""Presets: named system prompts and settings with which a new conversation of an owner begins.

Settings that a preset leaves out are those recommended by the model's makers. Each owner may choose
a preset for a model, by the model's source. Damaged settings are read as empty and marked.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import StorageError
from engine.text import folded, well_formed
from storage.database import Database, as_text, from_json, path_bytes, path_text, to_json

MAX_NAME = 80
MAX_PROMPT = 100_000
MAX_SETTINGS = 65_536
"""Characters of each."""


@dataclass(frozen=True, slots=True)
class StoredPreset:
    """One preset. If `damaged`, its settings could not be read and are empty."""

    id: str
    name: str
    system_prompt: str
    settings: Mapping[str, Any]
    damaged: bool = False


class PresetStore:
    """One owner's presets; an id that is not theirs raises `StorageError`."""

    MOST = 200
    """The presets that an owner may keep."""

    def __init__(self, db: Database, owner: str) -> None:
        self._db = db
        self._owner = db.key("owners", owner)

    def list(self) -> Sequence[StoredPreset]:
        rows = self._db.execute_read(
            "SELECT id, name, system_prompt, settings FROM presets WHERE owner = ? "
            "ORDER BY created, rowid",
            (self._owner,),
        )
        found = []
        for id, name, system_prompt, settings in rows:
            values = from_json(settings)
            damaged = not isinstance(values, dict)
            texts = as_text(id), as_text(name), as_text(system_prompt)
            found.append(StoredPreset(*texts, {} if damaged else values, damaged))
        return found

    def get(self, id: str) -> StoredPreset:
        for preset in self.list():
            if preset.id == id:
                return preset
        raise StorageError(f"There is no preset {id!r} any more. Choose another one.")

    def add(self, preset: StoredPreset) -> StoredPreset:
        """Store a preset under its id, or under a new id if that is empty. Raises `StorageError`
        for a name that is taken, and if the owner has `MOST` presets."""
        if len(self.list()) >= self.MOST:
            raise StorageError(f"You have {self.MOST} presets, the most. Delete some first.")
        made = self._checked(preset, preset.id or uuid.uuid4().hex)
        row = made.id, self._owner, made.name, made.system_prompt, to_json(made.settings)
        self._db.execute_write(
            "INSERT INTO presets (id, owner, name, system_prompt, settings, created) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (*row, time.time()),
        )
        return made

    def update(self, preset: StoredPreset) -> StoredPreset:
        self.get(preset.id)
        made = self._checked(preset, preset.id)
        self._db.execute_write(
            "UPDATE presets SET name = ?, system_prompt = ?, settings = ? "
            "WHERE id = ? AND owner = ?",
            (made.name, made.system_prompt, to_json(made.settings), made.id, self._owner),
        )
        return made

    def delete(self, id: str) -> tuple[StoredPreset, Sequence[str]]:
        """Delete a preset. Returns it, and the sources of the models for which it was chosen."""
        gone = self.get(id)
        with self._db.write() as handle:
            rows = handle.execute(
                "SELECT CAST(source AS BLOB) FROM model_presets WHERE owner = ? AND preset = ?",
                (self._owner, id),
            ).fetchall()
            handle.execute(
                "DELETE FROM model_presets WHERE owner = ? AND preset = ?", (self._owner, id)
            )
            handle.execute("DELETE FROM presets WHERE owner = ? AND id = ?", (self._owner, id))
        return gone, [path_text(source) for (source,) in rows]

    def chosen(self, source: str) -> str | None:
        """The id of the preset with which conversations with a model begin, or None."""
        rows = self._db.execute_read(
            "SELECT preset FROM model_presets WHERE owner = ? AND source = ?",
            (self._owner, path_bytes(source)),
        )
        return as_text(rows[0][0]) if rows else None

    def choose(self, source: str, id: str | None) -> None:
        query = "DELETE FROM model_presets WHERE owner = ? AND source = ?"
        key = self._owner, path_bytes(source)
        if id is not None:
            query = "INSERT OR REPLACE INTO model_presets (owner, source, preset) VALUES (?, ?, ?)"
        self._db.execute_write(query, key if id is None else (*key, id))

    def _checked(self, preset: StoredPreset, id: str) -> StoredPreset:
        """The preset as it will be stored. Raises `StorageError` for a name that is empty, too long
        or taken, and for contents that are too long."""
        name = " ".join(well_formed(preset.name).split())
        if not name:
            raise StorageError("The preset has no name. Write one first.")
        if len(name) > MAX_NAME:
            raise StorageError(
                f"The name of the preset has {len(name):,} characters, and the most is {MAX_NAME}."
            )
        if any(folded(known.name) == folded(name) and known.id != id for known in self.list()):
            raise StorageError(
                f"There is a preset {name!r} already. Choose another name, or update that one."
            )
        made = StoredPreset(id, name, well_formed(preset.system_prompt), dict(preset.settings))
        for part, size, most in (
            ("system prompt", len(made.system_prompt), MAX_PROMPT),
            ("settings", len(to_json(made.settings)), MAX_SETTINGS),
        ):
            if size > most:
                raise StorageError(
                    f"The {part} of the preset {preset.name!r} has {size:,} characters, and the "
                    f"most is {most:,}. Shorten it."
                )
        return made
