"""Exports to files: conversations, runs and their steps.

Conversations are written one by one while they are sent, so that thousands of them need the memory
of one. A spreadsheet runs a cell that begins like a formula, so in CSV an apostrophe precedes any
such text, and everything that could begin a cell where lines are split at semicolons or tabs. Our
own ids, and all JSON, are exact.
"""

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TypeVar

from app.service.pages import Download
from app.service.why import guesses_of
from engine.errors import StorageError
from engine.types import TIERS, Run, Step
from storage.conversations import Conversation, Conversations, StoredMessage
from storage.traces import Trace

T = TypeVar("T")
SPEAKERS = {"user": "You", "assistant": "Answer", "system": "Instructions", "tool": "Tool"}


def markdown(conversation: Conversation, messages: Sequence[StoredMessage]) -> str:
    """The conversation as Markdown."""
    texts = [(message.role, message.content) for message in messages]
    if conversation.system_prompt.strip():
        texts.insert(0, ("system", conversation.system_prompt))
    parts = [f"# {' '.join(conversation.title.split())}"]
    for role, text in texts:
        shown = fenced(text) if role == "tool" else closed(text.strip())
        parts.append(f"## {SPEAKERS.get(role, role)}\n\n{shown}")
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """The text as a block of code: whoever reads the file fetches nothing that a tool names."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}\n{text}\n{marks}"


def closed(text: str) -> str:
    """The text, with an unclosed code block closed: otherwise everything after it would be code."""
    opened = ""
    for line in text.splitlines():
        fence = re.match(r" {0,3}(`{3,}|~{3,})(.*)", line)
        if fence is None:
            continue
        marks, rest = fence[1], fence[2]
        if not opened:
            opened = "" if marks[0] == "`" and "`" in rest else marks
        elif marks.startswith(opened) and not rest.strip():
            opened = ""
    return f"{text}\n{opened}" if opened else text


LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Format:
    """A file format for conversations. If it `lists`, all conversations go into one list; otherwise
    each becomes a file of an archive."""

    suffix: str
    kind: str
    text: Callable[[Conversations, str], str]
    lists: bool = False


JSON = Format(
    "json", "application/json", lambda store, id: json.dumps(store.export(id), indent=1), lists=True
)
"""A conversation with all its versions and tokens, to be imported again."""
MARKDOWN = Format(
    "md",
    "text/markdown",
    lambda store, id: markdown(store.get(id), store.messages(id, pieces=False)),
)


def one(store: Conversations, id: str, format: Format) -> Download:
    """One conversation. Raises StorageError if there is none with that id."""
    text = format.text(store, id).encode("utf-8", "replace")
    name = f"{named(store.get(id).title)}.{format.suffix}"
    return Download(name, format.kind, lambda: iter([text]))


def every(store: Conversations, format: Format) -> Download:
    """All conversations, the newest first. One that is deleted in between is left out."""
    found = [(conversation.id, conversation.title) for conversation in store.list()]
    if not found:
        raise StorageError("There is no conversation to export yet. Write something first.")

    def texts() -> Iterator[tuple[str, str]]:
        for id, title in found:
            with suppress(StorageError):
                yield title, format.text(store, id)

    if format.lists:
        name = f"strata-conversations.{format.suffix}"
        return Download(name, format.kind, lambda: in_a_list(texts()))
    name = f"strata-conversations-{format.suffix}.zip"
    return Download(name, "application/zip", lambda: archived(texts(), format.suffix))


def in_a_list(texts: Iterator[tuple[str, str]]) -> Iterator[bytes]:
    before = "[\n"
    for _, text in texts:
        yield f"{before}{text}".encode("utf-8", "replace")
        before = ",\n"
    yield b"[]" if before == "[\n" else b"\n]\n"


class Sent(io.RawIOBase):
    """A file object that sends the bytes written to it and keeps none of them."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are all that come
        self.waiting += data
        return len(data)

    def take(self) -> bytes:
        taken, self.waiting = bytes(self.waiting), bytearray()
        return taken


def archived(texts: Iterator[tuple[str, str]], suffix: str) -> Iterator[bytes]:
    sent = Sent()
    with zipfile.ZipFile(sent, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (title, text) in enumerate(texts, 1):
            # The number keeps the order, and separates equal titles.
            name = f"{number:04} {named(title)}.{suffix}"
            archive.writestr(name, text.encode("utf-8", "replace"))
            yield sent.take()
    yield sent.take()


def named(title: str) -> str:
    bare = " ".join(re.sub(r"[^\w\s.,()'-]", " ", title).split())
    return bare[:LONGEST_NAME].strip(" .") or "conversation"


FORMULA = re.compile(
    r"""
    ( ^ | [;\t\n\r\v\f\x85\u2028\u2029] )    # a cell begins, if only in another spreadsheet
    (?= [\s"\x00-\x1f\u200b-\u200f\ufeff]*   # what may be left out before a formula
        [=+\-@\uff1d\uff0b\uff0d\uff20\u2212] )  # its first character, full-width ones included
    """,
    re.VERBOSE,
)
"""Where a formula would begin. What begins with a tab or a line break gets an apostrophe anyway."""
Cell = str | int | float | None
RUNS: dict[str, Callable[[Trace], Cell]] = {
    "run": lambda run: run.id,
    "created": lambda run: datetime.fromtimestamp(run.created, UTC).isoformat(
        timespec="milliseconds"
    ),
    "kind": lambda run: run.kind,
    "conversation": lambda run: run.conversation_id,
    "model": lambda run: harmless(run.model),
    "method": lambda run: harmless(run.method),
    "tokens": lambda run: run.emitted_tokens,
    "steps": lambda run: run.forwards,
    "decode_seconds": lambda run: run.decode_seconds,
    "speedup": lambda run: run.speedup,
    "decode_speedup": lambda run: run.decode_speedup,
    "weights": lambda run: harmless(run.weights),
}
STEPS: dict[str, Callable[[Step], Cell]] = {
    "step": lambda step: step.index,
    "tokens": lambda step: len(step.tokens),
    "text": lambda step: harmless("".join(token.text for token in step.tokens)),
    "depth": lambda step: len(step.by_depth),
    "draft_seconds": lambda step: step.draft_seconds,
    "verify_seconds": lambda step: step.verify_seconds,
    "sample_seconds": lambda step: step.sample_seconds,
    "other_seconds": lambda step: step.other_seconds,
    "plain_seconds": lambda step: step.plain_seconds,
    "beside": lambda step: step.beside,
    "finish": lambda step: step.finish,
}
"""The columns of runs and of steps."""


def runs_csv(runs: Iterable[Trace]) -> str:
    return table(RUNS, runs)


def steps_csv(steps: Sequence[Step]) -> str:
    drafted = {source for step in steps for source in (*step.proposed, *step.accepted)}
    columns = dict(STEPS)
    for source in [*TIERS, *sorted(drafted - {*TIERS})]:
        columns |= counts_of(source)
    return table(columns, steps)


def counts_of(source: str) -> dict[str, Callable[[Step], Cell]]:
    return {
        f"drafted {source}": lambda step: step.proposed.get(source, 0),
        f"accepted {source}": lambda step: step.accepted.get(source, 0),
    }


def run_json(trace: Trace, run: Run) -> str:
    steps = []
    for step in run.steps:
        guesses = guesses_of(step)
        tree = None if guesses is None else [guess._asdict() for guess in guesses]
        steps.append({**asdict(step), "tree": tree})
    return json.dumps({**asdict(trace), **asdict(run), "steps": steps}, indent=1)


def table(columns: Mapping[str, Callable[[T], Cell]], rows: Iterable[T]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([value(row) for value in columns.values()] for row in rows)
    return text.getvalue()


def harmless(text: str) -> str:
    """The text, changed so that no spreadsheet finds a formula in it."""
    escaped = FORMULA.sub(r"\1'", text)
    return f"'{escaped}" if escaped[:1] in ("\t", "\n", "\r") else escaped
