"""The interface of a model format: properties of the format and of each of its models.

Every format is a `ModelFormat`. `FileFormat` adds methods for formats whose models are files: where
the files are, on the disk and on the Hugging Face hub. A model that a server runs has no files.
engine/models/formats.py lists the formats; engine/models/loaders.py defines a *source*.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.backends.base import Backend, Tokenizer
from engine.errors import SettingError
from engine.models.memory import Need
from engine.settings import Runtime, Sampling

if TYPE_CHECKING:
    from engine.models.hub import Remote, Store

HEAD = "head"
"""The subfolder of a transformers model that holds its head (engine/models/torch_heads.py)."""

SAMPLER = ("temperature", "top_k", "top_p", "min_p")
NAMED = 6
"""The most files that an error names."""


class ModelFormat(ABC):
    """A format. Its methods import the libraries that they need only when they are called."""

    kind: str
    """The value of `BackendInfo.kind` for its models."""
    settings: tuple[str, ...] = ()
    """The settings of a Runtime that only this format knows."""
    ending = ""
    """The ending of a model's file; "" if a model is not a single file."""
    estimated = False
    """Whether the need of a model is estimated from its description, which is possible before the
    download, but not for all models. Otherwise the need is measured after the download, and a model
    that cannot be measured cannot be used."""
    float32_on_cpu = False
    """Whether the weights take four bytes each on a processor, whatever type the files have."""

    @abstractmethod
    def recognises(self, source: str) -> bool:
        """Whether a source is in this format, by its name alone."""

    @abstractmethod
    def name(self, source: str) -> str:
        """The name of a model: the last part of its source, without an ending."""

    @abstractmethod
    def located(self, source: str) -> str | None:
        """The place of a model: a path on this machine, or the address of a server. None if files
        have to be downloaded."""

    @abstractmethod
    def load(self, source: str, runtime: Runtime) -> Backend:
        """A checked backend. Raises ModelError for a model that cannot be used."""

    @abstractmethod
    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        """The tokenizer of a model, whose weights are not loaded. `progress` is that of its
        download. Raises ModelError."""

    @abstractmethod
    def need(self, source: str, runtime: Runtime) -> Need:
        """The memory that a model will take, before it is loaded. Raises ModelError if it cannot be
        determined, and for a malformed source."""

    @abstractmethod
    def device(self, runtime: Runtime) -> str:
        """Where a model would run: "cpu", "cuda:0", "mps". Raises ModelError for a device that this
        machine does not have."""


class FileFormat(ModelFormat):
    """A format whose models are files, on this machine or on the hub."""

    def check_library(self, source: str) -> None:
        """Raise ModelError if the library that reads this format is not installed."""

    def download(
        self, source: str, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> str:
        """The path of a source (a file, or a model's folder), after downloading missing files.

        `progress` is called with the bytes on this machine and the bytes in all. A model that is
        already complete is used as it is, without contacting the hub. Raises Cancelled soon after
        `cancelled` returns true. Raises ModelError if the library that reads the format is not
        installed, the hub cannot be reached or does not provide the model, or the disk is too full;
        what was downloaded by then stays.
        """
        self.check_library(source)
        found = self.located(source)
        if found is not None:
            return found
        from engine.models.hub import BROKEN, UNREACHABLE, Meter, check_space, explained

        with explained(source, UNREACHABLE):
            store, files, names = self.offered(source)
        with explained(source, BROKEN):
            chosen = [files[name] for name in names]
            meter = Meter(sum(file.size for file in chosen), progress, cancelled)
            check_space(source, meter.total - sum(store.bytes_here(file) for file in chosen))
            paths = [store.fetch(file, meter) for file in chosen]
        return paths[0] if self.ending else str(Path(paths[0]).parent)

    def offered(self, source: str) -> tuple["Store", dict[str, "Remote"], Sequence[str]]:
        """Query the hub for a source: the place of its files in the cache, all files of the
        repository, and the names of the files that belong to the source. Raises the errors of the
        hub's client."""
        from huggingface_hub import HfApi

        from engine.models.hub import SECONDS, Store, remote

        repo = self.repository(source) or source
        info = HfApi().model_info(repo, files_metadata=True, timeout=SECONDS)
        files = {sibling.rfilename: remote(sibling) for sibling in info.siblings or ()}
        store = Store(repo, str(info.sha))
        return store, files, self.hub_files(source, store, files)

    @abstractmethod
    def weight_files(self, path: Path) -> Sequence[Path]:
        """The files with the weights of the model at that path."""

    def files(self, path: Path) -> Sequence[Path]:
        """All files of the model at that path, the weights included."""
        return self.weight_files(path)

    @abstractmethod
    def check_files(self, source: str, names: Collection[str], config: str) -> None:
        """Raise ModelError for a model that does not write text, as far as the names of its files
        and the text of its config.json show; "" if it has none."""

    @abstractmethod
    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        """The models of this format directly in a folder that contains these names."""

    @abstractmethod
    def repository(self, source: str) -> str | None:
        """The repository on the hub that a source names; None for a path."""

    @abstractmethod
    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        """The files of a source among all `files` of its repository, the weights last. Raises
        ModelError if some are missing."""

    @abstractmethod
    def belongs(self, source: str, name: str) -> bool:
        """Whether a file of the repository is deleted together with a source."""


def looks_like_path(source: str) -> bool:
    """Whether `source` names a folder rather than a hub id ("name" or "owner/name")."""
    path = Path(source)
    return (
        os.path.exists(source)  # false, not an error, for a name that is too long
        or path.is_absolute()
        or source.startswith((".", "~"))
        or (source.count("/") > 1)
    )


def head_folder(source: str, head: str) -> Path | None:
    """The folder of a transformers model's head: for "auto" the one in the model's folder, if any;
    for "off" none; any other text is the path of a head's folder."""
    if head != "auto":
        return None if head == "off" else Path(os.path.expanduser(head))
    folder = Path(os.path.expanduser(source)) / HEAD
    return folder if looks_like_path(source) and folder.is_dir() else None


def recommended(values: Mapping[str, Any]) -> Sampling:
    """The sampler settings among some values; the default ones if these cannot be used."""
    try:
        return Sampling(**{name: values[name] for name in SAMPLER if values.get(name) is not None})
    except SettingError:
        return Sampling()


def found_at(path: Path) -> str:
    """What a path leads to, as a part of the sentence in an error message."""
    if not path.is_dir():
        return "it is a file" if path.exists() else "there is no such file or folder"
    names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"the folder holds {', '.join(names[:NAMED])}{more}" if names else "the folder is empty"
