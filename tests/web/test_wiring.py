"""What the user does while a slow event looks at how things are is what stays on the page."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.web.wiring import Deeds, Updates, counted, unless_done


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
