"""What will draft for a model, as far as its files tell before it is loaded.

Loading tries whether trees, chains and the head work, and that counts. What is told here is what
the header of a GGUF file, or config.json and the names of tensors say: layers that keep a state,
prediction layers, a head beside the model. Headers are read, never weights.
"""

import mmap
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.models.gguf_files import MAGIC
from engine.models.prediction_layers import Prediction
from engine.models.state_memory import layers_of

STATES = ("ssm.", "shortconv.", "wkv.", "kda.", "rope.dimension_sections")
"""In the keys of GGUF headers whose models verify chains: of layers that keep a state, and of
positions of several parts. Behind the architecture's name."""
NEXTN = "nextn_predict_layers"
AHEAD = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""In config.json of models with prediction layers."""
MOST = 1 << 20
"""Entries of a header; more are no header."""
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the values of GGUF headers, by their types; 8 is a text, 9 a list."""
WHOLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
TEXT, LIST = 8, 9


@dataclass(frozen=True, slots=True)
class Outlook:
    """`chains` says that drafts will be chains, not trees. `head` is what guesses ahead, and where
    it is, in words; where there is none, `problem` may say why."""

    chains: bool = False
    head: str = ""
    problem: str = ""


def of_gguf(path: Path, heads: Collection[str] = ()) -> Outlook | None:
    """Of a GGUF file with those `heads` beside it, by their names; None where its header cannot be
    read."""
    try:
        state = path.stat()
        found = header(path, (state.st_size, state.st_mtime_ns))
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    kind = str(found.get("general.architecture", ""))
    chains = any(key.startswith(tuple(f"{kind}.{each}" for each in STATES)) for key in found)
    if found.get(f"{kind}.{NEXTN}"):
        return Outlook(chains, "MTP, in its file")
    beside = next(iter(heads), "")
    return Outlook(chains, f"in {beside}, beside it" if beside else "")


def of_config(config: Mapping[str, Any], folder: Path, found: Prediction | None = None) -> Outlook:
    """Of a folder, by its config.json and the prediction layers `found` in its weight files."""
    chains = False
    with suppress(KeyError, TypeError, ValueError):  # the sizes of a config are told elsewhere
        chains = layers_of(config)[1] > 0
    if (folder / "head" / "config.json").is_file():
        return Outlook(chains, "in its folder head")
    if found:
        problem = f"its prediction layers cannot be used: {found.problem}" if found.problem else ""
        return Outlook(chains, "" if problem else "MTP, in its files", problem)
    ahead = any(config.get(name) for name in AHEAD)
    lacking = "its config names a prediction layer, and its weight files do not hold it"
    return Outlook(chains, problem=lacking if ahead else "")


@lru_cache(maxsize=64)
def header(path: Path, state: tuple[int, int]) -> dict[str, object]:
    """The keys of a GGUF file's header with those values that are whole numbers or texts. A file of
    another `state`, size and time, is another file. Raises ValueError, OverflowError, struct.error.
    """
    found: dict[str, object] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ValueError(f"it begins with {data[:4]!r}")
        _, count = struct.unpack_from("<QQ", data, 8)
        if count > MOST:
            raise ValueError(f"{count} entries")
        at = 24
        for _ in range(count):
            key, at = text(data, at)
            kind = struct.unpack_from("<I", data, at)[0]
            found[key], at = value(data, at + 4, kind)
    return found


def text(data: mmap.mmap, at: int) -> tuple[str, int]:
    """A text of the header, and where what follows it begins."""
    start = at + 8
    end = start + struct.unpack_from("<Q", data, at)[0]
    if end > len(data):
        raise ValueError("a text beyond the file")
    return data[start:end].decode("utf-8", "replace"), end


def value(data: mmap.mmap, at: int, kind: int) -> tuple[object, int]:
    """A value of the header, None where it is neither a whole number nor a text, and where what
    follows begins."""
    if kind == TEXT:
        return text(data, at)
    if kind == LIST:
        return None, behind_list(data, at)
    if kind not in SIZES:
        raise ValueError(f"values of the type {kind}")
    read = struct.unpack_from(WHOLE[kind], data, at)[0] if kind in WHOLE else None
    return read, at + SIZES[kind]


def behind_list(data: mmap.mmap, at: int) -> int:
    """Where what follows a list begins."""
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
