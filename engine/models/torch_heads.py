"""The head of a transformers model: in the folder `head`, in a named folder, or in its weight
files.

Heads in the weight files are prediction layers, which transformers leaves out. If a head was found
automatically and does not fit, the model runs without it, with a note on the reason; for a head
that was named explicitly this is an error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from engine.backends.base import digest
from engine.backends.check import gives_numbers
from engine.backends.transformers import TransformersBackend
from engine.errors import ModelError, first_line
from engine.heads.assistant import TYPES, AssistantHead, read_assistant
from engine.heads.base import HeadInfo
from engine.heads.dflash import PLAIN, SELECTING, Dflash, DflashHead, read_dflash, unusable
from engine.heads.eagle3 import Eagle3, Target, read_head, taps_of
from engine.heads.eagle3_head import (
    COPIED,
    DEPTH,
    Eagle3Head,
    Eagle3Weights,
    FusedHead,
    Matrix,
    bytes_of,
    packed,
)
from engine.heads.mtp import DeepMtpHead, MtpHead, build
from engine.heads.native_head import NativeHead, NativeNetwork, native_network, suits
from engine.models.format import found_at, head_folder
from engine.models.gguf_files import ENDING
from engine.models.memory import folder_of, prediction, weight_files

NAME, MTP, DFLASH = "EAGLE-3", "MTP", "DFlash"
EDGE = 1 << 16
"""Bytes at either end of a file."""


def with_head(backend: TransformersBackend, source: str, choice: str) -> None:
    """Give a loaded model its head: the one that `head_folder` finds, or its prediction layers.
    Raises ModelError for a named head that cannot be used."""
    folder = head_folder(source, choice)
    if folder is None and choice == "off":
        return
    try:
        head = given_head(backend, folder, source) if folder else own_head(backend, source)
    except ModelError as error:
        if choice != "auto":
            raise
        info = HeadInfo(MTP if folder is None else NAME, 0, False, note=str(error))
        backend.info = replace(backend.info, head=info)
        return
    if head is not None:
        backend.head = head
        backend.info = replace(backend.info, head=head.info)


def given_head(backend: TransformersBackend, folder: Path, source: str) -> Eagle3Head:
    kinds = kinds_of(folder)
    if not kinds.isdisjoint((PLAIN, SELECTING)):
        try:
            return tried(backend, dflash_in(backend, folder, weights_digest(source)))
        except ValueError as error:
            raise ModelError(unusable(folder, error)) from error
    if kinds.isdisjoint(TYPES):
        return eagle3_in(backend, folder, weights_digest(source))
    check_folder(folder)
    try:
        return tried(backend, assistant_head(backend, folder))
    except Warning:
        raise  # Where warnings are errors: a deprecated name makes no head unusable.
    except Exception as error:
        # The library raises any exception for files with wrong content.
        raise ModelError(
            f"The assistant in {str(folder)!r} cannot be used with {backend.info.name}: "
            f"{first_line(error)}. Choose one that was made for this model, or load the model "
            "without one."
        ) from error


def kinds_of(folder: Path) -> set[str]:
    """The names in a config that may tell the kind of a head."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get("model_type"), *(config.get("architectures") or ())
        return {str(each) for each in named}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return set()


def assistant_head(backend: TransformersBackend, folder: Path) -> AssistantHead:
    model = backend.model
    network = read_assistant(folder, model)
    if not backend.info.can_tree:
        raise ValueError("the model decodes plainly")
    info = info_of(backend, network, DEPTH, folder_digest(folder))
    weights = Eagle3Weights(network, *backend.embeddings(), None, [model.get_decoder()], info)
    return AssistantHead(weights, backend)


def info_of(
    backend: TransformersBackend, network: torch.nn.Module, depth: int, fingerprint: str
) -> HeadInfo:
    """The description of a head other than EAGLE-3."""
    # Shared matrices are counted once; buffers that are computed at load are left out.
    held = {id(each): each for each in network.state_dict(keep_vars=True).values()}.values()
    return HeadInfo(
        MTP,
        depth,
        branches=backend.info.leaves != 1,
        parameters=sum(each.numel() for each in held),
        memory_bytes=sum(each.numel() * each.element_size() for each in held),
        fingerprint=digest([fingerprint, MTP]),
    )


def own_head(backend: TransformersBackend, source: str) -> Eagle3Head | None:
    """The prediction layers of a model, None if it has none. Raises ModelError if they cannot be
    used."""
    try:
        weights = own_weights(backend, source)
        if weights is None:
            return None
        if not backend.info.can_tree:
            raise ValueError("the model decodes plainly")
        # Several layers each guess at their own depth.
        single = weights.info.depth == DEPTH
        return tried(backend, MtpHead(weights) if single else DeepMtpHead(weights))
    except Warning:
        raise  # Where warnings are errors: a deprecated name makes no head unusable.
    except Exception as error:
        # The library raises any exception for layers that it cannot compute alone.
        raise ModelError(
            f"The prediction layers of {backend.info.name} cannot be used: {first_line(error)}."
        ) from error


def own_weights(backend: TransformersBackend, source: str) -> Eagle3Weights | None:
    """Read and build the prediction layers. Raises ValueError, and any exception of the library."""
    places = stored(source)
    config = backend.model.config.get_text_config()
    found = prediction(places, config.num_hidden_layers)
    if found is None:
        return None
    if problem := found.problem:
        raise ValueError(problem)
    tensors = read(
        places, [each for part in (*found.joints, *found.layers) for each in part.values()]
    )
    joints, layers = (
        [{part: tensors[name] for part, name in each.items()} for each in parts]
        for parts in (found.joints, found.layers)
    )
    if found.shared:
        del joints[1:]
    head = build(backend.model, joints, layers)
    depth = DEPTH if len(layers) == 1 else len(layers)
    info = info_of(backend, head, depth, backend.info.fingerprint)
    # The state after the last norm: a decoder's first output.
    taps = [backend.model.get_decoder()]
    return Eagle3Weights(head, *backend.embeddings(), None, taps, info)


def stored(source: str) -> dict[str, Path]:
    """The file of each tensor in the weight files of a model."""
    places: dict[str, Path] = {}
    for path in weight_files(source, folder_of(source)):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    return places


def read(places: Mapping[str, Path], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Some of these tensors. Raises ValueError for quantised ones."""
    tensors: dict[str, torch.Tensor] = {}
    for path in {places[name] for name in names}:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names if places[name] == path}
    for name, each in tensors.items():
        if each.dtype.itemsize < 2 or not each.is_floating_point():
            raise ValueError(f"its tensor {name} is quantised ({each.dtype})")
    return tensors


def tried(backend: TransformersBackend, head: Eagle3Head) -> Eagle3Head:
    """Test the guesses of a head and return it. Raises ValueError for guesses that are no numbers,
    and any exception of the head."""
    backend.head = head
    try:
        if not gives_numbers(backend, head, head.info.depth):
            raise ValueError("its guesses are no numbers")
        return head
    finally:
        backend.head = None


def eagle3_in(backend: TransformersBackend, folder: Path, target: str) -> Eagle3Head:
    """The EAGLE-3 head in a folder. Raises ModelError."""
    check_folder(folder)
    head, tokens = read_head(folder, target_of(backend, target))
    return eagle3_head(backend, head, tokens, folder_digest(folder), folder)


def eagle3_head(
    backend: TransformersBackend,
    head: Eagle3,
    tokens: NDArray[np.int64] | None,
    fingerprint: str,
    path: Path,
) -> Eagle3Head:
    """A head as the core computes it, or else torch, in the dtype of its target. Raises
    ModelError."""
    model = backend.model
    head.to(model.device, model.dtype)
    embedding, output = backend.embeddings()
    own = head.shape.output
    named = packed(head.lm_head.weight.data) if own else output_of(backend)
    kept = 0
    if head.shape.embedding:
        embedding = head.embed_tokens.weight
        kept += bytes_of(embedding)
    if own or named is not output:
        kept += bytes_of(named)
    info = HeadInfo(
        NAME,
        DEPTH,
        branches=True,
        parameters=sum(each.numel() for each in head.parameters()),
        fingerprint=fingerprint,
    )
    taps = read_by(backend, head.shape.layers, NAME, path)

    def weights(network: NativeNetwork | FusedHead) -> Eagle3Weights:
        memory = replace(info, memory_bytes=kept + network.bytes)
        return Eagle3Weights(network, embedding, named, tokens, taps, memory)

    native = native_network(head, named, backend.info.context_length)
    if native is not None and suits(weights(native), head):
        return NativeHead(weights(native))
    return Eagle3Head(weights(FusedHead(head)))


def dflash_in(backend: TransformersBackend, folder: Path, target: str) -> DflashHead:
    """The DFlash head in a folder. Raises ModelError."""
    check_folder(folder)
    head = read_dflash(folder, target_of(backend, target))
    return dflash_head(backend, head, folder_digest(folder), folder)


def dflash_head(
    backend: TransformersBackend, head: Dflash, fingerprint: str, path: Path
) -> DflashHead:
    """A head in the dtype of its target. Raises ModelError."""
    head.to(backend.model.device, backend.model.dtype)
    parameters = sum(each.numel() for each in head.parameters())
    embedding, output = backend.embeddings()
    named, depth = output_of(backend), head.shape.places - 1
    info = HeadInfo(
        DFLASH,
        depth,
        branches=True,
        at_once=depth,
        parameters=parameters,
        memory_bytes=head.fuse() + (bytes_of(named) if named is not output else 0),
        fingerprint=fingerprint,
    )
    taps = read_by(backend, head.shape.layers, DFLASH, path)
    return DflashHead(Eagle3Weights(head, embedding, named, None, taps, info))


def target_of(backend: TransformersBackend, weights: str) -> Target:
    config = backend.model.config.get_text_config()
    return Target(config.hidden_size, config.num_hidden_layers, config.vocab_size, weights)


def output_of(backend: TransformersBackend) -> Matrix:
    """The target's output matrix for a head. It stays in memory, so only a small one is copied."""
    _, output = backend.embeddings()
    if isinstance(output, torch.Tensor) and output.numel() <= COPIED:
        return packed(output)
    return output


def read_by(
    backend: TransformersBackend, layers: Sequence[int], name: str, path: Path
) -> list[torch.nn.Module]:
    """The target's modules whose outputs a head reads. Raises ModelError."""
    try:
        return taps_of(backend.model, layers)
    except AttributeError as error:
        kind = backend.model.config.get_text_config().model_type
        raise ModelError(
            f"The {name} head in {str(path)!r} cannot be used: the layers of {kind} models are "
            "not where Strata looks for them. Load the model without it: --head off."
        ) from error


def check_folder(folder: Path) -> None:
    """Raise ModelError if the names in a folder show that it holds no head."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return
    gguf = folder.suffix.lower() == ENDING or any(folder.glob(f"*{ENDING}"))
    other = " A head in a GGUF file serves the GGUF file of its model." if gguf else ""
    raise ModelError(
        f"There is no head in {str(folder)!r}: {found_at(folder)}. Give a folder with "
        "config.json and *.safetensors files of an EAGLE-3 or DFlash head for this model, or of "
        f"the assistant of a Gemma 4, or load the model without one (auto, off).{other}"
    )


def folder_digest(folder: Path) -> str:
    return files_digest(sorted(folder.glob("*.safetensors")))


def weights_digest(source: str) -> str:
    return folder_digest(Path(source)) if Path(source).is_dir() else ""


def files_digest(files: Sequence[Path]) -> str:
    parts = [part for path in files for part in edges(path)]
    return digest(parts) if parts else ""


def edges(path: Path) -> tuple[str, bytes, bytes]:
    """Identifies a file of weights: its size, its first bytes and its last ones."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(EDGE)
        file.seek(max(0, size - EDGE))
        return str(size), first, file.read()
