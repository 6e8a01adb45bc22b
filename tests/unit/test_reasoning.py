"""What a model thinks is told apart from its answer, however the text is cut."""

import random

import pytest

from app.api.running import Parted, Splitter


def said(text: str, cuts: list[int], begun: bool = False) -> Parted:
    splitter, reasoning, content = Splitter(begun), "", ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = splitter.push(text[start:end])
        reasoning, content = reasoning + part.reasoning, content + part.content
    last = splitter.end()
    return Parted(reasoning + last.reasoning, content + last.content)


CASES = [
    ("", False, Parted("", "")),
    ("Just an answer.", False, Parted("", "Just an answer.")),
    ("  \n a <b>tag</b> </think> of no thought", False, None),
    ("<think>\nfirst\nthen\n</think>\n\nSo: 4.", False, Parted("first\nthen", "So: 4.")),
    ("<thinking>one</thinking>two", False, Parted("one", "two")),
    (
        "\n<think>a < b, </thin air</think>\n<think>x",
        False,
        Parted("a < b, </thin air", "<think>x"),
    ),
    ("first\n</think>\n\nSo: 4.", True, Parted("first", "So: 4.")),
    ("<think>never ends \n", False, Parted("never ends", "")),
    ("never ends </thi", True, Parted("never ends </thi", "")),
    ("</think>at once ", True, Parted("", "at once ")),
    ("<think></think>", False, Parted("", "")),
    ("<thin", False, Parted("", "<thin")),
]


@pytest.mark.parametrize(("text", "begun", "parts"), CASES)
def test_thinking_and_answer_are_told_apart_wherever_the_text_is_cut(
    text: str, begun: bool, parts: Parted | None
) -> None:
    expected = parts or Parted("", text)
    assert said(text, [], begun) == expected
    assert said(text, list(range(1, len(text))), begun) == expected, "character by character"
    dice = random.Random(7)
    for _ in range(50):
        cuts = sorted(dice.sample(range(len(text) + 1), min(3, len(text))))
        assert said(text, cuts, begun) == expected, cuts


def test_no_answer_is_held_up() -> None:
    """Only what may be a mark waits."""
    splitter = Splitter()
    assert splitter.push("W") == Parted("", "W") and splitter.push("<th") == Parted("", "<th")
    splitter = Splitter(begun=True)
    assert splitter.push("one two") == Parted("one two", "") and splitter.thinks
    assert splitter.push(" <") == Parted() and splitter.push(" 3") == Parted(" < 3", "")
    assert splitter.push(".</think>Yes") == Parted(".", "Yes") and not splitter.thinks
