"""Where models come from: a path, a scan of a folder, or a download from the Hugging Face hub.

A *source* is what a user names: a folder, a path that ends in .gguf, "owner/name" (a transformers
model on the hub) or "owner/name:file.gguf" (one GGUF file of a repository there).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants

from engine.errors import ModelError, first_line
from engine.models.format import ModelFormat
from engine.models.hub import (
    BROKEN,
    SECONDS,
    UNREACHABLE,
    Meter,
    Progress,
    Remote,
    Store,
    check_space,
    explained,
    remote,
    repo_folder,
    tidy,
)

CONFIG = "config.json"
LEVELS, RESULTS, ENTRIES = 4, 500, 100_000
"""How deep a scan looks, how much it finds, how many names it reads."""


def download(
    model_format: ModelFormat, source: str, progress: Progress, cancelled: Callable[[], bool]
) -> str:
    """The local path of a source (a file, or a model's folder), after its download.

    What is there already is taken as it is, without asking the hub. Raises Cancelled soon after
    `cancelled` says so, and ModelError for what the hub does not have or give, when it cannot be
    reached, and when the disk is too full; what was downloaded by then stays.
    """
    found = model_format.located(source)
    if found is not None:
        return found
    with explained(source, UNREACHABLE):
        store, files, names = offered(model_format, source)
    with explained(source, BROKEN):
        wanted = [files[name] for name in names]
        meter = Meter(sum(file.size for file in wanted), progress, cancelled)
        check_space(source, meter.total - sum(store.there(file) for file in wanted))
        paths = [store.fetch(file, meter) for file in wanted]
    return paths[0] if model_format.ending else str(Path(paths[0]).parent)


def offered(
    model_format: ModelFormat, source: str
) -> tuple[Store, dict[str, Remote], Sequence[str]]:
    """What the hub has of a source: the place of its files in the cache, all files of the
    repository, and the names of those that belong to the source. Raises what the client raises."""
    repo = model_format.repository(source)
    info = HfApi().model_info(repo, files_metadata=True, timeout=SECONDS)
    files = {sibling.rfilename: remote(sibling) for sibling in info.siblings or ()}
    store = Store(repo, str(info.sha))
    return store, files, model_format.hub_files(source, store, files)


def check(model_format: ModelFormat, source: str) -> int:
    """The bytes of a source, on this machine or to be downloaded, once it is known to be there and
    to look like a model that writes text. Raises ModelError.

    What is on the hub is asked for there; none of its weights are downloaded.
    """
    path = model_format.located(source)
    if path is None:
        with explained(source, UNREACHABLE):
            store, files, names = offered(model_format, source)
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


def remove(model_format: ModelFormat, source: str, folders: Sequence[Path]) -> int:
    """Delete a model from the disk; returns the bytes that this frees.

    Only what lies in the hub's cache or in one of the `folders` is deleted. Raises ModelError for
    anything else, and for what cannot be deleted.
    """
    if not removable(model_format, source, folders):
        raise ModelError(
            f"The model {source!r} was not deleted: it lies outside of the folders that Strata "
            "keeps. Delete its files by hand if you want to."
        )
    try:
        if model_format.on_hub(source):
            repo = model_format.repository(source)
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


def removable(model_format: ModelFormat, source: str, folders: Sequence[Path]) -> bool:
    """Whether a model lies in the hub's cache or in one of the `folders`, links followed."""
    if model_format.on_hub(source):
        return repo_folder(model_format.repository(source)).is_dir()
    path = Path(source)
    where = path if path.is_dir() else path.parent
    kept = [Path(constants.HF_HUB_CACHE), *folders]
    return path.exists() and any(
        where.resolve().is_relative_to(folder.resolve()) and path.resolve() != folder.resolve()
        for folder in kept
        if folder.is_dir()
    )


def scan(folder: str, formats: Iterable[ModelFormat]) -> list[str]:
    """The models in a folder and up to 4 levels below, sorted; at most 500.

    What cannot be read is passed over. Raises ModelError when there is no such folder.
    """
    root = os.path.expanduser(folder)
    if not os.path.isdir(root):
        raise ModelError(f"There is no folder {folder!r}. Give one that holds models.")
    found: dict[str, str] = {}
    for path, names in folders(root):
        for model in (model for each in formats for model in each.find(path, names)):
            # The hub's cache names one content once for every commit.
            found.setdefault(os.path.realpath(model), model)
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
