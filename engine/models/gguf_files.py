"""What GGUF files are called, on the disk and on the hub, and how one is told from another file."""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import digest

ENDING = ".gguf"
MAGIC = b"GGUF"
"""The first bytes of a file."""
HUB_SOURCE = re.compile(r"(\w[\w.-]*/\w[\w.-]*):(.+\.gguf)", re.IGNORECASE)
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
KIND = re.compile(r"[-._](?:ud-)?(?:i?q|tq|mxfp|nvfp|bf|fp?)\d[\w.]*$")
"""What the names of files end with that say the kind of weights."""
NO_MODELS = ("mmproj", "imatrix")
"""In the names of files that hold something else: an encoder of pictures, statistics."""
HEADS = ("mtp-", "eagle3-")
"""What the names of files begin with that hold the head of a model beside them, and no model."""
BLOCK, BLOCKS = 1 << 14, 16
"""Bytes of each of the blocks that a file is known by, spread over it evenly."""
NAMED = 8
"""Files that an error names at most."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One GGUF file of a repository on the hub; `file` may lie in a folder of it."""

    repo: str
    file: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The files it consists of, in order; more than one where the model is split."""
        split = SPLIT.fullmatch(self.file)
        if not split:
            return (self.file,)
        stem, _, count = split.groups()
        return tuple(f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1))


def hub_file(source: str) -> HubFile | None:
    """The GGUF file on the hub that `source` names ("owner/name:file.gguf"), else None."""
    named = HUB_SOURCE.fullmatch(source)
    return HubFile(named[1], named[2]) if named and not os.path.exists(source) else None


def is_head(name: str) -> bool:
    """Whether a file holds a head and nothing else, by its name."""
    name = name.lower()
    return name.startswith(HEADS) and name.endswith(ENDING)


def heads_for(file: str, names: Iterable[str]) -> list[str]:
    """Those of some files that may hold a head for a model's, which lie beside it: the one of the
    most similar name first. One whose name is more like that of another model is that one's."""
    folder, name = os.path.split(file)
    found = [each for each in names if os.path.dirname(each) == folder]
    heads = [each for each in found if is_head(os.path.basename(each))]
    models = [os.path.basename(each) for each in found if may_be_model(os.path.basename(each))]

    def alike(other: str, model: str) -> int:
        own = os.path.basename(other).partition("-")[2]
        return len(os.path.commonprefix([stem(own), stem(model)]))

    own = [each for each in heads if all(alike(each, m) <= alike(each, name) for m in models)]
    return sorted(own, key=lambda each: (-alike(each, name), -exact(each, name), each))


def exact(head: str, model: str) -> int:
    """How much of the names of a head and of a model is the same, with the kind of weights."""
    own = os.path.basename(head).partition("-")[2].lower()
    return len(os.path.commonprefix([own, model.lower()]))


def stem(name: str) -> str:
    """What a file is called whatever the kind of its weights: a head serves all of them."""
    split = SPLIT.fullmatch(name)
    return KIND.sub("", (split[1] if split else name.lower().removesuffix(ENDING)).lower())


def may_be_model(name: str) -> bool:
    """Whether a file is a model by its name."""
    name = name.lower()
    return name.endswith(ENDING) and not is_head(name) and not any(w in name for w in NO_MODELS)


def is_model(path: str) -> bool:
    """Whether a file is a model, or the first part of one: by its name and first bytes."""
    name = os.path.basename(path).lower()
    if not may_be_model(name):
        return False
    split = SPLIT.fullmatch(name)
    if (split and int(split[2]) > 1) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def listed(files: Collection[str]) -> str:
    """What GGUF files a repository has and how to name one, in a sentence."""
    found = sorted(name for name in files if name.lower().endswith(ENDING))
    if not found:
        return "It has no GGUF files either. Choose another repository."
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    names = ", ".join(found[:NAMED])
    return f"Name one of its GGUF files, as owner/name:file.gguf: {names}{more}."


def file_fingerprint(path: Path) -> str:
    """Names the weights: the size of a file, its beginning, and blocks from all over it."""
    size = path.stat().st_size
    parts: list[str | bytes] = [str(size)]
    with path.open("rb") as file:
        for number in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            parts.append(file.read(BLOCK))
    return digest(parts)
