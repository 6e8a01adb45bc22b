"""How events reach handlers, and what becomes of errors and of late answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from gradio.helpers import special_args

from app.service.session import Session
from app.web.kit import ACT, REFRESH, Guard, RefreshGuard, Tab, Updates, Visit, newest
from engine.errors import SettingError
from tests.support.blocks import EVIL

REQUEST: Any = SimpleNamespace(username="guest", session_hash="page")


@pytest.fixture
def tab(session: Session) -> Tab:
    return Tab(session, gr.BrowserState({}))


@pytest.fixture
def with_guard(tab: Tab) -> Callable[..., Callable[[], Any]]:
    """A handler of one page, with a guard."""
    guard = RefreshGuard()

    def build(how: Guard, handler: Callable[..., Any]) -> Callable[[], Any]:
        event = tab.event(handler, guard=how)
        return lambda: event.handler(REQUEST, guard)

    return build


WithGuard = Callable[[Guard, Callable[..., Any]], Callable[[], Any]]


def test_a_handler_gets_what_it_names_and_the_inputs(tab: Tab) -> None:
    box, out = gr.Textbox(), gr.Textbox()

    def handler(visit: Visit, data: gr.EventData, owner: str, words: str) -> list[object]:
        assert visit == Visit(owner, "page", {"browser": "b"})
        return [owner, data.target, visit.page, words]

    event = tab.event(handler, box, out)
    assert event.inputs == [tab.memory, box] and event.outputs == [out]
    (given, _, at, _) = special_args(
        event.handler,
        [{"browser": "b"}, "words"],
        request=REQUEST,
        event_data=gr.EventData(None, {}),
    )
    assert at == 1, "the page is asked for its data"
    assert event.handler(*given) == ["guest:b", None, "page", "words"]
    plain = tab.event(lambda words: words, box, out)
    assert plain.inputs == [box] and plain.handler(REQUEST, "words") == "words"
    assert special_args(plain.handler)[2] is None


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_becomes_a_notice_and_changes_nothing(
    tab: Tab, warned: list[str], steps: int
) -> None:
    out = gr.Textbox()

    def refuse() -> Updates:
        raise SettingError(EVIL)

    def refuse_later() -> Iterator[Updates]:
        yield from [{out: "begun"}] * steps
        refuse()

    assert tab.event(refuse, (), out).handler(REQUEST) == {out: gr.skip()}
    assert tab.event(refuse, (), out, refused="").handler(REQUEST) == ""
    assert tab.event(lambda: Updates(), (), out).handler(REQUEST) == {out: gr.skip()}
    assert [*tab.event(refuse_later, (), out).handler(REQUEST)] == [{out: "begun"}] * steps
    assert warned == ["&lt;img src=x onerror=alert(1)&gt;"] * 3


def test_a_refresh_gives_way_to_what_the_user_did_meanwhile(with_guard: WithGuard) -> None:
    box, begun = gr.Textbox(), list[Iterator[Any]]()
    choose = with_guard(ACT, lambda: "chosen")

    def load() -> Iterator[str]:
        yield "loading"
        yield "loaded"

    def look(act: Callable[[], object]) -> Any:
        return with_guard(REFRESH, lambda: (act(), {box: "seen"})[1])()

    def begin() -> None:
        begun.append(with_guard(ACT, load)())
        assert next(begun[0]) == "loading"

    assert look(lambda: None) == {box: "seen"}
    assert look(choose) == {box: gr.skip()}
    assert look(begin) == {box: gr.skip()}, "what takes long counts from its beginning"
    assert list(begun[0]) == ["loaded"] and look(lambda: None) == {box: "seen"}


def test_a_defect_becomes_a_notice_and_texts_arrive_well_formed(
    tab: Tab, warned: list[str]
) -> None:
    out = gr.Textbox()
    event = tab.event(lambda words: [words], out, out)
    assert event.handler(REQUEST, ["a\ud800"]) == [["a\ufffd"]]
    broken = tab.event(lambda words: words.missing, out, out)
    assert broken.handler(REQUEST, "a") == {out: gr.skip()}
    assert "no attribute" in warned[0] and "an error in Strata" in warned[0]


def test_a_refresh_that_begins_before_the_answer_to_an_act_fills_nothing(
    with_guard: WithGuard, warned: list[str]
) -> None:
    """What it was told of the page, such as the choice in a list, is from before that act."""
    box = gr.Textbox()
    look = with_guard(REFRESH, lambda: {box: "of the old choice"})
    late = list[Any]()

    def choose() -> Updates:
        late.append(look())
        return {box: "of the new choice"}

    def fail() -> Updates:
        late.append(look())
        raise RuntimeError

    assert with_guard(ACT, choose)() == {box: "of the new choice"}
    with_guard(ACT, fail)()
    assert len(warned) == 1 and late == [{box: gr.skip()}] * 2
    assert look() == {box: "of the old choice"}, "what failed is answered too"


def test_an_answer_fills_what_nothing_newer_was_asked_for(with_guard: WithGuard) -> None:
    left, right = gr.Textbox(), gr.Textbox()
    quick = with_guard(newest([right]), lambda: {right: "quick"})

    def slow() -> Updates:
        assert quick() == {right: "quick"}
        return {left: "slow", right: "slow"}

    assert with_guard(newest([left, right]), slow)() == {left: "slow", right: gr.skip()}
    assert with_guard(newest([left]), slow)() == {left: "slow", right: "slow"}, "it asks for one"
    assert with_guard(REFRESH, slow)() == {left: "slow", right: gr.skip()}
    assert with_guard(REFRESH, lambda: {left: "seen"})() == {left: "seen"}


def test_nothing_is_filled_for_what_is_about_to_be_another_one(
    with_guard: WithGuard, warned: list[str]
) -> None:
    run, step = gr.Textbox(), gr.Textbox()
    at_step = with_guard(newest([step], of=[run]), lambda: {step: "of the old run"})
    look = with_guard(REFRESH, lambda: {run: "old", step: "old"})

    def opened() -> Updates:
        assert at_step() == {step: gr.skip()}
        assert look() == {run: gr.skip(), step: gr.skip()}
        return {run: "new", step: "first"}

    assert with_guard(newest([run, step]), opened)() == {run: "new", step: "first"}
    assert at_step() == {step: "of the old run"}

    def broken() -> Updates:
        raise RuntimeError

    with_guard(newest([run, step]), broken)()
    assert look() == {run: "old", step: "old"}, "what failed is over too"
    assert len(warned) == 1


def test_what_answers_again_and_again_leaves_alone_what_was_asked_meanwhile(
    with_guard: WithGuard,
) -> None:
    status, result = gr.Textbox(), gr.Textbox()

    async def follow() -> AsyncIterator[Updates]:
        for at in range(2):
            yield {status: at, result: at}

    async def watched() -> list[Updates]:
        found = list[Updates]()
        async for shown in with_guard(newest([status, result]), follow)():
            found.append(shown)
            with_guard(newest([result]), lambda: {result: "picked"})()
        return found

    assert asyncio.run(watched()) == [
        {status: 0, result: 0},
        {status: 1, result: gr.skip()},
    ]
