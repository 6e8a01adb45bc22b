"""Tasks made of commits: what is taken from a repository, and what a model would write."""

import json
import os
import random
import re
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.commits import (
    CONTEXT,
    FORMATS,
    PROMPT,
    SCHEMA,
    Edit,
    changes,
    chosen,
    commits,
    edit_tasks,
)
from bench.replay import PAST, TEST
from engine.methods import METHODS
from tests.support.toy import END, ToyBackend
from tests.tools.conftest import Program

LINES = [f"line {number} of the file\n" for number in range(40)]
TEXT = "".join(LINES)


class Repository:
    """A git repository in a folder, which no setting of the machine reaches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *command: str) -> str:
        names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
        alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(
            ["git", "-C", str(self.folder), *command],
            env={**os.environ, **dict.fromkeys(names, "someone"), **alone},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def commit(self, subject: str, files: Mapping[str, str | bytes] | None = None) -> None:
        """Write the files, and commit all that differs."""
        for name, content in (files or {}).items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "-q", "-m", subject)


def changed(line: int, text: str = TEXT) -> str:
    lines = text.splitlines(keepends=True)
    lines[line] = f"now {lines[line]}"
    return "".join(lines)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.commit("Begin", {"a.txt": TEXT, "ä b.txt": TEXT})
    made.commit("First", {"a.txt": f"{TEXT}1\n2\n3\n", "ä b.txt": changed(8, changed(20))})
    made.commit("Second", {"a.txt": changed(9)})
    return made


def options(repository: Repository, **others: Any) -> Namespace:
    usual = {"limit": 16, "skip": 0, "tokens": (400, 4000)}
    return Namespace(repository=str(repository.folder), **{**usual, **others})


def subjects(repository: Repository, **others: Any) -> list[str]:
    return [edit.subject for edit in chosen(options(repository, **others), ToyBackend())]


def test_an_edit_is_the_largest_change_of_a_commit_and_the_oldest_comes_first(
    repository: Repository,
) -> None:
    first, second = chosen(options(repository), ToyBackend())
    assert (first.subject, first.path) == ("First", "ä b.txt")
    assert (first.old, first.new) == (TEXT, changed(8, changed(20)))
    assert (second.subject, second.path) == ("Second", "a.txt")
    assert (second.old, second.new) == (f"{TEXT}1\n2\n3\n", changed(9))
    assert second.commit == repository.git("rev-parse", "HEAD").strip()


def test_the_newest_commits_are_taken_and_those_that_are_skipped_are_newer_still(
    repository: Repository,
) -> None:
    assert subjects(repository, limit=1) == ["Second"]
    assert subjects(repository, skip=1) == ["First"]


def test_each_file_is_edited_once_by_its_newest_usable_commit(repository: Repository) -> None:
    repository.commit("Third", {"ä b.txt": TEXT})
    assert subjects(repository) == ["Second", "Third"]
    repository.commit("Fourth", {"ä b.txt": "too small"})
    assert subjects(repository) == ["Second", "Third"]
    assert subjects(repository, limit=1, skip=1) == ["Second"]


def test_a_folder_of_a_repository_has_the_edits_below_it(repository: Repository) -> None:
    repository.commit("Add", {"inner/c.txt": TEXT})
    repository.commit("Inside", {"inner/c.txt": changed(1), "a.txt": changed(2, changed(3))})
    inner = Repository.__new__(Repository)
    inner.folder = repository.folder / "inner"
    assert subjects(inner) == ["Inside"]
    assert subjects(repository) == ["First", "Inside"], "which changes another file more"


def merged(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "side", "HEAD~1")
    repository.commit("Side", {"other.txt": "x"})
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--no-ff", "--no-commit", "side")
    repository.commit("Merge", {"a.txt": TEXT})


def renamed(repository: Repository) -> None:
    repository.git("mv", "a.txt", "c.txt")
    repository.commit("Rename", {"c.txt": changed(30)})


def executable(repository: Repository) -> None:
    (repository.folder / "a.txt").chmod(0o755)
    repository.commit("Mode")


def submodule(repository: Repository) -> None:
    for subject, commit in (("Module", "1" * 40), ("Newer module", "2" * 40)):
        repository.git("update-index", "--add", "--cacheinfo", f"160000,{commit},module")
        repository.git("commit", "-q", "-m", subject)


def twice(old: str | bytes, new: str | bytes, name: str) -> Callable[[Repository], None]:
    def make(repository: Repository) -> None:
        repository.commit("Add", {name: old})
        repository.commit("Change", {name: new})

    return make


@pytest.mark.parametrize(
    "make",
    [
        merged,
        renamed,
        executable,
        submodule,
        twice(TEXT, "deleted but for this", "c.txt"),
        twice("hardly anything", TEXT, "c.txt"),
        twice(TEXT, TEXT * 6, "c.txt"),
        twice(f"\0{TEXT}", f"\0{changed(1)}", "c.bin"),
        twice(TEXT, b"\xff" + TEXT.encode(), "c.txt"),
        twice(TEXT, changed(1), "Cargo.lock"),
        twice(TEXT, changed(1), "inner/package-lock.json"),
        twice(TEXT, changed(1), "pnpm-lock.yaml"),
        twice(TEXT, changed(1), "go.sum"),
    ],
)
def test_commits_without_an_edit_are_passed_over(
    repository: Repository, make: Callable[[Repository], None]
) -> None:
    before = repository.git("rev-parse", "HEAD")
    make(repository)
    assert repository.git("rev-parse", "HEAD") != before
    assert subjects(repository) == ["First", "Second"]


# What is written.


def edit_of(old: str, new: str) -> Edit:
    return Edit("1234", "Make it better", "folder/file.txt", old, new)


def drawn(seed: int) -> tuple[str, str]:
    """A text with many equal lines, and another one made of it."""
    draw = random.Random(seed)
    old = draw.choices(["one\n", "two\n", "three\n", "\n", 'say "four"\\\n'], k=60)
    new = list(old)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(new))
        new[at : at + draw.randint(0, 2)] = draw.choices(["new\n", "two\n"], k=draw.randint(0, 3))
    return "".join(old), "".join(new)


TEXTS = [
    (TEXT, changed(0)),
    (TEXT, changed(39)),
    (TEXT, changed(5, changed(30))),
    (TEXT, f"{TEXT}one more\n"),
    (TEXT, "".join(LINES[:-1])),
    (TEXT.rstrip("\n"), f"{TEXT}the last line ends now\n"),
    (TEXT, changed(39).rstrip("\n")),
    (TEXT.replace("\n", "\r\n"), changed(7).replace("\n", "\r\n")),
    ("x\n" * 40, "x\n" * 20 + "y\n" + "x\n" * 19),
    *[(old, new) for old, new in map(drawn, range(30)) if old != new],
]


@pytest.mark.parametrize(("old", "new"), TEXTS)
def test_each_format_makes_the_new_file(old: str, new: str) -> None:
    edit = edit_of(old, new)
    written = {name: write(edit) for name, (_, write) in FORMATS.items()}
    assert written["whole file"] == new
    calls = json.loads(written["tool calls"])
    assert {call["path"] for call in calls} == {edit.path}
    text, places = old, [re.finditer(f"(?={re.escape(call['old_string'])})", old) for call in calls]
    for call, found in reversed([*zip(calls, places, strict=True)]):
        (place,) = found
        end = place.start() + len(call["old_string"])
        text = text[: place.start()] + call["new_string"] + text[end:]
    assert text == new
    blocks = re.findall(
        r"(.*?)\n<<<<<<< SEARCH\n(.*?)=======\n(.*?)>>>>>>> REPLACE\n",
        written["search-replace"],
        re.DOTALL,
    )
    assert [(path.strip(), before, after) for path, before, after in blocks] == [
        (edit.path, ended(call["old_string"]), ended(call["new_string"])) for call in calls
    ]


def ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def test_a_passage_has_few_lines_around_it_where_they_tell_it_from_the_rest() -> None:
    (passage,) = changes(edit_of(TEXT, changed(20)))
    assert passage[0] == "".join(LINES[20 - CONTEXT : 21 + CONTEXT])
    first, second = changes(edit_of(TEXT, changed(5, changed(30))))
    assert first[0] == "".join(LINES[2:9]) and second[0] == "".join(LINES[27:34])
    ((old, _),) = changes(edit_of("x\n" * 40, "x\n" * 20 + "y\n" + "x\n" * 19))
    assert old == "x\n" * 40
    often = "".join(f"line {number // 8}\n" for number in range(400))
    ((old, _),) = changes(edit_of(often, changed(204, often)))
    assert old.count("\n") < 20


def texts(place: str) -> list[tuple[str, str, str]]:
    """(split, prompt, answer) of the recordings of one edit as a whole file."""
    edit, toy = edit_of("old <|end|>\n", "new <|end|>\n"), ToyBackend()
    made = list(edit_tasks([edit], FORMATS["whole file"], place == PAST, toy))
    assert all(each.answer[-1] == END and END not in each.answer[:-1] for each in made)
    return [
        (each.split, toy.detokenize(each.prompt), toy.detokenize(each.answer[:-1])) for each in made
    ]


def test_the_old_file_stands_in_the_prompt_or_was_an_answer() -> None:
    ((split, prompt, answer),) = texts(PROMPT)
    assert (split, answer) == (TEST, "new <|end|>\n") and "old <|end|>" in prompt
    assert all(part in prompt for part in ("Make it better", "folder/file.txt", "whole new file"))
    earlier, (split, prompt, answer) = texts(PAST)
    assert (earlier[0], earlier[2]) == (PAST, "old <|end|>\n") and "folder/file.txt" in earlier[1]
    assert (split, answer) == (TEST, "new <|end|>\n") and "old <|end|>" not in prompt
    assert "Make it better" in prompt


# The command.


@pytest.mark.model
def test_the_replay_ends_in_one_json_line(repository: Repository, bench: Program) -> None:
    few = ("edits", repository.folder, "--nodes", "8", "32", "--tokens", "100", "4000")
    found = {place: bench.record(*few, "--old", place) for place in (PROMPT, PAST)}
    head = repository.git("rev-parse", "HEAD")
    for place, record in found.items():
        assert record["old"] == place and str(repository.folder) not in str(record)
        assert record["commits"] == 2 and head.startswith(record["newest"])
        assert list(record["formats"]) == list(FORMATS)
        for results in record["formats"].values():
            assert len(results["methods"]) == 4 and results["tokens"] > 50
    sizes = [{n: each["tokens"] for n, each in found[p]["formats"].items()} for p in found]
    assert sizes[0] == sizes[1], "the answers are the same, wherever the old file stands"
    lookup, ours = METHODS["lookup"].title, "Hierarchy drafting, 32"
    prompt, past = (found[place]["formats"]["whole file"]["methods"] for place in (PROMPT, PAST))
    assert prompt[ours]["tokens_per_forward"] > 5 and past[ours]["tokens_per_forward"] > 3
    assert prompt[ours]["nodes"] > 8 >= prompt["Hierarchy drafting, 8"]["nodes"] > 0
    assert past[lookup]["tokens_per_forward"] < prompt[lookup]["tokens_per_forward"]
    alone = bench.record(*few, "--no-peers", "--limit", "1", "--skip", "1")
    assert alone["commits"] == 1 and not head.startswith(alone["newest"])
    assert list(alone["formats"]["tool calls"]["methods"]) == ["Hierarchy drafting, 8", ours]


@pytest.mark.model
def test_mistakes_end_with_status_2_and_a_message(
    repository: Repository,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    bench: Program,
) -> None:
    folder, none = repository.folder, tmp_path_factory.mktemp("none")
    words = bench.refusal("edits", none)
    assert "not a git repository" in words and repr(str(none)) in words
    assert repr("/nowhere") in bench.refusal("edits", "/nowhere")
    narrow = bench.refusal("edits", folder, "--tokens", "90000", "90001")
    assert "90000 to 90001 tokens" in narrow
    skipped = bench.refusal("edits", folder, "--tokens", "1", "4000", "--skip", "7")
    assert "after 7 are skipped" in skipped
    Repository(none)
    assert "does not have any commits yet" in bench.refusal("edits", none)
    monkeypatch.setenv("PATH", str(none))
    assert "git cannot be started" in bench.refusal("edits", folder)


# Extraction.


@pytest.fixture
def many(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    for number in range(8):
        made.commit(f"Fix the {number}th thing", {f"part/{number}.txt": "line\n" * (number + 3)})
    made.commit("Describe it", {"README.md": "It is this.\n"})
    made.commit("A picture!", {"picture.png": b"\x89PNG\0\1\2", "note.txt": "a picture\n"})
    return made


def test_a_commit_is_extracted_as_git_prints_it(many: Repository) -> None:
    found = list(commits(str(many.folder)))
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


def test_a_schema_raises_the_tokens_per_forward(many: Repository, bench: Program) -> None:
    arguments = ["--limit", "10", "--warm", "4", "--nodes", "8"]
    record = bench.record("extract", str(many.folder), *arguments)
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
    many: Repository, arguments: list[str], told: str, bench: Program
) -> None:
    assert told in bench.refusal("extract", str(many.folder), *arguments)
