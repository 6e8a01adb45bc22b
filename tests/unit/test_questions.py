"""Questions of a benchmark: what a file may hold, and what is said of one that is wrong."""

import json
from pathlib import Path

import pytest

from engine import questions
from engine.errors import PromptError
from engine.questions import OWN, digest, in_turn, parsed, read, typed
from engine.types import Question
from tests.conftest import ROOT


def line(**fields: object) -> str:
    return json.dumps(
        {"question_id": 1, "category": "qa", "turns": ["Who?", "And then?"], **fields}
    )


def test_a_file_as_spec_bench_has_it_is_read() -> None:
    text = "\ufeff" + line() + "\n\n" + line(question_id="b", category=" math ", turns=["1 + 1?"])
    assert parsed(text.encode()) == [Question("1", "qa", "Who?"), Question("b", "math", "1 + 1?")]
    bare = '{"turns": ["One\u2028two"]}'
    assert parsed(bare) == [Question("1", "all", "One\u2028two")], "no name is no fault"


def test_prompts_are_typed_one_per_line_or_as_in_a_file() -> None:
    assert typed(" Tell a story. \n\nTell another.\r\n") == [
        Question("1", OWN, "Tell a story."),
        Question("2", OWN, "Tell another."),
    ]
    assert typed("  " + line()) == [Question("1", "qa", "Who?")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no question"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        ("{", "Line 1 .* no JSON"),
        (line() + "\n[1]", "Line 2 .* it is \\[1\\]"),
        ("[" * 100_000, "no JSON"),
        (line(turns="Who?"), "turns are 'Who\\?'"),
        (line(turns=[]), "turns are \\[\\]"),
        (line(turns=[{"x": "y" * 10_000}]), "turns are .*…"),
        (line(turns=["  "]), "text has 2 characters"),
        (line(question_id=None), "question_id is None"),
        (line(question_id=True), "question_id is True"),
        (line(question_id=[1]), "question_id is \\[1\\]"),
        (line(question_id="x" * 81), "more than 80 characters"),
        (line(category=7), "category is 7"),
        (line(category="x" * 81), "more than 80 characters"),
        (line() + "\n" + line(turns=["Who else?"]), "Two questions have the question_id '1'"),
        (line() + "\n" + line(question_id="1"), "Two questions have the question_id '1'"),
    ],
)
def test_a_hostile_file_is_refused_in_words(content: str | bytes, said: str) -> None:
    with pytest.raises(PromptError, match=said) as error:
        parsed(content)
    assert len(str(error.value)) < 500


def test_a_huge_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match="at most 16,777,216 are read"):
        parsed(b" " * (questions.MOST_BYTES + 1))
    long = line(turns=["x" * (questions.MOST_CHARACTERS + 1)])
    with pytest.raises(PromptError, match="200,001 characters"):
        parsed(long)
    many = "\n".join(line(question_id=n) for n in range(questions.MOST_QUESTIONS + 1))
    with pytest.raises(PromptError, match="5,001 questions"):
        parsed(many)
    assert len(parsed(many.rpartition("\n")[0])) == questions.MOST_QUESTIONS


def test_a_path_is_read_like_its_content(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text(line())
    assert read(file) == parsed(line())
    for place in (tmp_path, tmp_path / "none.jsonl", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(PromptError, match="is no file|cannot be read"):
            read(place)
    with file.open("wb") as opened:
        opened.truncate(questions.MOST_BYTES + 1)
    with pytest.raises(PromptError, match="at most"):
        read(file)


def test_the_bundled_sample_has_the_categories_of_spec_bench() -> None:
    found = read(ROOT / "assets" / "benchmark" / "sample.jsonl")
    assert {question.category for question in found} == {
        *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"),
        *("humanities", "translation", "summarization", "qa", "math_reasoning", "rag"),
    }
    assert len(found) == 26


def test_a_few_questions_are_of_every_category() -> None:
    found = [Question(str(n), kind, "?") for n, kind in enumerate("aaabcc")]
    assert [q.id for q in in_turn(found, lambda q: q.category)] == ["0", "3", "4", "1", "5", "2"]
    assert [q.id for q in in_turn(found, lambda q: q.category, 3)] == ["0", "3", "4"]
    assert [q.id for q in in_turn(found, lambda q: q.category, skip=1)] == ["1", "5", "2"]


def test_a_digest_names_what_is_asked() -> None:
    one = [Question("1", "qa", "Who?")]
    assert digest(one) == digest(list(one)) != digest([Question("1", "qa", "Why?")])
    assert digest(one) != digest([*one, Question("2", "qa", "Why?")])
