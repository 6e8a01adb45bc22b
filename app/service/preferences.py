"""The user's settings for answers, as one value that a conversation stores, and presets of them.

Some presets come with the program, and each owner has their own. A preset may leave settings out;
for these the recommendations of the loaded model's makers are used, so one preset fits every model.
Deletions can be undone until the program ends.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, ValidationError

from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.pages import LimitedDict
from assets import ASSETS
from engine.errors import SettingError, StorageError, StrataError
from engine.methods import USUAL, Method, method_named
from engine.settings import Checked, Drafting, Generation, Sampling, shortened
from engine.text import folded, read_json
from storage.database import Database
from storage.presets import MAX_NAME, PresetStore, StoredPreset
from storage.validation import Outside, problem_of

DEFAULT_TOKENS = 256
"""The most tokens of an answer by default."""
SEEDS = 2**31
"""Fresh seeds are below this number, so that a browser represents them exactly."""


@dataclass(frozen=True, slots=True)
class Preferences(Checked):
    """How to sample, how to draft, whether each answer gets a seed of its own, and whether it is
    checked in the background."""

    generation: Generation = Generation()
    method: str = USUAL.name
    drafting: Drafting = USUAL.drafting
    fresh_seed: bool = True
    check: bool = False

    def chosen(self) -> Method:
        return method_named(self.method, self.drafting)

    def seeded(self) -> Generation:
        """The generation settings of the next answer, with its own seed if so chosen."""
        if not self.fresh_seed:
            return self.generation
        sampling = replace(self.generation.sampling, seed=secrets.randbelow(SEEDS))
        return replace(self.generation, sampling=sampling)

    def mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Read stored JSON values, which may come from anywhere. Raises SettingError for a value
        that is out of range, of another type or unknown."""
        drafting = mapping_of(values, "drafting")
        if "budget" not in drafting:
            # Kept before budgets were measured: these limited what every machine drafts.
            drafting.pop("nodes", None)
            drafting.pop("threshold", None)
        parts = {"generation": generation_of(values), "drafting": Drafting.from_mapping(drafting)}
        found = super(Preferences, cls).from_mapping({**values, **parts})
        if not isinstance(found.method, str) or not isinstance(found.fresh_seed, bool):
            raise SettingError(
                f"The method {shortened(found.method)} with the fresh seed "
                f"{shortened(found.fresh_seed)} cannot be used. Give the name of a method, and "
                "true or false."
            )
        if not isinstance(found.check, bool):
            raise SettingError(
                f"Checking in the background cannot be {shortened(found.check)}. Give true or "
                "false."
            )
        found.chosen()
        return found

    @classmethod
    def usable(cls, values: Mapping[str, Any]) -> tuple["Preferences", str]:
        """Like `from_mapping`, or the default preferences and the reason, for a notice."""
        try:
            return cls.from_mapping(values), ""
        except SettingError as error:
            return cls(), str(error)


def generation_of(values: Mapping[str, Any]) -> Generation:
    """The generation settings in stored values. Raises SettingError."""
    generation = mapping_of(values, "generation")
    sampling = Sampling.from_mapping(mapping_of(generation, "sampling"))
    return Generation.from_mapping({**generation, "sampling": sampling})


def mapping_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the group of settings called `name`; empty where there is none."""
    group = values.get(name, {})
    if not isinstance(group, Mapping):
        raise SettingError(
            f"The settings {name!r} cannot be {shortened(group)}. Give names and values."
        )
    return dict(group)


FORMAT, VERSION = "strata-presets", 1
LARGEST = 4 << 20
"""The most bytes of a file with presets."""
BUILT_IN = "built-in:"
"""The prefix of the ids of built-in presets."""


class SharedPreset(Outside):
    """A preset in a file. Its settings are checked by `Preferences`."""

    name: str
    system_prompt: str = ""
    settings: dict[Any, Any] = {}


class PresetFile(Outside):
    format: Literal["strata-presets"]
    presets: Annotated[list[SharedPreset], FailFast()] = Field(
        min_length=1, description="a list of presets with names, system prompts and settings"
    )


class Presets:
    def __init__(self, database: Database, current: Current, stacks: Stacks) -> None:
        self.database, self.current, self.stacks = database, current, stacks
        self.deleted = LimitedDict[tuple[str, str], tuple[StoredPreset, Sequence[str]]]()
        """Deleted presets that can be restored, by owner and token."""

    def store(self, owner: str) -> PresetStore:
        return PresetStore(self.database, owner)

    def list(self, owner: str) -> Sequence[StoredPreset]:
        return [*PRESETS, *self.store(owner).list()]

    def get(self, owner: str, id: str) -> StoredPreset:
        """A built-in preset or one of the owner's. Raises StorageError."""
        known = next((preset for preset in PRESETS if preset.id == id), None)
        return known or self.store(owner).get(id)

    @property
    def makers(self) -> Preferences:
        """The recommendations of the loaded model's makers, and defaults for the rest."""
        info = self.current.info
        longest = info.context_length or DEFAULT_TOKENS
        return Preferences(Generation(info.sampling, min(DEFAULT_TOKENS, longest)))

    def preferences(self, preset: StoredPreset) -> tuple[Preferences, str]:
        """All settings of a preset, and a notice about settings that cannot be used now, or ""."""
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
            found, problem = replace(found, method=makers.method), str(error)
        if problem:
            problem = f"The preset {preset.name!r} is used in part. {problem}"
        return found, problem

    def save(
        self, owner: str, name: str, system_prompt: str, preferences: Preferences
    ) -> StoredPreset:
        settings = preferences.mapping()
        return self.store(owner).add(StoredPreset("", name, system_prompt, settings))

    def update(
        self, owner: str, id: str, system_prompt: str, preferences: Preferences
    ) -> StoredPreset:
        settings = preferences.mapping()
        changed = replace(self.own(owner, id), system_prompt=system_prompt, settings=settings)
        return self.store(owner).update(changed)

    def rename(self, owner: str, id: str, name: str) -> StoredPreset:
        return self.store(owner).update(replace(self.own(owner, id), name=name))

    def duplicate(self, owner: str, id: str) -> StoredPreset:
        known = self.get(owner, id)
        return self.store(owner).add(replace(known, id="", name=self.free(owner, known.name)))

    def delete(self, owner: str, id: str) -> str:
        """Delete a preset; returns the token for `undo`."""
        deleted = self.store(owner).delete(self.own(owner, id).id)
        token = secrets.token_urlsafe(9)
        self.deleted[owner, token] = deleted
        return token

    def undo(self, owner: str, token: str) -> StoredPreset:
        """Undo a deletion. Raises StorageError if that is no longer possible."""
        found = self.deleted.pop((owner, token), None)
        if found is None:
            raise StorageError("This deletion cannot be undone any more.")
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
        taken = {folded(preset.name) for preset in self.list(owner)}
        if folded(name) not in taken:
            return name
        numbered = (f"{name[: MAX_NAME - 5]} {number}" for number in range(2, 10_000))
        return next(each for each in numbered if folded(each) not in taken)

    def first(self, owner: str, source: str) -> StoredPreset | None:
        """The preset with which conversations with a model begin; None for its makers' settings."""
        id = self.store(owner).chosen(source) if source else None
        return next((preset for preset in self.list(owner) if preset.id == id), None)

    def choose(self, owner: str, source: str, id: str | None) -> None:
        """Choose the preset with which conversations with a model begin, or its makers'
        settings."""
        if not source:
            raise StorageError("No model is loaded. Load the one that the preset is meant for.")
        self.store(owner).choose(source, self.get(owner, id).id if id is not None else None)

    def export(self, owner: str) -> dict[str, Any]:
        listed = [
            {"name": p.name, "system_prompt": p.system_prompt, "settings": dict(p.settings)}
            for p in self.store(owner).list()
        ]
        if not listed:
            raise StorageError("There is no preset of yours to export. Save or duplicate one.")
        return {"format": FORMAT, "version": VERSION, "presets": listed}

    def import_(self, owner: str, content: bytes) -> Sequence[StoredPreset]:
        """Store the presets of a file, renamed if their names are taken. Raises StorageError and
        SettingError, with nothing stored."""
        found = list(read(content))
        with self.database.write():
            store = self.store(owner)
            return [store.add(replace(p, name=self.free(owner, p.name))) for p in found]


def read(content: bytes) -> Iterator[StoredPreset]:
    """The presets in a file from anywhere. Raises StorageError and SettingError."""
    if len(content) > LARGEST:
        raise StorageError(
            f"The file has {len(content):,} bytes, and the most for presets is {LARGEST:,}."
        )
    try:
        file = PresetFile.model_validate(read_json(content))
    except ValidationError as error:
        text = problem_of(error, PresetFile).text
        raise StorageError(
            f"The file holds no presets that can be read: {text} Nothing was imported. Give one "
            "that was exported here."
        ) from error
    except (RecursionError, ValueError) as error:
        raise StorageError("The file holds no JSON. Give one that was exported here.") from error
    for each in file.presets:
        Preferences.from_mapping(merged(Preferences().mapping(), each.settings))
        yield StoredPreset("", each.name, each.system_prompt, each.settings)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with the values of another; mappings in them are merged as well."""
    values = dict(base)
    for name, value in changes.items():
        under = values.get(name)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value)
        values[name] = value
    return values


PRESETS = tuple(
    replace(preset, id=f"{BUILT_IN}{preset.name.lower()}")
    for preset in read((ASSETS / "presets.json").read_bytes())
)
"""The built-in presets. Settings that they leave out follow the model's makers."""
