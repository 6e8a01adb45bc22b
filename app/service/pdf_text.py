"""The text of a PDF file, within a time.

Reading is done in the thread that asks, and a page's drawing commands call back: so one page that
never ends ends as well. pypdf itself limits what a file may unpack.
"""

import io
import time

from engine.errors import PromptError, first_line

SECONDS = 20.0
MAX_PAGES = 3_000


class TooLong(Exception):
    """The time is over."""


def pdf_text(name: str, content: bytes, seconds: float = SECONDS) -> str:
    """The text of all pages. Raises PromptError for a file that is encrypted, damaged, too long, or
    holds pictures alone."""
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    end = time.monotonic() + seconds

    def in_time(*_: object) -> None:
        if time.monotonic() > end:
            raise TooLong

    pages: list[str] = []
    try:
        reader = PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise PromptError(
                f"{name} is encrypted. Save it without a password, and attach that file."
            )
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
        # A damaged file makes pypdf raise almost anything, RecursionError among it.
        if "cryptography" in str(error):
            raise PromptError(
                f"{name} is encrypted. Save it without a password, and attach that file."
            ) from error
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
