"""Presets: what new conversations begin with. Some come along, and each owner has their own.

A preset may leave settings out. These are then as the makers of the loaded model want them, so one
preset fits every model. What was deleted can be taken back until the program ends.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.latest import Latest
from app.service.preferences import DEFAULT_TOKENS, Preferences
from engine.errors import SettingError, StorageError, StrataError
from engine.settings import Generation
from storage.database import Database
from storage.presets import MAX_NAME, PresetStore, StoredPreset

FORMAT, VERSION = "strata-presets", 1
LARGEST = 4 << 20
"""Bytes of a file with presets."""
BUILT_IN = "built-in:"
"""How the ids of presets begin that come along."""


def built_in(name: str, system_prompt: str, **generation: Any) -> StoredPreset:
    """A preset that comes along. What it does not say is up to the model's makers."""
    settings = {"generation": generation} if generation else {}
    return StoredPreset(f"{BUILT_IN}{name.lower()}", name, system_prompt, settings)


PRESETS = (
    built_in(
        "Plain answers",
        "Answer in the first sentence. Then explain, in short sentences and everyday words, only "
        "as much as the question needs. If you do not know something, say so.",
    ),
    built_in(
        "Patient teacher",
        "Explain so that a curious beginner can follow: one idea after the other, with a small "
        "example for each. End with one question that checks whether the idea has arrived.",
        max_tokens=768,
    ),
    built_in(
        "Programmer",
        "You write code for people who will maintain it. Give working code first, in one block "
        "that names its language, then say in two sentences how it works. Handle errors. Do not "
        "invent functions that the library does not have.",
        sampling={"temperature": 0.2},
        max_tokens=1024,
    ),
    built_in(
        "Proofreader",
        "Correct the spelling, grammar and punctuation of the text you are given. Keep its meaning,"
        " tone and formatting. Give the corrected text, then a short list of what you changed.",
        sampling={"temperature": 0.0},
        max_tokens=1024,
        thinking=False,
    ),
    built_in(
        "Summary",
        "Sum up the text you are given: one sentence that says what it is about, then at most five "
        "points in its own words and order. Add nothing that the text does not say.",
        sampling={"temperature": 0.0},
        thinking=False,
    ),
    built_in(
        "Storyteller",
        "Tell stories with a clear beginning, a turn and an end. Show places and people through "
        "what they do. Use plain words, and let someone speak in every scene.",
        sampling={"temperature": 1.0, "min_p": 0.05},
        max_tokens=1024,
        thinking=False,
    ),
    built_in(
        "Second opinion",
        "Look for the weakest point of the plan or argument you are given, and name it first. Then "
        "say what would have to be true for it to hold, and what you would try instead.",
        max_tokens=768,
        thinking=True,
    ),
)
"""Those that come along."""


class Presets:
    """See the module's docstring."""

    def __init__(self, database: Database, current: Current, stacks: Stacks) -> None:
        self.database, self.current, self.stacks = database, current, stacks
        self.deleted: Latest[tuple[str, str], tuple[StoredPreset, Sequence[str]]] = Latest()
        """What can be taken back, by its owner and its token."""

    def store(self, owner: str) -> PresetStore:
        """The owner's presets."""
        return PresetStore(self.database, owner)

    def list(self, owner: str) -> Sequence[StoredPreset]:
        """Those that come along, and the owner's."""
        return [*PRESETS, *self.store(owner).list()]

    def get(self, owner: str, id: str) -> StoredPreset:
        """One of them. Raises StorageError."""
        known = next((preset for preset in PRESETS if preset.id == id), None)
        return known or self.store(owner).get(id)

    # what they mean

    @property
    def makers(self) -> Preferences:
        """What the makers of the loaded model recommend, and the usual where they do not."""
        info = self.current.info
        longest = info.context_length or DEFAULT_TOKENS
        return Preferences(Generation(info.sampling, min(DEFAULT_TOKENS, longest)))

    def preferences(self, preset: StoredPreset) -> tuple[Preferences, str]:
        """All settings of a preset, and what of it cannot be followed now, for a notice."""
        makers, problem = self.makers, ""
        try:
            found = Preferences.from_mapping(merged(makers.mapping(), preset.settings))
        except SettingError as error:
            found, problem = makers, str(error)
        if preset.damaged:
            problem = "Its settings are damaged in the database."
        try:
            self.stacks.check(found.chosen(), found.generation.sampling)
        except StrataError as error:
            found, problem = found.with_method(makers.method), str(error)
        if problem:
            problem = f"The preset {preset.name!r} is used in part. {problem}"
        return found, problem

    # an owner's own

    def save(
        self, owner: str, name: str, system_prompt: str, preferences: Preferences
    ) -> StoredPreset:
        """Keep these settings under a new name."""
        settings = preferences.mapping()
        return self.store(owner).add(StoredPreset("", name, system_prompt, settings))

    def update(
        self, owner: str, id: str, system_prompt: str, preferences: Preferences
    ) -> StoredPreset:
        """Keep these settings in place of those that a preset had."""
        known = self.own(owner, id)
        changed = replace(known, system_prompt=system_prompt, settings=preferences.mapping())
        return self.store(owner).update(changed)

    def rename(self, owner: str, id: str, name: str) -> StoredPreset:
        """Give a preset another name."""
        return self.store(owner).update(replace(self.own(owner, id), name=name))

    def duplicate(self, owner: str, id: str) -> StoredPreset:
        """Another preset like that one, to be changed."""
        known = self.get(owner, id)
        return self.store(owner).add(replace(known, id="", name=self.free(owner, known.name)))

    def delete(self, owner: str, id: str) -> str:
        """Delete a preset; what comes back is for `undo`."""
        gone = self.store(owner).delete(self.own(owner, id).id)
        token = secrets.token_urlsafe(9)
        self.deleted[owner, token] = gone
        return token

    def undo(self, owner: str, token: str) -> StoredPreset:
        """Take a deletion back. Raises StorageError where that is not known any more."""
        found = self.deleted.pop((owner, token), None)
        if found is None:
            raise StorageError("This deletion cannot be taken back any more.")
        preset, sources = found
        store = self.store(owner)
        back = store.add(replace(preset, name=self.free(owner, preset.name)))
        for source in sources:
            store.choose(source, back.id)
        return back

    def own(self, owner: str, id: str) -> StoredPreset:
        """A preset that the owner may change. Raises StorageError."""
        found = self.get(owner, id)
        if found.id.startswith(BUILT_IN):
            raise StorageError(
                f"The preset {found.name!r} comes with the program and stays as it is. Duplicate "
                "it, and change the copy."
            )
        return found

    def free(self, owner: str, name: str) -> str:
        """That name, with a number where it is taken."""
        taken = {preset.name for preset in self.list(owner)}
        if name not in taken:
            return name
        numbered = (f"{name[: MAX_NAME - 5]} {number}" for number in range(2, 10_000))
        return next(each for each in numbered if each not in taken)

    # which one a model begins with

    def first(self, owner: str, source: str) -> StoredPreset | None:
        """What conversations with a model begin with; None for its makers' settings."""
        id = self.store(owner).chosen(source) if source else None
        return next((preset for preset in self.list(owner) if preset.id == id), None)

    def choose(self, owner: str, source: str, id: str | None) -> None:
        """Have conversations with a model begin with a preset; None for its makers' settings."""
        if not source:
            raise StorageError("No model is loaded. Load the one that the preset is meant for.")
        self.store(owner).choose(source, self.get(owner, id).id if id is not None else None)

    # files

    def export(self, owner: str) -> dict[str, Any]:
        """The owner's presets, as JSON values."""
        listed = [
            {"name": p.name, "system_prompt": p.system_prompt, "settings": dict(p.settings)}
            for p in self.store(owner).list()
        ]
        if not listed:
            raise StorageError("There is no preset of yours to export. Save or duplicate one.")
        return {"format": FORMAT, "version": VERSION, "presets": listed}

    def import_(self, owner: str, content: bytes) -> Sequence[StoredPreset]:
        """Keep the presets of a file, under new names where theirs are taken. Raises StorageError
        and SettingError, with nothing kept."""
        found = list(read(content))
        with self.database.write():
            store = self.store(owner)
            return [store.add(replace(p, name=self.free(owner, p.name))) for p in found]


def read(content: bytes) -> Iterator[StoredPreset]:
    """The presets in a file of anybody's. Raises StorageError and SettingError."""
    if len(content) > LARGEST:
        raise StorageError(
            f"The file has {len(content):,} bytes, and the most for presets is {LARGEST:,}."
        )
    try:
        data = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise StorageError("The file holds no JSON. Give one that was exported here.") from error
    listed = data.get("presets") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not listed or data.get("format") != FORMAT:
        raise StorageError("The file holds no presets. Give one that was exported here.")
    for number, entry in enumerate(listed, 1):
        parts: dict[str, Any] = entry if isinstance(entry, dict) else {}
        name, system_prompt = parts.get("name"), parts.get("system_prompt", "")
        settings: Any = parts.get("settings", {})
        texts = isinstance(name, str) and isinstance(system_prompt, str)
        if not (texts and isinstance(settings, dict)):
            raise StorageError(
                f"Preset {number} of the file is none: it needs a name, a system prompt and "
                "settings. Nothing was imported."
            )
        Preferences.from_mapping(merged(Preferences().mapping(), settings))
        yield StoredPreset("", str(name), str(system_prompt), settings)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with the values of another; mappings in them are merged as well."""
    values = dict(base)
    for name, value in changes.items():
        under = values.get(name)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value)
        values[name] = value
    return values
