"""Plain and accelerated decoding of one prompt, one after the other, and what the pairs prove.

Both runs start from nothing (engine/compare.py), neither may learn from the other, and the order is
swapped from pair to pair, so that a machine that warms up or slows down favours neither. Both are
drawn in the same way while they run: a page costs both the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from app.service.tasks import Stop
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Speedup
from engine.engine import Engine, Measured, Notice, Request, Started, answered
from engine.errors import Cancelled, ModelError
from engine.methods import PLAIN
from engine.queue import Waiting
from engine.runs import Collector, Verdict, keeps_text, planned, worth
from engine.types import NO_RUN, Learned, Prefill, Run, Step

UPDATE_SECONDS = 0.1


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
    """Pairs finished so far, (plain, accelerated), and the run under way; whether it is over."""

    pairs: tuple[tuple[Run, Run], ...]
    repeat: int
    running: Run | None
    cancelled: bool = False
    same_text: bool = True
    over: bool = False

    @property
    def speedups(self) -> list[Speedup]:
        """What each pair says."""
        return [worth([pair]) for pair in self.pairs]

    @property
    def speedup(self) -> Speedup:
        """The median over the repeats."""
        return worth(self.pairs)


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


class Pairs:
    """Runs of one request, plainly and as it asks for, measured in pairs.

    `reply` answers what the engine asks for, `report` is told what went wrong aside, `stop` ends
    them. `info` is the model of all runs: that of the first one, where none is given.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        measured: Measured,
        reply: Callable[[Any], Any],
        report: Callable[[str], None],
        stop: Stop,
        info: BackendInfo | None = None,
    ) -> None:
        self.engine, self.request, self.measured = engine, request, measured
        self.reply, self.report, self.stop, self.info = reply, report, stop, info
        self.unlearn: Callable[[tuple[int, ...]], Measured] = lambda prompt: measured
        """What the drafters may know in runs of a prompt of these tokens."""
        self.warm = True

    def run(self, plain: bool) -> Iterator[Run | Waiting]:
        """One run as it grows; the finished one last."""
        method = PLAIN if plain else self.request.method
        measured = replace(self.measured, warm=self.warm)
        self.warm = False
        request = replace(self.request, method=method, measured=measured)
        stream = self.stop.start(lambda: self.engine.generate(request))
        pace, found = Pace(UPDATE_SECONDS), Collector(NO_RUN)
        try:
            for event in answered(stream, self.reply):
                if isinstance(event, Waiting):
                    yield event
                elif isinstance(event, Started):
                    self.same_model(event.info)
                    found = Collector(planned(event.info, method, request.generation))
                    # Plain decoding comes first, and has no drafters that could know an answer.
                    self.measured = self.unlearn(event.prompt)
                elif isinstance(event, Notice):
                    self.report(event.text)
                elif isinstance(event, Prefill | Step | Learned):
                    found.add(event)
                    if isinstance(event, Step) and event.finish is None and pace.due():
                        yield found.run
        finally:
            stream.stop()
        yield found.run

    def same_model(self, info: BackendInfo) -> None:
        """Raise ModelError when it is not the model of the runs before."""
        self.info = self.info or info
        if info != self.info:
            raise ModelError(
                f"{self.info.name} was replaced by another model while the comparison waited. "
                "Press Compare again."
            )

    def compare(self, repeats: int, enough: float = float("inf")) -> Iterator[Progress | Waiting]:
        """At most `repeats` pairs; no further one is begun once they took `enough` seconds.

        Stopped, it ends with the pairs there are. Raises Cancelled where there is none and the run
        that was next had not begun.
        """
        same_text = keeps_text(self.request.method, self.request.generation.sampling)
        pairs: list[tuple[Run, Run]] = []
        first = perf_counter()
        for repeat in range(repeats):
            done: dict[bool, Run] = {}
            try:
                for plain in (True, False) if repeat % 2 == 0 else (False, True):
                    for item in self.run(plain):
                        if isinstance(item, Waiting):
                            yield item
                            continue
                        done[plain] = item
                        yield Progress(tuple(pairs), repeat, item, same_text=same_text)
                    # Another model that is wanted ends a run as well as its user.
                    if self.stop.is_set() or done[plain].broken_off:
                        yield Progress(tuple(pairs), repeat, None, True, same_text)
                        return
            except Cancelled:
                if not pairs:
                    raise
                yield Progress(tuple(pairs), repeat, None, True, same_text)
                return
            pairs.append((done[True], done[False]))
            over = repeat == repeats - 1 or perf_counter() - first >= enough
            yield Progress(tuple(pairs), repeat, None, same_text=same_text, over=over)
            if over:
                return
