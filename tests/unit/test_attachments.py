"""Files that go with a message: how they are read, what is refused, how a message holds them."""

import io
import zipfile
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pypdf import PdfReader, PdfWriter

from app.service import attachments
from app.service.attachments import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_PENDING,
    Attachment,
    Attachments,
    join,
    read,
    split,
    without_files,
)
from engine.errors import PromptError
from tests.support import encoded

TEXTS = st.text(st.sampled_from("a`~ \n#:"), min_size=1).filter(lambda text: text.strip("\n"))


def pdf(*pages: str, commands: bytes = b"", characters: bytes = b"") -> bytes:
    """A PDF file with a line of text on each page. `characters` is the font's table of them."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b""]
    table = b"/ToUnicode %d 0 R" % (3 + 2 * len(pages)) if characters else b""
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica%s>>" % table
    kids = []
    for page in pages:
        stream = commands + (b"BT /F1 12 Tf 72 720 Td (%s) Tj ET" % page.encode() if page else b"")
        packed = zlib.compress(stream)
        objects.append(
            b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(packed), packed)
        )
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents %d 0 R"
            b"/Resources<</Font<</F1 %s>>>>>>" % (len(objects), font)
        )
        kids.append(b"%d 0 R" % len(objects))
    if characters:
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(characters), characters))
    objects[1] = b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(kids), b" ".join(kids))
    out, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    end = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(out))
    return out + head + end


def zipped(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as made:
        made.writestr("[Content_Types].xml", "x" * 3000)
        made.writestr(name, "x" * 3000)
    return packed.getvalue()


def test_halves_of_characters_in_a_pdf_file_are_joined_or_replaced() -> None:
    table = b"""1 begincodespacerange <00> <FF> endcodespacerange 3 beginbfchar
<61> <D835>
<62> <DC65>
<63> <DBFF>
endbfchar"""
    assert read("a.pdf", pdf("abc", characters=table)).text == "\U0001d465\ufffd"


def encrypted(content: bytes) -> bytes:
    writer = PdfWriter(PdfReader(io.BytesIO(content)))
    writer.encrypt("secret", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["a.md", "b", "c d.py"]), TEXTS, st.booleans()), max_size=3),
    TEXTS,
)
def test_a_message_of_files_and_words_is_taken_apart_as_it_was_put_together(
    files: list[tuple[str, str, bool]], text: str
) -> None:
    given_ = [Attachment(name, content, rewrite=rewrite) for name, content, rewrite in files]
    assert split(join(given_, text)) == (given_, text if text.strip() else "")


def test_the_model_reads_the_name_before_a_fence_that_nothing_in_the_file_closes() -> None:
    file = Attachment("notes.md", "# Notes\n```py\nx = 1\n```\nend")
    message = join([file], "Sum it up.")
    assert message == (
        "Attached file: notes.md\n````md\n# Notes\n```py\nx = 1\n```\nend\n````\n\nSum it up."
    )


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        "Attached file: x",
        "Attached file: x\n```\nnever closed",
        "a\nAttached file: x\n```\n\n```",
    ],
)
def test_what_is_no_block_of_ours_stays_text(message: str) -> None:
    assert split(message) == ([], message)


def test_the_text_of_a_message_besides_its_files_names_it() -> None:
    file = Attachment("a.txt", "x")
    assert without_files(join([file], "Why?")) == "Why?"
    assert without_files(join([file, file], "")) == "a.txt, a.txt"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a,b\r\n1,2\r\n", "a,b\n1,2"),
        ("\ufeffh\u00e9llo".encode(), "h\u00e9llo"),
        ("h\u00e9llo".encode("utf-16"), "h\u00e9llo"),
        ("h\u00e9llo \u20ac".encode("cp1252"), "h\u00e9llo \u20ac"),
        (b'{"a": [1, 2]}', '{"a": [1, 2]}'),
    ],
)
def test_text_is_read_in_the_encoding_that_it_shows(content: bytes, text: str) -> None:
    assert read("some.csv", content).text == text


@pytest.mark.parametrize(("encoding", "text", "content"), encoded.files())
def test_a_text_is_read_in_the_encoding_that_it_does_not_show(
    encoding: str, text: str, content: bytes
) -> None:
    found = read("some.csv", content)
    assert found.text == text.strip("\n"), found.note
    assert found.note.startswith("read as ") and found.note.endswith(", a guess")


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", '{"a":"' + "x" * 9_000 + ' Müller Straße"}'),
        ("mac_roman", "id;\r" * 3_000 + "für schöne Straßen, Grüße und Öl"),
    ],
)
def test_a_letter_far_from_the_beginning_of_its_line_is_read(encoding: str, text: str) -> None:
    found = read("min.json", text.encode(encoding))
    assert found.text == text.replace("\r", "\n") and "a guess" in found.note


GERMAN = "Grüße aus Köln: schöne Straße, naïve Café. " * 20


@pytest.mark.parametrize(
    ("content", "text", "bad"),
    [
        (GERMAN.encode()[:-3], GERMAN[:-3] + "\ufffd", 1),
        (GERMAN.encode().replace(b"K\xc3\xb6", b"K\xc3", 3), GERMAN.replace("Kö", "K\ufffd", 3), 3),
        ("会议".encode() * 9 + b"\xff", "会议" * 9 + "\ufffd", 1),
        ("会议".encode("gb18030") * 600 + b"\xff\n", "会议" * 600 + "\ufffd", 1),
        ("Grüße \ufffd".encode(), "Grüße \ufffd", 0),
        (GERMAN.encode("utf-16")[:-1], GERMAN[:-1] + "\ufffd", 1),
        ("It’s cut, as we’ll see. ".encode() + b"\xe2\x80", "It’s cut, as we’ll see. \ufffd", 1),
        ("line é\n".encode() + b"bin\xff\n", "line é\nbin\ufffd", 1),
    ],
)
def test_a_few_wrong_bytes_spoil_no_file(content: bytes, text: str, bad: int) -> None:
    found = read("some.txt", content)
    assert found.text == text.strip("\n")
    assert found.note.endswith(f"unreadable places, now \ufffd: {bad}") == bool(bad)


def test_a_file_about_a_format_is_none_of_it() -> None:
    assert read("notes.md", b"A PDF file begins with %PDF-1.7.").text.startswith("A PDF")
    assert read("notes.md", b"It begins with {\\rtf1 and MZ, PK or RIFF").note == ""
    assert read("make.log", b"\x1b[1mmake\x1b(B\x1b[m").note == ""
    assert read("late.pdf", b"a line before it\n" + pdf("Its words.")).text == "Its words."


def test_a_pdf_file_is_read_page_by_page() -> None:
    found = read("paper.pdf", pdf("First page.", "", "Third page."))
    assert found.text == "First page.\n\nThird page."
    assert found.block.startswith("Attached file: paper.pdf\n```\nFirst")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b" \n", "empty.txt is empty"),
        ("cat.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "cat.png is not text: it is a picture"),
        ("cat.txt", b"\n\n\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "it is a picture"),
        ("a.docx", zipped("word/document.xml"), "it is a Word document. Save it as PDF"),
        ("a.xlsx", zipped("xl/workbook.xml"), "it is an Excel table"),
        ("a.zip", zipped("a.txt"), "it is an archive. Unpack it"),
        ("a.txt", b"\xef\xbb\xbf{\\rtf1\\ansi hello}", "it is a document in Rich Text Format"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(900), "older Office program"),
        ("a.ps", b"\n%!PS-Adobe-3.0", "it is a PostScript document"),
        ("a.mp4", b"\0\0\0\x20ftypisom\0", "it is sound or a film"),
        ("odd.txt", bytes(range(128, 256)) * 9, "its encoding cannot be recognised"),
        ("odd.bin", bytes(range(1, 32)) * 9, "odd.bin is not text"),
        ("big.txt", b"a" * (MAX_BYTES + 1), "at most 20,971,520 can be attached"),
        ("long.txt", b"a" * (MAX_CHARACTERS + 1), "at most 1,000,000 can be attached"),
        ("half.pdf", pdf("x")[:150], "half.pdf cannot be read as PDF: it is damaged"),
        ("none.pdf", b"%PDF-1.4\nnothing", "none.pdf cannot be read as PDF"),
        ("scan.pdf", pdf("", ""), "scan.pdf holds no text: its 2 pages are pictures"),
        ("secret.pdf", encrypted(pdf("x")), "secret.pdf is encrypted"),
    ],
)
def test_what_cannot_be_attached_is_reported_in_words(
    name: str, content: bytes, expected: str
) -> None:
    with pytest.raises(PromptError, match=expected):
        read(name, content)


def test_a_pdf_file_that_takes_too_long_is_given_up_within_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(1_000_000))
    monkeypatch.setattr(attachments.time, "monotonic", lambda: next(now))
    slow = pdf("x", commands=b"q Q " * 200)
    with pytest.raises(PromptError, match="slow.pdf took more than 20 seconds: 0 pages"):
        attachments.pdf_text("slow.pdf", slow)
    assert next(now) < 40, "it went on behind its end"


def test_a_pdf_file_of_too_many_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_PAGES", 2)
    with pytest.raises(PromptError, match="3 pages, and at most 2"):
        read("book.pdf", pdf("a", "b", "c"))


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\new\\a.txt", "a.txt"),
        ("a\nAttached file: b", "a Attached file: b"),
        ("\u202egpj.txt", "gpj.txt"),
        ("x" * 300, "x" * 100),
        ("", "file"),
    ],
)
def test_a_name_is_one_short_line(name: str, clean: str) -> None:
    assert read(name, b"text").name == clean


def test_files_wait_for_their_owner_alone_and_are_gone_when_dropped() -> None:
    store = Attachments()
    (mine,) = store.add("me", [Attachment("a.txt", "mine")])
    assert store.message("me", [mine.key], "hi") == join([mine.file], "hi")
    for owner, keys in (("you", [mine.key]), ("me", ["unknown"])):
        with pytest.raises(PromptError, match="no longer available"):
            store.message(owner, keys, "hi")
    store.drop("me", [mine.key])
    with pytest.raises(PromptError, match="no longer available"):
        store.message("me", [mine.key], "hi")


def test_the_oldest_files_go_where_an_owner_has_too_many() -> None:
    store = Attachments()
    piece = MAX_PENDING // 3
    keys = [store.add("me", [Attachment("a", "x" * piece)])[0].key for _ in range(4)]
    assert [*store.waiting["me"]] == keys[1:]


def test_a_file_that_unpacks_to_more_than_memory_holds_is_refused() -> None:
    bomb = pdf("x", commands=b" " * 80_000_000)
    assert len(bomb) < 200_000
    with pytest.raises(PromptError, match="bomb.pdf cannot be read as PDF"):
        attachments.read("bomb.pdf", bomb)
