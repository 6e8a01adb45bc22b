"""The documents hold together: links and their targets, and the maps of CONTRIBUTING.md."""

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
README_LINES = 120

FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    words = re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", heading).replace("`", "").lower())
    return words.strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    lines = FENCED.sub("", path.read_text(encoding="utf-8")).splitlines()
    return {slug(line.lstrip("#")) for line in lines if re.match(r"#+ ", line)}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < README_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
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


def test_the_map_names_every_folder_of_modules_and_no_other() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Folders\n", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^    ([\w/]+)/ ", section, re.M)
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    packages = ("app", "engine", "storage", "bench", "training", "strata_chat")
    modules = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    assert {str(path.parent.relative_to(ROOT)) for path in modules} <= {*named}


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
