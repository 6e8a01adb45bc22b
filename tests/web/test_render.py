"""What reaches the browser is data and our own words; hostile text stays text, remarks included."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.service import draft_models
from app.service.attachments import Attachment, join
from app.service.comparison import Proof, Verdict
from app.web import colors, layout, render
from app.web.markup import milliseconds
from app.web.render import LONGEST_TOKEN, badge, remark, remarks
from app.web.run_html import step_card
from engine.types import CONTEXT, HEAD, PREDICTION, SCHEMA, TARGET, TIERS, Prefill, Run, Step, Token
from storage.conversations import Conversations, Piece
from storage.database import Database
from storage.traces import Traces, Worth
from tests.conftest import ROOT

ASSETS = ROOT / "assets"
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
    shown = render.transcript(store.messages(conversation))
    question, answered = shown["turns"]
    assert question["text"] == text and question["role"] == "user" and "groups" not in question
    assert answered["groups"] == [[0, 3, 0, [text], [50]]] and shown["sources"] == ["context"]


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_we_make_escapes_what_it_quotes(text: str) -> None:
    from app.web.run_html import proof_line
    from app.web.tabs.databases import card

    found = [Verdict(False, 2, 3, text, text, early) for early in (False, True)]
    lines = [proof_line(Proof(3, "hd", each)) for each in found]
    for markup in (*lines, card("model", text, [(text, text)])):
        assert "<img" not in markup and "<script" not in markup and "</span></div><" not in markup


def test_templates_are_fixed_text() -> None:
    """Gradio runs what stands in a template as code, so nothing of the kind may stand there."""
    from app.web import metrics_panel
    from app.web.token_view import CHAT_TEMPLATE, TEMPLATE, loader, script, token_view

    panel = (ASSETS / "panel.js").read_text()
    for view, template, code, loaded in (
        (token_view(), TEMPLATE, script(), loader()),
        (token_view(chat=True), CHAT_TEMPLATE, script(chat=True), loader(chat=True)),
        (metrics_panel.panel(), metrics_panel.template(), panel, panel),
    ):
        assert "${" not in template and "{{" not in template and "`" not in template
        for risky in ("insertAdjacentHTML", "outerHTML", "document.write", "eval("):
            assert risky not in code
        # Highlighted code is read from a template, in which nothing runs and nothing is shown.
        assert code.count("innerHTML") == code.count("box.innerHTML = highlight.highlight(")
        assert view.html_template == template and view.js_on_load == loaded


def test_every_script_of_the_view_is_part_of_it() -> None:
    from app.web.token_view import CHAT, END, TOKENS

    names = {path.stem for path in (ASSETS / "chat").glob("*.js")}
    assert names == {*TOKENS, *CHAT, END}


def test_what_stands_below_a_message_travels_with_it(db: Database) -> None:
    store = Conversations(db, "local")
    conversation = store.create().id
    first = store.append(conversation, "user", "one")
    other = store.append(conversation, "user", "two", version_of=first.id)
    (turn,) = render.transcript(store.messages(conversation), continuable=True)["turns"]
    assert turn["versions"] == [first.id, other.id] and turn["on"] and "run" not in turn


def test_tokens_travel_in_groups_of_one_step_source_and_match_length() -> None:
    pieces = [
        Piece("a", "context", 4, 7, 90, 0.456),
        Piece("b", "context", 4, 7, 91, 0.001),
        Piece("c", "context", 5, 7, 92, 1.0),
        Piece("d", TARGET, 0, 7, 93, 0.0),
        Piece("e", TARGET, 0, 9, 94, float("nan")),
    ]
    sources: dict[str, int] = {}
    assert render.groups(pieces, sources, 5) == [
        [0, 4, 2, ["a", "b"], [46, 1]],
        [0, 5, 0, ["c"], [100]],
        [1, 0, 0, ["d"], [0]],
        [1, 0, 2, ["e"], [0]],
    ]
    assert [*sources] == ["context", TARGET], "numbered in the order of their first tokens"
    (again,) = render.groups(pieces[3:4], sources, 7)
    assert again[0] == 1, "a source keeps its number"


def test_a_page_is_sent_the_messages_that_it_has_not_drawn(db: Database) -> None:
    store = Conversations(db, "local")
    conversation = store.create().id
    for text in "abc":
        store.append(conversation, "user", text)
    messages = store.messages(conversation)
    shown = render.transcript(messages, 2)
    assert [turn["text"] for turn in shown["turns"]] == ["c"]
    assert (shown["kept"], shown["after"]) == (2, messages[1].id)
    assert render.transcript(messages)["after"] == ""


def test_a_page_is_sent_what_a_rewrite_changed_and_how_it_is_accepted(db: Database) -> None:
    store = Conversations(db, "local")
    conversation = store.create().id

    def rewrite(name: str, old: str, new: str) -> dict[str, Any]:
        store.append(
            conversation, "user", join([Attachment(name, old, rewrite=True)], "Change it.")
        )
        store.append(conversation, "assistant", new)
        *_, asked, answered = render.transcript(store.messages(conversation))["turns"]
        assert asked["files"][0]["rewrite"] and "rewrite" not in asked
        found: dict[str, Any] = answered["rewrite"]
        return found

    store.append(conversation, "user", "Tell me of the sea.")
    said = store.append(conversation, "assistant", "<think>\nhm\n</think>\n\nThe sea is wide.")
    changes = [("same", "The sea is "), ("removed", "wide."), ("added", "deep.")]
    found = rewrite("answer.md", "The sea is wide.", "<think>\nhm\n</think>\n\nThe sea is deep.")
    assert found == {"changes": changes, "original": said.id}
    found = rewrite("notes.md", "The sea was wide.", "```\nThe sea was wide.\n```")
    assert found == {"changes": [], "name": "notes.md", "text": "The sea was wide."}
    assert rewrite("sea.PDF", "one", "two")["name"] == "sea.PDF.txt"
    store.append(conversation, "user", "Thank you.")
    store.append(conversation, "assistant", "The sea is wide.")
    assert "rewrite" not in render.transcript(store.messages(conversation))["turns"][-1]


def test_a_page_is_sent_where_the_quotes_of_an_answer_stand(db: Database) -> None:
    store = Conversations(db, "local")
    conversation = store.create().id

    def turn(role: str, text: str) -> Any:
        store.append(conversation, role, text)
        return render.transcript(store.messages(conversation))["turns"][-1]

    assert "quotes" not in turn("assistant", "“nothing was read so far”")
    notes = Attachment("notes.md", "The 🌊 sea\nis wide and very deep.")
    asked = turn("user", join([Attachment("a.md", "No word of it."), notes], "What does it say?"))
    thought = "<think>\n“is wide and very deep”\n</think>\n\n"
    quotes = turn("assistant", f"{thought}It “is wide and very deep”, “as they all will say”.")[
        "quotes"
    ]
    assert quotes["title"] == "Quotes: 1 of 2 found word for word in what the model has read"
    place = {"message": asked["key"], "number": 1, "where": "notes.md, line 2"}
    first = {"text": "is wide and very deep", **place, "from": 11, "to": 32}
    assert quotes["rows"] == [first, {"text": "as they all will say"}]
    long = Attachment("long.md", "x " * render.LONGEST + "the end of all things")
    turn("user", join([long], ""))
    (row,) = turn("assistant", "“the end of all things”")["quotes"]["rows"]
    assert row["where"] == "long.md, line 1" and "from" not in row, (
        "the page has its beginning only"
    )
    result = turn("tool", 'fetch {"of": "it"}\nA page about the whole world.')
    (row,) = turn("assistant", "“A page about the whole world”")["quotes"]["rows"]
    assert (row["message"], row["where"]) == (result["key"], "the result of fetch, line 1")
    *above, last = store.messages(conversation)
    assert "quotes" in render.about(last, above)
    for note in ({"json": True}, {"calls": 3}):
        assert "quotes" not in render.about(replace(last, run_id="run"), above, notes={"run": note})


def test_every_source_has_one_colour_and_its_own_mark() -> None:
    assert set(colors.INKS) == {*TIERS, HEAD, TARGET}
    looks = list(colors.INKS.values())
    assert len({i.colour for i in looks}) == len({i.underline for i in looks}) == 5
    colours = {i.colour for i in looks}
    assert colors.ink("draft:small").colour in colors.DRAFT_SHADES
    assert not colours & {*colors.DRAFT_SHADES, *colors.STAGES.values()}
    for name, look in colors.INKS.items():
        assert f"--s-{name}:{look.colour}" in colors.variables()


@pytest.fixture
def levels() -> Iterator[None]:
    draft_models.rank(["tiny", "small", "mid"])
    yield
    draft_models.LEVELS.clear()


def test_draft_models_have_one_hue_and_a_shade_per_level(levels: None) -> None:
    shades = [colors.ink(f"draft:{name}").colour for name in ("mid", "small", "tiny")]
    assert shades == [*colors.DRAFT_SHADES[:3]], "the largest is the darkest"
    assert {colors.ink(f"draft:{name}").underline for name in ("mid", "old")} == {"wavy"}
    old = colors.ink("draft:old").colour
    draft_models.rank(["other"])
    assert colors.ink("draft:old").colour == old in colors.DRAFT_SHADES
    assert colors.ink("draft:mid").colour == shades[0], "what was loaded keeps its shade"
    assert colors.others(["target", "draft:mid", "context", "draft:tiny", "draft:small"]) == [
        "draft:tiny",
        "draft:small",
        "draft:mid",
    ]


@pytest.mark.parametrize("source", ["", "draft", "__proto__", "constructor", "<b>"])
def test_an_unknown_source_is_no_draft_model(source: str) -> None:
    look = colors.ink(source)
    assert look.title == "Unknown" and not look.underline
    named = render.drafts([source])
    assert named[source]["kind"] == "k-target"


def test_draft_models_travel_with_the_tokens_they_drafted() -> None:
    evil = "draft:<img src=x onerror=alert(1)>"
    step = Step(0, (Token(1, 0, evil, text="a"), Token(2, 1, TARGET, text="b")))
    value = render.side_by_side("hsd", [step])
    (name,) = value["names"].values()
    assert list(value["names"]) == [evil] and name["kind"] == "k-draft"
    assert name["colour"] in colors.DRAFT_SHADES
    assert value["sources"] == [evil, TARGET] and render.legend([TARGET])["names"] == {}


def test_a_prediction_has_the_underline_that_its_ink_says() -> None:
    assert render.drafts([PREDICTION])[PREDICTION]["kind"] == "k-prediction"
    assert 'class="tok k-prediction"' in step_card(Step(0, (), {PREDICTION: 3}), 1)


def test_the_style_sheets_bring_no_tier_colour_of_its_own() -> None:
    sheets = {path.stem: path.read_text() for path in (ASSETS / "styles").glob("*.css")}
    assert sorted(sheets) == sorted(layout.STYLES)
    used = set(re.findall(r"#[0-9a-f]{6}", "".join(sheets.values()).lower()))
    assert not used & {look.colour for look in colors.INKS.values()}
    assert "http" not in "".join(sheets.values())


@pytest.mark.parametrize(
    ("seconds", "expected"), [(2.0, "2.00 s"), (0.0123, "12.3 ms"), (0.00005, "50 µs"), (0, "0 µs")]
)
def test_durations(seconds: float, expected: str) -> None:
    assert milliseconds(seconds) == expected


@pytest.mark.parametrize(
    ("proof", "text", "kind"),
    [
        ({"kind": "same", "tokens": 9, "speedup": 1.8}, "proved: same text, 1.80×", "good"),
        ({"kind": "same", "tokens": 9, "speedup": None}, "proved: same text", "good"),
        ({"kind": "same", "speedup": "fast"}, "proved: same text", "good"),
        ({"kind": "same", "speedup": True}, "proved: same text", "good"),
        ({"kind": "differs", "at": 12}, "differs at token 12", "bad"),
        ({"kind": "skipped", "why": "<b>why</b>"}, "not proved", ""),
    ],
)
def test_a_badge_says_what_a_proof_found(proof: dict[str, Any], text: str, kind: str) -> None:
    found = badge(proof)
    assert (found["text"], found["kind"]) == (text, kind) and found["title"]


@pytest.mark.parametrize("proof", [{}, {"kind": "best"}, {"kind": ["same"]}, {"speedup": 2.0}])
def test_without_a_proof_there_is_no_badge(proof: dict[str, Any]) -> None:
    assert badge(proof) == {} and "badge" not in remark(Worth(0, 0, 0.0, None, proof))


def test_a_difference_names_both_tokens_and_how_close_they_were() -> None:
    proof = {"kind": "differs", "at": 3, "plain": " a", "said": "<b>" * 99, "gap": 0.00123}
    title = badge(proof)["title"]
    assert "' a'" in title and "0.0012 apart" in title and len(title) < 200 + 2 * LONGEST_TOKEN
    assert "apart" not in badge({**proof, "gap": "small"})["title"]
    early = badge({**proof, "early": True})["title"]
    assert "ended there" in early and "continues with ' a'" in early


def test_each_answer_of_a_conversation_has_its_sentence(db: Database) -> None:
    talk = Conversations(db, "ada").create().id
    tokens = tuple(Token(1, at, "context") for at in range(20))
    step = Step(0, tokens, {"context": 25}, {"context": 19}, verify_seconds=1.0, plain_seconds=4.0)
    run_id = Traces(db, "ada").save(Run(prefill=Prefill(1, 0, 0.0), steps=(step,)), talk)
    found = remarks(db, "ada", talk)
    assert found == {run_id: {"note": "19 of 20 tokens were guessed, which saved about 3.0 s."}}
    assert remarks(db, "bob", talk) == {} == remarks(db, "ada", None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"thinks": True}, {"thinks": True}),
        ({"generation": {"format": {"kind": "json_schema"}}}, {"json": True}),
        ({"thinks": False, "generation": {"format": None}}, {}),
        ({"generation": {}}, {}),
    ],
)
def test_an_answer_that_began_within_thinking_or_is_bound_to_json_is_known_to(
    db: Database, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Only the page that watched it grow has heard it from the answer itself."""
    talk = Conversations(db, "ada").create().id
    step = Step(0, (Token(1, 0, "context"),), finish="cancelled", verify_seconds=1.0)
    run = Run(settings=settings, prefill=Prefill(1, 0, 0.0), steps=(step,))
    run_id = Traces(db, "ada").save(run, talk)
    assert remarks(db, "ada", talk)[run_id].items() >= expected.items()
    assert remarks(db, "ada", talk)[run_id].keys() & {"thinks", "json"} == expected.keys()
    with db.write() as handle:
        handle.execute("UPDATE runs SET settings = '{' WHERE id = ?", [run_id])
    found = remarks(db, "ada", talk)[run_id]
    assert not found.keys() & {"thinks", "json"}, "a damaged file breaks nothing"


@pytest.mark.parametrize("source", [CONTEXT, SCHEMA, PREDICTION])
def test_every_guessed_token_shows_its_colour(source: str) -> None:
    look = colors.ink(source)
    rule = (
        f".{colors.css_class(source)}{{--k:{look.colour};text-decoration-style:{look.underline}}}"
    )
    assert look.underline and rule in colors.variables()
