"""Heads in GGUF files, for models that the compiled core computes.

Such a file describes the same networks as a head's folder does, under other names
(engine/heads/eagle3.py, engine/heads/dflash.py). Heads of other kinds draft only where llama.cpp
computes the model.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.backends.quantised import can_pack
from engine.backends.transformers import TransformersBackend
from engine.errors import ModelError, first_line
from engine.heads.base import HeadInfo
from engine.heads.dflash import PLAIN, SELECTING, SLIDING, dflash_of
from engine.heads.eagle3 import SPECULATORS, head_of
from engine.heads.eagle3_head import BITS, LARGE, Eagle3Head
from engine.models.format import found_at
from engine.models.gguf_files import (
    ANCHORED,
    DSPARK,
    Tensor,
    file_fingerprint,
    heads_near,
    items_of,
    kind_of_head,
)
from engine.models.memory import FLOAT32, PACKED_SCALES, packed_size
from engine.models.packed_files import File, Foreign, rows_of, weights_of
from engine.models.torch_heads import DFLASH, NAME, dflash_head, eagle3_head, target_of, tried

UNUSED = "a head of this kind drafts only where llama.cpp computes the model, with Bits off"
TOKENS, SAMPLES = "tokenizer.ggml.tokens", 512
"""The key of the vocabulary, and the number of tokens by which two vocabularies are compared."""
EMBEDDING, FACTORS = "token_embd.weight", "rope_freqs.weight"
UNKNOWN = ("attention.scale", "attention.value_scale", "attention.clamp_kqv")
"""Values of a header that change what a layer computes, and that are not known here."""
OF_EAGLE3 = {
    "fc": "fc",
    "output_norm": "norm",
    "enc.output_norm": "input_norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "attn_norm": "midlayer.input_layernorm",
    "attn_norm_2": "midlayer.hidden_norm",
    "attn_q": "midlayer.self_attn.q_proj",
    "attn_k": "midlayer.self_attn.k_proj",
    "attn_v": "midlayer.self_attn.v_proj",
    "attn_output": "midlayer.self_attn.o_proj",
    "ffn_norm": "midlayer.post_attention_layernorm",
    "ffn_gate": "midlayer.mlp.gate_proj",
    "ffn_up": "midlayer.mlp.up_proj",
    "ffn_down": "midlayer.mlp.down_proj",
}
OF_DFLASH = {
    "fc": "fc",
    "output_norm": "norm",
    "enc.output_norm": "hidden_norm",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection.weight",
}
IN_DFLASH = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection.weight",
}
"""The names of tensors in the file and in a head's folder: of an EAGLE-3 head, and of a DFlash head
outside of its layers and in them."""
Tensors = dict[str, torch.Tensor]


def give_head(backend: TransformersBackend, model: File, choice: str) -> None:
    """Give a loaded model the head in the file that is named, or for "auto" in one beside it.
    Raises ModelError for a named head that cannot be used."""
    name = backend.info.name
    files = heads_near(model.path) if choice == "auto" else [os.path.expanduser(choice)]
    problem = ""
    for each in map(Path, files):
        try:
            head = head_in(backend, model, each)
        except Foreign as error:
            reason = str(error).rstrip(".")
            if choice != "auto":
                raise ModelError(
                    f"The head {choice!r} cannot be used with {name}: {reason}. Give the file of a "
                    "head that was made for this model, or auto."
                ) from error
            problem = problem or f"{each.name} does not fit: {reason}."
            continue
        backend.head = head
        backend.info = replace(backend.info, head=head.info)
        return
    if problem:
        unused = HeadInfo(kind_of_head(files), 0, branches=False, note=problem)
        backend.info = replace(backend.info, head=unused)


def head_in(backend: TransformersBackend, model: File, path: Path) -> Eagle3Head:
    """The head in a file. Raises Foreign."""
    if not path.is_file():
        raise Foreign(f"a GGUF file is needed there, and {found_at(path)}")
    try:
        file = File(path)
        kind = KINDS.get(file.family)
        if kind is None:
            raise Foreign(UNUSED)
        config, tensors = kind.read(file, vocabulary_of(model, file))
        made, target = (file_fingerprint(path), path), target_of(backend, "")
        if kind.name == DFLASH:
            block = dflash_of(config, tensors, target)
            divide(block.rotary, file)
            return tried(backend, dflash_head(backend, block, *made))
        head, tokens = head_of(config, tensors, target)
        divide(head.rotary, file)
        return tried(backend, eagle3_head(backend, head, tokens, *made))
    except Warning:
        raise  # Where warnings are errors: a deprecated name makes no head unusable.
    except Exception as error:
        # The libraries raise many types for a file with wrong content.
        raise Foreign(first_line(error)) from error


def vocabulary_of(model: File, head: File) -> int:
    """The number of tokens that both know. Raises Foreign for a head with another vocabulary,
    judged by a sample."""
    mine, theirs = (items_of(each.path, TOKENS) for each in (model, head))
    step = max(1, len(mine) // SAMPLES)
    if len(mine) != len(theirs) or mine[::step] != theirs[::step]:
        raise Foreign("it has another vocabulary")
    return len(mine)


def layer_of(file: File, vocabulary: int = 0) -> dict[str, Any]:
    """The config of a head's layers. Raises Foreign."""
    width, heads, size = file.attention(UNKNOWN)
    if (activation := file.own("hidden_act", "silu")) != "silu":
        raise Foreign(f"its activation is {activation}, and only silu is known")
    return {
        "hidden_size": width,
        "intermediate_size": file.own("feed_forward_length"),
        "num_hidden_layers": file.own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.own("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": file.own("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.own("rope.freq_base", 1e4),
        "max_position_embeddings": file.own("context_length"),
        "vocab_size": vocabulary,
    }


def eagle3_of(file: File, vocabulary: int) -> tuple[dict[str, Any], Tensors]:
    layer = layer_of(file, vocabulary)
    turned = {"attn_q": layer["num_attention_heads"], "attn_k": layer["num_key_value_heads"]}
    tensors: Tensors = {}
    for tensor in file.tensors:
        stem = tensor.name.removesuffix(".weight").removeprefix("blk.0.")
        if tensor.name == FACTORS:
            continue
        if stem == "d2t":
            # In the file they are tokens, in a folder the distances to them.
            known = np.memmap(tensor.path, np.int64, "r", tensor.offset, tensor.shape)
            tensors["d2t"] = torch.from_numpy(known - np.arange(len(known)))
            continue
        weights = weights_of(tensor)
        if stem in turned:
            weights = weights[rows_of(len(weights), turned[stem])]
        tensors[f"{named(OF_EAGLE3, stem)}.weight"] = weights
    config = {
        "speculators_model_type": SPECULATORS,
        "transformer_layer_config": layer,
        "norm_before_residual": file.own("norm_before_residual", False),
        "norm_before_fc": file.own("norm_before_fc", False),
        "target_hidden_size": file.own("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": items_of(file.path, "eagle3.target_layers"),
    }
    return config, tensors


def block_of(file: File, vocabulary: int) -> tuple[dict[str, Any], Tensors]:
    if f"{file.family}.{ANCHORED}" in file.values:
        raise Foreign(DSPARK)
    layer, selects = layer_of(file, vocabulary), "dflash.selector_rank" in file.values
    own = {
        "target_layer_ids": [each - 1 for each in items_of(file.path, "dflash.target_layers")],
        "mask_token_id": file.values.get("tokenizer.ggml.mask_token_id"),
        "block_size": file.own("block_size", 16),
        "input_embedding_scale": file.own("embedding_scale", 1.0),
        "output_multiplier": file.own("logit_scale", 1.0),
        "final_logit_softcapping": file.own("final_logit_softcapping", 0.0),
    }
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        own[name] = file.own(name, 0)
    config = layer | {
        "architectures": [SELECTING if selects else PLAIN],
        "is_causal": file.own("attention.causal", False),
        "dflash_config": own,
    }
    if window := file.own("attention.sliding_window", 0):
        pattern = items_of(file.path, "dflash.attention.sliding_window_pattern")
        kinds = [SLIDING if slides else "full_attention" for slides in pattern]
        config |= {"sliding_window": window, "layer_types": kinds}
    tensors: Tensors = {}
    for tensor in file.tensors:
        if tensor.name == FACTORS:
            continue
        weights = weights_of(tensor)
        block, number, name = [*tensor.name.removesuffix(".weight").split(".", 2), "", ""][:3]
        if block != "blk":
            found = named(OF_DFLASH, tensor.name.removesuffix(".weight"))
            whole = found if found.startswith("candidate_selector") else f"{found}.weight"
            tensors[whole] = weights
            continue
        if name.endswith("_conv_base"):
            weights = weights.view(2, -1, weights.shape[-1])
        tensors[f"layers.{number}.{named(IN_DFLASH, name)}"] = weights
    return config, tensors


def named(names: Mapping[str, str], stem: str) -> str:
    if stem not in names:
        raise Foreign(f"the tensor {stem} is not known")
    return names[stem]


def divide(rotary: Any, file: File) -> None:
    """Divide the rotary frequencies of a head by the factors of its file, if it has any."""
    for tensor in file.tensors:
        if tensor.name == FACTORS:
            rotary.inv_freq = rotary.inv_freq / weights_of(tensor)


class HeadKind(NamedTuple):
    name: str
    read: Callable[[File, int], tuple[dict[str, Any], Tensors]]


KINDS = {"eagle3": HeadKind(NAME, eagle3_of), "dflash": HeadKind(DFLASH, block_of)}
"""The heads that are known, by the architectures of their files."""


def unknown(path: Path) -> str:
    """Why the head in a GGUF file is not known, "" if it is."""
    try:
        file = File(path.expanduser())
        if file.family not in KINDS:
            return UNUSED
        layer_of(file)
    except Exception as error:  # as above
        return first_line(error).rstrip(".")
    return ""


def head_need(path: Path, length: int) -> tuple[int, int]:
    """The bytes of the weights of a known head, and of what it keeps for a context of so many
    tokens: a hidden state, and the keys and values of its layers."""
    file = File(path)
    layer = layer_of(file)
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    row = layer["hidden_size"] + 2 * keys * layer["num_hidden_layers"]
    return sum(map(room_of, file.tensors)), row * length * FLOAT32


def room_of(tensor: Tensor) -> int:
    shape, count = tensor.shape, math.prod(tensor.shape)
    if tensor.name != EMBEDDING and len(shape) == 2 and can_pack(*shape) and count >= LARGE:
        return packed_size(shape, BITS, *PACKED_SCALES[BITS])
    return count * FLOAT32
