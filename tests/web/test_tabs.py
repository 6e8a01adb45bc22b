"""The tabs without a browser: what they are made of, and who is shown what."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import gradio as gr
import pytest

from app.service.comparison import Progress, Proof
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import layout, run_html
from app.web.metrics_panel import times
from app.web.tabs import chat, chat_view, compare, diagnostics, settings, stack
from app.web.verdicts import proof_line, title_of
from engine import native
from engine.backends.toy import ToyBackend
from engine.compare import Speedup, live
from engine.errors import SettingError
from engine.loaded import NO_MODEL_INFO, Costs, NoModel, no_model
from engine.local import Local
from engine.methods import METHODS
from engine.runs import Verdict
from engine.settings import BUDGETS, Drafting, Generation, Sampling
from engine.types import RULES, Learned, Run, Step, Token
from storage.database import Database
from storage.digests import NOTHING, Digest
from storage.traces import Trace
from tests.conftest import EMBEDDED
from tests.support.inside import local, soon, swap
from tests.support.runs import run_of

T = TypeVar("T")
EVIL = "<img src=x onerror=alert(1)>"


def made(build: Callable[[], T]) -> T:
    """What `build` makes of Gradio's blocks, which leave an event loop open unless one runs."""

    async def run() -> T:
        return build()

    return asyncio.run(run())


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


def labels(blocks: gr.Blocks) -> set[str]:
    """The words on all buttons and tabs."""
    return {
        str(getattr(block, "value", None) or getattr(block, "label", ""))
        for block in blocks.blocks.values()
        if isinstance(block, gr.Button | gr.Tab) and block.visible
    }


def test_a_note_is_in_the_header_whatever_it_is_about(session: Session, toy: ToyBackend) -> None:
    """Only a model that decodes plainly is compared with itself."""
    note = "llama.cpp's fast path <crashes>."
    for can_tree in (True, False):
        toy.info = replace(toy.info, note=note, can_tree=can_tree)
        assert '<p class="note">llama.cpp&#x27;s fast path &lt;crashes&gt;.</p>' in layout.header(
            session, ()
        )
        assert ("will be plain" in compare.idle(session)) is not can_tree
        assert ("start fresh" in compare.idle(session)) is can_tree


def test_the_header_says_in_a_line_what_drafts(session: Session, toy: ToyBackend) -> None:
    said = layout.header(session, ())
    assert said.count("Drafted by: ") == 1 and "databases (trees)" in said
    toy.info = replace(toy.info, leaves=1, depth=8)
    assert "databases (chains of up to 8 tokens)" in layout.header(session, ())
    toy.info = replace(toy.info, can_tree=False)
    assert "Drafted by: nothing, it decodes plainly." in layout.header(session, ())


@pytest.mark.parametrize("there", [True, False])
def test_the_header_says_whether_the_core_is_compiled(
    db: Database, toy: ToyBackend, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "core", native.core if there else None)
    said = layout.header(Session(Local(backend=toy), db), ())
    assert ("compiled core" in said, "core in Python" in said) == (there, not there)


def test_guests_only_chat(db: Database, toy: ToyBackend) -> None:
    mine, theirs = (
        labels(
            made(lambda guests=guests: layout.build(Session(Local(backend=toy), db, guests=guests)))
        )
        for guests in (False, True)
    )
    hidden = {"Measure again", "Databases", "Stack", "Load", "Profile", "Use for chat", "Models"}
    hidden |= {"Add", "Download and load", "Build from these", "Import it", "Prune", "Look up"}
    assert hidden <= mine and not hidden & theirs and "Diagnostics" in theirs


def test_a_model_that_decodes_plainly_has_nothing_to_measure(db: Database) -> None:
    toy = ToyBackend()
    toy.info = replace(toy.info, can_tree=False)
    assert "Measure again" not in labels(
        made(lambda: layout.build(Session(Local(backend=toy), db)))
    )


def test_no_event_shows_progress_on_a_component(session: Session) -> None:
    """The page keeps account of each component that one is shown on."""
    events = made(lambda: layout.build(session)).get_config_file()["dependencies"]
    shown = [each for each in events if each["show_progress_on"] != [] and each["outputs"]]
    assert events and shown == []


def test_what_follows_an_event_is_never_left_out(session: Session) -> None:
    """Gradio drops what is already at work, unless it may be so several times."""
    events = made(lambda: layout.build(session)).get_config_file()["dependencies"]
    after = [each for each in events if each["trigger_after"] is not None]
    assert len(after) > 20 and {each["trigger_mode"] for each in after} == {"multiple"}


def test_no_choice_is_left_out(session: Session) -> None:
    events = made(lambda: layout.build(session)).get_config_file()["dependencies"]
    choices = [each for each in events if any(kind == "input" for _, kind in each["targets"])]
    assert len(choices) > 5 and "once" not in {each["trigger_mode"] for each in choices}


@pytest.fixture
def controls(session: Session) -> settings.Controls:
    def build() -> settings.Controls:
        with gr.Blocks():
            return settings.build(session)

    return made(build)


def test_settings_show_what_they_read(controls: settings.Controls) -> None:
    drafting = Drafting(("model", "context"), 12, 0.25, "fixed", "rejection")
    generation = Generation(Sampling(0.5, 3, 0.9, 0.1, 7), 99, ("END", "stop"))
    chosen = Preferences(generation, "hsd:small@8/mid@4", drafting, fresh_seed=False)
    assert controls.read(controls.show("Be kind.", chosen)) == ("Be kind.", chosen)


def test_settings_start_from_the_defaults_of_the_engine(controls: settings.Controls) -> None:
    values = [getattr(part, "value", None) for part in controls.inputs]
    _, preferences = controls.read(values)
    assert preferences.method == "auto" and preferences.chosen() == METHODS["auto"]
    assert preferences.drafting.budget == BUDGETS[0] == "adaptive"


@pytest.mark.parametrize("name", ["budget", "rule", "method"])
def test_unusable_settings_are_refused(controls: settings.Controls, name: str) -> None:
    values = controls.show("", Preferences())
    values[1 + list(controls.parts).index(name)] = "boundless"
    with pytest.raises(SettingError, match="boundless"):
        controls.read(values)


def test_rules_of_verification_have_words(controls: settings.Controls) -> None:
    rule = controls.parts["rule"]
    assert {value for _, value in rule.choices} == set(RULES)  # type: ignore[attr-defined]
    assert rule.value == "match"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("same_text", "identical", "words", "kind"),
    [
        (True, True, "Identical", "verdict same"),
        (True, False, "First difference", "verdict differs"),
        (False, True, "Identical", "verdict same"),
        (False, False, "does not keep the text of a seed", 'verdict"'),
    ],
)
def test_verdicts_raise_no_false_alarm(
    session: Session, same_text: bool, identical: bool, words: str, kind: str
) -> None:
    def timed(method: str, token: int) -> Run:
        step = Step(0, (Token(token, 0, "target"),), verify_seconds=1.0)
        return run_of([step], method=method)

    pair = (timed("plain", 97), timed("hsd", 97 if identical else 98))
    progress = Progress((pair,), 0, None, same_text=same_text)
    found = compare.banner(session, progress, 1)
    assert words in found and kind in found
    assert ("1.00×" in found) == (identical or not same_text)
    verdict = Verdict(identical, 1, 0 if identical else 1, EVIL, EVIL)
    proof = Proof(1, "hsd", verdict, Speedup(1.0, 1.0), *pair, pair[1], same_text)
    line = proof_line(proof)
    assert words in line and kind in line and "<img" not in line
    early = proof_line(replace(proof, verdict=replace(verdict, ended_early=True)))
    assert "<img" not in early and ("Ended early" in early) == (same_text and not identical)
    assert "Ended early" not in early or f"at token {verdict.position}" in early
    assert ("up to where it was stopped" in line) == identical, "the steps have no end"
    whole = replace(pair[1], steps=(replace(pair[1].steps[0], finish="length"),))
    assert "stopped" not in proof_line(replace(proof, shown=whole))


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


@dataclass
class Parts:
    """What shows the loaded model."""

    head: gr.HTML
    talk: chat_view.Parts
    pair: compare.Parts
    runs: diagnostics.Parts
    controls: settings.Controls
    drafts: stack.Parts


def test_the_chat_shows_the_answers_own_speedup_until_it_was_measured(
    session: Session,
) -> None:
    def build() -> chat.Handlers:
        with gr.Blocks():
            talk, controls = chat.build(session), settings.build(session)
            return chat.Handlers(session, talk, controls, gr.State(None), gr.BrowserState({}))

    local(session).loaded.measure_plain()
    session.follow(session.engine.state)
    on = made(build)
    wanted = Preferences(Generation(Sampling(0.8, seed=3), 60), fresh_seed=False)
    conversation = session.chat.say("local", None, "hello there")
    answer = session.generations.start("local", conversation, wanted)
    assert soon(lambda: answer.over) and answer.update is not None
    last = answer.update
    assert last.metrics.kept > 0, "there is a gain to measure"
    data = gr.EventData(None, {"token": answer.token})
    request: Any = SimpleNamespace(username=None, session_hash="page")
    shown = on.over(data, request, conversation, {})[on.parts.figures]
    assert shown["h"][1] == times(live(last.metrics).whole)
    assert "whole answer" not in shown["n"] and on.parts.figures.value == {}
    reopened = chat_view.last_figures(session, "local", conversation)
    assert (reopened["h"], reopened["n"]) == (shown["h"], shown["n"]), "it was stored as it ended"
    assert "measured after loading" in layout.header(session, ())
    *_, proof = session.proofs.prove("local", conversation)
    assert proof.speedup.whole
    told = chat_view.last_figures(session, "local", conversation)
    assert told["h"][1] == f"{proof.speedup.whole:.2f}×" and "of the whole answer" in told["n"]


@pytest.fixture
def page(session: Session) -> tuple[Any, ...]:
    """How a page follows the model, as function, inputs and outputs; and the page."""

    def build() -> tuple[Any, ...]:
        with gr.Blocks():
            head, talk, pair = gr.HTML(), chat.build(session), compare.build(session)
            controls = settings.build(session)
            with gr.Tab("Stack") as tab:
                drafts = stack.build(tab, session)
            with gr.Tab("Diagnostics") as tab:
                runs = diagnostics.build(tab, session)
            event = layout.following(
                session, head, ["<b>"], talk, pair, runs, controls, drafts, gr.State(None)
            )
        return *event, Parts(head, talk, pair, runs, controls, drafts)

    return made(build)


def test_a_page_follows_the_model_once(page: tuple[Any, ...], session: Session) -> None:
    follow, inputs, outputs, parts = page
    assert len(inputs) == 5
    shown = follow(None, "hd", 256, "hd", None)
    assert shown.keys() <= set(outputs)
    assert session.current.info.name in shown[parts.head] and "<b>" not in shown[parts.head]
    assert shown[parts.runs.again]["visible"]
    again = follow(shown[outputs[0]], "hd", 256, "hd", None)
    assert again.keys() == {outputs[0]}, "nothing changed"


def test_another_model_brings_its_sampler_its_methods_and_its_drafts(
    page: tuple[Any, ...], session: Session
) -> None:
    follow, _, outputs, parts = page
    before = follow(None, "hd", 256, "hd", None)[outputs[0]]
    toy = ToyBackend(name=EVIL)
    sampling = Sampling(0.3, 40, 0.9, 0.05)
    toy.info = replace(toy.info, sampling=sampling, context_length=100)
    swap(session, toy, "/m/other")
    session.stacks.offered = ["/m/small", "/m/mid"]
    shown = follow(before, "hsd:small@4", 256, "single:small", "a conversation")
    part = parts.controls.parts
    found = [shown[part[name]] for name in ("temperature", "top_k", "top_p", "min_p")]
    assert Sampling(*found) == sampling and part["seed"] not in shown
    assert shown[part["max_tokens"]] == 100 and shown[part["method"]]["value"] == "auto"
    assert shown[parts.pair.method]["value"] == "auto"
    assert shown[parts.drafts.ticked]["value"] == ["/m/small", "/m/mid"]
    assert shown[parts.talk.box]["placeholder"] == f"Message {EVIL}"
    assert "<img" not in shown[parts.head] and "context 100" in shown[parts.head]
    kept = follow(before, "context", 60, "plain", None)
    assert kept[part["method"]]["value"] == "context" and kept[part["max_tokens"]] == 60
    assert follow(before, "hd", None, "hd", None)[part["max_tokens"]] == 100


def test_the_first_model_leaves_the_sampler_that_was_chosen_meanwhile(
    page: tuple[Any, ...], session: Session, toy: ToyBackend
) -> None:
    follow, _, outputs, parts = page
    sampler = [parts.controls.parts[name] for name in ("temperature", "top_k", "top_p", "min_p")]

    def temperature(announced: Sampling, conversation: str | None) -> object:
        """What the page's first temperature becomes when the model comes."""
        session.current.coming = NoModel(replace(NO_MODEL_INFO, sampling=announced)).info
        local(session).use(no_model())
        opened = follow(None, "hd", 256, "hd", None)
        assert [opened[part] for part in sampler][0] == announced.temperature
        swap(session, toy, "/m/toy")
        arrived = follow(opened[outputs[0]], "hd", 256, "hd", conversation)
        assert "Both runs" in arrived[parts.pair.verdict]
        return arrived[sampler[0]]

    toy.info = replace(toy.info, sampling=Sampling(0.3))
    assert temperature(Sampling(0.3), None) == gr.skip()
    assert temperature(Sampling(0.9), "a conversation") == gr.skip()
    assert temperature(Sampling(0.9), None) == 0.3


def test_the_demonstration_model_is_introduced(session: Session, toy: ToyBackend) -> None:
    assert "demonstration model" not in layout.header(session, ())
    swap(session, toy, str(EMBEDDED))
    assert "demonstration model" in layout.header(session, ()) and "Models tab" in layout.header(
        session, ()
    )
    session.guests = True
    assert "demonstration model" in layout.header(
        session, ()
    ) and "Models tab" not in layout.header(session, ())


def test_methods_of_any_time_have_titles(session: Session) -> None:
    assert title_of("hd") == "Databases (hierarchy drafting)" and title_of("magic") == "magic"
    assert title_of("single:small") == "Draft model small"
    method = f"hsd:{EVIL}@2"
    trace = Trace("1", None, "chat", "toy", "t", method, 1, 0.1, 1, 0.0, None, None)
    for speedup, shown in ((None, "–"), (1.5, "1.50×")):
        assert run_html.line(replace(trace, speedup=speedup))[-1] == shown
    told = run_html.heading(trace, Run(method))
    assert "<img" not in told and "&lt;img" in told


def test_comparisons_start_with_hierarchy_drafting_and_its_measured_budget(
    session: Session, controls: settings.Controls
) -> None:
    def build() -> compare.Parts:
        with gr.Blocks():
            return compare.build(session)

    parts = made(build)
    values = [getattr(part, "value", None) for part in controls.inputs]
    chosen = controls.read(values)[1].with_method(parts.method.value)
    assert chosen.chosen() == METHODS["auto"] and chosen.drafting.budget == "adaptive"


def test_the_cost_line_says_what_was_measured_and_when(session: Session, toy: ToyBackend) -> None:
    assert "not measured" in diagnostics.measured(session)
    toy.info = replace(toy.info, device="<b>cuda</b>", threads=4)
    session.costs.save(toy.info, Costs({0: 0.1, 3: 0.2}, 0.0, 0.0, time.time()))
    words = diagnostics.measured(session)
    assert "float32" in words and "4 threads" in words and "has refined it" in words
    assert "<b>" not in words and "&lt;b&gt;cuda" in words
    assert "…" in diagnostics.measured(session, busy=True)


def test_a_run_of_another_model_is_not_drawn_on_this_ones_curve(
    session: Session, toy: ToyBackend
) -> None:
    session.costs.save(toy.info, Costs({0: 0.1, 3: 0.2}, 0.0, 0.0, time.time()))
    run = Digest("hd", "toy", "toy")
    for shown, points in ((NOTHING, 2), (run, 2), (replace(run, fingerprint="other"), 0)):
        assert len(diagnostics.cost_figure(session, shown).data[2].x or ()) == points


def test_every_chart_of_diagnostics_has_its_place(session: Session) -> None:
    def build() -> diagnostics.Parts:
        with gr.Blocks(), gr.Tab("Diagnostics") as tab:
            return diagnostics.build(tab, session)

    parts = made(build)
    assert len(parts.plots) == len(diagnostics.of_run(NOTHING)) + 1
    assert len(parts.trends) == len(diagnostics.history([]))
    assert '"yaxis2"' in parts.plots[diagnostics.COSTS].value["plot"]
