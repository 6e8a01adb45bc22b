"""GGUF files, which llama.cpp runs.

A source is a path that ends in .gguf, or "owner/name:file.gguf" on the hub.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError
from engine.models import llama_cpp_python
from engine.models.format import ModelFormat
from engine.models.gguf_files import (
    ENDING,
    NO_MODELS,
    SPLIT,
    heads_for,
    hub_file,
    is_head,
    is_model,
    listed,
)
from engine.models.memory import Need
from engine.settings import Runtime

if TYPE_CHECKING:
    from engine.models.hub import Store


class Gguf(ModelFormat):
    """See engine/models/format.py."""

    kind = "llama.cpp"
    ending = ENDING
    settings = ("gpu_layers", "batch_size", "flash_attention", "cache_type")
    sized_on_hub = False
    always_sized = True
    float32_on_cpu = False
    elsewhere = False

    def recognises(self, source: str) -> bool:
        return source.lower().endswith(ENDING)

    def check_library(self, source: str) -> None:
        llama_cpp_python.check(source)

    def name(self, source: str) -> str:
        name = Path(source.rpartition(":")[2]).name
        return name[: -len(ENDING)] if self.recognises(name) else name

    def located(self, source: str) -> str | None:
        named = hub_file(source)
        if named is None:
            return os.path.expanduser(source)
        from engine.models.hub import cached

        paths = [cached(named.repo, part) for part in named.parts]
        return paths[0] if all(paths) else None

    def weight_files(self, path: Path) -> Sequence[Path]:
        split = SPLIT.fullmatch(path.name)
        same = f"{escape(split[1])}-?????-of-{split[3]}{ENDING}" if split else escape(path.name)
        return [*path.parent.glob(same)] if path.is_file() else []

    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        paths = (os.path.join(folder, name) for name in names)
        return (path for path in paths if is_model(path))

    def repository(self, source: str) -> str:
        named = hub_file(source)
        return named.repo if named else source

    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        named = hub_file(source)
        assert named is not None
        for part in named.parts:
            if part not in files:
                raise ModelError(
                    f"The repository {named.repo!r} has no file {part!r}. {listed(files)}"
                )
        # The head that is made for the file, where the repository has one.
        return *named.parts, *heads_for(named.file, files)[:1]

    def on_hub(self, source: str) -> bool:
        return hub_file(source) is not None

    def belongs(self, source: str, name: str) -> bool:
        named = hub_file(source)
        if named is None or not is_head(os.path.basename(name)):
            return named is not None and name in named.parts
        # A head serves all files of the repository that are here.
        from engine.models.hub import repo_folder

        here = {path.name for path in repo_folder(named.repo).glob(f"snapshots/**/*{ENDING}")}
        parts = {os.path.basename(part) for part in named.parts}
        return all(is_head(other) for other in here - parts)

    def files(self, path: Path) -> Sequence[Path]:
        return self.weight_files(path)

    def check_files(self, source: str, names: Collection[str], config: str) -> None:
        name = os.path.basename(source).lower()
        if wrong := next((word for word in NO_MODELS if word in name), None):
            raise ModelError(
                f"The file {source!r} is no model that writes text: its name says {wrong}. Choose "
                "the file of the language model itself."
            )
        if is_head(name):
            raise ModelError(
                f"The file {source!r} holds the head of a model by its name, not a model. Choose "
                "the file of the model: its head is found beside it."
            )

    def load(self, source: str, runtime: Runtime) -> Backend:
        from engine.models.load_llamacpp import load_gguf
        from engine.models.sources import download

        path = download(self, source, lambda done, total: None, lambda: False)
        backend: Backend = load_gguf(path, runtime)
        if runtime.tensor_parallel > 1:
            note = "One process computes it: GGUF files are not split over several."
            backend.info = replace(backend.info, note=f"{backend.info.note} {note}".strip())
        return backend

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        from engine.models.load_llamacpp import load_tokenizer
        from engine.models.sources import download

        path = download(self, source, progress, lambda: False)
        found: Tokenizer = load_tokenizer(path)
        return found

    def need(self, source: str, runtime: Runtime) -> Need:
        from engine.models.load_llamacpp import need
        from engine.models.outlook import of_gguf

        path = self.located(source)
        if path is None:
            raise ModelError(
                f"What {source!r} will need is known once it is here. Download it in the Models "
                "tab, or start with it as --model."
            )
        found, file = need(path, runtime), Path(path).expanduser()
        names = [each.name for each in file.parent.iterdir()]
        return replace(found, outlook=of_gguf(file, heads_for(file.name, names)))

    def device(self, runtime: Runtime) -> str:
        from engine.models.load_llamacpp import device

        return device(runtime)
