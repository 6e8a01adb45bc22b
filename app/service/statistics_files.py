"""Statistics files for the loaded model's tokenizer: built from texts, taken in, copied, removed.

A build goes on when the page that began it closes, and leaves nothing behind when it is stopped. It
has two parts. The texts become tokens in the engine, batch by batch: one in REST_SECONDS while an
answer grows, as fast as it can otherwise. Counting them is the work of a process of its own
(storage/statistics_worker.py) that gives way to others. The file takes the place of the one before
in one step, and what is answered from then on drafts from it.

A file from elsewhere is opened read-only and checked before it is copied to where it is used.
"""

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

import numpy as np
import psutil

from app.service.current import Current
from app.service.models import Progress
from engine import process
from engine.backends.base import BackendInfo
from engine.engine import Engine
from engine.errors import Cancelled, SettingError, StorageError, StrataError
from engine.types import Document
from storage.documents import Meter, documents
from storage.statistics import SUFFIX, StatisticsTable
from storage.statistics_build import FEWEST, STAGES, replacing
from storage.statistics_worker import END, FAILED, MADE, Spec

LOOK_SECONDS = 0.3
"""How often it is told how far it is."""
REST_SECONDS = 1.0
GLANCE_SECONDS = 0.05
"""How often it is looked whether the answer is over."""
BATCH = 1 << 16
"""Characters that become tokens at once, about."""
MOST_TOKENS = 50_000_000
TOKEN_BYTES = 80
"""What counting takes of memory for each token."""
SPARED = 0.5
"""The share of the free memory that counting may take."""
BUDGET = 64 << 20
"""Bytes of the file, about."""
FEW = 8 << 20
"""Of fewer bytes of text what followed once is worth keeping too."""
MOST_IMPORTED = 1 << 30
"""Bytes of a file that is taken in: the usual one has 64 MB."""
CHECK_SECONDS = 60.0
TITLE = 80


class StatisticsFiles:
    """See the module's docstring. `guests` means that others use this app: then nothing is done.

    `answering` tells whether an answer is under way.
    """

    def __init__(
        self, engine: Engine, current: Current, guests: bool, answering: Callable[[], bool]
    ) -> None:
        self.engine, self.current, self.guests = engine, current, guests
        self.answering = answering
        self.busy = threading.Lock()
        """Held while a file is being built."""
        self.over, self.stopped = threading.Event(), threading.Event()
        self.problem: StrataError | None = None
        """Why none was made the last time, if so."""
        self.done = ""
        """What was made the last time, in words."""
        self.share: float | None = None
        self.words, self.began = "", 0.0
        self.process: subprocess.Popen[str] | None = None

    # what there is

    @property
    def info(self) -> BackendInfo:
        """The model whose tokenizer is used. Raises SettingError for guests, StorageError where no
        model is there."""
        if self.guests:
            raise SettingError("Others use this app too: its databases are not changed from here.")
        if not self.engine.state.there:
            raise StorageError("No model is loaded, and a file is for a model. Load one first.")
        return self.engine.state.info

    @property
    def path(self) -> Path:
        """Where the file of the loaded model's tokenizer is made."""
        info = self.info
        if not self.current.folders:
            raise StorageError("There is no data directory to keep a file in.")
        return self.current.folders[0] / f"{info.tokenizer_fingerprint}{SUFFIX}"

    def own(self) -> bool:
        """Whether there is a file that can be removed, and not only the one that came along."""
        return bool(
            self.engine.state.there
            and not self.guests
            and self.current.folders
            and self.path.is_file()
        )

    def use(self) -> None:
        """Draft from the file that is there now."""
        self.current.look_again()
        self.engine.read_statistics()

    # building one

    def start(self, files: Sequence[Path], uploaded: bool = False) -> None:
        """Begin to build one from files. What was `uploaded` for it is deleted once it is read.
        Raises SettingError and StorageError."""
        path, info = self.path, self.info
        if not files:
            raise StorageError("No file is chosen. Choose one, or name one on this machine.")
        for file in files:
            if not file.is_file():
                raise StorageError(f"There is no file {str(file)!r}. Give the path of a file.")
        if not self.busy.acquire(blocking=False):
            raise StorageError("A file is being built already. Wait until that is done.")
        self.over.clear()
        self.stopped.clear()
        self.problem, self.done = None, ""
        self.share, self.words, self.began = 0.0, "Starting", monotonic()
        title = ", ".join(file.name for file in files)[:TITLE]
        few = sum(file.stat().st_size for file in files) < FEW
        spec = Spec(
            str(path),
            info.tokenizer_fingerprint,
            info.vocabulary_size,
            title,
            BUDGET,
            1 if few else FEWEST,
        )
        threading.Thread(
            target=self.work, args=(files, spec, uploaded), name="statistics", daemon=True
        ).start()

    def watch(self) -> Iterator[Progress]:
        """How far it is, again and again until it is over. Closing the iterator ends nothing.

        Raises Cancelled when it was stopped, and StrataError that says why it failed.
        """
        while not self.over.wait(LOOK_SECONDS):
            yield Progress(self.share, self.words)
        if self.problem:
            raise self.problem

    def stop(self) -> None:
        """End the build; the file that was there stays."""
        self.stopped.set()
        if (running := self.process) is not None:
            with suppress(OSError):
                running.kill()

    def work(self, files: Sequence[Path], spec: Spec, uploaded: bool) -> None:
        """Build it; what goes wrong is in `problem`."""
        try:
            Path(spec.path).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile() as tokens:
                count = self.read(files, spec, tokens)
                meta = self.count(spec, tokens, count)
            self.use()
            numbers = (f"{int(meta[name]):,} {name}" for name in ("tokens", "documents", "keys"))
            used = self.engine.state.info.tokenizer_fingerprint == spec.tokenizer
            when = "and in use" if used else "to be used when its model is loaded again"
            self.done = f"Made from {', '.join(numbers)}, {when}.{self.done}"
        except StrataError as error:
            self.problem = error
        except (OSError, MemoryError) as error:
            self.problem = StorageError(f"The file was not made: {error}. Free some room first.")
        finally:
            if uploaded:
                delete(files)
            if self.stopped.is_set() and not self.done.startswith("Made"):
                self.problem = Cancelled("No file was made: it was stopped. Nothing was changed.")
            self.busy.release()
            self.over.set()

    def read(self, files: Sequence[Path], spec: Spec, tokens: IO[bytes]) -> int:
        """Write the tokens of the files' documents; their number."""
        meter, whole = Meter(), sum(file.stat().st_size for file in files) or 1
        most = min(MOST_TOKENS, int(psutil.virtual_memory().available * SPARED) // TOKEN_BYTES)
        count = 0
        for file in files:
            for batch in batches(documents(file, meter)):
                for document in self.engine.tokens(batch, spec.tokenizer):
                    np.array([*document, END], dtype=np.uint32).tofile(tokens)
                    count += len(document)
                self.tell(file.name, meter.done / whole, count)
                if self.stopped.is_set():
                    raise Cancelled("No file was made: it was stopped.")
                if count >= most:
                    self.done = f" Reading stopped after {count:,} tokens, the most for now."
                    return count
                self.rest()
        if count < 2:
            raise StorageError(f"There is no text in {spec.title!r}. Choose files with text.")
        return count

    def rest(self) -> None:
        """Leave the model to an answer that grows."""
        until = monotonic() + REST_SECONDS
        while self.answering() and not self.stopped.is_set() and monotonic() < until:
            self.stopped.wait(GLANCE_SECONDS)

    def tell(self, name: str, share: float, count: int) -> None:
        """How far the reading is: the rate, and about how long it will take."""
        spent = max(monotonic() - self.began, 1e-3)
        self.share = min(1.0, share)
        left = spent * (1 - self.share) / self.share if self.share else 0.0
        minutes, seconds = divmod(round(left), 60)
        self.words = (
            f"Reading {name} · {count:,} tokens · {count / spent:,.0f} tokens/s · about "
            f"{minutes}:{seconds:02} left"
        )

    def count(self, spec: Spec, tokens: IO[bytes], count: int) -> dict[str, str]:
        """Have the tokens counted, in another process; the file's meta data."""
        self.share, self.words = None, f"Counting {count:,} tokens"
        tokens.seek(0)
        command = process.command("storage.statistics_worker", spec.command())
        with subprocess.Popen(
            command,
            env=process.environment(),
            stdin=tokens,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        ) as running:
            self.process = running
            atexit.register(self.stop)
            try:
                if self.stopped.is_set():
                    running.kill()
                return self.followed(running, count)
            finally:
                atexit.unregister(self.stop)
                self.process = None
                running.kill()
                running.wait()
                # Where it was ended it could not clean up after itself.
                final = Path(spec.path)
                final.with_name(f"{final.name}.{running.pid}.partial").unlink(missing_ok=True)

    def followed(self, running: "subprocess.Popen[str]", count: int) -> dict[str, str]:
        """What the process makes."""
        assert running.stdout is not None
        for line in running.stdout:
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == MADE:
                return dict(json.loads(rest))
            if kind == FAILED:
                raise StorageError(rest)
            if kind in STAGES:
                self.share = (STAGES.index(kind) + float(rest)) / len(STAGES)
                self.words = f"Counting {count:,} tokens: {kind}"
        if self.stopped.is_set():
            raise Cancelled("No file was made: it was stopped.")
        raise StorageError(
            f"Counting ended with {process.ending(running.wait())}, likely for want of memory: "
            f"{count:,} tokens take about {count * TOKEN_BYTES >> 20:,} MiB. Choose fewer files."
        )

    # files as they are

    def take_in(self, source: Path) -> None:
        """Use a file from elsewhere in place of the one that there is. Raises StorageError for one
        that cannot be used with the loaded model."""
        path, info = self.path, self.info
        try:
            size = source.stat().st_size
        except OSError as error:
            raise StorageError(f"{str(source)!r} cannot be read: {error.strerror}.") from error
        if size > MOST_IMPORTED:
            raise StorageError(
                f"{str(source)!r} has {size >> 20:,} MiB, and at most {MOST_IMPORTED >> 20:,} are "
                "taken in. Build a smaller one."
            )
        table = StatisticsTable(source)
        try:
            table.check_all(CHECK_SECONDS)
            meta = table.meta
        finally:
            table.close()
        if meta["tokenizer"] != info.tokenizer_fingerprint:
            raise StorageError(
                f"{str(source)!r} was made for another tokenizer than that of {info.name}: its "
                "tokens would mean something else. Load the model that it was made for first."
            )
        if int(meta["vocabulary"]) != info.vocabulary_size:
            raise StorageError(
                f"{str(source)!r} is for {int(meta['vocabulary']):,} tokens, and {info.name} has "
                f"{info.vocabulary_size:,}. Build one for this model."
            )
        with replacing(path) as partial:
            shutil.copyfile(source, partial)
        self.use()

    def copy_to(self, target: Path) -> Path:
        """Copy the file in use; where it lies then. Raises StorageError, also for a file that is
        there already."""
        table = self.current.statistics
        assert self.info
        if table is None:
            raise StorageError("There is no file to copy: none is for this model. Build one first.")
        if target.is_dir():
            target = target / table.path.name
        try:
            with target.open("xb") as copy, table.path.open("rb") as file:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise StorageError(
                f"{str(target)!r} cannot be written: {error.strerror}. Name a new file in a folder "
                "that is there."
            ) from error
        return target

    def remove(self) -> None:
        """Delete the file of the loaded model's tokenizer. One that came along stays, and is used
        from then on."""
        try:
            os.unlink(self.path)
        except OSError as error:
            raise StorageError(f"The file cannot be removed: {error.strerror}.") from error
        self.use()


def batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are worth a question to the engine."""
    batch, size = list[Document](), 0
    for document in found:
        batch.append(document)
        size += (
            len(document) if isinstance(document, str) else sum(len(m.content) for m in document)
        )
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def delete(files: Sequence[Path]) -> None:
    """Delete what was sent for a build."""
    for file in files:
        with suppress(OSError):
            file.unlink()
