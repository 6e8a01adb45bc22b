"""What a model thinks is told apart from its answer, however the text is cut."""

import random

import pytest

from app.api.reasoning import Said, Splitter


def said(text: str, cuts: list[int], begun: bool = False) -> Said:
    splitter, reasoning, content = Splitter(begun), "", ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = splitter.push(text[start:end])
        reasoning, content = reasoning + part.reasoning, content + part.content
    last = splitter.end()
    return Said(reasoning + last.reasoning, content + last.content)


CASES = [
    ("", False, Said("", "")),
    ("Just an answer.", False, Said("", "Just an answer.")),
    ("  \n a <b>tag</b> </think> of no thought", False, None),
    ("<think>\nfirst\nthen\n</think>\n\nSo: 4.", False, Said("first\nthen", "So: 4.")),
    ("<thinking>one</thinking>two", False, Said("one", "two")),
    ("\n<think>a < b, </thin air</think>\n<think>x", False, Said("a < b, </thin air", "<think>x")),
    ("first\n</think>\n\nSo: 4.", True, Said("first", "So: 4.")),
    ("<think>never ends \n", False, Said("never ends", "")),
    ("never ends </thi", True, Said("never ends </thi", "")),
    ("</think>at once ", True, Said("", "at once ")),
    ("<think></think>", False, Said("", "")),
    ("<thin", False, Said("", "<thin")),
]


@pytest.mark.parametrize(("text", "begun", "parts"), CASES)
def test_thinking_and_answer_are_told_apart_wherever_the_text_is_cut(
    text: str, begun: bool, parts: Said | None
) -> None:
    expected = parts or Said("", text)
    assert said(text, [], begun) == expected
    assert said(text, list(range(1, len(text))), begun) == expected, "character by character"
    dice = random.Random(7)
    for _ in range(50):
        cuts = sorted(dice.sample(range(len(text) + 1), min(3, len(text))))
        assert said(text, cuts, begun) == expected, cuts


def test_no_answer_is_held_up() -> None:
    """Only what may be a mark waits."""
    splitter = Splitter()
    assert splitter.push("W") == Said("", "W") and splitter.push("<th") == Said("", "<th")
    splitter = Splitter(begun=True)
    assert splitter.push("one two") == Said("one two", "") and splitter.thinks
    assert splitter.push(" <") == Said() and splitter.push(" 3") == Said(" < 3", "")
    assert splitter.push(".</think>Yes") == Said(".", "Yes") and not splitter.thinks
