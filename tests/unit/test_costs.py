"""The cost curve: what was measured, what lies between, and what observation makes of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import Filled
from engine.drafting.costs import (
    CACHED,
    GROWN,
    LARGEST,
    SIZES,
    STEADY,
    SURPRISE,
    CostCurve,
    measure_costs,
)
from engine.settings import Generation, Sampling
from tests.support.clocked import Clock, ClockedToy
from tests.support.lossless import assert_lossless, events_of
from tests.support.toy import ToyBackend

TIMES = st.floats(0.01, 10.0)
POINTS = st.builds(
    lambda first, points: {0: first, **points},
    TIMES,
    st.dictionaries(st.integers(1, LARGEST), TIMES, min_size=1, max_size=9),
)
TRUTH = {0: 1.0, 1: 1.1, 3: 1.3, 7: 1.4, 15: 1.9, 31: 2.4, 63: 4.0}


@settings(deadline=None, derandomize=True)
@given(POINTS)
def test_what_was_measured_is_what_a_forward_costs(points: dict[int, float]) -> None:
    curve = CostCurve(points)
    assert curve.points == points and list(curve.points) == sorted(points)
    assert all(curve.seconds(size) == time for size, time in points.items())
    for low, high in pairwise(sorted(points)):
        ends = sorted((points[low], points[high]))
        for nodes in range(low, high + 1):
            assert ends[0] * (1 - 1e-9) <= curve.seconds(nodes) <= ends[1] * (1 + 1e-9)
    last = max(points)
    beyond = [curve.seconds(nodes) for nodes in range(last, last + 50)]
    assert beyond == sorted(beyond), "more nodes never cost less than were measured"


@pytest.mark.parametrize(
    "points",
    [
        {},
        {0: 1.0},
        {1: 1.0, 2: 1.0},
        {-1: 1.0, 0: 1.0},
        {0: 0.0, 1: 1.0},
        {0: 1.0, 1: -1.0},
        {0: 1.0, 1: nan},
        {0: nan, 1: 1.0},
        {0: 1.0, 1: inf},
    ],
    ids=str,
)
def test_points_that_are_no_curve_are_refused(points: Mapping[int, float]) -> None:
    with pytest.raises(ValueError, match="positive times for 0 and more nodes"):
        CostCurve(points)
    for numbers in ((-1e-9, 0.0), (0.0, -1e-9), (nan, 0.0), (0.0, inf)):
        with pytest.raises(ValueError, match="cached tokens cannot take"):
            CostCurve(TRUTH, 0.0, 0.0, *numbers)


def observed(
    truth: Mapping[int, float], steps: int = 4000, noise: float = 0.1, **rest: float
) -> CostCurve:
    """The curve of TRUTH after steps of mixed sizes on a machine of another truth."""
    curve, draw = CostCurve(TRUTH), random.Random(0)
    for _ in range(steps):
        nodes = draw.choice(list(truth))
        seconds = truth[nodes] * draw.uniform(1 - noise, 1 + noise)
        curve.observe(nodes, seconds, rest.get("draft", 0.0), rest.get("other", 0.0))
    return curve


@pytest.mark.parametrize(
    "slower",
    [dict.fromkeys(TRUTH, factor) for factor in (0.3, 1.0, 5.0)] + [{n: 2.0} for n in (0, 7, 63)],
    ids=str,
)
def test_a_machine_that_changes_its_pace_is_learned_as_a_whole_and_by_size(
    slower: Mapping[int, float],
) -> None:
    truth = {size: slower.get(size, 1.0) * seconds for size, seconds in TRUTH.items()}
    assert observed(truth).points == pytest.approx(truth, rel=0.1)


def test_a_hiccup_moves_little_and_is_forgotten() -> None:
    curve = observed(TRUTH)
    before = curve.points
    curve.observe(7, 1000.0, 0.0, 0.0)
    assert curve.points == pytest.approx(before, rel=SURPRISE - 1)
    assert curve.points[7] < before[7] * (1 + 0.5 * (SURPRISE - 1))
    curve.observe(7, 0.0, 0.0, 0.0)
    assert min(curve.points.values()) > 0


def test_the_toy_is_measured_and_left_usable(toy: ToyBackend) -> None:
    shares: list[float] = []
    curve = measure_costs(toy, seconds=0.05, progress=shares.append)
    assert tuple(curve.points) == SIZES and min(curve.points.values()) > 0
    assert shares and all(0.0 <= share <= 1.0 for share in shares)
    assert shares == sorted(shares), "progress goes forward"
    wanted = Generation(Sampling(0.8, seed=3), max_tokens=20)
    prompt = list(b"and now")
    after = events_of(toy, prompt, wanted, costs=curve)
    assert_lossless(events_of(ToyBackend(), prompt, wanted), after)


def test_sizes_beyond_the_context_are_left_out() -> None:
    for context in (3, 20, 60):
        toy = ToyBackend(context)
        curve = measure_costs(toy, seconds=0.01)
        assert max(curve.points) + context // 2 < context
        assert len(toy.cache) < context
    assert tuple(measure_costs(ToyBackend(), (0, 5), seconds=0.01).points) == (0, 5)


def test_a_plain_forward_is_timed_at_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a tree it takes longer, which plain decoding never does."""
    since = 0

    def seconds(nodes: int) -> float:
        nonlocal since
        since = 0 if nodes else since + 1
        return 0.01 * (1 + nodes / 10) * (1.5 if 0 < since < STEADY else 1.0)

    toy = ClockedToy(Clock(), seconds)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(f"engine.drafting.costs.{name}", toy.clock)
    curve = measure_costs(toy, (0, 5, 10), seconds=0.001)
    assert curve.points == pytest.approx({0: 0.01, 5: 0.015, 10: 0.02})


# What cached tokens cost.

TOKEN, ROW = 4e-5, 1.2e-5
"""Of a model whose plain forward takes a second behind CACHED tokens."""


def behind(nodes: int, length: int, token: float = TOKEN, row: float = ROW) -> float:
    """What TRUTH costs behind a text."""
    return TRUTH[nodes] + (length - CACHED) * (token + row * nodes)


LONG_TEXTS = 6000, 8000


def learned_far(
    curve: CostCurve, lengths: Sequence[int] = LONG_TEXTS, load: float = 1.0
) -> CostCurve:
    """After answers behind texts of some lengths."""
    draw = random.Random(5)
    for length in lengths:
        curve.reach(length)
        for _ in range(400):
            nodes = draw.choice([0, 3, 7, 7, 15])
            curve.observe(nodes, load * behind(nodes, length) * draw.uniform(0.9, 1.1), 0.0, 0.0)
    return curve


@pytest.mark.parametrize(("lengths", "load"), [(LONG_TEXTS, 1.0), ((CACHED, *LONG_TEXTS), 2.0)])
def test_an_old_curve_learns_what_cached_tokens_cost(lengths: tuple[int, ...], load: float) -> None:
    """Within 10 %, also behind texts that it has not seen, and while the machine is busy."""
    curve = learned_far(CostCurve(TRUTH), lengths, load)
    for length in (CACHED, 2000, 8000):
        curve.reach(length)
        for nodes in (0, 3, 7, 15):
            assert curve.seconds(nodes) == pytest.approx(load * behind(nodes, length), rel=0.1)


# measuring


class Clocked(ClockedToy):
    """A toy whose forwards take what `behind` says, and reading a token takes a while."""

    def __init__(self, reading: float = 1e-5) -> None:
        super().__init__(Clock(), lambda nodes: 0.01 * behind(nodes, len(self.cache) + 1))
        self.info, self.token = replace(self.info, context_length=9000), reading

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        filled = super().prefill(tokens, cancelled)
        self.clock.now += self.token * (len(tokens) - filled.reused)
        return filled


class Stretching(Clocked):
    """Need not read a text to be timed after it."""

    def stretch(self, tokens: Sequence[int]) -> None:
        self.cache = list(tokens)


@pytest.mark.parametrize(
    ("backend", "measured"),
    [(Clocked(), True), (Clocked(reading=1e-3), False), (Stretching(reading=1e-3), True)],
    ids=["read", "slow to read", "stretched"],
)
def test_what_forwards_and_cached_tokens_cost_is_measured(
    monkeypatch: pytest.MonkeyPatch, backend: Clocked, measured: bool
) -> None:
    """Within 10 % at 256, 2,000 and 8,000 tokens, in about two seconds. A text that takes long to
    read is not read, and the cost of cached tokens stays unknown."""
    monkeypatch.setattr("engine.drafting.costs.perf_counter", backend.clock)
    curve = measure_costs(backend, tuple(TRUTH))
    for length in (CACHED, 2000, 8000) if measured else (CACHED,):
        curve.reach(length)
        for nodes in TRUTH:
            assert curve.seconds(nodes) == pytest.approx(0.01 * behind(nodes, length), rel=0.1)
    assert bool(curve.growth.token) == bool(curve.growth.row) == measured
    assert backend.clock.now < 2.8
    assert len(backend.cache) <= (0 if measured else CACHED + GROWN)


def test_a_library_that_prepares_every_new_shape_is_timed_with_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an answer every forward has a new length. To repeat one would hide what preparing takes,
    for short texts and for long ones."""
    seen = set[tuple[int, int]]()

    def seconds(nodes: int) -> float:
        shape = nodes, len(backend.cache)
        prepared = shape in seen
        seen.add(shape)
        return 0.01 if prepared else 0.01 * behind(nodes, len(backend.cache) + 1)

    backend = Stretching()
    backend.forward = seconds
    monkeypatch.setattr("engine.drafting.costs.perf_counter", backend.clock)
    curve = measure_costs(backend, tuple(TRUTH))
    for length in (CACHED, 2000, 8000):
        curve.reach(length)
        for nodes in TRUTH:
            assert curve.seconds(nodes) == pytest.approx(0.01 * behind(nodes, length), rel=0.1)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_other_programs_take_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """No forward is left alone for as long as it takes. Of the time that passes, only that in which
    the thread of the forward computed counts, where one thread computes all of it."""
    backend, chance, passed = Clocked(), random.Random(3), 0.0
    forward = backend.forward

    def interrupted(nodes: int) -> float:
        nonlocal passed
        passed += 0.004 * chance.randint(2, 5)
        return forward(nodes)

    monkeypatch.setattr(backend, "forward", interrupted)
    backend.info = replace(backend.info, threads=threads)
    monkeypatch.setattr("engine.drafting.costs.perf_counter", lambda: backend.clock.now + passed)
    monkeypatch.setattr("engine.drafting.costs.thread_time", backend.clock)
    curve = measure_costs(backend, tuple(TRUTH))
    curve.reach(CACHED)
    off = max(abs(curve.seconds(nodes) / (0.01 * behind(nodes, CACHED)) - 1) for nodes in TRUTH)
    assert off < 0.1 if threads == 1 else off > 0.5
