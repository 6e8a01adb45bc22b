"""The loaded draft models with every profile that is known of them, one per sampler.

How often a draft is accepted depends on the sampler, so a profile is measured and kept for one. For
another sampler the profile of the nearest one serves: it may choose a worse plan, never a wrong
word.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from engine.engine import Draft, State
from engine.errors import StorageError
from engine.hsd.family import Plans
from engine.hsd.measure import SAMPLER
from engine.hsd.profile import Profile
from engine.settings import Sampling
from storage.profiles import ProfileKey, ProfileStore

Sampler = Mapping[str, float]
LATEST: Sampler = {}
"""The last profile of these models is kept under no sampler as well: it is there at the next start,
whatever the sampler is then."""


def sampler_of(sampling: Sampling) -> dict[str, float]:
    """The settings that acceptance depends on."""
    return {name: float(getattr(sampling, name)) for name in SAMPLER}


def sampler_words(sampler: Sampler) -> str:
    """A sampler for people."""
    words = [f"temperature {sampler.get('temperature', 0.0):g}"]
    neutral = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
    words += [
        f"{name.replace('_', '-')} {sampler[name]:g}"
        for name, off in neutral.items()
        if sampler.get(name, off) != off
    ]
    return ", ".join(words)


Family = Plans[State | Draft]
"""What can be planned with the models that the engine has loaded."""


class Families:
    """One set of loaded models. `bare` is the family without a profile."""

    def __init__(self, state: State, store: ProfileStore) -> None:
        self.bare: Family = Plans(state, {draft.name: draft for draft in state.drafts})
        self.store = store
        self.known: dict[tuple[float, ...], Family] = {}
        self.looked_up: set[tuple[float, ...]] = set()
        self.read(LATEST)

    def of(self, sampling: Sampling) -> Family:
        """The family with the profile of that sampler, else of the nearest, else with none."""
        wanted = sampler_of(sampling)
        exact = tuple(wanted.values())
        if exact not in self.looked_up:
            self.looked_up.add(exact)
            self.read(wanted)
        if exact in self.known:
            return self.known[exact]

        def distance(sampler: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(abs(one - other) for one, other in zip(sampler, exact, strict=True))

        return self.known[min(self.known, key=distance)] if self.known else self.bare

    def add(self, profile: Profile) -> None:
        """Take a profile that was just measured. Raises StorageError when it cannot be kept."""
        self.take(profile)
        for sampler in (profile.sampling, LATEST):
            self.store.save(self.key(sampler), profile.mapping())

    def read(self, sampler: Sampler) -> None:
        """Take the stored profile, if there is one that is sound and of these very models."""
        stored = None
        with suppress(StorageError):
            stored = self.store.load(self.key(sampler))
        if stored is None:
            return
        with suppress(ValueError):
            self.take(Profile.from_mapping(stored))

    def take(self, profile: Profile) -> None:
        """Plan with this profile from now on; its models go by the names they have here."""
        names = [*self.bare.drafts, self.bare.target.info.name]
        prints = [model.fingerprint for model in profile.models]
        key = self.key(profile.sampling)
        if prints != [*key.drafts, key.target] or set(profile.sampling) != set(SAMPLER):
            return
        models = tuple(
            replace(model, name=name) for model, name in zip(profile.models, names, strict=True)
        )
        family = Plans(self.bare.target, self.bare.drafts, replace(profile, models=models))
        self.known[tuple(profile.sampling[name] for name in SAMPLER)] = family

    def key(self, sampler: Sampler) -> ProfileKey:
        """What a profile of these models with that sampler is kept under."""
        info = self.bare.target.info
        drafts = tuple(draft.info.fingerprint for draft in self.bare.drafts.values())
        machine = f"{info.device}/{info.dtype}/{info.threads}"
        return ProfileKey(info.fingerprint, drafts, sampler, machine)
