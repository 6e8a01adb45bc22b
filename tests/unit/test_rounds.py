"""Several answers at once: what they share, who waits, and what is drafted. (That each says what it
says alone is tested in test_crowd.py.)"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import engine.decode
import engine.rounds
from engine.backends.base import Backend, LogitScores, Wanted
from engine.drafting.budget import Budget
from engine.drafting.controller import Company, DraftController
from engine.drafting.costs import CostCurve
from engine.engine import Beside, Load, Measured, Request
from engine.engine import Event as AnyEvent
from engine.errors import ModelError
from engine.local import Local
from engine.methods import METHODS, method_named
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.queue import Waiting
from engine.settings import Drafting, Generation, Runtime, Sampling
from engine.streams import Stream
from engine.tree import Tree
from engine.types import Message, Prefill, Step
from tests.support.crowd import PROFILE, WORDS, alone, said
from tests.support.toy import VOCABULARY, ToyBackend, deviating


class Counting(ToyBackend):
    """The toy, noting what each forward was shared by: `shared` are the rows of each sequence."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.shared: list[list[int]] = []

    def score_all(self, wanted: Sequence[Wanted[Any]]) -> list[LogitScores]:
        self.shared.append([len(each.tree) + 1 for each in wanted])
        return super().score_all(wanted)


def engine_of(backend: ToyBackend, parallel: int = 4, curve: CostCurve | None = None) -> Local:
    engine = Local(backend=backend)
    engine.queue.parallel, engine.loaded.curve = parallel, curve
    return engine


def told(number: int, words: int = 3, tokens: int = 12, **named: Any) -> Request:
    generation = Generation(Sampling(0.7, seed=number), max_tokens=tokens)
    text = " ".join(WORDS[at % len(WORDS)] for at in range(words))
    return Request((Message("user", text),), generation=generation, owner=str(number), **named)


def gathered(
    backend: Counting,
    requests: Sequence[Request],
    parallel: int = 4,
    curve: CostCurve | None = None,
) -> list[Any]:
    """The events of requests that come while the first one is being read."""
    streams: list[Stream[AnyEvent]] = []

    class Read(type(backend)):  # type: ignore[misc]
        def prefill(self, *args: Any, **named: Any) -> Any:
            if len(streams) == 1:
                streams.extend(engine.generate(request) for request in requests[1:])
            return super().prefill(*args, **named)

    backend.__class__ = Read
    with closing(engine_of(backend, parallel, curve)) as engine:
        streams.append(engine.generate(requests[0]))
        first = list(streams[0])
        return [first, *(list(stream) for stream in streams[1:])]


def test_answers_share_forwards_up_to_the_limit() -> None:
    backend = Counting()
    gathered(backend, [told(number, method=METHODS["plain"]) for number in range(5)], 3)
    assert max(map(len, backend.shared)) == 3
    assert len(backend.shared) < 5 * 12, "without sharing each answer has forwards of its own"


def loaders_of(backend: Callable[[], Backend], free: int) -> ModelLoaders:
    """For models of 100 bytes, with 10 bytes for the cache of each answer, in so many free ones."""
    return ModelLoaders(
        load=lambda source, runtime: backend(),
        need=lambda source, runtime: Need(1, 90, 10).of(runtime.parallel),
        device=lambda source, runtime: "cpu",
        free=lambda device: free,
    )


@pytest.mark.parametrize(
    ("asked", "free", "given"), [(0, 115, 2), (0, 9999, 4), (3, 0, 3), (1, 9999, 1)]
)
def test_a_model_gives_as_many_answers_at_once_as_asked_or_as_memory_allows(
    asked: int, free: int, given: int
) -> None:
    with closing(Local(loaders=loaders_of(Counting, free))) as engine:
        list(engine.load(Load("it", Runtime(parallel=asked))))
        assert engine.state.runtime.parallel == given == engine.queue.parallel


class Single(Counting):
    score_all = None  # type: ignore[assignment]


def test_a_model_that_cannot_share_answers_one_after_the_other() -> None:
    with closing(Local(loaders=loaders_of(Single, 9999))) as engine:
        list(engine.load(Load("it", Runtime(parallel=0))))
        assert engine.state.runtime.parallel == engine.queue.parallel == 1
    engine = Local(backend=Single())
    with closing(engine):
        engine.use(replace(engine.loaded, runtime=replace(engine.loaded.runtime, parallel=8)))
        assert engine.queue.parallel == 1
    with closing(Local(backend=Counting())) as engine:
        engine.use(replace(engine.loaded, runtime=replace(engine.loaded.runtime, parallel=8)))
        assert engine.queue.parallel == 8


def test_a_long_prompt_is_read_in_slices_between_the_steps_of_others() -> None:
    """So the first words of a short answer do not wait for it."""
    order: list[str] = []

    class Watched(Counting):
        def prefill(self, *args: Any, **named: Any) -> Any:
            order.append("read")
            return super().prefill(*args, **named)

        def score(self, *args: Any) -> LogitScores:
            order.append("score")
            return super().score(*args)

    requests = [told(3, tokens=60), told(1, words=300)]
    assert len(alone(requests[0]).tokens) > 20
    events = gathered(Watched(), requests)
    assert [said(each) for each in events] == [alone(each) for each in requests]
    reads = [at for at, done in enumerate(order) if done == "read"]
    assert len(reads) > 10
    assert "score" in order[reads[2] : reads[-1]]
    (prefill,) = (event for event in events[1] if isinstance(event, Prefill))
    assert prefill.reused == 0 and prefill.tokens > 1000


def test_a_short_answer_begins_while_a_long_prompt_is_read_alone() -> None:
    order: list[str] = []

    class Watched(Counting):
        def prefill(self, tokens: Any, *args: Any, **named: Any) -> Any:
            order.append("read long" if len(tokens) > 1000 else "read")
            return super().prefill(tokens, *args, **named)

        def score(self, *args: Any) -> LogitScores:
            order.append("score")
            return super().score(*args)

    requests = [told(1, words=600), told(3)]
    events = gathered(Watched(context_length=8192), requests)
    assert order.index("score") < len(order) - order[::-1].index("read long")
    assert [said(each) for each in events] == [alone(each) for each in requests]


def test_what_is_measured_has_the_model_to_itself_and_nothing_overtakes_it() -> None:
    backend, plain = Counting(), METHODS["plain"]
    requests = [
        told(0, method=plain),
        told(1, method=plain),
        told(2, method=plain, measured=Measured()),
        told(3, method=plain),
    ]
    events = gathered(backend, requests, 4)
    assert [said(each) for each in events] == [alone(each) for each in requests]
    assert max(map(len, backend.shared)) == 2
    steps = [[e for e in each if isinstance(e, Step)] for each in events]
    assert all(step.plain_seconds is not None for step in steps[2])
    assert Waiting(2) in events[2] or Waiting(1) in events[2]


def test_waiting_requests_hear_of_the_places_before_them() -> None:
    events = gathered(Counting(), [told(number) for number in range(4)], 2)
    waits = [[e.ahead for e in each if isinstance(e, Waiting)] for each in events]
    assert waits[:2] == [[], []], "the second one begins at once"
    assert waits[2][0] == 1 and waits[3][0] == 2


# what is drafted


CURVE = {0: 1.0, 1: 1.02, 3: 1.1, 7: 1.4, 15: 2.2, 31: 4.0, 63: 8.0}


def planned(company: Company, nodes: int = 64) -> Budget:
    curve = CostCurve(CURVE)
    controller = DraftController([], Drafting(nodes=nodes), VOCABULARY, curve, None, company)
    controller.ways, controller.active = {"databases"}, {"databases"}
    controller.reach(100)
    return controller.plan(20)[0]


def size_of(company: Company, chance: float = 0.85) -> int:
    """The size of a chain whose tokens follow each other with this chance."""
    budget, probability, size = planned(company), chance, 0
    while budget.pays(size, probability):
        size += 1
        budget.added(size, probability)
        probability *= chance
    return budget.best


def test_the_more_answers_share_a_forward_the_less_each_drafts() -> None:
    sizes = [
        size_of(Company(others, others, 4 * others, 2.5 * others)) for others in (0, 1, 3, 7, 15)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def joint(others: int, chance: float) -> tuple[float, float, float]:
    """Tokens per second of equal answers that know of each other's trees, after some rounds, those
    of the best equal trees, and those of plain decoding."""
    curve, size = CostCurve(CURVE), 20
    curve.reach(100)

    def rate(nodes: int) -> float:
        tokens = sum(chance**depth for depth in range(nodes + 1))
        return (1 + others) * tokens / curve.seconds((1 + others) * (1 + nodes) - 1)

    for _ in range(30):
        tokens = others * sum(chance**depth for depth in range(size + 1))
        size = size_of(Company(others, others, others * (1 + size), tokens), chance)
    return rate(size), max(map(rate, range(64))), rate(0)


@pytest.mark.parametrize("others", [1, 3, 7, 15])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
def test_answers_together_draft_what_is_good_for_all_of_them(others: int, chance: float) -> None:
    """Nearly, although each decides by itself, and all begin with trees that are far too large. The
    best trees end where the next row would cost more, which no answer can know of all others."""
    found, best, plain = joint(others, chance)
    assert found > 0.75 * best and found >= plain


def test_a_shared_forward_is_learned_apart_from_those_of_one_answer() -> None:
    curve = CostCurve(CURVE)
    before, shared = dict(curve.points), dict(curve.together(1).points)
    curve.observe_together(1, 6, 99.0)
    assert curve.points == before and curve.together(1).points[7] > shared[7]


class Clock:
    """A clock that only forwards advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def clocked(
    monkeypatch: pytest.MonkeyPatch, method: str, seconds: Callable[[int], float]
) -> tuple[list[int], list[Step]]:
    """Four equal answers by the measured budget, if a forward takes so many seconds by its rows:
    the rows of the forwards that they share, and their steps."""
    clock, rows = Clock(), []

    class Clocked(Counting):
        def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
            clock.seconds += seconds(len(tree) + 1)
            return super().score(tree, sampling)

        def score_all(self, wanted: Sequence[Wanted[Any]]) -> list[LogitScores]:
            rows.append(sum(len(each.tree) + 1 for each in wanted))
            clock.seconds += seconds(rows[-1])
            return [ToyBackend.score(each.sequence, each.tree, each.sampling) for each in wanted]

    for module in (engine.rounds, engine.decode):
        monkeypatch.setattr(module, "perf_counter", clock)
    request = told(2, tokens=600, method=METHODS[method])
    requests = [replace(request, owner=str(number)) for number in range(4)]
    events = gathered(Clocked(), requests, 4, CostCurve(CURVE))
    return rows, [event for each in events for event in each if isinstance(event, Step)]


def test_drafts_that_do_not_pay_pause_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes as long as a token brings, whatever the machine was measured to take."""
    rows, _ = clocked(monkeypatch, "hd", lambda rows: rows)
    drafted = [each > 4 for each in rows]
    assert any(drafted[:100]) and sum(drafted) < 0.2 * len(drafted)


@pytest.mark.parametrize("seconds", [lambda rows: 10 + 0.1 * rows, lambda rows: 3 + rows])
def test_the_told_speedup_of_several_answers_is_the_real_one(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> None:
    """Although the measured costs of this machine are wrong."""
    _, plain = clocked(monkeypatch, "plain", seconds)
    _, drafted = clocked(monkeypatch, "hd", seconds)
    told = sum(step.plain_seconds or 0.0 for step in drafted)
    assert told == pytest.approx(sum(step.seconds for step in plain), rel=0.03)


# answers that take turns


def beside(engine: Local, requests: Sequence[Request]) -> list[list[AnyEvent]]:
    """The events of requests that are answered side by side."""
    found: list[list[AnyEvent]] = [[] for _ in requests]
    for item in engine.take_turns(requests):
        assert isinstance(item, Beside)
        found[item.answer].append(item.event)
    return found


@pytest.mark.parametrize("method", ["hd", "auto", "hd+hsd:small@4"])
def test_answers_in_turns_say_what_they_say_alone(method: str) -> None:
    """Also with a head and a draft model, which rest where forwards are shared."""
    named = {"method": method_named(method), "measured": Measured(), "profile": PROFILE}
    requests = [told(2, method=METHODS["plain"], measured=Measured()), told(2, **named), told(3)]
    with closing(Local(backend=Counting(guesses=deviating(0.5)))) as engine:
        small = ToyBackend(name="small", logits=deviating(0.5))
        engine.use_drafts({"small": small}, {"small": ""})
        events = beside(engine, requests)
        assert not engine.loaded.sequences.using
    assert [said(each) for each in events] == [alone(each) for each in requests]
    proposed = [step.proposed for step in events[1] if isinstance(step, Step)]
    expected = {"hd": "model", "auto": "head"}.get(method, "draft:small")
    assert method == "hd" or any(expected in each for each in proposed)


class Timed(Counting):
    """Its forwards take `took[seed]` seconds of a clock; `turns` are the seeds, as often as they
    follow each other."""

    clock, took, turns = Clock(), dict[int, float](), list[list[float]]()

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        if not self.turns or self.turns[-1][0] != sampling.seed:
            self.turns.append([sampling.seed, 0.0])
        self.turns[-1][1] += self.took[sampling.seed]
        self.clock.seconds += self.took[sampling.seed]
        return super().score(tree, sampling)


def timed(monkeypatch: pytest.MonkeyPatch, took: dict[int, float]) -> type[Timed]:
    kind = type("Timed", (Timed,), {"clock": Clock(), "took": took, "turns": []})
    for module in (engine.rounds, engine.decode):
        monkeypatch.setattr(module, "perf_counter", kind.clock)
    return kind


def test_answers_in_turns_have_the_model_for_equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {2: 0.03, 3: 0.07}
    kind, plain = timed(monkeypatch, took), METHODS["plain"]
    requests = [told(seed, tokens=60, method=plain, measured=Measured()) for seed in took]
    with closing(Local(backend=kind())) as engine:
        events = beside(engine, requests)
    had, longest = {2: 0.0, 3: 0.0}, max(took.values())
    for seed, seconds in kind.turns[:-1]:
        had[int(seed)] += seconds
        assert 0.09 < seconds < 2 * (0.1 + longest), "one turn, or two of them"
        assert abs(had[2] - had[3]) < 0.1 + longest
    assert len(kind.turns) > 10
    for request, each in zip(requests, events, strict=True):
        steps = [event for event in each if isinstance(event, Step)]
        seconds = took[request.generation.sampling.seed]
        assert [step.seconds for step in steps] == pytest.approx([seconds] * len(steps)), (
            "a step does not count the turns of others"
        )


def test_a_longer_prompt_takes_nothing_from_the_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read as a whole, and then the other one has its turns until they are even."""
    kind = timed(monkeypatch, {2: 0.05, 3: 0.05})

    def prefill(self: Timed, *args: Any, **named: Any) -> Any:
        self.clock.seconds += len(args[0]) * 0.01
        return Timed.prefill(self, *args, **named)

    kind.prefill = prefill  # type: ignore[method-assign]
    plain = METHODS["plain"]
    requests = [
        told(seed, words, 60, method=plain, measured=Measured())
        for seed, words in ((2, 30), (3, 1))
    ]
    with closing(Local(backend=kind())) as engine:
        beside(engine, requests)
    assert kind.turns[0][0] == 3 and kind.turns[0][1] > 0.5
    assert kind.turns[1][1] < 0.2


def test_an_error_of_one_answer_in_turns_ends_both() -> None:
    class Failing(Counting):
        def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
            if sampling.seed == 3 and len(self.cache) > 40:
                raise RuntimeError("out of memory")
            return super().score(tree, sampling)

    requests = [told(seed, tokens=60, measured=Measured()) for seed in (2, 3)]
    with closing(Local(backend=Failing())) as engine:
        with pytest.raises(RuntimeError, match="out of memory"):
            beside(engine, requests)
        assert said(list(engine.generate(requests[0]))) == alone(requests[0])


def test_a_stop_ends_all_answers_in_turns_and_others_wait_for_them() -> None:
    requests = [told(seed, tokens=400, measured=Measured()) for seed in (2, 3)]
    with closing(Local(backend=Counting())) as engine:
        stream, found = engine.take_turns(requests), dict[int, list[Step]]()
        other = engine.generate(told(4))
        for item in stream:
            if isinstance(item, Beside) and isinstance(item.event, Step):
                found.setdefault(item.answer, []).append(item.event)
                stream.stop()
        assert [steps[-1].finish for _, steps in sorted(found.items())] == ["cancelled"] * 2
        assert all(0 < len(steps) < 300 for steps in found.values())
        events = list(other)
    assert Waiting(1) in events and said(events) == alone(told(4))


def test_without_a_model_nothing_takes_turns() -> None:
    with closing(Local()) as engine, pytest.raises(ModelError, match="No model is loaded"):
        list(engine.take_turns([told(2), told(3)]))
