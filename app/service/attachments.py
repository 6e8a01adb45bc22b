"""Files that go with a message: read once, as text, and written into the message itself.

A message with files begins with a block for each of them, which the model reads like any other
text:

    Attached file: notes.md
    ```md
    what is in the file
    ```

    what the user said

The fence has more backticks than any row of them in the file, so `split` finds the end of every
block, and `join` and `split` undo each other. Nothing else is stored of a file: exports, copies and
other programs keep it with the message.
"""

import re
import secrets
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from app.service.latest import Latest
from app.service.pdf_text import pdf_text
from engine.errors import PromptError

MAX_BYTES = 20 * 2**20
MAX_CHARACTERS = 1_000_000
"""Of one file: about 250,000 tokens. Few models read more, and a page has to carry it."""
MAX_PENDING = 4 * MAX_CHARACTERS
"""Characters of one owner's files that wait to be sent."""
OWNERS = 32
"""Whose files are kept: a browser that leaves without sending says nothing."""
MAX_NAME = 100
LABEL = "Attached file: "
HEAD = re.compile(rf"{LABEL}([^\n]+)\n(`{{3,}})([\w+-]*)\n")
CONTROLS = 0.02
"""A file with a larger share of control characters is not text."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file as the model reads it."""

    name: str
    text: str

    @property
    def block(self) -> str:
        """How it stands in a message."""
        rows = re.findall(r"`{3,}", self.text)
        fence = "`" * max((len(row) + 1 for row in rows), default=3)
        kind = PurePath(self.name).suffix[1:].lower()
        language = "" if kind == "pdf" else re.sub(r"[^a-z0-9+-]", "", kind)
        return f"{LABEL}{self.name}\n{fence}{language}\n{self.text}\n{fence}"


@dataclass(frozen=True, slots=True)
class Pending:
    """A file that waits to be sent, and the key by which a page names it."""

    key: str
    file: Attachment
    size: int


def join(files: Sequence[Attachment], text: str) -> str:
    """A message of files and what was said with them."""
    return "\n\n".join([*(file.block for file in files), *([text] if text.strip() else [])])


def split(content: str) -> tuple[list[Attachment], str]:
    """The files of a message, and what was said with them."""
    files: list[Attachment] = []
    at = 0
    while head := HEAD.match(content, at):
        end = re.compile(rf"\n{head[2]}(?:\n\n|\Z)").search(content, head.end())
        if end is None:
            break
        files.append(Attachment(head[1], content[head.end() : end.start()]))
        at = end.end()
    return files, content[at:]


def said(content: str) -> str:
    """What a message says beside its files, or else their names: its words in a list."""
    files, text = split(content)
    return text if text.strip() else ", ".join(file.name for file in files)


def read(name: str, content: bytes) -> Attachment:
    """The text of a file. Raises PromptError, in words, for what cannot be read."""
    name = clean_name(name)
    if len(content) > MAX_BYTES:
        raise PromptError(
            f"{name} has {len(content):,} bytes, and at most {MAX_BYTES:,} can be attached. "
            "Attach a part of it."
        )
    reader = pdf_text if content[:1024].lstrip().startswith(b"%PDF-") else decoded
    text = reader(name, content)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").strip("\n")
    if not text.strip():
        raise PromptError(f"{name} is empty. There is nothing in it to attach.")
    if len(text) > MAX_CHARACTERS:
        raise PromptError(
            f"{name} has {len(text):,} characters, and at most {MAX_CHARACTERS:,} can be attached. "
            "Attach a part of it."
        )
    return Attachment(name, text)


def clean_name(name: str) -> str:
    """A file's name as one short line, without folders and what cannot be seen."""
    last = re.split(r"[\\/]", name)[-1]
    seen = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in last)
    return " ".join(seen.split())[:MAX_NAME].strip() or "file"


def decoded(name: str, content: bytes) -> str:
    """Bytes as text, in the encoding that they say or show."""
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16",) if wide else ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError:
            continue
        odd = sum(unicodedata.category(c) == "Cc" and c not in "\t\n\r\f" for c in text[:65536])
        if "\0" not in text and odd <= CONTROLS * min(len(text), 65536):
            return text
    raise PromptError(
        f"{name} is not text. Attach text, Markdown, code, CSV, JSON, or a PDF file that holds "
        "text."
    )


class Attachments:
    """The files that wait to be sent, in memory, by their owners."""

    def __init__(self) -> None:
        self.waiting: Latest[str, dict[str, Pending]] = Latest(OWNERS)
        self.lock = threading.Lock()

    def add(self, owner: str, files: Sequence[Attachment]) -> list[Pending]:
        """Keep files for a message to come. The oldest go where there are too many."""
        added = [
            Pending(secrets.token_urlsafe(9), file, len(file.text.encode("utf-8", "replace")))
            for file in files
        ]
        with self.lock:
            kept = {**self.waiting.get(owner, {}), **{each.key: each for each in added}}
            while len(kept) > len(added) and sum(map(length, kept.values())) > MAX_PENDING:
                del kept[next(iter(kept))]
            self.waiting[owner] = kept
        return added

    def message(self, owner: str, keys: Sequence[str], text: str) -> str:
        """The message that files and a text make. Raises PromptError where a file is gone."""
        with self.lock:
            kept = self.waiting.get(owner, {})
            found = [kept.get(key) for key in keys]
        there = [each.file for each in found if each]
        if len(there) < len(found):
            raise PromptError(
                "An attached file is no longer there: the program was started again, or others "
                "took its place. Remove it and attach it again."
            )
        return join(there, text)

    def drop(self, owner: str, keys: Sequence[str]) -> None:
        """Forget files that were sent or removed."""
        with self.lock:
            kept = self.waiting.get(owner, {})
            for key in keys:
                kept.pop(key, None)


def length(pending: Pending) -> int:
    """Characters of a file that waits."""
    return len(pending.file.text)
