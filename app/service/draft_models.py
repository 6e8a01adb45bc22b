"""The draft models of the loaded target: which there are, what memory they need, what they gain.

A model that does not fit into memory is refused before it is loaded. If anything fails, the loaded
models and profiles stay as they were. Draft models can cost speed, but never change a word of an
answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.service.families import Families, Family
from app.service.tasks import Tasks
from engine.backends.base import BackendInfo
from engine.engine import Engine, Request, Share, State
from engine.errors import EngineDied, ModelError, SettingError, StrataError
from engine.hsd.measure import TOKENS
from engine.hsd.planner import PLAIN, SOURCES
from engine.hsd.profile import Profile
from engine.hsd.trials import PROMPTS, TRIED, Trial
from engine.methods import Method, method_named
from engine.models.formats import format_of
from engine.models.loaders import ModelLoaders, free_name, name_of, settled
from engine.models.memory import Need
from engine.queue import OWNER
from engine.settings import Drafting, Sampling
from engine.streams import Stream
from engine.types import Run
from storage.database import Database
from storage.profiles import ProfileStore

T = TypeVar("T")
Fetch = Callable[[str], None]
ABSENT = "Not on this machine yet. Loading it downloads it."

LEVELS: dict[str, int] = {}
"""The level in its stack of each draft model that was ever loaded, 0 for the largest: its shade."""


def rank(names: Sequence[str]) -> None:
    """Give the draft models of a family, the smallest first, their levels."""
    for level, name in enumerate(reversed(names)):
        LEVELS[name] = level


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may draft. `need` is None where that cannot be told: `problem` says why."""

    source: str
    name: str
    need: Need | None
    problem: str = ""


class Stacks:
    """See the module's docstring. `families` is None while no draft model is loaded."""

    def __init__(self, engine: Engine, database: Database, loaders: ModelLoaders) -> None:
        self.engine, self.loaders = engine, loaders
        self.store = ProfileStore(database)
        self.offered: list[str] = []
        self.tasks = Tasks()
        self.state = State()
        self.drop()

    def drop(self) -> None:
        """Be without draft models."""
        self.families: Families | None = None
        self.sources: dict[str, str] = {}
        """The source of each loaded draft model by its name, the smallest first."""
        self.spec = ""
        """The plan that was chosen for the chat, as text; "" is as planned."""
        self.trials: list[Trial] = []

    def follow(self, state: State) -> None:
        """Know what the engine has loaded: what was chosen for another target goes."""
        before, self.state = self.state, state
        if (before.source, before.info) != (state.source, state.info) or not state.drafts:
            self.drop()
        if state.drafts and (self.families is None or before.drafts != state.drafts):
            self.families, self.trials = Families(state, self.store), []
            self.sources = {draft.name: draft.source for draft in state.drafts}
            rank(list(self.sources))

    # which models there are

    def offer(self, source: str) -> str:
        """Put a model among the candidates; returns its source as it is known from now on.

        Raises ModelError for what is no model.
        """
        source = settled(source)
        if not source:
            raise ModelError("The model's name is empty. Give a folder, a file or a hub id.")
        if self.loaders.present(source) or format_of(source).sized_on_hub:
            self.need(source)
        if source not in self.offered:
            self.offered.append(source)
        return source

    def candidates(self) -> list[Candidate]:
        """All models on offer, with what each needs now: folders may go or change meanwhile.

        One that is added while the others are read is among them, as a page shows what comes last.
        """
        found: dict[str, Candidate] = {}
        while left := [s for s in (*self.offered, *self.sources.values()) if s not in found]:
            found[left[0]] = self.candidate(left[0])
        return list(found.values())

    def candidate(self, source: str) -> Candidate:
        """A model on offer, with what it needs now."""
        need, problem = None, ABSENT
        try:
            if self.loaders.present(source):
                need, problem = self.need(source), ""
        except StrataError as error:
            problem = str(error)
        return Candidate(source, name_of(source), need, problem)

    def need(self, source: str) -> Need:
        """What a draft model takes beside the target. Raises ModelError for what is no model."""
        return self.engine.need(source, self.state.runtime.unsplit)

    def free(self) -> int:
        """Bytes that are free where the target is."""
        source, device = self.state.source, self.state.info.device
        return self.engine.free(
            self.engine.device(source, self.state.runtime) if source else device
        )

    # loading

    def load(self, sources: Sequence[str], fetch: Fetch | None = None) -> None:
        """Have just these draft models in memory; `fetch` downloads one that is not here yet.

        Raises ModelError, with nothing changed, for one that does not fit, cannot be read or does
        not speak the target's tokens, and Cancelled when `stop` ends a download.
        """
        wanted = list(dict.fromkeys(settled(source) for source in sources))
        if not wanted:
            raise ModelError("No draft model is chosen. Tick at least one, then press Load.")
        for source in wanted:
            if not self.loaders.present(source):
                (fetch or self.fetch)(source)
        self.check_memory([s for s in wanted if s not in self.sources.values()])
        with self.tasks.begin(OWNER, "") as task:
            for _ in task.stop.start(lambda: self.engine.load_drafts(self.named(wanted))):
                pass
        self.offered += [source for source in wanted if source not in self.offered]

    def fetch(self, source: str) -> None:
        """Download what is missing of a model, unseen, until it is stopped."""
        with self.tasks.begin(OWNER, "") as task:
            self.loaders.download(source, lambda done, total: None, task.stop.is_set)

    def check_memory(self, sources: Sequence[str]) -> None:
        """Raise ModelError unless these models fit into what is free."""
        needs = [self.need(source) for source in sources]
        total, free = sum(need.total for need in needs), self.free()
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
        """The sources with what plans call them, those that are loaded by the names they have."""
        present = {source: name for name, source in self.sources.items()}
        taken = {*SOURCES, PLAIN, self.state.info.name, *present.values()}
        found = []
        for source in sources:
            name = present.get(source) or free_name(source, taken)
            taken.add(name)
            found.append((name, source))
        return found

    def unload(self) -> None:
        """Free the draft models, once no answer is under way; they are not loaded again by
        themselves."""
        for _ in self.engine.unload_drafts():
            pass
        self.store.unchoose(self.state.info.fingerprint)

    def restore(self, sources: Sequence[str] = (), fetch: Fetch | None = None) -> list[str]:
        """Load the given models, else those chosen before; what went wrong, as notices. Raises
        EngineDied."""
        try:
            chosen = self.store.chosen(self.state.info.fingerprint)
            wanted = sources or (chosen.sources if chosen else ())
            if not wanted:
                return []
            self.load(wanted, fetch)
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

    # what is known of them

    @property
    def drafts(self) -> dict[str, BackendInfo]:
        """The loaded draft models, the smallest first."""
        return {draft.name: draft.info for draft in self.state.drafts}

    def family_for(self, sampling: Sampling) -> Family | None:
        """The loaded models with the profile that is nearest to a sampler; None without models."""
        families = self.families
        return families.of(sampling) if families else None

    def profile_for(self, sampling: Sampling) -> Profile | None:
        """The profile that is nearest to a sampler; None where there is none."""
        family = self.family_for(sampling)
        return family.profile if family else None

    def loaded(self, sampling: Sampling) -> Family:
        """The same; raises SettingError without models."""
        family = self.family_for(sampling)
        if family is None:
            raise SettingError("No draft model is loaded. Load one in the Stack tab first.")
        return family

    def check(self, method: Method, sampling: Sampling) -> None:
        """Raise SettingError for a method whose draft models are not loaded or not profiled, and
        for one that needs a head where the model has none."""
        if missing := method.missing(self.state.info):
            raise SettingError(missing)
        if method.stack is not None:
            method.plan(self.family_for(sampling))

    def learn(self, request: Request, run: Run) -> None:
        """Correct the profile by an answer that draft models alone drafted for.

        Beside the databases they draft only where these do not, so that says less of them. Raises
        StorageError when it cannot be kept.
        """
        families, method, sampling = self.families, request.method, request.generation.sampling
        if families is None or method.stack is None or method.drafting.tiers:
            return
        family = families.of(sampling)
        if family.profile is None or family.profile != request.profile:
            return
        plan, rule = method.plan(family), method.drafting.rule
        begun = run.parts[-1].step if run.parts else 0
        families.learn(sampling, plan, rule, run.steps[begun:])

    def learned(self, sampling: Sampling) -> Profile | None:
        """The profile for a sampler with all that answers took since; None where there is none."""
        return self.families.learned(sampling) if self.families else None

    def choose(self, spec: str, sampling: Sampling, drafting: Drafting, databases: bool) -> str:
        """Remember a plan and its models for the next start; returns the name of its method.

        `databases` says whether they are asked before the stack. Raises SettingError for a plan
        that the profile does not know.
        """
        spec = spec.strip()
        self.loaded(sampling).plan(spec, drafting.rule)
        self.store.choose(self.state.info.fingerprint, list(self.sources.values()), spec)
        self.spec = spec
        kind = "hd+hsd" if databases else "hsd"
        return f"{kind}:{spec}" if spec else kind

    def methods(self) -> list[tuple[str, str]]:
        """Titles and names of the methods that the loaded models add to the usual ones."""
        names = [f"single:{name}" for name in self.sources]
        if self.spec:
            names += [f"hsd:{self.spec}", f"hd+hsd:{self.spec}"]
        return [(method_named(name).title, name) for name in names]

    # measuring

    def stop(self) -> None:
        """End the profile, the measurement or the download that waits or is under way."""
        self.tasks.stop(OWNER, "")

    def profile(
        self, sampling: Sampling, texts: Sequence[str] = PROMPTS, tokens: int = TOKENS
    ) -> Iterator[float]:
        """Profile the loaded models with a sampler: yields the share that is done.

        Raises Cancelled when it is stopped; what was known before stays.
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
        """Let plain decoding, every single draft model and the best stacks answer a few prompts:
        yields the share that is done, and leaves the outcome in `trials`, by which predictions are
        corrected. Raises Cancelled."""
        profile = self.loaded(sampling).profiled()
        wanted = profile, sampling, drafting, chosen.strip(), texts, tokens
        yield from self.long(lambda: self.engine.trials(*wanted), "measurement")
        if self.families is not None and self.trials:
            self.families.measured(sampling, drafting.rule, self.trials)

    def long(self, begin: Callable[[], Stream[T]], what: str) -> Iterator[float]:
        """The shares of a long piece of work; what comes of it is kept here. An error of the
        libraries below becomes one that says what it ended."""
        with self.tasks.begin(OWNER, "") as task, task.stop.start(begin) as stream:
            try:
                for item in stream:
                    if isinstance(item, Share) and item.share is not None:
                        yield item.share
                    elif isinstance(item, Profile) and self.families is not None:
                        self.trials = []
                        self.families.add(item)
                    elif isinstance(item, list):
                        self.trials = item
            except StrataError:
                raise
            except Exception as error:
                # They raise many types, out of memory among them.
                raise ModelError(
                    f"The {what} failed ({error}). What was known before stays. Load fewer or "
                    "smaller draft models if memory ran out."
                ) from error


def amount(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
