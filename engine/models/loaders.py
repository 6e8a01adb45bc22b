"""The functions through which the app reaches models: finding, measuring and loading them.

A *source* is what a user gives as a model: a folder, a path that ends in .gguf, "owner/name" (a
transformers model on the Hugging Face hub), "owner/name:file.gguf" (one GGUF file of a repository
there), or the address of a server. Its name alone determines its format
(engine/models/formats.py).

The libraries behind these functions are heavy, so they are imported only when they are needed.
`ModelLoaders` holds the functions as one value, so that tests can replace them.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError, first_line
from engine.models.format import FileFormat, recommended
from engine.models.formats import FORMATS, format_of
from engine.models.memory import Need, free_memory
from engine.servers.client import is_address, parsed, resolve_address
from engine.settings import Runtime, Sampling

DEFAULT_RUNTIME = Runtime()
"""The default settings."""
MOST_AT_ONCE = 4
"""The most answers at once if their number is left open. The more there are, the slower each is."""
CONFIG = "config.json"
LEVELS, RESULTS, ENTRIES = 4, 500, 100_000
"""The depth of a scan, the most models that it returns, and the most names that it reads."""


def check_there(source: str) -> None:
    """Raise ModelError for a path that does not exist or a malformed address, before anything is
    loaded."""
    if is_address(source):
        parsed(source)
        return
    path = format_of(source).located(source)
    if path is not None and not os.path.exists(path):
        raise ModelError(
            f"The model {source!r} does not exist. Give a folder that holds config.json, a "
            "tokenizer and *.safetensors files, a GGUF file, or a model of the Hugging Face hub."
        )


def sampler(source: str) -> Sampling:
    """The sampler settings that the makers of a model recommend, if a file in its folder contains
    them; otherwise the default ones."""
    try:
        return recommended(json.loads((Path(source) / "generation_config.json").read_text("utf-8")))
    except (OSError, ValueError, AttributeError):
        return Sampling()


def resolve_source(source: str) -> str:
    """The normal form of a source, so that a model has one name: the full path of a folder or file,
    or a normalised address. Any other source is returned unchanged."""
    source = source.strip()
    if is_address(source):
        return resolve_address(source)
    path = Path(os.path.expanduser(source))
    if not source or not path.exists():
        return source
    # Links to files are not resolved: in the hub's cache, their targets have no ending.
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def name_of(source: str) -> str:
    """The name of a model: the last part of its source, without an ending."""
    name = format_of(source).name(source)
    return name.encode("utf-8", "replace").decode().strip() or "model"


def free_name(source: str, taken: Collection[str]) -> str:
    """The name of a draft model in plans, different from those that are taken."""
    base = name_of(source)
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def present(source: str) -> bool:
    """Whether nothing of a model has to be downloaded."""
    return format_of(source).located(source) is not None


def weight_bytes(source: str) -> int:
    """The bytes of a model's weights on this machine; 0 if they are not here."""
    model_format = format_of(source)
    path = model_format.located(source)
    if path and isinstance(model_format, FileFormat):
        with suppress(OSError):
            return sum(file.stat().st_size for file in model_format.weight_files(Path(path)))
    return 0


def check(source: str) -> int:
    """The bytes of a model, on this machine or to be downloaded; 0 if a server runs it, whose
    address is only checked for its form. Raises ModelError unless the model exists, looks like one
    that writes text, and is in a format whose library is installed. This may query the hub, but
    downloads no weights."""
    model_format = format_of(source)
    if not isinstance(model_format, FileFormat):
        return model_format.need(source, DEFAULT_RUNTIME).total
    model_format.check_library(source)
    source = resolve_source(source)
    path = model_format.located(source)
    if path is None:
        from engine.models.hub import UNREACHABLE, explained

        with explained(source, UNREACHABLE):
            store, files, names = model_format.offered(source)
            config = store.read(CONFIG) if CONFIG in files else ""
        model_format.check_files(source, names, config)
        return sum(files[name].size for name in names)
    folder = Path(path)
    if not folder.exists():
        raise ModelError(
            f"There is no {source!r} on this machine. Give a folder that holds a model, a GGUF "
            "file, or a model of the Hugging Face hub."
        )
    try:
        names = [each.name for each in model_format.files(folder)]
        file = folder / CONFIG
        config = file.read_text("utf-8") if file.is_file() else ""
        size = sum(each.stat().st_size for each in model_format.weight_files(folder))
    except (OSError, ValueError) as error:
        raise ModelError(f"The model {source!r} cannot be read ({first_line(error)}).") from error
    model_format.check_files(source, names, config)
    return size


def scan(folder: str) -> list[str]:
    """The models in a folder and up to 4 levels below, sorted; at most 500. Folders and files that
    cannot be read are left out. Raises ModelError if the folder does not exist."""
    root = os.path.expanduser(folder)
    if not os.path.isdir(root):
        raise ModelError(f"There is no folder {folder!r}. Give one that holds models.")
    formats = [each for each in FORMATS if isinstance(each, FileFormat)]
    found: dict[str, str] = {}
    for path, names in folders_below(root):
        for model in (model for each in formats for model in each.find(path, names)):
            # The hub's cache has one content under a name for every commit.
            found.setdefault(os.path.realpath(model), model)
    return sorted([*found.values()][:RESULTS], key=str.casefold)


def folders_below(root: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Every readable folder with the names in it, the nearest first, each folder once."""
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


def download(
    source: str, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
) -> str:
    """The path of a source, after downloading missing files; see `FileFormat.download`."""
    model_format = format_of(source)
    if not isinstance(model_format, FileFormat):
        return source
    return model_format.download(source, progress, cancelled)


def removable(source: str, folders: Sequence[Path] = ()) -> bool:
    """Whether `remove` would delete a model: it must lie in the hub's cache or in one of the
    `folders`, after links are followed."""
    from huggingface_hub import constants

    from engine.models.hub import repo_folder

    source, model_format = resolve_source(source), format_of(source)
    if not isinstance(model_format, FileFormat):
        return False
    if repo := model_format.repository(source):
        return repo_folder(repo).is_dir()
    path = Path(source)
    where = path if path.is_dir() else path.parent
    kept = [Path(constants.HF_HUB_CACHE), *folders]
    return path.exists() and any(
        where.resolve().is_relative_to(folder.resolve()) and path.resolve() != folder.resolve()
        for folder in kept
        if folder.is_dir()
    )


def remove(source: str, folders: Sequence[Path] = ()) -> int:
    """Delete a model from the disk; returns the bytes that this frees. Only models in the hub's
    cache or in one of the `folders` are deleted. Raises ModelError for any other model, and for
    files that cannot be deleted."""
    from huggingface_hub import constants

    from engine.models.hub import repo_folder, tidy

    source, model_format = resolve_source(source), format_of(source)
    if not isinstance(model_format, FileFormat) or not removable(source, folders):
        raise ModelError(
            f"The model {source!r} was not deleted: it lies outside of the folders that Strata "
            "keeps. Delete its files by hand if you want to."
        )
    try:
        if repo := model_format.repository(source):
            return tidy(repo_folder(repo), lambda name: model_format.belongs(source, name))
        path, cache = Path(source), Path(constants.HF_HUB_CACHE).resolve()
        mine = {str(each) for each in model_format.files(path)}
        if path.is_relative_to(cache):
            root = cache / path.relative_to(cache).parts[0]
            below = {str(Path(each).relative_to(root).parts[2:]) for each in mine}
            return tidy(root, lambda name: str(Path(name).parts) in below)
        freed = 0
        for each in map(Path, mine):
            freed += each.lstat().st_size
            each.unlink()
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        return freed
    except OSError as error:
        raise ModelError(
            f"The model {source!r} could not be deleted ({first_line(error)}). Close other "
            "programs that use it, and try again."
        ) from error


def load(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Backend:
    """Load a model, after downloading missing files. If the number of answers at once is left open,
    it is one. Raises ModelError for a model that cannot be used."""
    return format_of(source).load(source, replace(runtime, parallel=max(1, runtime.parallel)))


def silent(done: int, total: int) -> None:
    """Report no progress."""


def tokenizer(source: str, progress: Callable[[int, int], None] = silent) -> Tokenizer:
    """A model's tokenizer, for which its weights are not loaded. If the tokenizer is a separate
    file, they are not downloaded either. Raises ModelError."""
    return format_of(source).tokenizer(source, progress)


def need(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Need:
    """The memory that a model will take. Raises ModelError if it cannot be determined, for example
    because the model has to be downloaded first."""
    return format_of(source).need(source, runtime)


def answers_at_once(need: Need, free: int) -> int:
    """How many answers a model gives at once if that is left to Strata, in so many free bytes."""
    return max(1, min(MOST_AT_ONCE, 1 + (free - need.total) // max(1, need.each)))


def device(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> str:
    """Where a model would run. Raises ModelError for a device that this machine does not have."""
    return format_of(source).device(runtime)


@dataclass(frozen=True, slots=True)
class ModelLoaders:
    """The functions above. `free` returns the free bytes of a device."""

    load: Callable[[str, Runtime], Backend] = load
    need: Callable[[str, Runtime], Need] = need
    device: Callable[[str, Runtime], str] = device
    free: Callable[[str], int] = free_memory
    scan: Callable[[str], list[str]] = scan
    present: Callable[[str], bool] = present
    download: Callable[[str, Callable[[int, int], None], Callable[[], bool]], str] = download
    check: Callable[[str], int] = check
    removable: Callable[[str, Sequence[Path]], bool] = removable
    remove: Callable[[str, Sequence[Path]], int] = remove
    tokenizer: Callable[[str, Callable[[int, int], None]], Tokenizer] = tokenizer


MODEL_LOADERS = ModelLoaders()
"""The real functions."""
