"""Presets: what a new conversation of an owner begins with, under a name.

A preset has a system prompt and settings, which need not say everything: what they leave out is as
the model's makers want it. Each owner may choose one for a model, by its source. What is read is
checked: damaged settings count as none, and say so.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import StorageError
from storage.columns import as_text, clean, from_json, to_json
from storage.database import Database

MAX_NAME = 80
MAX_PROMPT = 100_000
MAX_SETTINGS = 65_536
"""Characters of each."""


@dataclass(frozen=True, slots=True)
class StoredPreset:
    """One preset. `damaged` says that its settings could not be read, and are empty."""

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
        """All presets, the oldest first."""
        return self._read("", ())

    def get(self, id: str) -> StoredPreset:
        """One preset."""
        found = self._read(" AND id = ?", (id,))
        if not found:
            raise StorageError(f"There is no preset {id!r} any more. Choose another one.")
        return found[0]

    def add(self, preset: StoredPreset) -> StoredPreset:
        """Keep a preset under a new id, or under the one that it has. Raises `StorageError` for a
        name that is taken, and beyond the most there may be."""
        name = _name(preset.name)
        known = self.list()
        if len(known) >= self.MOST:
            raise StorageError(f"You have {self.MOST} presets, the most. Delete some first.")
        self._check_name(name)
        made = StoredPreset(preset.id or uuid.uuid4().hex, name, *_contents(preset))
        with self._db.write() as handle:
            handle.execute(
                "INSERT INTO presets (id, owner, name, system_prompt, settings, created) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    made.id,
                    self._owner,
                    name,
                    made.system_prompt,
                    to_json(made.settings),
                    time.time(),
                ),
            )
        return made

    def update(self, preset: StoredPreset) -> StoredPreset:
        """Give the preset of that id this name and these contents."""
        name = _name(preset.name)
        self.get(preset.id)
        self._check_name(name, preset.id)
        made = StoredPreset(preset.id, name, *_contents(preset))
        with self._db.write() as handle:
            handle.execute(
                "UPDATE presets SET name = ?, system_prompt = ?, settings = ? "
                "WHERE id = ? AND owner = ?",
                (name, made.system_prompt, to_json(made.settings), preset.id, self._owner),
            )
        return made

    def delete(self, id: str) -> tuple[StoredPreset, Sequence[str]]:
        """Delete a preset; what was deleted, and the models for which it was chosen."""
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
        return gone, [source.decode("utf-8", "surrogateescape") for (source,) in rows]

    # the ones that models begin with

    def chosen(self, source: str) -> str | None:
        """The id of the preset that conversations with a model begin with, None for none."""
        rows = self._db.execute_read(
            "SELECT preset FROM model_presets WHERE owner = ? AND source = ?",
            (self._owner, _source(source)),
        )
        return as_text(rows[0][0]) if rows else None

    def choose(self, source: str, id: str | None) -> None:
        """Have conversations with a model begin with that preset; None for none."""
        with self._db.write() as handle:
            handle.execute(
                "DELETE FROM model_presets WHERE owner = ? AND source = ?",
                (self._owner, _source(source)),
            )
            if id is not None:
                handle.execute(
                    "INSERT INTO model_presets (owner, source, preset) VALUES (?, ?, ?)",
                    (self._owner, _source(source), id),
                )

    def _read(self, which: str, values: tuple[object, ...]) -> Sequence[StoredPreset]:
        rows = self._db.execute_read(
            "SELECT id, name, system_prompt, settings FROM presets WHERE owner = ?"
            f"{which} ORDER BY created, rowid",
            (self._owner, *values),
        )
        return [_preset(row) for row in rows]

    def _check_name(self, name: str, but: str = "") -> None:
        """Raise `StorageError` for a name that another preset has."""
        if any(known.name == name and known.id != but for known in self.list()):
            raise StorageError(
                f"There is a preset {name!r} already. Choose another name, or update that one."
            )


def _preset(row: Sequence[Any]) -> StoredPreset:
    """A row, whatever became of it."""
    id, name, system_prompt, settings = row
    found = from_json(settings)
    damaged = not isinstance(found, dict)
    return StoredPreset(
        as_text(id), as_text(name), as_text(system_prompt), {} if damaged else found, damaged
    )


def _name(name: str) -> str:
    """A name on one line. Raises `StorageError` for none, and for a long one."""
    found = " ".join(clean(name).split())
    if not found:
        raise StorageError("The preset has no name. Write one first.")
    if len(found) > MAX_NAME:
        raise StorageError(
            f"The name of the preset has {len(found):,} characters, and the most is {MAX_NAME}."
        )
    return found


def _contents(preset: StoredPreset) -> tuple[str, Mapping[str, Any]]:
    """System prompt and settings. Raises `StorageError` for what is too long."""
    system_prompt = clean(preset.system_prompt)
    sizes = {"system prompt": (len(system_prompt), MAX_PROMPT)}
    sizes["settings"] = (len(to_json(dict(preset.settings))), MAX_SETTINGS)
    for part, (size, most) in sizes.items():
        if size > most:
            raise StorageError(
                f"The {part} of the preset {preset.name!r} has {size:,} characters, and the most "
                f"is {most:,}. Shorten it."
            )
    return system_prompt, dict(preset.settings)


def _source(source: str) -> bytes:
    """A source as it is stored: a path need not be text."""
    return source.encode("utf-8", "surrogateescape")
