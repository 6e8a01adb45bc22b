"""How models are found, measured and read: the app's one door to the engine's loaders.

The loaders bring heavy libraries with them, so they are imported when they are needed. Tests put
their own functions in the place of these.
"""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError, SettingError
from engine.models.formats import FORMATS, format_of
from engine.models.memory import Need, free_memory
from engine.servers.address import is_address
from engine.servers.address import settled as settled_address
from engine.settings import Runtime, Sampling

DEFAULT_RUNTIME = Runtime()
"""How models run unless something else is said."""


def scan(folder: str) -> list[str]:
    """The models in a folder. Raises ModelError when it cannot be read."""
    from engine.models import sources

    return sources.scan(folder, FORMATS)


def present(source: str) -> bool:
    """Whether nothing of a model has to be downloaded."""
    return format_of(source).located(source) is not None


def download(
    source: str, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
) -> str:
    """Fetch what is missing of a model; see engine/models/sources.py. Raises ModelError for a file
    that could not be read afterwards: downloads are large."""
    from engine.models import sources

    model_format = format_of(source)
    model_format.check_library(source)
    return sources.download(model_format, source, progress, cancelled)


def check(source: str) -> int:
    """The bytes of a model, on this machine or to be downloaded, once it is known to be there and
    to look like one that writes text. Raises ModelError, also where no library reads it."""
    from engine.models import sources

    model_format = format_of(source)
    model_format.check_library(source)
    if model_format.elsewhere:
        model_format.need(source, DEFAULT_RUNTIME)
        return 0
    return sources.check(model_format, settled(source))


def removable(source: str, folders: Sequence[Path] = ()) -> bool:
    """Whether `remove` would delete a model."""
    from engine.models import sources

    return sources.removable(format_of(source), settled(source), folders)


def remove(source: str, folders: Sequence[Path] = ()) -> int:
    """Delete a model that lies in the hub's cache or in one of the folders; returns the bytes that
    this frees. Raises ModelError."""
    from engine.models import sources

    return sources.remove(format_of(source), settled(source), folders)


def load(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Backend:
    """Load a model; what is not on this machine yet is downloaded, without a bar. Raises ModelError
    for one that cannot be used."""
    return format_of(source).load(source, runtime)


def silent(done: int, total: int) -> None:
    """Progress that nobody follows."""


def tokenizer(source: str, progress: Callable[[int, int], None] = silent) -> Tokenizer:
    """A model's tokenizer. Its weights are not loaded, and where its tokenizer is a file of its own
    they are not downloaded either. Raises ModelError."""
    return format_of(source).tokenizer(source, progress)


def need(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> Need:
    """What a model will take. Raises ModelError for what is no model, and where that cannot be told
    before it is downloaded."""
    return format_of(source).need(source, runtime)


def device(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> str:
    """Where a model would be. Raises ModelError for what is not here."""
    return format_of(source).device(runtime)


@dataclass(frozen=True, slots=True)
class ModelLoaders:
    """The functions above, as one value; `free` is in bytes, by device."""

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
"""How models are read unless something else is said."""
SAMPLER = ("temperature", "top_k", "top_p", "min_p")


def check_there(source: str) -> None:
    """Raise ModelError for a path where nothing is: that can be told before anything is loaded."""
    model_format = format_of(source)
    if model_format.elsewhere:
        model_format.need(source, DEFAULT_RUNTIME)
        return
    path = model_format.located(source)
    if path is not None and not os.path.exists(path):
        raise ModelError(
            f"The model {source!r} does not exist. Give a folder that holds config.json, a "
            "tokenizer and *.safetensors files, a GGUF file, or a model of the Hugging Face hub."
        )


def sampler(source: str) -> Sampling:
    """The sampler that the makers of a model recommend, where its folder tells that before the
    model is read; else ours."""
    try:
        values = json.loads((Path(source) / "generation_config.json").read_text("utf-8"))
        return Sampling(**{name: values[name] for name in SAMPLER if values.get(name) is not None})
    except (OSError, ValueError, AttributeError, SettingError):
        return Sampling()


def settled(source: str) -> str:
    """The full path of a folder or a file, so that one model has one name; anything else as it was
    given, and an address as addresses are written."""
    source = source.strip()
    if is_address(source):
        return settled_address(source)
    path = Path(source).expanduser()
    if not source or not path.exists():
        return source
    # What a link to a file points to need not end in .gguf, as in the hub's cache.
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def kind_of(source: str) -> str:
    """What would run a model, as `BackendInfo.kind` has it."""
    return format_of(source).kind


def name_of(source: str) -> str:
    """What a model is called: the last part of its source, without an ending."""
    name = format_of(source).name(source)
    return name.encode("utf-8", "replace").decode().strip() or "model"


def free_name(source: str, taken: Collection[str]) -> str:
    """What a draft model is called in plans: a name that no other one has."""
    base = name_of(source)
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name
