"""Where models come from: a path, a scan of a folder, or a download from the Hugging Face hub.

A *source* is what a user names: a folder, a path that ends in .gguf, "owner/name" (a transformers
model on the hub) or "owner/name:file.gguf" (one GGUF file of a repository there).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from huggingface_hub import HfApi

from engine.errors import ModelError
from engine.models.format import ModelFormat
from engine.models.hub import (
    BROKEN,
    SECONDS,
    UNREACHABLE,
    Meter,
    Progress,
    Store,
    check_space,
    explained,
    remote,
)

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
    repo = model_format.repository(source)
    with explained(source, UNREACHABLE):
        info = HfApi().model_info(repo, files_metadata=True, timeout=SECONDS)
        files = {sibling.rfilename: remote(sibling) for sibling in info.siblings or ()}
        store = Store(repo, str(info.sha))
        names = model_format.hub_files(source, store, files)
    with explained(source, BROKEN):
        wanted = [files[name] for name in names]
        meter = Meter(sum(file.size for file in wanted), progress, cancelled)
        check_space(source, meter.total - sum(store.there(file) for file in wanted))
        paths = [store.fetch(file, meter) for file in wanted]
    return paths[0] if model_format.ending else str(Path(paths[0]).parent)


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
