"""JSON under a schema, made of commits: what is extracted, and that the schema helps."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.__main__ import main
from bench.extract import SCHEMA, commits
from tests.tools.test_edits import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    for number in range(8):
        made.commit(f"Fix the {number}th thing", {f"part/{number}.txt": "line\n" * (number + 3)})
    made.commit("Describe it", {"README.md": "It is this.\n"})
    made.commit("A picture!", {"picture.png": b"\x89PNG\0\1\2", "note.txt": "a picture\n"})
    return made


def test_a_commit_is_extracted_as_git_prints_it(repository: Repository) -> None:
    found = list(commits(str(repository.folder)))
    schema = json.loads(SCHEMA.read_text())
    for _, answer in found:
        jsonschema.validate(answer, schema)
    (_, newest), (_, readme), (prompt, fix), *_ = found
    assert newest["files"] == [{"path": "note.txt", "added": 1, "deleted": 0}]
    assert (newest["breaking"], newest["kind"], readme["kind"]) == (
        True,
        "feature",
        "documentation",
    )
    assert fix["kind"] == "fix" and fix["author"] == "someone" and fix["breaking"] is False
    assert "10\t0\tpart/7.txt" in prompt and "Fix the 7th thing" in prompt


def test_a_schema_raises_the_tokens_per_forward(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--limit", "10", "--warm", "4", "--nodes", "8"]
    assert main(["extract", str(repository.folder), *arguments]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {
        name: each["Hierarchy drafting, 8"]["tokens_per_forward"]
        for name, each in record["formats"].items()
    }
    assert found["schema, first answer"] > 1.3 * found["none, first answer"] > 1
    assert found["schema, later answers"] > found["schema, first answer"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--limit", "40"], "has 10 commits that change text files, and 40 are needed"),
        (["--limit", "5", "--warm", "5"], "Give a smaller --warm"),
    ],
)
def test_what_cannot_be_replayed_is_told(
    repository: Repository, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["extract", str(repository.folder), *arguments]) == 2
    assert told in capsys.readouterr().err
