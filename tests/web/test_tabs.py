"""The tabs without a browser: what they are made of, and who is shown what."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.service.comparison import Progress, Proof
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import layout, models_html, run_html
from app.web.kit import Visit
from app.web.markup import times
from app.web.metrics_panel import NO_GAIN, pace, panel_values
from app.web.run_html import EXACT, proof_line, title_of
from app.web.stream import AnswerEvents
from app.web.tabs import chat, compare, diagnostics, settings, welcome
from app.web.tabs.settings import methods, usable
from engine import native
from engine.compare import Reruns, Speedup, live
from engine.errors import SettingError
from engine.loaded import NO_MODEL_INFO, NoModel, no_model
from engine.local import Local
from engine.methods import METHODS, offered
from engine.metrics import summarise
from engine.runs import Verdict
from engine.settings import BUDGETS, Drafting, Generation, Sampling
from engine.types import Costs, Learned, Run, Step, Token
from storage.database import Database
from storage.steps import NOTHING, Digest
from storage.traces import Trace
from tests.conftest import EMBEDDED
from tests.support.blocks import EVIL, labels, made, tab_of
from tests.support.inside import local, soon, swap
from tests.support.runs import run_of
from tests.support.toy import ToyBackend, deviating


def test_a_note_is_in_the_header_whatever_it_is_about(session: Session, toy: ToyBackend) -> None:
    """Only a model that decodes plainly is compared with itself."""
    note = "llama.cpp's fast path <crashes>."
    for can_tree in (True, False):
        toy.info = replace(toy.info, note=note, can_tree=can_tree)
        assert '<p class="note">llama.cpp&#39;s fast path &lt;crashes&gt;.</p>' in layout.header(
            session, ()
        )
        assert ("will be plain" in compare.idle(session)) is not can_tree
        assert ("start fresh" in compare.idle(session)) is can_tree


@pytest.mark.parametrize("there", [True, False])
def test_the_header_says_whether_the_core_is_compiled(
    db: Database, toy: ToyBackend, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "core", native.core if there else None)
    shown = layout.header(Session(Local(backend=toy), db), ())
    assert ("compiled core" in shown, "core in Python" in shown) == (there, not there)


def test_guests_only_chat(owners_page: gr.Blocks, guests_page: gr.Blocks) -> None:
    mine, theirs = labels(owners_page), labels(guests_page)
    hidden = {"Measure again", "Databases", "Stack", "Load", "Profile", "Use for chat", "Models"}
    hidden |= {"Add", "Download and load", "Build from these", "Import it", "Prune", "Look up"}
    hidden |= {"API", "Make a key", "Revoke", "Benchmark", "Add the server"}
    assert hidden <= mine and not hidden & theirs and "Diagnostics" in theirs


def test_a_model_that_decodes_plainly_has_nothing_to_measure(db: Database) -> None:
    toy = ToyBackend()
    toy.info = replace(toy.info, can_tree=False)
    assert "Measure again" not in labels(
        made(lambda: layout.build(Session(Local(backend=toy), db)))
    )


def test_events_show_no_progress_on_components_and_none_is_left_out(
    owners_page: gr.Blocks,
) -> None:
    events = owners_page.get_config_file()["dependencies"]
    shown = [each for each in events if each["show_progress_on"] != [] and each["outputs"]]
    assert events and shown == [], "the page keeps account of each component that one is shown on"
    after = [each for each in events if each["trigger_after"] is not None]
    modes = {each["trigger_mode"] for each in after}
    assert len(after) > 20 and modes == {"multiple"}, "else Gradio drops what is already at work"
    choices = [each for each in events if any(kind == "input" for _, kind in each["targets"])]
    assert len(choices) > 5 and "once" not in {each["trigger_mode"] for each in choices}


@pytest.fixture
def controls(session: Session) -> settings.Settings:
    return tab_of(settings.Settings, session)


def test_settings_show_what_they_read(controls: settings.Settings) -> None:
    drafting = Drafting(("model", "context"), 12, 0.25, "fixed", "rejection")
    generation = Generation(Sampling(0.5, 3, 0.9, 0.1, 7), 99, ("END", "stop"))
    chosen = Preferences(generation, "hsd:small@8/mid@4", drafting, fresh_seed=False)
    assert controls.read(controls.show("Be kind.", chosen)) == ("Be kind.", chosen)


def test_settings_and_comparisons_start_from_the_defaults_of_the_engine(
    session: Session, controls: settings.Settings
) -> None:
    values = [getattr(part, "value", None) for part in controls.inputs]
    _, preferences = controls.read(values)
    compared = tab_of(compare.Compare, session).method.value
    assert preferences.method == "auto" == compared and preferences.chosen() == METHODS["auto"]
    assert preferences.drafting.budget == BUDGETS[0] == "adaptive"


@pytest.mark.parametrize("name", ["budget", "rule", "method"])
def test_unusable_settings_are_refused(controls: settings.Settings, name: str) -> None:
    values = controls.show("", Preferences())
    values[1 + list(controls.parts).index(name)] = "boundless"
    with pytest.raises(SettingError, match="boundless"):
        controls.read(values)


@pytest.mark.parametrize(
    ("same_text", "identical", "expected", "kind"),
    [
        (True, True, "Identical", "verdict same"),
        (True, False, "First difference", "verdict differs"),
        (False, True, "Identical", "verdict same"),
        (False, False, "does not keep the text of a seed", 'verdict"'),
    ],
)
def test_verdicts_raise_no_false_alarm(
    session: Session, same_text: bool, identical: bool, expected: str, kind: str
) -> None:
    def timed(method: str, token: int) -> Run:
        step = Step(0, (Token(token, 0, "target"),), verify_seconds=1.0)
        return run_of([step], method=method)

    pair = (timed("plain", 97), timed("hsd", 97 if identical else 98))
    progress = Progress((pair,), 0, None, same_text=same_text)
    found = compare.banner(session, progress, 1)
    assert expected in found and kind in found and EXACT not in found
    engine = local(session)
    engine.loaded.backend.info = replace(engine.loaded.backend.info, exact=True)
    assert (EXACT in compare.banner(session, progress, 1)) == identical
    assert ("1.00×" in found) == (identical or not same_text)
    verdict = Verdict(identical, 1, 0 if identical else 1, EVIL, EVIL)
    found_again = Reruns(9, 4, 1.0, 1.0, (1.0, 1.0), Speedup(1.0, 1.0))
    proof = Proof(1, "hsd", verdict, found_again, *pair, pair[1], same_text)
    line = proof_line(proof)
    assert expected in line and kind in line and "<img" not in line
    early = proof_line(replace(proof, verdict=replace(verdict, ended_early=True)))
    assert "<img" not in early and ("Ended early" in early) == (same_text and not identical)
    assert "Ended early" not in early or f"at token {verdict.position}" in early
    assert ("up to where it was stopped" in line) == identical, "the steps have no end"
    whole = replace(pair[1], steps=(replace(pair[1].steps[0], finish="length"),))
    assert "stopped" not in proof_line(replace(proof, shown=whole))


@pytest.mark.parametrize(
    ("speedup", "expected", "title"),
    [
        (
            Speedup(1.41, 1.62, None, 1.38, 1.45),
            "speedup of the whole answer <b>1.41×</b> (1.38× to 1.45×), decoding alone 1.62×.",
            "of the whole answer (1.38× to 1.45×); decoding alone 1.62×",
        ),
        (
            Speedup(low=0.97, high=1.04),
            "no measurable difference (0.97× to 1.04×).",
            "no measurable difference (0.97× to 1.04×)",
        ),
        (Speedup(), f"with drafts 85.0 ms; {NO_GAIN}.", NO_GAIN),
    ],
)
def test_a_proof_says_how_sure_it_is(speedup: Speedup, expected: str, title: str) -> None:
    step = Step(0, (Token(97, 0, "target"),), verify_seconds=1.0, finish="length")
    run = run_of([step], method="hd")
    reruns = Reruns(9, 4, 0.12, 0.085, (1.0, 1.0), speedup)
    proof = Proof(1, "hd", Verdict(True, 1), reruns, run, run, run)
    line = proof_line(proof)
    assert "9 times each way, in turn: plain 120.0 ms, with drafts 85.0 ms; " in line
    assert expected in line and EXACT not in line and EXACT in proof_line(proof, exact=True)
    shown = panel_values(summarise(run), run.steps, proof.speedup)
    assert shown["n"] == title and shown["h"][1] == times(speedup.whole)


def test_a_comparison_shows_no_gain_where_nothing_was_accepted(session: Session) -> None:
    def timed(method: str, seconds: float, kept: int) -> Run:
        accepted = {"context": kept} if kept else {}
        step = Step(
            0, (Token(97, 0, "target"),), accepted=accepted, verify_seconds=seconds, finish="length"
        )
        return run_of([step], method=method, learned=Learned(seconds))

    for kept, shown in ((0, "no draft was accepted"), (1, "<b>2.00×</b>, decoding alone 2.00×")):
        pair = (timed("plain", 2.0, 0), timed("hd", 1.0, kept))
        progress = Progress((pair, pair), 1, None)
        banner = compare.banner(session, progress, 2)
        assert shown in banner and ("×" in banner) == bool(kept)
        (*bars,) = compare.drawn(progress)[0].data
        assert bool(bars) == bool(kept)
    head = compare.head("Plain", pair[0])
    assert "<b>4.00 s</b> whole answer" in head and "<b>2.00 s</b> decoding" in head


def figures_of(session: Session, conversation: str) -> Any:
    """The figures that a page shows when it opens a conversation."""
    on = tab_of(chat.Chat, session)
    return on.shown(Visit("local", "page", {}), conversation)[on.figures]


def test_the_chat_shows_the_answers_own_speedup_until_it_was_measured(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(session).loaded.measure_plain()
    session.follow(session.engine.state)
    on = tab_of(chat.Chat, session)
    requested = Preferences(Generation(Sampling(0.8, seed=3), 60), fresh_seed=False)
    conversation = session.chat.say("local", None, "hello there")
    answer = session.generations.start("local", conversation, requested)
    assert soon(lambda: answer.over) and answer.update is not None
    last = answer.update
    assert last.metrics.kept > 0, "there is a gain to measure"
    data = gr.EventData(None, {"token": answer.token})
    shown = on.over(Visit("local", "page", {}), data, conversation)[on.figures]
    assert shown["h"][1] == times(live(last.metrics).whole)
    assert "estimated" in shown["n"] and on.figures.value == {}
    reopened = figures_of(session, conversation)
    for part in ("h", "n", "e"):
        assert reopened[part] == shown[part], "it was stored as it ended"
    assert "tokens in" in str(shown["e"]) and "seed 3" in str(shown["e"])
    assert "(by the last answer)" in layout.header(session, ())
    proved = Reruns(5, 0, 2.0, 1.0, (1.9, 2.1), Speedup(2.0, 2.2, None, 1.9, 2.1))
    monkeypatch.setattr("app.service.proofs.reruns_of", lambda answered, pairs: proved)
    *_, proof = session.proofs.prove("local", conversation)
    values = figures_of(session, conversation)
    assert values["h"][1] == f"{proof.speedup.whole:.2f}×" and "decoding alone" in values["n"]


def test_there_is_one_plain_speed(session: Session) -> None:
    """It follows the answers: header, panel and Models tab show the same, and the speed of an
    answer over it is the answer's speedup of decoding."""
    local(session).loaded.measure_plain()
    session.follow(session.engine.state)
    loaded = pace(session.current.plain)
    assert "(after loading)" in loaded and loaded in layout.header(session, ())
    requested = Preferences(Generation(Sampling(0.8, seed=3), 60), "plain", fresh_seed=False)
    conversation = session.chat.say("local", None, "hello there")
    answer = session.generations.start("local", conversation, requested)
    assert soon(lambda: answer.over) and answer.update is not None
    found = answer.update.metrics
    (figures,) = [one.data for one in AnswerEvents(answer, 0).pending(0.0) if one.kind == "figures"]
    assert isinstance(figures, dict)
    now = pace(session.current.plain)
    assert "(by the last answer)" in now and figures["p"] == now
    assert now in layout.header(session, ()) and loaded not in layout.header(session, ())
    assert now in models_html.loaded(session.current.info, "toy", plain=now)
    speed = session.current.plain.tokens_per_second
    assert figures["h"][4] == f"{speed:,.0f}" == f"{found.plain_tokens_per_second:,.0f}"
    assert found.tokens_per_second / speed == pytest.approx(live(found).decoding, rel=1e-6)
    *_, proof = session.proofs.prove("local", conversation)
    assert proof.plain is not None
    assert session.current.plain.when == "by the last proof"
    assert session.current.plain.tokens_per_second == summarise(proof.plain).tokens_per_second
    assert "p" not in figures_of(session, conversation), "that is of its time"


@pytest.fixture
def page(session: Session) -> layout.Page:
    return made(lambda: layout.Page(session, ["<b>"]))


def test_a_page_follows_the_model_once(page: layout.Page, session: Session) -> None:
    shown = page.follow(None, "hd", 256, "hd", None)
    assert shown.keys() <= {*(page.following().outputs or ())}
    assert session.current.info.name in shown[page.head] and "<b>" not in shown[page.head]
    assert shown[page.runs.again_button]["visible"]
    again = page.follow(shown[page.shown], "hd", 256, "hd", None)
    assert again.keys() == {page.shown}, "nothing changed"


def test_another_model_brings_its_sampler_its_methods_and_its_drafts(
    page: layout.Page, session: Session
) -> None:
    follow = page.follow
    before = follow(None, "hd", 256, "hd", None)[page.shown]
    toy = ToyBackend(name=EVIL)
    sampling = Sampling(0.3, 40, 0.9, 0.05)
    toy.info = replace(toy.info, sampling=sampling, context_length=100)
    swap(session, toy, "/m/other")
    session.stacks.offered = ["/m/small", "/m/mid"]
    shown = follow(before, "hsd:small@4", 256, "single:small", "a conversation")
    part = page.controls.parts
    found = [shown[part[name]] for name in ("temperature", "top_k", "top_p", "min_p")]
    assert Sampling(*found) == sampling and part["seed"] not in shown
    assert shown[part["max_tokens"]] == 100 and shown[part["method"]]["value"] == "auto"
    assert shown[page.pair.method]["value"] == "auto"
    assert shown[page.drafts.ticked]["value"] == ["/m/small", "/m/mid"]
    assert shown[page.chat.composer.box]["placeholder"] == f"Message {EVIL}"
    assert "<img" not in shown[page.head] and "context 100" in shown[page.head]
    kept = follow(before, "context", 60, "plain", None)
    assert kept[part["method"]]["value"] == "context" and kept[part["max_tokens"]] == 60
    assert follow(before, "hd", None, "hd", None)[part["max_tokens"]] == 100


def test_the_first_model_leaves_the_sampler_that_was_chosen_meanwhile(
    page: layout.Page, session: Session, toy: ToyBackend
) -> None:
    follow = page.follow
    sampler = [page.controls.parts[name] for name in ("temperature", "top_k", "top_p", "min_p")]

    def temperature(announced: Sampling, conversation: str | None) -> object:
        """What the page's first temperature becomes when the model comes."""
        session.current.coming = NoModel(replace(NO_MODEL_INFO, sampling=announced)).info
        local(session).use(no_model())
        opened = follow(None, "hd", 256, "hd", None)
        assert [opened[part] for part in sampler][0] == announced.temperature
        swap(session, toy, "/m/toy")
        arrived = follow(opened[page.shown], "hd", 256, "hd", conversation)
        assert "Both runs" in arrived[page.pair.verdict]
        return arrived[sampler[0]]

    toy.info = replace(toy.info, sampling=Sampling(0.3))
    assert temperature(Sampling(0.3), None) == gr.skip()
    assert temperature(Sampling(0.9), "a conversation") == gr.skip()
    assert temperature(Sampling(0.9), None) == 0.3


def test_the_demonstration_model_is_introduced(session: Session, toy: ToyBackend) -> None:
    assert "demonstration model" not in layout.header(session, ())
    swap(session, toy, str(EMBEDDED))
    for guests in (False, True):
        session.guests = guests
        shown = layout.header(session, ())
        assert "demonstration model" in shown and ("Models tab" in shown) is not guests


def test_the_demonstration_model_is_asked_what_it_can_answer(
    page: layout.Page, session: Session, toy: ToyBackend
) -> None:
    """It writes grammatical nonsense: no page calls it fluent, or suggests a story."""
    follow = page.follow
    buttons = page.chat.examples

    def suggested() -> tuple[str, ...]:
        shown = follow(None, "hd", 256, "hd", None)
        return tuple(shown[button]["value"] for button in buttons)

    assert suggested() == welcome.EXAMPLES
    swap(session, toy, str(EMBEDDED))
    assert suggested() == welcome.SIMPLE_EXAMPLES
    assert "grammatical nonsense" in layout.header(session, ())
    for text in (layout.header(session, ()), Path("README.md").read_text("utf-8")):
        assert "fluent English" not in text


def test_methods_of_any_time_have_titles(session: Session) -> None:
    assert title_of("hd") == "Databases (hierarchy drafting)" and title_of("magic") == "magic"
    assert title_of("single:small") == "Draft model small"
    method = f"hsd:{EVIL}@2"
    trace = Trace("1", None, "chat", "toy", "t", method, 1, 0.1, 1, 0.0, None, None)
    for speedup, shown in ((None, "–"), (1.5, "1.50×")):
        assert run_html.run_row(replace(trace, speedup=speedup))[-1] == shown
    text = run_html.heading(trace, Run(method))
    assert "<img" not in text and "&lt;img" in text


def test_the_cost_line_says_what_was_measured_and_when(session: Session, toy: ToyBackend) -> None:
    assert "not measured" in diagnostics.measured(session)
    toy.info = replace(toy.info, device="<b>cuda</b>", threads=4)
    session.costs.save(toy.info, Costs({0: 0.1, 3: 0.2}, 0.0, 0.0, time.time()))
    text = diagnostics.measured(session)
    assert "float32" in text and "4 threads" in text and "has refined it" in text
    assert "<b>" not in text and "&lt;b&gt;cuda" in text
    assert "…" in diagnostics.measured(session, busy=True)


def test_a_run_of_another_model_is_not_drawn_on_this_ones_curve(
    session: Session, toy: ToyBackend
) -> None:
    session.costs.save(toy.info, Costs({0: 0.1, 3: 0.2}, 0.0, 0.0, time.time()))
    run = Digest("hd", "toy", "toy")
    for shown in (NOTHING, run):
        assert len(diagnostics.cost_figure(session, shown).data[2].x) == 2
    assert not diagnostics.cost_figure(session, replace(run, fingerprint="other")).data


def test_methods_with_a_head_are_offered_where_there_is_one(db: Database) -> None:
    needing = {"head", "hd+head"}
    with_head = ToyBackend(guesses=deviating(0.5))
    for toy, there in ((with_head, needing), (ToyBackend(), set[str]())):
        session = Session(Local(backend=toy), db)
        names = {name for _, name in methods(session)}
        assert names & needing == there and {"auto", "hd", "plain"} <= names
        assert {method.name for method in offered(toy.info)} & needing == there
        assert usable(session, "head@2") == usable(session, "hd+head") == bool(there)
