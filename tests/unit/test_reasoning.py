"""What a model thinks is told apart from its answer, however the text is cut."""

import random

import pytest

from engine.prompt import TextStream
from engine.thinking import (
    MARKS,
    Marks,
    Parted,
    Splitter,
    answer_of,
    marks_of,
    named,
    opened,
    thought_in,
    with_thinking,
)


def said(text: str, cuts: list[int], begun: bool = False) -> Parted:
    splitter, reasoning, content = Splitter(begun=begun), "", ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = splitter.push(text[start:end])
        reasoning, content = reasoning + part.reasoning, content + part.content
    last = splitter.end()
    return Parted(reasoning + last.reasoning, content + last.content)


NEXT, ANALYSIS = "<|end|><|start|>assistant", "<|channel|>analysis<|message|>"
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
    ("<think>The template began it.</think>Yes", True, Parted("The template began it.", "Yes")),
    ("```\n<think>\nHm.\n</think>\n```", False, None),
    ("Between `<think>` and\n</think>\nit thinks.", False, None),
    ("<|channel|>final<|message|>Yes", False, Parted("", "Yes")),
    (
        "<|channel|>analysis<|message|>a<|end|> b<|channel|>final<|message|>Yes",
        False,
        Parted("a<|end|> b", "Yes"),
    ),
    ("<|channel|>commentary<|message|>I look.", False, Parted("", "I look.")),
    (
        f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.",
        False,
        Parted("a", "I look."),
    ),
    *(
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{call}", False, Parted(f"a{NEXT}{ANALYSIS}b", call))
        for call in (
            f"{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}",
            f"{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}",
        )
    ),
    *(
        (
            f"{marks.begin}\nHm.\n{end}\n\nSo {marks.begin}",
            False,
            Parted("Hm.", f"So {marks.begin}"),
        )
        for marks in MARKS
        for end in marks.ends
    ),
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


@pytest.mark.parametrize(
    ("known", "more", "parts"),
    [
        ("[", '"a"]', Parted("", '"a"]')),
        ("<", "html>", Parted("", "html>")),
        ("<think>\nHm", ", so </think>Yes", Parted(", so", "Yes")),
        ("<think>\nHm  <", " 3</think>Yes", Parted(" 3", "Yes")),
        ("<think>Hm</th", "ink>\nYes", Parted("", "Yes")),
        ("<think>\n\n</think>\n\nYe", "s </think>", Parted("", "s </think>")),
        ("a", "", Parted()),
    ],
)
def test_what_is_known_is_not_said_again(known: str, more: str, parts: Parted) -> None:
    splitter = Splitter(known=len(known))
    assert splitter.push(known) == Parted()
    found = [*map(splitter.push, more), splitter.end()]
    assert Parted(*map("".join, zip(*found, strict=True))) == parts


def test_the_places_of_thinking_are_those_in_the_whole_text() -> None:
    for marks in MARKS:
        text = f" {marks.begin}\nHm.\n{marks.ends[0]}\n\nYes."
        found = thought_in(text)
        assert found is not None and found.end is not None
        assert text[: found.begin].strip() == marks.begin
        assert text[found.begin : found.end].strip() == "Hm."
        assert text[found.answer :] == answer_of(text) == "Yes."
        assert thought_in(text[: found.end - 2]) == (found.begin, None, None)
    assert thought_in("Yes.") is None and thought_in("Hm", begun=True) == (0, None, None)


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.begin)
def test_a_model_has_the_marks_of_its_template_or_of_its_vocabulary(marks: Marks) -> None:
    assert marks in marks_of(f"{{{{ '{marks.begin}' }}}}", ())
    assert marks_of("", ["a", marks.ends[0]]) == (marks,) or marks.private
    assert named([marks.begin]) == (marks,)
    if not marks.private:
        other = next(each for each in MARKS if each != marks)
        text = f"{other.begin}x{other.ends[0]}y"
        assert answer_of(text, marks_of("", [marks.begin])) == text
    assert opened(f"<|assistant|>{marks.begin}\n", MARKS)
    assert not opened(f"<|assistant|>{marks.begin}\n{marks.ends[0]}\n", MARKS)


def test_without_marks_in_template_and_vocabulary_all_are_known() -> None:
    assert marks_of("{{ messages }}", ["a", "think"]) == MARKS == named(())
    assert marks_of("", ["<|channel|>", "<|message|>"]) == (MARKS[7],)


def test_thinking_that_gets_marks_does_not_end_early() -> None:
    assert answer_of(with_thinking("a</think>b", "Yes")) == "Yes"


STOPPED = [
    ("<think>\nQuestion: x\n\nHm</think>\n\nYes.\n\nQuestion: y", False, "Yes."),
    ("a\n\nb\n</think>\n\nYes.\n\nNo", True, "Yes."),
    ("Yes.\n\nNo", False, "Yes."),
    ("\n\nYes", False, ""),
    ("<think", False, "<think"),
    ("<think>\n\nnever ends", False, ""),
    ("<thi\n\nx", False, "<thi"),
]


@pytest.mark.parametrize(("text", "begun", "answer"), STOPPED)
@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_stop_strings_count_in_the_answer_alone(
    text: str, begun: bool, answer: str, length: int
) -> None:
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    stream = TextStream(
        lambda tokens: "".join(pieces[token] for token in tokens),
        ["\n\n", "Question:"],
        Splitter(begun=begun),
    )
    found, stopped = "", False
    for token in range(len(pieces)):
        piece, stopped = stream.push(token)
        found += piece
        if stopped:
            break
    found += "" if stopped else stream.flush()
    assert answer_of(found, begun=begun) == answer
    assert text.startswith(found)
