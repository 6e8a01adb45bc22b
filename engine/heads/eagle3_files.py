"""Reading the files of an EAGLE-3 head: a folder with config.json and *.safetensors.

Three formats are in use. `LlamaForCausalLMEagle3` and `Eagle3LlamaForCausalLM` describe the layer
and the head in one config; that of the speculators library keeps the layer's config apart. What
they mean is the same but for two things. The first two give the chosen layers by number, so that
layer i has the hidden state i + 1 as its output; speculators gives the hidden states. And only
speculators normalises before the residual or before the joined states.

A head may know a part of the target's vocabulary alone: `d2t[i]` is what has to be added to its
token i to have the target's. A head that does not fit its target is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig

from engine.errors import ModelError, first_line
from engine.heads.eagle3 import Eagle3, Eagle3Shape, usual_layers

FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS = "eagle3"
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""What counts of a layer's config."""
IGNORED = {"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that drafting does not need: which tokens the head knows, the other way round, and parts
of the target that some trainers store."""
TARGET_KEY = "strata_target"
"""In a config of ours, the weights that a head was trained for."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a head has to fit: `hidden` is the width of the target's hidden states, `weights` names
    its weight files ("" where there are none on this machine)."""

    hidden: int
    layers: int
    vocabulary: int
    weights: str = ""


def read_head(folder: Path, target: Target) -> tuple[Eagle3, NDArray[np.int64] | None]:
    """The head in a folder, in the dtype of its files, and the target's tokens that its logits are
    of, in rising order; None where these are all. Raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError("it has no *.safetensors file")
        tensors = {name: each for file in files for name, each in load_file(file).items()}
        weights = {renamed(name): each for name, each in tensors.items() if name not in IGNORED}
        offsets = weights.pop("d2t", None)
        shape = shape_of(config, weights, target)
        tokens = None
        if offsets is not None or shape.output not in (0, target.vocabulary):
            tokens, order = known_tokens(offsets, shape, target)
            weights["lm_head.weight"] = weights["lm_head.weight"][order]
        with torch.device("meta"):
            head = Eagle3(shape)
        fit(head, weights)
        head.rotary = type(head.rotary)(shape.layer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(
            f"The EAGLE-3 head in {str(folder)!r} cannot be used: {first_line(error)}. Choose a "
            "head that was trained for this model, or load the model without one."
        ) from error
    return head.eval().requires_grad_(False), tokens


def renamed(name: str) -> str:
    """A tensor's name as the module has it."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def shape_of(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: Target
) -> Eagle3Shape:
    """What a config describes. Raises ValueError where it does not fit the target."""
    layer, states, before_residual, before_fc = described(config)
    known = {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
    own = LlamaConfig(num_hidden_layers=1, **known)
    width = int(config.get("target_hidden_size") or own.hidden_size)
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"it has {layer['num_hidden_layers']} layers, and one is supported")
    if width != target.hidden:
        raise ValueError(
            f"it reads hidden states of {width:,} numbers, and those of the model have "
            f"{target.hidden:,}"
        )
    if own.vocab_size != target.vocabulary:
        raise ValueError(
            f"it was made for a vocabulary of {own.vocab_size:,} tokens, and the model has "
            f"{target.vocabulary:,}"
        )
    for_weights = config.get(TARGET_KEY)
    if for_weights and target.weights and for_weights != target.weights:
        raise ValueError("it was trained for other weights of this model")
    states = states or usual_layers(target.layers)
    if len(states) != 3 or not all(0 <= each <= target.layers for each in states):
        raise ValueError(
            f"it reads the hidden states {states}, and the model has three of 0 to {target.layers}"
        )
    output, embedding = weights.get("lm_head.weight"), "embed_tokens.weight" in weights
    if own.hidden_size != target.hidden and (output is None or not embedding):
        raise ValueError("it is of another width than the model and has no embedding of its own")
    return Eagle3Shape(
        own,
        tuple(states),
        width,
        0 if output is None else len(output),
        embedding,
        before_residual,
        before_fc,
    )


def described(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[int, ...], bool, bool]:
    """The layer's config, the hidden states to read (none: the usual ones), and whether they are
    normalised before the residual and before they are joined."""
    if config.get("speculators_model_type") == SPECULATORS:
        if "norm_before_residual" not in config:
            # The library's own default and those of the programs that run such heads disagree.
            raise ValueError("its config has no norm_before_residual")
        states = config.get("eagle_aux_hidden_state_layer_ids") or ()
        layer = config["transformer_layer_config"]
    else:
        names = config.get("architectures") or ["none"]
        if names[0] not in FLAT:
            raise ValueError(
                f"its architecture is {names[0]}, and {', '.join(FLAT)} and those of the "
                "speculators library are supported"
            )
        own = config.get("eagle_config") or {}
        if not own.get("use_aux_hidden_state", True):
            raise ValueError("it reads one hidden state, and three are supported")
        states = [each + 1 for each in own.get("eagle_aux_hidden_state_layer_ids") or ()]
        layer = config
    before = (bool(config.get(name)) for name in ("norm_before_residual", "norm_before_fc"))
    return layer, tuple(states), *before


def known_tokens(
    offsets: torch.Tensor | None, shape: Eagle3Shape, target: Target
) -> tuple[NDArray[np.int64], torch.Tensor]:
    """The target's tokens that a head knows, in rising order, and the rows of its output matrix in
    that order. Raises ValueError."""
    if offsets is None or len(offsets) != shape.output:
        there = "no d2t" if offsets is None else f"a d2t of {len(offsets):,}"
        raise ValueError(f"it knows {shape.output:,} tokens and has {there} to say which")
    tokens, order = (torch.arange(shape.output) + offsets.long()).sort()
    if int(tokens[0]) < 0 or int(tokens[-1]) >= target.vocabulary:
        raise ValueError("its d2t names tokens that the model does not have")
    if bool((tokens.diff() == 0).any()):
        raise ValueError("its d2t names a token twice")
    return tokens.numpy(), order


def fit(head: Eagle3, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights into a head that has none. Raises ValueError where they are not its own."""
    wanted = {name: tuple(each.shape) for name, each in head.state_dict().items()}
    found = {name: tuple(each.shape) for name, each in weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"its tensor {name} has the shape {found.get(name, 'of none')}, expected "
                f"{wanted.get(name, 'was none')}"
            )
    head.load_state_dict(weights, assign=True)
