"""From a folder or a hub id to a checked backend.

Only safetensors weights are read and no code that comes with a model is run. Before a model is
returned, one small tree forward is compared with plain forwards. A model that disagrees or cannot
roll back decodes plainly, and its note gives the reason.
"""

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from engine.backends.base import BackendInfo, TokenizerInfo, digest, fingerprint
from engine.backends.caches import is_recurrent, kinds_of
from engine.backends.captured import capture
from engine.backends.chat_template import FILLER, call_form, can_choose
from engine.backends.check import FEW, TREE, check, check_apart, joins, resumes
from engine.backends.folded_attention import fold, unfold
from engine.backends.native_forward import attach
from engine.backends.quantised import PackedConfig, problem, sizes
from engine.backends.rounded import before_ampere
from engine.backends.rounded import problem as device_problem
from engine.backends.special_tokens import imitable
from engine.backends.transformers import TransformersBackend
from engine.backends.transformers_tokenizer import (
    TransformersTokenizer,
    filler,
    tokenizer_type,
    vocabulary_of,
)
from engine.errors import ModelError, first_line
from engine.heads.captured_head import capture_head
from engine.models.format import looks_like_path, recommended
from engine.models.hub import check_reachable
from engine.models.load_quantised import stored
from engine.models.memory import CHAIN, loading_of
from engine.models.quantised_files import KEEPS, form_of, kept_form
from engine.models.torch_heads import edges, with_head
from engine.settings import Runtime
from engine.thinking import marks_of
from engine.tools import stop_of

# The app shows the progress of loading itself.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The same by their names in weight files."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The names in which configs give the experts of a layer."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""The largest logit difference that the check allows; a wrong mask or position differs by whole
units."""
PACKED_TOLERANCE = 0.5
"""The same for weights of few bits: a sum that rounds differently may move an input of a product to
the next of its 8 bits."""
DEFAULT_RUNTIME = Runtime()
OVERFLOWING = {"gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"}
"""Types of models whose states exceed float16 (the list of vLLM, vllm/config/model.py)."""
USUAL_THREADS = torch.get_num_threads()
NO_LIMIT = 1 << 60
"""Disables the tokenizer's own limit, which would only print a warning; prompts are checked where
they are used."""


def load_transformers(source: str, runtime: Runtime = DEFAULT_RUNTIME) -> TransformersBackend:
    """Load a causal LM from a local folder or a hub id.

    `loading_of` says which dtype it gets. The threads are those of all models in torch. Few bits
    are the most of a weight, whatever the dtype is; with "auto", a processor and an NVIDIA GPU keep
    the numbers of a folder that was quantised already. Raises ModelError.
    """
    device, dtype, bits = runtime.device, runtime.dtype, runtime.bits
    torch.set_num_threads(runtime.threads or USUAL_THREADS)
    where = pick_device(device)
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"The dtype {dtype!r} is unknown. Choose auto, {', '.join(DTYPES)}.")
    pick_bits(bits, where)
    source = found(source)
    FILLER.prepare("transformers")
    model, tokenizer, packing = read(source, where, dtype, bits)
    backend = TransformersBackend(
        model, tokenizer, describe(source, model, tokenizer, runtime.context_length, packing)
    )
    allowed = PACKED_TOLERANCE if packing else TOLERANCE[model.dtype]
    examine(backend, allowed, runtime.parallel)
    with_head(backend, source, runtime.head)
    if where.type == "cuda":
        with_captured(backend, runtime.parallel)
    elif packing:
        with_native(backend)
    backend.info = replace(backend.info, imitable=imitable(backend.render, backend.special))
    return backend


def load_tokenizer(source: str) -> TransformersTokenizer:
    """The tokenizer of a model in a local folder or on the hub: its weights are neither read nor
    downloaded. Raises ModelError."""
    source = found(source)
    FILLER.prepare("transformers")
    try:
        config, tokenizer = described(source)
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
    except Exception as error:
        # Over a dozen types of exceptions mean the same, as in `read`.
        raise ModelError(
            f"The tokenizer of {source!r} could not be loaded: {one_line(error)} Check that "
            "config.json and the tokenizer's files are there and complete."
        ) from error
    info = TokenizerInfo(
        name_of(source),
        fingerprint(tokenizer_type(tokenizer), vocabulary_of(tokenizer)),
        config.get_text_config().vocab_size,
        eos_ids(generation, config, tokenizer),
    )
    return TransformersTokenizer(tokenizer, info)


def described(source: str) -> tuple[Any, Any]:
    if not looks_like_path(source):
        check_reachable(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    tokenizer.model_max_length = NO_LIMIT
    return config, tokenizer


def found(source: str) -> str:
    """The source with its home folder. Raises ModelError for a folder that is no model."""
    if source.startswith("~"):
        source = str(Path(os.path.expanduser(source)))
    if looks_like_path(source) and not (Path(source) / "config.json").is_file():
        path = Path(source)
        problem = "is a file" if path.exists() else "does not exist"
        problem = "has no config.json" if path.is_dir() else problem
        raise ModelError(
            f"The model folder {source!r} {problem}. Give a folder that holds config.json, "
            "a tokenizer and *.safetensors files, or the id of a model on the Hugging Face hub."
        )
    return source


def name_of(source: str) -> str:
    return Path(source).resolve().name if looks_like_path(source) else source


def read(
    source: str, device: torch.device, dtype: str, bits: str
) -> tuple[Any, Any, PackedConfig | None]:
    """The library's model, on its device, its tokenizer, and how its weights got few bits while
    they were read; None if they keep their type. Raises ModelError."""
    try:
        config, tokenizer = described(source)
        packing = packing_of(config, device, bits)
        kind = read_as(config, device, dtype, packing.bits if packing else 0)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=STORED.get(kind or "", "auto"),
            quantization_config=packing,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, report = loaded
        if report["missing_keys"]:
            # The library would continue with random numbers in their place.
            raise ValueError(f"the weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
        choose_attention(device)
        return model.eval().requires_grad_(False).to(device), tokenizer, packing
    except Warning:
        raise  # Where warnings are errors: a deprecated name makes no model unusable.
    except Exception as error:
        # The libraries raise over a dozen types for an unusable model; all mean the same.
        raise ModelError(
            f"The model {source!r} could not be loaded: {one_line(error)} "
            "Check that the files are complete and that the model is a causal language model "
            "with safetensors weights."
        ) from error


def read_as(config: Any, device: torch.device, dtype: str, few: int) -> str | None:
    """The type in which numbers are read, by its name in weight files; None for their own. On an
    older GPU "auto" is float16 instead of bfloat16, if the model's states are not too large."""
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    kind = loading_of({"dtype": str(own).removeprefix("torch.")}, str(device), dtype, few).kind
    if few and device.type == "cpu":
        return None  # what keeps its type is converted after it was read
    if (dtype, kind) == ("auto", "BF16") and before_ampere(device):
        return "BF16" if config.model_type in OVERFLOWING else "F16"
    return kind


def packing_of(config: Any, device: torch.device, bits: str) -> PackedConfig | None:
    """How weights get the bits of a setting, None if they keep their type. If numbers of few bits
    in the files are kept, the config no longer names them. Raises ValueError if they are not kept
    and cannot be rounded again."""
    few = int(bits) if bits.isdigit() else 0
    values = dict(vars(config.get_text_config()), **vars(config))
    form = form_of(values)
    if form is None:
        return PackedConfig(few, str(device)) if few else None
    if kept_form(values, str(device), bits):
        for each in (config, config.get_text_config()):
            vars(each).pop("quantization_config", None)
        few = few or KEEPS
        title = "" if few < form.bits else f"{form.title}, {form.bits} bits"
        find = partial(stored, form, values.get("num_hidden_layers"))
        return PackedConfig(few, str(device), title, find)
    if few:
        reason = f": {form.problem}" if form.problem else ""
        raise ValueError(f"its weights have few bits already, in a form of their own{reason}.")
    return None


def choose_attention(device: torch.device) -> None:
    """Switch off cuDNN's attention on CUDA devices: it plans every new shape in 40 to 80 ms, and
    while an answer grows, every forward has a new one."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def with_captured(backend: TransformersBackend, answers: int = 1) -> None:
    """Let a model on a GPU compute in captured forwards, for so many answers at once; its note
    gives the reason if it cannot."""
    info, problem = backend.info, capture(backend, answers)
    if backend.captured is not None:
        captured = backend.captured
        capture_head(backend)
        backend.info = replace(info, nodes=captured.nodes, exact=captured.exact)
        return
    note = f"Each step of {info.name} starts its operations one by one, as {problem}."
    backend.info = replace(info, note=f"{info.note} {note}".lstrip())


def with_native(backend: TransformersBackend) -> None:
    """Let the core compute the forwards of a model of few bits; its note gives the reason if it
    cannot."""
    info, reason = backend.info, attach(backend)
    note = f"Between its matrices {info.name} computes in torch, as {reason}." if reason else ""
    backend.info = replace(info, note=f"{info.note} {note}".strip(), exact=not reason)


def examine(backend: TransformersBackend, allowed: float, parallel: int) -> None:
    """Check the abilities of the model; `allowed` is as for `check`. Raises ModelError. The model
    gets folded attention if it loses no ability by that, otherwise the library's. If several
    answers are `parallel`, shared forwards are tried as well."""
    described = backend.info
    if fold(backend.model):
        with suppress(ModelError):
            examine_all(backend, allowed)
            if backend.info == described:
                changes = backend.recurrent or backend.rotary.switches
                if parallel > 1 and described.can_tree and not changes:
                    backend.joins = joins(backend, allowed)
                return
        unfold(backend.model)
        backend.info, backend.offset = described, 0
        backend.reset()
    examine_all(backend, allowed)


def examine_all(backend: TransformersBackend, allowed: float) -> None:
    """Check a model with its present attention. If the rotary factors change at some length, the
    check is repeated on both sides of it, with a few tokens whose positions are shifted there."""
    reference = backend.alone
    reach = min(backend.spans.values(), default=0)
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
        names = ", ".join(name for name, available in usable.items() if available)
        raise ModelError(f"The device {device!r} is not available here. Choose auto, {names}.")
    return torch.device(device)


def pick_bits(bits: str, device: torch.device) -> int:
    """The bits of a weight for a setting, 0 for those of its type. Raises ModelError where weights
    of few bits cannot be computed with."""
    if bits in ("auto", "off"):
        return 0
    if device.type != "cpu":
        if reason := device_problem(device):
            raise ModelError(
                f"Weights cannot have {bits} bits here: {reason}. Choose the device cpu, or leave "
                "the bits at auto."
            )
        return int(bits)
    if reason := problem():
        raise ModelError(
            f"Weights of {bits} bits need the compiled core: {reason}. Install it with `make "
            "native`, or leave the bits at auto."
        )
    return int(bits)


def describe(
    source: str,
    model: Any,
    tokenizer: Any,
    context_length: int,
    packing: PackedConfig | None,
) -> BackendInfo:
    """The description of a loaded model; its ability to verify trees is a guess."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or context_length
    context = min(int(own), context_length)
    kind, plainly, keeps = config.model_type, kinds_of(config) is None, is_recurrent(config)
    chains = keeps or counts_rows(config, context)
    note = f"{kind} models take rows for positions, so one guess per token is checked, not several."
    if keeps:
        note = f"{kind} models keep a state, so one guess per token is checked, not several."
    if plainly:
        note = f"{kind} models keep a state that cannot be rolled back, so it decodes plainly."
    parameters, weights = sizes(model)
    used, experts = experts_of(config)
    fill, template = filler(tokenizer), str(tokenizer.chat_template or "")
    return BackendInfo(
        name=name_of(source),
        kind="transformers",
        fingerprint=model_fingerprint(source, model, packing.bits if packing else 0),
        tokenizer_fingerprint=fingerprint(tokenizer_type(tokenizer), vocabulary_of(tokenizer)),
        vocabulary_size=config.vocab_size,
        eos_ids=eos_ids(model.generation_config, model.config, tokenizer),
        sampling=recommended(vars(model.generation_config)),
        context_length=context,
        can_tree=not plainly,
        leaves=1 if chains else None,
        depth=CHAIN if keeps else None,
        device=str(model.device),
        dtype=packing.title if packing else str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if str(model.device) == "cpu" else 0,
        tokenizer_type=tokenizer_type(tokenizer),
        parameters=parameters,
        memory_bytes=weights,
        note=note if plainly or chains else "",
        begin=begin_of(tokenizer),
        can_think=fill is not None and can_choose(template, fill, True, False),
        has_efforts=fill is not None and can_choose(template, fill, "low", "high"),
        marks=marks_of(template, vocabulary_of(tokenizer)),
        calls=None if fill is None else call_form(template, fill),
        experts=experts,
        used_experts=used,
    )


def experts_of(config: Any) -> tuple[int, int]:
    """How many experts of a layer a token uses, and how many there are; zeros for no mixture."""
    counts = (getattr(config, name, None) for name in EXPERT_COUNTS)
    experts = next(filter(None, counts), 0)
    used = getattr(config, "num_experts_per_tok", None) or 0
    return (int(used), int(experts)) if used < experts else (0, 0)


def begin_of(tokenizer: Any) -> str:
    token = tokenizer.bos_token_id
    added = token is not None and list(tokenizer.encode("a"))[:1] == [token]
    return str(tokenizer.bos_token) if added else ""


def counts_rows(config: Any, context_length: int) -> bool:
    """Whether some layer uses the number of a row in the cache as its position, and this matters.
    The layers of Llama 4 without rotary embeddings do, to scale attention by the position divided
    by `floor_scale`. In a chain both numbers are equal; in a tree they are not."""
    scaled = getattr(config, "attn_temperature_tuning", False)
    layers = getattr(config, "no_rope_layers", None) or [1]
    return bool(scaled) and not all(layers) and config.floor_scale <= context_length


def eos_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn, from all four sources."""
    found: set[int] = set()
    for value in (
        generation.eos_token_id,
        getattr(config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
        tokenizer.get_added_vocab().get(stop_of(str(tokenizer.chat_template or ""))),
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def model_fingerprint(source: str, model: Any, bits: int = 0) -> str:
    """Identifies the weights, by the config and the edges of each weight file, or by the hub's
    commit; and by the bits to which they were rounded, as they then write another text."""
    files = sorted(Path(source).glob("*.safetensors")) if looks_like_path(source) else []
    parts: list[str | bytes] = [model.config.to_json_string(), *([f"{bits} bits"] if bits else [])]
    if not files:
        parts += [source, str(getattr(model.config, "_commit_hash", ""))]
    for path in files:
        parts += [path.name, *edges(path)]
    return digest(parts)


def one_line(error: Exception) -> str:
    text = first_line(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."
