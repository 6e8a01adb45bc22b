"""The draft models of the loaded target: which there are, what they need, what they are worth.

Models are refused before they are loaded when they do not fit. Whatever fails, the models and the
profiles that were there before stay, and the chat goes on without. What drafts can cost speed
only: nothing here can change a word of an answer.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from app import palette
from app.families import Families
from app.loaded import Loaded
from app.model_thread import ModelThread
from app.reading import Reading, free_name, name_of, settled
from app.stack_trials import PROMPTS, TRIED, Trial, entries, prompts_of, trials
from app.turns import ME, Runs, Waiting
from engine.backends.base import Backend
from engine.backends.load import is_gguf
from engine.backends.memory import Need
from engine.costs import CostCurve
from engine.errors import ModelError, SettingError, StrataError
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.planner import DATABASES, PLAIN
from engine.methods import METHODS, Databases, Method, drafters_of
from engine.settings import Drafting, Sampling
from storage.database import Database
from storage.profiles import ProfileStore

T = TypeVar("T")
Fetch = Callable[[str], None]
ABSENT = "It is not on this machine yet, and is downloaded when it is loaded."


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may draft. `need` is None where that cannot be told: `problem` says why."""

    source: str
    name: str
    need: Need | None
    problem: str = ""


class Stacks:
    """See the module's docstring. `families` is None while no draft model is loaded."""

    def __init__(
        self, loaded: Loaded, database: Database, model: ModelThread, reading: Reading
    ) -> None:
        self.model, self.reading = model, reading
        self.store = ProfileStore(database)
        self.offered: list[str] = []
        self.runs = Runs()
        self.aim(loaded)

    def aim(self, loaded: Loaded) -> None:
        """Draft for this target from now on, as no model does yet. Draft models run as it does."""
        self.target, self.statistics = loaded.backend, loaded.statistics
        self.source, self.runtime = loaded.source, loaded.runtime
        self.drop()

    def drop(self) -> None:
        """Be without draft models, on the model's thread."""
        self.families: Families | None = None
        self.sources: dict[str, str] = {}
        """The source of each loaded draft model by its name, the smallest first."""
        self.spec = ""
        """The plan that was chosen for the chat, as text; "" is as planned."""
        self.trials: list[Trial] = []

    # which models there are

    def offer(self, source: str) -> str:
        """Put a model among the candidates; returns its source as it is known from now on.

        Raises ModelError for what is no model.
        """
        source = settled(source)
        if not source:
            raise ModelError("There is no model without a name. Give a folder, a file or a hub id.")
        if self.reading.present(source) or not is_gguf(source):
            self.need(source)
        if source not in self.offered:
            self.offered.append(source)
        return source

    def candidates(self) -> list[Candidate]:
        """All models on offer, with what each needs now: folders may go or change meanwhile."""
        found = []
        for source in dict.fromkeys([*self.offered, *self.sources.values()]):
            need, problem = None, ABSENT
            try:
                if self.reading.present(source):
                    need, problem = self.need(source), ""
            except StrataError as error:
                problem = str(error)
            found.append(Candidate(source, name_of(source), need, problem))
        return found

    def need(self, source: str) -> Need:
        """What a draft model takes beside the target. Raises ModelError for what is no model."""
        return self.reading.need(source, self.runtime)

    def free(self) -> int:
        """Bytes that are free where the target is."""
        made = not self.source
        device = self.target.info.device
        return self.reading.free(device if made else self.reading.device(self.source, self.runtime))

    # loading

    def load(self, sources: Sequence[str], fetch: Fetch | None = None) -> None:
        """Have just these draft models in memory; `fetch` downloads one that is not here yet.

        Raises ModelError, with nothing changed, for one that does not fit, cannot be read or does
        not speak the target's tokens, and Cancelled when `stop` ends a download.
        """
        wanted = list(dict.fromkeys(settled(source) for source in sources))
        if not wanted:
            raise ModelError("No draft model is chosen. Tick one at least, then load.")
        for source in wanted:
            if not self.reading.present(source):
                (fetch or self.fetch)(source)
        self.check_memory([s for s in wanted if s not in self.sources.values()])
        self.model.run(lambda: self.read(wanted))
        self.offered += [source for source in wanted if source not in self.offered]

    def fetch(self, source: str) -> None:
        """Download what is missing of a model, unseen, until it is stopped."""
        with self.runs.begin(ME, "") as run:
            self.reading.download(source, lambda done, total: None, run.stop.is_set)

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
                f"{self.target.info.device}. Nothing was loaded. Choose fewer or smaller models, "
                "unload those that are loaded, or close other programs."
            )

    def read(self, sources: Sequence[str]) -> None:
        """`load`, on the model's thread."""
        present = {source: name for name, source in self.sources.items()}
        drafts: dict[str, Backend] = {}
        at: dict[str, str] = {}
        taken = {DATABASES, PLAIN, self.target.info.name, *present.values()}
        for source in sources:
            name = present.get(source) or free_name(source, taken)
            taken.add(name)
            loaded = self.drafts.get(name)
            drafts[name] = self.reading.load(source, self.runtime) if loaded is None else loaded
            at[name] = source
        families = Families(Family(self.target, drafts), self.store)
        self.families, self.trials = families, []
        self.sources = {name: at[name] for name in families.bare.drafts}
        palette.shade(list(self.sources))

    def unload(self) -> None:
        """Free the draft models, once no answer is under way; they are not loaded again by
        themselves."""
        self.model.run(self.drop)
        self.store.unchoose(self.target.info.fingerprint)

    def restore(self, sources: Sequence[str] = (), fetch: Fetch | None = None) -> list[str]:
        """Load the given models, else those chosen before; what went wrong, as notices."""
        try:
            chosen = self.store.chosen(self.target.info.fingerprint)
            wanted = sources or (chosen.sources if chosen else ())
            if not wanted:
                return []
            self.load(wanted, fetch)
            if chosen and not sources:
                self.spec = chosen.spec
        except StrataError as error:
            return [f"The draft models were not loaded. {error}"]
        if self.families is not None and not self.families.known:
            names = ", ".join(self.sources)
            return [
                f"The draft models ({names}) were never profiled in this form with "
                f"{self.target.info.name} on this machine. Profile them in the Stack tab."
            ]
        return []

    # what is known of them

    @property
    def drafts(self) -> dict[str, Backend]:
        """The loaded draft models, the smallest first."""
        return self.families.bare.drafts if self.families else {}

    def family_for(self, sampling: Sampling) -> Family | None:
        """The loaded models with the profile that is nearest to a sampler; None without models."""
        families = self.families
        return families.of(sampling) if families else None

    def loaded(self, sampling: Sampling) -> Family:
        """The same; raises SettingError without models."""
        family = self.family_for(sampling)
        if family is None:
            raise SettingError("No draft model is loaded. Load one in the Stack tab first.")
        return family

    def check(self, method: Method, sampling: Sampling) -> None:
        """Raise SettingError for a method whose draft models are not loaded or not profiled."""
        if method.stack is not None:
            drafters_of(method, Databases(), self.family_for(sampling), sampling)

    def choose(self, spec: str, sampling: Sampling, drafting: Drafting, databases: bool) -> str:
        """Remember a plan and its models for the next start; returns the name of its method.

        `databases` says whether they are asked before the stack. Raises SettingError for a plan
        that the profile does not know.
        """
        spec = spec.strip()
        self.loaded(sampling).plan(spec, drafting.rule)
        self.store.choose(self.target.info.fingerprint, list(self.sources.values()), spec)
        self.spec = spec
        kind = "hd+hsd" if databases else "hsd"
        return f"{kind}:{spec}" if spec else kind

    def methods(self) -> list[tuple[str, str]]:
        """Titles and names of the methods that the loaded models add to the usual ones."""
        found = [(f"{name} alone", f"single:{name}") for name in self.sources]
        if self.spec:
            found.append((f"Draft models, {self.spec}", f"hsd:{self.spec}"))
            found.append((f"Hierarchy drafting, then {self.spec}", f"hd+hsd:{self.spec}"))
        return found

    # measuring

    def stop(self) -> None:
        """End the profile, the measurement or the download that waits or is under way."""
        self.runs.stop(ME, "")

    def profile(
        self, sampling: Sampling, texts: Sequence[str] = PROMPTS, tokens: int = TOKENS
    ) -> Iterator[float]:
        """Profile the loaded models with a sampler: yields the share that is done.

        Raises Cancelled when it is stopped; what was known before stays.
        """
        with self.runs.begin(ME, "") as run:
            running = self.profiled(sampling, texts, tokens, run.stop.is_set)
            yield from told_apart(self.model.stream(running, run), "profile")

    def profiled(
        self,
        sampling: Sampling,
        texts: Sequence[str],
        tokens: int,
        cancelled: Callable[[], bool],
    ) -> Generator[float, None, None]:
        """`profile`, on the model's thread."""
        self.loaded(sampling)
        families = self.families
        assert families is not None
        own = Databases(statistics=self.statistics)
        profiler = Profiler(
            self.target,
            families.bare.drafts,
            prompts_of(self.target, texts),
            Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            lambda: own.for_measuring().drafters(METHODS["hd"]),
            tokens,
            cancelled,
        )
        yield from profiler.run()
        assert profiler.profile is not None
        self.trials = []
        families.add(profiler.profile)

    def measure(
        self,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        costs: Callable[[Method], CostCurve | None],
        texts: Sequence[str] = PROMPTS[:TRIED],
        tokens: int = TOKENS,
    ) -> Iterator[float]:
        """Let plain decoding, every single draft model and the best stacks answer a few prompts:
        yields the share that is done, and leaves the outcome in `trials`. Raises Cancelled."""
        with self.runs.begin(ME, "") as run:
            running = self.measured(
                sampling, drafting, chosen.strip(), costs, texts, tokens, run.stop.is_set
            )
            yield from told_apart(self.model.stream(running, run), "measurement")

    def measured(
        self,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        costs: Callable[[Method], CostCurve | None],
        texts: Sequence[str],
        tokens: int,
        cancelled: Callable[[], bool],
    ) -> Generator[float, None, None]:
        """`measure`, on the model's thread."""
        family = self.loaded(sampling)
        running = trials(
            family,
            Databases(statistics=self.statistics),
            entries(family, drafting, chosen),
            prompts_of(self.target, texts),
            sampling,
            costs,
            cancelled,
            tokens,
        )
        for found in running:
            if isinstance(found, list):
                self.trials = found
            else:
                yield found


def told_apart(items: Iterator[T | Waiting], what: str) -> Iterator[T]:
    """The items once their turn has come; an error of the libraries below becomes one that says
    what it ended."""
    try:
        for item in items:
            if not isinstance(item, Waiting):
                yield item
    except StrataError:
        raise
    except Exception as error:
        # They raise many types, out of memory among them.
        raise ModelError(
            f"The {what} failed ({error}). What was known before stays. Load fewer or smaller "
            "draft models if memory ran out."
        ) from error


def amount(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
