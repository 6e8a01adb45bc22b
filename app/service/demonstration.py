"""The demonstration model in the faster of its two formats.

Which format is faster depends on the processor and the libraries, so it is measured once, in
separate processes, while nobody uses the program. So a crashing library does not end the program,
and the memory is free again afterwards. The measure is the speed of whole answers with drafts, as
users get them, because drafts may not help the format that is faster in plain decoding. Until it is
measured the GGUF file is used, which also loads sooner. Both hold the same weights, but their
libraries round differently, so a seed may give another text. A user who loads the other format by
hand gets that one from then on.

    python -m app.service.demonstration SOURCE RUNTIME FOLDER...

measures one model and prints both speeds. The folders contain the statistics.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import monotonic

from app.arguments import EMBEDDED
from app.service.comparison import Pairs, Progress
from app.service.jobs import Stop
from assets import ASSETS
from engine.engine import Load, Measured, Request
from engine.errors import ModelError, StorageError
from engine.local import Local
from engine.machine import processor
from engine.methods import PLAIN, USUAL
from engine.metrics import summarise
from engine.models import llama_cpp_python
from engine.models.formats import format_of
from engine.models.loaders import DEFAULT_RUNTIME, weight_bytes
from engine.process import command, environment
from engine.settings import Generation, Runtime
from engine.types import Message
from storage.database import Database
from storage.machine import MeasuredSpeed, Speed, SpeedStore
from storage.statistics import open_table
from strata_chat import __version__

SECONDS = 180.0
"""A model whose trial takes longer counts as one that does not run here."""
LOOK_SECONDS = 0.2
"""How often it is checked whether the trial may continue."""
STATISTICS = (ASSETS / "statistics",)
QUESTIONS = (
    "Tell me a short story about a boat and a storm.",
    "What do people need to bake bread? Explain it step by step.",
    "Hello! How was your weekend?",
)
"""The prompts: a story, a list of steps, small talk."""
TOKENS = 96
FAILED = Speed(0.0, 0.0)
LIBRARIES = {"transformers": "torch", "llama.cpp": "llama-cpp-python"}
"""What computes the forwards of each kind of model."""

Trial = Callable[[str, Runtime, Callable[[], bool]], Speed | None]


def run_by(source: str) -> str:
    """A description of what a speed depends on: the library, this program, the processor and the
    weights. If any of them changes, the speed is measured again."""
    kind = format_of(source).kind
    library = LIBRARIES.get(kind, kind)
    with suppress(PackageNotFoundError):
        library = f"{library} {version(library)}"
    return (
        f"{library}, Strata {__version__}, {processor()}, {weight_bytes(source)} bytes of weights"
    )


def trial(
    source: str,
    runtime: Runtime,
    may_continue: Callable[[], bool],
    statistics: Sequence[Path] = STATISTICS,
) -> Speed | None:
    """The speed of a model, or FAILED if it does not run here; None if the trial ended early
    because `may_continue` became false."""
    words = command(
        "app.service.demonstration", source, json.dumps(asdict(runtime)), *map(str, statistics)
    )
    latest = monotonic() + SECONDS
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            while may_continue():
                with suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=LOOK_SECONDS)
                    if process.returncode:
                        return FAILED
                    plain, drafted = map(float, output.split()[-2:])
                    return Speed(plain, drafted)
                if monotonic() > latest:
                    return FAILED
            return None
        finally:
            process.kill()


def measured(source: str, runtime: Runtime, statistics: Sequence[Path] = STATISTICS) -> Speed:
    """Load a model here, and answer a few questions both ways. Raises ModelError."""
    engine = Local(partial(open_table, statistics))
    for _ in engine.load(Load(source, runtime)):
        pass
    return of_answers(engine, QUESTIONS)


def of_answers(engine: Local, questions: Iterable[str]) -> Speed:
    """The speed of the loaded model, by the median over some questions. Raises ModelError."""

    speeds: list[tuple[float, float]] = []
    for number, question in enumerate(questions):
        sampling = replace(engine.state.info.sampling, seed=number)
        request = Request((Message("user", question),), (), Generation(sampling, TOKENS), USUAL)
        requests = replace(request, method=PLAIN), request
        pairs = Pairs(engine, requests, Measured(), lambda problem: None, Stop())
        # The first pair is a warm-up.
        for item in pairs.compare(2 if number == 0 else 1):
            if isinstance(item, Progress) and item.over:
                plain, drafted = (summarise(run) for run in item.pairs[-1])
                if plain.seconds and drafted.seconds:
                    speeds.append((plain.tokens / plain.seconds, drafted.tokens / drafted.seconds))
    if not speeds:
        raise ModelError("The model answered nothing, so its speed is not known.")
    return Speed(median(plain for plain, _ in speeds), median(fast for _, fast in speeds))


EMBEDDED_FILE = EMBEDDED.with_suffix(".gguf")
"""The embedded target as a GGUF file."""
FILE, FOLDER = str(EMBEDDED_FILE), str(EMBEDDED)
BOTH = (FILE, FOLDER)
WORDS = {FILE: "GGUF", FOLDER: "safetensors"}
CHOICE = "demonstration model"
"""The name of the choice that was made by hand."""
QUIET_SECONDS = 5.0
"""How long nobody must use the program before speeds are measured."""


@dataclass(frozen=True, slots=True)
class Faster:
    """The faster format, its speed relative to the other one, and a sentence that says so."""

    source: str
    times: float
    words: str


class Formats:
    """`measure` is app.service.demonstration.trial."""

    def __init__(self, database: Database, measure: Trial = trial) -> None:
        self.store, self.measure = SpeedStore(database), measure
        self.failed: set[str] = set()
        """The formats that did not run in this process."""

    # what is known

    def usable(self, source: str) -> bool:
        """Whether a format can be tried: its library is installed, and it did not fail."""
        if source == FILE and not (EMBEDDED_FILE.is_file() and llama_cpp_python.installed()):
            return False
        known = self.speed(source)
        return source not in self.failed and (known is None or known.speed.drafted > 0)

    def speed(self, source: str) -> MeasuredSpeed | None:
        """The measured speed of a format with the current library, if there is one."""
        try:
            return self.store.load(source, run_by(source))
        except StorageError:
            return None

    @property
    def faster(self) -> Faster | None:
        """The faster format; None if that was not measured, or one format does not run."""
        speeds = {source: self.speed(source) for source in BOTH}
        found = {s: known for s, known in speeds.items() if known and known.speed.drafted > 0}
        if len(found) < len(BOTH):
            return None
        best = max(found, key=lambda source: found[source].speed.drafted)
        other = FILE if best == FOLDER else FOLDER
        fast, slow = found[best].speed.drafted, found[other].speed.drafted
        day = datetime.fromtimestamp(found[best].measured)
        words = (
            f"{WORDS[best]} is {fast / slow:.1f} times as fast here as {WORDS[other]}, by whole "
            f"answers with drafts, measured on {day:%Y-%m-%d}."
        )
        return Faster(best, fast / slow, words)

    @property
    def automatic(self) -> str:
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
        """Start the program with this format from now on, as a user loaded it by hand. If it is the
        automatic choice, the choice stays automatic. Raises StorageError."""
        if source in BOTH:
            self.failed.discard(source)
            self.store.choose(CHOICE, "" if source == self.automatic else source)

    def instead(self, source: str, remember: bool = True) -> str:
        """The other format for one that did not run, "" if there is none. With `remember` the
        failed format is not tried again until its library changes."""
        if source not in BOTH:
            return ""
        if remember:
            self.failed.add(source)
            with suppress(StorageError):  # then it is tried again at the next start
                self.store.save(source, run_by(source), FAILED)
        other = FOLDER if source == FILE else FILE
        return other if self.usable(other) else ""

    def learn(self, quiet: Callable[[], bool], over: threading.Event) -> Faster | None:
        """Measure the formats without a known speed, one after the other, each after `quiet` was
        true for a while. Ends early when `over` is set. Returns None if there is no choice.
        """
        if not all(map(self.usable, BOTH)):
            return None
        unknown = [source for source in BOTH if self.speed(source) is None]
        while unknown and still(quiet, over):
            speed = self.measure(unknown[0], DEFAULT_RUNTIME, lambda: quiet() and not over.is_set())
            if speed is not None:
                source = unknown.pop(0)
                with suppress(StorageError):  # then it is measured again
                    self.store.save(source, run_by(source), speed)
        return self.faster


def still(quiet: Callable[[], bool], over: threading.Event) -> bool:
    """Wait until it was quiet for QUIET_SECONDS; returns False if `over` was set before."""
    seconds = 0.0
    while seconds < QUIET_SECONDS:
        if over.wait(min(1.0, QUIET_SECONDS)):
            return False
        seconds = seconds + min(1.0, QUIET_SECONDS) if quiet() else 0.0
    return not over.is_set()


if __name__ == "__main__":
    source, runtime, *folders = sys.argv[1:]
    found = measured(source, Runtime(**json.loads(runtime)), [Path(each) for each in folders])
    print(*found)
