"""What a model format tells of itself, and of every model in it.

A *source* is what a user names: a path, or something on the Hugging Face hub
(engine/models/sources.py). The formats that there are stand in engine/models/formats.py.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.backends.base import Backend, Tokenizer
from engine.models.memory import Need
from engine.settings import Runtime

if TYPE_CHECKING:
    from engine.models.hub import Store

HEAD = "head"
"""The folder in that of a transformers model that holds its head (engine/models/torch_heads.py)."""

NAMED = 6
"""Files that an error names at most."""


class ModelFormat(Protocol):
    """One format. Its methods import the libraries that they need when they are called.

    `kind` is what runs it, as `BackendInfo.kind` has it. `ending` is how its files end, "" where a
    model is a folder. `settings` are those of a Runtime that no other format knows. With
    `sized_on_hub` the need of a model is known before it is downloaded. With `always_sized` a model
    whose need cannot be told cannot be used either. With `float32_on_cpu` the weights take four
    bytes a number on the processor, whatever the file holds. With `elsewhere` it runs on another
    machine, and nothing of it is on this one.
    """

    kind: str
    ending: str
    settings: tuple[str, ...]
    sized_on_hub: bool
    always_sized: bool
    float32_on_cpu: bool
    elsewhere: bool

    def recognises(self, source: str) -> bool:
        """Whether a source is in this format, by its name alone."""

    def check_library(self, source: str) -> None:
        """Raise ModelError while the library that reads this format is not installed."""

    def name(self, source: str) -> str:
        """What a model is called: the last part of its source, without an ending."""

    # where it is

    def located(self, source: str) -> str | None:
        """The path of a source on this machine; None where (some of) it has to be downloaded."""

    def weight_files(self, path: Path) -> Sequence[Path]:
        """The files of the weights of the model at that path."""

    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        """The models of this format directly in a folder that holds those names."""

    def repository(self, source: str) -> str:
        """The repository on the hub that a source names."""

    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        """The files of a source among all `files` of its repository, the weights last. Raises
        ModelError where some are missing."""

    def on_hub(self, source: str) -> bool:
        """Whether a source names something on the hub, and no path."""

    def belongs(self, source: str, name: str) -> bool:
        """Whether a file of the repository on the hub belongs to a source."""

    def files(self, path: Path) -> Sequence[Path]:
        """All files of the model at that path, the weights included."""

    def check_files(self, source: str, names: Collection[str], config: str) -> None:
        """Raise ModelError for what is no model that writes text, as far as the names of its files
        and the text of its config.json tell, "" where there is none."""

    # what it takes, and loading it

    def load(self, source: str, runtime: Runtime) -> Backend:
        """A checked backend. Raises ModelError for what cannot be used."""

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        """The tokenizer of a model, for which its weights are not loaded; `progress` is that of its
        download. Raises ModelError."""

    def need(self, source: str, runtime: Runtime) -> Need:
        """What the model will take, told before it is loaded. Raises ModelError."""

    def device(self, runtime: Runtime) -> str:
        """Where the model would be: "cpu", "cuda:0", "mps". Raises ModelError for what is not
        here."""


def looks_like_path(source: str) -> bool:
    """Whether `source` names a folder rather than a hub id ("name" or "owner/name")."""
    path = Path(source)
    return (
        os.path.exists(source)  # false, not an error, for a name that is too long
        or path.is_absolute()
        or source.startswith((".", "~"))
        or (source.count("/") > 1)
    )


def head_folder(source: str, wanted: str) -> Path | None:
    """Where the head of a transformers model is: "auto" is the one in its folder, if any, "off"
    none, any other text the path of a head's folder."""
    if wanted != "auto":
        return None if wanted == "off" else Path(wanted).expanduser()
    folder = Path(source).expanduser() / HEAD
    return folder if looks_like_path(source) and folder.is_dir() else None


def found_at(path: Path) -> str:
    """What a path leads to, as a part of a sentence: for errors of those who gave it."""
    if not path.is_dir():
        return "it is a file" if path.exists() else "there is no such file or folder"
    names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"the folder holds {', '.join(names[:NAMED])}{more}" if names else "the folder is empty"
