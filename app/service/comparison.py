"""Two ways to answer one prompt, one after the other, and what the pairs say.

The sides differ in their method (plain decoding is one of them), in their settings, or in their
model. Every run starts from nothing (engine/compare.py), none may learn from another, and the order
is swapped from pair to pair, so that a machine that warms up or slows down favours neither. Both
are drawn in the same way while they run: a page costs both the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any, Literal

from app.service.tasks import Stop
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Speedup
from engine.engine import Engine, Event, Measured, Notice, Request, Started, answered
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
"""The sides, as they stand on the page."""
Differs = Literal["", "settings", "model"]
"""What two sides have besides their methods that is not the same: then their texts may differ."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: how it decodes, what it draws, and by which model: "" is the loaded one."""

    method: Method
    generation: Generation
    source: str = ""


def differs(left: Side, right: Side) -> Differs:
    """What of two sides is not the same, besides their methods."""
    if left.source != right.source:
        return "model"
    return "" if left.generation == right.generation else "settings"


@dataclass(frozen=True, slots=True)
class Proof:
    """The last answer decoded again, plainly and with drafts: under way while `verdict` is None.

    `running` is the method at work, `shown` the answer itself, which the verdict is about; the
    speedup is that of the two reruns. `same_text` is False where another text is no fault: see
    `keeps_text`.
    """

    tokens: int
    running: str = PLAIN.name
    verdict: Verdict | None = None
    speedup: Speedup = UNKNOWN
    plain: Run | None = None
    accelerated: Run | None = None
    shown: Run | None = None
    same_text: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """Pairs finished so far, (left, right), and the run under way on a `side`; whether it is over.

    `same_text` is False where another text is no fault: see `keeps_text`, and `differs`. `foreign`:
    both sides are of another model than the loaded one.
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
        """What each pair says."""
        return [self.worth([pair]) for pair in self.pairs]

    @property
    def speedup(self) -> Speedup:
        """The median over the repeats."""
        return self.worth(self.pairs)

    def worth(self, pairs: Sequence[tuple[Run, Run]]) -> Speedup:
        """How many times as fast the right side was, by the time of a token.

        Two runs that differ in their method alone, and accepted no draft, did the same: a ratio
        above 1 is noise (see `gain`). Others may well differ, and a server need not tell.
        """
        kept = sum(summarise(run).kept for pair in pairs for run in pair)
        return worth(pairs, 1 if self.differs or self.served else kept)

    @property
    def served(self) -> bool:
        """Whether the runs came from a server."""
        return any(from_server(run) is not None for pair in self.pairs for run in pair)

    @property
    def by_character(self) -> float | None:
        """The same by the time of a character: the tokens of two models are not equally long."""
        ratios = [
            characters(right) / slow for left, right in self.pairs if (slow := characters(left))
        ]
        return median(ratios) if ratios and all(ratios) else None


def characters(run: Run) -> float:
    """Characters per second of a whole answer."""
    seconds = summarise(run).seconds
    return sum(len(token.text) for token in run.tokens) / seconds if seconds else 0.0


class Pace:
    """Says when the next update of the interface is due."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next = perf_counter()

    def due(self) -> bool:
        """True at most once per interval."""
        now = perf_counter()
        if now < self.next:
            return False
        self.next = now + self.seconds
        return True


def followed(
    stream: Stream[Event],
    request: Request,
    reply: Callable[[Any], Any],
    report: Callable[[str], None],
    begun: Callable[[Started], None] = lambda started: None,
) -> Iterator[Run | Waiting]:
    """A run as it grows; the finished one last. Closed early, it is stopped."""
    pace, found = Pace(UPDATE_SECONDS), Collector(NO_RUN)
    try:
        for event in answered(stream, reply):
            if isinstance(event, Waiting):
                yield event
            elif isinstance(event, Started):
                begun(event)
                found = Collector(planned(event.info, request.method, request.generation))
            elif isinstance(event, Notice):
                report(event.text)
            elif isinstance(event, Prefill | Step | Learned):
                found.add(event)
                if isinstance(event, Step) and event.finish is None and pace.due():
                    yield found.run
    finally:
        stream.stop()
    yield found.run


class Pairs:
    """Runs of two requests, the left one and the right one, measured in pairs.

    `reply` answers what the engine asks for, `report` is told what went wrong aside, `stop` ends
    them. `measured` is what the drafters may know. `info` is the model of all runs: that of the
    first one, where none is given.
    """

    def __init__(
        self,
        engine: Engine,
        requests: tuple[Request, Request],
        measured: Measured,
        reply: Callable[[Any], Any],
        report: Callable[[str], None],
        stop: Stop,
        info: BackendInfo | None = None,
    ) -> None:
        self.engine, self.requests = engine, requests
        self.reply, self.report, self.stop = reply, report, stop
        self.differs: Differs = ""
        self.foreign = False
        self.ready: Callable[[int], Iterator[Waiting]] = lambda side: iter(())
        """Has the model of a side loaded."""
        self.profile: Callable[[Sampling], Profile | None] = lambda sampling: None
        """The profile of the draft models that there are when a run begins."""
        self.unlearn: Callable[[Started], Measured] | None = None
        """What the drafters may know in runs of such a prompt, where that has to be found out."""
        self.infos: list[BackendInfo | None] = [info, info]
        self.known: list[Measured | None] = [measured, measured]
        self.cold, self.exchanged = True, False
        """Whether the model has not been woken up yet, and whether models are exchanged between
        runs: then each run has its model woken up."""

    def unlearning(self, unlearn: Callable[[Started], Measured]) -> None:
        """Have it found out for every side what its drafters may know."""
        self.unlearn, self.known = unlearn, [None, None]

    def run(self, side: int) -> Iterator[Run | Waiting]:
        """One run of a side as it grows; the finished one last."""
        yield from self.ready(side)
        request = self.requests[side]
        if self.known[side] is None and request.method != PLAIN:
            # Its drafters might know the answer; plain decoding has none, and tells the prompt.
            first = replace(request.generation, max_tokens=1)
            peek = replace(request, method=PLAIN, generation=first)
            for item in self.decoded(side, peek):
                if isinstance(item, Waiting):
                    yield item
        yield from self.decoded(side, request)

    def decoded(self, side: int, request: Request) -> Iterator[Run | Waiting]:
        """A request of a side as it is answered."""
        measured = self.known[side] or Measured()
        measured = replace(measured, warm=self.cold or self.exchanged)
        self.cold = False
        profile = self.profile(request.generation.sampling)
        request = replace(request, measured=measured, profile=profile)

        def begun(started: Started) -> None:
            self.same_model(side, started.info)
            if self.known[side] is None and self.unlearn is not None:
                found = self.unlearn(started)
                for each in (side,) if self.differs == "model" else (LEFT, RIGHT):
                    self.known[each] = found

        stream = self.stop.start(lambda: self.engine.generate(request))
        yield from followed(stream, request, self.reply, self.report, begun)

    def same_model(self, side: int, info: BackendInfo) -> None:
        """Raise ModelError when it is not the model of the side's runs before."""
        for each in (side,) if self.differs == "model" else (LEFT, RIGHT):
            known = self.infos[each] = self.infos[each] or info
            if info != known:
                raise ModelError(
                    f"{known.name} was replaced by another model while the comparison waited. "
                    "Press Compare again."
                )

    @property
    def same_text(self) -> bool:
        """Whether the two must say the same."""
        return not self.differs and all(
            keeps_text(request.method, request.generation.sampling) for request in self.requests
        )

    def compare(self, repeats: int, enough: float = float("inf")) -> Iterator[Progress | Waiting]:
        """At most `repeats` pairs; no further one is begun once they took `enough` seconds.

        Stopped, it ends with the pairs there are. Raises Cancelled where there is none and the run
        that was next had not begun.
        """
        kind, foreign = self.differs, self.foreign
        base = Progress((), 0, None, same_text=self.same_text, differs=kind, foreign=foreign)
        pairs: list[tuple[Run, Run]] = []
        first = perf_counter()
        for repeat in range(repeats):
            done: dict[int, Run] = {}
            base = replace(base, pairs=tuple(pairs), repeat=repeat)
            try:
                for side in (LEFT, RIGHT) if repeat % 2 == 0 else (RIGHT, LEFT):
                    for item in self.run(side):
                        if isinstance(item, Waiting):
                            yield item
                            continue
                        done[side] = item
                        yield replace(base, running=item, side=side)
                    # Another model that is wanted ends a run as well as its user.
                    if self.stop.is_set() or done[side].broken_off:
                        yield replace(base, cancelled=True)
                        return
            except Cancelled:
                if not pairs:
                    raise
                yield replace(base, cancelled=True)
                return
            pairs.append((done[LEFT], done[RIGHT]))
            over = repeat == repeats - 1 or perf_counter() - first >= enough
            yield replace(base, pairs=tuple(pairs), over=over)
            if over:
                return
