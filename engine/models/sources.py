"""Where models come from: a path, a scan of a folder, or a download from the Hugging Face hub.

A *source* is what a user names: a folder, a path that ends in .gguf, "owner/name" (a transformers
model on the hub) or "owner/name:file.gguf" (one GGUF file of a repository there).
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from engine.errors import ModelError
from engine.models.hub import (
    BROKEN,
    SECONDS,
    UNREACHABLE,
    Meter,
    Progress,
    Store,
    cached,
    check_space,
    explained,
    remote,
)
from engine.models.memory import weight_files

HUB_SOURCE = re.compile(r"(\w[\w.-]*/\w[\w.-]*):(.+\.gguf)", re.IGNORECASE)
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
INDEX = "model.safetensors.index.json"
SMALL = (
    "config.json", "generation_config.json", "tokenizer*", "*.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
)  # fmt: skip
"""What belongs to a transformers model besides its weights."""
NEVER = (".py", ".bin")
"""Code and pickled weights."""
NO_MODELS = ("mmproj", "imatrix")
"""In the names of GGUF files that hold something else: an encoder of pictures, statistics."""
MAGIC = b"GGUF"
NAMED = 8
LEVELS, RESULTS, ENTRIES = 4, 500, 100_000
"""How deep a scan looks, how much it finds, how many names it reads."""


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


def looks_like_path(source: str) -> bool:
    """Whether `source` names a folder rather than a hub id ("name" or "owner/name")."""
    path = Path(source)
    return (
        os.path.exists(source)  # false, not an error, for a name that is too long
        or path.is_absolute()
        or source.startswith((".", "~"))
        or (source.count("/") > 1)
    )


def located(source: str) -> str | None:
    """The path of a source on this machine; None where (some of) it has to be downloaded."""
    named = hub_file(source)
    if named is not None:
        paths = [cached(named.repo, part) for part in named.parts]
        return paths[0] if all(paths) else None
    if looks_like_path(source) or source.lower().endswith(".gguf"):
        return os.path.expanduser(source)
    config = cached(source, "config.json")
    if config is None:
        return None
    # Weights are downloaded last: where they are, the rest is.
    weights = weight_files(source, Path(config).parent)
    complete = weights and all(path.is_file() for path in weights)
    return str(Path(config).parent) if complete else None


def present(source: str) -> bool:
    """Whether nothing of a source has to be downloaded."""
    return located(source) is not None


def download(source: str, progress: Progress, cancelled: Callable[[], bool]) -> str:
    """The local path of a source (a file, or a model's folder), after its download.

    What is there already is taken as it is, without asking the hub. Raises Cancelled soon after
    `cancelled` says so, and ModelError for what the hub does not have or give, when it cannot be
    reached, and when the disk is too full; what was downloaded by then stays.
    """
    found = located(source)
    if found is not None:
        return found
    named = hub_file(source)
    repo = named.repo if named else source
    with explained(source, UNREACHABLE):
        info = HfApi().model_info(repo, files_metadata=True, timeout=SECONDS)
        files = {sibling.rfilename: remote(sibling) for sibling in info.siblings or ()}
        store = Store(repo, str(info.sha))
        names = gguf_names(named, files) if named else model_names(store, files)
    with explained(source, BROKEN):
        wanted = [files[name] for name in names]
        meter = Meter(sum(file.size for file in wanted), progress, cancelled)
        check_space(source, meter.total - sum(store.there(file) for file in wanted))
        paths = [store.fetch(file, meter) for file in wanted]
    return paths[0] if named else str(Path(paths[0]).parent)


def gguf_names(named: HubFile, files: Collection[str]) -> Sequence[str]:
    """The files of a GGUF model; raises ModelError with those that there are."""
    for part in named.parts:
        if part not in files:
            raise ModelError(f"The repository {named.repo!r} has no file {part!r}. {listed(files)}")
    return named.parts


def model_names(store: Store, files: Collection[str]) -> Sequence[str]:
    """The files of a transformers model, weights last; raises ModelError where they lack."""
    weights = ["model.safetensors"]
    if INDEX in files:
        index = hf_hub_download(store.repo, INDEX, revision=store.commit, etag_timeout=SECONDS)
        weights = sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
    for name in ("config.json", *weights):
        if name not in files:
            raise ModelError(
                f"The repository {store.repo!r} has no {name}, so it holds no transformers model "
                f"in safetensors files. {listed(files)}"
            )
    small = [
        name
        for name in sorted(files)
        if not name.endswith(NEVER) and any(fnmatchcase(name, pattern) for pattern in SMALL)
    ]
    return [*small, *([INDEX] if INDEX in files else []), *weights]


def listed(files: Collection[str]) -> str:
    """What GGUF files a repository has and how to name one, in a sentence."""
    found = sorted(name for name in files if name.lower().endswith(".gguf"))
    if not found:
        return "It has no GGUF files either. Choose another repository."
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    names = ", ".join(found[:NAMED])
    return f"Name one of its GGUF files, as owner/name:file.gguf: {names}{more}."


def scan(folder: str) -> list[str]:
    """GGUF files and model folders in a folder and up to 4 levels below, sorted; at most 500.

    What cannot be read is passed over. Raises ModelError when there is no such folder.
    """
    root = os.path.expanduser(folder)
    if not os.path.isdir(root):
        raise ModelError(f"There is no folder {folder!r}. Give one that holds models.")
    found: dict[str, str] = {}
    for path, names in folders(root):
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            found.setdefault(os.path.realpath(path), path)
        for name in names:
            file = os.path.join(path, name)
            if is_model(file):
                # The hub's cache names one content once for every commit.
                found.setdefault(os.path.realpath(file), file)
    return sorted([*found.values()][:RESULTS], key=str.casefold)


def folders(root: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Every folder that can be read with its names, the nearest first, each folder once."""
    seen: set[tuple[int, int]] = set()
    level, left = [root], ENTRIES
    for _ in range(LEVELS + 1):
        below: list[str] = []
        for path in level:
            try:
                status = os.stat(path)
                names = sorted(os.listdir(path))[:left]
            except OSError:
                continue
            left -= len(names)
            if (status.st_dev, status.st_ino) in seen:
                continue  # a link that leads back
            seen.add((status.st_dev, status.st_ino))
            yield path, names
            below += [p for p in (os.path.join(path, name) for name in names) if os.path.isdir(p)]
        level = below


def is_model(path: str) -> bool:
    """Whether a file is a GGUF model, or the first part of one: by its name and first bytes."""
    name = os.path.basename(path).lower()
    if not name.endswith(".gguf") or any(word in name for word in NO_MODELS):
        return False
    split = SPLIT.fullmatch(name)
    if (split and int(split[2]) > 1) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
