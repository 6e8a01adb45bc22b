"""Extraction: the tokens per forward that drafters would achieve on answers under a JSON schema.

Each commit of a git repository gives one task: its author, date, subject and changed files stand in
the prompt, as git prints them, and the recorded answer is what a perfect model would extract under
the schema in bench/commit.json. The answers are replayed (bench/replay.py) with the schema and
without it: first each with empty databases, as the first answer ever, and then from the oldest to
the newest, where only those after the first `--warm` count.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from assets import ASSETS
from bench.edits import git, tokens_of
from bench.harness import EMBEDDED, Add, Measurement, at_least
from bench.replay import COLUMNS, PAST, TEST, Count, Material, Recording, contestants, measure
from bench.report import Record, now, show_rows
from engine.backends.base import Tokenizer
from engine.constraint import Constraint
from engine.errors import SettingError
from engine.models.loaders import name_of
from engine.models.loaders import tokenizer as load_tokenizer
from engine.settings import AnswerFormat
from engine.types import Message
from storage.statistics import find_table

SCHEMA = Path(__file__).parent / "commit.json"
FILES = 4
"""The most files of a commit that are named."""
FIXES = ("fix", "mend", "correct", "repair")


class Extract(Measurement):
    """Tokens per forward on JSON: the commits of a git repository, extracted under a schema."""

    groups = ("replay",)

    def add_options(self, add: Add) -> None:
        add("repository", help="the folder of a git repository")
        add("--vocabulary", default=str(EMBEDDED), help="GGUF or tokenizer folder")
        add("--limit", type=at_least(2), default=40, help="commits in all")
        add("--warm", type=at_least(1), default=20, help="how many of them are only learned")

    def check(self, options: argparse.Namespace) -> None:
        if options.warm >= options.limit:
            raise SettingError(
                f"Of {options.limit} commits {options.warm} cannot be only learned. Give a smaller "
                "--warm, or a larger --limit."
            )

    def record(self, options: argparse.Namespace) -> Record:
        tokenizer = load_tokenizer(options.vocabulary)
        form = AnswerFormat("json_schema", SCHEMA.read_text(encoding="utf-8"))
        plain = list(recordings(options.repository, options.limit, tokenizer))
        bound = [replace(each, constraint=partial(Constraint, tokenizer, form)) for each in plain]
        results: dict[str, dict[str, Count]] = {}
        with ExitStack() as stack:
            table = find_table(tokenizer.info.tokenizer_fingerprint, ASSETS / "statistics")
            if table is not None:
                stack.callback(table.close)
            for name, tasks in (("none", plain), ("schema", bound)):
                material = Material(tasks, tokenizer.info.vocabulary_size, table)
                entries = list(contestants(options.nodes, peers=False))
                past = [replace(each, split=PAST) for each in tasks[: options.warm]]
                warm = measure(material, [*past, *tasks[options.warm :]], entries)
                cold = {title: Count() for title, *_ in entries}
                for task in tasks:
                    for title, count in measure(material, [task], entries).items():
                        cold[title].add(count)
                results[f"{name}, first answer"], results[f"{name}, later answers"] = cold, warm
        return {
            "date": now(),
            "repository": Path(options.repository).resolve().name,
            "vocabulary": name_of(options.vocabulary),
            "commits": len(plain),
            "learned": options.warm,
            "tokens": sum(len(task.answer) for task in plain),
            "formats": {
                name: {title: count.figures() for title, count in counts.items()}
                for name, counts in results.items()
            },
        }

    def show(self, record: Record) -> None:
        mean = record["tokens"] / record["commits"]
        print(f"{record['repository']}: {record['commits']} commits, {mean:.0f} tokens each\n")
        rows = [
            {"format": name, "title": title, **figures}
            for name, results in record["formats"].items()
            for title, figures in results.items()
        ]
        show_rows(rows, {"format": "{format}", **COLUMNS})


def recordings(repository: str, limit: int, tokenizer: Tokenizer) -> Iterator[Recording]:
    """The tasks of the newest commits, oldest first. Raises SettingError if there are too few."""
    found = list(commits(repository))[:limit]
    if len(found) < limit:
        raise SettingError(
            f"{repository!r} has {len(found)} commits that change text files, and {limit} are "
            "needed. Choose a smaller --limit or another repository."
        )
    for prompt, answer in reversed(found):
        asked = tokenizer.tokenize(tokenizer.render([Message("user", prompt)]))
        said = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
        tokens = [*tokens_of(tokenizer, said), min(tokenizer.info.eos_ids)]
        yield Recording(answer["subject"], TEST, asked, tokens)


def commits(repository: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What git prints of each commit, and what is extracted from it, the newest first."""
    form = "--format=%x01%an%x00%as%x00%s"
    listed = git(repository, "log", "--no-merges", form, "--numstat", "-z")
    for entry in listed.decode(errors="replace").split("\x01")[1:]:
        author, date, subject, *lines = entry.split("\0")
        files = list(changed(lines))[:FILES]
        if files:
            counts = "\n".join("{added}\t{deleted}\t{path}".format(**file) for file in files)
            text = f"Author: {author}\nDate: {date}\n\n    {subject}\n\n{counts}"
            yield (
                f"Extract this commit as JSON.\n\n{text}",
                {
                    "author": author,
                    "date": date,
                    "subject": subject,
                    "kind": kind_of(subject, files),
                    "files": files,
                    "breaking": "!" in subject,
                },
            )


def changed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The text files of a commit, with the numbers of their changed lines."""
    for line in lines:
        added, _, rest = line.strip("\n").partition("\t")
        deleted, _, path = rest.partition("\t")
        if added.isdecimal() and path:
            yield {"path": path, "added": int(added), "deleted": int(deleted)}


def kind_of(subject: str, files: Sequence[dict[str, Any]]) -> str:
    if all(file["path"].endswith(".md") for file in files):
        return "documentation"
    return "fix" if any(word in subject.lower() for word in FIXES) else "feature"
