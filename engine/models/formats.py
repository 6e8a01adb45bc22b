"""The formats of models: GGUF files, folders with safetensors files, and models on a server.

All code that depends on the format of a model uses this module. A new format is one class and one
entry in FORMATS, which lists them in the order in which they are tried on a source; the last one
accepts every source.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError, first_line
from engine.models import llama_cpp_python, memory
from engine.models.format import HEAD, FileFormat, ModelFormat, head_folder, looks_like_path
from engine.models.gguf_files import (
    ENDING,
    NO_MODELS,
    forecast_of,
    heads_for,
    hub_file,
    is_head,
    is_model,
    listed,
    may_be_in_core,
    parts_of,
)
from engine.models.memory import Need, weight_files
from engine.models.probe import probed
from engine.native import verifies_cheaply
from engine.servers.client import KIND, is_address, parsed
from engine.settings import Runtime

if TYPE_CHECKING:
    from engine.models.hub import Store


CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SMALL = (
    CONFIG, "generation_config.json", "tokenizer*", "*.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
)  # fmt: skip
"""The files of a model besides its weights."""
NEVER = (".py", ".bin")
"""Endings of files that are never used: code and pickled weights."""
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
"""A model has at least one of these files, which contain its tokens."""
AUTO, OFF = "auto", "off"
WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Parts of the names of architectures that write text."""


class Transformers(FileFormat):
    """Folders with safetensors weights, which transformers runs: a path, or "owner/name" on the
    hub. Every source that no other format recognises counts as one."""

    kind = "transformers"
    settings = ("device", "dtype")
    estimated = True
    float32_on_cpu = True

    def recognises(self, source: str) -> bool:
        return True

    def name(self, source: str) -> str:
        return Path(source).name

    def located(self, source: str) -> str | None:
        if looks_like_path(source):
            return os.path.expanduser(source)
        from engine.models.hub import cached

        config = cached(source, CONFIG)
        if config is None:
            return None
        # Weights are downloaded last, so if they are complete, everything is.
        weights = weight_files(source, Path(config).parent)
        complete = weights and all(path.is_file() for path in weights)
        return str(Path(config).parent) if complete else None

    def weight_files(self, path: Path) -> Sequence[Path]:
        return [*path.glob("*.safetensors")]

    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        if Path(folder).name == HEAD:
            return
        if CONFIG in names and any(name.endswith(".safetensors") for name in names):
            yield folder

    def repository(self, source: str) -> str | None:
        return None if looks_like_path(source) else source

    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        weights = ["model.safetensors"]
        if INDEX in files:
            index = json.loads(store.read(INDEX))
            weights = sorted(set(index["weight_map"].values()))
        for name in (CONFIG, *weights):
            if name not in files:
                raise ModelError(
                    f"The repository {source!r} has no {name}, so it holds no transformers model "
                    f"in safetensors files. {listed(files)}"
                )
        small = [
            name
            for name in sorted(files)
            if not name.endswith(NEVER) and any(fnmatchcase(name, pattern) for pattern in SMALL)
        ]
        return [*small, *([INDEX] if INDEX in files else []), *weights]

    def belongs(self, source: str, name: str) -> bool:
        return not name.lower().endswith(ENDING)

    def files(self, path: Path) -> Sequence[Path]:
        small = (p for p in path.iterdir() if any(fnmatchcase(p.name, each) for each in SMALL))
        index = path / INDEX
        return [*small, *([index] if index.exists() else []), *self.weight_files(path)]

    def check_files(self, source: str, names: Collection[str], config: str) -> None:
        if not any(name in names for name in VOCABULARIES):
            raise refusal(source, "it has no tokenizer")
        try:
            values = json.loads(config)
            named = [str(name) for name in values.get("architectures") or ()]
        except (AttributeError, RecursionError, TypeError, ValueError) as error:
            raise refusal(source, f"its {CONFIG} cannot be read ({error})") from error
        writes = any(part in name for name in named for part in WRITES)
        if named and not writes or values.get("is_encoder_decoder"):
            what = ", ".join(named) or "an encoder with a decoder"
            raise refusal(source, f"it does not write text from left to right ({what})")

    def load(self, source: str, runtime: Runtime) -> Backend:
        from engine.models.load_transformers import load_transformers

        return load_transformers(source, runtime)

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        from engine.models.load_transformers import load_tokenizer

        return load_tokenizer(source)

    def need(self, source: str, runtime: Runtime) -> Need:
        device = self.device(runtime)
        head = head_folder(source, runtime.head)
        ahead = runtime.head == "auto" and head is None
        need = memory.memory_need(
            source, device, runtime.dtype, runtime.context_length, head, ahead, runtime.bits
        )
        return need.of(runtime.parallel)

    def device(self, runtime: Runtime) -> str:
        from engine.models.load_transformers import pick_device

        return str(pick_device(runtime.device))


def refusal(source: str, problem: str) -> ModelError:
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a folder or a repository that holds "
        "a causal language model with its tokenizer and *.safetensors files."
    )


class Gguf(FileFormat):
    """GGUF files, which llama.cpp runs, or the compiled core if the bits of a weight are chosen: a
    path that ends in .gguf, or "owner/name:file.gguf" on the hub."""

    kind = "llama.cpp"
    ending = ENDING
    settings = ("gpu_layers", "batch_size", "flash_attention", "cache_type")

    def recognises(self, source: str) -> bool:
        return source.lower().endswith(ENDING)

    def check_library(self, source: str) -> None:
        # A path that leads nowhere is reported as such.
        if hub_file(source) or os.path.exists(os.path.expanduser(source)):
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
        return parts_of(path)

    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        paths = (os.path.join(folder, name) for name in names)
        return (path for path in paths if is_model(path))

    def repository(self, source: str) -> str | None:
        named = hub_file(source)
        return named.repo if named else None

    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        named = hub_file(source)
        assert named is not None
        for part in named.parts:
            if part not in files:
                raise ModelError(
                    f"The repository {named.repo!r} has no file {part!r}. {listed(files)}"
                )
        # With the head that was made for the file, if the repository has one.
        return *named.parts, *heads_for(named.file, files)[:1]

    def belongs(self, source: str, name: str) -> bool:
        named = hub_file(source)
        if named is None or not is_head(os.path.basename(name)):
            return named is not None and name in named.parts
        # A head serves all files of the repository on this machine.
        from engine.models.hub import repo_folder

        here = {path.name for path in repo_folder(named.repo).glob(f"snapshots/**/*{ENDING}")}
        parts = {os.path.basename(part) for part in named.parts}
        return all(is_head(other) for other in here - parts)

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
        path = self.download(source, lambda done, total: None, lambda: False)
        bits, reason = self.bits(path, runtime), ""
        if bits != OFF:
            probed(path, Runtime(head="off"))
            from engine.models.load_packed import load_packed

            try:
                return load_packed(path, replace(runtime, bits=bits))
            except ModelError as error:
                if runtime.bits != AUTO:
                    raise
                reason = cause_of(error)
        found = probed(path, runtime)
        from engine.models.load_llamacpp import load_gguf

        backend = load_gguf(path, runtime, found)
        if reason:
            note = f"llama.cpp computes it, as the compiled core cannot: {reason}."
            note = f"{backend.info.note} {note}".strip()
            backend.info = replace(backend.info, note=note)
        return backend

    def bits(self, path: str, runtime: Runtime) -> str:
        """The most bits of a weight, with which the core computes a file; OFF if llama.cpp does."""
        if runtime.bits != AUTO:
            return runtime.bits
        named = runtime.cache_type, runtime.flash_attention
        if named != (AUTO, AUTO) or not verifies_cheaply() or not llama_cpp_python.installed():
            return OFF
        from engine.models.gguf import offloads

        file = Path(os.path.expanduser(path))
        if offloads(runtime) or not may_be_in_core(file):
            return OFF
        from engine.models.load_packed import KEEPS, suits

        return KEEPS if suits(file, runtime) else OFF

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        path = self.download(source, progress, lambda: False)
        probed(path, Runtime(head="off"))
        from engine.models.load_llamacpp import load_tokenizer

        return load_tokenizer(path)

    def need(self, source: str, runtime: Runtime) -> Need:
        path = self.located(source)
        if path is None:
            raise ModelError(
                f"What {source!r} will need is known once it is here. Download it in the Models "
                "tab, or start with it as --model."
            )
        bits = self.bits(path, runtime)
        if bits != OFF:
            probed(path, Runtime(head="off"))
            from engine.models.load_packed import packed_need

            return packed_need(path, replace(runtime, bits=bits)).of(runtime.parallel)
        found, file = probed(path, runtime), Path(os.path.expanduser(path))
        names = [each.name for each in file.parent.iterdir()]
        forecast = forecast_of(file, heads_for(file.name, names))
        return Need(found.parameters, found.weights, found.cache, forecast)

    def device(self, runtime: Runtime) -> str:
        if runtime.bits not in (AUTO, OFF):
            return "cpu"
        import torch  # it knows the free memory of a GPU

        if not torch.cuda.is_available() or not llama_cpp_python.installed():
            return "cpu"
        from engine.models.gguf import offloads

        return "cuda:0" if offloads(runtime) else "cpu"


def cause_of(error: ModelError) -> str:
    """What lies behind an error. Nothing holds its frames afterwards, and the model in them."""
    cause = error.__cause__
    return first_line(cause if isinstance(cause, Exception) else error).rstrip(".")


class Server(ModelFormat):
    """Models that an OpenAI-compatible server runs: the source is its address. Such a model has no
    files and needs no memory on this machine. No address is contacted before a model is loaded."""

    kind = KIND

    def recognises(self, source: str) -> bool:
        return is_address(source)

    def name(self, source: str) -> str:
        try:
            address = parsed(source)
        except ModelError:
            return source
        return address.model or address.host

    def located(self, source: str) -> str | None:
        return source

    def load(self, source: str, runtime: Runtime) -> Backend:
        from engine.servers.served import ServedModel

        return ServedModel(parsed(source))

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        raise ModelError(
            f"The tokenizer of {source!r} is on a server, where it cannot be read. Name a folder, "
            "a file or a hub id that holds the same one."
        )

    def need(self, source: str, runtime: Runtime) -> Need:
        parsed(source)
        return Need(0, 0, 0)

    def device(self, runtime: Runtime) -> str:
        return "cpu"


FORMATS: tuple[ModelFormat, ...] = (Server(), Gguf(), Transformers())


def format_of(source: str) -> ModelFormat:
    """The format of a source, by its name alone."""
    return next(each for each in FORMATS if each.recognises(source))
