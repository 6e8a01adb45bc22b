"""The questions of a benchmark, in categories, in the format of Spec-Bench.

A file has a JSON object per line: `question_id`, `category` and `turns`, of which only the first is
used. Files are not trusted: types, sizes and names are checked, and an error names its line.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import PromptError
from engine.settings import shortened
from engine.text import read_json
from engine.types import Question

T = TypeVar("T")
MOST_BYTES = 16 << 20
"""The most bytes of a file of questions."""
MOST_QUESTIONS = 5_000
MOST_CHARACTERS = 200_000
"""The most characters of one question, more than fit into any context."""
LONGEST_NAME = 80
"""Characters of a category, or of an id."""
OWN = "own prompts"
"""The category of typed prompts."""


def in_turn(
    items: Iterable[T], category: Callable[[T], str], limit: int = 0, skip: int = 0
) -> list[T]:
    """At most `limit` items (0: all), from all categories in turn, so that a few are of every kind.

    The first `skip` of each category are left out.
    """
    kinds: dict[str, list[T]] = defaultdict(list)
    for item in items:
        kinds[category(item)].append(item)
    longest = max(map(len, kinds.values()), default=0)
    mixed = [own[at] for at in range(skip, longest) for own in kinds.values() if at < len(own)]
    return mixed[: limit or None]


def digest(questions: Sequence[Question]) -> str:
    """Identifies a set of questions: sets with the same digest have the same questions in the same
    order."""
    text = json.dumps([astuple(question) for question in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def typed(text: str) -> list[Question]:
    """The questions of typed prompts: one per line, or a JSON object per line as in a file. Raises
    PromptError."""
    if text.lstrip().startswith("{"):
        return parsed(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [Question(str(n), OWN, checked_text(line, n)) for n, line in enumerate(lines, 1)]
    return checked(found)


def read(path: Path) -> list[Question]:
    try:
        if not path.is_file():
            raise PromptError(f"{str(path)!r} is no file. Give the path of a file of questions.")
        if path.stat().st_size > MOST_BYTES:
            raise too_large(path.stat().st_size)
        return parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PromptError(
            f"{str(path)!r} cannot be read ({error}). Choose another file."
        ) from error


def too_large(size: int) -> PromptError:
    return PromptError(
        f"The questions have {size:,} bytes, and at most {MOST_BYTES:,} are read. "
        "Choose a smaller file."
    )


def parsed(content: str | bytes) -> list[Question]:
    if len(content) > MOST_BYTES:
        raise too_large(len(content))
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"The file is no text in UTF-8 ({error.reason} at byte {error.start:,}). Give a file "
            "with a JSON object per line."
        ) from error
    # Not `splitlines`: JSON may hold a line separator of Unicode as it is.
    lines = ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    return checked([question_of(line, number) for number, line in lines])


def question_of(line: str, number: int) -> Question:
    try:
        record: Any = read_json(line)
    except (RecursionError, ValueError) as error:
        raise wrong(number, f"it is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise wrong(number, f"it is {shortened(record)}")
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise wrong(number, f"its turns are {shortened(turns)}")
    name = record.get("question_id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise wrong(number, f"its question_id is {shortened(name)}")
    category = record.get("category", "all")
    if not isinstance(category, str):
        raise wrong(number, f"its category is {shortened(category)}")
    named = [str(name), category.strip() or "all"]
    if any(len(each) > LONGEST_NAME for each in named):
        raise wrong(number, f"a name in it has more than {LONGEST_NAME} characters")
    return Question(named[0], named[1], checked_text(turns[0], number))


def wrong(number: int, why: str) -> PromptError:
    return PromptError(
        f"Line {number:,} of the questions cannot be used: {why}. Each line must be a JSON object "
        'such as {"question_id": 1, "category": "writing", "turns": ["Write a story."]}.'
    )


def checked_text(text: str, number: int) -> str:
    if not text.strip() or len(text) > MOST_CHARACTERS:
        raise wrong(number, f"its text has {len(text):,} characters")
    return text


def checked(questions: list[Question]) -> list[Question]:
    """The same questions. Raises PromptError if there are none or too many, or for equal ids."""
    if not questions:
        raise PromptError("There is no question. Give a prompt per line, or a file of questions.")
    if len(questions) > MOST_QUESTIONS:
        raise PromptError(
            f"There are {len(questions):,} questions, and a benchmark has at most "
            f"{MOST_QUESTIONS:,}. Choose a smaller file."
        )
    known: set[str] = set()
    for question in questions:
        if question.id in known:
            raise PromptError(
                f"Two questions have the question_id {shortened(question.id)}. Give each its own."
            )
        known.add(question.id)
    return questions
