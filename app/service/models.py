"""The models the app can load: which there are, what memory they need, and how to switch.

If loading fails, the app keeps the model it had. A new model that fits beside the loaded one is
loaded first. Otherwise the loaded one is unloaded to make room, and loaded again if the new one
fails. Everything that touches a model runs on one thread, so an answer comes from one model from
its first word to its last.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from app.arguments import EMBEDDED, EMBEDDED_DRAFTS
from app.service.costs import Costs
from app.service.draft_models import Stacks, amount
from app.service.formats import EMBEDDED_FILE, WORDS, Formats
from app.service.tasks import Task, Tasks
from engine.engine import CostsMeasured, Engine, Load, Notice, Share, WantedCosts, answered
from engine.errors import ModelError, SettingError, StorageError, StrataError, first_line
from engine.loaded import Costs as CostRecord
from engine.models.formats import format_of
from engine.models.loaders import DEFAULT_RUNTIME, ModelLoaders, kind_of, name_of, settled
from engine.models.memory import Need
from engine.queue import OWNER
from engine.servers.address import is_address, parsed
from engine.settings import Runtime
from storage.database import Database
from storage.sources import SourceStore

T = TypeVar("T")


FOLDER = "models"
"""The folder of models in the data directory."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of loading is: its share, None where that is not known, and its words."""

    share: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that can be loaded. `kind` is "transformers" or "llama.cpp"; `bytes` on disk are 0
    for one that has to be downloaded, of `download` bytes where that is known; `runtime` is how it
    ran last, if it ever did."""

    source: str
    name: str
    kind: str
    bytes: int
    loaded: bool
    runtime: Runtime = DEFAULT_RUNTIME
    download: int = 0


Report = Callable[[Progress], None]


class Models:
    """See the module's docstring. `guests` means that others use the app too: then no other model
    is loaded. `notices` are what the last load left to say: files that could not be used, draft
    models that were not loaded."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        stacks: Stacks,
        costs: Costs,
        loaders: ModelLoaders,
        guests: bool = False,
    ) -> None:
        self.engine, self.stacks, self.costs = engine, stacks, costs
        self.loaders, self.guests = loaders, guests
        self.store, self.formats = SourceStore(database), Formats(database)
        self.wanted = ""
        """The source that was asked for last."""
        self.notices: list[str] = []
        self.found: dict[str, list[str]] = {}
        """What was found in each folder that was scanned."""
        self.added: dict[str, int] = {}
        """Models that were named and not loaded yet, with the bytes that they have."""
        self.keys: dict[str, str] = {}
        """The key of each server that wants one, by its origin: in memory alone, stored nowhere."""
        self.kept = [database.path.parent / FOLDER] if database.path else []
        """Folders of ours, beside the hub's cache: what lies there may be deleted."""
        self.tasks = Tasks()
        self.busy = threading.Lock()
        self.over = threading.Event()
        """Set when a load is over."""
        self.progress = Progress(None, "")
        """How far the load under way is, or the last one came."""
        self.problem = ""
        """Why the last load failed, if it did."""

    # what there is

    @property
    def source(self) -> str:
        """The source of the loaded model."""
        return self.engine.state.source

    @property
    def runtime(self) -> Runtime:
        """How the loaded model runs."""
        return self.engine.state.runtime

    @property
    def there(self) -> bool:
        """Whether there is a model."""
        return self.engine.state.there

    @property
    def loading(self) -> Progress | None:
        """How far the load under way is; None where there is none."""
        return self.progress if self.busy.locked() else None

    @property
    def demonstration(self) -> bool:
        """Whether the loaded model came along with the program."""
        return is_embedded(self.source)

    def candidates(self) -> list[Candidate]:
        """The embedded model, those that were loaded before, those in the folders that were
        scanned; what vanished is left out. Raises StorageError."""
        ran = {known.source: runtime_of(known.runtime) for known in self.store.models()}
        sources = [str(EMBEDDED), str(EMBEDDED_FILE), self.source, *ran]
        ours = [str(folder) for folder in self.kept if folder.is_dir()]
        for folder in [*self.store.folders(), *ours]:
            if folder not in self.found:
                self.found[folder] = []
                with suppress(StrataError):
                    self.look(folder)
            sources += self.found[folder]
        sources += self.added
        return [
            Candidate(
                source,
                title_of(source),
                kind_of(source),
                size_of(source),
                source == self.source,
                ran.get(source, DEFAULT_RUNTIME),
                self.added.get(source, 0),
            )
            for source in dict.fromkeys(filter(None, sources))
            if Path(source).exists() or not Path(source).is_absolute()
        ]

    def scan(self, folder: str) -> int:
        """Put the models in a folder among the candidates; returns how many there are.

        Raises ModelError when there is none.
        """
        folder = settled(folder)
        found = self.look(folder)
        if not found:
            raise ModelError(
                f"There is no model in {folder!r}. Give a folder with GGUF files, or with folders "
                "that hold config.json and *.safetensors files."
            )
        self.store.add_folder(folder)
        return len(found)

    def add(self, named: str) -> str:
        """Put a model, or those in a folder, among the candidates; returns the source to choose.

        Raises ModelError for what is none, or is not there.
        """
        source = settled(named)
        if not source:
            raise ModelError("No model is named. Give a folder, a GGUF file or a hub id.")
        if Path(source).is_dir():
            if [settled(found) for found in self.loaders.scan(source)] == [source]:
                self.inspect(source)
            self.scan(source)
            return self.found[source][0]
        if source not in {candidate.source for candidate in self.candidates()}:
            self.added[source] = self.inspect(source)
        return source

    def inspect(self, source: str) -> int:
        """The bytes of a model that are to be downloaded, once it was seen to be one. Raises
        ModelError."""
        size = self.loaders.check(source)
        if not self.loaders.present(source):
            return size
        self.need(source, DEFAULT_RUNTIME)
        return 0

    def look(self, folder: str) -> list[str]:
        """The models in a folder, read now."""
        self.found[folder] = [settled(source) for source in self.loaders.scan(folder)]
        return self.found[folder]

    def need(self, source: str, runtime: Runtime) -> Need:
        """What a model takes. Raises ModelError where that cannot be told."""
        return self.engine.need(settled(source), runtime)

    def free(self, source: str, runtime: Runtime) -> int:
        """Bytes for a model where it would go, with those that the loaded models would give back.

        Raises ModelError for a device that is not there.
        """
        device = self.engine.device(settled(source), runtime)
        return self.engine.free(device) + self.held(device)

    def held(self, device: str) -> int:
        """Bytes on a device that the loaded models are sure to give back."""
        engine, state = self.engine, self.engine.state
        if not state.source or engine.device(state.source, state.runtime) != device:
            return 0
        return state.info.memory_bytes + sum(d.info.memory_bytes for d in state.drafts)

    # loading

    def stop(self) -> None:
        """End the load under way while it downloads, or waits for the model."""
        self.tasks.stop(OWNER, "")

    def load(self, source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Iterator[Progress]:
        """Let another model take the place of the loaded one: yields how far that is.

        Closing the iterator does not end it. Raises SettingError where others may come in,
        Cancelled when it is stopped, and ModelError, with the old model as it was.
        """
        if self.guests:
            raise SettingError(
                f"The model {source!r} was not loaded: others share this app, and they would lose "
                "their answers. To use it, start the app with --model."
            )
        if not source.strip():
            raise ModelError("The model's name is empty. Give a folder, a file or a hub id.")
        yield from self.start(source, runtime)
        self.tried(lambda: self.formats.prefer(settled(source)))

    def start(
        self, source: str, runtime: Runtime = DEFAULT_RUNTIME, drafts: Sequence[str] = ()
    ) -> Iterator[Progress]:
        """The same for the first model of a program, whoever uses it: "" is the demonstration
        model, in the faster of its formats that runs. `drafts` are to draft for it, else those
        that were chosen for it before.

        What is wrong with the request is raised by the call. From then on the model is what is
        `loading`, and whoever wants to use it while there is none waits for it. The work begins
        with the first report.
        """
        named = settled(source)
        source = named or self.formats.first(runtime)
        if source == self.source and runtime == self.runtime:
            words = f"{self.engine.state.info.name} is already loaded with these settings."
            return iter([Progress(1.0, words)])
        if not self.busy.acquire(blocking=False):
            raise ModelError(
                f"{title_of(source)} cannot be loaded now: another model is being loaded. Wait "
                "until it is ready, or stop it."
            )
        task = self.tasks.ask(OWNER, "")
        self.progress, self.problem = Progress(None, f"Loading {title_of(source)} …"), ""
        self.over.clear()
        self.wanted = source

        def work(report: Report) -> None:
            def note(progress: Progress) -> None:
                self.progress = progress
                report(progress)

            try:
                with self.tasks.begin(OWNER, "", asked=True):
                    try:
                        self.bring(source, runtime, drafts, note, task)
                    except ModelError as error:
                        # Other settings may be what it does not run with.
                        usual = runtime == DEFAULT_RUNTIME
                        other = "" if named else self.formats.instead(source, usual)
                        if not other:
                            raise
                        self.bring(other, runtime, drafts, note, task)
                        self.notices.append(f"{replaced(source, other)} {error}")
            except Exception as error:
                self.problem = str(error)
                raise
            finally:
                self.busy.release()
                self.over.set()

        return reported(title_of(source), work)

    def bring(
        self, source: str, runtime: Runtime, drafts: Sequence[str], report: Report, task: Task
    ) -> None:
        """Everything from a source to a model in use."""
        name = title_of(source)
        self.notices = []
        if not self.loaders.present(source):
            self.fetch(source, report, task)
        beside = self.check_memory(source, runtime)
        report(Progress(None, f"Loading {name} …"))
        named = name if is_embedded(source) else ""
        wanted = Load(source, runtime, named, beside, self.key_of(source))
        self.exchange(wanted, report, task)
        self.keep(source, runtime)
        self.notices += self.stacks.restore(drafts, lambda draft: self.fetch(draft, report, task))
        report(Progress(1.0, f"{name} is loaded."))

    def key_of(self, source: str) -> str:
        """The key of the server that a source names; "" where it has none, or names none."""
        return self.keys.get(parsed(source).origin, "") if is_address(source) else ""

    def give_key(self, source: str, key: str) -> None:
        """Open the server that a source names with this key from now on; "" leaves it as it was.

        Raises ModelError where it names none.
        """
        if key.strip():
            self.keys[parsed(source).origin] = key.strip()

    def fetch(self, source: str, report: Report, task: Task) -> None:
        """Download what is missing of a model, until the task is stopped."""
        words = f"Downloading {title_of(source)}"

        def progress(done: int, total: int) -> None:
            share = done / total if total else None
            report(Progress(share, f"{words}: {amount(done)} of {amount(total)}"))

        report(Progress(None, f"{words} …"))
        self.loaders.download(source, progress, task.stop.is_set)

    def fetch_alone(self, source: str, report: Report) -> None:
        """The same as a task of its own."""
        with self.tasks.begin(OWNER, "") as task:
            self.fetch(source, report, task)

    def check_memory(self, source: str, runtime: Runtime) -> bool:
        """Whether a model fits beside the loaded ones. Raises ModelError unless it fits at least
        in their place."""
        try:
            need = self.need(source, runtime)
        except ModelError:
            if format_of(source).always_sized:
                raise
            # Some architectures do not tell it. What is no model at all is refused when it is read.
            return True
        device = self.engine.device(source, runtime)
        free, held = self.engine.free(device), self.held(device)
        if need.total > free + held:
            also = ", the memory of the loaded models included" if held else ""
            raise ModelError(
                f"{title_of(source)} needs {amount(need.total)} ({amount(need.weights)} of weights "
                f"and {amount(need.cache)} of cache), and {amount(free + held)} are free on "
                f"{device}{also}. Nothing was loaded. Choose a smaller model or a shorter context, "
                "or close other programs."
            )
        return need.total <= free

    def keep(self, source: str, runtime: Runtime) -> None:
        """Remember a model that was loaded, and offer what may draft for it."""
        mine = [offer for offer in self.stacks.offered if not is_embedded(offer)]
        self.stacks.offered = [*drafts_beside(source), *mine]
        self.tried(lambda: self.store.add(source, asdict(runtime)))

    def exchange(self, wanted: Load, report: Report, task: Task) -> None:
        """Have the engine load a model in the place of the one that it has."""
        spec, drafts = self.stacks.spec, self.engine.state.drafts
        stream = task.stop.start(lambda: self.engine.load(wanted))

        def recall(asked: WantedCosts) -> CostRecord | None:
            return self.tried(partial(self.costs.recall, asked.info))

        try:
            for item in answered(stream, recall):
                if isinstance(item, Share):
                    report(Progress(item.share, item.words))
                elif isinstance(item, Notice):
                    self.notices.append(item.text)
                elif isinstance(item, CostsMeasured):
                    self.tried(partial(self.costs.save, item.info, item.costs))
        except ModelError:
            if self.engine.state.drafts == drafts:
                # They are there as before, where they made room as well: so is the plan.
                self.stacks.spec = spec
            raise

    def tried(self, store: Callable[[], T]) -> T | None:
        """What a store says, or does; a failure becomes a notice, as loading can do without."""
        try:
            return store()
        except StorageError as error:
            self.notices.append(str(error))
            return None


def runtime_of(values: Mapping[str, Any]) -> Runtime:
    """Stored settings; the usual ones where these are of another version, or damaged."""
    with suppress(SettingError):
        return Runtime.from_mapping(values)
    return DEFAULT_RUNTIME


def is_embedded(source: str) -> bool:
    """Whether a model came along with the program."""
    return EMBEDDED.parent in Path(source).parents


def replaced(source: str, other: str) -> str:
    """That the demonstration model runs in its other format."""
    return f"{title_of(source)} does not run here as {WORDS[source]}. It runs as {WORDS[other]}."


def title_of(source: str, name: str = "") -> str:
    """What a model is called, `name` if there is one; the embedded target by its family's name,
    and so what stands for it, ""."""
    if source in ("", str(EMBEDDED), str(EMBEDDED_FILE)):
        return EMBEDDED.parent.name
    return name or name_of(source)


def drafts_beside(source: str) -> list[str]:
    """The embedded models that may draft for a model, of its own kind."""
    if not is_embedded(source):
        return []
    ending = format_of(source).ending
    offered = [EMBEDDED.with_name(name + ending) for name in EMBEDDED_DRAFTS]
    return [str(path) for path in offered if path.exists() and str(path) != source]


def size_of(source: str) -> int:
    """Bytes of a model's weights on disk; 0 where they are not on this machine."""
    model_format = format_of(source)
    path = model_format.located(source)
    with suppress(OSError):
        files = model_format.weight_files(Path(path)) if path else ()
        return sum(file.stat().st_size for file in files)
    return 0


def reported(title: str, work: Callable[[Report], None]) -> Iterator[Progress]:
    """What loading the model of that title reports while it is done; raises its error.

    It has a thread of its own: who waits for the reports may go away, and the work goes on.
    """
    reports: SimpleQueue[Progress | StrataError | None] = SimpleQueue()

    def run() -> None:
        outcome: StrataError | None = None
        try:
            work(reports.put)
        except StrataError as error:
            outcome = error
        except Exception as error:
            # Whatever is wrong, the app goes on, and someone has to be told.
            problem = f"{title} was not loaded: {first_line(error)}. Choose another one."
            outcome = ModelError(problem)
        finally:
            reports.put(outcome)

    threading.Thread(target=run, name="loader", daemon=True).start()
    while (report := reports.get()) is not None:
        if isinstance(report, StrataError):
            raise report
        yield report
