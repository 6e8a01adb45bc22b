"""The documents are readable, and true where a program can tell: length of lines and sentences,
links and their places, the file map of CONTRIBUTING.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "training" / "README.md",
    ROOT / "assets" / "models" / "tiny-chat" / "README.md",
]
LONGEST_LINE, README_LINES = 100, 120
WORDS_ON_AVERAGE, LONGEST_SENTENCE = 16.0, 40

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)

COMMENT = re.compile(r"<!--.*?-->", re.S)
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
LABEL = re.compile(r"\*{2,3}[^*]+\*{2,3}[.:]? *")
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*[A-Z0-9`*(\"])")


def blocks(markdown: str) -> Iterator[str]:
    """The paragraphs and list items: no tables, code, headings, images, or targets of links."""
    text = IMAGE.sub("", FENCED.sub("", COMMENT.sub("", markdown)))
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        ends = not bare or bare[0] in "|#" or line.startswith("    ")
        if ends or ITEM.match(bare):
            if block:
                yield LINK.sub(r"\1", " ".join(block))
            block = []
        if not ends:
            block.append(ITEM.sub("", bare, count=1) if ITEM.match(bare) else bare)


def sentences(markdown: str) -> list[int]:
    """The words of every sentence. A bold label in front of a block is not a sentence."""
    counts = []
    for block in blocks(markdown):
        for sentence in END.split(LABEL.sub("", block, count=1) if block[0] == "*" else block):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            counts += [len(words)] if words else []
    return counts


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    words = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).replace("`", "").lower())
    return words.strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    lines = FENCED.sub("", path.read_text(encoding="utf-8")).splitlines()
    return {slug(line.lstrip("#")) for line in lines if re.match(r"#+ ", line)}


def mapped() -> list[str]:
    """The paths of the file map: in each block a folder, then what lies in it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## File map\n", 1)[1].split("\n## ", 1)[0]
    paths, folder = [], ""
    for line in section.splitlines():
        found = re.match(r"    ( *)([\w./-]+)(?:  |$)", line)
        if found and found[2].endswith("/") and not found[1]:
            folder = found[2].removeprefix("./")
            paths.append(folder)
        elif found:
            paths.append(folder + found[2])
    return paths


def test_words_are_counted_as_they_are_read() -> None:
    text = (
        "# A heading. With words.\n\nOne two [three four](a.md). **Five** `six 0.7` 8.5, nine!\n\n"
        "| a table. | of words. |\n\n    some code. here.\n\n"
        "- **A label.** Ten eleven\n  twelve\n- Thirteen\n\n```\nmore. code.\n```\n"
        "![A picture. Of a cat.](cat.png)\n<!-- A comment. -->\n"
    )
    assert sentences(text) == [4, 5, 3, 1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < README_LINES


@each_document
def test_lines_fit_the_screen(path: Path) -> None:
    lines = FENCED.sub("", path.read_text(encoding="utf-8")).splitlines()
    long = [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert long == []


@each_document
def test_sentences_are_short(path: Path) -> None:
    counts = sentences(path.read_text(encoding="utf-8"))
    assert len(counts) > 1
    assert sum(counts) / len(counts) <= WORDS_ON_AVERAGE
    assert max(counts) <= LONGEST_SENTENCE


@each_document
def test_links_and_pictures_lead_somewhere(path: Path) -> None:
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    targets = [one for one in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in one]
    lost = []
    for target in targets:
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


def test_what_the_file_map_names_exists() -> None:
    paths = mapped()
    assert len(paths) > 100 and len(set(paths)) == len(paths)
    assert [name for name in paths if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("package", ["app", "engine", "storage", "bench", "training"])
def test_the_file_map_names_every_module(package: str) -> None:
    modules = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    folders = {f"{path.parent.relative_to(ROOT)}/" for path in modules}
    names = {str(path.relative_to(ROOT)) for path in modules} | folders
    assert len(names) > 8
    assert names - set(mapped()) == set()


def test_what_one_finds_in_a_minute_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Find it in a minute\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[2] for line in section.splitlines() if "`" in line]
    assert len(rows) > 6
    lost = []
    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        found = "".join((ROOT / name).read_text("utf-8") for name in quoted if "/" in name)
        names = [part for name in quoted if "/" not in name for part in name.strip("()").split(".")]
        lost += [name for name in names if not re.search(rf"\b{name}\b", found)]
    assert lost == []
