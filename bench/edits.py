"""Edits: the tokens per forward that drafters would achieve on the commits of a git repository.

Each commit gives one task: to change a file as the commit's subject says. The recorded answer is
what a perfect model would write, in one of three formats: the whole new file, search-and-replace
blocks, or tool calls. The old file is in the prompt, or was an answer in an earlier conversation.

The tasks are replayed (bench/replay.py) from the oldest to the newest, each format with databases
of its own, and every answer is learned afterwards. Each file is edited once. So when a task is
replayed, its old file is known from one place alone, and its new file from nowhere.
"""

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count
from pathlib import Path

from assets import ASSETS
from bench.harness import EMBEDDED, Add, Measurement, at_least
from bench.replay import COLUMNS, PAST, TEST, Material, Recording, contestants, measure
from bench.report import Record, now, show_rows
from engine.backends.base import Tokenizer
from engine.errors import SettingError
from engine.models.loaders import name_of
from engine.models.loaders import tokenizer as load_tokenizer
from engine.types import Message
from storage.statistics import find_table

PROMPT = "prompt"
CONTEXT = 3
"""The fewest unchanged lines around a change that are repeated with it."""
SEARCHED = 2000
"""The most commits that are searched for edits, the newest ones."""
LOCK_FILES = ("*.lock", "*package-lock.json", "*pnpm-lock.yaml", "*go.sum")


class Edits(Measurement):
    """Tokens per forward on edits: the commits of a git repository, as a model would write them."""

    groups = ("replay",)

    def add_options(self, add: Add) -> None:
        add("repository", help="the folder of a git repository")
        add("--vocabulary", default=str(EMBEDDED), help="GGUF or tokenizer folder")
        add("--old", choices=(PROMPT, PAST), default=PROMPT, help="where the old file stands")
        add("--limit", type=at_least(1), default=16, help="commits in all")
        add("--skip", type=at_least(0), default=0, help="leave out the newest N of them")
        add("--tokens", type=at_least(1), nargs=2, default=(400, 4000), help="least and most")

    def record(self, options: argparse.Namespace) -> Record:
        tokenizer = load_tokenizer(options.vocabulary)
        edits = chosen(options, tokenizer)
        with ExitStack() as stack:
            table = find_table(tokenizer.info.tokenizer_fingerprint, ASSETS / "statistics")
            if table is not None:
                stack.callback(table.close)
            formats = {}
            for name, form in FORMATS.items():
                tasks = list(recordings(edits, form, options.old == PAST, tokenizer))
                material = Material(tasks, tokenizer.info.vocabulary_size, table)
                results = measure(material, tasks, contestants(options.nodes, options.peers))
                formats[name] = {
                    "tokens": sum(len(task.answer) for task in tasks if task.split == TEST),
                    "methods": {title: each.figures() for title, each in results.items()},
                }
        return {
            "date": now(),
            "repository": Path(options.repository).resolve().name,
            "vocabulary": name_of(options.vocabulary),
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
        rows = [
            {"format": name, "title": title, **figures}
            for name, results in record["formats"].items()
            for title, figures in results["methods"].items()
        ]
        show_rows(rows, {"format": "{format}", **COLUMNS})


# commits


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
    """The edits of the newest commits, the newest first. Merges have none."""
    listed = git(
        *(repository, "log", f"-{SEARCHED}", "--format=%x01%H%x00%s", "--numstat", "-z"),
        *("--diff-filter=M", "--ignore-submodules", "--no-show-signature"),
        *("--", ".", *(f":!{name}" for name in LOCK_FILES)),
    )
    for entry in listed.split(b"\x01")[1:]:
        with suppress(UnicodeDecodeError):
            commit, subject, *lines = entry.decode().split("\0")
            sizes = {}
            for line in filter(None, (line.strip("\n") for line in lines)):
                added, deleted, path = line.split("\t", 2)
                sizes[path] = 0 if added == "-" else int(added) + int(deleted)  # "-": binary
            path = max(sizes, key=lambda path: sizes[path])
            if sizes[path]:
                versions = (f"{commit}^:{path}", f"{commit}:{path}")
                old, new = (git(repository, "cat-file", "blob", each).decode() for each in versions)
                yield Edit(commit, subject, path, old, new)


def git(repository: str, *command: str) -> bytes:
    """What a git command prints. Raises SettingError if it fails."""
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


# tasks


def passages(edit: Edit, context: int) -> list[tuple[str, str]]:
    """The passages that change, before and after, with `context` lines around each change."""
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


def recordings(
    edits: Sequence[Edit], form: Format, past: bool, tokenizer: Tokenizer
) -> Iterator[Recording]:
    """The tasks in one format, each after the conversation in which the old file was written, if
    that is where it stands."""

    def recording(commit: str, split: str, prompt: str, answer: str) -> Recording:
        asked = tokenizer.tokenize(tokenizer.render([Message("user", prompt)]))
        said = [*tokens_of(tokenizer, answer), min(tokenizer.info.eos_ids)]
        return Recording(commit, split, asked, said)

    instruction, answer = form
    for edit in edits:
        task = f"{edit.subject}\n\nChange {edit.path}. {instruction}"
        if past:
            yield recording(edit.commit, PAST, f"Write {edit.path}.", edit.old)
        else:
            task += f"\n\n{edit.old}"
        yield recording(edit.commit, TEST, task, answer(edit))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text in which nothing is a special token."""
    return tokenizer.tokenize(tokenizer.special.literal(text))
