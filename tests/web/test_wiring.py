"""What the user does while a slow event looks at how things are is what stays on the page."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import gradio as gr
import pytest
from gradio.helpers import special_args

from app.web.wiring import Asked, Deeds, Updates, counted, newest, unasked, unless_done

REQUEST = gr.Request()


def test_what_was_found_before_the_user_chose_changes_nothing() -> None:
    deeds, box = Deeds(), gr.Textbox()
    choose = counted(lambda chosen: chosen)

    def look(source: str) -> Updates:
        if source == "chosen meanwhile":
            assert choose(deeds, "another") == "another"
        return {box: source}

    assert unless_done(look)(deeds, "nothing is done") == {box: "nothing is done"}
    assert unless_done(look)(deeds, "chosen meanwhile") == {box: gr.skip()}
    assert unless_done(look)(deeds, "looked at again") == {box: "looked at again"}


def test_what_takes_long_counts_from_its_beginning() -> None:
    deeds, box = Deeds(), gr.Textbox()
    begun: list[Iterator[Any]] = []

    def load(source: str) -> Iterator[str]:
        yield f"{source} is being loaded"
        yield f"{source} is loaded"

    def look() -> Updates:
        begun.append(counted(load)(deeds, "one"))
        assert next(begun[0]) == "one is being loaded"
        return {box: "nothing is being loaded"}

    assert unless_done(look)(deeds) == {box: gr.skip()}
    assert list(begun[0]) == ["one is loaded"]


def test_an_answer_fills_what_nothing_newer_was_asked_for() -> None:
    asked, left, right = Asked(), gr.Textbox(), gr.Textbox()
    quick = newest(lambda: {right: "quick"}, [right])

    def slow() -> Updates:
        assert quick(asked) == {right: "quick"}
        return {left: "slow", right: "slow"}

    assert newest(slow, [left, right])(asked) == {left: "slow", right: gr.skip()}
    assert newest(slow, [left])(asked) == {left: "slow", right: "slow"}, "it decides about one"
    assert unasked(slow)(asked) == {left: "slow", right: gr.skip()}
    assert unasked(lambda: {left: "seen", right: "seen"})(asked) == {left: "seen", right: "seen"}


def test_nothing_is_filled_for_what_is_about_to_be_another_one() -> None:
    asked, run, step = Asked(), gr.Textbox(), gr.Textbox()
    at_step = newest(lambda: {step: "of the old run"}, [step], of=[run])
    look = unasked(lambda: {run: "old", step: "old"})

    def opened() -> Updates:
        assert at_step(asked) == {step: gr.skip()}
        assert look(asked) == {run: gr.skip(), step: gr.skip()}
        return {run: "new", step: "first"}

    assert newest(opened, [run, step])(asked) == {run: "new", step: "first"}
    assert at_step(asked) == {step: "of the old run"}

    def broken() -> Updates:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        newest(broken, [run, step])(asked)
    assert look(asked) == {run: "old", step: "old"}, "what failed is over too"


def test_what_answers_again_and_again_leaves_alone_what_was_asked_meanwhile() -> None:
    asked, status, result = Asked(), gr.Textbox(), gr.Textbox()

    async def follow() -> AsyncIterator[Updates]:
        for at in range(2):
            yield {status: at, result: at}

    async def watched() -> list[Updates]:
        found = list[Updates]()
        async for shown in newest(follow, [status, result])(asked):
            found.append(shown)
            newest(lambda: {result: "picked"}, [result])(asked)
        return found

    assert asyncio.run(watched()) == [
        {status: 0, result: 0},
        {status: 1, result: gr.skip()},
    ]


def test_gradio_passes_the_request_behind_what_was_put_before() -> None:
    def handler(request: gr.Request, words: str) -> Updates:
        return {}

    (values, *_) = special_args(newest(handler, []), ["asked", "words"], request=REQUEST)
    assert values == ["asked", REQUEST, "words"]
