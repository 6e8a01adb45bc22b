"""What reaches the browser is data and our own words; hostile text stays text."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import palette, render
from app.comparison import Proof, Verdict
from app.panel import milliseconds, panel
from engine.compare import UNKNOWN, Speedup
from engine.metrics import summarise
from engine.types import TARGET, TIERS, Step, Token
from storage.conversations import Conversations, Piece
from storage.database import Database

ASSETS = Path(__file__).resolve().parent.parent / "assets"
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "${alert(1)}",
    "{{constructor.constructor('alert(1)')()}}",
    "</span></div><script>alert(1)</script>",
    "`; alert(1); `",
    "javascript:alert(1)",
    "\x00\u202eevil",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_travels_as_data_unchanged(db: Database, text: str) -> None:
    store = Conversations(db, "local")
    conversation = store.create().id
    store.append(conversation, "user", text)
    store.append(conversation, "assistant", text, pieces=[Piece(text, "context", 3, 0, 9, 0.5)])
    said, answered = render.transcript(store.messages(conversation))["turns"]
    assert said["text"] == text and said["role"] == "user" and "tokens" not in said
    assert answered["tokens"] == [[text, "context", 3, 0, 9, 0.5]]
    assert [b["content"] for b in render.bubbles(store.messages(conversation))] == [text, text]
    assert render.growing([Piece(text, TARGET, 0, 0, 0, 0.0)], 0)["growing"]["tokens"][0][0] == text


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_we_make_escapes_what_it_quotes(text: str) -> None:
    from app.tabs.databases import card
    from app.verdicts import proof_line

    found = [Verdict(False, 2, 3, text, text, early) for early in (False, True)]
    lines = [proof_line(Proof(3, "hd", each)) for each in found]
    quoting = (*lines, card("model", text, [(text, text)]), panel(None, ended=text))
    for markup in quoting:
        assert "<img" not in markup and "<script" not in markup and "</span></div><" not in markup


def test_templates_are_fixed_text() -> None:
    """Gradio runs what stands in a template as code, so nothing of the kind may stand there."""
    from app.token_view import TEMPLATE, token_view

    script = (ASSETS / "tokens.js").read_text()
    assert "${" not in TEMPLATE and "{{" not in TEMPLATE
    for risky in ("innerHTML", "insertAdjacentHTML", "outerHTML", "document.write", "eval("):
        assert risky not in script
    view = token_view()
    assert view.html_template == TEMPLATE and view.js_on_load == script


def test_a_growing_answer_sends_only_its_tail() -> None:
    pieces = [Piece(str(i), TARGET, 0, i, i, 0.0) for i in range(10)]
    tail = render.growing(pieces, 7)["growing"]
    assert tail["from"] == 7 and [t[0] for t in tail["tokens"]] == ["7", "8", "9"]


def test_every_source_has_one_colour_and_its_own_mark() -> None:
    assert set(palette.INKS) == {*TIERS, TARGET}
    looks = list(palette.INKS.values())
    assert len({i.colour for i in looks}) == len({i.underline for i in looks}) == 4
    colours = {i.colour for i in looks}
    assert palette.ink("draft:small").colour in palette.DRAFT_SHADES
    assert not colours & {*palette.DRAFT_SHADES, *palette.STAGES.values()}
    for name, look in palette.INKS.items():
        assert f"--s-{name}:{look.colour}" in palette.variables()


@pytest.fixture
def levels() -> Iterator[None]:
    palette.shade(["tiny", "small", "mid"])
    yield
    palette.LEVELS.clear()


def test_draft_models_have_one_hue_and_a_shade_per_level(levels: None) -> None:
    shades = [palette.ink(f"draft:{name}").colour for name in ("mid", "small", "tiny")]
    assert shades == [*palette.DRAFT_SHADES[:3]], "the largest is the darkest"
    assert {palette.ink(f"draft:{name}").underline for name in ("mid", "old")} == {"wavy"}
    old = palette.ink("draft:old").colour
    palette.shade(["other"])
    assert palette.ink("draft:old").colour == old in palette.DRAFT_SHADES
    assert palette.ink("draft:mid").colour == shades[0], "what was loaded keeps its shade"
    assert palette.others(["target", "draft:mid", "context", "draft:tiny", "draft:small"]) == [
        "draft:tiny",
        "draft:small",
        "draft:mid",
    ]


@pytest.mark.parametrize("source", ["", "draft", "__proto__", "constructor", "<b>"])
def test_an_unknown_source_is_no_draft_model(source: str) -> None:
    look = palette.ink(source)
    assert look.title == "Unknown" and not look.underline
    named = render.drafts([Piece("a", source, 0, 0, 0, 0.0)])
    assert named[source]["kind"] == "k-target"


def test_draft_models_travel_with_the_tokens_they_drafted() -> None:
    evil = "draft:<img src=x onerror=alert(1)>"
    pieces = [Piece("a", evil, 0, 0, 0, 0.0), Piece("b", TARGET, 0, 0, 1, 0.0)]
    for value in (render.growing(pieces, 0), render.side_by_side("hsd", pieces)):
        (name,) = value["names"].values()
        assert list(value["names"]) == [evil] and name["kind"] == "k-draft"
        assert name["colour"] in palette.DRAFT_SHADES
    assert render.growing(pieces, 1)["names"] == {}


def test_the_panel_tells_what_each_level_did() -> None:
    evil = "<img src=x onerror=alert(1)>"
    step = Step(
        0,
        (Token(1, 0, "draft:small"), Token(2, 1, TARGET)),
        {"draft:small": 3, f"draft:{evil}": 1},
        {"draft:small": 2},
        look_ups={"draft:small": 0.004},
        levels={"draft:small": (5, 0, 0), f"draft:{evil}": (2, 8, 6)},
        verify_seconds=0.01,
    )
    markup = panel(summarise(None, [step]), [step])
    assert "Levels of the stack" in markup and "6 / 8 <em>75 %</em>" in markup
    assert "drafts by itself" in markup and "2 / 3" in markup and "4.0 ms" in markup
    assert "<img" not in markup and "&lt;img" in markup
    assert "Levels of the stack" not in panel(None)


def test_the_style_sheet_brings_no_tier_colour_of_its_own() -> None:
    used = set(re.findall(r"#[0-9a-f]{6}", (ASSETS / "style.css").read_text().lower()))
    assert not used & {look.colour for look in palette.INKS.values()}
    assert "http" not in (ASSETS / "style.css").read_text()


def test_the_panel_tells_the_figures() -> None:
    tokens = (Token(1, 0, "context", 2), Token(2, 1, TARGET))
    step = Step(0, tokens, {"context": 4}, {"context": 1}, ((2, 1), (2, 0)), 0.001, 0.01, 0.001)
    steps = [step, step]
    markup = panel(summarise(None, steps), steps, Speedup(1.67, 1.8), "done")
    assert "2.00" in markup and "50 %" in markup and "2 / 8" in markup and "25 %" in markup
    assert "1.67×" in markup and "decoding alone 1.80×" in markup and "model time" in markup
    assert palette.INKS["context"].colour in markup and "done" in markup
    assert "–" in panel(None) and "nan" not in panel(None)


@pytest.mark.parametrize("speedup", [None, UNKNOWN])
def test_no_speedup_is_shown_that_was_not_measured_or_is_no_gain(speedup: Speedup | None) -> None:
    step = Step(0, (Token(1, 0, TARGET),), verify_seconds=0.01)
    markup = panel(summarise(None, [step]), [step], speedup)
    assert "×" not in markup
    words = "press Prove it" if speedup is None else "no draft was accepted"
    assert words in markup


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (0.00005, "50 µs"), (0, "0 µs")]
)
def test_durations(seconds: float, words: str) -> None:
    assert milliseconds(seconds) == words
