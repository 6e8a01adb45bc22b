"""Compare without a browser: what the sides are, and what can be said of each kind."""

from collections.abc import Sequence
from dataclasses import replace

import gradio as gr
import pytest

from app.service.comparison import LEFT, RIGHT, Progress, Race, Side, differs
from app.service.preferences import Preferences
from app.service.session import Session
from app.web.run_html import LEFT_AND_RIGHT, difference
from app.web.tabs import compare
from engine.errors import SettingError
from engine.local import Local
from engine.methods import PLAIN
from engine.models.loaders import ModelLoaders
from engine.runs import Verdict
from engine.settings import Drafting, Generation, Sampling
from engine.types import Run, Step, Token
from storage.database import Database
from tests.support.blocks import EVIL, tab_of
from tests.support.inside import OWNER
from tests.support.runs import run_of
from tests.support.toy import ToyBackend


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    loaders = ModelLoaders(present=lambda source: not source.startswith("hub/"))
    return Session(Local(backend=toy, loaders=loaders), db, loaders=loaders)


def chosen(on: compare.Compare, left: Sequence[object], right: Sequence[object]) -> list[object]:
    controls = on.controls
    generation = Generation(Sampling(0.5, seed=9), 12)
    return [*left, *right, *controls.show("Be kind.", Preferences(generation, fresh_seed=True))]


def test_a_side_has_what_was_chosen_for_it_and_else_what_is_in_settings() -> None:
    preferences = Preferences(Generation(Sampling(0.5, seed=9), 12))
    plain = compare.side_of(preferences, ["plain", "", [], "", "", ""])
    assert plain == Side(PLAIN, preferences.generation)
    other = compare.side_of(preferences, ["hd", " 1,25 ", ["model"], "fixed", "8", "/m/a.gguf"])
    assert other.generation.sampling == Sampling(1.25, seed=9) and other.source == "/m/a.gguf"
    assert other.method.drafting == Drafting(("model",), 8, budget="fixed")
    assert compare.side_of(preferences, ["hd", None, None, None, None]).source == ""
    for wrong in (
        ["hd", "hot", [], "", ""],
        ["hd", "9", [], "", ""],
        ["hd", "nan", [], "", ""],
        ["hd", "", ["moon"], "", ""],
        ["hd", "", [], "boundless", ""],
        ["hd", "", [], "", "1.5"],
        ["magic", "", [], "", ""],
    ):
        with pytest.raises(SettingError):
            compare.side_of(preferences, wrong)


def test_both_sides_have_one_seed_even_where_each_answer_has_its_own(session: Session) -> None:
    on = tab_of(compare.Compare, session)
    plain, fast = ["plain", "", [], "", "", ""], ["hd", "", [], "", "", ""]
    system, (left, right) = on.chosen_sides(chosen(on, plain, fast))
    assert system == "Be kind." and left.generation == right.generation
    again, _ = on.chosen_sides(chosen(on, plain, fast))[1]
    assert again.generation.sampling.seed != left.generation.sampling.seed
    assert differs(left, right) == "" and (left.method.name, right.method.name) == ("plain", "hd")


def test_models_on_this_machine_are_offered_and_guests_are_offered_none(
    session: Session, db: Database, toy: ToyBackend
) -> None:
    session.models.store.add("hub/gone", {})
    on = tab_of(compare.Compare, session)
    offered = compare.models_of(session)
    assert offered[0] == ("The loaded model", "")
    assert len(offered) > 1 and "hub/gone" not in dict(offered).values()
    shown = on.offer("/gone.gguf", offered[1][1])
    gone, kept = (shown[side.model] for side in on.sides)  # type: ignore[index]
    assert gone["value"] == "" and "value" not in kept, "what is chosen meanwhile stays"  # type: ignore[index,operator]
    guests = tab_of(compare.Compare, Session(Local(backend=toy), db, guests=True))
    assert all(side.model is None for side in guests.sides)
    assert len(guests.offer()) == 2, "methods alone"


def run(
    method: str, token: int = 97, seconds: float = 2.0, temperature: float = 0.0, text: str = "ab"
) -> Run:
    step = Step(
        0, (Token(token, 0, "target", 0, text, 0.5),), verify_seconds=seconds, finish="length"
    )
    drawn = {"sampling": {"temperature": temperature, "seed": 1}}
    return run_of([step], method=method, model=EVIL, settings={"generation": drawn})


def test_another_model_is_compared_by_characters_and_its_text_is_no_fault(
    session: Session,
) -> None:
    pairs = tuple((run("plain"), run("hd", 98, seconds, text="abcd")) for seconds in (1.0, 2.0))
    progress = Progress(pairs, 1, None, same_text=False, over=True, differs="model")
    found = compare.banner(session, progress, 2)
    assert "Two models" in found and "<b>3.00×</b> as many characters per second" in found
    assert (
        "repeats 2.00–4.00×, of which repeat 2 is shown" in found
        and "First difference" not in found
    )
    first = compare.drawn(progress)[0]
    assert first.layout.title.text == "Speed of the right side over the left one"
    assert list(first.data[0].y) == [4.0, 2.0]
    shown = compare.head(compare.heading(progress, pairs[0][0], f"{EVIL} (toy)"), pairs[0][0])
    assert "<img" not in shown and "&lt;img" in shown


@pytest.mark.parametrize("stopped", [False, True])
def test_the_panes_and_charts_show_the_pair_whose_speedup_is_the_median(
    session: Session, stopped: bool
) -> None:
    pairs = tuple((run("plain", seconds=2.0), run("hd", seconds=each)) for each in (1.6, 1.0, 2.5))
    going = Progress(pairs, 2, None, differs="settings")
    assert going.middle == 0
    on = tab_of(compare.Compare, session)
    assert not {*on.heads, *on.views} & on.updates(going, 4, ["", ""]).keys()
    shown = on.updates(replace(going, over=not stopped, cancelled=stopped), 3, ["", ""])
    assert "<b>1.25×</b>" in str(shown[on.verdict])
    assert "of which repeat 1 is shown" in str(shown[on.verdict])
    assert [shown[each] for each in on.heads] == [
        compare.head(compare.heading(going, one, ""), one) for one in pairs[0]
    ]
    assert [shown[each]["turns"][0]["key"] for each in on.views] == ["0-plain-0", "1-hd-0"]  # type: ignore[index]
    assert shown[on.plots[1]] == compare.drawn(replace(going, pairs=pairs[:1]))[1]


def test_the_lower_one_of_two_pairs_in_the_middle_is_shown_and_noise_is_ordered_too() -> None:
    pairs = tuple((run("plain", seconds=each), run("hd", seconds=1.0)) for each in (4.0, 2.0))
    assert Progress(pairs, 1, None).middle == 1
    assert Progress(pairs, 1, None, differs="model").middle == 1
    unmeasured = run("plain", seconds=0.0), run("hd", seconds=0.0)
    assert Progress((unmeasured, unmeasured), 1, None).middle == 1


def test_other_settings_are_compared_by_their_speed(session: Session) -> None:
    pair = run("hd"), run("hd", 98, 1.0, temperature=0.9)
    progress = Progress((pair,), 0, None, same_text=False, over=True, differs="settings")
    found = compare.banner(session, progress, 1)
    assert "Other settings" in found and "<b>2.00×</b> as many tokens per second" in found
    assert "temperature 0.9" in compare.heading(progress, pair[1], "toy")


def test_two_methods_are_named_by_their_sides_where_neither_is_plain(session: Session) -> None:
    same = Progress(((run("context"), run("hd", seconds=4.0)),), 0, None, over=True)
    assert "median speedup of the right side" in compare.banner(session, same, 1)
    apart = Progress(((run("context"), run("hd", 98)),), 0, None, over=True)
    found = compare.banner(session, apart, 1)
    assert "left <code>" in found and "right <code>" in found and "with drafts" not in found
    assert "Their scores are 0 apart (logit gap)." in found
    lines = {line.name for line in compare.drawn(same)[1].data}
    assert lines == {"Left", "Right"}
    early = difference(Verdict(False, 3, 4, EVIL, EVIL, True), sides=LEFT_AND_RIGHT)
    assert "the right answer ended" in early and "The left one continues with" in early
    assert "<img" not in early


def test_a_plain_right_side_draws_what_the_left_one_drafted(session: Session) -> None:
    fast = run("hd")
    fast = replace(fast, steps=(replace(fast.steps[0], proposed={"context": 3}),))
    progress = Progress(((fast, run("plain")),), 0, None, over=True)
    over_time, *_, drafted = compare.drawn(progress)[1:]
    assert {line.name for line in over_time.data} == {"Left", "Right"}
    assert sum(drafted.data[0].y) == 3


def test_tokens_of_a_model_that_is_gone_are_spelled_by_the_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.current, "text", lambda tokens: "WRONG")
    pair = run("plain", text="right"), run("hd", 98, text="here")
    progress = Progress((pair,), 0, None, over=True, foreign=True)
    found = compare.banner(session, progress, 1)
    assert "&#x27;right&#x27;" in found and "&#x27;here&#x27;" in found and "WRONG" not in found
    assert "WRONG" in compare.banner(session, replace(progress, foreign=False), 1)


def test_what_cannot_be_compared_is_reported_stays_reported_and_the_button_is_back(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(compare, "warn", calls.append)
    on = tab_of(compare.Compare, session)
    side = ["hd", "", [], "", "", ""]
    shown = list(on.run(OWNER, "hello", 1, *chosen(on, side, [*side[:-1], f"hub/{EVIL}"])))
    assert "not on this machine" in calls[0]
    text = str(shown[1][on.verdict])
    assert "not on this machine" in text and EVIL not in text, "a notice goes by"
    assert shown[-1][on.run_button] == gr.update(visible=True)


def raced(method: str, seconds: float, text: str = "abcd") -> Run:
    """A run of one step for each character, which took so many seconds."""
    steps = [
        Step(
            at,
            (Token(ord(each), at, "target", text=each, probability=0.5),),
            finish="length" if at == len(text) - 1 else None,
            verify_seconds=seconds / len(text),
        )
        for at, each in enumerate(text)
    ]
    return run_of(steps, method=method)


@pytest.mark.parametrize(
    ("race", "said"),
    [
        (Race((raced("plain", 4), raced("hd", 2)), RIGHT, 2), "Both sides answer at once"),
        (
            Race((raced("plain", 4), raced("hd", 2)), RIGHT, 2, True),
            "<b>Right was first</b> (Databases (hierarchy drafting)). The other side then had 2 of "
            "its 4 tokens. The texts are identical.",
        ),
        (
            Race((raced("plain", 2), raced("hd", 4)), LEFT, 3, True),
            "<b>Left was first</b> (Plain decoding). The other side then had 3 of its 4 tokens.",
        ),
        (
            Race((raced("plain", 2), raced("hd", 2.05)), LEFT, 3, True),
            "<b>Both were done</b> within a tenth of a second. The texts are identical.",
        ),
        (
            Race((raced("plain", 4), raced("hd", 2, "abXd")), RIGHT, 2, True),
            "The texts differ from token 3 on: Compare shows how close it was.",
        ),
        (
            Race((raced("plain", 4), raced("hd", 2, "abXd")), RIGHT, 2, True, same_text=False),
            "The texts differ from token 3 on, as Same distribution does not keep them.",
        ),
        (
            Race((raced("plain", 4), raced("plain", 2)), RIGHT, 2, True, False, "settings"),
            "Their texts may differ. Both had the machine for half of the time: for a speedup, "
            "press Compare.",
        ),
        (Race((raced("plain", 4), Run("hd")), LEFT, 0, True), "Stopped before both"),
    ],
)
def test_the_result_of_a_race_tells_no_speedup(session: Session, race: Race, said: str) -> None:
    found = compare.result(session, race)
    assert said in found and "\u00d7" not in found and "tokens/s" not in found
    assert "tokens/s<" not in compare.lane(race.runs[0])


def test_a_lane_shows_what_does_not_depend_on_the_other_one() -> None:
    assert "4</b> tokens" in compare.lane(raced("plain", 4))
    assert "1.00</b> tokens/step" in compare.lane(raced("plain", 4))
    assert "<b>" not in compare.lane(Run("plain")), "nothing is known yet"
