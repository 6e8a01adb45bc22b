"""The draft models for the loaded target: the candidates, the memory they need, and their profiles.

If anything fails, the loaded models and profiles stay as they were. Draft models can cost speed,
but they never change an answer.

How often a draft is accepted depends on the sampler, so each profile is measured and stored for one
sampler. Other samplers use the nearest profile: it may lead to a slower plan, but never to another
text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from app.service.jobs import Tasks
from engine.backends.base import BackendInfo
from engine.engine import Draft, Engine, Request, Share, State
from engine.errors import EngineDied, ModelError, SettingError, StorageError, StrataError
from engine.hsd.family import Plans
from engine.hsd.measure import SAMPLER, TOKENS
from engine.hsd.planner import PLAIN, SOURCES, Recursion, outcome_of, stack_of
from engine.hsd.profile import Outcome, Profile
from engine.hsd.trials import PROMPTS, TRIED, Trial
from engine.methods import Method, method_named
from engine.models.formats import format_of
from engine.models.loaders import ModelLoaders, free_name, name_of, resolve_source
from engine.models.memory import Need
from engine.queue import OWNER, Waiting
from engine.settings import Drafting, Runtime, Sampling
from engine.streams import Stream
from engine.types import Rule, Run
from storage.database import Database
from storage.machine import ProfileKey, ProfileStore

Sampler = Mapping[str, float]
LATEST: Sampler = {}
"""The key without a sampler. The latest profile of a set of models is stored under it as well, so
that the next start finds a profile whatever its sampler is."""


def sampler_of(sampling: Sampling) -> dict[str, float]:
    return {name: float(getattr(sampling, name)) for name in SAMPLER}


def sampler_key(profile: Profile) -> tuple[float, ...]:
    return tuple(profile.sampling[name] for name in SAMPLER)


def sampler_label(sampler: Sampler) -> str:
    facts = [f"temperature {sampler.get('temperature', 0.0):g}"]
    neutral = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
    facts += [
        f"{name.replace('_', '-')} {sampler[name]:g}"
        for name, off in neutral.items()
        if sampler.get(name, off) != off
    ]
    return ", ".join(facts)


Family = Plans[State | Draft]
"""The loaded models, as the planner knows them."""


class Families:
    """One set of loaded models. `bare` is the family without a profile."""

    def __init__(self, state: State, store: ProfileStore) -> None:
        self.bare: Family = Plans(state, {draft.name: draft for draft in state.drafts})
        self.store = store
        self.known: dict[tuple[float, ...], Family] = {}
        self.looked_up: set[tuple[float, ...]] = set()
        self.latest: dict[tuple[float, ...], Profile] = {}
        """The profiles with the outcomes of later answers. Plans do not use these outcomes yet."""
        self.read(LATEST)

    def of(self, sampling: Sampling) -> Family:
        """The family with the profile of this sampler, else of the nearest one, else with none."""
        sampler = sampler_of(sampling)
        exact = tuple(sampler.values())
        if exact not in self.looked_up:
            self.looked_up.add(exact)
            self.read(sampler)

        def distance(known: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(abs(one - other) for one, other in zip(known, exact, strict=True))

        return self.known[min(self.known, key=distance)] if self.known else self.bare

    def measured(self, sampling: Sampling, rule: Rule, trials: Sequence[Trial]) -> None:
        """Correct the profile by measured trials of stacks. The first trial is plain decoding.

        Raises StorageError if storing fails.
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
        """Store a profile with more outcomes, and plan with it if the used one is too far off."""
        sampler = sampler_key(profile)
        planned = self.known[sampler].profiled()
        self.latest[sampler] = profile
        if profile.off(planned):
            self.take(profile)
        self.save(profile)

    def learned(self, sampling: Sampling) -> Profile | None:
        profile = self.of(sampling).profile
        return profile and self.latest.get(sampler_key(profile), profile)

    def save(self, profile: Profile) -> None:
        for sampler in (profile.sampling, LATEST):
            self.store.save(self.key(sampler), profile.mapping())

    def read(self, sampler: Sampler) -> None:
        """Use the stored profile, if it is valid and belongs to exactly these models."""
        with suppress(StorageError, ValueError):
            if (stored := self.store.load(self.key(sampler))) is not None:
                self.take(Profile.from_mapping(stored))

    def take(self, profile: Profile) -> None:
        """Plan with this profile from now on, with its models renamed to the loaded ones' names."""
        names = [*self.bare.drafts, self.bare.target.info.name]
        prints = [model.fingerprint for model in profile.models]
        key = self.key(profile.sampling)
        if prints != [*key.drafts, key.target] or set(profile.sampling) != set(SAMPLER):
            return
        models = tuple(
            replace(model, name=name) for model, name in zip(profile.models, names, strict=True)
        )
        family = Plans(self.bare.target, self.bare.drafts, replace(profile, models=models))
        sampler = sampler_key(profile)
        self.known[sampler] = family
        self.latest[sampler] = family.profiled()

    def key(self, sampler: Sampler) -> ProfileKey:
        info = self.bare.target.info
        drafts = tuple(draft.info.fingerprint for draft in self.bare.drafts.values())
        machine = f"{info.device}/{info.dtype}/{info.threads}"
        return ProfileKey(info.fingerprint, drafts, sampler, machine)


T = TypeVar("T")
Fetch = Callable[[str], None]
ABSENT = "Not on this machine yet. Loading it downloads it."

LEVELS: dict[str, int] = {}
"""The level of each draft model that was ever loaded in its stack, 0 for the largest. The level
determines its shade on the page."""


def rank(names: Sequence[str]) -> None:
    for level, name in enumerate(reversed(names)):
        LEVELS[name] = level


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may draft. If `need` is unknown it is None, and `problem` says why."""

    source: str
    name: str
    need: Need | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What is needed to load a model again, with its draft models and the chosen plan `spec`."""

    name: str
    source: str
    runtime: Runtime
    drafts: tuple[str, ...]
    spec: str


class Stacks:
    """`families` is None while no draft model is loaded."""

    def __init__(self, engine: Engine, database: Database, loaders: ModelLoaders) -> None:
        self.engine, self.loaders = engine, loaders
        self.store = ProfileStore(database)
        self.offered: list[str] = []
        self.tasks = Tasks()
        self.state = State()
        self.drop()

    def drop(self) -> None:
        self.families: Families | None = None
        self.spec = ""
        """The plan that was chosen for the chat, as text; "" means the planner's choice."""
        self.trials: list[Trial] = []

    def follow(self, state: State) -> None:
        """Take over a new state of the engine. Choices for another target are forgotten."""
        before, self.state = self.state, state
        if (before.source, before.info) != (state.source, state.info) or not state.drafts:
            self.drop()
        if state.drafts and (self.families is None or before.drafts != state.drafts):
            self.families, self.trials = Families(state, self.store), []
            rank([draft.name for draft in state.drafts])

    def setup(self, state: State) -> ModelSetup:
        """What is needed to load the models of a state again, with the chosen plan."""
        drafts = tuple(draft.source for draft in state.drafts)
        return ModelSetup(state.info.name, state.source, state.runtime, drafts, self.spec)

    def offer(self, source: str) -> str:
        """Add a model to the candidates; returns its source in normal form.

        Raises ModelError if it is no model.
        """
        source = resolve_source(source)
        if not source:
            raise ModelError("The model's name is empty. Give a folder, a file or a hub id.")
        if self.loaders.present(source) or format_of(source).estimated:
            self.engine.need(source, self.state.runtime)
        if source not in self.offered:
            self.offered.append(source)
        return source

    def candidates(self) -> list[Candidate]:
        """All candidates, with their current needs, as folders may change or disappear.

        The result includes a model that is added while others are read, because a page shows the
        result that comes last.
        """
        found: dict[str, Candidate] = {}
        while left := [s for s in (*self.offered, *self.sources.values()) if s not in found]:
            found[left[0]] = self.candidate(left[0])
        return list(found.values())

    def candidate(self, source: str) -> Candidate:
        need, problem = None, ABSENT
        try:
            if self.loaders.present(source):
                need, problem = self.engine.need(source, self.state.runtime), ""
        except StrataError as error:
            problem = str(error)
        return Candidate(source, name_of(source), need, problem)

    @property
    def free(self) -> int:
        return self.engine.room(self.state.source, self.state.runtime).free

    def load(self, sources: Sequence[str], fetch: Fetch | None = None) -> None:
        """Load exactly these draft models; `fetch` downloads a missing one.

        Raises ModelError, with nothing changed, for a model that does not fit, cannot be read or
        has another vocabulary than the target, and Cancelled when `stop` ends a download.
        """
        requested = list(dict.fromkeys(resolve_source(source) for source in sources))
        if not requested:
            raise ModelError("No draft model is chosen. Tick at least one, then press Load.")
        for source in requested:
            if not self.loaders.present(source):
                (fetch or self.fetch)(source)
        self.check_memory([s for s in requested if s not in self.sources.values()])
        with self.tasks.begin(OWNER, "") as task:
            for _ in task.stop.start(lambda: self.engine.load_drafts(self.named(requested))):
                pass
        self.offered += [source for source in requested if source not in self.offered]

    def fetch(self, source: str) -> None:
        with self.tasks.begin(OWNER, "") as task:
            self.loaders.download(source, lambda done, total: None, task.stop.is_set)

    def check_memory(self, sources: Sequence[str]) -> None:
        """Raise ModelError unless these models fit into the free memory."""
        needs = [self.engine.need(source, self.state.runtime) for source in sources]
        total, free = sum(need.total for need in needs), self.free
        if total > free:
            each = ", ".join(
                f"{name_of(source)} {amount(need.total)}"
                for source, need in zip(sources, needs, strict=True)
            )
            raise ModelError(
                f"The draft models need {amount(total)} ({each}), and {amount(free)} are free on "
                f"{self.state.info.device}. Nothing was loaded. Choose fewer or smaller models, "
                "unload those that are loaded, or close other programs."
            )

    def named(self, sources: Sequence[str]) -> list[tuple[str, str]]:
        """The sources with the names that plans use. Loaded models keep their names."""
        present = {source: name for name, source in self.sources.items()}
        taken = {*SOURCES, PLAIN, self.state.info.name, *present.values()}
        found = []
        for source in sources:
            name = present.get(source) or free_name(source, taken)
            taken.add(name)
            found.append((name, source))
        return found

    def unload(self) -> None:
        """Unload the draft models once no answer runs. They are no longer loaded automatically."""
        for _ in self.engine.unload_drafts():
            pass
        self.store.unchoose(self.state.info.fingerprint)

    def restore(self, sources: Sequence[str] = (), fetch: Fetch | None = None) -> list[str]:
        """Load the given models, or by default those chosen before. Returns notices about what went
        wrong. Raises EngineDied."""
        try:
            chosen = self.store.chosen(self.state.info.fingerprint)
            requested = sources or (chosen.sources if chosen else ())
            if not requested:
                return []
            self.load(requested, fetch)
            if chosen and not sources:
                self.spec = chosen.spec
        except EngineDied:
            raise
        except StrataError as error:
            return [f"The draft models were not loaded. {error}"]
        if self.families is not None and not self.families.known:
            names = ", ".join(self.sources)
            return [
                f"The draft models ({names}) have no profile with {self.state.info.name} on this "
                "machine. Press Profile in the Stack tab."
            ]
        return []

    @property
    def sources(self) -> dict[str, str]:
        """The source of each loaded draft model by its name, the smallest first."""
        return {draft.name: draft.source for draft in self.state.drafts}

    @property
    def drafts(self) -> dict[str, BackendInfo]:
        return {draft.name: draft.info for draft in self.state.drafts}

    def family_for(self, sampling: Sampling) -> Family | None:
        """The loaded models with the profile nearest to a sampler; None without draft models."""
        return self.families.of(sampling) if self.families else None

    def profile_for(self, sampling: Sampling) -> Profile | None:
        return self.families.of(sampling).profile if self.families else None

    def loaded(self, sampling: Sampling) -> Family:
        family = self.family_for(sampling)
        if family is None:
            raise SettingError("No draft model is loaded. Load one in the Stack tab first.")
        return family

    def check(self, method: Method, sampling: Sampling) -> None:
        """Raise SettingError for a method whose draft models are not loaded or not profiled, or
        that needs a head if the model has none."""
        if missing := method.missing(self.state.info):
            raise SettingError(missing)
        if method.stack is not None:
            method.plan(self.family_for(sampling))

    def learn(self, request: Request, run: Run) -> None:
        """Correct the profile by an answer for which only draft models drafted.

        Together with databases, draft models draft only where the databases do not, so such answers
        say less about them. Raises StorageError if storing fails.
        """
        families, method, sampling = self.families, request.method, request.generation.sampling
        if families is None or method.stack is None or method.drafting.tiers:
            return
        family, known = families.of(sampling), families.learned(sampling)
        if known is None or family.profile != request.profile:
            return
        plan, rule = method.plan(family), method.drafting.rule
        first = run.parts[-1].step if run.parts else 0
        if outcome := outcome_of(known, plan, rule, run.steps[first:]):
            families.note(known.learned(stack_of(plan, rule), outcome))

    def learned(self, sampling: Sampling) -> Profile | None:
        return self.families.learned(sampling) if self.families else None

    def choose(self, spec: str, sampling: Sampling, drafting: Drafting, databases: bool) -> str:
        """Remember a plan and its models for the next start; returns the name of its method.

        `databases` says whether the databases draft before the stack. Raises SettingError for a
        plan that the profile does not know.
        """
        spec = spec.strip()
        self.loaded(sampling).plan(spec, drafting.rule)
        self.store.choose(self.state.info.fingerprint, list(self.sources.values()), spec)
        self.spec = spec
        kind = "hd+hsd" if databases else "hsd"
        return f"{kind}:{spec}" if spec else kind

    def methods(self) -> list[tuple[str, str]]:
        """Titles and names of the methods that the loaded draft models add."""
        names = [f"single:{name}" for name in self.sources]
        if self.spec:
            names += [f"hsd:{self.spec}", f"hd+hsd:{self.spec}"]
        return [(method_named(name).title, name) for name in names]

    def stop(self) -> None:
        self.tasks.stop(OWNER, "")

    def profile(
        self, sampling: Sampling, texts: Sequence[str] = PROMPTS, tokens: int = TOKENS
    ) -> Iterator[float]:
        """Profile the loaded models with a sampler; yields the share that is done.

        Raises Cancelled if it is stopped; then the earlier profile stays.
        """
        self.loaded(sampling)
        yield from self.long(lambda: self.engine.profile(sampling, texts, tokens), "profile")

    def measure(
        self,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        texts: Sequence[str] = PROMPTS[:TRIED],
        tokens: int = TOKENS,
    ) -> Iterator[float]:
        """Answer a few prompts with plain decoding, every single draft model and the best stacks.

        Yields the share that is done. The outcome goes to `trials`, and corrects predictions.
        Raises Cancelled.
        """
        profile = self.loaded(sampling).profiled()

        def begin() -> Stream[Waiting | Share | list[Trial]]:
            return self.engine.trials(profile, sampling, drafting, chosen.strip(), texts, tokens)

        yield from self.long(begin, "measurement")
        if self.families is not None and self.trials:
            self.families.measured(sampling, drafting.rule, self.trials)

    def long(self, begin: Callable[[], Stream[T]], title: str) -> Iterator[float]:
        """Run a long piece of work: yields its shares and keeps its results. An unexpected error
        becomes a ModelError that names the work by its `title`."""
        with self.tasks.begin(OWNER, "") as task, task.stop.start(begin) as stream:
            try:
                for item in stream:
                    if isinstance(item, Share) and item.share is not None:
                        yield item.share
                    elif isinstance(item, Profile) and self.families is not None:
                        self.trials = []
                        self.families.take(item)
                        self.families.save(item)
                    elif isinstance(item, list):
                        self.trials = item
            except StrataError:
                raise
            except Exception as error:
                # The libraries raise many types of errors, for example for a lack of memory.
                raise ModelError(
                    f"The {title} failed ({error}). What was known before stays. Load fewer or "
                    "smaller draft models if memory ran out."
                ) from error


def amount(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
