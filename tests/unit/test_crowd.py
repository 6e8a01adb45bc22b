"""Many answers at once: whatever comes in between, each says what it says alone, and nothing is
left of it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Semaphore
from typing import Any, Self

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import engine.decode
import engine.rounds
from engine.backends.base import Filled, LogitScores, Wanted
from engine.engine import Event
from engine.errors import Busy
from engine.local import Local
from engine.queue import Waiting
from engine.settings import Sampling
from engine.streams import Stream
from engine.tree import Tree
from tests.support.crowd import CONVERSATIONS, METHOD_NAMES, OWNERS, Answer, Wish, alone, wishes
from tests.support.inside import SECONDS
from tests.support.lossless import Stated
from tests.support.toy import ToyBackend, deviating, shuffled, toy_logits

CALLS = ("prompt", "forward", "accept")
COSTS = {0: 1.0, 3: 1.1, 7: 1.3, 15: 1.7, 63: 4.0}
HEADS: tuple[Callable[[tuple[int, ...]], Any] | None, ...] = (None, toy_logits, shuffled)
MOMENTS = st.sampled_from((20, 100, 5, 1, 0))
WISHES = wishes((*METHOD_NAMES, "hsd:small@4", "hd+hsd:small@3"))
ASKED, ASKED_FIRST = (st.lists(WISHES, min_size=least, max_size=4) for least in (1, 3))
SMALL = deviating(2.0)
WHICH, PLACES = st.integers(0, 9), st.sampled_from((4, 4, 3, 2, 1))
EACH = 8
"""The answers of an owner that may wait."""
MOST = 100_000
"""More moments than any run has."""


class ByMoments:
    """In the place of the model's thread: it works only from one moment to the next, each when the
    test says so."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.works: list[Callable[[], None]] = []
        self.working: Future[None] | None = None
        self.go, self.paused = Semaphore(0), Semaphore(0)

    def submit(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def moment(self) -> None:
        """Called by the work."""
        self.paused.release()
        assert self.go.acquire(timeout=SECONDS)

    def step(self) -> bool:
        """Work until the next moment; False if nothing is left to do."""
        if self.working is not None:
            self.go.release()
        elif self.works:
            self.working = self.thread.submit(self.works.pop(0))
            self.working.add_done_callback(lambda _: self.paused.release())
        else:
            return False
        assert self.paused.acquire(timeout=SECONDS)
        if self.working.done():
            ended, self.working = self.working, None
            ended.result()
        return True

    def shutdown(self, wait: bool) -> None:
        assert any(not self.step() for _ in range(MOST)), "it ends"
        self.thread.shutdown(wait)


@dataclass
class Stage:
    """What the sequences of a model share: `opened` are those that are open. The next `failing`
    call fails; `failures` are the answers that each such call was for, by their samplers, or
    empty for the call that reads a prompt."""

    thread: ByMoments = field(default_factory=ByMoments)
    opened: set[ToyBackend] = field(default_factory=set)
    failing: str = ""
    failures: list[list[Sampling]] = field(default_factory=list)

    def called(self, what: str, sequences: Sequence["Staged"]) -> None:
        self.thread.moment()
        if self.failing == what:
            self.failing = ""
            self.failures.append([each.sampling for each in sequences if what != "prompt"])
            for each in sequences:
                each.cache, each.tree = [], None
            raise RuntimeError(len(self.failures) - 1)


class Clock:
    """A clock that only forwards advance."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


class Noted(ToyBackend):
    """A toy whose open sequences are known."""

    def __init__(self, stage: Stage, **named: Any) -> None:
        super().__init__(**named)
        self.stage = stage

    def open(self) -> Self:
        other = super().open()
        self.stage.opened.add(other)
        return other

    def close(self) -> None:
        super().close()
        self.stage.opened.discard(self)


class Staged(Noted):
    """A toy that lets others come in between before each of its calls."""

    sampling = Sampling()

    def prefill(self, tokens: Sequence[int], *how: Any) -> Filled:
        self.stage.called("prompt", [self])
        return super().prefill(tokens, *how)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.sampling = sampling
        return self.score_all([Wanted(self, tree, sampling)])[0]

    def score_all(self, wanted: Sequence[Wanted[Any]]) -> list[LogitScores]:
        for each in wanted:
            each.sequence.sampling = each.sampling
        self.stage.called("forward", [each.sequence for each in wanted])
        CLOCK.seconds += 1.0 + 0.05 * sum(len(each.tree) for each in wanted)
        return [super(Staged, each.sequence).score(each.tree, each.sampling) for each in wanted]

    def accept(self, rows: Sequence[int]) -> None:
        self.stage.called("accept", [self])
        super().accept(rows)


class Crowd(RuleBasedStateMachine):
    """Between any two calls of the model, anything may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.engine = Local(each=EACH)
        self.engine.queue.thread.shutdown()
        self.engine.queue.thread = self.stage.thread  # type: ignore[assignment]
        self.under_way: dict[Stream[Event], Answer] = {}
        self.cut: list[Answer] = []
        self.closed: list[Answer] = []
        self.loads: list[Stream[Any]] = []
        self.told: list[tuple[int, Sampling]] = []
        """The failures that answers ended with."""

    def teardown(self) -> None:
        with closing(self.engine):
            self.rest()
            self.told_what_failed()
            self.nothing_is_left()

    @initialize(
        places=PLACES,
        curve=st.sampled_from((COSTS, None)),
        guesses=st.sampled_from(HEADS),
        asked=ASKED_FIRST,
    )
    def begin(
        self, places: int, curve: dict[int, float] | None, guesses: Any, asked: list[Wish]
    ) -> None:
        self.model = partial(Staged, self.stage, guesses=guesses)
        self.curve = curve
        self.place(places)
        self.ask(asked, False, 0)

    def place(self, places: int) -> None:
        loaded = self.engine.loaded
        found = self.engine.loaded_of(self.model(), "", loaded.runtime, lambda problem: None)
        found.runtime = replace(found.runtime, parallel=places)
        found.curve = None if self.curve is None else Stated(self.curve)
        self.engine.use(found)
        small = Noted(self.stage, name="small", logits=SMALL)
        self.engine.use_drafts({"small": small}, {"small": ""})

    def running(self) -> list[Stream[Event]]:
        stops = [run.stop for run in self.engine.queue.running]
        return [stream for stream in self.under_way if stream.stop in stops]

    def start(self, answer: Answer) -> None:
        running, owner = self.running(), answer.request.owner
        counts = not answer.request.background
        others = [self.under_way[each].request for each in self.under_way if each not in running]
        waiting = sum(each.owner == owner and not each.background for each in others)
        answer.refused = counts and waiting >= EACH
        if counts and not answer.refused:
            for stream in running:
                if self.under_way[stream].request.background:
                    self.under_way[stream].stopped = True
        self.under_way[self.engine.generate(answer.left())] = answer

    def pass_time(self, moments: int) -> None:
        while moments and self.stage.thread.step():
            moments -= 1

    # what happens, and how many moments pass then

    @rule(asked=ASKED, go_on=st.booleans(), then=MOMENTS)
    def ask(self, asked: list[Wish], go_on: bool, then: int) -> None:
        """New answers, or those that were cut go on."""
        if go_on and self.cut:
            cut, self.cut = self.cut, []
            for answer in cut:
                self.start(replace(answer, stopped=False))
        else:
            for request in [wish.request for wish in asked]:
                self.start(Answer(request, alone(request)))
        self.pass_time(then)

    @rule(which=WHICH, unread=st.booleans(), then=MOMENTS)
    def leave(self, which: int, unread: bool, then: int) -> None:
        """Stop an answer, or close it, and then nobody reads it any more."""
        if self.under_way:
            stream = [*self.under_way][which % len(self.under_way)]
            self.under_way[stream].stopped = True
            if unread:
                self.closed.append(self.under_way.pop(stream))
                stream.close()
            else:
                stream.stop()
            assert all(run.stop != stream.stop for run in self.engine.queue.waiting)
        self.pass_time(then)

    @rule(what=st.sampled_from(CALLS), then=MOMENTS)
    def fail(self, what: str, then: int) -> None:
        self.stage.failing = what
        self.pass_time(then)

    @rule(places=PLACES, then=MOMENTS)
    def load(self, places: int, then: int) -> None:
        """Load the model anew, which stops the answers in progress."""
        for stream in self.running():
            self.under_way[stream].stopped = True
        loading = self.engine.start("local", lambda stream: self.place(places), priority=True)
        self.loads.append(loading)
        self.pass_time(then)

    @rule(owner=st.sampled_from(OWNERS), conversation=st.sampled_from((None, *CONVERSATIONS)))
    def forget(self, owner: str, conversation: str | None) -> None:
        self.engine.forget(owner, conversation, past=conversation is None)

    def rest(self) -> None:
        assert any(not self.stage.thread.step() for _ in range(MOST)), "it ends"
        self.what_ended_is_right()
        assert not self.under_way

    # what is true

    @invariant()
    def what_ended_is_right(self) -> None:
        queue = self.engine.queue
        assert len(queue.running) <= queue.parallel
        assert len(queue.running) < 2 or all(run.shares for run in queue.running)
        stops = [run.stop for run in (*queue.waiting, *queue.running)]
        for stream in [each for each in self.under_way if each.stop not in stops]:
            answer = self.under_way.pop(stream)
            error = answer.read(stream)
            assert answer.refused == isinstance(error, Busy)
            if error is not None and not answer.refused:
                assert isinstance(error, RuntimeError), error
                self.told.append((error.args[0], answer.request.generation.sampling))
            if answer.request.measured is None and not answer.complete:
                self.cut.append(answer)

    def told_what_failed(self) -> None:
        """Each failure ended the answers that it was for, and no others."""
        unread = {id(answer.request.generation.sampling) for answer in self.closed}
        for number, concerned in enumerate(self.stage.failures):
            told = {id(sampling) for failure, sampling in self.told if failure == number}
            if concerned:
                wanted = {id(sampling) for sampling in concerned}
                assert wanted - unread <= told <= wanted
            else:
                assert len(told) == 1 or (not told and unread)

    def nothing_is_left(self) -> None:
        queue, loaded = self.engine.queue, self.engine.loaded
        for loading in self.loads:
            assert all(isinstance(event, Waiting) for event in loading), "it ends without an error"
        assert not (queue.running or queue.waiting or loaded.sequences.using)
        assert self.stage.opened == {*loaded.sequences.warm.values()}
        for owner in OWNERS:
            for conversation in CONVERSATIONS:
                self.engine.forget(owner, conversation, past=True)
        self.rest()
        assert not (self.stage.opened or loaded.memory.conversations)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted does not depend on the time that anything takes."""
    for module in (engine.rounds, engine.decode):
        monkeypatch.setattr(module, "perf_counter", CLOCK)
    monkeypatch.setattr(engine.decode, "thread_time", CLOCK)


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("number", range(14))
def test_answers_at_once_say_what_they_say_alone(number: int) -> None:
    """Any methods, samplers, formats and arrivals; stops and errors in between."""
    found = settings(max_examples=40, stateful_step_count=15, deadline=None, database=None)
    run_state_machine_as_test(seed(number)(type("Crowd", (Crowd,), {})), settings=found)
