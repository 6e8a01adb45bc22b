"""Metrics: the field's definitions on a run small enough to count by hand."""

import pytest

from engine.metrics import Tally
from engine.types import Learned, Prefill, Step, Token
from tests.support.runs import summed


def step(index: int, *sources: str, **fields: object) -> Step:
    tokens = tuple(Token(5, index, source) for source in sources)
    return Step(index, tokens, **fields)  # type: ignore[arg-type]


RUN = [
    step(
        0, "context", "context", "target",
        proposed={"context": 3, "model": 2}, accepted={"context": 2},
        by_depth=((3, 1), (2, 1)), draft_seconds=0.1, verify_seconds=0.5, sample_seconds=0.2,
        other_seconds=0.2, look_ups={"context": 0.01, "model": 0.02},
    ),
    step(1, "target", proposed={"model": 4}, accepted={}, verify_seconds=1.0,
         look_ups={"context": 0.03}),
    step(2, "model", "target", proposed={"model": 1}, accepted={"model": 1}, verify_seconds=1.0),
]  # fmt: skip


def test_a_run_counted_by_hand() -> None:
    metrics = summed(Prefill(10, 4, 0.5), RUN)
    assert (metrics.tokens, metrics.forwards) == (6, 3)
    assert metrics.mean_acceptance_length == 2.0
    assert metrics.acceptance_rate == pytest.approx(3 / 10)
    assert metrics.acceptance_ratio == pytest.approx(5 / 6)
    assert metrics.proposed == {"context": 3, "model": 7}
    assert metrics.accepted == {"context": 2, "model": 1}
    assert metrics.share == pytest.approx({"context": 2 / 6, "model": 1 / 6, "target": 3 / 6})
    assert metrics.look_up_seconds == pytest.approx({"context": 0.04, "model": 0.02})
    assert metrics.lengths == {1: 1, 2: 1, 3: 1}
    assert (metrics.rate("context"), metrics.rate("model")) == pytest.approx((2 / 3, 1 / 7))


def test_times_add_up() -> None:
    metrics = summed(Prefill(10, 4, 0.5), RUN)
    assert metrics.ttft_seconds == pytest.approx(0.5 + 1.0)
    assert metrics.decode_seconds == pytest.approx(3.0)
    assert (metrics.draft_seconds, metrics.verify_seconds) == pytest.approx((0.1, 2.5))
    assert (metrics.sample_seconds, metrics.other_seconds) == pytest.approx((0.2, 0.2))
    assert metrics.tokens_per_second == pytest.approx(2.0)
    whole = summed(Prefill(10, 4, 0.5), RUN, Learned(0.25))
    assert whole.seconds == pytest.approx(0.5 + 3.0 + 0.25)
    assert whole.decode_seconds == metrics.decode_seconds and whole.kept == 3


def test_a_run_cancelled_before_its_first_token_divides_by_nothing() -> None:
    metrics = summed(Prefill(3, 0, 0.25), [Step(0, (), finish="cancelled")])
    assert (metrics.tokens, metrics.forwards, metrics.ttft_seconds) == (0, 0, 0.25)
    assert metrics.tokens_per_second == 0.0
    assert metrics.mean_acceptance_length == metrics.acceptance_rate == 0.0
    assert metrics.acceptance_ratio == metrics.rate("context") == 0.0
    assert metrics.share == metrics.lengths == {}


def test_draft_models_depths_and_plain_times_are_counted_as_far_as_they_are_known() -> None:
    first = step(
        0, "draft:small", "target", proposed={"draft:small": 3}, accepted={"draft:small": 1},
        by_depth=((2, 1), (1, 0)), levels={"draft:small": (2, 0, 0)}, plain_seconds=1.0,
    )  # fmt: skip
    second = step(
        1, "target", proposed={"model": 2}, by_depth=((1, 0), (1, 0), (0, 0)),
        levels={"draft:small": (1, 2, 1), "draft:mid": (1, 4, 3)}, plain_seconds=0.5,
    )  # fmt: skip
    plain, cancelled = step(2, "target", plain_seconds=0.25), Step(3, (), finish="cancelled")
    metrics = summed(Prefill(10, 4, 0.5, 0.4), [first, second, plain, cancelled])
    assert metrics.levels == {"draft:small": (3, 2, 1), "draft:mid": (1, 4, 3)}
    assert metrics.by_depth == ((3, 1), (2, 0), (0, 0)) and metrics.kept_lengths == {0: 1, 1: 1}
    assert (metrics.plain_steps, metrics.forwards, metrics.plain_seconds) == (1, 3, 1.75)
    assert metrics.plain_prefill_seconds == 0.4
    assert metrics.plain_tokens_per_second == pytest.approx(4 / 1.75)
    unknown = summed(None, [first, step(1, "target"), plain])
    assert unknown.plain_seconds is None and unknown.plain_tokens_per_second == 0.0


def test_figures_that_were_asked_for_do_not_change_with_later_events() -> None:
    tally = Tally()
    for event in RUN[:2]:
        tally.add(event)
    early = tally.metrics()
    tally.add(RUN[2])
    assert early == summed(None, RUN[:2]) != tally.metrics()
