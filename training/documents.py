"""The texts that a model is trained on: chats and prose in JSON lines, xz-compressed or not.

What is held out depends on how a document begins, and on nothing else: documents that begin alike
fall on the same side, whatever else is read beside them and in whatever order.
"""

import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import SettingError

HELD = 0.01
"""The part of the documents that no model is trained on."""
BEGINNING = 200
ROLES = {"system", "user", "assistant"}


@dataclass(frozen=True, slots=True)
class Document:
    """A chat of `messages`, or a `text` of prose; `source` says where it comes from."""

    source: str
    messages: tuple[dict[str, str], ...] = ()
    text: str = ""

    @property
    def parts(self) -> list[str]:
        """What somebody wrote, without what a chat template adds."""
        return [message["content"].strip() for message in self.messages] or [self.text]

    @property
    def size(self) -> int:
        """Bytes of that."""
        return sum(len(part.encode()) for part in self.parts)

    @property
    def record(self) -> dict[str, Any]:
        """The line of a file that it is read from."""
        if self.messages:
            return {"source": self.source, "messages": list(self.messages)}
        return {"source": self.source, "text": self.text}

    def chance(self, salt: str) -> float:
        """A number from 0 to 1 that depends on the beginning alone."""
        digest = sha256((salt + self.parts[0][:BEGINNING]).encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    @property
    def held(self) -> bool:
        """Whether it is kept from training, to be measured on."""
        return self.chance("held") < HELD


def read(paths: Iterable[Path], sample: float = 1.0) -> Iterator[Document]:
    """All documents of some files, or a part of them. Raises SettingError."""
    for path in paths:
        try:
            opener = lzma.open if path.suffix == ".xz" else open
            with opener(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    document = parsed(line, path, number)
                    if document.chance("sample") < sample:
                        yield document
        except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise SettingError(f"The texts in {str(path)!r} cannot be read: {error}.") from error


def parsed(line: str, path: Path, number: int) -> Document:
    """The document in one line. Raises SettingError."""
    try:
        record: dict[str, Any] = json.loads(line)
        if "text" in record:
            document = Document(str(record["source"]), text=str(record["text"]))
        else:
            messages = tuple(
                {"role": str(message["role"]), "content": str(message["content"])}
                for message in record["messages"]
            )
            document = Document(str(record["source"]), messages)
        known = {message["role"] for message in document.messages} <= ROLES
        if not known or not any(document.parts):
            raise ValueError("no text, or a role that is not system, user or assistant")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(
            f"Line {number:,} of {str(path)!r} is no document ({error}). Each must be a JSON "
            'object with "source" and either "messages", each with "role" and "content", or '
            '"text".'
        ) from error
    return document
