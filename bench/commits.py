"""Answers made of the commits of a git repository: the tokens per forward that drafters would
achieve on what a perfect model would write.

The tasks are replayed (bench/replay.py) from the oldest to the newest, and every answer is learned
afterwards. `edits` asks to change a file as a commit's subject says; the answer has one of three
formats, each with databases of its own, and the old file is in the prompt, or was an answer in an
earlier conversation. Each file is edited once, so when a task is replayed, its old file is known
from one place alone, and its new file from nowhere. `extract` asks for what git prints of a commit
as JSON under the schema in bench/commit.json, with the schema and without it: first each answer
with empty databases, and then in turn, where only those after the first `--warm` count.
"""

import argparse
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness import EMBEDDED, Add, Measurement, at_least, own_statistics
from bench.replay import COLUMNS, PAST, TEST, Count, Material, Recording, contestants, measure
from bench.report import Record, now, show_rows
from engine.backends.base import Tokenizer
from engine.constraint import Constraint
from engine.errors import SettingError
from engine.models.loaders import name_of
from engine.models.loaders import tokenizer as load_tokenizer
from engine.settings import AnswerFormat
from engine.types import Message

PROMPT = "prompt"
CONTEXT = 3
"""The fewest unchanged lines around a change that are repeated with it."""
SEARCHED = 2000
"""The most commits that are searched for edits, the newest ones."""
LOCK_FILES = ("*.lock", "*package-lock.json", "*pnpm-lock.yaml", "*go.sum")
SCHEMA = Path(__file__).parent / "commit.json"
FILES = 4
"""The most files of a commit that are extracted."""
FIXES = ("fix", "mend", "correct", "repair")


def repository_options(add: Add) -> None:
    add("repository", help="the folder of a git repository")
    add("--vocabulary", default=str(EMBEDDED), help="GGUF or tokenizer folder")


def prepared(options: argparse.Namespace, stack: ExitStack) -> tuple[Tokenizer, Material]:
    """The tokenizer, and the material without its tasks."""
    tokenizer = load_tokenizer(options.vocabulary)
    table = own_statistics(tokenizer.info.tokenizer_fingerprint, stack)
    return tokenizer, Material((), tokenizer.info.vocabulary_size, table)


def described(options: argparse.Namespace) -> Record:
    return {
        "date": now(),
        "repository": Path(options.repository).resolve().name,
        "vocabulary": name_of(options.vocabulary),
    }


def show_formats(formats: Iterable[tuple[str, Mapping[str, Record]]]) -> None:
    rows = [
        {"format": name, "title": title, **figures}
        for name, methods in formats
        for title, figures in methods.items()
    ]
    show_rows(rows, {"format": "{format}", **COLUMNS})


def figures_of(results: Mapping[str, Count]) -> Record:
    return {title: each.figures() for title, each in results.items()}


def recorded(tokenizer: Tokenizer, name: str, prompt: str, answer: str) -> Recording:
    asked = tokenizer.tokenize(tokenizer.render([Message("user", prompt)]))
    tokens = [*tokens_of(tokenizer, answer), min(tokenizer.info.eos_ids)]
    return Recording(name, TEST, asked, tokens)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text in which nothing is a special token."""
    return tokenizer.tokenize(tokenizer.special.literal(text))


# git


def git(repository: str, *command: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", repository, *command], capture_output=True, check=True)
    except subprocess.CalledProcessError as error:
        raise SettingError(
            f"No git repository can be read in {repository!r} "
            f"({error.stderr.decode(errors='replace').strip()}). Give the folder of one."
        ) from error
    except OSError as error:
        raise SettingError(f"git cannot be started ({error}). Install it.") from error
    return done.stdout


Numbers = dict[str, tuple[int, int]]
"""The lines that a commit adds to and deletes from its text files, by their paths."""


def log(repository: str, *command: str) -> Iterator[tuple[list[str], Numbers]]:
    """Three fields of each commit, as the command has them in its format, and what it changes; the
    newest commit first. Commits that are not UTF-8 are left out."""
    for entry in git(repository, "log", "--numstat", "-z", *command).split(b"\x01")[1:]:
        with suppress(UnicodeDecodeError):
            parts = entry.decode().split("\0")
            numbers: Numbers = {}
            for line in parts[3:]:
                added, _, rest = line.strip("\n").partition("\t")
                deleted, _, path = rest.partition("\t")
                if added.isdecimal() and path:
                    numbers[path] = int(added), int(deleted)
            yield parts[:3], numbers


# edits


class Edits(Measurement):
    """Tokens per forward on edits: the commits of a git repository, as a model would write them."""

    groups = ("replay",)

    def add_options(self, add: Add) -> None:
        repository_options(add)
        add("--old", choices=(PROMPT, PAST), default=PROMPT, help="where the old file stands")
        add("--limit", type=at_least(1), default=16, help="commits in all")
        add("--skip", type=at_least(0), default=0, help="leave out the newest N of them")
        add("--tokens", type=at_least(1), nargs=2, default=(400, 4000), help="least and most")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        tokenizer, nothing = prepared(options, stack)
        edits = chosen(options, tokenizer)
        formats = {}
        for name, form in FORMATS.items():
            tasks = list(edit_tasks(edits, form, options.old == PAST, tokenizer))
            entries = contestants(options.nodes, options.peers)
            formats[name] = {
                "tokens": sum(len(task.answer) for task in tasks if task.split == TEST),
                "methods": figures_of(measure(replace(nothing, test=tasks), entries)),
            }
        return described(options) | {
            "old": options.old,
            "commits": len(edits),
            "newest": edits[-1].commit[:12],
            "formats": formats,
        }

    def show(self, record: Record) -> None:
        place = "in the prompt" if record["old"] == PROMPT else "in an earlier conversation"
        print(
            f"{record['repository']}: {record['commits']} commits up to {record['newest']}, "
            f"the old file {place}\n"
        )
        show_formats((name, each["methods"]) for name, each in record["formats"].items())


@dataclass(frozen=True, slots=True)
class Edit:
    """A commit's largest change: the text of a file before and after."""

    commit: str
    subject: str
    path: str
    old: str
    new: str


def chosen(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Edit]:
    """The edits to replay, oldest first, one for each file: answers to others would tell what is in
    it. Raises SettingError if there is none."""
    least, most = options.tokens
    found: dict[str, Edit] = {}
    for edit in edits_in(options.repository):
        if all(least <= len(tokens_of(tokenizer, text)) <= most for text in (edit.old, edit.new)):
            found.setdefault(edit.path, edit)
        if len(found) == options.skip + options.limit:
            break
    edits = list(found.values())[options.skip :]
    if not edits:
        raise SettingError(
            f"In {options.repository!r} no edit is left among the newest {SEARCHED} commits, after "
            f"{options.skip} are skipped: an edit is a commit that changes a text file of {least} "
            f"to {most} tokens. Choose other --tokens, a smaller --skip or another repository."
        )
    return edits[::-1]


def edits_in(repository: str) -> Iterator[Edit]:
    commits = log(
        *(repository, f"-{SEARCHED}", "--format=%x01%H%x00%P%x00%s", "--diff-filter=M"),
        *("--ignore-submodules", "--no-show-signature"),
        *("--", ".", *(f":!{name}" for name in LOCK_FILES)),
    )
    for (commit, _, subject), numbers in commits:
        path = max(numbers, key=lambda path: sum(numbers[path]), default="")
        if sum(numbers.get(path, ())):
            versions = (f"{commit}^:{path}", f"{commit}:{path}")
            with suppress(UnicodeDecodeError):
                old, new = (git(repository, "cat-file", "blob", each).decode() for each in versions)
                yield Edit(commit, subject, path, old, new)


def passages(edit: Edit, context: int) -> list[tuple[str, str]]:
    old, new = (text.splitlines(keepends=True) for text in (edit.old, edit.new))
    groups = SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context)
    return [
        ("".join(old[group[0][1] : group[-1][2]]), "".join(new[group[0][3] : group[-1][4]]))
        for group in groups
    ]


def changes(edit: Edit) -> list[tuple[str, str]]:
    """The passages that change, with enough context that each occurs only once in the old file."""
    text, wider = edit.old, (passages(edit, context) for context in count(CONTEXT))
    return next(found for found in wider if all(text.find(o) == text.rfind(o) for o, _ in found))


def search_replace(edit: Edit) -> str:
    return "\n".join(
        f"{edit.path}\n<<<<<<< SEARCH\n{ended(old)}=======\n{ended(new)}>>>>>>> REPLACE\n"
        for old, new in changes(edit)
    )


def tool_calls(edit: Edit) -> str:
    calls = [
        {"path": edit.path, "old_string": old, "new_string": new} for old, new in changes(edit)
    ]
    return json.dumps(calls, ensure_ascii=False)


def ended(lines: str) -> str:
    return lines if lines.endswith("\n") else f"{lines}\n"


Format = tuple[str, Callable[[Edit], str]]
"""How an answer is asked for, and how it is written."""
FORMATS: Mapping[str, Format] = {
    "whole file": ("Write the whole new file.", lambda edit: edit.new),
    "search-replace": ("Write search/replace blocks.", search_replace),
    "tool calls": ("Call the tool `edit` with path, old_string and new_string.", tool_calls),
}


def edit_tasks(
    edits: Sequence[Edit], form: Format, past: bool, tokenizer: Tokenizer
) -> Iterator[Recording]:
    """The tasks in one format, each after the conversation in which the old file was written, if
    that is where it stands."""
    instruction, answer = form
    for edit in edits:
        task = f"{edit.subject}\n\nChange {edit.path}. {instruction}"
        if past:
            written = recorded(tokenizer, edit.commit, f"Write {edit.path}.", edit.old)
            yield replace(written, split=PAST)
        else:
            task += f"\n\n{edit.old}"
        yield recorded(tokenizer, edit.commit, task, answer(edit))


# extraction


class Extract(Measurement):
    """Tokens per forward on JSON: the commits of a git repository, extracted under a schema."""

    groups = ("replay",)

    def add_options(self, add: Add) -> None:
        repository_options(add)
        add("--limit", type=at_least(2), default=40, help="commits in all")
        add("--warm", type=at_least(1), default=20, help="how many of them are only learned")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        if options.warm >= options.limit:
            raise SettingError(
                f"Of {options.limit} commits {options.warm} cannot be only learned. Give a smaller "
                "--warm, or a larger --limit."
            )
        tokenizer, nothing = prepared(options, stack)
        plain = list(extract_tasks(options.repository, options.limit, tokenizer))
        form = AnswerFormat("json_schema", SCHEMA.read_text(encoding="utf-8"))
        bound = [replace(each, constraint=partial(Constraint, tokenizer, form)) for each in plain]
        entries = list(contestants(options.nodes, peers=False))
        formats = {}
        for name, tasks in (("none", plain), ("schema", bound)):
            cold: dict[str, Count] = {}
            for task in tasks:
                measure(replace(nothing, test=[task]), entries, cold)
            past = [replace(each, split=PAST) for each in tasks[: options.warm]]
            warm = measure(replace(nothing, test=[*past, *tasks[options.warm :]]), entries)
            formats[f"{name}, first answer"] = figures_of(cold)
            formats[f"{name}, later answers"] = figures_of(warm)
        return described(options) | {
            "commits": len(plain),
            "learned": options.warm,
            "tokens": sum(len(task.answer) for task in plain),
            "formats": formats,
        }

    def show(self, record: Record) -> None:
        mean = record["tokens"] / record["commits"]
        print(f"{record['repository']}: {record['commits']} commits, {mean:.0f} tokens each\n")
        show_formats(record["formats"].items())


def extract_tasks(repository: str, limit: int, tokenizer: Tokenizer) -> Iterator[Recording]:
    """The tasks of the newest commits, oldest first. Raises SettingError if there are too few."""
    found = list(commits(repository))[:limit]
    if len(found) < limit:
        raise SettingError(
            f"{repository!r} has {len(found)} commits that change text files, and {limit} are "
            "needed. Choose a smaller --limit or another repository."
        )
    for prompt, answer in reversed(found):
        text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        yield recorded(tokenizer, answer["subject"], prompt, text)


def commits(repository: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What git prints of each commit, and what is extracted from it, the newest first."""
    for (author, date, subject), numbers in log(
        repository, "--no-merges", "--format=%x01%an%x00%as%x00%s"
    ):
        files = [
            {"path": path, "added": added, "deleted": deleted}
            for path, (added, deleted) in [*numbers.items()][:FILES]
        ]
        if files:
            counts = "\n".join("{added}\t{deleted}\t{path}".format(**file) for file in files)
            text = f"Author: {author}\nDate: {date}\n\n    {subject}\n\n{counts}"
            answer = {
                "author": author,
                "date": date,
                "subject": subject,
                "kind": kind_of(subject, files),
                "files": files,
                "breaking": "!" in subject,
            }
            yield f"Extract this commit as JSON.\n\n{text}", answer


def kind_of(subject: str, files: Sequence[dict[str, Any]]) -> str:
    if all(file["path"].endswith(".md") for file in files):
        return "documentation"
    return "fix" if any(word in subject.lower() for word in FIXES) else "feature"
