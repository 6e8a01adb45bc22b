"""The two formats of the demonstration model: it runs in the one that is faster on this machine.

Which one that is depends on the processor and the libraries, so it is measured: once, in processes
of their own, while nobody uses the program. Until then it is taken to be the GGUF file, which also
loads sooner. Both hold the same weights, but their libraries round differently, so a seed may give
another text. Who loads the other one by hand gets that one from then on.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from app.arguments import EMBEDDED
from engine.errors import StorageError
from engine.models import llama_cpp_python
from engine.models.formats import format_of
from engine.models.loaders import DEFAULT_RUNTIME
from engine.models.plain_trial import trial
from engine.settings import Runtime
from storage.database import Database
from storage.speeds import MeasuredSpeed, SpeedStore

EMBEDDED_FILE = EMBEDDED.with_suffix(".gguf")
"""The embedded target as a GGUF file."""
FILE, FOLDER = str(EMBEDDED_FILE), str(EMBEDDED)
BOTH = (FILE, FOLDER)
WORDS = {FILE: "GGUF", FOLDER: "safetensors"}
LIBRARIES = {FILE: "llama-cpp-python", FOLDER: "torch"}
CHOICE = "demonstration model"
"""The name of the choice that was made by hand."""
QUIET_SECONDS = 5.0
"""Nobody uses the program for so long before speeds are measured."""

Trial = Callable[[str, Runtime, Callable[[], bool]], float | None]


@dataclass(frozen=True, slots=True)
class Faster:
    """The faster format, how many times as fast it is as the other one, and in words."""

    source: str
    times: float
    words: str


class Formats:
    """See the module's docstring. `measure` is engine.models.plain_trial.trial."""

    def __init__(self, database: Database, measure: Trial = trial) -> None:
        self.store, self.measure = SpeedStore(database), measure
        self.failed: set[str] = set()
        """What did not run, as far as this process knows."""

    # what is known

    def usable(self, source: str) -> bool:
        """Whether a format can be tried: its library is here, and it did not fail with it."""
        if source == FILE and not (EMBEDDED_FILE.is_file() and llama_cpp_python.installed()):
            return False
        known = self.speed(source)
        return source not in self.failed and (known is None or known.tokens_per_second > 0)

    def speed(self, source: str) -> MeasuredSpeed | None:
        """What was measured of a format with the library that is here; None where nothing was."""
        try:
            return self.store.load(source, library(source))
        except StorageError:
            return None

    @property
    def faster(self) -> Faster | None:
        """Which format is faster here; None where that was not measured, or one does not run."""
        speeds = {source: self.speed(source) for source in BOTH}
        found = {s: known for s, known in speeds.items() if known and known.tokens_per_second > 0}
        if len(found) < len(BOTH):
            return None
        best = max(found, key=lambda source: found[source].tokens_per_second)
        other = FILE if best == FOLDER else FOLDER
        fast, slow = found[best].tokens_per_second, found[other].tokens_per_second
        day = datetime.fromtimestamp(found[best].measured)
        words = (
            f"{WORDS[best]} is {fast / slow:.1f} times as fast here as {WORDS[other]}: {fast:,.0f} "
            f"against {slow:,.0f} tokens/s of plain decoding, measured on {day:%Y-%m-%d}."
        )
        return Faster(best, fast / slow, words)

    @property
    def automatic(self) -> str:
        """The format that the program takes by itself."""
        usable = [source for source in BOTH if self.usable(source)]
        faster = self.faster
        if faster is not None and faster.source in usable:
            return faster.source
        return usable[0] if usable else FOLDER

    def first(self, runtime: Runtime = DEFAULT_RUNTIME) -> str:
        """The format that a program starts with: the one that `runtime` has settings for, the one
        chosen by hand, else the faster one."""
        for source in BOTH:
            own = format_of(source).settings
            if any(getattr(runtime, name) != getattr(DEFAULT_RUNTIME, name) for name in own):
                return source if self.usable(source) else self.automatic
        try:
            chosen = self.store.chosen(CHOICE)
        except StorageError:
            chosen = ""
        return chosen if chosen in BOTH and self.usable(chosen) else self.automatic

    # what changes it

    def prefer(self, source: str) -> None:
        """Somebody loaded this format by hand: the program starts with it from now on. Choosing
        the one that it would take anyway leaves it free to choose. Raises StorageError."""
        if source in BOTH:
            self.failed.discard(source)
            self.store.choose(CHOICE, "" if source == self.automatic else source)

    def instead(self, source: str, remember: bool = True) -> str:
        """The other format for one that did not run; "" where there is none. With `remember` the
        program does not try it again before its library is another one."""
        if source not in BOTH:
            return ""
        if remember:
            self.failed.add(source)
            with suppress(StorageError):  # then it is tried again at the next start
                self.store.save(source, library(source), 0.0)
        other = FOLDER if source == FILE else FILE
        return other if self.usable(other) else ""

    def learn(self, quiet: Callable[[], bool], over: threading.Event) -> Faster | None:
        """Measure both formats where that was not done, one after the other; each time `quiet` has
        been true for a while. Ends early once it is `over`. None where there is nothing to choose.
        """
        if not all(map(self.usable, BOTH)):
            return None
        wanted = [source for source in BOTH if self.speed(source) is None]
        while wanted and still(quiet, over):
            speed = self.measure(wanted[0], DEFAULT_RUNTIME, lambda: quiet() and not over.is_set())
            if speed is not None:
                source = wanted.pop(0)
                with suppress(StorageError):  # then it is measured again
                    self.store.save(source, library(source), speed)
        return self.faster


def still(quiet: Callable[[], bool], over: threading.Event) -> bool:
    """Wait until it has been quiet for a while; False when it is over before that."""
    seconds = 0.0
    while seconds < QUIET_SECONDS:
        if over.wait(min(1.0, QUIET_SECONDS)):
            return False
        seconds = seconds + min(1.0, QUIET_SECONDS) if quiet() else 0.0
    return not over.is_set()


def library(source: str) -> str:
    """What runs a format, with its version: another one may be faster or slower."""
    name = LIBRARIES[source]
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} of no version"
