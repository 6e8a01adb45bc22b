"""The documents hold together: length of lines, links and their targets, the file map of
CONTRIBUTING.md."""

import re
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

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)

FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < README_LINES


@each_document
def test_lines_fit_the_screen(path: Path) -> None:
    lines = FENCED.sub("", path.read_text(encoding="utf-8")).splitlines()
    long = [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")]
    assert long == []


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
    assert len(names) > 6
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
