"""The live figures are small values: numbers and names as data, and of the steps the new ones."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.web import colors
from app.web.metrics_panel import NO_GAIN, RIBBON, panel_values, template
from engine.compare import FEWEST, UNKNOWN, Speedup, live
from engine.types import TARGET, TIERS, Finish, Prefill, Step, Token
from tests.support.runs import summed
from tests.web.test_render import HOSTILE

UPDATE = 350
"""Bytes of an update of a run with three tiers, twice a second."""


def step(index: int, *sources: str, **fields: Any) -> Step:
    """A step whose last token is the target's own."""
    tokens = tuple(Token(1, index, source) for source in (*sources, TARGET))
    drafted = dict.fromkeys(TIERS, 4) if sources else {}
    accepted = {source: sources.count(source) for source in sources}
    times = {"draft_seconds": 0.0003, "verify_seconds": 0.0135, "sample_seconds": 0.0002}
    spent = {"look_ups": dict.fromkeys(TIERS, 0.000123), "other_seconds": 0.0001}
    given = {"proposed": drafted, "accepted": accepted, **times, **spent, "plain_seconds": 0.02}
    return Step(index, tokens, **{**given, **fields})


RUN = [step(i, *(TIERS[(i + j) % 3] for j in range(i % 3))) for i in range(3000)]


def sent(values: dict[str, Any]) -> int:
    return len(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())


def test_an_update_is_small_however_long_the_answer_is() -> None:
    figures = summed(Prefill(900, 0, 0.123), RUN)
    assert figures.tokens == 6000 and {*TIERS, TARGET} == {*figures.share}
    text = "6,000 tokens in 3,000 steps · seed 1234567"
    values = panel_values(figures, RUN[-30:], ended=text)
    assert values["h"][1] != "–" and sent(values) <= UPDATE
    ribbon = sum(len(one.tokens) for one in RUN[-RIBBON:])
    assert sent(panel_values(figures, RUN, ended=text)) <= UPDATE + ribbon, "a byte per token"


def test_the_ribbon_has_the_steps_that_are_new() -> None:
    figures = summed(None, RUN)
    assert panel_values(figures, RUN[6:9])["r"] == [6, "EBeCae"]
    assert panel_values(figures, RUN)["r"][0] == len(RUN) - RIBBON, "the latest of many"
    assert panel_values(figures)["r"] == [0, ""]
    ended = Step(9, (), finish="cancelled")
    assert panel_values(figures, [*RUN[7:9], ended])["r"] == [7, "BeCae"]
    # A step that ends within a draft is a step of its own.
    steps = [step(0, "context"), Step(1, (Token(1, 2, "model"), Token(1, 3, "model")))]
    assert panel_values(summed(None, steps), steps)["r"] == [0, "AeBb"]
    # The figures may be asked for while the next step comes, which has a row for its source.
    found = panel_values(summed(None, RUN[:3]), [RUN[2], step(3, "draft:late")])
    assert found["r"] == [2, "CaeFe"] and found["d"][0][0] == "Draft late"
    # There are letters for any number of sources.
    steps = [step(i, f"draft:{i:02}") for i in range(40)]
    values = panel_values(summed(None, steps), steps)
    columns = values["r"][1]
    assert columns.startswith("FeGeHe") and columns.endswith("ZeZe") and len(columns) == 80
    assert len(values["d"]) == 40 and len(values["s"]) == 45


def test_the_figures() -> None:
    tokens = (Token(1, 0, "context", 2), Token(2, 1, TARGET))
    one = Step(0, tokens, {"context": 4}, {"context": 1}, ((2, 1), (2, 0)), 0.001, 0.01, 0.001)
    steps = [replace(one, look_ups={"context": 0.0005}), replace(one, index=1)]
    found = panel_values(summed(Prefill(3, 0, 0.1), steps), steps, Speedup(1.67, 1.8), "done")
    assert found == {
        "k": 112_000,
        "h": ["167", "1.67×", "2.00", "1.80×"],
        "n": "of the whole answer; decoding alone 1.80×",
        "s": [[50, 2, 8, 250], [0, 0, 0], [0, 0, 0], [0, 0, 0], [50]],
        "g": [10_000, 1_000, 1_000, 0],
        "r": [0, "AeAe"],
        "e": "done",
    }


def test_what_each_level_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colors, "LEVELS", {})
    small, evil = "draft:small", f"draft:{HOSTILE[0]}"
    one = Step(
        0,
        (Token(1, 0, small), Token(2, 1, TARGET)),
        {small: 3, evil: 1},
        {small: 2},
        look_ups={small: 0.004},
        levels={small: (5, 0, 0), evil: (2, 8, 6)},
        verify_seconds=0.01,
    )
    found = panel_values(summed(None, [one]), [one])
    titles = [title for title, _, _ in found["d"]]
    assert titles == [f"Draft {HOSTILE[0]}", "Draft small"]
    assert found["l"] == [[0, 2, 6, 8], [1, 5, 0, 0]]
    assert found["s"][5:] == [[0, 0, 1], [50, 2, 3, 4000]]
    assert {colour for _, colour, _ in found["d"]} <= {*colors.DRAFT_SHADES}
    assert "l" not in panel_values(summed(None, RUN), RUN)


@pytest.mark.parametrize("text", HOSTILE)
def test_names_travel_as_data_and_the_template_knows_none(text: str) -> None:
    before = template()
    steps = [step(0, f"draft:{text}")]
    found = panel_values(summed(None, steps), steps, ended=text)
    assert found["d"][0][0] == f"Draft {text}" and found["e"] == text
    assert template() == before and text not in before


def run(count: int, plain: float | None, *sources: str, finish: Finish | None = None) -> list[Step]:
    steps = [step(i, *sources, plain_seconds=plain) for i in range(count)]
    return [*steps[:-1], replace(steps[-1], finish=finish)]


@pytest.mark.parametrize(
    ("steps", "gain", "expected"),
    [
        (run(FEWEST - 1, 0.02), "–", "measuring"),
        (run(FEWEST, 0.0141), "1.00×", "of the whole answer, estimated from 16 plain steps"),
        (run(40, 0.5), "1.00×", "of the whole answer, estimated from 40 plain steps"),
        (run(40, 0.00705), "0.50×", "of the whole answer, estimated from 40 plain steps"),
        (
            run(40, 0.0282, "model"),
            "2.00×",
            "of the whole answer, estimated from the measured cost of a plain step",
        ),
        (
            [*run(20, 0.03, "model"), step(20)],
            "2.09×",
            "of the whole answer, estimated from 1 plain step",
        ),
        (run(FEWEST - 1, 0.02, finish="eos"), "–", "press Prove it to measure"),
        (run(40, None, "model"), "–", "press Prove it to measure"),
    ],
)
def test_an_answer_tells_its_own_speedup(steps: list[Step], gain: str, expected: str) -> None:
    figures = summed(None, steps)
    found = panel_values(figures, steps)
    assert (found["h"][1], found["n"]) == (gain, expected)
    assert panel_values(figures, steps, live(figures)) == found


@pytest.mark.parametrize(
    ("speedup", "gain", "expected"),
    [
        (UNKNOWN, "–", NO_GAIN),
        (Speedup(0.9, 0.95), "0.90×", "of the whole answer; decoding alone 0.95×"),
    ],
)
def test_a_measured_speedup_takes_the_place_of_the_answers_own(
    speedup: Speedup, gain: str, expected: str
) -> None:
    found = panel_values(summed(None, RUN), RUN, speedup)
    assert (found["h"][1], found["n"]) == (gain, expected)
