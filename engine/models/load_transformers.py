"""From a folder or a hub id to a checked backend.

Only safetensors weights are read and no code that comes with a model is run. Before a model is
handed out, one small tree forward is compared with plain forwards; a model that disagrees (or
cannot roll back) is still usable, decodes plainly, and says why.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from engine.backends.base import BackendInfo, Vocabulary, digest, fingerprint
from engine.backends.caches import is_recurrent, kinds_of
from engine.backends.chat_template import FILLER, can_think
from engine.backends.check import FEW, TREE, check, check_apart, resumes
from engine.backends.folded_attention import fold, unfold
from engine.backends.transformers import TransformersBackend
from engine.backends.transformers_tokenizer import (
    TransformersTokenizer,
    filler,
    tokenizer_type,
    vocabulary_of,
)
from engine.errors import ModelError, SettingError, first_line
from engine.machine import computes_bfloat16
from engine.models.format import looks_like_path
from engine.models.hub import check_reachable
from engine.models.state_memory import CHAIN
from engine.models.torch_heads import with_head
from engine.settings import Sampling

# The app says how far loading is; a bar of the library would be drawn below it.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""Largest logit difference the check allows; a wrong mask or position is off by whole units."""
DEFAULT_CONTEXT = 8192
USUAL_THREADS = torch.get_num_threads()
NO_LIMIT = 1 << 60
"""The tokenizer's own limit would only print a warning; prompts are checked where they are used."""


def load_transformers(
    source: str,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int = DEFAULT_CONTEXT,
    threads: int = 0,
    head: str = "auto",
) -> TransformersBackend:
    """Load a causal LM from a local folder or a hub id.

    `device` is "auto", "cpu", "cuda" or "mps"; `dtype` is "auto", "float32", "bfloat16" or
    "float16", see `pick_dtype`. The context is the model's own, at most `context_length`. `threads`
    of torch, 0 for as many as it began with; they are those of all models. `head` as for
    `with_head`. Raises ModelError.
    """
    torch.set_num_threads(threads or USUAL_THREADS)
    where = pick_device(device)
    pick_dtype(dtype, where)  # an unknown one is refused before anything is read
    source = found(source)
    FILLER.prepare("transformers")
    model, tokenizer = read(source, where, dtype)
    backend = TransformersBackend(
        model, tokenizer, describe(source, model, tokenizer, context_length)
    )
    examine(backend, TOLERANCE[model.dtype])
    with_head(backend, source, head)
    return backend


def load_tokenizer(source: str) -> TransformersTokenizer:
    """The tokenizer of a model in a local folder or on the hub: its weights are neither read nor
    downloaded. Raises ModelError."""
    source = found(source)
    FILLER.prepare("transformers")
    try:
        if not looks_like_path(source):
            check_reachable(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
    except Exception as error:
        # As where a model is read: over a dozen types mean the same.
        raise ModelError(
            f"The tokenizer of {source!r} could not be loaded: {one_line(error)} Check that "
            "config.json and the tokenizer's files are there and complete."
        ) from error
    tokenizer.model_max_length = NO_LIMIT
    info = Vocabulary(
        name_of(source),
        fingerprint(tokenizer_type(tokenizer), vocabulary_of(tokenizer)),
        config.get_text_config().vocab_size,
        eos_ids(generation, config, tokenizer),
    )
    return TransformersTokenizer(tokenizer, info)


def found(source: str) -> str:
    """The source with its home folder. Raises ModelError for a folder that is no model."""
    if source.startswith("~"):
        source = str(Path(source).expanduser())
    if looks_like_path(source) and not (Path(source) / "config.json").is_file():
        problem = "has no config.json" if Path(source).is_dir() else "does not exist"
        raise ModelError(
            f"The model folder {source!r} {problem}. Give a folder that holds config.json, "
            "a tokenizer and *.safetensors files, or the id of a model on the Hugging Face hub."
        )
    return source


def name_of(source: str) -> str:
    """What a model is called."""
    return Path(source).resolve().name if looks_like_path(source) else source


def read(
    source: str, device: torch.device, dtype: str, more: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """The library's model, on its device, and its tokenizer. `more` is what else the library is to
    know. Raises ModelError."""
    try:
        if not looks_like_path(source):
            check_reachable(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer.model_max_length = NO_LIMIT
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=pick_dtype(dtype, device, own_dtype(config)),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **(more or {}),
        )
        model, report = loaded
        if report["missing_keys"]:
            # The library would go on with random numbers in their place.
            raise ValueError(f"the weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
        return model.eval().requires_grad_(False).to(device), tokenizer
    except Exception as error:
        # The libraries below raise over a dozen types for an unusable model; all mean the same.
        raise unusable(source, error) from error


def unusable(source: str, error: Exception) -> ModelError:
    """The error for a model that a library does not load."""
    return ModelError(
        f"The model {source!r} could not be loaded: {one_line(error)} "
        "Check that the files are complete and that the model is a causal language model "
        "with safetensors weights."
    )


def examine(backend: TransformersBackend, allowed: float) -> None:
    """Check what the model can do; `allowed` as for `check`. Raises ModelError.

    It keeps folded attention where that loses nothing, else it has the library's.
    """
    described = backend.info
    if fold(backend.model):
        with suppress(ModelError):
            examine_all(backend, allowed)
            if backend.info == described:
                return
        unfold(backend.model)
        backend.info, backend.offset = described, 0
        backend.reset()
    examine_all(backend, allowed)


def examine_all(backend: TransformersBackend, allowed: float) -> None:
    """Check a model with the attention that it has.

    Where the rotary factors change with the length, on both sides of that, too: the tokens are few,
    their positions are set.
    """
    reference = backend.alone
    reach = backend.window or backend.chunk or 0
    backend.info = check(backend, reference, allowed, reach)
    for switch in backend.rotary.switches:
        inside, beyond = switch - FEW - max(map(len, TREE)), switch + 1 - FEW
        for offset in (inside, beyond):
            if backend.info.can_tree and 0 <= offset < backend.info.context_length - 2 * FEW:
                backend.offset = offset
                backend.info = check(backend, reference, allowed, back=False)
    backend.offset = 0
    if backend.recurrent:
        backend.resumes = resumes(backend, reference, allowed)
        check_apart(backend, reference, allowed)


def pick_device(device: str) -> torch.device:
    """The torch device for a name; "auto" takes CUDA, then MPS, then the CPU."""
    usable = {"cpu": True, "cuda": torch.cuda.is_available()}
    usable["mps"] = torch.backends.mps.is_available()
    if device == "auto":
        device = next(name for name in ("cuda", "mps", "cpu") if usable[name])
    if not usable.get(device.split(":")[0], False):
        names = ", ".join(name for name, there in usable.items() if there)
        raise ModelError(f"The device {device!r} is not available here. Choose auto, {names}.")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device, own: object = None) -> torch.dtype | str:
    """The torch dtype for a name. "auto" is the checkpoint's `own` on a GPU, and bfloat16 on a
    processor that computes with it; else float32 on the processor, which computes with that."""
    if dtype == "auto":
        if device.type != "cpu":
            return "auto"
        native = own == torch.bfloat16 and computes_bfloat16()
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"The dtype {dtype!r} is unknown. Choose auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def own_dtype(config: Any) -> object:
    """The dtype of a checkpoint's weights, as far as its config tells."""
    return getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)


def describe(source: str, model: Any, tokenizer: Any, context_length: int) -> BackendInfo:
    """What the program needs to know of a loaded model; whether it can verify trees is a guess."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or context_length
    context = min(int(own), context_length)
    kind, plainly, keeps = config.model_type, kinds_of(config) is None, is_recurrent(config)
    chains = keeps or counts_rows(config, context)
    note = f"{kind} models take rows for positions, so chains are verified, not trees."
    if keeps:
        note = f"{kind} models keep a state, so chains are verified, not trees."
    if plainly:
        note = f"{kind} models keep a state that cannot be rolled back, so it decodes plainly."
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    fill = filler(tokenizer)
    return BackendInfo(
        name=name_of(source),
        kind="transformers",
        fingerprint=model_fingerprint(source, model),
        tokenizer_fingerprint=fingerprint(tokenizer_type(tokenizer), vocabulary_of(tokenizer)),
        vocabulary_size=config.vocab_size,
        eos_ids=eos_ids(model.generation_config, model.config, tokenizer),
        sampling=recommended(model),
        context_length=context,
        can_tree=not plainly,
        leaves=1 if chains else None,
        depth=CHAIN if keeps else None,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if str(model.device) == "cpu" else 0,
        tokenizer_type=tokenizer_type(tokenizer),
        parameters=sum(p.numel() for p in model.parameters()),
        memory_bytes=weights,
        note=note if plainly or chains else "",
        begin=begin_of(tokenizer),
        can_think=fill is not None and can_think(str(tokenizer.chat_template), fill),
    )


def begin_of(tokenizer: Any) -> str:
    """The token that a text begins with, where the tokenizer adds one."""
    token = tokenizer.bos_token_id
    added = token is not None and list(tokenizer.encode("a"))[:1] == [token]
    return str(tokenizer.bos_token) if added else ""


def counts_rows(config: Any, context_length: int) -> bool:
    """Whether some layer takes the number of a row in a forward for its position, where it matters.

    Those of Llama 4 without rotary embeddings do, to scale attention by how many times
    `floor_scale` fits a text. In a chain both numbers are one; in a tree they are not.
    """
    scaled = getattr(config, "attn_temperature_tuning", False)
    layers = getattr(config, "no_rope_layers", None) or [1]
    return bool(scaled) and not all(layers) and config.floor_scale <= context_length


def recommended(model: Any) -> Sampling:
    """The sampler settings in the model's generation config; others, or unusable ones, are ours."""
    values = {}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = getattr(model.generation_config, name, None)
        if value is not None:
            values[name] = value
    try:
        return Sampling(**values)
    except SettingError:
        return Sampling()


def eos_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn, from the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for value in (
        generation.eos_token_id,
        getattr(config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def model_fingerprint(source: str, model: Any) -> str:
    """Names the weights: the config and the edges of each weight file, or the hub id's commit."""
    files = sorted(Path(source).glob("*.safetensors")) if looks_like_path(source) else []
    parts: list[str | bytes] = [model.config.to_json_string()]
    if not files:
        parts += [source, str(getattr(model.config, "_commit_hash", ""))]
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            parts += [path.name, str(size), file.read(1 << 16)]
            file.seek(max(0, size - (1 << 16)))
            parts.append(file.read())
    return digest(parts)


def one_line(error: Exception) -> str:
    """The first line of an error, ended like a sentence."""
    text = first_line(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."
