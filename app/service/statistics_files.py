"""Builds, imports, exports and removes statistics files for the loaded model's tokenizer.

First the engine tokenizes the texts, batch by batch: one batch in REST_SECONDS while an answer
grows, otherwise as fast as it can. Then a separate process with low priority counts the tokens
(storage/statistics_build.py). The new file replaces the old one atomically, and later answers draft
from it. A stopped build leaves no files. An imported file is checked before it is copied.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

import numpy as np
import psutil

from app.service.current import Current
from app.service.jobs import Job, Progress, Slot
from engine import process
from engine.backends.base import BackendInfo
from engine.engine import Engine
from engine.errors import Cancelled, SettingError, StorageError, StrataError
from storage.documents import Meter, batches, documents
from storage.statistics import SUFFIX, StatisticsTable
from storage.statistics_build import END, FAILED, FEWEST, MADE, STAGES, Spec, replacing

REST_SECONDS = 1.0
GLANCE_SECONDS = 0.05
"""How often it is checked whether the answer is over."""
BATCH = 1 << 16
"""The approximate number of characters that are tokenized at once."""
MOST_TOKENS = 50_000_000
TOKEN_BYTES = 80
"""Bytes of memory per token that counting needs."""
SPARED = 0.5
"""The share of the free memory that counting may use."""
BUDGET = 64 << 20
"""The approximate size of the file in bytes."""
FEW = 8 << 20
"""With fewer bytes of text, tokens that followed a key only once are kept too."""
MOST_IMPORTED = 1 << 30
"""The most bytes of an imported file; a usual one has 64 MB."""
CHECK_SECONDS = 60.0
TITLE = 80
STOPPED = "No file was made: it was stopped. Nothing was changed."

Building = Job[Progress, str]
"""A build. Its result is a text that describes the file."""


class StatisticsFiles:
    """`guests` means that others use this app too; then no file can be changed.

    `answering` says whether any task is running.
    """

    def __init__(
        self, engine: Engine, current: Current, guests: bool, answering: Callable[[], bool]
    ) -> None:
        self.engine, self.current, self.guests = engine, current, guests
        self.answering = answering
        self.slot = Slot[Progress, str]()

    @property
    def info(self) -> BackendInfo:
        """The model whose tokenizer is used. Raises SettingError with guests, and StorageError if
        no model is loaded."""
        if self.guests:
            raise SettingError("Others use this app too: its databases are not changed from here.")
        if not self.engine.state.is_loaded:
            raise StorageError(
                "No model is loaded, and a file belongs to a model's tokenizer. Load one first."
            )
        return self.engine.state.info

    @property
    def path(self) -> Path:
        info = self.info
        if not self.current.folders:
            raise StorageError("There is no data directory to keep a file in.")
        return self.current.folders[0] / f"{info.tokenizer_fingerprint}{SUFFIX}"

    def own(self) -> bool:
        """Whether there is a file that can be removed, besides the bundled one."""
        try:
            return self.path.is_file()
        except (SettingError, StorageError):
            return False

    def use(self) -> None:
        self.current.table = None
        self.engine.read_statistics()

    def start(self, files: Sequence[Path], uploaded: bool = False) -> Building:
        """Start building a file from texts. Files that were `uploaded` are deleted afterwards.

        Raises SettingError and StorageError. The job's result describes what was made; the job
        raises Cancelled if it was stopped, and StorageError with the reason if it failed.
        """
        path, info = self.path, self.info
        if not files:
            raise StorageError("No file is chosen. Choose one, or name one on this machine.")
        for file in files:
            if not file.is_file():
                raise StorageError(f"There is no file {str(file)!r}. Give the path of a file.")
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

        def work(job: Building) -> str:
            try:
                return self.build(files, spec, job)
            except (StrataError, OSError, MemoryError) as error:
                if job.stop.is_set():
                    raise Cancelled(STOPPED) from error
                if isinstance(error, StrataError):
                    raise
                raise StorageError(
                    f"The file was not made: {error}. Free some room first."
                ) from error
            finally:
                for file in files if uploaded else ():
                    with suppress(OSError):
                        file.unlink()

        busy = StorageError("A file is being built already. Wait until that is done.")
        job = self.slot.take(lambda: Job(work, Progress(0.0, "Starting")), busy)
        return job.start("statistics")

    def stop(self) -> None:
        self.slot.cancel()

    def build(self, files: Sequence[Path], spec: Spec, job: Building) -> str:
        Path(spec.path).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as tokens:
            count, cut = self.read(files, spec, tokens, job)
            meta = self.count(spec, tokens, count, job)
        self.use()
        numbers = (f"{int(meta[name]):,} {name}" for name in ("tokens", "documents", "keys"))
        used = self.engine.state.info.tokenizer_fingerprint == spec.tokenizer
        when = "and in use" if used else "to be used when its model is loaded again"
        limit = f" Reading stopped after {count:,} tokens, the most for now." if cut else ""
        return f"Made from {', '.join(numbers)}, {when}.{limit}"

    def read(
        self, files: Sequence[Path], spec: Spec, tokens: IO[bytes], job: Building
    ) -> tuple[int, bool]:
        meter, whole = Meter(), sum(file.stat().st_size for file in files) or 1
        most = min(MOST_TOKENS, int(psutil.virtual_memory().available * SPARED) // TOKEN_BYTES)
        count = 0
        for file in files:
            for batch in batches(documents(file, meter), BATCH):
                for document in self.engine.tokens(batch, spec.tokenizer):
                    np.array([*document, END], dtype=np.uint32).tofile(tokens)
                    count += len(document)
                job.report(reading(file.name, meter.done / whole, count, job.seconds))
                if job.stop.is_set():
                    raise Cancelled(STOPPED)
                if count >= most:
                    return count, True
                self.rest(job)
        if count < 2:
            raise StorageError(f"There is no text in {spec.title!r}. Choose files with text.")
        return count, False

    def rest(self, job: Building) -> None:
        until = monotonic() + REST_SECONDS
        while self.answering() and not job.stop.is_set() and monotonic() < until:
            job.stop.event.wait(GLANCE_SECONDS)

    def count(self, spec: Spec, tokens: IO[bytes], count: int, job: Building) -> dict[str, str]:
        job.report(Progress(None, f"Counting {count:,} tokens"))
        tokens.seek(0)
        command = process.command("storage.statistics_build", spec.command())
        with subprocess.Popen(
            command,
            env=process.environment(),
            stdin=tokens,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        ) as running:
            try:
                with job.ending(running.kill):
                    return self.followed(running, count, job)
            finally:
                running.kill()
                running.wait()
                # A process that was killed could not clean up.
                final = Path(spec.path)
                final.with_name(f"{final.name}.{running.pid}.partial").unlink(missing_ok=True)

    def followed(
        self, running: "subprocess.Popen[str]", count: int, job: Building
    ) -> dict[str, str]:
        assert running.stdout is not None
        for line in running.stdout:
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == MADE:
                return dict(json.loads(rest))
            if kind == FAILED:
                raise StorageError(rest)
            if kind in STAGES:
                share = (STAGES.index(kind) + float(rest)) / len(STAGES)
                job.report(Progress(share, f"Counting {count:,} tokens: {kind}"))
        raise StorageError(
            f"Counting ended with {process.ending(running.wait())}, likely for want of memory: "
            f"{count:,} tokens take about {count * TOKEN_BYTES >> 20:,} MiB. Choose fewer files."
        )

    def take_in(self, source: Path) -> str:
        """Import a file in place of the current one; returns a text that says so. Raises
        StorageError if it cannot be used with the loaded model."""
        path, info = self.path, self.info
        try:
            size = source.stat().st_size
        except OSError as error:
            raise StorageError(f"{str(source)!r} cannot be read: {error.strerror}.") from error
        if size > MOST_IMPORTED:
            raise StorageError(
                f"{str(source)!r} has {size >> 20:,} MiB, and at most {MOST_IMPORTED >> 20:,} can "
                "be imported. Build a smaller one."
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
        return "The file was imported, and is in use."

    def copy_to(self, target: Path) -> Path:
        """Copy the file in use; returns the path of the copy. Raises StorageError, also if the
        target exists already."""
        table = self.current.statistics
        assert self.info
        if table is None:
            raise StorageError("There is no file for this model to copy. Build one first.")
        if target.is_dir():
            target = target / table.path.name
        try:
            with target.open("xb") as copy, table.path.open("rb") as file:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise StorageError(
                f"{str(target)!r} cannot be written: {error.strerror}. Name a new file in a "
                "folder that exists."
            ) from error
        return target

    def remove(self) -> str:
        """Delete the file for the loaded model's tokenizer; returns a text that says so. A bundled
        file stays, and is used from then on."""
        try:
            os.unlink(self.path)
        except OSError as error:
            raise StorageError(f"The file cannot be removed: {error.strerror}.") from error
        self.use()
        return (
            "Your file was removed. The one that came with Strata is used again, if there is one."
        )


def reading(name: str, share: float, count: int, seconds: float) -> Progress:
    share, spent = min(1.0, share), max(seconds, 1e-3)
    left = spent * (1 - share) / share if share else 0.0
    minutes, rest = divmod(round(left), 60)
    return Progress(
        share,
        f"Reading {name} · {count:,} tokens · {count / spent:,.0f} tokens/s · about "
        f"{minutes}:{rest:02} left",
    )
