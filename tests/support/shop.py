"""Toy models as files, for tests that load one model after another."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.service.answering import Update
from app.service.jobs import Job, Progress
from app.service.session import Session
from engine.backends.base import Backend
from engine.errors import Cancelled, ModelError
from engine.local import Local
from engine.models.loaders import DEFAULT_RUNTIME, ModelLoaders
from engine.models.memory import Need
from engine.sampling import Floats
from engine.settings import Runtime
from storage.database import Database
from storage.drafting import DraftingStore
from storage.statistics import open_table
from tests.support import inside
from tests.support.toy import END, ToyBackend, deviating

NAMES = ("one", "two", "three", "draft")


def endless(key: int) -> Callable[[tuple[int, ...]], Floats]:
    logits = deviating(3.0, key)

    def without_end(suffix: tuple[int, ...]) -> Floats:
        found = logits(suffix).copy()
        found[END] = -20.0
        return found

    return without_end


def talkative(name: str) -> ToyBackend:
    return ToyBackend(name=name, logits=endless(sum(name.encode())))


class Shop:
    """Toy models as files, what they need, and what may go wrong with them.

    A file holds the name of its tokenizer. A model that is not there yet has a hub id, and its
    file appears with the download.
    """

    def __init__(self, root: Path, toy: Callable[[str], ToyBackend] = talkative) -> None:
        self.root, self.toy, self.room, self.broken = root, toy, 1000, set[str]()
        self.made: list[weakref.ref[Backend]] = []
        self.runtimes: list[Runtime] = []
        self.arrived: set[str] = set()
        self.ours: set[str] = set()
        """What lies in a folder of ours."""
        self.pieces = 3
        self.between: Callable[[], None] = lambda: None
        for name in NAMES:
            (root / f"{name}.gguf").write_text("bytes")

    def source(self, name: str) -> str:
        return str(self.root / f"{name}.gguf")

    @property
    def alive(self) -> list[str]:
        """The models in memory. What can be collected is still there: freeing it is no accident."""
        return sorted(backend.info.name for ref in self.made if (backend := ref()))

    def free(self, device: str) -> int:
        return self.room - 40 * len(self.alive)

    def need(self, source: str, runtime: Runtime) -> Need:
        if source.startswith("strange"):
            raise ModelError("It does not tell.")
        return Need(1, 40, runtime.context_length // 1024)

    def load(self, source: str, runtime: Runtime) -> Backend:
        if source in self.broken:
            raise RuntimeError("the file is damaged")
        path = Path(source)
        name = source if source.startswith(("hub/", "strange")) else path.stem
        toy = self.toy(name)
        tokenizer = path.read_text() if path.is_file() else "bytes"
        toy.info = replace(
            toy.info,
            tokenizer_fingerprint=tokenizer,
            tokenizer_type=tokenizer,
            memory_bytes=40,
        )
        self.made.append(weakref.ref(toy))
        self.runtimes.append(runtime)
        return toy

    def download(
        self, source: str, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> str:
        for piece in range(1, self.pieces + 1):
            if cancelled():
                raise Cancelled("The download was stopped. What is there stays.")
            progress(piece * 1024, self.pieces * 1024)
            self.between()
        self.arrived.add(source)
        return source

    def check(self, source: str) -> int:
        if "gone" in source:
            raise ModelError(f"There is no {source!r}.")
        return 3072

    def remove(self, source: str, folders: Sequence[Path]) -> int:
        self.ours.discard(source)
        Path(source).unlink(missing_ok=True)
        self.arrived.discard(source)
        return 4096

    def loaders(self) -> ModelLoaders:
        return ModelLoaders(
            load=self.load,
            need=self.need,
            device=lambda source, runtime: "cpu",
            free=self.free,
            scan=lambda folder: sorted(str(path) for path in Path(folder).glob("*.gguf")),
            present=lambda source: not source.startswith("hub/") or source in self.arrived,
            download=self.download,
            check=self.check,
            removable=lambda source, folders: source in self.ours,
            remove=self.remove,
        )

    def session(self, db: Database, name: str = "one", guests: bool = False) -> Session:
        folders = [self.root / "statistics"]
        engine = Local(partial(open_table, folders), self.loaders(), store=DraftingStore(db))
        session = Session(engine, db, guests, self.loaders(), folders)
        list(session.models.start(self.source(name)))
        return session


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def load_model(session: Session, source: str, runtime: Runtime = DEFAULT_RUNTIME) -> list[Progress]:
    seen, report = list[Progress](), Job.report

    def noted(job: Any, progress: Any) -> None:
        seen.append(progress)
        report(job, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "report", noted)
        last = list(session.models.load(source, runtime))
    return seen or last


def fails(session: Session, source: str, runtime: Runtime = DEFAULT_RUNTIME) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(session, source, runtime)
    text = str(caught.value)
    del caught
    return text


def ask(
    session: Session, text: str = "hello there", method: str = "hd", budget: str = "adaptive"
) -> Update:
    return inside.ask(session, text, chosen=inside.preferences(method, budget=budget))[1]
