"""What a message asks to rewrite, and which words its answer changed."""

import pytest

from app.service import rewriting
from app.service.attachments import Attachment, join
from app.service.rewriting import AROUND, changes, rewritten, to_rewrite
from storage.titles import title_from

OLD = "The boat left early in the morning.\n\nIt came back in the evening.\n"
NEW = "The boat left early.\n\nIt came back late in the evening.\n"
FILE = Attachment("notes.md", OLD.strip(), rewrite=True)


def test_the_words_that_changed_are_found_and_both_texts_can_be_read_from_them() -> None:
    found = changes(OLD, NEW)
    assert found == [
        ("same", "The boat left "),
        ("removed", "early in the morning.\n\n"),
        ("added", "early.\n\n"),
        ("same", "It came back "),
        ("added", "late "),
        ("same", "in the evening.\n"),
    ]
    assert "".join(text for kind, text in found if kind != "added") == OLD
    assert "".join(text for kind, text in found if kind != "removed") == NEW
    assert changes(OLD, OLD) == []


def test_only_some_of_the_text_around_a_change_is_shown() -> None:
    long = " ".join(f"word{n}" for n in range(200))
    (_, before), _, _, (_, between), _, _, (_, after) = changes(
        f"{long} one {long} two {long}", f"{long} eins {long} zwei {long}"
    )
    assert before.startswith(" … ") and before.endswith("word199 ")
    assert between.startswith("word0 word1") and between.endswith("word199 ")
    assert after.startswith("word0 word1") and after.endswith(" … ")
    assert max(len(before), len(after)) <= AROUND + 3 and len(between) <= 2 * AROUND + 3


def test_a_message_is_rewritten_only_if_it_asks_for_it() -> None:
    asked = join([Attachment("other.md", "Read this."), FILE], "Make it shorter.")
    assert to_rewrite(asked) == FILE
    for plain in ("Make it shorter.", join([Attachment("notes.md", OLD)], "Sum it up.")):
        assert to_rewrite(plain) is None and rewritten(plain, NEW) is None
    assert title_from([("user", asked)]) == "Make it shorter"


@pytest.mark.parametrize(
    "answer", [NEW, f"```md\n{NEW.strip()}\n```\n", f"````\n{NEW.strip()}\n````"]
)
def test_a_fence_around_the_new_text_is_no_change(answer: str) -> None:
    found = rewritten(FILE.block, answer)
    assert found and found.new == NEW.strip() and found.changes == changes(OLD.strip(), NEW.strip())


def test_a_fence_in_the_new_text_stays() -> None:
    inside = "Run this:\n```\nmake\n```"
    found = rewritten(FILE.block, inside)
    assert found and found.new == inside


def test_long_texts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "LONGEST", len(OLD))
    found = rewritten(FILE.block, NEW)
    assert found and found.changes is None and found.new == NEW.strip()
