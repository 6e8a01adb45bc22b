"""The charts hold the run's own numbers, in the one palette."""

import json
from dataclasses import replace

import pytest

from app.service.comparison import Progress
from app.web import charts
from app.web.colors import INK, INKS, PLAIN
from app.web.tabs import compare
from engine.drafting.calibration import WITH_HEAD, Calibration
from engine.drafting.costs import LARGEST, CostCurve
from engine.types import TARGET, CalibrationRow, Run, Step, Token
from storage.database import Database
from storage.steps import NOTHING, POINTS, Digest, digest
from storage.traces import Traces
from tests.support.runs import run_of


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


SUMS = digest(
    run_of([step(0, [TARGET]), step(1, ["context", "context", TARGET]), step(2, ["model", TARGET])])
)


def test_the_charts_of_a_run_hold_its_numbers() -> None:
    figure = charts.tokens_over_time(SUMS, digest(run_of(step(i, [TARGET]) for i in range(6))))
    plain, fast = figure.data
    assert (plain.name, fast.name) == ("plain", "with drafts")
    assert list(fast.y) == [0, 1, 4, 6] and list(plain.y) == list(range(7))
    assert list(fast.x) == pytest.approx([0, 0.01, 0.02, 0.03])
    colours = [PLAIN, PLAIN, INKS["context"].colour, INKS["model"].colour]
    assert list(fast.marker.color) == colours
    (bars,) = charts.accepted_lengths(SUMS).data
    assert list(bars.x) == [1, 2, 3] and list(bars.y) == [1, 1, 1]
    (bars,) = charts.share_by_tier(SUMS).data
    names = ["This chat", "Past answers", "General text", "Built-in head", "The model itself"]
    assert list(bars.x) == names and list(bars.y) == [33.33, 16.67, 0.0, 0.0, 50.0]
    assert list(bars.marker.color) == [look.colour for look in INKS.values()]
    (line,) = charts.rate_by_depth(SUMS).data
    assert list(line.x) == [1, 2] and list(line.y) == pytest.approx([33.33, 33.33])
    assert [list(pair) for pair in line.customdata] == [[2, 6], [1, 3]]
    drafted, accepted = charts.tier_rates(SUMS).data
    assert list(drafted.y) == [6, 3, 0, 0] and list(accepted.y) == [3, 0, 0, 0]
    assert [figure.layout.title.text for figure in charts.of_run(SUMS)] == [
        "6 tokens in 0.03 s",
        "2.00 tokens per step",
        "50 % of the tokens were guessed",
        "33 % of the first guesses were right",
        "3 of 9 guessed tokens were right",
    ]


def test_draft_models_are_drawn_next_to_the_tiers_and_their_names_are_text() -> None:
    (bars,) = charts.share_by_tier(digest(run_of([step(0, ["draft:small", TARGET])]))).data
    assert bars.x[-1] == "Draft small" and bars.y[-1] == 50
    evil = "draft:<img src=x onerror=alert(1)>"
    one = replace(step(0, [evil, TARGET]), proposed={evil: 4}, accepted={evil: 1})
    drafted = digest(run_of([one]))
    for figure in (charts.share_by_tier(drafted), charts.tier_rates(drafted)):
        assert figure.data[0].x[-1] == "Draft &lt;img src=x onerror=alert(1)&gt;"
    assert [bars.y[-1] for bars in charts.tier_rates(drafted).data] == [4, 1]


def test_speedups_show_each_repeat_and_what_all_of_them_say() -> None:
    figure = charts.speedups([1.5, 2.5, 2.0], 2.0)
    assert list(figure.data[0].y) == [1.5, 2.5, 2.0]
    assert sorted(shape.y0 for shape in figure.layout.shapes) == [1.0, 2.0]
    figure = charts.speedups([1.5, None, 2.0], None)
    assert list(figure.data[0].x) == ["1", "3"] and list(figure.data[0].y) == [1.5, 2.0]
    assert [shape.y0 for shape in figure.layout.shapes] == [1.0]
    assert not charts.speedups([None], None).data


def test_the_line_over_the_repeats_is_the_speedup_that_the_verdict_tells() -> None:
    """Also where a repeat has no bar, as it accepted nothing: its time counts nevertheless."""

    def timed(seconds: float, kept: int) -> Run:
        accepted = {"context": kept} if kept else {}
        one = Step(0, (Token(1, 0, TARGET),), accepted=accepted, verify_seconds=seconds)
        return run_of([one], method="hd")

    pairs = tuple((timed(4.0, 0), timed(took, kept)) for took, kept in ((2, 3), (1, 0), (1.6, 3)))
    progress = Progress(pairs, 2, None)
    assert [each.whole for each in progress.speedups] == [2.0, None, 2.5]
    assert progress.speedup.whole == 2.5
    lines = [shape.y0 for shape in compare.drawn(progress)[0].layout.shapes]
    assert lines == [2.5, 1.0]


def test_past_runs_are_drawn_oldest_first_and_can_be_opened(db: Database) -> None:
    store = Traces(db, "local")
    ids = []
    for method, seconds in (("hd", 0.01), ("plain", 0.02), ("hd", 0.04)):
        steps = (step(i, [TARGET], seconds) for i in range(9))
        ids.append(store.save(run_of(steps, method=method)))
    store.note(ids[2], 1.5, None)
    marks = store.trend()
    fast, plain = charts.speed_of_runs(marks).data
    assert list(fast.y) == [100, 25] and list(plain.y) == [50]
    assert list(fast.x) == [1, 3] and list(plain.x) == [2]
    assert [list(point) for point in fast.customdata] == [["run", ids[0], ""], ["run", ids[2], ""]]
    figure = charts.speedup_of_runs(marks)
    assert list(figure.data[0].y) == [1.5] and figure.data[0].customdata[0][1] == ids[2]
    assert "1.50×" in figure.layout.title.text
    assert not charts.speedup_of_runs(marks[:2]).data


def test_runs_of_two_formats_are_drawn_apart_each_with_its_own_median(db: Database) -> None:
    """Both are called tiny-chat; one median of the two was the speed of neither."""
    store = Traces(db, "local")
    for weights, seconds, gain in (("llama.cpp, Q8_0", 0.01, 1.4), ("transformers", 0.04, 2.0)):
        for method in ("hd", "plain"):
            steps = (step(i, [TARGET], seconds) for i in range(9))
            run = replace(run_of(steps, method=method), settings={"weights": weights})
            saved = store.save(replace(run, model="tiny-chat"))
            if method == "hd":
                store.note(saved, gain, None)
    speed, gained = charts.speed_of_runs(store.trend()), charts.speedup_of_runs(store.trend())
    assert [(line.name, line.showlegend) for line in speed.data] == [
        ("tiny-chat (llama.cpp, Q8_0): 100 tokens/s", True),
        ("tiny-chat (llama.cpp, Q8_0): 100 tokens/s", False),
        ("tiny-chat (transformers): 25 tokens/s", True),
        ("tiny-chat (transformers): 25 tokens/s", False),
    ]
    assert [line.name for line in gained.data] == [
        "tiny-chat (llama.cpp, Q8_0): 1.40×",
        "tiny-chat (transformers): 2.00×",
    ]
    titles = [figure.layout.title.text for figure in (speed, gained)]
    assert titles == [charts.SPEEDS, charts.SPEEDUPS], "no figure of the two together"
    assert len({line.marker.symbol for line in speed.data}) == 4
    for number in range(9):
        run = run_of([step(0, [TARGET], 0.01)], method="hd")
        store.save(replace(run, model=f"other {number}"))
    names = {line.name.partition(":")[0] for line in charts.speed_of_runs(store.trend()).data}
    assert len(names) <= charts.MODELS and charts.OTHERS in names


def test_the_time_of_a_step_is_split_into_its_stages() -> None:
    one = replace(
        step(0, [TARGET]), draft_seconds=0.001, sample_seconds=0.004, verify_seconds=0.015
    )
    figure = charts.step_times(digest(run_of([one, replace(one, index=1)])))
    drawn = {line.name: (list(line.x), list(line.y)) for line in figure.data}
    assert drawn["verify"] == ([1, 2], [15.0, 15.0]) and drawn["draft"] == ([1, 2], [1.0, 1.0])
    assert "75 %" in figure.layout.title.text
    assert list(figure.data[0].customdata[1]) == ["step", 1]


def drafting(*nodes: int) -> Digest:
    return digest(
        run_of(
            Step(i, (Token(1, i, TARGET),), {"context": n // 2, "model": n - n // 2} if n else {})
            for i, n in enumerate(nodes)
        )
    )


def test_the_cost_curve_shows_what_was_measured_and_what_was_drafted() -> None:
    curve = CostCurve({0: 0.004, 7: 0.005, 15: 0.008})
    bars, line, points = charts.cost_curve(curve, drafting(0, 7, 3, 0, 7, 7)).data
    assert dict(zip(bars.x, bars.y, strict=True)) == {0: 2, 3: 1, 7: 3}
    assert bars.customdata[0] == "plain steps" and bars.customdata[2] == "steps drafted 7"
    assert (list(points.x), list(points.y)) == ([0, 7, 15], [4.0, 5.0, 8.0])
    assert list(line.x) == list(range(16))
    assert list(line.y) == pytest.approx([1e3 * curve.seconds(n) for n in range(16)])
    assert line.customdata[15] == 2.0 and line.customdata[0] == 1.0
    assert bars.marker.color == PLAIN and line.line.color == INK
    assert bars.yaxis is None and line.yaxis == points.yaxis == "y2"


def test_the_cost_curve_reaches_as_far_as_the_largest_draft() -> None:
    curve = CostCurve({0: 0.004, 7: 0.005})
    _, line, _ = charts.cost_curve(curve, drafting(LARGEST)).data
    assert line.x[-1] == LARGEST and line.y[-1] >= 5.0
    bars, line, points = charts.cost_curve(None, drafting(3)).data
    assert list(bars.y) == [1] and not line.x and not points.x
    assert not charts.cost_curve(curve).data[0].x
    ended_early = digest(run_of([Step(0, (), finish="cancelled")]))
    assert not charts.cost_curve(None, ended_early).data, "a step without tokens is none"


def test_the_worth_of_evidence_is_weighted_by_how_often_it_was_met() -> None:
    rows = [
        CalibrationRow("context", 2, 0, 300.0, 30.0),
        CalibrationRow("context", 2, 7, 100.0, 100.0),
        CalibrationRow("context", 5, 1, 0.4, 0.4),
        CalibrationRow("model", 4, 2, 10.0, 0.0),
    ]
    calibration = Calibration(rows)
    lines = {line.name: line for line in charts.worth_of_evidence(calibration).data}
    context = lines["This chat"]
    assert list(context.x) == [2], "what was hardly met is not shown"
    values = calibration.weights["context"][1].values
    assert context.y[0] == pytest.approx(100 * (3 * values[0] + values[7]) / 4, abs=0.01)
    assert 10 < context.y[0] < 60 and context.customdata[0] == 400
    assert lines["Past answers"].line.color == INKS["model"].colour and not lines["General text"].x


def test_evidence_that_was_met_with_a_head_is_shown() -> None:
    rows = [
        CalibrationRow("context", 2, 0, 300.0, 30.0),
        CalibrationRow(f"{WITH_HEAD}context", 2, 0, 100.0, 90.0),
        CalibrationRow(f"{WITH_HEAD}context", 3, 0, 50.0, 40.0),
        CalibrationRow(f"{WITH_HEAD}head", 5, 3, 70.0, 40.0),
    ]
    lines = {line.name: line for line in charts.worth_of_evidence(Calibration(rows)).data}
    assert list(lines["This chat"].x) == [2, 3] and list(lines["This chat"].customdata) == [300, 50]
    assert "Built-in head" not in lines, "it matches no tokens"


def test_a_run_has_the_same_charts_everywhere() -> None:
    axes = [figure.layout.yaxis.title.text for figure in charts.of_run(SUMS)]
    assert [figure.layout.yaxis.title.text for figure in compare.drawn(None)][1:] == axes


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    many = run_of(step(i, [TARGET]) for i in range(5_000))
    (line,) = charts.tokens_over_time(digest(many)).data
    assert len(line.x) == POINTS + 1 and line.y[-1] == 5_000


def test_a_chart_without_data_says_in_one_sentence_what_it_will_show() -> None:
    of_a_run = (charts.tokens_over_time, charts.accepted_lengths, charts.share_by_tier)
    of_a_run += (charts.rate_by_depth, charts.tier_rates, charts.step_times)
    of_runs = (charts.speedups, charts.speed_of_runs, charts.speedup_of_runs)
    for figure in (
        *(draw(NOTHING) for draw in of_a_run),
        *(draw([]) for draw in of_runs),
        charts.cost_curve(None, NOTHING),
        charts.worth_of_evidence(Calibration()),
    ):
        layout = json.loads(figure.to_json())["layout"]
        assert layout["paper_bgcolor"] == "rgba(0,0,0,0)" and layout["title"]["text"]
        assert not figure.data and "shapes" not in layout
        assert not layout["xaxis"]["visible"] and not layout["yaxis"]["visible"]
        (note,) = layout["annotations"]
        assert note["text"].endswith(".") and "color" not in note.get("font", {})
        assert max(map(len, note["text"].split("<br>"))) <= charts.LINE_LENGTH
        assert layout["font"]["color"] == charts.TEXT_COLOUR, "legible in light and dark mode"


def test_the_charts_of_a_plain_run_say_that_nothing_was_drafted() -> None:
    plain = digest(run_of([replace(step(0, [TARGET]), proposed={}, accepted={}, by_depth=())]))
    for figure in (charts.rate_by_depth(plain), charts.tier_rates(plain)):
        assert [note.text for note in figure.layout.annotations] == [charts.UNDRAFTED]
    (unknown,) = charts.speedups([None]).layout.annotations
    assert "no speedup is known" in unknown.text.replace("<br>", " ")
