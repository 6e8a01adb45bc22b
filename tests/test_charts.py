"""The charts hold the run's own numbers, in the one palette."""

import json

import pytest

from app import charts
from app.palette import INKS, PLAIN
from engine.types import TARGET, Step, Token
from storage.database import Database
from storage.traces import Traces


def step(index: int, sources: list[str], seconds: float = 0.01) -> Step:
    tokens = tuple(Token(i, i, source) for i, source in enumerate(sources))
    accepted = len(sources) - 1
    return Step(
        index,
        tokens,
        {"context": 2, "model": 1},
        {"context": accepted} if accepted else {},
        ((2, min(1, accepted)), (1, 1 if accepted > 1 else 0)),
        verify_seconds=seconds,
    )


STEPS = [step(0, [TARGET]), step(1, ["context", "context", TARGET]), step(2, ["model", TARGET])]


def test_tokens_over_time() -> None:
    figure = charts.tokens_over_time(STEPS, [step(i, [TARGET]) for i in range(6)])
    plain, fast = figure.data
    assert (plain.name, fast.name) == ("plain", "accelerated")
    assert list(fast.y) == [0, 1, 4, 6] and list(plain.y) == list(range(7))
    assert list(fast.x) == pytest.approx([0, 0.01, 0.02, 0.03])
    colours = [PLAIN, PLAIN, INKS["context"].colour, INKS["model"].colour]
    assert list(fast.marker.color) == colours


def test_accepted_lengths() -> None:
    (bars,) = charts.accepted_lengths(STEPS).data
    assert list(bars.x) == [1, 2, 3] and list(bars.y) == [1, 1, 1]


def test_share_by_tier() -> None:
    (bars,) = charts.share_by_tier(STEPS).data
    assert dict(zip(bars.x, bars.y, strict=True)) == {
        "Context": 33.33,
        "Model": 16.67,
        "Statistics": 0.0,
        "Target": 50.0,
    }
    assert list(bars.marker.color) == [look.colour for look in INKS.values()]


def test_a_draft_model_gets_its_own_bar() -> None:
    (bars,) = charts.share_by_tier([step(0, ["draft:small", TARGET])]).data
    assert bars.x[-1] == "Draft small" and bars.y[-1] == 50


def test_rate_by_depth() -> None:
    (line,) = charts.rate_by_depth(STEPS).data
    assert list(line.x) == [1, 2] and list(line.y) == pytest.approx([33.33, 33.33])
    assert [list(pair) for pair in line.customdata] == [[2, 6], [1, 3]]


def test_tier_rates() -> None:
    drafted, accepted = charts.tier_rates(STEPS).data
    assert list(drafted.y) == [6, 3, 0] and list(accepted.y) == [3, 0, 0]


def test_speedups_show_each_repeat_and_the_median() -> None:
    figure = charts.speedups([1.5, 2.5, 2.0])
    assert list(figure.data[0].y) == [1.5, 2.5, 2.0]
    assert sorted(shape.y0 for shape in figure.layout.shapes) == [1.0, 2.0]


def test_history(db: Database) -> None:
    store = Traces(db, "local")
    for method, speed in (("hd", 90), ("plain", 50)):
        store.save(
            conversation_id=None,
            model="toy",
            fingerprint="toy",
            method=method,
            settings={},
            prompt_tokens=1,
            emitted_tokens=speed,
            reused_tokens=0,
            ttft_seconds=0.1,
            decode_seconds=1.0,
            forwards=10,
            finish="eos",
            steps=STEPS,
            baseline_tokens_per_second=48.0,
        )
    accelerated, plain, base = charts.history(store.history()).data
    assert list(accelerated.y) == [90] and list(plain.y) == [50] and list(base.y) == [48, 48]


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    many = [step(i, [TARGET]) for i in range(5_000)]
    (line,) = charts.tokens_over_time(many).data
    assert len(line.x) == charts.POINTS + 1 and line.y[-1] == 5_000


@pytest.mark.parametrize(
    "draw",
    [
        charts.tokens_over_time,
        charts.accepted_lengths,
        charts.share_by_tier,
        charts.rate_by_depth,
        charts.tier_rates,
        charts.speedups,
        charts.history,
    ],
)
def test_nothing_to_draw_is_no_error(draw) -> None:
    layout = json.loads(draw([]).to_json())["layout"]
    assert layout["paper_bgcolor"] == "rgba(0,0,0,0)" and layout["title"]["text"]
