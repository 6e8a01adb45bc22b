"""The head of a transformers model: found in the folder `head` beside its weights, or given.

A head that was found and does not fit is left out, and the model says why; one that was asked for
is an error then.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.backends.base import digest
from engine.backends.transformers import TransformersBackend
from engine.errors import ModelError
from engine.heads.base import HeadInfo
from engine.heads.eagle3 import taps_of
from engine.heads.eagle3_files import Target, read_head
from engine.heads.eagle3_head import DEPTH, Eagle3Head, Eagle3Weights
from engine.models.format import head_folder

NAME = "EAGLE-3"
EDGE = 1 << 16
"""Bytes at either end of a file of weights that tell it from others."""


def with_head(backend: TransformersBackend, source: str, wanted: str) -> None:
    """Give a loaded model its head, as `head_folder` finds it. Raises ModelError for a given one
    that cannot be used."""
    folder = head_folder(source, wanted)
    if folder is None:
        return
    try:
        weights = weights_of(backend, folder, weights_digest(source))
    except ModelError as error:
        if wanted != "auto":
            raise
        backend.info = replace(backend.info, head=HeadInfo(NAME, 0, False, note=str(error)))
        return
    backend.head = Eagle3Head(weights)
    backend.info = replace(backend.info, head=weights.info)


def weights_of(backend: TransformersBackend, folder: Path, target: str) -> Eagle3Weights:
    """The head in a folder, beside its target and in its dtype. Raises ModelError."""
    model = backend.model
    config = model.config.get_text_config()
    fits = Target(config.hidden_size, config.num_hidden_layers, config.vocab_size, target)
    head, tokens = read_head(folder, fits)
    head.to(model.device, model.dtype)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    info = HeadInfo(
        NAME,
        DEPTH,
        branches=True,
        parameters=sum(each.numel() for each in head.parameters()),
        memory_bytes=sum(each.numel() * each.element_size() for each in head.parameters()),
        fingerprint=files_digest(sorted(folder.glob("*.safetensors"))),
    )
    try:
        taps = taps_of(model, head.shape.layers)
    except AttributeError as error:
        raise ModelError(
            f"The EAGLE-3 head in {str(folder)!r} cannot be used: the layers of "
            f"{config.model_type} models are not where Strata looks for them. Load the model "
            "without it: --head off."
        ) from error
    return Eagle3Weights(
        head,
        head.embed_tokens.weight if head.shape.embedding else embedding.weight,
        head.lm_head.weight if head.shape.output else output.weight,
        tokens,
        taps,
        info,
    )


def weights_digest(source: str) -> str:
    """Names the files of a model's weights; "" where they are not in a folder."""
    return files_digest(sorted(Path(source).glob("*.safetensors"))) if Path(source).is_dir() else ""


def files_digest(files: Sequence[Path]) -> str:
    """Names files by their sizes and edges."""
    parts: list[str | bytes] = []
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            parts += [str(size), file.read(EDGE)]
            file.seek(max(0, size - EDGE))
            parts.append(file.read())
    return digest(parts) if parts else ""
