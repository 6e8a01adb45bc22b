"""The models that the app can load, and how it switches from one to another.

If loading fails, the app keeps the model it had. If both models fit into memory, the new one is
loaded first. Otherwise the old one is unloaded to make room, and loaded again if the new one fails.

Models in folders that Strata manages (the hub's cache, and `models` in the data directory) can be
deleted from the disk; other models can only be taken off the list. A model that is in use, or that
came with the program, cannot be removed.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from app.arguments import EMBEDDED, EMBEDDED_DRAFTS
from app.service.current import Costs
from app.service.draft_models import ModelSetup, Stacks, amount
from app.service.jobs import Job, Progress, Slot
from engine.engine import CostsMeasured, Engine, Load, Notice, Share
from engine.errors import ModelError, SettingError, StorageError, StrataError, first_line
from engine.models.formats import format_of
from engine.models.loaders import (
    DEFAULT_RUNTIME,
    ModelLoaders,
    name_of,
    resolve_source,
    weight_bytes,
)
from engine.servers.client import is_address, parsed
from engine.settings import Runtime
from storage.database import Database
from storage.machine import SourceStore

T = TypeVar("T")


EMBEDDED_FILE = EMBEDDED.with_suffix(".gguf")
FOLDER = "models"
"""The folder of models in the data directory."""
PADDED = "tiny-chat-padded-0.5b"
"""A file in FOLDER: the demonstration model at the cost of 0.5 B parameters
(app/service/race.py)."""
PADDED_TITLE = "tiny-chat, padded to 0.5 B"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that can be loaded.

    `kind` is "transformers" or "llama.cpp". `bytes` is its size on disk, 0 if it must be
    downloaded; `download` is the size of the download, 0 if unknown. `runtime` holds its last
    settings.
    """

    source: str
    name: str
    kind: str
    bytes: int
    loaded: bool
    runtime: Runtime = DEFAULT_RUNTIME
    download: int = 0


@dataclass(frozen=True, slots=True)
class Removal:
    """The effect of removing a model.

    `deletes` says whether its files are deleted, which take `bytes`. `folder` is the folder with
    which the model was added; all its `models` leave the list together.
    """

    source: str
    name: str
    bytes: int
    deletes: bool
    folder: str = ""
    models: int = 0

    @property
    def question(self) -> str:
        if self.deletes:
            again = "download or copy it again"
            if is_padded(self.source):
                again = "have it made again, which takes seconds"
            return (
                f"Delete {self.name} from the disk? That frees {amount(self.bytes)}. To use it "
                f"again, {again}."
            )
        if self.folder:
            return (
                f"{self.name} is in the folder {self.folder}, which was added as a whole. Take "
                f"all {self.models} models of that folder off the list? Their files stay."
            )
        return f"Take {self.name} off the list? Its files stay where they are."

    @property
    def done(self) -> str:
        if self.deletes:
            return f"{self.name} was deleted. {amount(self.bytes)} are free again."
        if self.folder:
            return f"The folder {self.folder} is off the list. Its files stay."
        return f"{self.name} is off the list. Its files stay where they are."


Loading = Job[Progress, None]


class Models:
    """Lists, loads and removes models.

    With `guests`, other people use the app too, and no other model can be loaded. `notices` are
    messages about the last load: files that could not be used, draft models that were not loaded.
    """

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
        self.store = SourceStore(database)
        self.requested = ModelSetup(title_of(""), "", DEFAULT_RUNTIME, (), "")
        self.notices: list[str] = []
        self.found: dict[str, list[str]] = {}
        """The models in each folder that was scanned."""
        self.added: dict[str, int] = {}
        """Models that were added and not loaded yet, with their bytes to download."""
        self.keys: dict[str, str] = {}
        """API keys of servers by their origin. They are never stored."""
        self.kept = [database.path.parent / FOLDER] if database.path else []
        """Folders in which models may be deleted, in addition to the hub's cache."""
        self.downloads: list[Loading] = []
        """Downloads of draft models that are not part of a load."""
        self.slot = Slot[Progress, None]()
        self.problem = ""
        """Why the last load failed, if it did."""

    @property
    def source(self) -> str:
        return self.engine.state.source

    @property
    def runtime(self) -> Runtime:
        return self.engine.state.runtime

    @property
    def is_loaded(self) -> bool:
        return self.engine.state.is_loaded

    @property
    def loading(self) -> Progress | None:
        """The progress of the current load; None if there is none."""
        return job.progress if (job := self.slot.running) is not None else None

    @property
    def demonstration(self) -> bool:
        """Whether the loaded model is part of the program, or was made from one that is."""
        return is_embedded(self.source) or is_padded(self.source)

    def candidates(self) -> list[Candidate]:
        """The embedded model, models that were loaded before, and models in scanned folders. Models
        that no longer exist are left out. Raises StorageError."""
        ran = {known.source: runtime_of(known.runtime) for known in self.store.models()}
        sources = [str(EMBEDDED), str(EMBEDDED_FILE), self.source, *ran]
        ours = [str(folder) for folder in self.kept if folder.is_dir()]
        for folder in [*self.store.folders(), *ours]:
            if folder not in self.found:
                self.found[folder] = []
                with suppress(StrataError):
                    self.read_folder(folder)
            sources += self.found[folder]
        sources += self.added
        return [
            Candidate(
                source,
                title_of(source),
                format_of(source).kind,
                weight_bytes(source),
                source == self.source,
                ran.get(source, DEFAULT_RUNTIME),
                self.added.get(source, 0),
            )
            for source in dict.fromkeys(filter(None, sources))
            if Path(source).exists() or not Path(source).is_absolute()
        ]

    def add(self, name: str) -> str:
        """Add a model, or those in a folder, to the candidates; returns the source to choose.

        Raises ModelError if it does not exist or is no model.
        """
        source = resolve_source(name)
        if not source:
            raise ModelError("No model is named. Give a folder, a GGUF file or a hub id.")
        if Path(source).is_dir():
            found = self.read_folder(source)
            if not found:
                raise ModelError(
                    f"There is no model in {source!r}. Give a folder with GGUF files, or with "
                    "folders that hold config.json and *.safetensors files."
                )
            if found == [source]:
                self.inspect(source)
            self.store.add(source, {}, "folder")
            return found[0]
        if source not in {candidate.source for candidate in self.candidates()}:
            self.added[source] = self.inspect(source)
        return source

    def inspect(self, source: str) -> int:
        """The bytes of a model that have to be downloaded. Raises ModelError if it is no model."""
        size = self.loaders.check(source)
        if not self.loaders.present(source):
            return size
        self.engine.need(source, DEFAULT_RUNTIME)
        return 0

    def read_folder(self, folder: str) -> list[str]:
        self.found[folder] = [resolve_source(source) for source in self.loaders.scan(folder)]
        return self.found[folder]

    def stop(self) -> None:
        self.slot.cancel()
        for job in [*self.downloads]:
            job.cancel()

    def load(self, source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Iterator[Progress]:
        """Replace the loaded model: yields the progress.

        Closing the iterator does not end it. Raises SettingError if others use the app, Cancelled
        if it is stopped, and ModelError, in which case the old model stays.
        """
        if self.guests:
            raise SettingError(
                f"The model {source!r} was not loaded: others share this app, and they would lose "
                "their answers. To use it, start the app with --model."
            )
        if not source.strip():
            raise ModelError("The model's name is empty. Give a folder, a file or a hub id.")
        yield from self.start(source, runtime)

    def start(
        self, source: str, runtime: Runtime = DEFAULT_RUNTIME, drafts: Sequence[str] = ()
    ) -> Iterator[Progress]:
        """Like `load`, but allowed with guests, for the first model of a program. "" names the
        demonstration model. `drafts` are the model's draft models, by default those that were
        chosen for it before.

        Errors in the request are raised by the call itself. After the call the model is `loading`,
        and requests for an answer wait for it.
        """
        source = resolve_source(source) or str(EMBEDDED)
        if source == self.source and runtime == self.runtime:
            text = f"{self.engine.state.info.name} is already loaded with these settings."
            return iter([Progress(1.0, text)])

        def make() -> Loading:
            self.problem = ""
            self.requested = ModelSetup(title_of(source), source, runtime, tuple(drafts), "")
            begin = Progress(None, f"Loading {title_of(source)} …")
            return Job(work, begin, partial(not_loaded, title_of(source)))

        def work(job: Loading) -> None:
            try:
                self.load_all(source, runtime, drafts, job)
            except Exception as error:
                self.problem = str(error)
                raise

        busy = ModelError(
            f"{title_of(source)} cannot be loaded now: another model is being loaded. Wait "
            "until it is ready, or stop it."
        )
        return self.slot.take(make, busy).start("loader").watch()

    def load_again(self, setup: ModelSetup) -> Iterator[Progress]:
        """`start` with an earlier model, its draft models and its plan."""
        yield from self.start(setup.source, setup.runtime, setup.drafts)
        if self.engine.state.drafts:
            self.stacks.spec = setup.spec

    def load_all(self, source: str, runtime: Runtime, drafts: Sequence[str], job: Loading) -> None:
        name = title_of(source)
        self.notices = []
        if not self.loaders.present(source):
            self.fetch(source, job)
        both_fit = self.check_memory(source, runtime)
        job.report(Progress(None, f"Loading {name} …"))
        named = name if is_embedded(source) or is_padded(source) else ""
        self.exchange(Load(source, runtime, named, both_fit, self.key_of(source)), job)
        self.tried(lambda: self.store.add(source, asdict(runtime)))
        fetch = partial(self.fetch, job=job)
        self.notices += self.stacks.restore(drafts, fetch)
        job.report(Progress(1.0, f"{name} is loaded."))

    def key_of(self, source: str) -> str:
        return self.keys.get(parsed(source).origin, "") if is_address(source) else ""

    def give_key(self, source: str, key: str) -> None:
        """Use this API key for the server that a source names; "" changes nothing.

        Raises ModelError if it names no server.
        """
        if key.strip():
            self.keys[parsed(source).origin] = key.strip()

    def fetch(self, source: str, job: Loading) -> None:
        text = f"Downloading {title_of(source)}"

        def progress(done: int, total: int) -> None:
            share = done / total if total else None
            job.report(Progress(share, f"{text}: {amount(done)} of {amount(total)}"))

        job.report(Progress(None, f"{text} …"))
        self.loaders.download(source, progress, job.stop.is_set)

    def fetch_alone(self, source: str, title: str) -> Iterator[Progress]:
        """Download a draft model in its own job; yields the progress. Closing the iterator does not
        end the download."""
        begin = Progress(None, f"Downloading {title_of(source)} …")
        job: Loading = Job(partial(self.fetch, source), begin, partial(not_loaded, title))
        self.downloads.append(job)
        job.ended = partial(self.downloads.remove, job)
        return job.start("loader").watch()

    def check_memory(self, source: str, runtime: Runtime) -> bool:
        """Whether a model fits into memory together with the loaded ones. Raises ModelError if it
        does not even fit in their place."""
        try:
            need = self.engine.need(source, runtime)
        except ModelError:
            if not format_of(source).estimated:
                raise
            # For a few architectures this is unknown. If the source is no model, loading it fails.
            return True
        room = self.engine.room(source, runtime)
        if need.total > room.total:
            also = ", the memory of the loaded models included" if room.held else ""
            raise ModelError(
                f"{title_of(source)} needs {amount(need.total)} ({amount(need.weights)} of weights "
                f"and {amount(need.cache)} of cache), and {amount(room.total)} are free on "
                f"{room.device}{also}. Nothing was loaded. Choose a smaller model or a shorter "
                "context, or close other programs."
            )
        return need.total <= room.free

    def exchange(self, request: Load, job: Loading) -> None:
        spec, drafts = self.stacks.spec, self.engine.state.drafts
        try:
            for item in job.stop.start(lambda: self.engine.load(request)):
                if isinstance(item, Share):
                    job.report(Progress(item.share, item.activity))
                elif isinstance(item, Notice):
                    self.notices.append(item.text)
                elif isinstance(item, CostsMeasured):
                    self.tried(partial(self.costs.save, item.info, item.costs))
        except ModelError:
            if self.engine.state.drafts == drafts:
                # The draft models are loaded as before, so the plan is kept as well.
                self.stacks.spec = spec
            raise
        mine = [offer for offer in self.stacks.offered if not is_embedded(offer)]
        self.stacks.offered = [*embedded_drafts(request.source), *mine]

    def tried(self, store: Callable[[], T]) -> T | None:
        """The result of a store's method. A failure only becomes a notice."""
        try:
            return store()
        except StorageError as error:
            self.notices.append(str(error))
            return None

    def removal(self, source: str) -> Removal:
        """The effect of removing a listed model. Raises ModelError if it cannot be removed."""
        name = title_of(source)
        if source not in {candidate.source for candidate in self.candidates()} | self.added.keys():
            raise ModelError(f"The model {source!r} is not on the list. Choose one from the list.")
        if is_embedded(source):
            raise ModelError(f"{name} comes with the program and stays.")
        if self.loading is not None or self.downloads:
            raise ModelError(
                f"{name} cannot be removed while a model is being loaded. Wait until it is ready, "
                "or stop it."
            )
        here = place(source)
        if here == place(self.source):
            raise ModelError(f"{name} is loaded. Load another model, then remove it.")
        if any(here == place(draft.source) for draft in self.engine.state.drafts):
            raise ModelError(
                f"{name} is loaded as a draft model. Unload it in the Stack tab, then remove it."
            )
        if self.loaders.removable(source, self.kept):
            return Removal(source, name, weight_bytes(source), True)
        for folder, found in self.found.items():
            if source in found:
                return Removal(source, name, 0, False, folder, len(found))
        return Removal(source, name, 0, False)

    def remove(self, source: str) -> Removal:
        """Remove a listed model as `removal` says; `bytes` of the result is the freed space."""
        planned = self.removal(source)
        if planned.folder:
            self.store.forget(planned.folder, "folder")
            del self.found[planned.folder]
            return planned
        freed = self.loaders.remove(source, self.kept) if planned.deletes else 0
        self.store.forget(source)
        self.added.pop(source, None)
        for listed in (self.stacks.offered, *self.found.values()):
            if source in listed:
                listed.remove(source)
        return replace(planned, bytes=freed)


def runtime_of(values: Mapping[str, Any]) -> Runtime:
    """Stored settings; the default ones if they are damaged, or of another version."""
    with suppress(SettingError):
        return Runtime.from_mapping(values)
    return DEFAULT_RUNTIME


def is_embedded(source: str) -> bool:
    return EMBEDDED.parent in Path(source).parents


def is_padded(source: str) -> bool:
    return Path(source).name == PADDED


def title_of(source: str) -> str:
    """The display name of a model. The embedded target, for which "" stands as well, has the name
    of its family."""
    if source in ("", str(EMBEDDED), str(EMBEDDED_FILE)):
        return EMBEDDED.parent.name
    if is_padded(source):
        return PADDED_TITLE
    return name_of(source)


def embedded_drafts(source: str) -> list[str]:
    if not is_embedded(source):
        return []
    ending = format_of(source).ending
    offered = [EMBEDDED.with_name(name + ending) for name in EMBEDDED_DRAFTS]
    return [str(path) for path in offered if path.exists() and str(path) != source]


def not_loaded(title: str, error: Exception) -> ModelError:
    """The error for a model that fails to load in an unforeseen way."""
    return ModelError(f"{title} was not loaded: {first_line(error)}. Choose another one.")


def place(source: str) -> str:
    """The identity of a model under any of its names: its path, with links resolved."""
    path = format_of(source).located(source) if source else None
    return os.path.realpath(Path(path)) if path else source
