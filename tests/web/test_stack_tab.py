"""The Stack tab without a browser: its charts, its words, and what its buttons change."""

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from app.service.comparison import Verdict
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import colors, stack_charts, stack_html
from app.web.tabs import compare, stack
from engine.compare import UNKNOWN, Speedup
from engine.errors import StrataError
from engine.heads.base import HeadInfo
from engine.hsd.family import Family
from engine.hsd.planner import NAMES, Plan, Recursion, Source, StackLevel, edges, resolve
from engine.hsd.profile import ModelProfile, Outcome, Pair, Profile, Rounds
from engine.hsd.trials import Trial, entries, reasons
from engine.settings import Drafting, Sampling
from engine.types import RULES
from storage.database import Database
from tests.service.test_draft_models import Shelf
from tests.support.blocks import EVIL, last, tab_of
from tests.support.quick import quick  # noqa: F401
from tests.support.toy import ToyBackend

SAMPLER = {"temperature": 0.8, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0}


def profile_of(small: float = 0.8, mid: float = 0.9, seconds: float = 0.1) -> Profile:
    """Three models, the target ten times as slow as the smallest."""
    models = (
        ModelProfile(EVIL, "f0", 10, 40, {0: seconds, 8: 2 * seconds}, 0.0, Rounds((1.0,), 0.2)),
        ModelProfile("mid", "f1", 20, 80, {0: 0.3, 8: 0.4}),
        ModelProfile("toy", "f2", 90, 360, {0: 1.0, 8: 1.2}, 0.0, Rounds((0.5, 0.5), 1.2)),
    )
    shares = {(0, 1): 0.7, (0, 2): small, (1, 2): mid}
    pairs = {
        levels: Pair(share, dict.fromkeys(RULES, tuple(share**n for n in range(1, 9))))
        for levels, share in shares.items()
    }
    return Profile(models, pairs, SAMPLER, 640, 1.0)


def family_of(profile: Profile) -> Family:
    drafts = {model.name: ToyBackend(name=model.name) for model in profile.models[:-1]}
    for size, draft in enumerate(drafts.values()):
        draft.info = replace(draft.info, parameters=size)
    return Family(ToyBackend(), drafts, profile)


# what answers say


def test_one_sentence_says_what_the_last_stack_took_next_to_its_prediction() -> None:
    profile, family = profile_of(), family_of(profile_of())
    plan = family.plan("", "match")
    assert stack_html.remark(None, "match") == stack_html.remark(profile, "match") == ""
    near = profile.learned(f"match {EVIL}/mid", Outcome(1532, 1.0, 1.05, 1.9))
    text = "predicted 1.81×, measured 1.90× over the last 1,532 tokens"
    assert stack_html.remark(near, "match") == f"{EVIL}/mid: {text}."
    assert stack_html.remark(near, "rejection") == ""
    shown = stack_html.planned(family, "match", plan, "", near)
    assert text in shown and EVIL not in shown
    far = near.learned("match mid", Outcome(200, 2.0, 1.0, 1.0))
    assert stack_html.remark(far, "match") == (
        "mid: predicted 1.00×, measured 0.50× over the last 200 tokens; planned again."
    )
    few = far.learned("match databases/mid", Outcome(9, 2.0, 1.0, 1.0))
    assert stack_html.remark(few, "match") == "", "too little to say"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("head", "The built-in head drafts for toy."),
        ("databases+head", "The databases and the built-in head draft for toy."),
    ],
)
def test_a_head_is_drawn_and_named_like_the_databases(source: Source, sentence: str) -> None:
    found = profile_of()
    head = Rounds((0.0, 0.0, 1.0), 1.3)
    target = replace(found.target, head=head, merged=head)
    profile = replace(found, models=(*found.models[:-1], target))
    plan = resolve(profile, source, "match")
    assert str(plan) == source and plan.source == source
    figure = stack_charts.hierarchy(profile, "match", plan)
    thick = [line for line in figure.data if line.mode == "lines" and line.line.width == 4]
    assert len(thick) == 1 and source in str(figure)
    shown = stack_html.planned(family_of(profile), "match", plan, source)
    assert f"{source} only" in shown and sentence in shown
    assert f"With the {NAMES[source]} toy gives" in " ".join(
        reasons(Recursion(replace(profile, models=(*found.models[:-1], slowed(target))), "match"),
                plan, "match")
    )  # fmt: skip


@pytest.mark.parametrize("expensive", ["", "not used: a guess takes too long"])
def test_the_stack_tab_plans_with_a_head_only_where_the_models_tab_says_it_is_used(
    expensive: str,
) -> None:
    """The profile measured databases and head as the fastest, and they were planned even where the
    head had been found to cost more than it can save: then the usual method does not ask it."""
    found = profile_of()
    target = replace(found.target, head=Rounds((0.0, 1.0), 1.3), merged=Rounds((0.0, 0.0, 1.0), 1))
    profile = replace(found, models=(*found.models[:-1], target))
    family = family_of(profile)
    head = HeadInfo("EAGLE-3", 4, True, expensive=expensive)
    family.target.info = replace(family.target.info, head=head)
    plan = family.plan("", "match")
    shown = stack_html.planned(family, "match", plan, "")
    offered = [str(entry.plan) for entry in entries(family, Drafting(), "")]
    for text in (str(plan), shown.replace(escape(expensive), ""), " ".join(offered)):
        assert ("databases+head" in text) == (not expensive)
    assert (f"The EAGLE-3 head is {expensive}." in shown) == bool(expensive)
    assert family.plan("databases+head", "match").head, "who asks for it by name gets it"


def slowed(model: ModelProfile) -> ModelProfile:
    slow = Rounds((1.0,), 2.0)
    return replace(model, head=slow, merged=slow)


# charts


def test_the_heat_map_holds_every_pair_once() -> None:
    (heat,) = stack_charts.acceptance(profile_of(), "match").data
    assert list(heat.x) == ["mid", "toy"] and heat.y[1] == "mid"
    assert [list(row) for row in heat.z] == [[70.0, 80.0], [None, 90.0]]
    assert [list(row) for row in heat.text] == [["70 %", "80 %"], ["", "90 %"]]
    assert "same text" in heat.customdata[0][1] and heat.customdata[1][0] == ""


@pytest.mark.parametrize("spec", [(), ((EVIL, 4),), ((EVIL, 4), ("mid", 3))])
@pytest.mark.parametrize("databases", [False, True])
def test_the_graph_shows_all_edges_and_the_plan_as_a_thick_path(
    spec: tuple[tuple[str, int], ...], databases: bool
) -> None:
    profile, plan = profile_of(), Plan(tuple(StackLevel(*level) for level in spec), databases)
    figure = stack_charts.hierarchy(profile, "match", plan)
    lines = [line for line in figure.data if line.mode == "lines"]
    thick = [line for line in lines if line.line.width == 4]
    assert len(thick) == len(spec) + databases
    drawn = [edge for edge in edges(profile, "match") if edge.below != ""]
    assert len(lines) == len(drawn)
    texts = [text for line in figure.data if line.text for text in line.text]
    for _, batch in spec:
        assert any(f"{batch} at a time ·" in text for text in texts)
    vertices = figure.data[-1]
    assert list(vertices.x) == [-1, 0, 1, 2] and "1e+03 ms alone" in vertices.text[-1]
    marked = [width > 0 for width in vertices.marker.line.width]
    assert marked == [databases, len(spec) > 0, len(spec) > 1, True]


def test_the_bars_are_side_by_side() -> None:
    bars = [
        stack_charts.Bar("plain", colors.PLAIN, 1.0, 1.1),
        stack_charts.Bar("small@4", colors.DRAFT_SHADES[1], 0.5, None),
        stack_charts.Bar("both", colors.INK, None, 0.6),
    ]
    figure = stack_charts.plans(bars)
    measured, predicted = figure.data
    assert list(measured.x) == [1100.0, None, 600.0]
    assert list(predicted.x) == [1000.0, 500.0, None]
    assert [shape.x0 for shape in figure.layout.shapes] == [1100.0]
    assert [bar.name for bar in stack_charts.plans(bars[1:2]).data] == ["predicted"]
    assert not stack_charts.plans([]).data


def test_names_in_charts_are_no_markup_and_not_endless() -> None:
    profile = profile_of()
    figures = [
        stack_charts.acceptance(profile, "match"),
        stack_charts.cost_curves(profile),
        stack_charts.hierarchy(profile, "match", Plan((StackLevel(EVIL, 2),))),
        stack_charts.plans([stack_charts.Bar(f"{EVIL}@2", "#000000", 1.0, None)]),
    ]
    for figure in figures:
        assert "<img" not in json.dumps(figure.to_plotly_json(), default=list)
        assert "&lt;img" in json.dumps(figure.to_plotly_json(), default=list)
    (bars,) = stack_charts.plans([stack_charts.Bar("x" * 300, "#000000", 1.0, None)]).data
    assert len(bars.y[0]) == stack_charts.LONGEST_NAME


def test_without_a_profile_there_are_frames() -> None:
    for figure in (
        stack_charts.acceptance(None, "match"),
        stack_charts.cost_curves(None),
        stack_charts.hierarchy(None, "match", None),
    ):
        assert not figure.data and figure.layout.title.text


# words


def trial(title: str, seconds: float, same: bool = True, must: bool = True) -> Trial:
    """A plan, where plain decoding takes a second per token, and nothing but decoding time."""
    found, speedup = Verdict(same, 9, 4, EVIL, "b"), Speedup(1 / seconds, 1 / seconds)
    return Trial(f"hsd:{title}", title, 1.0, seconds, 64, found, must, speedup)


def findings(family: Family, spec: str = "", *trials: Trial) -> str:
    return stack_html.findings(family, "match", family.plan(spec, "match"), trials)


def test_a_stack_that_pays_is_said_to_and_one_that_is_slower_is_named_with_its_reason() -> None:
    text = findings(family_of(profile_of()))
    assert "Draft models are worth it" in text and "differs" not in text and "<img" not in text
    text = findings(family_of(profile_of(small=0.05)), f"{EVIL}@8")
    assert "Slower than plain" in text and "differs" in text
    assert "accepts" in text and "Predicted to be fastest" in text
    assert "<img" not in text and "&lt;img" in text
    costly = family_of(profile_of(small=0.9, mid=0.1, seconds=2.0))
    assert "Even if all its tokens were accepted" in findings(costly, f"{EVIL}@2")


def test_where_no_stack_pays_it_says_why_calmly() -> None:
    text = findings(family_of(profile_of(small=0.02, mid=0.02)))
    assert (
        "No draft model is worth it here" in text
        and "here</b>: the databases alone: 800 ms" in text
    )
    assert text.count("accepts") == 2 and "differs" not in text
    unused = findings(family_of(profile_of()), "databases")
    assert "No draft model is used" in unused and "Predicted to be fastest" in unused
    databases = Rounds((0.0, 0.0, 0.0, 1.0), 1.2)
    profile = profile_of(small=0.5, mid=0.02)
    target = replace(profile.target, databases=databases)
    text = findings(family_of(replace(profile, models=(*profile.models[:-1], target))))
    assert "No draft model is worth it here" in text
    assert "Predicted slower than the databases" in text
    target = replace(profile.target, merged=databases)
    text = findings(family_of(replace(profile, models=(*profile.models[:-1], target))))
    assert "here</b>: the databases and built-in head alone: " in text
    assert "Predicted slower than the databases and built-in head" in text


def test_measured_times_are_compared_with_each_other() -> None:
    family = family_of(profile_of())
    spec = f"{EVIL}@4"
    fast = findings(family, spec, trial("plain", 3.0), trial(spec, 2.0))
    assert "Draft models are worth it" in fast, "all of the machine was slower"
    slow = findings(family, spec, trial("plain", 1.0), trial(spec, 1.5))
    assert "Slower than plain" in slow and "Profile again" in slow


def test_output_drift_is_named_and_rejection_is_no_drift() -> None:
    family = family_of(profile_of())
    drift = findings(family, "", trial("plain", 1.0), trial("mid@2", 0.5, same=False))
    assert "Different text" in drift and "token 4" in drift and "float32" in drift
    assert "<img" not in drift
    calm = (trial("plain", 1.0), trial("mid@2", 0.5, same=False, must=False))
    assert "Different text" not in findings(family, "", *calm)
    text = stack_html.outcome(calm)
    assert "does not keep the text of a seed" in text and "2.00×" in text
    assert "1 of 1 gave the text" in stack_html.outcome((calm[0], trial("mid@2", 0.5)))
    assert "Plain decoding was the fastest" in stack_html.outcome([trial("plain", 0.1)])
    # A plan whose drafts were never accepted is faster for nothing: see engine/compare.py.
    idle = replace(trial("databases", 0.5), speedup=UNKNOWN)
    assert "Plain decoding was the fastest" in stack_html.outcome([trial("plain", 1.0), idle])


# the tab


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def session(db: Database, toy: ToyBackend, shelf: Shelf) -> Session:
    session = shelf.session(db, toy)
    session.stacks.offered += shelf.sources("mid", "small")
    return session


@pytest.fixture
def on(session: Session, monkeypatch: pytest.MonkeyPatch) -> stack.StackTab:
    monkeypatch.setattr("app.service.draft_models.PROMPTS", ("hello there",))

    found = tab_of(stack.StackTab, session)
    found.compared = tab_of(compare.Compare, session).method
    return found


def values(on: stack.StackTab, drafting: Drafting | None = None) -> list[Any]:
    chosen = Preferences(drafting=drafting or Drafting())
    return on.controls.show("", chosen)


def test_bad_input_is_reported_and_changes_nothing(
    on: stack.StackTab, session: Session, shelf: Shelf, warned: list[str]
) -> None:
    ticked, given = shelf.sources("small"), values(on)
    last(on.profile(ticked, "", *given))
    last(on.load([], "", *given))
    with pytest.raises(StrataError):
        on.add(str(shelf.root / "nowhere"), ticked)
    shelf.free = 1
    last(on.load(ticked, "", *given))
    assert "Not enough memory" in on.tick(ticked)
    assert len(warned) == 3 and "1 B are free" in warned[2] and not session.stacks.drafts
    shelf.free = 100
    last(on.load(ticked, "", *given))
    last(on.profile(ticked, "", *given))
    shown = on.refresh(ticked, f"{EVIL}@4", *given)
    assert "No such plan" in shown[on.plan] and "<img" not in shown[on.plan]
    assert shown[on.plots[0]].data, "the best plan is drawn instead"
    shown = on.refresh(ticked, "small@99", *given)
    assert "from 1 to 32" in shown[on.plan]
    with pytest.raises(StrataError):
        on.use("small@99", False, *given)
    last(on.measure(ticked, "small@99", *given))
    assert len(warned) == 4 and session.stacks.spec == ""
    given[1 + list(on.controls.parts).index("rule")] = "luck"
    assert on.refresh(ticked, "", *given).keys() == {on.job.status}
    assert "luck" in warned[4]


def test_ticks_are_sent_only_where_they_change(
    on: stack.StackTab, shelf: Shelf, warned: list[str]
) -> None:
    given = values(on)
    ticked = shelf.sources("mid", "small")
    assert "value" not in on.refresh(ticked, "", *given)[on.ticked]
    gone = str(shelf.root / "of another model")
    shown = on.refresh([*ticked, gone], "", *given)[on.ticked]
    assert shown["value"] == ticked
    for before in ([], ticked):
        added = on.add(str(shelf.root / "large"), before)[on.ticked]
        assert set(added["value"]) == {*before, *shelf.sources("large")}
    assert warned == []


def test_another_sampler_than_the_profiles_is_reported(
    on: stack.StackTab, session: Session, shelf: Shelf
) -> None:
    session.stacks.load(shelf.sources("small"))
    list(session.stacks.profile(Sampling(0.2), ("hello",), 16))
    text = stack_html.profiled(session.stacks, Sampling(0.9))
    assert "temperature 0.2" in text and "The settings use temperature 0.9" in text
    assert "The settings use" not in stack_html.profiled(session.stacks, Sampling(0.2, seed=5))
