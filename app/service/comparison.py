"""Compares two ways to answer one prompt, in pairs of runs.

The sides differ in their method (plain decoding is one of them), in their settings, or in their
model. Every run starts from an empty state (engine/compare.py) and no run learns from another. The
order is swapped from pair to pair, so that a machine that warms up or slows down favours neither
side.

Both sides can also answer at once, which is a race to watch: they take turns of equal time
(engine/rounds.py). Each slows the other one down, so no speedup is measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Literal

from app.service.jobs import Stop
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Reruns, Speedup, middle_of
from engine.engine import Engine, Event, Measured, Notice, Request, Started
from engine.errors import Cancelled, ModelError
from engine.hsd.profile import Profile
from engine.methods import PLAIN, Method
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import Collector, Verdict, from_server, keeps_text, planned, worth
from engine.settings import Generation, Sampling
from engine.streams import Stream
from engine.types import NO_RUN, Learned, Prefill, Run, Step

UPDATE_SECONDS = 0.1
LEFT, RIGHT = 0, 1
"""The sides, by their position on the page."""
Differs = Literal["", "settings", "model"]
"""How two sides differ besides their methods; if they do, their texts may differ."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its method, its settings, and its model, where "" is the loaded one."""

    method: Method
    generation: Generation
    source: str = ""


def differs(left: Side, right: Side) -> Differs:
    if left.source != right.source:
        return "model"
    return "" if left.generation == right.generation else "settings"


@dataclass(frozen=True, slots=True)
class Proof:
    """The last answer decoded again, plainly and with drafts; unfinished while `verdict` is None.

    `running` is the method that runs in pair number `pair`; `shown` is the answer itself, which the
    verdict is about. `reruns` holds the times of all reruns; `plain` and `accelerated` are the
    median pair. `same_text` is False if another text is no fault: see `keeps_text`.
    """

    tokens: int
    running: str = PLAIN.name
    verdict: Verdict | None = None
    reruns: Reruns | None = None
    plain: Run | None = None
    accelerated: Run | None = None
    shown: Run | None = None
    same_text: bool = True
    pair: int = 1

    @property
    def speedup(self) -> Speedup:
        return self.reruns.speedup if self.reruns else UNKNOWN


@dataclass(frozen=True, slots=True)
class Progress:
    """The finished pairs (left, right), the unfinished run of a `side`, and whether all is over.

    `same_text` is False if another text is no fault: see `keeps_text` and `differs`. `foreign` says
    that both sides use another model than the loaded one.
    """

    pairs: tuple[tuple[Run, Run], ...]
    repeat: int
    running: Run | None
    cancelled: bool = False
    same_text: bool = True
    over: bool = False
    side: int = LEFT
    differs: Differs = ""
    foreign: bool = False

    @property
    def speedups(self) -> list[Speedup]:
        return [self.worth([pair]) for pair in self.pairs]

    @property
    def speedup(self) -> Speedup:
        return self.worth(self.pairs)

    def worth(self, pairs: Sequence[tuple[Run, Run]]) -> Speedup:
        """The speedup of the right side over the left one, by the time per token.

        Two runs that differ only in their method and accepted no draft did the same work, so a
        ratio above 1 is noise (see `gain`). This does not hold for other differences, nor for a
        server, which need not report what it accepted.
        """
        kept = sum(summarise(run).kept for pair in pairs for run in pair)
        return worth(pairs, 1 if self.differs or self.served else kept)

    @property
    def middle(self) -> int:
        """The index of the pair whose ratio is the median; of the last one if none is known."""
        found = {at: ratio for at, pair in enumerate(self.pairs) if (ratio := self.ratio(pair))}
        return middle_of(found) if found else len(self.pairs) - 1

    def ratio(self, pair: tuple[Run, Run]) -> float | None:
        """How many times as fast the right side of a pair was, also where that is noise."""
        if self.differs == "model":
            return replace(self, pairs=(pair,)).by_character
        return worth([pair], 1).whole

    @property
    def served(self) -> bool:
        return any(from_server(run) is not None for pair in self.pairs for run in pair)

    @property
    def by_character(self) -> float | None:
        """The speedup by the time per character, as tokens of two models differ in length."""
        ratios = [
            characters(right) / slow for left, right in self.pairs if (slow := characters(left))
        ]
        return median(ratios) if ratios and all(ratios) else None


@dataclass(frozen=True, slots=True)
class Race:
    """Both sides at once, as far as they have come: `runs`, the left one and the right one. The
    answer of the side `first` has ended, when that of the other one had `behind` tokens; None while
    neither has. `same_text` and `differs` are as in Progress."""

    runs: tuple[Run, Run]
    first: int | None = None
    behind: int = 0
    over: bool = False
    same_text: bool = True
    differs: Differs = ""

    @property
    def cancelled(self) -> bool:
        return any(run.broken_off for run in self.runs)


def characters(run: Run) -> float:
    seconds = summarise(run).seconds
    return sum(len(token.text) for token in run.tokens) / seconds if seconds else 0.0


class Pace:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next = perf_counter()

    def due(self) -> bool:
        now = perf_counter()
        if now < self.next:
            return False
        self.next = now + self.seconds
        return True


class Growing:
    """The run of a request, which grows with its events."""

    def __init__(
        self,
        request: Request,
        report: Callable[[str], None],
        on_start: Callable[[Started], None] = lambda started: None,
    ) -> None:
        self.request, self.report, self.on_start = request, report, on_start
        self.found = Collector(NO_RUN)

    @property
    def run(self) -> Run:
        return self.found.run

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.on_start(event)
            how = self.request.method, self.request.generation
            self.found = Collector(planned(event.info, *how))
        elif isinstance(event, Notice):
            self.report(event.text)
        elif isinstance(event, Prefill | Step | Learned):
            self.found.add(event)


def goes_on(event: Event) -> bool:
    """Whether this is a step after which its answer goes on."""
    return isinstance(event, Step) and event.finish is None


def followed(
    stream: Stream[Event],
    request: Request,
    report: Callable[[str], None],
    on_start: Callable[[Started], None] = lambda started: None,
) -> Iterator[Run | Waiting]:
    """Yields a run as it grows, the finished one last. Closing the iterator stops the run."""
    pace, growing = Pace(UPDATE_SECONDS), Growing(request, report, on_start)
    try:
        for event in stream:
            if isinstance(event, Waiting):
                yield event
                continue
            growing.take(event)
            if goes_on(event) and pace.due():
                yield growing.run
    finally:
        stream.stop()
    yield growing.run


@dataclass(slots=True)
class Pairs:
    """Runs of two requests, the left one and the right one, measured in pairs.

    `report` receives notices about other problems, and `stop` ends the runs. `measured` says what
    the drafters may know, or determines it from the prompt of each side. `info` is the model of all
    runs, by default that of the first run. `profile` returns the profile of the draft models that
    are loaded when a run begins. `swap` loads the model of a side, where models are swapped between
    runs, so that every run needs a warm-up.
    """

    engine: Engine
    requests: tuple[Request, Request]
    measured: Measured | Callable[[Started], Measured]
    report: Callable[[str], None]
    stop: Stop
    info: BackendInfo | None
    profile: Callable[[Sampling], Profile | None]
    differs: Differs = ""
    foreign: bool = False
    swap: Callable[[int], Iterator[Waiting]] | None = None
    warm: bool = True
    """Whether the next run needs a warm-up."""
    infos: list[BackendInfo | None] = field(init=False)
    known: list[Measured | None] = field(init=False)

    def __post_init__(self) -> None:
        known = self.measured if isinstance(self.measured, Measured) else None
        self.infos, self.known = [self.info, self.info], [known, known]

    def run(self, side: int) -> Iterator[Run | Waiting]:
        if self.swap is not None:
            yield from self.swap(side)
        yield from self.peek(side)
        yield from self.decoded(side, self.requests[side])

    def peek(self, side: int) -> Iterator[Waiting]:
        """Find out what the drafters of a side may know, as they might know the answer. A plain run
        has no drafters and gives the prompt."""
        request = self.requests[side]
        if self.known[side] is None and request.method != PLAIN:
            first = replace(request.generation, max_tokens=1)
            for item in self.decoded(side, replace(request, method=PLAIN, generation=first)):
                if isinstance(item, Waiting):
                    yield item

    def decoded(self, side: int, request: Request) -> Iterator[Run | Waiting]:
        request = self.measuring(side, request)
        stream = self.stop.start(lambda: self.engine.generate(request))
        yield from followed(stream, request, self.report, partial(self.started, side))

    def measuring(self, side: int, request: Request) -> Request:
        measured = replace(self.known[side] or Measured(), warm=self.warm)
        self.warm = self.swap is not None
        profile = self.profile(request.generation.sampling)
        return replace(request, measured=measured, profile=profile)

    def started(self, side: int, started: Started) -> None:
        self.same_model(side, started.info)
        if self.known[side] is None and not isinstance(self.measured, Measured):
            found = self.measured(started)
            for each in self.sharing(side):
                self.known[each] = found

    def same_model(self, side: int, info: BackendInfo) -> None:
        """Raise ModelError if this is not the model of the side's earlier runs."""
        for each in self.sharing(side):
            known = self.infos[each] = self.infos[each] or info
            if info != known:
                raise ModelError(
                    f"{known.name} was replaced by another model while the comparison waited. "
                    "Press Compare again."
                )

    def sharing(self, side: int) -> tuple[int, ...]:
        return (side,) if self.differs == "model" else (LEFT, RIGHT)

    @property
    def same_text(self) -> bool:
        return not self.differs and all(
            keeps_text(request.method, request.generation.sampling) for request in self.requests
        )

    def compare(
        self,
        repeats: int,
        enough: Callable[[Sequence[tuple[Run, Run]], float], bool] = lambda pairs, seconds: False,
    ) -> Iterator[Progress | Waiting]:
        """Run at most `repeats` pairs, or fewer once `enough(pairs, seconds)` is true for the
        finished pairs and the seconds that they took.

        If stopped, it ends with the finished pairs. Raises Cancelled if there is none and the next
        run has not begun.
        """
        base = Progress(
            (), 0, None, same_text=self.same_text, differs=self.differs, foreign=self.foreign
        )
        first = perf_counter()
        for repeat in range(repeats):
            done: dict[int, Run] = {}
            base = replace(base, repeat=repeat)
            try:
                for side in (LEFT, RIGHT) if repeat % 2 == 0 else (RIGHT, LEFT):
                    for item in self.run(side):
                        if isinstance(item, Waiting):
                            yield item
                            continue
                        done[side] = item
                        yield replace(base, running=item, side=side)
                    # A run also ends early if another model is to be loaded.
                    if self.stop.is_set() or done[side].broken_off:
                        yield replace(base, cancelled=True)
                        return
            except Cancelled:
                if not base.pairs:
                    raise
                yield replace(base, cancelled=True)
                return
            base = replace(base, pairs=(*base.pairs, (done[LEFT], done[RIGHT])))
            over = repeat == repeats - 1 or enough(base.pairs, perf_counter() - first)
            yield replace(base, over=over)
            if over:
                return

    def race(self) -> Iterator[Race | Waiting]:
        """Answer both requests at once, in turns of equal time, until both have ended or are
        stopped."""
        for side in (LEFT, RIGHT):
            yield from self.peek(side)
        self.warm = False  # It would take the time of the first side only.
        requests = [self.measuring(side, each) for side, each in enumerate(self.requests)]
        growing = [
            Growing(request, self.report, partial(self.started, side))
            for side, request in enumerate(requests)
        ]
        race = Race((NO_RUN, NO_RUN), same_text=self.same_text, differs=self.differs)

        def now(over: bool = False) -> Race:
            return replace(race, runs=(growing[LEFT].run, growing[RIGHT].run), over=over)

        pace = Pace(UPDATE_SECONDS)
        stream = self.stop.start(lambda: self.engine.take_turns(requests))
        try:
            for item in stream:
                if isinstance(item, Waiting):
                    yield item
                    continue
                growing[item.answer].take(item.event)
                if isinstance(item.event, Step) and item.event.finish and race.first is None:
                    other = growing[RIGHT if item.answer == LEFT else LEFT]
                    race = replace(race, first=item.answer, behind=len(other.run.tokens))
                elif goes_on(item.event) and pace.due():
                    yield now()
        finally:
            stream.stop()
        yield now(over=True)
