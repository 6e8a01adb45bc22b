"""Folders with safetensors weights, which transformers runs: a path, or "owner/name" on the hub."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError
from engine.models import memory
from engine.models.format import HEAD, ModelFormat, head_folder, looks_like_path
from engine.models.gguf_files import ENDING, listed
from engine.models.memory import Need, weight_files
from engine.ranks import beside
from engine.settings import Runtime

if TYPE_CHECKING:
    from engine.models.hub import Store

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SMALL = (
    CONFIG, "generation_config.json", "tokenizer*", "*.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
)  # fmt: skip
"""What belongs to a model besides its weights."""
NEVER = (".py", ".bin")
"""Code and pickled weights."""
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
"""A model has one of these at least, which say what its tokens are."""
WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What the names of architectures hold that write text."""


class Transformers(ModelFormat):
    """See engine/models/format.py. What no other format recognises may be one of these."""

    kind = "transformers"
    ending = ""
    settings = ("device", "dtype", "tensor_parallel")
    sized_on_hub = True
    always_sized = False
    float32_on_cpu = True
    elsewhere = False

    def recognises(self, source: str) -> bool:
        return True

    def check_library(self, source: str) -> None:
        """It is always there."""

    def name(self, source: str) -> str:
        return Path(source).name

    def located(self, source: str) -> str | None:
        if looks_like_path(source):
            return os.path.expanduser(source)
        from engine.models.hub import cached

        config = cached(source, CONFIG)
        if config is None:
            return None
        # Weights are downloaded last: where they are, the rest is.
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

    def repository(self, source: str) -> str:
        return source

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

    def on_hub(self, source: str) -> bool:
        return not looks_like_path(source)

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
        if runtime.tensor_parallel > 1:
            from engine.models.load_split import load_split

            return load_split(source, runtime)
        from engine.models.load_transformers import load_transformers

        return load_transformers(
            source,
            runtime.device,
            runtime.dtype,
            runtime.context_length,
            runtime.threads,
            runtime.head,
        )

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        from engine.models.load_transformers import load_tokenizer

        return load_tokenizer(source)

    def need(self, source: str, runtime: Runtime) -> Need:
        device = self.device(runtime)
        head = head_folder(source, runtime.head)
        ahead = runtime.head == "auto" and head is None
        need = memory.memory_need(
            source, device, runtime.dtype, runtime.context_length, head, ahead
        )
        size = runtime.tensor_parallel
        # Ranks on processors share the memory of their machine; a GPU holds one.
        here = beside(size) if device == "cpu" else 1
        return replace(need, weights=need.weights * here // size, cache=need.cache * here // size)

    def device(self, runtime: Runtime) -> str:
        from engine.models.load_transformers import pick_device

        return str(pick_device(runtime.device))


def refusal(source: str, problem: str) -> ModelError:
    """The error for a model of this format that cannot be used."""
    return ModelError(
        f"The model {source!r} cannot be used: {problem}. Give a folder or a repository that holds "
        "a causal language model with its tokenizer and *.safetensors files."
    )
