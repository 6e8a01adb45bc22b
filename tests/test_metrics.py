"""Metrics: the field's definitions on a run small enough to count by hand."""

import pytest

from engine.metrics import Metrics, summarise
from engine.types import Learned, Prefill, Step, Token


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


def test_levels_of_a_stack_add_up() -> None:
    steps = [
        step(0, "target", levels={"draft:small": (4, 0, 0), "draft:mid": (2, 8, 5)}),
        step(1, "target"),
        step(2, "target", levels={"draft:small": (3, 6, 1)}),
    ]
    levels = summarise(None, steps).levels
    assert levels == {"draft:small": (7, 6, 1), "draft:mid": (2, 8, 5)}
    assert summarise(None, RUN).levels == {}


def test_a_run_counted_by_hand() -> None:
    metrics = summarise(Prefill(10, 4, 0.5), RUN)
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
    metrics = summarise(Prefill(10, 4, 0.5), RUN)
    assert metrics.ttft_seconds == pytest.approx(0.5 + 1.0)
    assert metrics.decode_seconds == pytest.approx(3.0)
    assert (metrics.draft_seconds, metrics.verify_seconds) == pytest.approx((0.1, 2.5))
    assert (metrics.sample_seconds, metrics.other_seconds) == pytest.approx((0.2, 0.2))
    assert metrics.tokens_per_second == pytest.approx(2.0)
    assert metrics.end_to_end_tokens_per_second == pytest.approx(6 / 3.5)
    whole = summarise(Prefill(10, 4, 0.5), RUN, Learned(0.25))
    assert whole.seconds == pytest.approx(0.5 + 3.0 + 0.25)
    assert whole.decode_seconds == metrics.decode_seconds and whole.kept == 3
    assert whole.end_to_end_tokens_per_second == pytest.approx(6 / 3.75)


def test_a_run_cancelled_before_its_first_token_divides_by_nothing() -> None:
    metrics = summarise(Prefill(3, 0, 0.25), [Step(0, (), finish="cancelled")])
    assert (metrics.tokens, metrics.forwards, metrics.ttft_seconds) == (0, 0, 0.25)
    assert metrics.tokens_per_second == metrics.end_to_end_tokens_per_second == 0.0
    assert metrics.mean_acceptance_length == metrics.acceptance_rate == 0.0
    assert metrics.acceptance_ratio == metrics.rate("context") == 0.0
    assert metrics.share == metrics.lengths == {}


def test_no_events_at_all() -> None:
    assert summarise(None, []).end_to_end_tokens_per_second == 0.0


def test_a_cancelled_step_is_not_a_forward() -> None:
    assert summarise(None, [*RUN, Step(3, (), finish="cancelled")]) == summarise(None, RUN)


def test_shares_sum_to_one() -> None:
    metrics: Metrics = summarise(None, RUN)
    assert sum(metrics.share.values()) == pytest.approx(1.0)
    assert sum(size * count for size, count in metrics.lengths.items()) == metrics.tokens
