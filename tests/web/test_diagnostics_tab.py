"""The Diagnostics tab: filter, page, run, step, files; owners apart, hostile texts inert."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.session import Session
from app.web import run_html
from app.web.tabs import diagnostics
from app.web.tabs.diagnostics import Handlers
from engine.backends.toy import ToyBackend
from engine.local import Local
from engine.types import Part, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import Asked, Traces
from tests.support.hostile import MARKUP
from tests.web.test_tabs import made

EVIL = "<img src=x onerror=alert(1)>${alert(2)}{{3}}"
ALL = ["", "", "", "", ""]


def request(user: str | None = None) -> Any:
    return SimpleNamespace(username=user, session_hash="page")


def step(index: int, text: str = "word") -> Step:
    return Step(
        index,
        (Token(1, index, "context", 3, text, 0.5), Token(2, index, f"draft:{EVIL}", text=text)),
        {"context": 4, f"draft:{EVIL}": 2},
        {"context": 1, f"draft:{EVIL}": 1},
        ((4, 1), (2, 1)),
        0.001,
        0.01,
        0.0001,
        0.0,
        {"context": 1e-5},
        {f"draft:{EVIL}": (3, 2, 1)},
        None,
        0.02,
    )


@pytest.fixture
def session(db: Database, toy: ToyBackend) -> Session:
    return Session(Local(backend=toy), db)


@pytest.fixture
def ids(db: Database) -> list[str]:
    """Sixty runs, the newest last: two models, every third plain; the last is of a conversation."""
    store, talks = Traces(db, "local"), Conversations(db, "local")
    talk = talks.create(EVIL).id
    talks.set_system_prompt(talk, EVIL)
    talks.append(talk, "user", EVIL)
    made = []
    for n in range(60):
        run = Run(
            "plain" if n % 3 == 0 else "hd", f"model {n % 2}", "toy", {}, Prefill(9, 4),
            tuple(step(i, EVIL) for i in range(40 if n == 59 else 2)),
        )  # fmt: skip
        made.append(store.save(run, talk if n == 59 else None, "chat" if n % 2 else "compare"))
    talks.append(talk, "assistant", "said", made[-1])
    return made


@pytest.fixture
def on(session: Session, ids: list[str]) -> Handlers:
    def build() -> Handlers:
        with gr.Blocks(), gr.Tab("Diagnostics") as tab:
            return Handlers(session, diagnostics.build(tab, session))

    return made(build)


def test_the_tab_opens_with_the_newest_runs_and_one_of_them(on: Handlers, ids: list[str]) -> None:
    parts = on.parts
    shown = on.show(request(), {}, None, 0, *ALL)
    assert shown[parts.ids] == ids[:-26:-1] and len(shown[parts.table]) == 25
    assert "1 to 25 of 60 runs" in shown[parts.range]
    assert shown[parts.shown] == ids[-1], "the newest with drafts"
    models = shown[parts.filters[0]]
    assert models["choices"] == [("All", ""), ("model 0", "model 0"), ("model 1", "model 1")]
    assert shown[parts.filters[2]]["choices"][1][0] == EVIL, "a text of a choice is plain text"
    assert [name for name, _ in shown[parts.filters[3]]["choices"]] == ["All", "Chat", "Compare"]
    assert shown.keys() >= {*parts.trends, *parts.plots, parts.card, parts.steps, parts.costs}
    assert not (shown[parts.newer]["interactive"] or not shown[parts.older]["interactive"])


def test_what_was_open_and_chosen_stays_and_what_is_gone_does_not(
    on: Handlers, ids: list[str]
) -> None:
    parts = on.parts
    shown = on.show(request(), {}, ids[3], 25, "model 1", "gone", "", "chat", "3600")
    assert shown[parts.shown] == ids[3] and shown[parts.start] == 25
    assert [shown[part]["value"] for part in parts.filters[:4]] == ["model 1", "", "", "chat"]
    assert "26 to 30 of 30 runs" in shown[parts.range]


def test_filters_and_pages(on: Handlers, ids: list[str]) -> None:
    parts = on.parts
    shown = on.filter(request(), {}, None, "model 1", "hd", "", "chat", "86400")
    wanted = [ids[n] for n in range(59, -1, -1) if n % 2 and n % 3]
    assert shown[parts.ids] == wanted and shown[parts.shown] == wanted[0]
    assert len(shown[parts.trends[0]].data[0].x) == len(wanted)
    older = on.older(request(), {}, 0, *ALL)
    assert older[parts.ids] == ids[34:9:-1] and older[parts.start] == 25
    last = on.older(request(), {}, 25, *ALL)
    assert last[parts.ids] == ids[9::-1] and not last[parts.older]["interactive"]
    assert on.older(request(), {}, 50, *ALL)[parts.start] == 50, "there is no page behind it"
    assert on.newer(request(), {}, 25, *ALL)[parts.ids] == ids[:-26:-1]
    none = on.filter(request(), {}, None, "model 1", "", "", "compare", "")
    assert none[parts.table] == [] and "No run matches" in none[parts.range]
    assert none[parts.shown] is None and none[parts.title] == run_html.NO_RUN_YET


def test_from_a_chart_or_a_row_to_a_run_and_to_a_step(on: Handlers, ids: list[str]) -> None:
    parts = on.parts

    def picked(kind: str, value: object, shown: str | None = None) -> Any:
        event: Any = SimpleNamespace(_data={"value": value})
        if kind == "run":
            return on.pick_run(event, request(), {})
        return on.pick_step(event, request(), shown, {})

    def row(at: int) -> Any:
        return SimpleNamespace(index=[at, 0])

    assert picked("run", ids[5])[parts.shown] == ids[5]
    assert on.choose(row(1), request(), ids, {})[parts.shown] == ids[1]
    assert on.choose(row(99), request(), ids, {}) == {parts.shown: gr.skip()}
    opened = picked("step", 30, ids[-1])
    assert "Step 31 of 40: 2 tokens in" in opened[parts.card]
    assert opened[parts.step]["value"] == 31 and opened[parts.step]["maximum"] == 40
    assert [line[0] for line in opened[parts.steps]] == [str(n) for n in range(26, 41)]
    assert "Step 28 of 40" in on.choose_step(row(2), request(), ids[-1], 31, {})[parts.card]
    slid = on.slide(12, request(), ids[-1], {})
    assert "Step 12 of 40" in slid[parts.card] and parts.step not in slid
    assert "Step 40 of 40" in picked("step", 10_000, ids[-1])[parts.card]
    for value in (7, None):
        assert picked("run", value) == {parts.shown: gr.skip()}
    for at, run in (("7", ids[-1]), (None, ids[-1]), (7, None)):
        assert picked("step", at, run) == {parts.card: gr.skip()}


def test_a_step_tells_what_came_of_it(on: Handlers, ids: list[str]) -> None:
    card = on.slide(1, request(), ids[-1], {})[on.parts.card]
    for words in (
        "<td>4</td><td>1</td><td>10 µs</td>", "Accepted by position in the draft: 1 of 4, 1 of 2.",
        "verify <b>10.0 ms</b>", "draft <b>1.0 ms</b>",
        "Plain decoding would have taken 20.0 ms.", "3 passes, kept 1 of 2 guesses",
        "match of 3 tokens · probability 50 %",
    ):  # fmt: skip
        assert words in card
    plain = run_html.step_card(Step(0, (Token(1, 0, "target", text="x"),), finish="eos"), 1)
    assert "this is a plain step" in plain and "the answer ended (eos)" in plain
    assert "is not known" in plain
    assert "gave no token" in run_html.step_card(Step(0, (), finish="cancelled"), 1)


def test_the_prompt_is_told_as_far_as_it_is_stored(on: Handlers, ids: list[str]) -> None:
    parts = on.parts
    shown = on.choose(SimpleNamespace(index=[0, 0]), request(), ids[-1:], {})  # type: ignore[arg-type]
    assert shown[parts.asked].count("&lt;img src=x") == 3, "title, system prompt, message"
    assert run_html.NOT_KEPT in shown[parts.asked] and "<details" not in shown[parts.asked]
    assert len(shown[parts.said]["turns"][0]["groups"]) == 80
    shown = on.choose(SimpleNamespace(index=[0, 0]), request(), ids[:1], {})  # type: ignore[arg-type]
    assert shown[parts.asked] == run_html.UNKNOWN_PROMPT
    long = run_html.prompt(Asked("t", "", [("user", "a" * 30_000), ("user", "b" * 15_000)]))
    assert long.count("a") < 6_000 and "b" * 15_000 in long and "Only the last 20,000" in long


def test_the_exact_prompt_is_told_while_its_model_is_loaded(
    on: Handlers, session: Session, db: Database
) -> None:
    store = Traces(db, "local")
    prompt = tuple(f"<|user|>{EVIL}<|end|>".encode())
    run = Run("hd", "toy", "toy", {}, Prefill(9, 4), (step(0),))
    known, other = (
        store.save(replace(run, fingerprint=name), prompt=prompt) for name in ("toy", "other")
    )
    told = on.opened(store, known)[on.parts.asked]
    assert "&lt;|user|&gt;&lt;img src=x" in told and "<img" not in told and "<details" in told
    assert on.opened(store, other)[on.parts.asked] == run_html.UNKNOWN_PROMPT
    gone_on = store.go_on(known, step(0), Part(1, "hd", "toy", "toy", {}, Prefill(9, 4)), prompt)
    shown = on.opened(store, gone_on)
    assert "It was continued once." in shown[on.parts.title]
    assert shown[on.parts.asked] == run_html.UNKNOWN_PROMPT, "it is not known from its beginning"
    assert "The last 20,000 of 20,001" in run_html.exact_prompt("a" * 20_001)


def test_a_long_answer_is_shown_in_part(
    on: Handlers, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "MOST_TOKENS", 7)
    shown = diagnostics.said(on.store({}, request()), ids[-1])
    assert sum(len(group[3]) for group in shown["turns"][0]["groups"]) == 7  # type: ignore[index]


@pytest.mark.parametrize("text", [EVIL, *MARKUP])
def test_no_text_becomes_markup(text: str) -> None:
    bad = Step(
        0, (Token(1, 0, text, text=text),), {text: 1}, {text: 1}, ((1, 1),),
        look_ups={text: 1.0}, levels={text: (1, 1, 1)},
    )  # fmt: skip
    card = run_html.step_card(bad, 1)
    asked = run_html.prompt(Asked(text, text, [(text, text)]))
    for markup in (card, asked):
        assert "<img" not in markup and "<script" not in markup and "<svg" not in markup
        assert text not in markup or not set("<>&\"'") & set(text)


def test_files_hold_the_listed_runs_and_the_open_one(on: Handlers, ids: list[str]) -> None:
    name, text = opened_file(on.save_runs(request(), {}, "model 1", "", "", "", ""))
    assert name == "runs.csv" and len(text.splitlines()) == 31
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == ids[:0:-2]
    name, text = opened_file(on.save_steps(request(), ids[-1], {}))
    assert name == "steps.csv" and text.startswith("step,tokens,text")
    name, text = opened_file(on.save_run(request(), ids[-1], {}))
    assert name == "run.json" and len(json.loads(text)["steps"]) == 40


def opened_file(made: str) -> tuple[str, str]:
    found = json.loads(made)
    return found["name"], found["text"]


def test_nobody_sees_runs_of_others(
    on: Handlers, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    monkeypatch.setattr(gr, "Warning", notices.append)
    guest, parts = request("guest"), on.parts
    memory = {"browser": "b"}
    shown = on.show(guest, memory, ids[-1], 0, *ALL)
    assert shown[parts.table] == [] and shown[parts.shown] is None
    assert all(len(shown[part]["choices"]) == 1 for part in parts.filters[:4])
    event: Any = SimpleNamespace(_data={"value": ids[0]})
    acts: list[Callable[[], Any]] = [
        lambda: on.pick_run(event, guest, memory),
        lambda: on.slide(1, guest, ids[0], memory),
        lambda: on.save_steps(guest, ids[0], memory),
        lambda: on.save_run(guest, ids[0], memory),
    ]
    for act in acts:
        before = len(notices)
        found = act()
        assert found == "" or list(found.values()) == [gr.skip()]
        assert len(notices) == before + 1 and "There is no run" in notices[-1]
    assert on.save_runs(guest, memory, *ALL).count("\\n") == 1
