"""Conversations as files that leave the program: one of them, or all of an owner's in one file.

What is sent is made part by part, so that thousands of conversations need the memory of one.
"""

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from app.service.downloads import Download
from app.service.markdown_export import markdown
from engine.errors import StorageError
from storage.conversations import Conversations

LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Format:
    """How a conversation is written. All of them go into one list where that `lists`, else each
    into a file of an archive."""

    suffix: str
    kind: str
    text: Callable[[Conversations, str], str]
    lists: bool = False


def as_json(store: Conversations, id: str) -> str:
    """A conversation with all its versions and tokens, to be imported again."""
    return json.dumps(store.export(id), indent=1)


def as_markdown(store: Conversations, id: str) -> str:
    """What is shown of a conversation, as a Markdown document."""
    return markdown(store.get(id), store.messages(id, pieces=False))


JSON = Format("json", "application/json", as_json, lists=True)
MARKDOWN = Format("md", "text/markdown", as_markdown)


def one(store: Conversations, id: str, format: Format) -> Download:
    """One conversation. Raises StorageError where there is none of that id."""
    text = format.text(store, id).encode("utf-8", "replace")
    name = f"{named(store.get(id).title)}.{format.suffix}"
    return Download(name, format.kind, lambda: iter([text]))


def every(store: Conversations, format: Format) -> Download:
    """All conversations, the newest first. One that is deleted meanwhile is left out."""
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
    """JSON values as one list."""
    before = "[\n"
    for _, text in texts:
        yield f"{before}{text}".encode("utf-8", "replace")
        before = ",\n"
    yield b"[]" if before == "[\n" else b"\n]\n"


class Sent(io.RawIOBase):
    """What was written and is yet to be sent; nothing of it can be looked at again."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are all that come
        """Take in what is to be sent."""
        self.waiting += data
        return len(data)

    def take(self) -> bytes:
        """What was written since the last time."""
        taken = bytes(self.waiting)
        self.waiting.clear()
        return taken


def archived(texts: Iterator[tuple[str, str]], suffix: str) -> Iterator[bytes]:
    """A ZIP archive with a file for each text."""
    sent = Sent()
    with zipfile.ZipFile(sent, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (title, text) in enumerate(texts, 1):
            # The number keeps the order, and apart what is called the same.
            name = f"{number:04} {named(title)}.{suffix}"
            archive.writestr(name, text.encode("utf-8", "replace"))
            yield sent.take()
    yield sent.take()


def named(title: str) -> str:
    """A title as the name of a file, on any system."""
    bare = " ".join(re.sub(r"[^\w\s.,()'-]", " ", title).split())
    return bare[:LONGEST_NAME].strip(" .") or "conversation"
