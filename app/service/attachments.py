"""Files that go with a message: read once, as text, and written into the message itself, as a block
before the user's text. The model reads them like any other text:

    Attached file: notes.md
    ```md
    text of the file
    ```

    text of the user

The fence is longer than any run of backticks in the file, so `split` finds the end of every block,
and `join` and `split` are inverse to each other. Nothing else of a file is stored, so exports and
copies keep it. A text to rewrite (app/service/rewriting.py) has REWRITE in place of LABEL.

If a text does not state its encoding, the encoding is guessed (encodings.py), and the guess is
shown. A file in another format is refused, and the message names the format. PDF files are read in
the calling thread, within a time limit that is checked at every drawing command.
"""

import io
import re
import secrets
import threading
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from app.service import encodings
from app.service.pages import LimitedDict
from engine.errors import PromptError, first_line
from engine.text import well_formed

MAX_BYTES = 20 * 2**20
MAX_CHARACTERS = 1_000_000
"""The most characters of a file or a typed message, about 250,000 tokens. Few models read more, and
the page has to load them."""
MAX_PENDING = 4 * MAX_CHARACTERS
"""The most characters of one owner's files that wait to be sent."""
OWNERS = 32
"""The most owners whose files are kept, as browsers may leave without sending them."""
MAX_NAME = 100
LABEL = "Attached file: "
REWRITE = "Rewrite this text, and answer with the whole new text alone: "
HEAD = re.compile(rf"({LABEL}|{REWRITE})([^\n]+)\n(`{{3,}})[\w+-]*\n")
SUITABLE = "Attach text, Markdown, code, CSV, JSON, or a PDF file that holds text."
BEGINNING = 1024
"""The bytes in which the signature of a format is searched."""
SAVE = "Save it as PDF or as text, and attach that."
UNPACK = "Unpack it, and attach its files."
BEFORE = rb"\A[\s\x00-\x1f\xef\xbb\xbf\xfe\xff]{0,64}"
PK = rb"PK\x03\x04"
FORMATS = tuple(
    (re.compile(pattern, re.DOTALL), what, advice)
    for pattern, what, advice in (
        (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*", "a picture", SUITABLE),
        (PK + rb".*word/", "a Word document", SAVE),
        (PK + rb".*xl/", "an Excel table", SAVE),
        (PK + rb".*ppt/", "a PowerPoint presentation", SAVE),
        (PK + rb".*opendocument", "an OpenDocument file", SAVE),
        (PK + rb".*epub", "an e-book", SAVE),
        (PK + rb"|\x1f\x8b\x08|7z\xbc\xaf|Rar!\x1a|BZh\d1AY|\xfd7zXZ\0", "an archive", UNPACK),
        (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an older Office program", SAVE),
        (BEFORE + rb"\{\\rtf\d", "a document in Rich Text Format", SAVE),
        (BEFORE + rb"%!PS", "a PostScript document", SAVE),
        (rb"ID3[\x02-\x04]|OggS\0|fLaC\0|RIFF....WAVE|\0\0\0.ftyp", "sound or a film", SUITABLE),
        (rb"SQLite format 3\0", "a database", SUITABLE),
        (rb"\x7fELF|\AMZ.{0,64}\0", "a program", SUITABLE),
    )
)
"""How files begin that are not text, and what they are."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file as the model reads it, to be rewritten or not. `note` says what was guessed about
    it."""

    name: str
    text: str
    note: str = field(default="", compare=False)
    rewrite: bool = False

    @property
    def block(self) -> str:
        rows = re.findall(r"`{3,}", self.text)
        fence = "`" * max((len(row) + 1 for row in rows), default=3)
        kind = PurePath(self.name).suffix[1:].lower()
        language = "" if kind == "pdf" else re.sub(r"[^a-z0-9+-]", "", kind)
        label = REWRITE if self.rewrite else LABEL
        return f"{label}{self.name}\n{fence}{language}\n{self.text}\n{fence}"


@dataclass(frozen=True, slots=True)
class Pending:
    """A file that waits to be sent, and the key by which a page names it; `size` in bytes."""

    key: str
    file: Attachment
    size: int


def join(files: Sequence[Attachment], text: str) -> str:
    return "\n\n".join([*(file.block for file in files), *([text] if text.strip() else [])])


def split(content: str) -> tuple[list[Attachment], str]:
    """The files of a message, and the text that was written with them."""
    files: list[Attachment] = []
    at = 0
    while head := HEAD.match(content, at):
        end = re.compile(rf"\n{head[3]}(?:\n\n|\Z)").search(content, head.end())
        if end is None:
            break
        text = content[head.end() : end.start()]
        files.append(Attachment(head[2], text, rewrite=head[1] == REWRITE))
        at = end.end()
    return files, content[at:]


def without_files(content: str) -> str:
    """The text of a message without its files, or their names if there is no text; for titles."""
    files, text = split(content)
    return text if text.strip() else ", ".join(file.name for file in files)


def read(name: str, content: bytes) -> Attachment:
    """Read the text of a file. Raises PromptError if it cannot be read."""
    # One short line, without folders and invisible characters.
    last = re.split(r"[\\/]", name)[-1]
    seen = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in last)
    name = " ".join(seen.split())[:MAX_NAME].strip() or "file"
    if len(content) > MAX_BYTES:
        raise PromptError(
            f"{name} has {len(content):,} bytes, and at most {MAX_BYTES:,} can be attached. "
            "Attach a part of it."
        )
    note, pdf = "", re.search(rb"%PDF-\d", content[:BEGINNING])
    if pdf and (not content[: pdf.start()].strip() or b"endobj" in content):
        text = pdf_text(name, content)
    else:
        text, note = decoded(name, content)
    text = well_formed(text)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").strip("\n")
    if not text.strip():
        raise PromptError(f"{name} is empty. There is nothing in it to attach.")
    if len(text) > MAX_CHARACTERS:
        raise PromptError(
            f"{name} has {len(text):,} characters, and at most {MAX_CHARACTERS:,} can be attached. "
            "Attach a part of it."
        )
    return Attachment(name, text, note)


def decoded(name: str, content: bytes) -> tuple[str, str]:
    """Bytes as text, and what was guessed for that. Raises PromptError for what is no text."""
    ends = content[:BEGINNING] + content[-BEGINNING:]
    for signature, what, advice in FORMATS:
        if signature.search(ends):
            raise PromptError(f"{name} is not text: it is {what}. {advice}")
    found = encodings.decode(content)
    if found is None:
        raise PromptError(
            f"{name} is not text, or its encoding cannot be recognised. {SUITABLE} Text can be "
            "saved as UTF-8 in any editor."
        )
    notes = [f"read as {found.guess}, a guess"] if found.guess else []
    if found.bad:
        notes.append(f"unreadable places, now \ufffd: {found.bad:,}")
    return found.text, ", ".join(notes)


class Attachments:
    """The files that wait to be sent, in memory, by owner."""

    def __init__(self) -> None:
        self.waiting: LimitedDict[str, dict[str, Pending]] = LimitedDict(OWNERS)
        self.lock = threading.Lock()

    def add(self, owner: str, files: Sequence[Attachment]) -> list[Pending]:
        """Keep files for a later message. If there are too many, the oldest are dropped."""
        added = [
            Pending(secrets.token_urlsafe(9), file, len(file.text.encode("utf-8", "replace")))
            for file in files
        ]
        with self.lock:
            kept = {**self.waiting.get(owner, {}), **{each.key: each for each in added}}
            while (
                len(kept) > len(added)
                and sum(len(each.file.text) for each in kept.values()) > MAX_PENDING
            ):
                del kept[next(iter(kept))]
            self.waiting[owner] = kept
        return added

    def message(self, owner: str, keys: Sequence[str], text: str) -> str:
        """A message of files and a text. Raises PromptError if the text is too long or a file is no
        longer kept."""
        if len(text) > MAX_CHARACTERS:
            raise PromptError(
                f"The message has {len(text):,} characters, and at most {MAX_CHARACTERS:,} can be "
                "sent. Shorten it."
            )
        with self.lock:
            kept = self.waiting.get(owner, {})
            found = [kept.get(key) for key in keys]
        files = [each.file for each in found if each]
        if len(files) < len(found):
            raise PromptError(
                "An attached file is no longer available: the program was restarted, or newer "
                "files replaced it. Remove it and attach it again."
            )
        return join(files, text)

    def drop(self, owner: str, keys: Sequence[str]) -> None:
        with self.lock:
            kept = self.waiting.get(owner, {})
            for key in keys:
                kept.pop(key, None)


SECONDS = 20.0
MAX_PAGES = 3_000


class TooLong(Exception):
    """Reading took longer than its time limit."""


def pdf_text(name: str, content: bytes, seconds: float = SECONDS) -> str:
    """The text of all pages. Raises PromptError for a file that is encrypted, damaged, too long, or
    holds only pictures."""
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    end = time.monotonic() + seconds
    encrypted = PromptError(
        f"{name} is encrypted. Save it without a password, and attach that file."
    )

    def in_time(*_: object) -> None:
        if time.monotonic() > end:
            raise TooLong

    pages: list[str] = []
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise encrypted
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise PromptError(
                f"{name} has {count:,} pages, and at most {MAX_PAGES:,} can be read. Attach a part."
            )
        for page in reader.pages:
            in_time()
            pages.append(page.extract_text(visitor_operand_before=in_time).strip())
    except PromptError:
        raise
    except TooLong:
        raise PromptError(
            f"Reading {name} took more than {seconds:.0f} seconds: {len(pages):,} pages were read "
            "by then. Attach a part of it, or its text."
        ) from None
    except Exception as error:
        # For a damaged file pypdf may raise almost any error, even RecursionError.
        if "cryptography" in str(error):
            raise encrypted from error
        kind = "damaged" if isinstance(error, PyPdfError) else "damaged, or of an unknown kind"
        raise PromptError(
            f"{name} cannot be read as PDF: it is {kind} ({first_line(error)}). Open it elsewhere "
            "and attach its text."
        ) from error
    if not any(pages):
        raise PromptError(
            f"{name} holds no text: its {len(pages):,} pages are pictures. Have the text "
            "recognised (OCR) elsewhere, and attach that."
        )
    return "\n\n".join(page for page in pages if page)
