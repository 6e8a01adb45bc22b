"""The Diagnostics tab: filter, page, run, step, files; owners apart, hostile texts inert."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.service.session import Session
from app.web import run_html
from app.web.tabs import diagnostics
from app.web.tabs.diagnostics import Diagnostics
from engine.errors import StorageError
from engine.types import Part, Prefill, Run, Step, Token
from storage.conversations import Conversations
from storage.database import Database
from storage.traces import StoredPrompt, Traces
from tests.support.blocks import content, tab_of
from tests.support.hostile import MARKUP
from tests.support.inside import OWNER, selects

EVIL = "<img src=x onerror=alert(1)>${alert(2)}{{3}}"
ALL = ["", "", "", "", ""]


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
def on(session: Session, ids: list[str]) -> Diagnostics:
    return tab_of(Diagnostics, session)


NOT_STORED = "The prompt of this run is not stored"


def test_what_was_open_and_chosen_stays_and_what_is_gone_does_not(
    on: Diagnostics, ids: list[str]
) -> None:
    shown = on.show(OWNER, ids[3], 25, "model 1", "gone", "", "chat", "3600")
    assert shown[on.shown] == ids[3] and shown[on.start] == 25
    assert [shown[part]["value"] for part in on.filters[:4]] == ["model 1", "", "", "chat"]
    assert "26 to 30 of 30 runs" in shown[on.range]


def test_filters_and_pages(on: Diagnostics, ids: list[str]) -> None:
    chosen = "model 1", "hd", "", "chat", "86400"
    shown = on.filter(OWNER, *chosen)
    expected = [ids[n] for n in range(59, -1, -1) if n % 2 and n % 3]
    assert shown[on.ids] == expected and on.refit(OWNER, None, *chosen)[on.shown] == expected[0]
    assert len(shown[on.trends[0]].data[0].x) == len(expected)
    for opened, stays in ((expected[3], True), (ids[0], False), ("gone", False)):
        again = on.refit(OWNER, opened, *chosen)
        assert again == {} if stays else again[on.shown] == expected[0]
    older = on.turn(1, OWNER, 0, *ALL)
    assert older[on.ids] == ids[34:9:-1] and older[on.start] == 25
    last = on.turn(1, OWNER, 25, *ALL)
    assert last[on.ids] == ids[9::-1] and not last[on.older_button]["interactive"]
    assert on.turn(1, OWNER, 50, *ALL)[on.start] == 50, "there is no page behind it"
    assert on.turn(-1, OWNER, 25, *ALL)[on.ids] == ids[:-26:-1]
    chosen = "model 1", "", "", "compare", ""
    none = on.filter(OWNER, *chosen)
    assert none[on.table] == [] and "No run matches" in none[on.range]
    none = on.refit(OWNER, ids[1], *chosen)
    assert none[on.shown] is None and none[on.title] == run_html.NO_RUN_YET
    assert on.plots[diagnostics.COSTS] in none, "the cost of a step is known without a run"


def test_a_step_tells_what_came_of_it(on: Diagnostics, ids: list[str]) -> None:
    card = on.slide(OWNER, 1, ids[-1])[on.card]
    for text in (
        "<td>4</td><td>1</td><td>10 µs</td>", "Accepted by position in the draft: 1 of 4, 1 of 2.",
        "verify <b>10.0 ms</b>", "draft <b>1.0 ms</b>",
        "Plain decoding would have taken 20.0 ms.", "3 passes, kept 1 of 2 guesses",
        "match of 3 tokens · probability 50 %",
    ):  # fmt: skip
        assert text in card
    plain = run_html.step_card(Step(0, (Token(1, 0, "target", text="x"),), finish="eos"), 1)
    assert "this is a plain step" in plain and "the answer ended (eos)" in plain
    assert "is not known" in plain
    assert "gave no token" in run_html.step_card(Step(0, (), finish="cancelled"), 1)


def test_the_prompt_is_shown_as_far_as_it_is_stored(on: Diagnostics, ids: list[str]) -> None:
    shown = on.choose(OWNER, SimpleNamespace(index=[0, 0]), ids[-1:])  # type: ignore[arg-type]
    assert shown[on.read_prompt].count("&lt;img src=x") == 3, "title, system prompt, message"
    assert (
        "The exact prompt is kept" in shown[on.read_prompt]
        and "<details" not in shown[on.read_prompt]
    )
    assert len(shown[on.answer]["turns"][0]["groups"]) == 80
    shown = on.choose(OWNER, SimpleNamespace(index=[0, 0]), ids[:1])  # type: ignore[arg-type]
    assert NOT_STORED in shown[on.read_prompt]
    long = run_html.prompt(StoredPrompt("t", "", [("user", "a" * 30_000), ("user", "b" * 15_000)]))
    assert long.count("a") < 6_000 and "b" * 15_000 in long and "Only the last 20,000" in long


def test_the_exact_prompt_is_shown_while_its_model_is_loaded(
    on: Diagnostics, session: Session, db: Database
) -> None:
    store = Traces(db, "local")
    prompt = tuple(f"<|user|>{EVIL}<|end|>".encode())
    run = Run("hd", "toy", "toy", {}, Prefill(9, 4), (step(0),))
    known, other = (
        store.save(replace(run, fingerprint=name), prompt=prompt) for name in ("toy", "other")
    )
    text = on.opened(store, known)[on.read_prompt]
    assert "&lt;|user|&gt;&lt;img src=x" in text and "<img" not in text and "<details" in text
    assert on.opened(store, other)[on.read_prompt] == run_html.prompt(None)
    gone_on = store.continue_run(
        known, step(0), Part(1, "hd", "toy", "toy", {}, Prefill(9, 4)), prompt
    )
    shown = on.opened(store, gone_on)
    assert "It was continued once." in shown[on.title]
    assert NOT_STORED in shown[on.read_prompt], "it is not known from its beginning"
    assert "The last 20,000 of 20,001" in run_html.prompt(None, "a" * 20_001)


def test_a_long_answer_is_shown_in_part(
    on: Diagnostics, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostics, "MOST_TOKENS", 7)
    shown: Any = on.opened(on.store(OWNER), ids[-1])[on.answer]
    assert sum(len(group[3]) for group in shown["turns"][0]["groups"]) == 7


def test_a_click_on_a_chart_asks_the_database_twelve_times(
    on: Diagnostics, ids: list[str], db: Database
) -> None:
    """The owner, the line of the history, the run with its steps and parts, the exact prompt and
    the conversation: none of them is read twice, however many steps there are."""
    asked, event = selects(db), cast(Any, SimpleNamespace(_data={"value": ids[-1]}))
    assert len(on.pick_run(OWNER, event)[on.steps]) == diagnostics.ROWS
    assert len(asked) <= 12, "\n".join(asked)
    assert sum("FROM steps" in statement for statement in asked) == 1


@pytest.mark.parametrize("text", [EVIL, *MARKUP])
def test_no_text_becomes_markup(text: str) -> None:
    bad = Step(
        0, (Token(1, 0, text, text=text),), {text: 1}, {text: 1}, ((1, 1),),
        look_ups={text: 1.0}, levels={text: (1, 1, 1)},
    )  # fmt: skip
    card = run_html.step_card(bad, 1)
    prompt = run_html.prompt(StoredPrompt(text, text, [(text, text)]))
    for markup in (card, prompt):
        assert "<img" not in markup and "<script" not in markup and "<svg" not in markup
        assert text not in markup or not set("<>&\"'") & set(text)


def test_nobody_sees_runs_of_others(on: Diagnostics, ids: list[str], warned: list[str]) -> None:
    guest = "guest:b"
    shown = on.show(guest, ids[-1], 0, *ALL)
    assert shown[on.table] == [] and shown[on.shown] is None
    assert all(len(shown[part]["choices"]) == 1 for part in on.filters[:4])
    assert len(warned) == 1 and "There is no run" in warned[0]
    event: Any = SimpleNamespace(_data={"value": ids[0]})
    acts: list[Callable[[], Any]] = [
        lambda: on.pick_run(guest, event),
        lambda: on.slide(guest, 1, ids[0]),
        lambda: on.save_steps(guest, ids[0]),
        lambda: on.save_run(guest, ids[0]),
    ]
    for act in acts:
        with pytest.raises(StorageError, match="There is no run"):
            act()
    assert content(on.save_runs(guest, *ALL)).count("\n") == 1
