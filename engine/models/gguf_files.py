"""GGUF files, on the disk and on the hub: what their names and their headers show."""

import mmap
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from engine.backends.base import digest
from engine.models.memory import DraftingForecast

ENDING = ".gguf"
IN_CORE, SMALL_FILE = ("llama", "qwen2", "qwen3", "qwen3moe"), 5_000_000
"""The architectures of files that the compiled core computes (those of Mistral and Mixtral say
llama), and the bytes of a file from which on it does so without being asked."""
MAGIC = b"GGUF"
"""The first bytes of a file."""
HUB_SOURCE = re.compile(r"(\w[\w.-]*/\w[\w.-]*):(.+\.gguf)", re.IGNORECASE)
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
KIND = re.compile(r"[-._](?:ud-)?(?:i?q|tq|mxfp|nvfp|bf|fp?)\d[\w.]*$")
"""The endings of names of files that give the type of weights."""
NO_MODELS = ("mmproj", "imatrix")
"""Parts of the names of files that hold no model: an encoder of pictures, statistics."""
HEADS = {"mtp-": "MTP", "eagle3-": "EAGLE-3", "dflash-": "DFlash"}
"""The kinds of heads by the beginnings of names of files that hold only the head of a model in the
same folder."""
ANCHORED = "sample_from_anchor"
"""The key by which files of DSpark heads are told from DFlash heads, whose architecture they
name."""
DSPARK = "it is a DSpark head, whose blocks depend on the tokens that it would choose"
BLOCK, BLOCKS = 1 << 14, 16
"""The blocks that identify a file: their size in bytes, and their number, spread over it evenly."""
NAMED = 8
"""The most files that an error names."""

STATES = ("ssm.", "shortconv.", "wkv.", "kda.", "rope.dimension_sections")
"""Keys of headers, after the architecture's name, that show that only chains can be verified:
layers that keep a state, or positions with several parts."""
NEXTN = "nextn_predict_layers"
MOST = 1 << 20
"""The most entries of a valid header."""
MOST_SIZES = 4
"""The most dimensions of a tensor."""
NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""The forms of numbers in headers, by type."""
SIZES = {kind: struct.calcsize(form) for kind, form in NUMBERS.items()}
TEXT, LIST = 8, 9
ALIGNMENT = 32
"""The bytes of which tensors begin at a multiple, unless the header says another number."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One GGUF file of a repository on the hub; `file` may include folders."""

    repo: str
    file: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The files of the model in order; several if it is split."""
        split = SPLIT.fullmatch(self.file)
        if not split:
            return (self.file,)
        stem, _, count = split.groups()
        return tuple(f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1))


def parts_of(path: Path) -> list[Path]:
    """The files of a model that may be split, in order; none if it is not there."""
    split = SPLIT.fullmatch(path.name)
    same = f"{escape(split[1])}-?????-of-{split[3]}{ENDING}" if split else escape(path.name)
    return sorted(path.parent.glob(same)) if path.is_file() else []


def hub_file(source: str) -> HubFile | None:
    """The GGUF file on the hub that `source` names ("owner/name:file.gguf"), else None."""
    named = HUB_SOURCE.fullmatch(source)
    return HubFile(named[1], named[2]) if named and not os.path.exists(source) else None


def is_head(name: str) -> bool:
    """Whether a file holds only a head, by its name."""
    name = name.lower()
    return name.startswith((*HEADS,)) and name.endswith(ENDING)


def heads_near(path: Path) -> list[str]:
    return heads_for(str(path), map(str, path.parent.iterdir()))


def kind_of_head(files: Iterable[str]) -> str:
    """The kind of the head that these files hold, by their names; that of heads within the files of
    models if there is none."""
    names = [os.path.basename(file).lower() for file in files]
    kinds = (kind for name in names for start, kind in HEADS.items() if name.startswith(start))
    return next(kinds, "MTP")


def heads_for(file: str, names: Iterable[str]) -> list[str]:
    """The files in the folder of a model that may hold its head, the most similar name first. A
    head whose name is more similar to that of another model belongs to the other one."""
    folder, name = os.path.split(file)
    found = [each for each in names if os.path.dirname(each) == folder]
    heads = [each for each in found if is_head(os.path.basename(each))]
    models = [os.path.basename(each) for each in found if may_be_model(os.path.basename(each))]

    def alike(other: str, model: str) -> int:
        own = os.path.basename(other).partition("-")[2]
        return len(os.path.commonprefix([stem(own), stem(model)]))

    def exact(head: str) -> int:  # with the kind of weights
        own = os.path.basename(head).partition("-")[2].lower()
        return len(os.path.commonprefix([own, name.lower()]))

    own = [each for each in heads if all(alike(each, m) <= alike(each, name) for m in models)]
    return sorted(own, key=lambda each: (-alike(each, name), -exact(each), each))


def stem(name: str) -> str:
    """The name of a file without the type of its weights, because a head serves all types."""
    split = SPLIT.fullmatch(name)
    return KIND.sub("", (split[1] if split else name.lower().removesuffix(ENDING)).lower())


def may_be_model(name: str) -> bool:
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
    """A sentence that lists the GGUF files of a repository and explains how to name one."""
    found = sorted(name for name in files if name.lower().endswith(ENDING))
    if not found:
        return "It has no GGUF files either. Choose another repository."
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    names = ", ".join(found[:NAMED])
    return f"Name one of its GGUF files, as owner/name:file.gguf: {names}{more}."


def file_fingerprint(path: Path) -> str:
    """Identifies the weights, by the size of a file and blocks spread over it."""
    size = path.stat().st_size
    parts: list[str | bytes] = [str(size)]
    with path.open("rb") as file:
        for number in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            parts.append(file.read(BLOCK))
    return digest(parts)


def forecast_of(path: Path, heads: Collection[str] = ()) -> DraftingForecast | None:
    """What will draft for the model in a file, with the names of `heads` in the same folder; None
    if its header cannot be read."""
    try:
        found = header(path).values
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    kind = str(found.get("general.architecture", ""))
    chains = any(key.startswith(tuple(f"{kind}.{each}" for each in STATES)) for key in found)
    if found.get(f"{kind}.{NEXTN}"):
        return DraftingForecast(chains, "MTP, in its file")
    head = next(iter(heads), "")
    return DraftingForecast(chains, f"in the file {head}" if head else "")


def may_be_in_core(path: Path) -> bool:
    """Whether the compiled core may be asked for a file, which takes long to import; False for one
    that cannot be read."""
    try:
        size = sum(part.stat().st_size for part in parts_of(path))
        if not path.is_file() or size < SMALL_FILE:  # opening a pipe would block
            return False
        return header(path).values.get("general.architecture") in IN_CORE
    except (OSError, ValueError, OverflowError, struct.error):
        return False


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file: its keys, with values that are numbers or texts and None for
    lists, and its tensors."""

    values: dict[str, object]
    tensors: tuple["Tensor", ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a GGUF file: its type by number, and where it begins in `path`. Rows come before
    columns in its shape."""

    name: str
    shape: tuple[int, ...]
    kind: int
    path: Path
    offset: int


def header(path: Path) -> Header:
    """The header of a GGUF file. Raises OSError, ValueError, OverflowError, struct.error."""
    state = path.stat()
    return header_of(path, (state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=64)
def header_of(path: Path, state: tuple[int, int]) -> Header:
    values: dict[str, object] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 24
        for entry in entries(data):
            values[entry.key], at = entry.value, entry.end
        size = struct.unpack_from("<Q", data, 8)[0]
        if size > MOST:
            raise ValueError(f"{size} tensors")
        found = []
        for _ in range(size):
            name, at = text(data, at)
            sizes = struct.unpack_from("<I", data, at)[0]
            if sizes > MOST_SIZES:
                raise ValueError(f"a tensor of {sizes} dimensions")
            shape = struct.unpack_from(f"<{sizes}Q", data, at + 4)
            kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * sizes)
            at += 16 + 8 * sizes
            found.append((name, shape[::-1], kind, offset))
    step = values.get("general.alignment", ALIGNMENT)
    if not isinstance(step, int) or step <= 0:
        raise ValueError(f"an alignment of {step!r}")
    start = -(-at // step) * step
    tensors = (Tensor(name, shape, kind, path, start + at) for name, shape, kind, at in found)
    return Header(values, tuple(tensors))


class Entry(NamedTuple):
    """A value of a header, None for a list, with its type and where it begins and ends."""

    key: str
    kind: int
    begin: int
    value: object
    end: int


def entries(data: mmap.mmap) -> Iterator[Entry]:
    if data[:4] != MAGIC:
        raise ValueError(f"it begins with {data[:4]!r}")
    count, at = struct.unpack_from("<Q", data, 16)[0], 24
    if count > MOST:
        raise ValueError(f"{count} entries")
    for _ in range(count):
        key, at = text(data, at)
        kind = struct.unpack_from("<I", data, at)[0]
        begin = at + 4
        found, at = value(data, begin, kind)
        yield Entry(key, kind, begin, found, at)


def items_of(path: Path, name: str) -> list[Any]:
    """The numbers or texts of a list in the header of a GGUF file; none if it has no such list.
    Raises what `header` does."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        places = (each.begin for each in entries(data) if (each.key, each.kind) == (name, LIST))
        at = next(places, 0)
        if not at:
            return []
        kind, count = struct.unpack_from("<IQ", data, at)
        at, found = at + 12, []
        for _ in range(count):
            each, at = value(data, at, kind)
            found.append(each)
        return found


def text(data: mmap.mmap, at: int) -> tuple[str, int]:
    start = at + 8
    end = start + struct.unpack_from("<Q", data, at)[0]
    if end > len(data):
        raise ValueError("a text beyond the file")
    return data[start:end].decode("utf-8", "replace"), end


def value(data: mmap.mmap, at: int, kind: int) -> tuple[object, int]:
    """A value of the header, None if it is a list, and the offset after it."""
    if kind == TEXT:
        return text(data, at)
    if kind == LIST:
        return None, after_list(data, at)
    if kind not in SIZES:
        raise ValueError(f"values of the type {kind}")
    return struct.unpack_from(NUMBERS[kind], data, at)[0], at + SIZES[kind]


def after_list(data: mmap.mmap, at: int) -> int:
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in SIZES:
        return at + int(count) * SIZES[kind]
    if kind != TEXT or count > MOST:
        raise ValueError(f"a list of {count} values of the type {kind}")
    length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        at += 8 + length(data, at)[0]
    return at
