"""The loaded draft models with every profile that is known of them, one per sampler.

How often a draft is accepted depends on the sampler, so a profile is measured and kept for one. For
another sampler the profile of the nearest one serves: it may choose a worse plan, never a wrong
word.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from engine.engine import Draft, State
from engine.errors import StorageError
from engine.hsd.family import Plans
from engine.hsd.measure import SAMPLER
from engine.hsd.planner import Plan, Recursion, outcome_of, stack_of
from engine.hsd.profile import Outcome, Profile
from engine.hsd.trials import Trial
from engine.settings import Sampling
from engine.types import Rule, Step
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
        self.latest: dict[tuple[float, ...], Profile] = {}
        """The profiles with what answers took since, by which is not planned yet."""
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
        self.save(profile)

    def learn(self, sampling: Sampling, plan: Plan, rule: Rule, steps: Iterable[Step]) -> None:
        """Take in what an answer by a plan took; plan again where that is too far off.

        Raises StorageError when it cannot be kept.
        """
        profile = self.of(sampling).profile
        if profile is None:
            return
        sampler = tuple(profile.sampling[name] for name in SAMPLER)
        known = self.latest.get(sampler, profile)
        outcome = outcome_of(known, plan, rule, steps)
        if outcome is not None:
            self.note(known.learned(stack_of(plan, rule), outcome))

    def measured(self, sampling: Sampling, rule: Rule, trials: Sequence[Trial]) -> None:
        """Take in what stacks were measured to take, beside plain decoding, which comes first.

        Raises StorageError when it cannot be kept.
        """
        family, profile = self.of(sampling), self.learned(sampling)
        if profile is None:
            return
        recursion, plain = Recursion(profile, rule), profile.target.seconds(0)
        for trial in trials:
            kind, _, spec = trial.name.partition(":")
            if kind != "hsd" or not trial.tokens:
                continue
            plan = family.plan(spec, rule)
            slow = trials[0].seconds * trial.tokens
            expected = recursion.profiled(plan) / plain * slow
            outcome = Outcome(trial.tokens, trial.seconds * trial.tokens, expected, slow)
            profile = profile.learned(stack_of(plan, rule), outcome)
        self.note(profile)

    def note(self, profile: Profile) -> None:
        """Keep a profile with more outcomes; plan with it if they are too far off."""
        sampler = tuple(profile.sampling[name] for name in SAMPLER)
        planned = self.known[sampler].profiled()
        self.latest[sampler] = profile
        if profile.off(planned):
            self.take(profile)
        self.save(profile)

    def learned(self, sampling: Sampling) -> Profile | None:
        """The profile for a sampler with all that answers took since."""
        profile = self.of(sampling).profile
        if profile is None:
            return None
        return self.latest.get(tuple(profile.sampling[name] for name in SAMPLER), profile)

    def save(self, profile: Profile) -> None:
        """Keep a profile for its sampler, and as the latest of all."""
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
        sampler = tuple(profile.sampling[name] for name in SAMPLER)
        self.known[sampler] = family
        self.latest[sampler] = family.profiled()

    def key(self, sampler: Sampler) -> ProfileKey:
        """What a profile of these models with that sampler is kept under."""
        info = self.bare.target.info
        drafts = tuple(draft.info.fingerprint for draft in self.bare.drafts.values())
        machine = f"{info.device}/{info.dtype}/{info.threads}"
        if info.ranks > 1:
            machine += f"/{info.ranks}"
        return ProfileKey(info.fingerprint, drafts, sampler, machine)
